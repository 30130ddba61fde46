"""
What attention reads of a mask that is being learned: fields of [`MaskInputs`], made once per forward.

Letters: B batch, L layers (1 when shared), H heads, n queries (the last n of the m positions), m keys, K learned
parameters per head.
"""

from dataclasses import replace
from typing import Any

import torch

from ..attention.biases.bias_entries import MAX_MASK_CONSTANT, kept_entries, set_entries, with_sequences
from ..attention.biases.mask_biases import (
    causal_entries,
    fix_entries,
    real_tokens,
    sequence_entries,
    special_of_batch,
    with_cuts,
)
from ..attention.biases.offset_biases import OffsetBias
from ..attention.kernels.bias_operator import has_many_blocks
from ..attention.mask_inputs import MaskInputs
from ..masks.expansion import SPECIAL_TOKENS
from .learned_mask import LearnedMask
from .mask_search import MaskSearch
from .searches import mask_bias


def drawn_inputs(
    search: MaskSearch, sample: torch.Tensor, noisy: torch.Tensor, inputs: MaskInputs, merged: bool
) -> dict[str, Any]:
    """
    A sampled mask: `sample` and `noisy` are from [`LearnedMask.draw`]. `merged`: whether the backend needs padding and
    special tokens merged into the bias of each sequence.
    """
    num_keys, first_row = inputs.num_keys, inputs.num_keys - inputs.num_queries
    if search.mask_form == "multiplicative":
        special = special_of_batch(inputs, search)
        gate = search.expand(sample, num_keys, off=0.0, on=1.0)[:, None, :, first_row:]
        gate = set_entries(gate, special, search.fixed_diagonal, on=1.0, off=0.0)
        bias = with_cuts(torch.zeros(1, 1, inputs.num_queries, num_keys, device=inputs.device), inputs)
        return {"gate": gate.unbind(0), "bias": (bias,)}
    if not merged and _by_distance(search, inputs):
        values = mask_bias(sample, noisy, search.mask_form, search.mask_constant, search.hard)
        return _distance_inputs(search, values, inputs, off=-search.mask_constant, start=True)
    special_tokens, apart = _apart(search, inputs)
    bias = search.bias(sample, noisy, num_keys)[:, :, first_row:]
    off, rows = -search.mask_constant, search.special_rows
    bias = fix_entries(bias, inputs, special_tokens, search.fixed_diagonal, off, rows)  # (L, H, n, m)
    if merged:
        return {"bias": tuple(replace(inputs, **apart).merged(layer) for layer in bias)}
    return {"learned": bias.unbind(0), **apart}


def _apart(search, inputs):
    """The special tokens that are at the same position in all sequences, and fields about those that are not."""
    first, last = real_tokens(inputs, search.special_tokens, search.last_token)
    # Position 0 is a special token or padding.
    special_tokens = search.special_tokens if last is None else "first"
    return special_tokens, {
        "first_token": first,
        "last_token": last,
        "learned_diagonal": search.fixed_diagonal is None,
        "special_rows": search.special_rows,
    }


def _by_distance(search, inputs):
    """Whether the bias stays one per distance. That of the rest differs by query."""
    sizes = inputs.num_queries, inputs.num_keys
    return (
        inputs.rest[0] is None
        and sizes[0] == sizes[1]
        and has_many_blocks(*sizes, inputs.device)
        and search.by_distance(sizes[1])
    )


def _distance_inputs(search, values, inputs, off, start):
    """
    The fields of a bias per parameter `(L, H, K)`, which is `off` where it removes an entry. `start`: whether position
    0 is special even where it is padding.
    """
    special_tokens, apart = _apart(search, inputs)
    positions = [0, inputs.num_keys - 1][: SPECIAL_TOKENS.index(special_tokens)]
    if inputs.padding is not None and not start:
        positions = positions[1:]
    special = torch.tensor(positions, dtype=torch.int64, device=inputs.device)
    diagonal = None if search.fixed_diagonal is None else 0.0 if search.fixed_diagonal else off
    layers = search.at_distances(values, inputs.num_keys, off)
    rules = (search.tile, special, diagonal, search.symmetric, search.special_rows)
    return {"learned": tuple(OffsetBias(layer, *rules) for layer in layers), **apart}


def pruned_inputs(learned: LearnedMask, inputs: MaskInputs, training: bool) -> dict[str, Any]:
    """
    A mask that is being pruned: the entries that are left, applied as a frozen mask would be. In training the logits
    get the gradient of P of their entries.
    """
    search, num_keys, first_row = learned.search, inputs.num_keys, inputs.num_keys - inputs.num_queries
    keep = search.expand(learned.kept.float(), num_keys, off=0.0, on=1.0)[:, None, :, first_row:] > 0
    if inputs.causal:
        keep = keep & causal_entries(inputs)
    fixed = sequence_entries(inputs, search, search.fixed_diagonal)
    biases, live = zip(*(with_sequences(layer, *fixed) for layer in keep.unbind(0)), strict=True)
    if not training:
        return {"bias": biases, "live": live}
    probs = torch.sigmoid(learned.alpha() / learned.temperature())
    bias = search.zeros(probs, num_keys)[:, None]
    special = special_of_batch(inputs, search)
    bias = set_entries(bias[..., first_row:, :], special, search.fixed_diagonal, on=0.0, off=0.0)
    return {"bias": tuple(map(torch.add, biases, bias.unbind(0))), "live": live}


def thresholded_inputs(learned: LearnedMask, inputs: MaskInputs, merged: bool) -> dict[str, Any]:
    """The thresholded mask of a search. As in training, a query that keeps no key attends to all of them."""
    mask = learned.thresholded_mask()
    if not merged and _by_distance(learned.search, inputs):
        values = -MAX_MASK_CONSTANT * (~mask.keep).float().to(inputs.device)
        return _distance_inputs(learned.search, values, inputs, off=-MAX_MASK_CONSTANT, start=False)
    keep = mask.structure(inputs.num_keys).to(inputs.device)
    keep = keep[:, None, :, inputs.num_keys - inputs.num_queries :]
    special = special_of_batch(inputs, mask)
    keep = kept_entries(keep, special, mask.diagonal)  # (L, B or 1, H, n, m)
    bias = torch.zeros(keep.shape, device=inputs.device).masked_fill_(~keep, -MAX_MASK_CONSTANT)
    return {"bias": with_cuts(bias, inputs).unbind(0)}
