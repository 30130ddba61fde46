"""
Whole encoders in inference: dense and under a sparse mask, in float32, bfloat16 and int8, against length.

    python -m benchmarks.encoders [--models MiniLM BERT-base] [--weights DIR_OR_HUB_ID] [--text FILE] [--resume]

Dense models run PyTorch's fused attention without a mask, sparse ones what `sparse_auto` chooses; `int8` is
`sparsebert.quantize`, the same for both. The headline is the best sparse system against the best dense one. Beside the
speed stands what a precision costs: the cosine of its hidden states with those of the same model in float32.

Letters: B batch, n tokens of a sequence, D hidden size.
"""

import copy
import json
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

import sparsebert
from sparsebert import attach, extend_positions

from ._masks import HELP, build_mask
from ._measure import WrongResult, cpu_seconds, interleaved, process_seconds, speed_up, summary
from ._report import (
    FORWARD,
    STYLES,
    argument_parser,
    hardware_line,
    milliseconds,
    prepare,
    print_table,
    ratio_text,
    write_json,
)
from .padding import MODELS, VOCABULARY


PRECISIONS = ("float32", "bfloat16", "int8")
KINDS = ("dense", "sparse")
# Tokens of a sequence on which the sparse model is checked against float64.
CHECKED = 128


def make_stock(name, options):
    """A stock encoder with positions for the longest input: the weights of `--weights`, or random ones."""
    longest = max(options.lengths)
    if name == options.weights:
        model = AutoModel.from_pretrained(name, attn_implementation="sdpa")
        if model.config.max_position_embeddings < longest:
            extend_positions(model, longest)
        return model.eval()
    sizes = MODELS[name] | ({"num_hidden_layers": 1} if options.quick else {})
    config = BertConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=longest, attn_implementation="sdpa")
    return BertModel(config).eval()


def make_tokens(name, config, batch, length, options):
    """Input ids `(B, n)`: of a text, or random ones."""
    if name != options.weights or options.text is None:
        return torch.randint(5, config.vocab_size, (batch, length))
    words = AutoTokenizer.from_pretrained(name)
    text = words(options.text.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)["input_ids"]
    inner, ids = length - 2, []
    for row in range(batch):
        start = row * inner % max(len(text) - inner, 1)
        ids.append([words.cls_token_id, *text[start : start + inner], words.sep_token_id])
    if len(ids[0]) < length:
        raise ValueError(f"{options.text} has {len(text)} tokens, fewer than the {inner} of one input")
    return torch.tensor(ids)


def in_precision(model, precision):
    """A copy of a model in one of `PRECISIONS`."""
    model = copy.deepcopy(model)
    if precision == "bfloat16":
        return model.to(torch.bfloat16)
    return sparsebert.quantize(model) if precision == "int8" else model


def make_models(name, length, options):
    """`"KIND PRECISION"` to model, all with the same weights."""
    stock = make_stock(name, options)
    mask = build_mask(options.mask, length, stock.config.num_attention_heads, options.seed)
    kinds = {"dense": stock, "sparse": attach(copy.deepcopy(stock), mask, allow_empty_rows=True)}
    return {f"{kind} {precision}": in_precision(kinds[kind], precision) for precision in PRECISIONS for kind in KINDS}


def hidden_states(model, ids):
    """The last hidden states `(B, n, D)` of a model, float32."""
    with torch.no_grad():
        return model(ids).last_hidden_state.float()


def check(model, ids):
    """
    The sparse model is that of the reference in float64.

    Raises:
        WrongResult: If it is not.
    """
    ids = ids[:1, :CHECKED]
    exact = copy.deepcopy(model).double()
    exact.set_attn_implementation("sparse_eager")
    with torch.no_grad():
        want = exact(ids).last_hidden_state
    error = (hidden_states(model, ids) - want).abs().max().item()
    if not error <= 1e-3:
        raise WrongResult(f"the sparse model is off by {error:.2e}")


