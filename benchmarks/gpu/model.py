"""
A roofline model of attention on a GPU that need not be there: from the live tiles of a mask, and from what the
compiled kernels ask for, to a predicted time.

    python -m benchmarks.gpu.model                     # compile, predict, write results/gpu_model.json, print tables
    python -m benchmarks.gpu.model --tables            # the tables of docs/kernels.md, from that file
    python -m benchmarks.gpu.model --compare FOLDER    # prediction against truth, from the results of the queue

A program (a block of queries or keys, on one multiprocessor) is a start, a number of steps and an end. While R
programs share a multiprocessor, a step takes R times what it needs of the busiest resource, or its own chain of
dependent instructions if that is longer. Programs start in the order of the grid. The whole takes as long as the last
program, or as long as its bytes take. What this leaves out (conflicts, clocks, the scheduler) is one factor, set so
that plain Triton attention has its published speed. See `ASSUMPTIONS` for the numbers.

Letters: B batch, H heads, n length, d head size (64), R programs per multiprocessor.
"""

import argparse
import functools
import heapq
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from sparsebert.attention.kernels.flex import full_tiles, live_tiles
from sparsebert.attention.kernels.triton_launch import configurations
from sparsebert.masks.compiled_forms import base_table
from sparsebert.masks.tiles import tile_form

from ..shared.masks_by_name import build_mask
from ..shared.report import FORWARD, RESULTS, TRAINING, make_table


PATH = RESULTS / "gpu_model.json"
TOKENS, HEADS, HEAD_SIZE, TILE = 16384, 12, 64, 64
LENGTHS = (512, 1024, 2048, 4096)
# The diagonal alone is 12.5 % of the tiles at 512 tokens.
MASKS = {"toeplitz64:0.1": (1024, 2048, 4096), "toeplitz64:0.2": LENGTHS, "toeplitz64": LENGTHS, "dam_s": LENGTHS}
# TFLOP/s on an H100 SXM5, heads of 64, 16384 tokens of 2048 hidden units, no mask, by n.
# Source: FlashAttention-3 (arXiv 2407.08608), Figures 5 and 6.
PUBLISHED = {
    "FA2": {
        FORWARD: {512: 282, 1024: 306, 2048: 318, 4096: 321},
        "backward": {512: 198, 1024: 238, 2048: 264, 4096: 279},
    },
    "FA3": {
        FORWARD: {512: 333, 1024: 392, 2048: 460, 4096: 476},
        "backward": {512: 272, 1024: 363, 2048: 422, 4096: 453},
    },
    "Triton": {FORWARD: {512: 340, 1024: 382, 2048: 396, 4096: 400}},
}
TIMED = (2, 3, 4)  # entries of the queue that time attention alone
FITTED = 2048  # the n at which the factor is set


@dataclass(frozen=True)
class Gpu:
    """
    Rates per multiprocessor and clock, unless it says otherwise.

    Args:
        arch (`int`): Compute capability times 10.
        processors (`int`): Number of multiprocessors.
        clock (`float`): Hz under load.
        matrix (`int`): Operations of the matrix units in bfloat16.
        floats, integers, specials (`int`): Lanes for float32, for integers, comparisons and conversions, and for
            exponentials.
        shared (`int`): Bytes of shared memory that programs can have.
        bandwidth, cache (`float`): Bytes per second of memory and of the second-level cache, whole GPU.
    """

    arch: int
    processors: int
    clock: float
    matrix: int
    floats: int
    integers: int
    specials: int
    shared: int
    bandwidth: float
    cache: float


GPUS = {
    "H100": Gpu(90, 132, 1.7e9, 4096, 128, 64, 16, 227 * 1024, 3.35e12, 5.5e12),
    "H200": Gpu(90, 132, 1.7e9, 4096, 128, 64, 16, 227 * 1024, 4.8e12, 5.5e12),
    "A100": Gpu(80, 108, 1.41e9, 2048, 64, 64, 16, 163 * 1024, 2.0e12, 4.0e12),
}
ASSUMPTIONS = {
    "memory_latency": 700,  # cycles until data from memory are there
    "matrix_latency": 60,  # cycles until the result of a matrix instruction can be read, beyond its work
    "cycles_per_instruction": 2.0,  # of a warp that has a scheduler to itself
    "end": 1000,  # cycles to reduce, write and leave
    "launch": 3e-6,  # seconds of a launch
    "shared_bytes": 128,  # of shared memory, per multiprocessor and clock
    "warps_per_clock": 4,  # instructions issued per multiprocessor and clock
    "registers": 65536,  # per multiprocessor
    "threads": 2048,
}


