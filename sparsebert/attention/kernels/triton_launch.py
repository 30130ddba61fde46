"""How a Triton kernel is launched: its possible configurations, and the one that is chosen."""

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch

from ...masks.exported import recorded


Configuration = tuple[int, ...]
Configurations = list[Configuration]

# Launch configurations of 16-bit kernels on 64 x 64 tiles, by head size: warps, pipeline stages, keys per step
# (queries per step in the column kernel), and, where fewer let more programs run at a time, the most registers of a
# thread, as measured on an H100. If there are two, the faster is chosen. Only those with a limit spill registers, and
# kernels that follow tile lists have stages enough to load the next step while they compute one:
# `benchmarks/compile_triton.py` checks both, and lists the resources that each takes.
HOPPER: dict[str, dict[int, Configurations]] = {
    "forward": {32: [(4, 3, 64)], 64: [(4, 3, 64, 168), (4, 3, 32)], 128: [(8, 3, 64), (4, 3, 32)]},
    "short_forward": {32: [(4, 2, 64)], 64: [(4, 2, 32, 128)], 128: [(8, 2, 64), (4, 2, 32)]},
    "query_grad": {32: [(4, 3, 64)], 64: [(4, 3, 64, 168), (4, 3, 32)], 128: [(4, 3, 32), (8, 3, 32)]},
    "column": {32: [(4, 3, 64), (4, 3, 32)], 64: [(4, 3, 32, 168)], 128: [(4, 3, 16), (8, 3, 16)]},
    "short_backward": {32: [(8, 2, 64)], 64: [(8, 2, 32, 128)], 128: [(8, 2, 32)]},
}
# Where dropout or a bias per distance, which need registers for each entry, ask for others.
HOPPER_DROPOUT: dict[str, dict[int, Configurations]] = {
    "forward": {64: [(4, 3, 32), (8, 3, 64)], 128: [(4, 3, 32), (8, 3, 32)]},
    "short_forward": {64: [(4, 2, 32), (8, 2, 64)], 128: [(4, 2, 32)]},
    "query_grad": {32: [(4, 3, 32)], 64: [(4, 3, 32)], 128: [(8, 3, 16), (4, 3, 16)]},
    "column": {32: [(4, 3, 32)], 64: [(4, 3, 32)], 128: [(8, 3, 16)]},
    "short_backward": {32: [(8, 2, 32)], 64: [(8, 2, 32)], 128: [(8, 2, 16)]},
}
# No limit was measured on Blackwell, where the single backward kernel has registers for half a tile of keys only.
BLACKWELL = HOPPER | {
    "forward": {**HOPPER["forward"], 64: [(4, 3, 64)]},
    "short_forward": {**HOPPER["short_forward"], 64: [(4, 2, 64)]},
    "query_grad": {**HOPPER["query_grad"], 64: [(4, 3, 64), (8, 3, 64)], 128: [(4, 3, 32)]},
    "column": {**HOPPER["column"], 64: [(4, 3, 32), (8, 3, 32)]},
    "short_backward": {**HOPPER["short_backward"], 32: [(8, 2, 32)], 64: [(8, 2, 32)]},
}
BLACKWELL_DROPOUT = HOPPER_DROPOUT | {
    "forward": {**HOPPER_DROPOUT["forward"], 128: [(8, 3, 32)]},
    "short_backward": {**HOPPER_DROPOUT["short_backward"], 128: [(4, 2, 16)]},
}
# Head size 128 is missing, since every configuration tried spills kilobytes of registers.
AMPERE: dict[str, dict[int, Configurations]] = {
    "forward": {32: [(4, 3, 64)], 64: [(4, 3, 64), (4, 3, 32)]},
    "short_forward": {32: [(4, 2, 16)], 64: [(4, 2, 32)]},
    "query_grad": {32: [(4, 3, 64)], 64: [(4, 3, 32), (8, 3, 32)]},
    "column": {32: [(4, 3, 32)], 64: [(4, 3, 16), (8, 3, 16)]},
}
AMPERE_DROPOUT: dict[str, dict[int, Configurations]] = {"forward": {32: [(4, 3, 32)], 64: [(4, 3, 64)]}}
# Where the rest of a mask, whose key and value need registers, asks for others.
AMPERE_REST: dict[str, dict[int, Configurations]] = {"forward": {64: [(4, 3, 32)]}}
# Where a bias per distance asks for other ones than dropout.
AMPERE_DISTANCES: dict[str, dict[int, Configurations]] = {
    "forward": {32: [(4, 3, 16)], 64: [(4, 3, 32)]},
    "query_grad": {32: [(4, 3, 32)], 64: [(8, 3, 16)]},
}
BLACKWELL_DISTANCES: dict[str, dict[int, Configurations]] = {
    "forward": {32: [(4, 3, 32)], 128: [(8, 3, 16)]},
    "short_forward": {32: [(4, 2, 32)], 64: [(8, 2, 64)]},
    "query_grad": {64: [(8, 3, 32)]},
    "column": {128: [(4, 3, 16)]},
    "short_backward": {64: [(8, 2, 16)]},
}
# Configurations for float32, for which no matrix unit keeps the precision.
FLOAT32: Configurations = [(8, 2, 16)]
# The most that a kernel has to choose from.
MOST_CONFIGURATIONS = 2

# Numbers of programs below and above which the choice no longer depends on them.
FEW_PROGRAMS, MANY_PROGRAMS = 256, 4096