def measured(name, length, options):
    """The record of one model and length."""
    torch.manual_seed(options.seed)
    batch = max(1, options.tokens // length)
    models = make_models(name, length, options)
    mask = models["sparse float32"].sparse_attention.mask
    ids = make_tokens(name, models["dense float32"].config, batch, length, options)
    check(models["sparse float32"], ids)
    states = {system: hidden_states(model, ids[:1]) for system, model in models.items()}
    functions = {system: lambda model=model: hidden_states(model, ids) for system, model in models.items()}
    timer = process_seconds if options.cpu_time else cpu_seconds
    times = interleaved(functions, timer, options.seconds, options.rounds)
    systems = {}
    for system, each in times.items():
        same = states[f"{system.split()[0]} float32"]
        systems[system] = summary(each) | {
            "cosine": torch.cosine_similarity(states[system], same, dim=-1).mean().item(),
            "tokens_per_second": batch * length / systems_median(each),
        }
    best = {kind: min(of_kind(systems, kind), key=lambda s: systems[s]["median_ms"]) for kind in KINDS}
    ratios = {
        precision: speed_up(times[f"dense {precision}"], times[f"sparse {precision}"]) for precision in PRECISIONS
    }
    ratios["best"] = speed_up(times[best["dense"]], times[best["sparse"]])
    print(f"{name}, {length} tokens: done", flush=True)
    return {
        "model": name,
        "n": length,
        "batch": batch,
        "mask": options.mask,
        "density": mask.density_at(length),
        "timer": timer.__name__,
        "systems": systems,
        "best": best,
        "speed_up": ratios,
    }


def systems_median(seconds):
    """The median of some seconds, as that of [`summary`]."""
    return summary(seconds)["median_ms"] / 1e3


def of_kind(systems, kind):
    """The systems that are dense, or sparse."""
    return [system for system in systems if system.startswith(kind)]


def report(cells, machine):
    """Print the tables of some cells."""
    names = list(cells[0]["systems"])
    head = ("model", "n", "removed")

    def row(cell, texts):
        return cell["model"], cell["n"], f"{100 * (1 - cell['density']):.1f} %", *texts

    rows = [row(cell, [milliseconds(cell["systems"][name]) for name in names]) for cell in cells]
    print_table("Milliseconds, median (quartiles)", (*head, *names), rows)
    rows = [row(cell, [f"{cell['systems'][name]['tokens_per_second']:,.0f}" for name in names]) for cell in cells]
    print_table("Tokens per second", (*head, *names), rows)
    rows = [
        row(cell, [*(ratio_text(cell["speed_up"][key]) for key in (*PRECISIONS, "best")), *cell["best"].values()])
        for cell in cells
    ]
    header = (*head, *PRECISIONS, "best against best", "best dense", "best sparse")
    print_table("Sparse against dense, ratio of medians [95 % interval]", header, rows)
    low = [name for name in names if not name.endswith("float32")]
    rows = [row(cell, [f"{cell['systems'][name]['cosine']:.5f}" for name in low]) for cell in cells]
    print_table("Cosine of hidden states with those in float32", (*head, *low), rows)
    slower = [cell for cell in cells if any(entry["high"] < 1 for entry in cell["speed_up"].values())]
    print(f"\nsparse is slower, beyond the interval, in {len(slower)} of {len(cells)}; {hardware_line(machine)}")


def plot(options, result):
    """Write `options.output` + `.png`: tokens per second against length, a panel per model."""
    if find_spec("matplotlib") is None:
        print("no plot: install sparsebert[viz]")
        return
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(cell["model"] for cell in result["cells"]))
    figure = Figure(figsize=(4.6 * len(names) + 0.4, 4.6), layout="constrained", dpi=150)
    handles = {}
    for axis, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        cells = sorted((cell for cell in result["cells"] if cell["model"] == name), key=lambda cell: cell["n"])
        lengths = [cell["n"] for cell in cells]
        for (color, marker), precision in zip(STYLES, PRECISIONS, strict=False):
            for kind in KINDS:
                system = f"{kind} {precision}"
                rates = [cell["systems"][system]["tokens_per_second"] for cell in cells]
                line = {"ls": "-", "mfc": color} if kind == "sparse" else {"ls": "--", "mfc": "white"}
                (handles[system],) = axis.plot(lengths, rates, color=color, marker=marker, ms=5, lw=1.4, **line)
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, labels=list(map(str, lengths)))
        axis.set_xticks([], minor=True)
        axis.set_ylim(bottom=0)
        axis.set_title(Path(name).name)
        axis.set_xlabel("n, tokens of a sequence")
        axis.grid(alpha=0.3)
    figure.axes[0].set_ylabel("tokens per second")
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize=8)
    removed = 100 * (1 - result["cells"][0]["density"])
    figure.suptitle(
        f"Inference, {removed:.0f} % of the attention removed (solid) or none (dashed)\n"
        f"{hardware_line(result['hardware'])}",
        fontsize=9,
    )
    figure.savefig(options.output.with_name(options.output.name + ".png"))


def command_line():
    parser = argument_parser("benchmarks.encoders", "Encoders, dense and sparse, in three precisions.", (FORWARD,))
    parser.add_argument("--models", nargs="*", choices=MODELS, help="sizes with random weights; default: all")
    parser.add_argument("--weights", metavar="DIR_OR_HUB_ID", help="a stock encoder to time as well")
    parser.add_argument("--text", type=Path, metavar="FILE", help="text for --weights; default: random tokens")
    parser.add_argument("--mask", default="dam_s", help=HELP)
    parser.add_argument("--resume", action="store_true", help="keep the cells that the output holds already")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time, on a machine that others use too")
    parser.set_defaults(device="cpu", seconds=30.0, rounds=5)
    return parser


def run(arguments=None):
    options = prepare(command_line(), arguments)
    if options.quick:
        options.lengths, options.tokens = options.lengths or (32, 64), options.tokens or 64
    options.lengths = options.lengths or (512, 1024, 2048, 4096)
    options.tokens = options.tokens or 4096
    names = list(MODELS) if options.models is None and not options.weights else options.models or []
    names += [options.weights] if options.weights else []
    path = options.output.with_name(options.output.name + ".json")
    cells = json.loads(path.read_text())["cells"] if options.resume and path.is_file() else []
    done = {(cell["model"], cell["n"], cell["mask"]) for cell in cells}
    for name in names:
        for length in options.lengths:
            if (name, length, options.mask) not in done:
                cells.append(measured(name, length, options))
                write_json(options, cells, tokens=options.tokens)
    result = json.loads(path.read_text())
    report(cells, result["hardware"])
    plot(options, result)


if __name__ == "__main__":
    run()
