"""Which backend serves a request: the one named, or one chosen by a table of measurements or by measuring."""

import functools
import re
from collections import ChainMap
from collections.abc import Callable, KeysView
from typing import Any

import torch
from transformers.utils import logging

from ...masks.sparse_mask import SparseMask
from ...masks.tiles import mask_tile_shares
from ..backends import BACKENDS, check_request, refusal
from ..capabilities import Request
from ..kernels.flex import num_compiled
from .self_check_process import outcome_of
from .self_check_results import FEW_TILES, TRUSTED, Setting
from .timing import measure, timed_layers, trial


logger = logging.get_logger(__name__)

TILE_SIZE = 64
# What `sparse_auto` may choose on GPUs besides PyTorch's own attention, once a self-check there has passed.
GPU_BACKENDS = ("sparse_triton", "sparse_flex")
# Up to so many tokens the reference is fast on CPUs.
SHORT = 128
# With more tokens than this, a mask that is not frozen is evaluated by fused attention.
LONG = 512
# With more kinds of inputs than this, compiling `sparse_flex` for each costs more than it saves.
FEW_COMPILED = 16


@functools.lru_cache(maxsize=256)
def _tile_shares(handle, length, causal):
    return mask_tile_shares(SparseMask.instances[handle], length, TILE_SIZE, causal)


@functools.lru_cache(maxsize=256)
def _density(handle, length, causal):
    mask = SparseMask.instances[handle]
    own = not length or (length == mask.length and not causal)
    return mask.density if own else mask.density_at(length, causal)


def automatic(mask: SparseMask | None, request: Request, may_run: bool = True) -> tuple[str, str]:
    """
    The choice of `sparse_auto` and the reason for it: the backend that was fastest in our measurements
    (docs/kernels.md) or, on a GPU, in a self-check there, which is done once; the reference where nothing was
    measured. `mask` is `None` while searching. Unless a self-check `may_run`, only what earlier ones found counts.
    """
    if request.probability_map != "softmax":
        return "sparse_eager", f"the reference, for probability_map {request.probability_map!r}"
    if request.needs & {"gate", "weights"}:
        return "sparse_eager", "attention probabilities or a multiplicative mask are needed"
    if "export" in request.needs:
        return "sparse_sdpa", "an exported graph holds operators of PyTorch only"
    if mask is None:
        return _without_mask(request)
    name: str | None
    if request.device == "cuda":
        name, reason = _on_cuda(mask, request, may_run)
    else:
        limit = _csr_limit(request)
        density = _density(mask.handle, request.num_keys, request.causal)
        name, reason = "sparse_cpu", f"density {density:.3f} is at most {limit:.3f}"
        if density > limit:
            name, reason = None, f"density {density:.3f} is above {limit:.3f}"
    if name:
        why_not = refusal(name, request)
        if why_not is None:
            return name, reason
        reason = f"{name} cannot run: {why_not}"
    if request.device == "cpu" and request.num_keys <= SHORT:
        if request.dropout:
            return "sparse_eager", f"{reason}; dropout on CPU at up to {SHORT} tokens"
        if request.dtype == torch.bfloat16:
            return "sparse_eager", f"{reason}; bfloat16 on CPU at up to {SHORT} tokens"
    return "sparse_sdpa", f"{reason}; PyTorch's fused attention with the mask as a bias"


def _without_mask(request):
    """The choice while the mask is being searched."""
    if "learned" not in request.needs:
        if request.device == "cpu" and not request.gradients and request.num_keys > LONG:
            return "sparse_sdpa", "the mask is not frozen; without gradients, which fused attention is fast at"
        return "sparse_eager", "the mask is not frozen"
    if request.device != "cpu" or "additive" in request.needs or not request.gradients:
        return "sparse_eager", "the mask is being learned, where fused attention would take its slow path"
    if request.num_keys <= SHORT and not request.dropout:
        return "sparse_eager", f"the mask is being learned, without dropout and with at most {SHORT} tokens"
    return "sparse_sdpa", "the mask is being learned; its gradient is summed over the sequences block by block"


@functools.cache
def _has_amx():
    return getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()


def _csr_limit(request):
    """
    Highest density at which `sparse_cpu` is chosen. Below it, `sparse_cpu` was clearly faster than the best dense
    attention on two AVX-512 cores at lengths from 128 to 1024 (`python -m benchmarks.attention --sweep`).
    """
    full = request.dtype == torch.float32
    if request.dropout:
        return 0.7 if full else 0.3
    if not full and _has_amx():
        return 0.25 if request.gradients else 0.15  # dense attention runs on matrix units: as fast at 0.3 and 0.2
    return 0.5 if full and request.num_keys <= SHORT else 0.3


