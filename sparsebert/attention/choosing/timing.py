"""How long attention backends take: they are run on random inputs, in turns."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...masks.sparse_mask import SparseMask
from ..backends import prepared, run_backend
from ..capabilities import Request
from ..mask_inputs import MaskInputs


ROUNDS = 5
# The probability of attention dropout in a trial, which its time does not depend on.
_DROPOUT = 0.1


def trial(name: str, mask: SparseMask, request: Request) -> Callable[[], None]:
    """A function that runs a backend once on random inputs, forward and, with gradients, backward."""
    device = request.on_device()
    # The host's memory layout: (B, n, H, d), transposed.
    query, key, value = (
        torch.randn(request.batch, rows, request.num_heads, request.head_size, dtype=request.dtype, device=device)
        .transpose(1, 2)
        .requires_grad_(request.gradients)
        for rows in (request.num_queries, request.num_keys, request.num_keys)
    )
    padding = None
    if request.padded:
        padding = torch.ones(request.batch, request.num_keys, dtype=torch.bool, device=device)
        padding[:, request.num_keys - request.num_keys // 8 :] = False
    inputs = MaskInputs(name, request.num_queries, request.num_keys, device, mask, padding, request.causal)
    inputs = prepared(inputs).for_layer(0)
    dropout = _DROPOUT if request.dropout else 0.0

    def run():
        output, _ = run_backend(query, key, value, inputs, request.head_size**-0.5, dropout)
        if request.gradients:
            output.backward(output.detach())

    return run


def measure(functions: Mapping[str, Callable[[], Any]], device: str, rounds: int = ROUNDS) -> dict[str, float]:
    """
    Median seconds of each function, which take turns; the first call of each is not counted. A GPU (`"cuda:0"`) is
    synchronized after every call.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if device.startswith("cuda"):
                torch.cuda.synchronize(device)
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}
