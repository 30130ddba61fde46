"""
What only the lease measures (see README.md beside this file), with masks that were learned for MiniLM:

    python -m benchmarks.gpu.lease finite --output PATH    # gradients where a kernel of PyTorch is known to give NaN
    python -m benchmarks.gpu.lease models --output PATH    # whole models, dense and sparse, in turns
    python -m benchmarks.gpu.lease auto --output PATH      # what sparse_auto chooses, and whether it was the fastest

PATH.json is written after every cell. `--once` runs every model once, to fill the caches of compilers, and writes
nothing. What fails is written down in its place, and does not stop the next cell.

Letters: B batch, H heads, n length.
"""

import argparse
import contextlib
import copy
import functools
import gc
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import BertConfig, BertForSequenceClassification

from sparsebert import SparseMask, attach, sparse_dot_product_attention
from sparsebert.attention.backends import BACKENDS
from sparsebert.attention.capabilities import Request
from sparsebert.attention.choosing.choice import automatic
from sparsebert.files import replace_files
from sparsebert.masks.tiles import mask_tile_shares

from ..padding import MODELS, draw_lengths
from ..shared.masks_by_name import FOLDER, build_mask
from ..shared.measure import cpu_seconds, cuda_wall_seconds, interleaved, speed_up, summary
from ..shared.systems import chosen_kernel


MASKS = {"dam_s": "minilm_dam_s_512", "dam_b": "minilm_dam_b64_512"}
PHASES = INFERENCE, PADDED, DROPOUT, TRAINING = (
    *("inference", "padded inference"),
    *("fine-tuning with dropout", "fine-tuning"),
)
LENGTHS = (512, 1024, 2048, 4096)
# Up to here the bias of the mask is small enough to time `sparse_sdpa` beside the others: 0.8 GB for each layer.
BIAS_LENGTH = 2048
# Size, n, phase and mask of the questions to `sparse_auto`, the most important first. A self-check takes about 20 s.
QUESTIONS = (
    ("BERT-base", 512, INFERENCE, "dam_s"),
    ("BERT-base", 512, INFERENCE, "dam_b"),
    ("BERT-base", 512, DROPOUT, "dam_b"),
    ("BERT-base", 1024, PADDED, "dam_s"),
    ("BERT-base", 1024, DROPOUT, "dam_s"),
    ("MiniLM", 512, INFERENCE, "dam_b"),
    ("BERT-base", 2048, INFERENCE, "dam_b"),
    ("BERT-base", 512, TRAINING, "dam_b"),
    ("MiniLM", 512, DROPOUT, "dam_b"),
    ("MiniLM", 512, PADDED, "dam_b"),
    ("BERT-base", 256, PADDED, "dam_s"),
)
TINY = {"tiny": {"hidden_size": 48, "num_attention_heads": 12, "num_hidden_layers": 2, "intermediate_size": 48}}


