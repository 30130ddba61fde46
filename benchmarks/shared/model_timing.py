"""
Stock BERT against the same weights with a sparse mask: what `layer.py` and `model.py` share.

Letters: B batch, H heads, n length.
"""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import BertConfig

from sparsebert import SparseBertConfig
from sparsebert.attention.choosing.choice import ATTENTION_NAMES

from .masks_by_name import HELP, build_mask, kept
from .measure import check_close, cpu_seconds, cuda_wall_seconds, interleaved, speed_up, summary
from .report import (
    DROPOUT,
    FORWARD,
    argument_parser,
    hardware_line,
    prepare,
    print_table,
    ratio_text,
    write_json,
)


OURS = "sparse_auto"
# Stock BERT without a mask by its own attention implementations, with one, and ours.
UNMASKED = ("sdpa", "eager")
SYSTEMS = (*UNMASKED, "sdpa_masked", OURS)
BEST_DENSE = "best dense"


@dataclass
class Subject:
    """
    What is timed: models by system, all with the same weights, and `keep`, what the mask keeps, bool `(1, H, n, n)`.

    `sample`, `(model, name, keep) -> (output, tensor whose gradient is checked)`, is for the gate, in evaluation mode;
    `forward` and `step` with the same arguments are timed. `keep` is there the mask for a stock model, bool or
    additive, or `None`. `auto` has the backend that `sparse_auto` runs, by phase.
    """

    models: dict
    keep: torch.Tensor
    sample: Callable
    forward: Callable
    step: Callable
    auto: dict

    def call(self, function, name):
        """`function` on the model of a system."""
        return function(self.models[name], name, self.keep if name == "sdpa_masked" else None)


def autocast(options):
    """Mixed precision unless the dtype is float32."""
    return torch.autocast(options.device, options.dtype, enabled=options.dtype != torch.float32)


def make_models(stock_class, sparse_class, mask_name, length, options, **fields):
    """Models of BERT-base's width with the same random weights."""
    fields |= {"attention_probs_dropout_prob": options.dropout, "hidden_dropout_prob": options.dropout}
    fields |= {"max_position_embeddings": length, "num_attention_heads": options.heads}
    fields |= {"hidden_size": 64 * options.heads, "intermediate_size": 256 * options.heads}
    mask = build_mask(mask_name, length, options.heads, options.seed)
    stock = stock_class(BertConfig(**fields, attn_implementation="sdpa"))
    config = SparseBertConfig(**fields, frozen=True, mask_length=length, allow_empty_rows=True)
    sparse = sparse_class(config)
    sparse.set_mask(mask)
    sparse.load_state_dict(stock.state_dict())
    stock.to(options.device)
    if options.backend != OURS:
        sparse.set_attn_implementation(options.backend)
    models = {options.backend: sparse.to(options.device)}
    for name in SYSTEMS:
        if name != OURS:
            shared = {id(parameter): parameter for parameter in stock.parameters()}
            models[name] = copy.deepcopy(stock, shared)
            models[name].set_attn_implementation("eager" if name == "eager" else "sdpa")
    return models, kept(mask, length).to(options.device)


def check(subject, label, options):
    """The gate: outputs and gradients of every system, in evaluation, against the stock model in float64."""

    def results(model, name, keep):
        exact = next(model.parameters()).dtype == torch.float64
        with contextlib.nullcontext() if exact else autocast(options):
            output, leaf = subject.sample(model, name, keep)
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(options.seed)).to(output)
        (grad,) = torch.autograd.grad(output, leaf, weights)
        return {"output": output.detach(), "gradient": grad}

    for model in subject.models.values():
        model.eval()
    plain_model = subject.models["eager"]
    exact = copy.deepcopy(plain_model).double()
    errors = {}
    for masked in (False, True):
        names = [name for name in options.systems if (name not in UNMASKED) == masked]
        if not names:
            continue
        additive = None
        if masked:
            additive = torch.zeros(subject.keep.shape, device=subject.keep.device).masked_fill_(~subject.keep, -1e9)
        truth = results(exact, "eager", additive if additive is None else additive.double())
        plain = results(plain_model, "eager", additive)
        for name in names:
            errors[name] = check_close(f"{name} ({label})", subject.call(results, name), truth, plain)
    return errors


