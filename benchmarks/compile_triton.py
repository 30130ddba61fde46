"""
Compile the Triton kernels for GPUs that need not be there, and report what they ask for.

    python -m benchmarks.compile_triton [--arch 80 90] [--dtype bfloat16] [--head_size 64]

A line per variant that the package can launch: registers, spilled bytes, shared memory, and how many asynchronous
copies (`cp.async`) and matrix instructions of warp groups (`wgmma`) there are: none of the former means that loads are
not pipelined. Exits with 1 if a configuration that the package may choose spills. Says nothing about speed.
"""

import argparse
import contextlib
import io
import itertools
import re
import sys
from dataclasses import dataclass

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparsebert.attention import triton_kernels
from sparsebert.attention.triton import DTYPES, HEAD_SIZES, SHORT_BACKWARD, SHORT_LENGTH, configurations


POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
INTEGERS = ("heads", "length", "tile_rows", "tile_columns", "threshold")
FLOATS = ("scale", "scaling", "keep_scale")
OTHER_POINTERS = {"lse": "*fp32", "delta": "*fp32", "pool": "*i64", "padding": "*i8", "seed": "*i64"}
# Kernels by what they do: the function, and its constants.
KERNELS = {
    "forward": ("row", {"SHORT": False, "GRADIENT": False}),
    "short_forward": ("row", {"SHORT": True, "GRADIENT": False}),
    "query_grad": ("row", {"SHORT": False, "GRADIENT": True}),
    "column": ("column", {}),
    "short_backward": ("short_backward", {}),
}
HEADER = (
    "kernel",
    "arch",
    "dtype",
    "d",
    "tile",
    "drop",
    "pad",
    "warps",
    "stages",
    "regs",
    "spill st/ld",
    "smem",
    "cp.async",
    "wgmma",
)


@dataclass(frozen=True)
class Variant:
    """A kernel to compile; `rows` is n of the one-kernel backward."""

    kernel: str
    arch: int
    dtype: torch.dtype
    head_size: int
    block_q: int
    dropout: bool
    padding: bool
    warps: int
    stages: int
    rows: int = 0
    step: int = 64


def compiled(variant):
    """
    Compile one variant.

    Returns:
        `dict`: `registers`, `spills` (stores and loads, bytes), `shared` (bytes), `copies`, `wgmma`.
    """
    name, constants = KERNELS[variant.kernel]
    function = getattr(triton_kernels, f"{name}_kernel")
    constants = constants | {
        "HEAD": variant.head_size, "BLOCK_Q": variant.block_q, "BLOCK_K": 64, "FIRST": True, "DIAGONAL_OFF": False,
        "CAUSAL": False, "BUCKET": 0, "ROWS": variant.rows, "STEP": variant.step,
    }  # fmt: skip
    absent = [] if variant.dropout else ["seed"]
    absent += [] if variant.padding else ["padding"]
    if constants.get("GRADIENT") is False:
        absent += ["output_grad", "delta", "query_grad"]
    signature, attributes = {}, {}
    for index, argument in enumerate(function.arg_names):
        if argument in absent or argument in constants:
            signature[argument] = "constexpr"
        elif argument in INTEGERS:
            signature[argument] = "i32"
        elif argument in FLOATS:
            signature[argument] = "fp32"
        else:
            attributes[(index,)] = [["tt.divisibility", 16]]
            if re.fullmatch("[qkv]_[bhn]", argument):
                signature[argument] = "i32"
            elif argument in ("query", "key", "value", "output") or argument.endswith("_grad"):
                signature[argument] = POINTERS[variant.dtype]
            else:
                signature[argument] = OTHER_POINTERS.get(argument, "*i32")
    values = {argument: constants.get(argument) for argument, kind in signature.items() if kind == "constexpr"}
    source = ASTSource(function, signature, values, attributes)
    log = io.StringIO()
    with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        triton.knobs.compilation.always_compile = True
        triton.knobs.nvidia.dump_ptxas_log = True
        target = GPUTarget("cuda", variant.arch, 32)
        kernel = triton.compile(source, target, {"num_warps": variant.warps, "num_stages": variant.stages})
    ptx = kernel.asm["ptx"]
    return {
        "registers": int(re.search(r"Used (\d+) registers", log.getvalue())[1]),
        "spills": tuple(map(int, re.search(r"(\d+) bytes spill stores, (\d+) bytes", log.getvalue()).groups())),
        "shared": kernel.metadata.shared,
        "copies": len(re.findall(r"cp\.async\.c[ag]", ptx)),
        "wgmma": len(re.findall(r"wgmma\.mma_async", ptx)),
    }


def variants(archs, dtypes, head_sizes):
    """Every variant that the package may launch, padding always on."""
    for arch, dtype, head_size, kernel in itertools.product(archs, dtypes, head_sizes, KERNELS):
        limit = SHORT_BACKWARD[head_size, dtype.itemsize]
        if kernel == "short_backward":
            cases = [(64, rows, rows) for rows in (16, 32, 64, 128, 256) if rows <= limit]
        elif kernel == "short_forward":
            cases = [(64, 0, SHORT_LENGTH)]
        else:
            cases = [(block_q, 0, 4096) for block_q in (64, 128)]
        for (block_q, rows, length), dropout in itertools.product(cases, (False, True)):
            name = "forward" if kernel == "short_forward" else kernel
            for warps, stages in configurations(name, head_size, dtype, block_q, length):
                yield Variant(kernel, arch, dtype, head_size, block_q, dropout, True, warps, stages, rows)