def described(error):
    """An exception in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[-600:]}"


class Report:
    """Cells, written after each; `path` is `None` to write nothing."""

    def __init__(self, path):
        self.path, self.cells = path, []

    def add(self, cell):
        self.cells.append(cell)
        print(json.dumps(cell), flush=True)
        if self.path is not None:
            versions = {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
            replace_files({self.path: (json.dumps(versions | {"cells": self.cells}, indent=1) + "\n").encode()})


@contextlib.contextmanager
def kept_error(cell, name, device):
    """An exception inside the block goes to `cell["errors"]`; one that leaves the GPU unusable ends the program."""
    try:
        yield
    except Exception as error:
        cell.setdefault("errors", {})[name] = described(error)
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


@functools.cache
def learned_masks(layers):
    """Both masks by name, and `dam_s` with a rest, their 6 layers spread over as many as the model has."""
    loaded = {name: SparseMask.from_pretrained(FOLDER / folder) for name, folder in MASKS.items()}
    loaded["rest"] = loaded["dam_s"].replace(rest="mean")
    return {
        name: mask.replace(keep=mask.keep[torch.arange(layers) * mask.num_layers // layers])
        for name, mask in loaded.items()
    }


def finite(options, report):
    """
    Gradients of padded sequences and of rows without a key, at lengths of which cuDNN's backward is known to give NaN
    (https://github.com/pytorch/pytorch/issues/196678): whether they are finite, and their greatest difference from
    the reference in float32, relative to its greatest value.
    """
    for n in (64,) if options.tiny else (192, 320, 64, 576):
        torch.manual_seed(n)
        heads = 12
        drawn = [torch.randn(2, n, heads, 64, device=options.device, dtype=options.dtype) for _ in range(4)]
        query, key, value, grad = (tensor.transpose(1, 2) for tensor in drawn)
        padding = torch.ones(2, n, dtype=torch.bool, device=options.device)
        padding[1, n // 2 :] = False
        table = torch.rand(heads, n, n) < 0.3
        table[:, ::3] = False
        empty = SparseMask(table, n)
        window = build_mask("window:16", n, heads)
        cases = {"padded": (window, padding), "rows without a key": (empty, None), "both": (empty, padding)}
        cases["rest"] = (empty.replace(rest="mean"), padding)
        for case, (mask, real) in cases.items():
            weights = grad if real is None else grad * real[:, None, :, None]

            def gradients(backend, dtype, mask=mask, real=real, weights=weights, inputs=(query, key, value)):
                leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
                output = sparse_dot_product_attention(*leaves, mask, real, backend=backend)
                return [output.detach(), *torch.autograd.grad(output, leaves, weights.to(dtype))]

            truth = gradients("sparse_eager", torch.float32)
            for backend in options.backends:
                cell = {"n": n, "case": case, "backend": backend}
                with kept_error(cell, backend, options.device):
                    found = dict(
                        zip(("output", "query", "key", "value"), gradients(backend, options.dtype), strict=True)
                    )
                    cell["finite"] = {name: bool(tensor.isfinite().all()) for name, tensor in found.items()}
                    cell["difference"] = {
                        name: ((tensor.float() - want).abs().max() / want.abs().max()).item()
                        for (name, tensor), want in zip(found.items(), truth, strict=True)
                    }
                report.add(cell)
        # PyTorch alone: a bias that removes the padded keys, and the whole row of padded queries.
        bias = torch.zeros(2, 1, n, n, device=options.device, dtype=options.dtype)
        bias = bias.masked_fill(~(padding[:, None, :, None] & padding[:, None, None, :]), -1e9).expand(
            -1, heads, -1, -1
        )
        leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
        kinds = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION) if options.device == "cuda" else ()
        for kind in (None, *kinds):
            cell = {"n": n, "case": "padded", "backend": f"PyTorch, {kind.name if kind else 'default'}"}
            with kept_error(cell, "sdpa", options.device):
                cell["kernel"] = chosen_kernel(*leaves, bias) if kind is None else kind.name
                with sdpa_kernel(kind) if kind else contextlib.nullcontext():
                    output = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=bias)
                    found = torch.autograd.grad(output, leaves, grad)
                cell["finite"] = [bool(tensor.isfinite().all()) for tensor in (output, *found)]
            report.add(cell)


class Cell:
    """
    The systems of one size, length and phase as functions without arguments. `masks` has the masks by backend and
    name: backends share none, since the forms of all would not fit into its cache, and be made anew in each round.
    """

    def __init__(self, size, n, phase, masks, options):
        self.n, self.phase, self.masks, self.options = n, phase, masks, options
        self.training, self.dropout = phase in (DROPOUT, TRAINING), 0.1 if phase == DROPOUT else 0.0
        rates = {"hidden_dropout_prob": self.dropout, "attention_probs_dropout_prob": self.dropout}
        torch.manual_seed(0)
        config = BertConfig(**options.sizes[size], **rates, max_position_embeddings=n, attn_implementation="sdpa")
        with torch.device(options.device):
            self.stock = BertForSequenceClassification(config)
        batch = 2 if options.once else max(1, options.tokens // n)
        self.tokens = torch.randint(1000, 2000, (batch, n), device=options.device)
        self.labels = torch.zeros(batch, dtype=torch.long, device=options.device)
        self.real = None
        if phase == PADDED:  # evenly spaced quantiles of the lengths of IMDb reviews, of at most 512 tokens
            shares = (np.arange(batch) + 0.5) / batch
            lengths = np.quantile(draw_lengths("imdb", 10000, 512, 0), shares) * n / 512
            lengths = torch.tensor(lengths, device=options.device).round().clamp(min=2)
            self.real = (torch.arange(n, device=options.device) < lengths[:, None]).long()

    def kernel(self):
        """The kernel that stock BERT takes here."""
        config = self.stock.config
        size = config.hidden_size // config.num_attention_heads
        shape = (*self.tokens.shape, config.num_attention_heads, size)
        inputs = [
            torch.zeros(shape, device=self.tokens.device, dtype=self.options.dtype).transpose(1, 2) for _ in range(3)
        ]
        inputs = [tensor.requires_grad_(self.training) for tensor in inputs]
        mask = None if self.real is None else self.real.bool()[:, None, None, :].expand(-1, -1, self.n, -1)
        with torch.set_grad_enabled(self.training):
            return chosen_kernel(*inputs, mask, self.dropout)

    def function(self, mask=None, backend=None, kernel=None):
        """
        A function that runs a copy of the model once: stock BERT, or with a mask by its name through a backend.
        `kernel` is the only one that PyTorch may take.
        """
        device, dtype, model = self.options.device, self.options.dtype, copy.deepcopy(self.stock)
        if mask is not None:
            attach(model, self.masks[backend][mask], attn_implementation=backend)
        model.to(device)

        def context():
            return contextlib.nullcontext() if kernel is None else sdpa_kernel(kernel)

        if not self.training:
            model.to(dtype).eval()

            def infer():
                with torch.inference_mode(), context():
                    return model(self.tokens, attention_mask=self.real).logits

            return infer
        optimizer = torch.optim.AdamW(model.train().parameters(), lr=2e-5, fused=True)

        def step():
            with context(), torch.autocast(device, dtype, enabled=dtype != torch.float32):
                loss = model(self.tokens, labels=self.labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    def systems(self):
        """Arguments of `function` by name of the system."""
        ours = self.options.ours
        found = {}
        if not self.options.once:
            found["dense"] = {}
            if self.options.device == "cuda" and self.real is None:
                found["dense flash"] = {"kernel": SDPBackend.FLASH_ATTENTION}
        found |= {f"{mask} {ours}": {"mask": mask, "backend": ours} for mask in self.options.masks}
        if self.n <= BIAS_LENGTH and not self.options.once:
            found |= {f"{mask} sparse_sdpa": {"mask": mask, "backend": "sparse_sdpa"} for mask in self.options.masks}
        return found


@functools.cache
def kept_at(mask, layers, n):
    """The shares of the entries and of the tiles of 64 that a learned mask keeps at n tokens: less of long inputs."""
    mask = learned_masks(layers)[mask]
    return {"entries": mask.density_at(n), "live_tiles": mask_tile_shares(mask, n, 64)[0]}


def measured(size, n, phase, masks, options):
    """A record of one cell."""
    record = {"size": size, "n": n, "phase": phase}
    cell = Cell(size, n, phase, masks, options)
    record["batch"] = len(cell.tokens)
    record["real"] = 1.0 if cell.real is None else cell.real.float().mean().item()
    record["kept"] = {mask: kept_at(mask, options.sizes[size]["num_hidden_layers"], n) for mask in options.masks}
    with kept_error(record, "kernel", options.device):
        record["kernel"] = cell.kernel()
    functions, results, seconds = {}, {}, {}
    for name, arguments in cell.systems().items():
        with kept_error(record, name, options.device):
            begin = time.perf_counter()
            function = cell.function(**arguments)
            function()  # compiles, and compiles the mask
            results[name] = function().float()
            if not results[name].isfinite().all():
                raise ValueError("the result is not finite")
            functions[name], seconds[name] = function, round(time.perf_counter() - begin, 2)
    record["first_seconds"] = seconds
    if options.once or not functions:
        return record
    with kept_error(record, "timing", options.device):
        timer = cuda_wall_seconds if options.device == "cuda" else cpu_seconds
        times = interleaved(functions, timer, options.seconds, options.rounds, 15)
        record["systems"] = {name: summary(values) for name, values in times.items()}
        dense = [name for name in times if name.startswith("dense")]
        record["speed_up"] = {
            name: {other: speed_up(times[other], values) for other in dense}
            for name, values in times.items()
            if name not in dense
        }
    if not cell.training:
        record["difference"] = {
            name: (results[name] - results[f"{name.split()[0]} sparse_sdpa"]).abs().max().item()
            for name in functions
            if f"{name.split()[0]} sparse_sdpa" in functions
        }
    return record


def models(options, report):
    """Whole models, the shortest inputs first."""
    masks = {
        size: {name: dict(learned_masks(fields["num_hidden_layers"])) for name in ("sparse_sdpa", options.ours)}
        for size, fields in options.sizes.items()
    }
    for n in options.lengths:
        for size in options.sizes:
            for phase in options.phases:
                cell = {"size": size, "n": n, "phase": phase}
                try:
                    with kept_error(cell, "cell", options.device):
                        cell = measured(size, n, phase, masks[size], options)
                finally:
                    report.add(cell)
                gc.collect()
                if options.device == "cuda":
                    torch.cuda.empty_cache()


def auto(options, report):
    """What `sparse_auto` chooses and why, beside the times of the same model (`--measured`)."""
    times = {}
    if options.measured is not None and options.measured.is_file():
        parts = json.loads(options.measured.read_text())["parts"]
        cells = parts.get("models", {}).get("report", {}).get("cells", [])
        times = {(cell["size"], cell["n"], cell["phase"]): cell.get("systems", {}) for cell in cells}
    masks = {size: learned_masks(fields["num_hidden_layers"]) for size, fields in options.sizes.items()}
    for size, n, phase, name in options.questions:
        cell = {"size": size, "n": n, "phase": phase, "mask": name}
        begin = time.perf_counter()
        with kept_error(cell, "auto", options.device):
            heads = options.sizes[size]["num_attention_heads"]
            head_size = options.sizes[size]["hidden_size"] // heads
            training = phase in (DROPOUT, TRAINING)
            request = Request(
                options.device, options.dtype, 1, heads, n, n, head_size, phase == DROPOUT, training, phase == PADDED
            )
            cell["choice"], cell["reason"] = automatic(masks[size][name], request)
            medians = {
                system: entry["median_ms"]
                for system, entry in times.get((size, n, phase), {}).items()
                if system.startswith(("dense", name))
            }
            cell["measured_ms"] = medians
            ours = {system: ms for system, ms in medians.items() if system.startswith(name)}
            if f"{name} {cell['choice']}" in ours:
                cell["fastest"] = f"{name} {cell['choice']}" == min(ours, key=ours.get)
                dense = min((medians[system] for system in medians.keys() - ours.keys()), default=math.inf)
                cell["faster_than_dense"] = ours[f"{name} {cell['choice']}"] < dense
        cell["seconds"] = round(time.perf_counter() - begin, 1)
        report.add(cell)


PARTS = {"finite": finite, "models": models, "auto": auto}


def command_line():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.lease", description="Parts of the lease.")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--output", type=Path, help="path of the results, without suffix")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--sizes", choices=MODELS, nargs="+", default=[*reversed(MODELS)])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--phases", choices=PHASES, nargs="+", default=PHASES)
    parser.add_argument("--masks", choices=(*MASKS, "rest"), nargs="+", default=[*MASKS], help="of `models`")
    parser.add_argument("--questions", type=int, nargs="+", default=range(len(QUESTIONS)), help="some of QUESTIONS")
    parser.add_argument("--backends", choices=BACKENDS, nargs="+", help="of `finite`")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a batch")
    parser.add_argument("--seconds", type=float, default=0.8, help="seconds for the rounds of one cell")
    parser.add_argument("--rounds", type=int, default=5, help="least number of rounds of a cell")
    parser.add_argument("--measured", type=Path, help="the results of the lease so far")
    parser.add_argument("--once", action="store_true", help="run every sparse model once, with 2 sequences")
    parser.add_argument("--tiny", action="store_true", help="smoke run at tiny sizes; its times mean nothing")
    return parser


def main(arguments=None):
    options = command_line().parse_args(arguments)
    gpu = options.device == "cuda"
    options.dtype = torch.bfloat16 if gpu else torch.float32
    options.ours = "sparse_triton" if gpu else "sparse_cpu"
    options.backends = options.backends or ("sparse_sdpa", options.ours)
    options.sizes = {size: MODELS[size] for size in options.sizes}
    options.questions = [QUESTIONS[index] for index in options.questions]
    if options.tiny:
        options.sizes, options.lengths, options.tokens, options.seconds, options.rounds = TINY, (64,), 128, 0.0, 2
        options.questions = [("tiny", 64, phase, name) for _, _, phase, name in options.questions[:3]]
    path = None if options.output is None else options.output.with_name(options.output.name + ".json")
    PARTS[options.part](options, Report(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