def _on_cuda(mask, request, may_run):
    if request.num_keys <= FEW_TILES and not request.padded:
        return None, f"with at most {FEW_TILES} tokens a masked kernel has little to skip"
    live, _ = _tile_shares(mask.handle, request.num_keys, request.causal)
    if live > 0.6 and not (request.dropout or request.padded):
        percent = f"{100 * live:.0f} % of the {TILE_SIZE} x {TILE_SIZE} tiles hold an entry"
        return None, f"{percent}, so there is little to skip (sparsebert search --device_target gpu learns tiles)"
    able, why_not = _to_check(request)
    if not able:
        return None, "; ".join(f"not {name}: {reason}" for name, reason in why_not.items())
    outcome = _checked(mask, request, able, may_run)
    if outcome is None:
        return None, _unchecked(able)
    worth = [name for name in (*able, TRUSTED) if name != "sparse_flex" or num_compiled() <= FEW_COMPILED]
    name, reason = outcome.fastest(worth)
    return (None if name == TRUSTED else name), reason


def _to_check(request):
    """The backends that a self-check on the GPU is about, and the reasons why it is not about others."""
    why_not = {name: refusal(name, request) for name in GPU_BACKENDS}
    if request.dtype == torch.float32:
        why_not["sparse_triton"] = "in float32 it is slower than PyTorch's attention"
    able = tuple(name for name in GPU_BACKENDS if why_not[name] is None)
    return able, {name: reason for name, reason in why_not.items() if reason is not None}


def _checked(mask, request, able, may_run):
    """The outcome of the self-check of these backends for a request, on the GPU of its tensors."""
    longest = mask.length if mask.length_policy == "error" else None
    index = torch.cuda.current_device() if request.index is None and torch.cuda.is_available() else request.index
    shares = _tile_shares(mask.handle, request.num_keys, request.causal)
    return outcome_of(f"cuda:{index or 0}", Setting.of(request, longest, *shares), (*able, TRUSTED), mask, may_run)


def _unchecked(names):
    return f"no self-check of {' and '.join(names)} has passed on that GPU yet"


_MEASURED: dict[tuple[str | None, Request], tuple[str, str]] = {}


def by_measurement(mask: SparseMask | None, request: Request, may_run: bool = True) -> tuple[str, str]:
    """
    The choice of `sparse_measure`: the fastest of all backends that can serve the request, measured once per mask and
    request; on a GPU, of those that a self-check there has found right. Where nothing may run there, a request that
    has not been measured gets the choice of [`automatic`].
    """
    key = None if mask is None else mask.handle, request
    if key in _MEASURED:
        return _MEASURED[key]
    on_gpu = request.device == "cuda"
    names = [name for name in BACKENDS if refusal(name, request) is None]
    if request.device == "cpu":
        # On CPUs it is compiled for every shape, which takes half a minute each time.
        names = [name for name in names if name != "sparse_flex"]
    if on_gpu and not may_run:
        return automatic(mask, request, may_run=False)
    if mask is None or len(names) == 1 or "export" in request.needs:
        _MEASURED[key] = automatic(mask, request, may_run=False)
        return _MEASURED[key]
    why_not = _not_passed(mask, request) if on_gpu else {}
    times = _times([name for name in names if name not in why_not], mask, request)
    if not times:  # such as under vmap, where the random inputs are refused
        return automatic(mask, request, may_run=False)
    listed = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in sorted(times.items()))
    left_out = "".join(f"; not {name}: {why_not[name]}" for name in names if name in why_not)
    _MEASURED[key] = min(times, key=times.__getitem__), f"the fastest of {listed}{left_out}"
    return _MEASURED[key]


def _not_passed(mask, request):
    """The backends for GPUs that no self-check has found right, with reasons. They are not to run in this process."""
    able, why_not = _to_check(request)
    if able:
        outcome = _checked(mask, request, able, may_run=True)
        if outcome is None:
            return why_not | dict.fromkeys(able, _unchecked(able))
        passed = outcome.passed()
        why_not |= {name: "it has not passed the self-check on that GPU" for name in able if name not in passed}
    return why_not


def _times(names, mask, request):
    """Median seconds of a layer with each backend that runs without an error, on random inputs."""
    device = request.on_device()
    devices = [torch.cuda.current_device() if device.index is None else device.index] if device.type == "cuda" else []
    trials = {}
    # The caller's random numbers must not depend on whether something was measured.
    with torch.random.fork_rng(devices), torch.inference_mode(False), torch.set_grad_enabled(request.gradients):
        for name in names:
            try:
                # A copy, since the forms of all backends may be more than one mask keeps.
                run = trial(name, mask.replace(), request)
                run()
            except RuntimeError as error:  # out of memory, or a failing compiler: measure the others
                logger.warning_once(f"sparse_measure leaves out {name}: {str(error).strip().splitlines()[-1]}")
            else:
                trials[name] = run
        found, number = measure(trials, str(device)), len(timed_layers(mask, device.type))
    return {name: seconds / number for name, seconds in found.items()}


