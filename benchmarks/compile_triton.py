"""
Compile the Triton kernels for GPUs that need not be there, and report what they ask for.

    python -m benchmarks.compile_triton [--arch 90] [--dtype float16] [--head_size 64]
    python -m benchmarks.compile_triton --output benchmarks/results/compile_triton    # and writes the table as JSON

A line per variant that the package can launch: registers, spilled bytes, shared memory, matrix instructions of warp
groups (`wgmma`), and how loads overlap with computing in the loops over the tiles: how many groups of copies may be
under way after a wait (`wait`, the operand of `cp.async.wait_group`), and for how many steps a copy is under way
before it is waited for (`ahead`), the least of all loops. Exits with 1 if a configuration that the package may choose
spills without a limit of its registers, asks for more shared memory than a block can have, or waits for copies that it
has only just started. Says nothing about speed.
"""

import argparse
import contextlib
import io
import itertools
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparsebert.attention.kernels import triton_kernels
from sparsebert.attention.kernels.triton import short_backward_limit
from sparsebert.attention.kernels.triton_launch import configurations
from sparsebert.attention.kernels.triton_limits import DTYPES, GPUS, HEAD_SIZES

from .shared.ptx import Loop, matrix_loops
from .shared.report import write_json


# Compute capability times 10 to the bytes of shared memory that a block can have.
ARCHS = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
INTEGERS = ("first_b", "last_b", "heads", "length", "tile_rows", "tile_columns", "threshold")
FLOATS = ("scale", "scaling", "keep_scale")
RESTS = ("rest_key", "rest_value", "rest_score", "rest_parts")
DISTANCES = ("distances", "distance_grad")
OTHER_POINTERS = {
    **dict.fromkeys(("lse", "delta", *RESTS, *DISTANCES), "*fp32"),
    **dict.fromkeys(("pool", "seed", "spans"), "*i64"),
    **dict.fromkeys(("padding", "table"), "*i8"),
}
# Kernels by what they do: the function, and its constants.
KERNELS = {
    "forward": ("row_kernel", {"SHORT": False, "GRADIENT": False}),
    "short_forward": ("row_kernel", {"SHORT": True, "GRADIENT": False, "PARTIAL": False}),
    "query_grad": ("row_kernel", {"SHORT": False, "GRADIENT": True}),
    "column": ("column_kernel", {}),
    "short_backward": ("short_backward_kernel", {}),
}
# The kernels that follow tile lists.
LISTED = ("forward", "query_grad", "column")
# Steps that their copies are under way at least before they are waited for.
LEAST_AHEAD = 1
HEADER = (
    f"{'kernel':15} arch   {'dtype':9} {'size':>4} {'tile':>7} {'drop':>5} {'rest':>5} {'bias':>5} {'warps':>5} "
    f"{'stages':>6} {'regs':>5} {'spill':>9} {'shared':>7} {'wait':>5} {'ahead':>6} {'wgmma':>6}"
)


@dataclass(frozen=True)
class Variant:
    """
    A kernel to compile. `step`: keys (columns: queries) at a time; `rows`: n of the one-kernel backward; `limit`: the
    most registers of a thread.
    """

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
    limit: int | None = None
    rest: bool = False
    distances: bool = False
    partial: bool = True


@dataclass(frozen=True)
class Compiled:
    """
    What a kernel asks for: registers per thread, bytes of spilled stores and loads, bytes of shared memory, number of
    matrix instructions of warp groups, and its loops that multiply matrices, in their order.
    """

    registers: int
    spills: tuple[int, int]
    shared: int
    wgmma: int
    loops: tuple[Loop, ...]

    @property
    def wait(self):
        """The least operand of a wait for copies in a loop; `None` if no loop copies."""
        return min((count for loop in self.loops for count in loop.waits), default=None)

    @property
    def ahead(self):
        """The least number of steps that a copy is under way before it is waited for; `None` if no loop copies."""
        return min((loop.ahead for loop in self.loops if loop.waits), default=None)


def signature_of(function, absent, constants, dtype):
    """Types, compile-time values and attributes of a kernel's arguments, for `ASTSource`."""
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
            elif argument in OTHER_POINTERS:
                signature[argument] = OTHER_POINTERS[argument]
            elif argument in ("query", "key", "value", "output") or argument.endswith("_grad"):
                signature[argument] = POINTERS[dtype]
            else:
                signature[argument] = "*i32"
    values = {argument: constants.get(argument) for argument, kind in signature.items() if kind == "constexpr"}
    return signature, values, attributes


def build(function, absent, constants, dtype, arch, warps, stages, limit=None):
    """Compile a kernel."""
    source = ASTSource(function, *signature_of(function, absent, constants, dtype))
    log = io.StringIO()
    with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        triton.knobs.compilation.always_compile = True
        triton.knobs.nvidia.dump_ptxas_log = True
        options = {"num_warps": warps, "num_stages": stages, "maxnreg": limit}
        kernel = triton.compile(source, GPUTarget("cuda", arch, 32), options)
    ptx = kernel.asm["ptx"]
    return Compiled(
        int(re.search(r"Used (\d+) registers", log.getvalue())[1]),
        tuple(map(int, re.search(r"(\d+) bytes spill stores, (\d+) bytes", log.getvalue()).groups())),
        kernel.metadata.shared,
        len(re.findall(r"wgmma\.mma_async", ptx)),
        tuple(matrix_loops(ptx)),
    )