@dataclass(frozen=True)
class Step:
    """
    What one step of a program needs: cycles of each resource of a multiprocessor (`use`), cycles if it has the
    multiprocessor to itself (`chain`), and bytes read from the second-level cache.
    """

    use: dict
    chain: float
    bytes: int


@dataclass(frozen=True)
class Kernel:
    """
    A compiled kernel as the model sees it: R (`resident`), its steps over full tiles, over partial ones and of special
    tokens, and how many steps a tile takes (`split`).
    """

    resident: int
    full: Step
    partial: Step
    special: Step | None = None
    split: int = 1


def resident(compiled, warps, gpu):
    """R: how many programs fit on a multiprocessor."""
    registers = -(-compiled.registers // 8) * 8 * 32 * warps
    limits = (ASSUMPTIONS["registers"] // registers, gpu.shared // (compiled.shared + 1024),
              ASSUMPTIONS["threads"] // (32 * warps))  # fmt: skip
    return max(min(limits), 1)


def step_of(loop, warps, gpu, tile_bytes, products):
    """One step of a loop as [`Step`]: it loads `tile_bytes` and computes so many matrix `products`."""
    counts, threads = loop.counts, 32 * warps
    matrix = loop.flops(warps) / gpu.matrix
    issued = sum(count for name, count in loop.counts.items() if name != "free")
    # Matrix units read the tile from shared memory, where it was copied to; other accesses are words of 4 bytes.
    shared = 2 * tile_bytes + 4 * threads * (counts["shared"] + counts["shuffle"])
    use = {
        "matrix": matrix,
        "floats": counts["float"] * threads / gpu.floats,
        "integers": (counts["alu"] + counts["multiply"]) * threads / gpu.integers,
        "exponentials": counts["special"] * threads / gpu.specials,
        "shared memory": shared / ASSUMPTIONS["shared_bytes"],
        "issue": issued * warps / ASSUMPTIONS["warps_per_clock"],
    }
    alone = issued * ASSUMPTIONS["cycles_per_instruction"] * max(warps / ASSUMPTIONS["warps_per_clock"], 1)
    waiting = max(1 - loop.ahead, 0) * ASSUMPTIONS["memory_latency"] if loop.waits else ASSUMPTIONS["memory_latency"]
    chain = matrix + products * ASSUMPTIONS["matrix_latency"] + alone + waiting
    return Step(use, chain, tile_bytes)


def duration(step, count):
    """Cycles of a step while `count` programs share a multiprocessor, and the resource that decides."""
    busiest = max(step.use, key=step.use.__getitem__)
    if step.chain >= count * step.use[busiest]:
        return step.chain, "latency"
    return count * step.use[busiest], busiest


def makespan(durations, slots):
    """When the last program ends, if each of `slots` takes the next one of the grid when it is free."""
    ends = [0.0] * slots
    for length in durations:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


def predicted(kernel, full, partial, special, pairs, gpu, read_bytes):
    """
    Seconds of a launch without the factor, and what decides. `full` and `partial` are the tiles of each block of one
    sequence, all heads; `special` those that each program of special tokens visits; `pairs` is B.
    """
    count, split = kernel.resident, kernel.split
    in_full, bound = duration(kernel.full, count)
    in_partial, partial_bound = duration(kernel.partial, count)
    start = 2 * ASSUMPTIONS["memory_latency"] + ASSUMPTIONS["end"]
    programs, steps = [], 0
    if special:
        in_special, _ = duration(kernel.special, count)
        programs = [start + special * split * in_special] * (pairs * HEADS)
        # Every other program has one step of special tokens more, which waits for two loads in turn.
        start += kernel.partial.chain / 2 + 2 * ASSUMPTIONS["memory_latency"]
    each = [start + split * (one * in_full + other * in_partial) for one, other in zip(full, partial, strict=True)]
    steps = split * (sum(full) + sum(partial)) * pairs
    seconds = makespan(programs + pairs * each, gpu.processors * count) / gpu.clock
    limits = {
        (partial_bound if sum(partial) > sum(full) else bound): seconds,
        "memory": read_bytes / gpu.bandwidth,
        "cache": steps * kernel.full.bytes / gpu.cache,
    }
    decides = max(limits, key=limits.__getitem__)
    return limits[decides], decides


@functools.cache
def _ours(name, arch):
    from .. import compile_triton

    warps, stages, step, *limit = configurations(name, HEAD_SIZE, torch.bfloat16, arch)[0]
    fields = {"padding": False, "limit": limit[0] if limit else None}
    variant = compile_triton.Variant(name, arch, torch.bfloat16, HEAD_SIZE, False, warps, stages, step, **fields)
    return compile_triton.compiled(variant), warps, step


@functools.cache
def _rival(arch, side, flex):
    from .. import compile_triton
    from . import rivals

    keys = min(side, 128 if arch >= 90 else 64)
    constants = {"HEAD": HEAD_SIZE, "BLOCK_M": side, "BLOCK_N": keys, "SPARSE": side}
    function = rivals.flex_kernel if flex else rivals.plain_kernel
    return compile_triton.build(function, (), constants, torch.bfloat16, arch, 4, 3), keys


def our_kernels(gpu):
    """Forward, query and column kernel, each in its first configuration: `{name: Kernel}`."""
    found = {}
    for name, products in (("forward", 2), ("query_grad", 3), ("column", 4)):
        compiled, warps, step = _ours(name, gpu.arch)
        wanted = products * 2 * TILE * step * HEAD_SIZE
        listed = [loop for loop in compiled.loops if loop.flops(warps) == wanted]
        special = next(loop for loop in compiled.loops if loop.flops(warps) < wanted)
        if len(listed) != 2:
            raise RuntimeError(f"{name} on sm_{gpu.arch} has {len(listed)} loops over tiles, expected 2")
        loaded = 2 * step * HEAD_SIZE * 2
        full, partial, special = (step_of(loop, warps, gpu, loaded, products) for loop in (*listed, special))
        found[name] = Kernel(resident(compiled, warps, gpu), full, partial, special, TILE // step)
    return found


def rival_kernel(gpu, side, flex=True):
    """
    The forward of FlexAttention on blocks of this side, or plain Triton attention: [`Kernel`]. The configuration is
    the default of PyTorch for the GPU and heads of 64, cut to the side.
    """
    compiled, keys = _rival(gpu.arch, side, flex)
    steps = [step_of(loop, 4, gpu, 2 * keys * HEAD_SIZE * 2, 2) for loop in compiled.loops]
    partial, full = (steps[0], steps[-1])
    return Kernel(resident(compiled, 4, gpu), full, partial, None, side // keys)


@functools.cache
def mask_counts(name, length):
    """
    Tiles of a mask: `{"rows": (full, partial), "columns": ..., 128: ..., 64: ...}`, lists over the blocks of all
    heads; by side for FlexAttention, whose blocks include the special tokens. And the share of live tiles.
    """
    mask = build_mask(name, length, HEADS)
    table = base_table(mask, length)[0]
    form = tile_form(table)
    found = {}
    for key, tail in (("rows", ""), ("columns", "_t")):
        starts = (getattr(form, f"{kind}_start{tail}") for kind in ("full", "partial"))
        found[key] = tuple((start[..., -1] - start[..., 0]).flatten().tolist() for start in starts)
    whole = base_table(mask, length, special="all")[0]
    for side in (64, 128):
        full = full_tiles(whole, side)
        counts = full.sum(-1), (live_tiles(whole, side) & ~full).sum(-1)
        found[side] = tuple(count.flatten().tolist() for count in counts)
    return found, (form.tiles > 0).float().mean().item()


def bytes_of(length, tensors):
    """Bytes of this many tensors in bfloat16."""
    return tensors * TOKENS * HEADS * HEAD_SIZE * 2


def published_seconds(name, phase, length):
    """Seconds of dense attention at a published rate, on our shape."""
    flops = {FORWARD: 4.0, "backward": 10.0}
    parts = (FORWARD,) if phase == FORWARD else (FORWARD, "backward")
    work = TOKENS * length * HEADS * HEAD_SIZE
    return sum(flops[part] * work / (PUBLISHED[name][part][length] * 1e12) for part in parts)


def plain_seconds(kernel, gpu, length):
    """Seconds of plain Triton attention, without the factor, at the published shape (32 heads)."""
    side, batch = 128, TOKENS // length
    blocks = [length // side] * (length // side * 32)
    seconds, _ = predicted(kernel, blocks, [0] * len(blocks), 0, batch, gpu, bytes_of(length, 4) * 32 / HEADS)
    return seconds + ASSUMPTIONS["launch"]


def factor_of(gpu):
    """
    The factor of all times, set on the H100, and the check at other lengths: `{n: (published, modeled)}`, TFLOP/s.
    """
    kernel = rival_kernel(gpu, 128, flex=False)
    work = {length: 4.0 * TOKENS * length * 32 * HEAD_SIZE / 1e12 for length in LENGTHS}
    times = {length: plain_seconds(kernel, gpu, length) for length in LENGTHS}
    published = PUBLISHED["Triton"][FORWARD]
    factor = work[FITTED] / published[FITTED] / times[FITTED]
    return factor, {length: (published[length], work[length] / times[length] / factor) for length in LENGTHS}


def cells(gpu_name, factor, masks=MASKS):
    """Predictions: a list of dicts, one per mask, n and phase."""
    gpu, rows = GPUS[gpu_name], []
    ours = our_kernels(gpu)
    flex = {side: rival_kernel(gpu, side) for side in (64, 128)}
    for name, lengths in masks.items():
        for length in lengths:
            counts, live = mask_counts(name, length)
            batch, tiles = TOKENS // length, -(-length // TILE)

            def seconds(kernel, key, special, tensors, counts=counts, batch=batch, length=length):
                time, bound = predicted(
                    kernel, *counts[key], special, batch, gpu, bytes_of(length, tensors)
                )  # fmt: skip
                return factor * time + ASSUMPTIONS["launch"], bound

            special = tiles if build_mask(name, length, HEADS).special_tokens != "none" else 0
            forward, bound = seconds(ours["forward"], "rows", special, 4)
            backward = [
                seconds(ours["query_grad"], "rows", special, 7),
                seconds(ours["column"], "columns", special, 6),
            ]
            row = {"gpu": gpu_name, "mask": name, "live": live, "n": length, "phase": FORWARD}
            row |= {"seconds": forward, "bound": bound}
            row |= {f"flex_{side}": seconds(kernel, side, 0, 4)[0] for side, kernel in flex.items()}
            row |= {f"R of flex_{side}": kernel.resident for side, kernel in flex.items()}
            rows.append(row)
            total = forward + sum(time for time, _ in backward)
            rows.append(
                {"gpu": gpu_name, "mask": name, "live": live, "n": length, "phase": TRAINING, "seconds": total,
                 "bound": backward[1][1]}
            )  # fmt: skip
    return rows


def model():
    """Compile and predict everything: the content of the file."""
    factor, check = factor_of(GPUS["H100"])
    return {
        "command": "python -m benchmarks.gpu.model",
        "assumptions": ASSUMPTIONS,
        "gpus": {name: asdict(gpu) for name, gpu in GPUS.items()},
        "published": PUBLISHED,
        "factor": factor,
        "check": check,
        "kernels": {
            name: {kind: asdict(kernel) for kind, kernel in our_kernels(gpu).items()} for name, gpu in GPUS.items()
        },
        "cells": [cell for name in GPUS for cell in cells(name, factor)],
    }


def tables(report, gpu="H100"):
    """The tables of docs/kernels.md: `"check"`, `"forward"` and `"training"`."""
    rows = [
        [length, f"{published:.0f}", f"{modeled:.0f}", f"{modeled / published:.2f}"]
        for length, (published, modeled) in report["check"].items()
    ]
    title = "Plain Triton attention, forward, H100, TFLOP/s"
    found = {"check": make_table(title, ("n", "published", "modeled", "ratio"), rows)}
    size = f"{gpu}, bf16, {TOKENS} tokens, {HEADS} heads of {HEAD_SIZE}"
    for phase in (FORWARD, TRAINING):
        rows, shown = [], set()
        for cell in report["cells"]:
            same = (cell["live"], cell["n"])  # two names of one mask
            if (cell["gpu"], cell["phase"]) == (gpu, phase) and same not in shown:
                shown.add(same)
                rivals = [published_seconds(name, phase, cell["n"]) for name in ("FA2", "FA3")]
                rivals += [cell[field] for field in ("flex_64", "flex_128") if field in cell]
                rows.append(
                    [cell["mask"], f"{cell['live']:.0%}", cell["n"], f"{1e6 * cell['seconds']:.0f}", cell["bound"],
                     *(f"{1e6 * time:.0f} ({time / cell['seconds']:.1f}x)" for time in rivals)]
                )  # fmt: skip
        header = ["mask", "live tiles", "n", "ours, us", "decided by", "dense FA2", "dense FA3"]
        header += ["flex, tiles of 64", "flex, of 128"] if phase == FORWARD else []
        found[phase] = make_table(f"Predicted, not measured: {phase}, {size}", header, rows)
    return found


def compared(folder, report):
    """
    Prediction against truth.

    Args:
        folder (`Path`): Results of the queue.
        report (`dict`): The content of the file.

    Returns:
        `list`: Rows: GPU, mask, n, phase, predicted and measured microseconds, their ratio.
    """
    rows = []
    for path in (folder / f"{number}.json" for number in TIMED):
        result = json.loads(path.read_text()) if path.exists() else {}
        name = next((name for name in report["gpus"] if name in str(result.get("machine", {}).get("gpu"))), None)
        known = {(cell["mask"], cell["n"], cell["phase"]): cell for cell in report["cells"] if cell["gpu"] == name}
        for part in result.get("reports", {}).values():
            for cell in part.get("cells", ()):
                key = (cell.get("mask"), cell.get("n"), cell.get("phase"))
                if key not in known or cell.get("dtype") != "bfloat16" or cell.get("padded"):
                    continue
                scale = cell["batch"] * cell["n"] * cell["heads"] / (TOKENS * HEADS)
                for system, field in (("sparse_triton", "seconds"), ("sparse_flex", "flex_128")):
                    if system in cell["systems"] and field in known[key]:
                        guess = 1e6 * known[key][field] * scale
                        truth = 1e3 * cell["systems"][system]["median_ms"]
                        rows.append([name, system, *key, f"{guess:.0f}", f"{truth:.0f}", f"{guess / truth:.2f}"])
    return rows


def comparison(folder, report):
    """The table of [`compared`]."""
    header = ("GPU", "system", "mask", "n", "phase", "predicted, us", "measured, us", "ratio")
    return make_table("Prediction against truth", header, compared(folder, report))


def command_line():
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.model", description="What the kernels should take."
    )
    parser.add_argument("--tables", action="store_true", help="print the tables of the file and compile nothing")
    parser.add_argument("--compare", type=Path, metavar="FOLDER", help="folder of the queue's results")
    parser.add_argument("--output", type=Path, default=PATH, help="the file")
    return parser


def main(arguments=None):
    """The command line; returns the exit status."""
    options = command_line().parse_args(arguments)
    if options.compare is None and not options.tables:
        options.output.write_text(json.dumps(model(), indent=1) + "\n")
    report = json.loads(options.output.read_text())
    if options.compare is None:
        for table in tables(report).values():
            print(f"\n{table.markdown()}", end="")
        return 0
    table = comparison(options.compare, report)
    print(f"\n{table.markdown()}", end="")
    return int(not table.rows)


if __name__ == "__main__":
    sys.exit(main())
