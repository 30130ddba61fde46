"""How long attention backends take: they are run on random inputs, in turns."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ...masks.sparse_mask import SparseMask
from ..backends import prepared, run_backend
from ..capabilities import Request
from ..distance_bias import with_distance_forms
from ..mask_inputs import MaskInputs
from ..rest import rest_fields


ROUNDS = 5
# Layers that a trial runs at most, evenly spaced over a mask. As many calls stand for a model that shares the mask.
LAYERS = {"cpu": 2, "cuda": 12}
# Cycles that keep a GPU busy until all is launched: what the host needs for that, it needs beside other kernels.
_HEAD_START = 10_000_000
# The probability of attention dropout in a trial, which its time does not depend on.
_DROPOUT = 0.1


def timed_layers(mask: SparseMask, device_type: str) -> list[int]:
    """The layers of a mask that a trial runs."""
    most = LAYERS.get(device_type, 1)
    number = max(mask.num_layers, len(mask.rest_biases()))
    return [0] * most if number == 1 else list(range(0, number, -(-number // most)))


def trial(name: str, mask: SparseMask, request: Request) -> Callable[[], None]:
    """
    A function that prepares a mask as a forward of a model does, and runs its [`timed_layers`] on random inputs,
    forward and, with gradients, backward. With padding, sequences have from half the length on.
    """
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
        lengths = torch.linspace(request.num_keys / 2, request.num_keys, request.batch + 1, device=device)[1:]
        padding = torch.arange(request.num_keys, device=device) < lengths.ceil()[:, None]
    sizes = (request.num_queries, request.num_keys, device)
    inputs = MaskInputs(name, *sizes, mask, padding, request.causal, dtype=request.dtype)
    if "distance_bias" in request.needs:
        bias = torch.randn(request.num_heads, 2 * request.num_keys - 1, device=device, requires_grad=request.gradients)
        inputs = replace(inputs, distance_bias=(bias,))
    inputs = replace(inputs, **rest_fields(mask, inputs))
    layers, dropout = timed_layers(mask, request.device), _DROPOUT if request.dropout else 0.0

    def run():
        ready = prepared(inputs)
        for layer in layers:
            of_layer = with_distance_forms(ready.for_layer(layer))
            output, _ = run_backend(query, key, value, of_layer, request.head_size**-0.5, dropout)
            if request.gradients:
                output.backward(output.detach())

    return run


def measure(functions: Mapping[str, Callable[[], Any]], device: str, rounds: int = ROUNDS) -> dict[str, float]:
    """
    Median seconds of each function, which take turns; the first call of each is not counted. On a GPU (`"cuda:0"`) the
    time of the device counts, by events.
    """
    seconds = _seconds_on_gpu if device.startswith("cuda") else _seconds
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(rounds + 1):
        for name, function in functions.items():
            took = seconds(function, device)
            if turn:
                times[name].append(took)
    return {name: statistics.median(values) for name, values in times.items()}


def _seconds(function, device):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _seconds_on_gpu(function, device):
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_HEAD_START)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3
