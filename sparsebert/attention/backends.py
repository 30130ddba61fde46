"""
Attention backends, entered through the host's attention and mask tables.

A backend is a function and a row of `BACKENDS`. Explicit names never fall back; only `sparse_auto` (by a table of
measurements) and `sparse_measure` (by measuring) choose.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers.utils import logging

from ..masks.sparse_mask import SparseMask
from . import choice, cpu, flex, triton
from .eager import eager_attention
from .mask_inputs import prepare_bias
from .probability_maps import PROBABILITY_MAPS
from .sdpa import sdpa_attention


logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Backend:
    """
    One way to run attention under a mask.

    Args:
        function (`Callable`): `(query, key, value, inputs, scaling, dropout) -> (output, weights or None)`; query of
            shape `(B, H, n, d)`, output of shape `(B, n, H, d)`, `inputs` a [`MaskInputs`] of one layer, `dropout` 0
            in evaluation.
        prepare (`Callable`): `(mask, inputs) -> dict`, the fields of [`MaskInputs`] that `function` reads, made once
            per forward for all layers.
        refuse (`Callable`): `(request) -> str or None`, why it cannot serve a [`Request`].
        supports (`frozenset`): What it can do beyond a frozen mask with padding: `"additive"` (the thresholded
            mask of a search, 4-D masks of the caller), `"learned"` (masks that are being learned), `"gate"`
            (multiplicative masks), `"weights"` (returns the attention probabilities), `"window"` (a window that
            differs by sequence).
        probability_maps (`tuple`): Names of the `PROBABILITY_MAPS` that it can apply.
    """

    function: Callable
    prepare: Callable
    refuse: Callable = lambda request: None
    supports: frozenset = frozenset()
    probability_maps: tuple = ("softmax",)


BACKENDS = {
    "sparse_eager": Backend(
        eager_attention,
        prepare_bias,
        supports=frozenset(choice.WANTED),
        probability_maps=tuple(PROBABILITY_MAPS),
    ),
    "sparse_sdpa": Backend(sdpa_attention, prepare_bias, supports=frozenset({"additive", "learned", "window"})),
    "sparse_cpu": Backend(cpu.csr_backend, cpu.prepare, cpu.refuse),
    "sparse_triton": Backend(triton.triton_backend, triton.prepare, triton.refuse),
    "sparse_flex": Backend(flex.flex_backend, flex.prepare, flex.refuse),
}
CHOICES = {"sparse_auto": choice.by_table, "sparse_measure": choice.by_measurement}
ATTENTION_NAMES = (*BACKENDS, *CHOICES)


def check_backend(name, probability_map="softmax"):
    """
    Raises:
        ValueError: If `name` is not an attention implementation that applies the mask and the probability map.
    """
    if name not in ATTENTION_NAMES:
        raise ValueError(f"attn_implementation must be one of {', '.join(ATTENTION_NAMES)}, got {name!r}")
    able = [other for other, backend in BACKENDS.items() if probability_map in backend.probability_maps]
    if name in BACKENDS and name not in able:
        raise ValueError(
            f"{name} does not support probability_map {probability_map!r}: use {', '.join(able)} or sparse_auto"
        )


# Depends on the mask and the request alone, so a graph compiled around a model may hold the answer.
@torch.compiler.assume_constant_result
def _choose(name, handle, fields):
    mask = None if handle is None else SparseMask.instances[handle]
    request = choice.Request(*fields)
    if name in BACKENDS:
        choice.check(BACKENDS, name, request)
        return name
    chosen, reason = CHOICES[name](BACKENDS, mask, request)
    logger.warning_once(f"{name} runs {chosen}: {reason}.")
    return chosen


def choose_backend(name, mask, *fields):
    """
    The backend that serves a request.

    Args:
        name (`str`): What the user set as attention implementation.
        mask ([`SparseMask`], *optional*): `None` while searching.
        fields: Of [`Request`], in their order.

    Raises:
        ValueError: If `name` is not one of ours, or cannot do what is required.
    """
    if name not in ATTENTION_NAMES:
        raise ValueError(
            f"this model carries a sparse mask, which the attention implementation {name!r} would ignore: use one of "
            f"{', '.join(ATTENTION_NAMES)}, for example model.set_attn_implementation('sparse_auto')"
        )
    return _choose(name, None if mask is None else mask.handle, fields)


def run_backend(query, key, value, inputs, scaling, dropout):
    """Output `(B, n, H, d)` and the probabilities `(B, H, n, m)` or `None`, under the mask of one layer."""
    device = query.device.type
    own = inputs.compiled[0] is not None or inputs.learned[0] is not None
    if own and torch.is_autocast_enabled(device):
        # Operators of PyTorch cast their inputs themselves, ours do not.
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return BACKENDS[inputs.backend].function(query, key, value, inputs, scaling, dropout)