def compiled(variant):
    """Compile one variant: [`Compiled`]."""
    name, constants = KERNELS[variant.kernel]
    constants = constants | {
        "HEAD": variant.head_size, "BLOCK_Q": variant.block_q, "BLOCK_K": 64, "DIAGONAL_OFF": False,
        "CAUSAL": False, "SPECIAL_ROWS": True, "ROWS": variant.rows, "STEP": variant.step, "PARTIAL": variant.partial,
    }  # fmt: skip
    absent = [] if variant.dropout else ["seed"]
    # With padding, the kernels count what a rest stands for.
    absent += ["removed"] if variant.padding else ["padding", "spans"]
    absent += [] if variant.rest else [*RESTS, "removed"]
    absent += [] if variant.distances else DISTANCES
    if constants.get("GRADIENT") is False:
        absent += ["output_grad", "delta", "query_grad", "rest_parts", "distance_grad"]
    elif constants.get("GRADIENT"):
        absent += ["rest_score", "removed"]
    function = getattr(triton_kernels, name)
    configuration = variant.warps, variant.stages, variant.limit
    return build(function, absent, constants, variant.dtype, variant.arch, *configuration)


def variants(archs, dtypes, head_sizes):
    """Every variant that the package may launch, with special tokens and padding, which take the most registers."""
    for arch, dtype, head_size, kernel in itertools.product(archs, dtypes, head_sizes, KERNELS):
        if head_size not in GPUS.get(arch, ()):
            continue
        rows = [0]
        if kernel == "short_backward":
            rows = [rows for rows in (64, 128) if rows <= short_backward_limit(head_size, dtype, arch)]
        rests = (False,) if kernel == "column" else (False, True)  # which knows of no rest
        terms = [(rest, False) for rest in rests] + [(rests[-1], True)]  # a bias per distance beside a rest
        for num_rows, dropout, (rest, distances) in itertools.product(rows, (False, True), terms):
            for warps, stages, step, *limit in configurations(
                kernel, head_size, dtype, arch, dropout, rest, distances
            ):
                fields = {"rows": num_rows, "limit": limit[0] if limit else None}
                fields |= {"rest": rest, "distances": distances}
                yield Variant(kernel, arch, dtype, head_size, dropout, warps, stages, step, **fields)


def line(variant, found):
    """One line of the table."""
    tile = f"{variant.rows or 64}x{variant.step}"
    if variant.kernel == "column":
        tile = f"{variant.step}x64"
    wait, ahead = ("-", "-") if found.wait is None else (found.wait, f"{found.ahead:.2f}")
    return (
        f"{variant.kernel:15} sm_{variant.arch:<3} {str(variant.dtype)[6:]:9} {variant.head_size:4} {tile:>7} "
        f"{'yes' if variant.dropout else 'no':>5} {'yes' if variant.rest else 'no':>5} "
        f"{'yes' if variant.distances else 'no':>5} {variant.warps:5} {variant.stages:6} "
        f"{found.registers:5} {'{}/{}'.format(*found.spills):>9} {found.shared:7} {wait:>5} {ahead:>6} {found.wgmma:6}"
    )


def cell(variant, found):
    """The same for the JSON: what the package chooses, what was compiled for it, and what that takes."""
    fields = (
        "kernel",
        "arch",
        "head_size",
        "dropout",
        "rest",
        "distances",
        "rows",
        "warps",
        "stages",
        "step",
        "limit",
    )
    found_fields = ("registers", "spills", "shared", "wait", "ahead", "wgmma")
    return {
        **{name: getattr(variant, name) for name in fields},
        "dtype": str(variant.dtype)[6:],
        **{name: getattr(found, name) for name in found_fields},
    }


def faults(variant, found):
    """What is wrong with a variant, in words: a list."""
    wrong = []
    if found.spills != (0, 0) and variant.limit is None:
        wrong.append("spills registers to memory")
    if found.shared > ARCHS[variant.arch]:
        wrong.append(f"asks for more than {ARCHS[variant.arch]} bytes of shared memory")
    # On Blackwell, loops that wait for a matrix product cut the steps into pieces, so that they cannot be counted.
    early = found.wait and (variant.arch >= 100 or found.ahead >= LEAST_AHEAD)
    if variant.kernel in LISTED and not early:
        wrong.append("waits for copies that it has only just started")
    return wrong


def main(arguments=None):
    """The command line; returns the exit status."""
    names = {str(dtype)[6:]: dtype for dtype in DTYPES}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHS), choices=ARCHS)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=names)
    parser.add_argument("--head_size", type=int, nargs="+", default=HEAD_SIZES, choices=HEAD_SIZES)
    parser.add_argument("--kernel", nargs="+", default=KERNELS, choices=KERNELS)
    parser.add_argument("--output", type=Path, help="path of the results, without suffix")
    options = parser.parse_args(arguments)
    print(HEADER)
    status, cells = 0, []
    for variant in variants(options.arch, [names[name] for name in options.dtype], options.head_size):
        if variant.kernel in options.kernel:
            found = compiled(variant)
            print(line(variant, found), flush=True)
            cells.append(cell(variant, found))
            for fault in faults(variant, found):
                print(f"{line(variant, found)}: {fault}", file=sys.stderr)
                status = 1
    if options.output is not None:
        words = sys.argv[1:] if arguments is None else arguments
        options.command = shlex.join(["python", "-m", "benchmarks.compile_triton", *words])
        options.quick = False
        write_json(options, cells)
    return status


if __name__ == "__main__":
    sys.exit(main())