# What was chosen, by all that the time of a kernel depends on.
_CHOSEN: dict[Hashable, Configuration] = {}
# One lock per device: kernels that are timed at the same time would disturb each other.
_LOCKS: dict[torch.device, threading.Lock] = {}
# The number of the configuration in `launching`.
_number: int | None = None


@contextlib.contextmanager
def launching(number: int) -> Iterator[None]:
    """In this context, in all threads, kernels run in the configuration of this number, counted round, untimed."""
    global _number
    _number = number
    try:
        yield
    finally:
        _number = None


def interpreted() -> bool:
    """Whether Triton runs its interpreter, that is, whether `TRITON_INTERPRET=1` was set when Triton was imported."""
    try:
        from . import triton_kernels
    except ImportError as error:
        raise ValueError("sparse_triton needs Triton: pip install 'sparsebert[gpu]'") from error
    ours, tritons = type(triton_kernels.row_kernel), type(triton_kernels.tl.sum)
    if ours is not tritons:
        raise ValueError("TRITON_INTERPRET was changed after Triton was imported: set it before")
    return ours.__name__ == "InterpretedFunction"


def configurations(
    kernel: str,
    head_size: int,
    dtype: torch.dtype,
    capability: int,
    dropout: bool = False,
    rest: bool = False,
    distances: bool = False,
) -> Configurations:
    """
    The launch configurations of a kernel (`"forward"`, `"short_forward"`, `"query_grad"`, `"column"` or
    `"short_backward"`) that may be chosen, the best guess first. `capability` is that of the GPU times 10;
    `distances`: whether there is a bias per distance.
    """
    if dtype == torch.float32:
        return FLOAT32
    tables = [HOPPER, {}, HOPPER_DROPOUT, {}]
    if capability >= 100:
        tables = [BLACKWELL, {}, BLACKWELL_DROPOUT, BLACKWELL_DISTANCES]
    elif capability < 90:
        tables = [AMPERE, AMPERE_REST, AMPERE_DROPOUT, AMPERE_DISTANCES]
    asked = (True, rest, dropout or distances, distances)
    # The last of those that are asked for and name the kernel and head size.
    return [
        table[kernel][head_size]
        for table, wanted in zip(tables, asked, strict=True)
        if wanted and head_size in table.get(kernel, {})
    ][-1]


def launch(
    kernel: str,
    grid: int,
    arguments: Sequence[Any],
    constants: dict[str, Any],
    choices: Sequence[Configuration],
    bucket: int,
) -> None:
    """
    Run a kernel of `triton_kernels` on `grid` programs, with arguments at run time, a tensor first, and at compile
    time, in one of several [`configurations`], see [`chosen`]. Lengths of the same `bucket` share a configuration.
    """
    from . import triton_kernels

    function, device = getattr(triton_kernels, kernel), arguments[0].device
    if _number is not None:
        choices = [choices[_number % len(choices)]]
    if interpreted():
        function[(grid,)](*arguments, **constants, STEP=choices[0][2])
        return

    def run(choice):
        warps, stages, step, *registers = choice
        limit = {"maxnreg": registers[0]} if registers else {}
        function[(grid,)](*arguments, **constants, STEP=step, num_warps=warps, num_stages=stages, **limit)

    key = ()
    if len(choices) > 1:
        dtypes = tuple(getattr(argument, "dtype", None) for argument in arguments)
        # A few programs leave most of the GPU idle, where another configuration may be the fastest.
        programs = min(max(grid, FEW_PROGRAMS), MANY_PROGRAMS).bit_length()
        key = (device, kernel, bucket, programs, dtypes, *constants.items(), *choices)
    with torch.cuda.device(device):
        run(chosen(key, device, choices, run))


def chosen(
    key: Hashable, device: torch.device, choices: Sequence[Configuration], run: Callable[[Configuration], None]
) -> Configuration:
    """
    The fastest configuration of a kernel that `run` launches, timed at the first call with this `key`. While a CUDA
    graph is captured or a graph is compiled nothing is timed, and under `torch.use_deterministic_algorithms` neither,
    since results depend on the configuration in their last bits: then it is the first, unless one has been chosen
    before. Threads may call this at the same time, as those of `DataParallel` and of autograd do.
    """
    if len(choices) == 1 or torch.are_deterministic_algorithms_enabled():
        return choices[0]
    if key not in _CHOSEN:
        if recorded():
            return choices[0]
        with _LOCKS.setdefault(device, threading.Lock()):
            if key not in _CHOSEN:
                _CHOSEN[key] = _fastest(key, choices, run)
    return _CHOSEN[key]


def _fastest(key, choices, run):
    from triton import knobs

    try:
        times = {choice: _milliseconds(functools.partial(run, choice)) for choice in choices}
    except torch.OutOfMemoryError:
        # The kernel needs no memory of its own, but timing empties the cache of the GPU by writing to a large buffer.
        return choices[0]
    best = min(choices, key=times.__getitem__)
    if knobs.autotuning.print:
        print(f"{key}: {best} of {times} (warps, stages, step, registers; ms)")
    return best


def _milliseconds(run):
    """Median time of a launch; infinite if it asks for more than the GPU has."""
    from triton import testing
    from triton.runtime.errors import OutOfResources

    try:
        return testing.do_bench(run, warmup=25, rep=100, return_mode="median")
    except OutOfResources:
        return math.inf
