"""
Timing in turns, ratios with their intervals, and the gate that results must pass before anything is timed.
"""

import gc
import itertools
import re
import statistics
import time
from pathlib import Path

import numpy as np
import torch


RESAMPLES = 2000
# As long as the longest chain of launches takes a host, in cycles of the device.
HEAD_START = 10_000_000
FLUSHED_BYTES = 2**28


class WrongResult(RuntimeError):
    """A system whose results are not those of float64."""


def check_close(name, results, truth, plain):
    """
    The gate: errors of at most twice those of plain PyTorch in the same dtype, plus a few units in the last place.
    """
    worst = 0.0
    for what, result in results.items():
        scale = truth[what].abs().max().item()
        error, allowed = ((values.double() - truth[what]).abs().max().item() for values in (result, plain[what]))
        limit = 2 * allowed + 4 * torch.finfo(result.dtype).eps * scale
        if not error <= limit:
            raise WrongResult(f"{name}: {what} is off by {error:.2e}, at most {limit:.2e} is allowed")
        worst = max(worst, error / max(scale, 1e-30))
    return worst


def check_dropout(name, function, query, key, value, live):
    """
    Check what holds for any dropout mask that is the same in forward and backward: `<out, dout> = <v, dv>` (the output
    is linear in the values) and `<q, dq> = <k, dk>`; over many rows the kept probabilities sum to 1 on average.
    """
    output = function(query, key, value)
    grad = torch.randn_like(output)
    gradients = torch.autograd.grad(output, (query, key, value), grad)
    pairs = {"value": (output, grad, value, gradients[2]), "query": (query, gradients[0], key, gradients[1])}
    eps = torch.finfo(output.dtype).eps
    for what, (a, b, c, d) in pairs.items():
        left, right = ((x.double() * y.double()) for x, y in ((a, b), (c, d)))
        # Roundings of the products add up as a random walk; another mask would give half of its length.
        limit = max(8 * eps, 1e-4) * (left.square().sum() + right.square().sum()).sqrt().item()
        if not abs((left.sum() - right.sum()).item()) <= limit:
            raise WrongResult(f"{name}: backward of {what} does not see the dropout mask of forward")
    with torch.no_grad():
        first, second = (function(query, key, torch.ones_like(value))[..., 0].double()[live] for _ in range(2))
    if torch.equal(first, second):
        raise WrongResult(f"{name}: two calls drop the same probabilities, or none")
    mean, deviation = first.mean().item(), first.std().item()
    if not abs(mean - 1) <= 6 * deviation / first.numel() ** 0.5 + eps:
        raise WrongResult(f"{name}: what dropout leaves sums to {mean:.4f} on average, deviation {deviation:.4f}")


def cpu_seconds(function):
    """Wall time of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def process_seconds(function):
    """CPU time of one call, all threads together: what others run on the machine counts less."""
    start = time.process_time()
    function()
    return time.process_time() - start


def cuda_seconds(function):
    """
    Time of one call on the device, by events, with a cold cache. The device is kept busy until all is launched, so
    that what the host needs for that does not count.
    """
    torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda").zero_()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HEAD_START)
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def cuda_wall_seconds(function):
    """Wall time of one call, launches included."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def interleaved(functions, timer, seconds, min_rounds, max_rounds=60):
    """Time functions in turns, each round in another order, so that drifts of the machine meet all of them."""
    names = list(functions)
    times = {name: [] for name in names}
    for name in names:
        timer(functions[name])
    begin = time.perf_counter()
    gc.collect()
    gc.disable()
    try:
        for turn in range(max_rounds):
            if turn >= min_rounds and time.perf_counter() - begin > seconds:
                break
            start = turn % len(names)
            for name in names[start:] + names[:start]:
                times[name].append(timer(functions[name]))
    finally:
        gc.enable()
    return times


def summary(times):
    """Median and quartiles in ms of one system's times, and their number."""
    quartiles = np.quantile(times, (0.25, 0.5, 0.75)) * 1e3
    return dict(zip(("q25_ms", "median_ms", "q75_ms"), quartiles.tolist(), strict=True)) | {"rounds": len(times)}


def speed_up(baseline, ours):
    """
    How much faster ours is: the ratio of medians, and its 95 % interval from resampling the rounds, which are pairs.
    """
    drawn = np.random.default_rng(0).integers(len(ours), size=(RESAMPLES, len(ours)))
    medians = [np.median(np.asarray(times)[drawn], axis=1) for times in (baseline, ours)]
    low, high = np.quantile(medians[0] / medians[1], (0.025, 0.975))
    ratio = statistics.median(baseline) / statistics.median(ours)
    return {"ratio": ratio, "low": float(low), "high": float(high)}


def resident(field="RssAnon"):
    """Memory of this process in bytes; by default its own alone, without that of files that are mapped into it."""
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def cpu_peak_bytes(function):
    """Memory of tensors that one call takes at its peak on CPUs, beyond what was there before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate((event.nbytes() for event in events), initial=0))


def peak_bytes(function):
    """Memory that one call takes at its peak on the CUDA device, beyond what was there before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
