"""
What a mask search costs: a training step of BERT that learns its mask, against stock BERT without one.

    python -m benchmarks.search

Time and peak memory of forward and backward of the encoder, against dense `eager` and dense `sdpa`. Letters: n length.
"""

import copy

import torch
from transformers import BertConfig, BertModel

from sparsebert import SparseBertConfig, SparseBertModel
from sparsebert.learning.searches import SEARCHES

from .shared.measure import (
    check_close,
    cpu_peak_bytes,
    cpu_seconds,
    cuda_wall_seconds,
    interleaved,
    peak_bytes,
    process_seconds,
    speed_up,
    summary,
)
from .shared.model_timing import autocast
from .shared.report import (
    DROPOUT,
    TRAINING,
    argument_parser,
    hardware_line,
    make_table,
    prepare,
    write_json,
)


DENSE = ("eager", "sdpa")
ORACLE = "sparse_eager"
OURS = ("sparse_auto", "sparse_sdpa", ORACLE)
HEAD_SIZE = 64


def make_models(search, length, dropout, options):
    """System to model, all with the same weights; ours share theirs."""
    fields = {
        "hidden_size": HEAD_SIZE * options.heads,
        "intermediate_size": 4 * HEAD_SIZE * options.heads,
        "num_attention_heads": options.heads,
        "num_hidden_layers": options.layers,
        "max_position_embeddings": length,
        "vocab_size": 100,
        "attention_probs_dropout_prob": dropout,
        "hidden_dropout_prob": dropout,
    }
    models = {name: BertModel(BertConfig(**fields, attn_implementation=name), False) for name in DENSE}
    for name in options.systems:
        config = SparseBertConfig(**fields, search=search, mask_length=length, attn_implementation=name)
        models[name] = SparseBertModel(config, add_pooling_layer=False)
    first = models[options.systems[0]]
    for model in models.values():
        model.load_state_dict(first.state_dict(), strict=False)
        model.to(options.device).train()
    return models


def results_of(model, ids, padding, options):
    """Output and gradient of the mask logits in training mode without dropout, with the same draw for all."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    torch.manual_seed(options.seed)
    exact = next(model.parameters()).dtype == torch.float64
    with torch.autocast(options.device, enabled=False) if exact else autocast(options):
        output = model(ids, attention_mask=padding).last_hidden_state
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(options.seed)).to(output)
    logits = model.sparse_attention.mask_logits
    (grad,) = torch.autograd.grad(output, logits, weights)
    return {"output": output.detach(), "gradient of the mask": grad}


def check(models, search, ids, padding, options):
    """The gate: ours against `sparse_eager` in float64, and no worse than it in the same dtype. Errors by system."""
    plain_model = copy.deepcopy(models[options.systems[0]])
    plain_model.set_attn_implementation(ORACLE)
    exact = copy.deepcopy(plain_model).double()
    truth, plain = (results_of(model, ids, padding, options) for model in (exact, plain_model))
    errors = {}
    for name in options.systems:
        results = results_of(copy.deepcopy(models[name]), ids, padding, options)
        errors[name] = check_close(f"{name} ({search}, {ids.shape[1]} tokens)", results, truth, plain)
    return errors


def cell(search, length, phase, options):
    """One row of the report."""
    batch = max(1, options.tokens // length)
    dropout = options.dropout if phase == DROPOUT else 0.0
    torch.manual_seed(options.seed)
    models = make_models(search, length, dropout, options)
    ids = torch.randint(5, 100, (batch, length), device=options.device)
    padding = torch.ones_like(ids)
    if options.padded:
        padding[:, length - length // 8 :] = 0
    errors = check(models, search, ids[:2], padding[:2], options)
    grad = torch.randn(batch, length, HEAD_SIZE * options.heads, device=options.device)

    def step(model):
        with autocast(options):
            output = model(ids, attention_mask=padding).last_hidden_state
        output.backward(grad.to(output.dtype))
        model.zero_grad()

    functions = {name: lambda model=model: step(model) for name, model in models.items()}
    on_gpu = options.device == "cuda"
    timer = process_seconds if options.cpu_time else cuda_wall_seconds if on_gpu else cpu_seconds
    times = interleaved(functions, timer, options.seconds, options.rounds)
    systems = {name: summary(values) for name, values in times.items()}
    for name, function in functions.items():
        systems[name] |= {"peak_bytes": (peak_bytes if on_gpu else cpu_peak_bytes)(function)}
        systems[name] |= {"error": errors[name]} if name in errors else {}
    print(f"{search}, {length} tokens, {phase}: done", flush=True)
    return {
        "search": search,
        "n": length,
        "batch": batch,
        "dtype": str(options.dtype).removeprefix("torch."),
        "phase": phase,
        "systems": systems,
        "speed_up": {
            dense: {name: speed_up(times[dense], times[name]) for name in options.systems} for dense in DENSE
        },
    }


def cost(entry):
    """A [`speed_up`] as text, the other way round: what ours takes, for 1 of dense attention."""
    return f"{1 / entry['ratio']:.2f} [{1 / entry['high']:.2f}, {1 / entry['low']:.2f}]"


def table(report, system="sparse_auto"):
    """Time and memory of a step of a search, for 1 of stock BERT."""
    rows = []
    for entry in report["cells"]:
        peak = {name: values["peak_bytes"] for name, values in entry["systems"].items()}
        time = [cost(entry["speed_up"][dense][system]) for dense in DENSE[::-1]]
        memory = [f"{peak[system] / peak[dense]:.2f}" for dense in DENSE[::-1]]
        dropout = f"{report['dropout']}" if entry["phase"] == DROPOUT else "0"
        rows.append([f"`{entry['search']}`", entry["n"], dropout, *time, *memory])
    against = [f"{what} / `{dense}`" for what in ("time", "memory") for dense in DENSE[::-1]]
    header = ("search", "n", "dropout", *against)
    return make_table(f"A step of a search, {system}", header, rows)


def command_line():
    parser = argument_parser("benchmarks.search", "A training step of a mask search.", (DROPOUT, TRAINING))
    parser.add_argument("--searches", nargs="+", choices=SEARCHES, default=("dam_s", "dam_u", "soft", "dam_b"))
    parser.add_argument("--systems", nargs="+", choices=OURS, default=("sparse_auto", ORACLE))
    parser.add_argument("--heads", type=int, default=4, help=f"number of heads of size {HEAD_SIZE}; BERT-base has 12")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of the process, for shared machines")
    parser.add_argument("--padded", action="store_true", help="the last eighth of every sequence is padding")
    return parser


def run(arguments=None):
    options = prepare(command_line(), arguments)
    if options.quick:
        options.lengths, options.tokens = options.lengths or (64,), options.tokens or 128
        options.heads, options.layers = 2, 1
    options.lengths = options.lengths or (128, 512)
    options.tokens = options.tokens or (16384 if options.device == "cuda" else 4096)
    cells = []
    for length in options.lengths:
        for search in options.searches:
            for phase in options.phases:
                cells.append(cell(search, length, phase, options))
                # Already now: a long run may be stopped.
                fields = {
                    name: getattr(options, name)
                    for name in ("tokens", "dropout", "heads", "layers", "padded", "cpu_time")
                }
                report = write_json(options, cells, **fields)
    print(f"\n{hardware_line(report['hardware'])}; commit {report['commit']}\n{report['command']}")
    for system in options.systems:
        print(f"\n{table(report, system).markdown()}", end="")


if __name__ == "__main__":
    run()
