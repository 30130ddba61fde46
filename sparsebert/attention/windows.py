"""Sliding windows: layers of a model in which a token attends to its neighborhood only, in addition to the mask."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from ..masks.compiled_forms import narrowed, windowed
from ..masks.exported import exporting, recorded
from .backends import prepared
from .biases.bias_entries import REMOVED
from .biases.mask_biases import near_entries
from .choosing.choice import choose_backend
from .distance_bias import with_distance_forms
from .mask_inputs import MaskInputs


def local_inputs(
    inputs: MaskInputs, window: int, name: str, request: tuple[Any, ...], needs: Collection[str]
) -> MaskInputs:
    """
    The mask inputs of the layers whose queries see keys up to `window` away, from the `inputs` of the other layers,
    the attention implementation of the model, and what it asks for: the fields of [`Request`] from `device` to
    `causal`, and `needs`. They have no rest: it is the mean of a whole sequence, which these queries do not see.
    """
    mask = inputs.sparse_mask
    if mask is None:
        far = ~near_entries(inputs, window)

        def cut_far(bias):
            return bias.masked_fill(far, REMOVED)

        return with_distance_forms(replace(inputs, bias=tuple(map(cut_far, inputs.bias)), rest=(None,)))
    last_differs = mask.special_tokens == "first_last" and mask.last_token == "real"
    first_differs = mask.special_tokens != "none"
    padding = inputs.padding
    # A special token may differ by sequence: then the window is not part of the mask.
    differs = exporting() or (padding is not None and (last_differs or (first_differs and _may_be_left(padding))))
    needs = ({*needs, "window"} if differs else set(needs)) - {"rest"}
    toeplitz = mask.form != "table" and not exporting()
    if toeplitz or differs:
        local_mask = narrowed(mask, window) if toeplitz else mask
    else:
        local_mask = windowed(mask, window, inputs.num_keys)
    backend = choose_backend(name, local_mask, *request, frozenset(needs), "softmax", inputs.device.index)
    cut = differs or (toeplitz and backend == "sparse_cpu")  # which needs no table for it
    if toeplitz and not cut:
        local_mask = windowed(mask, window, inputs.num_keys)
    sizes = (inputs.num_queries, inputs.num_keys, inputs.device)
    cuts = (inputs.padding, inputs.causal, window if cut else None)
    local = MaskInputs(backend, *sizes, local_mask, *cuts, dropout_layers=inputs.dropout_layers)
    local = replace(local, dtype=inputs.dtype, distance_bias=inputs.distance_bias)
    return with_distance_forms(prepared(local))


def _may_be_left(padding):
    """Whether a sequence starts with padding. In a graph the question would depend on data."""
    return recorded() or not bool(padding[:, 0].all())
