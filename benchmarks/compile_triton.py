"""
Compile the Triton kernels for GPUs that need not be there, and report what they ask for.

    python -m benchmarks.compile_triton [--arch 90] [--dtype float16] [--head_size 64]

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
from sparsebert.attention.triton import DTYPES, HEAD_SIZES, configurations, short_backward_limit
from sparsebert.attention.triton import head_sizes as supported_head_sizes


POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
INTEGERS = ("heads", "length", "tile_rows", "tile_columns", "threshold", "bucket")
FLOATS = ("scale", "scaling", "keep_scale")
OTHER_POINTERS = {"lse": "*fp32", "delta": "*fp32", "pool": "*i64", "padding": "*i8", "seed": "*i64"}
# Kernels by what they do: the function, and its constants.
KERNELS = {
    "forward": ("row_kernel", {"SHORT": False, "GRADIENT": False}),
    "short_forward": ("row_kernel", {"SHORT": True, "GRADIENT": False}),
    "query_grad": ("row_kernel", {"SHORT": False, "GRADIENT": True}),
    "column": ("column_kernel", {}),
    "short_backward": ("short_backward_kernel", {}),
}
HEADER = (
    f"{'kernel':15} arch  {'dtype':9} {'size':>4} {'tile':>7} {'drop':>5} {'warps':>5} {'stages':>6} {'regs':>5} "
    f"{'spill':>9} {'shared':>7} {'cp.async':>8} {'wgmma':>6}"
)


@dataclass(frozen=True)
class Variant:
    """A kernel to compile. `step`: keys (columns: queries) at a time; `rows`: n of the one-kernel backward."""

    kernel: str
    arch: int
    dtype: torch.dtype
    head_size: int
    dropout: bool
    warps: int
    stages: int
    step: int
    block_q: int = 64
    padding: bool = True
    rows: int = 0


def compiled(variant):
    """
    Compile one variant.

    Returns:
        `dict`: `registers`, `spills` (stores and loads, bytes), `shared` (bytes), `copies`, `wgmma`.
    """
    name, constants = KERNELS[variant.kernel]
    function = getattr(triton_kernels, name)
    constants = constants | {
        "HEAD": variant.head_size, "BLOCK_Q": variant.block_q, "BLOCK_K": 64, "DIAGONAL_OFF": False,
        "CAUSAL": False, "ROWS": variant.rows, "STEP": variant.step,
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
    """Every variant that the package may launch, with special tokens and padding, which take the most registers."""
    for arch, dtype, head_size, kernel in itertools.product(archs, dtypes, head_sizes, KERNELS):
        if head_size not in supported_head_sizes(arch):
            continue
        rows = [0]
        if kernel == "short_backward":
            rows = [rows for rows in (64, 128) if rows <= short_backward_limit(head_size, dtype, arch)]
        for num_rows, dropout in itertools.product(rows, (False, True)):
            for warps, stages, step in configurations(kernel, head_size, dtype, arch):
                yield Variant(kernel, arch, dtype, head_size, dropout, warps, stages, step, rows=num_rows)


def line(variant, found):
    """One line of the table."""
    copies, wgmma = found["copies"], found["wgmma"]
    tile = f"{variant.rows or 64}x{variant.step}"
    if variant.kernel == "column":
        tile = f"{variant.step}x64"
    return (
        f"{variant.kernel:15} sm_{variant.arch} {str(variant.dtype)[6:]:9} {variant.head_size:4} {tile:>7} "
        f"{'yes' if variant.dropout else 'no':>5} {variant.warps:5} {variant.stages:6} {found['registers']:5} "
        f"{'{}/{}'.format(*found['spills']):>9} {found['shared']:7} {copies:8} {wgmma:6}"
    )


def main(arguments=None):
    """The command line; returns the exit status."""
    names = {str(dtype)[6:]: dtype for dtype in DTYPES}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90], choices=[80, 90])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=names)
    parser.add_argument("--head_size", type=int, nargs="+", default=HEAD_SIZES, choices=HEAD_SIZES)
    parser.add_argument("--kernel", nargs="+", default=KERNELS, choices=KERNELS)
    options = parser.parse_args(arguments)
    print(HEADER)
    spilling = 0
    for variant in variants(options.arch, [names[name] for name in options.dtype], options.head_size):
        if variant.kernel in options.kernel:
            found = compiled(variant)
            spilling += found["spills"] != (0, 0)
            print(line(variant, found), flush=True)
    if spilling:
        print(f"{spilling} configurations spill registers to memory", file=sys.stderr)
    return int(spilling > 0)


if __name__ == "__main__":
    sys.exit(main())
