"""
A mask as a bias of the scores: made from a frozen or a learned mask, its special tokens and diagonal, padding and
causality.

Letters: B batch, L layers (1 when shared), H heads, n queries (the last n of the m positions), m keys.
"""

from typing import Any, Protocol

import torch

from ...masks.compiled_forms import compiled
from ...masks.expansion import special_entries
from ...masks.exported import exported_structure, exporting
from ...masks.sparse_mask import SparseMask
from ..mask_inputs import MaskInputs
from .bias_entries import (
    REMOVED,
    additive,
    diagonal_entries,
    first_real,
    last_real,
    set_entries,
    with_sequences,
)


class SpecialRules(Protocol):
    """What a mask and its search alike say about special tokens, see [`SparseMask`]."""

    special_tokens: str
    last_token: str
    special_rows: bool


def _additive_form(table, dtype):
    live = table.any(-1, keepdim=True)[None]
    return additive(table, dtype)[None], live[:0] if live.all() else live


def _table_form(table):
    return (table,)


def prepare_bias(mask: SparseMask, inputs: MaskInputs, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """
    A frozen mask as a bias of some dtype, padding and causality included: the fields `bias`, `live` and `by_sequence`
    of [`MaskInputs`]. Under padding, the bias of all layers and sequences is never made at once.
    """
    first_row = inputs.num_keys - inputs.num_queries
    if exporting():
        table = exported_structure(mask, inputs.num_keys, inputs.device)[:, None, :, first_row:]
        if inputs.causal:
            table = table & causal_entries(inputs)
        return _by_layer(table.unbind(0), inputs, mask, dtype)
    length = inputs.compiled_length(mask)
    if inputs.padding is None:
        # It is the same for every batch, so it is cached.
        forms = compiled(mask, _additive_form, length, inputs.causal, inputs.device, "all", (dtype,))
        if first_row or length > inputs.num_keys:
            rows = slice(first_row, inputs.num_keys)
            forms = tuple((bias[:, :, rows, : inputs.num_keys], live[:, :, rows]) for bias, live in forms)
        return {
            "bias": tuple(bias for bias, _ in forms),
            "live": tuple(live if len(live) else None for _, live in forms),
        }
    tables = compiled(mask, _table_form, length, inputs.causal, inputs.device)
    keep = tuple(table[None, :, first_row : inputs.num_keys, : inputs.num_keys] for (table,) in tables)
    return _by_layer(keep, inputs, mask, dtype)


def _by_layer(keep, inputs, mask, dtype):
    """Bool masks `(1, H, n, m)` of each layer: made into a bias now if all layers share it, else by `for_layer`."""
    by_sequence = sequence_entries(inputs, mask, mask.diagonal, dtype)
    if len(keep) > 1:
        return {"bias": keep, "by_sequence": by_sequence}
    bias, live = with_sequences(keep[0], *by_sequence)
    return {"bias": (bias,), "live": (live,)}


def sequence_entries(
    inputs: MaskInputs, rules: SpecialRules, diagonal: bool | None, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    What a bias has whatever a mask keeps, causality included: special tokens, a fixed diagonal, padding and a sliding
    window. Which entries, bool `(B or 1, 1, n, m)`, and their values.
    """
    fixed = special_of_batch(inputs, rules)
    if inputs.causal:
        fixed = fixed & causal_entries(inputs)
    removed = torch.zeros_like(fixed)
    if diagonal is not None:
        own = diagonal_entries(fixed)
        fixed, removed = fixed | own, removed if diagonal else removed | own
    if inputs.window is not None:
        removed = removed | ~near_entries(inputs, inputs.window)
    if inputs.padding is not None:
        first_row = inputs.num_keys - inputs.num_queries
        removed = removed | ~(inputs.padding[:, None, None, :] & inputs.padding[:, None, first_row:, None])
    return fixed | removed, additive(~removed, dtype)


def special_of_batch(inputs: MaskInputs, rules: SpecialRules) -> torch.Tensor:
    """
    The rows and columns of the special tokens, for the queries of this forward: bool `(B or 1, 1, n, m)`. The rules
    are a mask or its search.
    """
    first, last = real_tokens(inputs, rules.special_tokens, rules.last_token)
    special = special_entries(
        inputs.num_keys, rules.special_tokens, first, last, inputs.device, rows=rules.special_rows
    )
    special = special.view(-1, 1, inputs.num_keys, inputs.num_keys)
    if inputs.padding is not None:
        # For all masks alike, so that gradients are summed over the sequences in one order.
        special = special.expand(inputs.padding.shape[0], -1, -1, -1)
    return special[:, :, inputs.num_keys - inputs.num_queries :]


def real_tokens(
    inputs: MaskInputs, special_tokens: str, last_token: str
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """
    Positions of the first and of the last token of each sequence, int64 `(B,)`; `None` for a token that is not special
    or has the same position in all sequences.
    """
    if inputs.padding is None or special_tokens == "none":
        return None, None
    follows = special_tokens == "first_last" and last_token == "real"
    return first_real(inputs.padding), last_real(inputs.padding) if follows else None


def with_cuts(bias: torch.Tensor, inputs: MaskInputs) -> torch.Tensor:
    """A bias `(..., n, m)` with padded keys and, in a decoder, future keys removed."""
    if inputs.padding is not None:
        bias = bias.masked_fill(~inputs.padding[:, None, None, :], REMOVED)
    return bias.masked_fill(~causal_entries(inputs), REMOVED) if inputs.causal else bias


def fix_entries(
    bias: torch.Tensor,
    inputs: MaskInputs,
    special_tokens: str,
    diagonal: bool | None,
    off: float,
    special_rows: bool = True,
) -> torch.Tensor:
    """
    A learned bias `(..., n, m)` with the entries that are not learned set: special tokens at a fixed position, a fixed
    diagonal (`off` is the bias of a removed one), causality. Their values are ignored and get no gradient.
    """
    special = special_entries(inputs.num_keys, special_tokens, device=inputs.device, rows=special_rows)
    special = special[inputs.num_keys - inputs.num_queries :]
    learned = set_entries(torch.ones(special.shape, device=inputs.device), special, diagonal, on=0.0, off=0.0)
    fixed = set_entries(torch.zeros(special.shape, device=inputs.device), special, diagonal, on=0.0, off=off)
    if inputs.causal:
        future = ~causal_entries(inputs)
        learned, fixed = learned.masked_fill(future, 0.0), fixed.masked_fill(future, REMOVED)
    # A single pass over all heads, forward and backward.
    return torch.addcmul(fixed, bias, learned)


def causal_entries(inputs: MaskInputs) -> torch.Tensor:
    """Bool `(n, m)`, True where key j <= query i."""
    position = torch.arange(inputs.num_keys, device=inputs.device)
    return position[inputs.num_keys - inputs.num_queries :, None] >= position


def near_entries(inputs: MaskInputs, window: int) -> torch.Tensor:
    """Bool `(n, m)`, True where query and key are at most `window` apart."""
    position = torch.arange(inputs.num_keys, device=inputs.device)
    return (position[inputs.num_keys - inputs.num_queries :, None] - position).abs() <= window