def measured(subject, label, options, **fields):
    """Gate, then time every system in turns: a record per phase."""
    errors = check(subject, label, options)
    records = []
    for phase in options.phases:
        training = phase != FORWARD

        def run(model, name, keep, training=training):
            with torch.set_grad_enabled(training), autocast(options):
                (subject.step if training else subject.forward)(model, name, keep)

        for model in subject.models.values():
            model.train(training)
        functions = {name: lambda name=name, run=run: subject.call(run, name) for name in options.systems}
        timer = cuda_wall_seconds if options.device == "cuda" else cpu_seconds
        times = interleaved(functions, timer, options.seconds, options.rounds)
        systems = {name: summary(times[name]) | {"error": errors[name]} for name in options.systems}
        for entry in systems.values():
            entry["tokens_per_second"] = fields["batch"] * fields["n"] / entry["median_ms"] * 1e3
        best = min(set(UNMASKED) & set(systems), key=lambda name: systems[name]["median_ms"], default=None)
        baselines = {name: times[name] for name in options.systems if name != options.backend}
        if best:
            baselines[BEST_DENSE] = times[best]
        ratios = {name: speed_up(values, times[options.backend]) for name, values in baselines.items()}
        print(f"{label}, {phase}: done", flush=True)
        records.append(
            {
                **fields,
                "dtype": str(options.dtype).removeprefix("torch."),
                "phase": phase,
                "systems": systems,
                "best_dense": best,
                "auto": subject.auto[phase],
                "speed_up": ratios,
            }
        )
    return records


def make_parser(name, description, systems=SYSTEMS):
    """The parser for [`main`]; `systems` is the default of `--systems`."""
    parser = argument_parser(name, description, (FORWARD, DROPOUT))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=systems)
    parser.add_argument("--masks", nargs="+", default=["dam_s"], help=HELP)
    parser.add_argument("--backend", choices=ATTENTION_NAMES, default=OURS, help="what runs the sparse mask")
    parser.add_argument("--heads", type=int, default=12, help="number of heads of size 64; BERT-base has 12")
    return parser


def main(arguments, parser, make_subject, what, tokens=4096):
    """The whole of a benchmark."""
    options = prepare(parser, arguments)
    if options.quick:
        options.lengths, options.tokens, options.heads = options.lengths or (64,), options.tokens or 128, 2
    options.lengths = options.lengths or (128, 512, 1024)
    options.tokens = options.tokens or (16384 if options.device == "cuda" else tokens)
    options.systems = (*(name for name in options.systems if name != OURS), options.backend)
    cells = []
    for mask_name in options.masks:
        for length in options.lengths:
            batch = max(1, options.tokens // length)
            torch.manual_seed(options.seed)
            subject = make_subject(mask_name, length, batch, options)
            density = subject.keep.float().mean().item()
            fields = {"mask": mask_name, "density": density, "n": length, "batch": batch, "heads": options.heads}
            cells += measured(subject, f"{mask_name}, {length} tokens", options, **fields)
            # Already now: a long run may be stopped.
            report = write_json(options, cells, tokens=options.tokens, dropout=options.dropout)
    print(f"\n{hardware_line(report['hardware'])}; commit {report['commit']}\n{report['command']}")

    def row(cell, texts):
        return cell["mask"], f"{100 * cell['density']:.1f} %", cell["n"], cell["dtype"], cell["phase"], *texts

    head = ("mask", "density", "n", "dtype", "phase")
    rows = [row(cell, [f"{entry['tokens_per_second']:,.0f}" for entry in cell["systems"].values()]) for cell in cells]
    print_table(f"{what}: tokens per second, {options.tokens} tokens", (*head, *options.systems), rows)
    rows = [row(cell, [*map(ratio_text, cell["speed_up"].values()), cell["auto"]]) for cell in cells]
    header = (*head, *(f"vs {name}" for name in cells[0]["speed_up"]), "it runs")
    print_table(f"Speed-up of {options.backend}, ratio of medians [95 % interval]", header, rows)
