"""Which backend serves a request: by name, by a table of measurements, or by measuring."""

import functools
import statistics
import time
from dataclasses import dataclass, replace

import torch
from transformers.utils import logging

from ..masks.compiled import base_table
from ..masks.sparse_mask import SparseMask
from ..masks.tiles import live_tiles
from .mask_inputs import MaskInputs


logger = logging.get_logger(__name__)

WANTED = {
    "gate": "mask_form 'multiplicative'",
    "weights": "output_attentions=True",
    "additive": "a mask that is not frozen, or a 4-D attention_mask",
    "learned": "a mask that is being learned",
    "window": "sliding windows around each sequence's last token (special_tokens 'first' or 'none' have none)",
}
TILE_SIZE = 64
ROUNDS = 5


@dataclass(frozen=True)
class Request:
    """
    What one forward asks of its backend.

    Args:
        device (`str`): `"cpu"`, `"cuda"`, ...
        dtype (`torch.dtype`): Of query, key and value.
        batch, num_heads, num_queries, num_keys, head_size (`int`): B, H, n, m, d.
        dropout (`float`): Probability of attention dropout, 0 in evaluation.
        gradients (`bool`): Whether a backward may follow.
        padded (`bool`): Whether there are padded positions.
        causal (`bool`): Whether future keys are cut.
        needs (`frozenset`): Keys of `WANTED`.
        probability_map (`str`): A name of `PROBABILITY_MAPS`.
    """

    device: str
    dtype: torch.dtype
    batch: int
    num_heads: int
    num_queries: int
    num_keys: int
    head_size: int
    dropout: float = 0.0
    gradients: bool = False
    padded: bool = False
    causal: bool = False
    needs: frozenset = frozenset()
    probability_map: str = "softmax"


def refusal(backends, name, request):
    """Why backend `name` cannot serve `request`, or `None`."""
    if lacking := request.needs - backends[name].supports:
        return f"it does not support {WANTED[min(lacking)]}"
    if request.probability_map not in backends[name].probability_maps:
        return f"it does not support probability_map {request.probability_map!r}"
    return backends[name].refuse(request)


def check(backends, name, request):
    """
    Raises:
        ValueError: If backend `name` cannot serve `request`.
    """
    if reason := refusal(backends, name, request):
        able = [other for other in backends if refusal(backends, other, request) is None]
        raise ValueError(f"{name} cannot run here: {reason}. Use {', '.join(able)} or sparse_auto")


@functools.lru_cache(maxsize=256)
def _live_tiles(handle, length, causal):
    return live_tiles(base_table(SparseMask.instances[handle], length, causal)[0], TILE_SIZE)


def by_table(backends, mask, request):
    """
    The choice of `sparse_auto`: what was fastest where it was measured (README, Kernels), the reference otherwise.

    Args:
        backends (`dict`): `BACKENDS`.
        mask ([`SparseMask`], *optional*): `None` while searching.
        request ([`Request`])

    Returns:
        `tuple` of `str`: Name and reason.
    """
    if request.probability_map != "softmax":
        return "sparse_eager", f"it alone supports probability_map {request.probability_map!r}"
    short = request.num_keys <= 128
    if request.needs & {"gate", "weights"}:
        return "sparse_eager", "attention probabilities or a multiplicative mask are asked for"
    if mask is None:
        if "learned" not in request.needs:
            return "sparse_eager", "the mask is not frozen"
        if request.device != "cpu" or "additive" in request.needs or not request.gradients:
            return "sparse_eager", "the mask is being learned, which fused attention runs on its slow path"
        if short and not request.dropout:
            return "sparse_eager", "the mask is being learned, without dropout and from up to 128 tokens"
        return "sparse_sdpa", "the mask is being learned; its gradient is summed over the sequences block by block"
    if request.device == "cuda":
        name, reason = _on_cuda(mask, request)
    else:
        limit = _csr_limit(request)
        name, reason = "sparse_cpu", f"density {mask.density:.2f} is at most {limit:.2f}"
        if mask.density > limit:
            name, reason = None, f"density {mask.density:.2f} is above {limit:.2f}"
    if name:
        why_not = refusal(backends, name, request)
        if why_not is None:
            return name, reason
        reason = f"{name} cannot run: {why_not}"
    if request.device == "cpu" and request.dropout and short:
        return "sparse_eager", f"{reason}; dropout on CPU at up to 128 tokens"
    if request.device == "cpu" and request.dtype == torch.bfloat16 and short:
        return "sparse_eager", f"{reason}; bfloat16 on CPU at up to 128 tokens"
    return "sparse_sdpa", f"{reason}; PyTorch's fused attention with an additive mask"