# The names that choose a backend for each request.
CHOICES: dict[str, Callable[..., tuple[str, str]]] = {"sparse_auto": automatic, "sparse_measure": by_measurement}
# All names, those of backends first: a view, which has what is registered later.
ATTENTION_NAMES: KeysView[str] = ChainMap[str, Any](CHOICES, BACKENDS).keys()
# The attention implementation in the configuration file of a model with a mask. Without this package transformers
# refuses it, and says this, where it would otherwise load the model without the mask.
SAVED_NAME = "sparse_auto (of the package sparsebert)"
# What such files may say; only the first is written.
SAVED_NAMES = (SAVED_NAME, "sparse_auto (pip install sparsebert)")
# What the names of transformers mean on a model that carries a mask.
TWINS = {"eager": "sparse_eager", "sdpa": "sparse_sdpa", "flex_attention": "sparse_flex"}
# Choices that have been logged, with their reasons but for the numbers in them.
_SAID: set[tuple[str, str, str]] = set()


def sparse_name(name: str | None) -> str:
    """
    The name in `ATTENTION_NAMES` that an attention implementation means on a model that carries a mask: for a name of
    transformers its twin in `TWINS`, which is said once, and `sparse_auto` for `None`.
    """
    if name is None or name in SAVED_NAMES:
        return "sparse_auto"
    if name in ATTENTION_NAMES:
        return name
    if name not in TWINS:
        raise ValueError(
            f"attn_implementation {name!r} would ignore the mask that this model carries: use one of "
            f"{', '.join(ATTENTION_NAMES)}, or {', '.join(TWINS)} for {', '.join(TWINS.values())}"
        )
    logger.warning_once(f"attn_implementation {name!r} means {TWINS[name]!r} on a model that carries a sparse mask.")
    return TWINS[name]


def with_attentions(name: str) -> str:
    """
    The name to run under where attention probabilities are asked for and `name` is what a name of transformers means.
    Transformers goes on there, without probabilities; here the reference returns them, which is said once.
    """
    if name not in BACKENDS or "weights" in BACKENDS[name].supports:
        return name
    if not torch.compiler.is_compiling():
        logger.warning_once(f"output_attentions: {name} does not return attentions, so sparse_eager runs instead.")
    return "sparse_eager"


def check_backend(name: str, probability_map: str = "softmax") -> None:
    """Check that there is a backend of this name that applies the probability map."""
    name = sparse_name(name)
    able = [other for other, backend in BACKENDS.items() if probability_map in backend.probability_maps]
    if name in BACKENDS and name not in able:
        raise ValueError(
            f"{name} does not support probability_map {probability_map!r}: use {', '.join(able)} or sparse_auto"
        )


# A compiled graph holds the answer as a constant, since it depends on the mask and the request alone.
@torch.compiler.assume_constant_result
def _choose(name, handle, fields, compiling):
    mask = None if handle is None else SparseMask.instances[handle]
    request = Request(*fields)
    if name in BACKENDS:
        check_request(name, request)
        return name
    # While a graph is captured or compiled nothing may be checked or, on a GPU, timed.
    chosen, reason = CHOICES[name](mask, request, not (compiling or _capturing(request.device)))
    # Inputs of other lengths, and a mask that grows sparser, have the same reason with other numbers.
    if (said := (name, chosen, re.sub(r"\d+(\.\d+)?", "", reason))) not in _SAID:
        _SAID.add(said)
        logger.warning(f"{name} runs {chosen}: {reason}.")
    return chosen


def _capturing(device):
    return device == "cuda" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def choose_backend(name: str, mask: SparseMask | None, *fields: Any) -> str:
    """
    The backend, a key of `BACKENDS`, that serves a request, given as the fields of [`Request`], under the attention
    implementation `name` that the user set. `mask` is `None` while searching.
    """
    if name not in ATTENTION_NAMES:
        raise ValueError(
            f"this model carries a sparse mask, which the attention implementation {name!r} would ignore: use one of "
            f"{', '.join(ATTENTION_NAMES)}, for example model.set_attn_implementation('sparse_auto')"
        )
    return _choose(name, None if mask is None else mask.handle, fields, torch.compiler.is_compiling())