@functools.cache
def _has_amx():
    return getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()


def _csr_limit(request):
    """
    Density up to which `sparse_cpu` runs: where it was clearly faster than the best dense attention on two AVX-512
    cores, at lengths of 128 to 1024 (`python -m benchmarks.attention --sweep`).
    """
    full = request.dtype == torch.float32
    if request.dropout:
        return 0.7 if full else 0.3
    if not full and _has_amx():
        return 0.0  # dense attention has matrix units here, against which nothing was measured
    return 0.5 if full and request.num_keys <= 128 else 0.3


def _on_cuda(mask, request):
    if request.num_keys <= 256:
        return None, "up to 256 tokens a masked kernel has little to skip"
    live = _live_tiles(mask.handle, request.num_keys, request.causal)
    percent = f"{100 * live:.0f} % of the {TILE_SIZE} x {TILE_SIZE} tiles hold an entry"
    if live <= 0.6:
        return "sparse_triton", percent
    if request.dropout or request.padded:
        return (
            "sparse_triton",
            f"{percent}, but dropout and padding are fused (tiles of search dam_b would be skipped)",
        )
    return None, f"{percent}, so there is nothing to skip (search dam_b learns tiles)"


_MEASURED = {}


def by_measurement(backends, mask, request):
    """The choice of `sparse_measure`: the fastest of all that can run, timed once per mask and shape."""
    key = (None if mask is None else mask.handle, request)
    if key not in _MEASURED:
        names = [name for name in backends if refusal(backends, name, request) is None]
        if request.device == "cpu":
            # It is compiled anew for every shape, half a minute each.
            names = [name for name in names if name != "sparse_flex"]
        if mask is None or len(names) == 1:
            _MEASURED[key] = by_table(backends, mask, request)
        else:
            times = _times(backends, names, mask, request)
            best = min(times, key=times.get)
            listed = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in sorted(times.items()))
            _MEASURED[key] = best, f"the fastest of {listed}"
    return _MEASURED[key]


def _times(backends, names, mask, request):
    """Median seconds of the backends that run, on random inputs."""
    devices = [torch.cuda.current_device()] if request.device == "cuda" else []
    trials = {}
    # The caller's dropout masks must not depend on whether something was measured.
    with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad():
        for name in names:
            try:
                trial = _trial(backends[name], name, mask, request)
                trial()
            except RuntimeError as error:  # too little memory, a compiler that fails: what can run is asked for
                logger.warning_once(f"sparse_measure leaves out {name}: {str(error).strip().splitlines()[-1]}")
            else:
                trials[name] = trial
        return measure(trials, request.device)


def _trial(backend, name, mask, request):
    """A function that runs the backend once, forward and, if asked, backward, on random inputs of the shape."""
    device = torch.device(request.device)
    # In the layout of the host, (B, n, H, d) transposed.
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
    inputs = MaskInputs(
        name, request.num_queries, request.num_keys, device, mask, padding=padding, causal=request.causal
    )
    inputs = replace(inputs, **backend.prepare(mask, inputs)).for_layer(0)

    def run():
        output, _ = backend.function(query, key, value, inputs, request.head_size**-0.5, request.dropout)
        if request.gradients:
            output.backward(output.detach())

    return run


def measure(functions, device, rounds=ROUNDS):
    """
    Median seconds of each function, the functions taking turns; a first call of each is not counted.

    Args:
        functions (`dict`): Name to function without arguments.
        device (`str`): `"cuda"` is waited for.
        rounds (`int`): Calls of each.
    """
    times = {name: [] for name in functions}
    for turn in range(rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if device == "cuda":
                torch.cuda.synchronize()
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}
