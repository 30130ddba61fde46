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
from .bias_entries import REMOVED, additive, first_real, kept_entries, last_real, set_entries


class SpecialRules(Protocol):
    """What a mask and its search alike say about special tokens, see [`SparseMask`]."""

    special_tokens: str
    last_token: str
    special_rows: bool


def _additive_form(table):
    live = table.any(-1, keepdim=True)[None]
    return additive(table)[None], live[:0] if live.all() else live


def _table_form(table):
    return (table,)


def prepare_bias(mask: SparseMask, inputs: MaskInputs) -> dict[str, Any]:
    """A frozen mask as a bias, padding and causality included: the fields `bias` and `live` of [`MaskInputs`]."""
    first_row = inputs.num_keys - inputs.num_queries
    if exporting():
        keep = exported_structure(mask, inputs.num_keys, inputs.device)[:, None, :, first_row:]
        if inputs.causal:
            keep = keep & causal_entries(inputs)
        return bias_and_live(keep, inputs, mask, mask.diagonal)
    if inputs.padding is None:
        # It is the same for every batch, so it is cached.
        length = inputs.compiled_length(mask)
        forms = compiled(mask, _additive_form, length, inputs.causal, inputs.device, special="all")
        if first_row or length > inputs.num_keys:
            rows = slice(first_row, inputs.num_keys)
            forms = tuple((bias[:, :, rows, : inputs.num_keys], live[:, :, rows]) for bias, live in forms)
        return {
            "bias": tuple(bias for bias, _ in forms),
            "live": tuple(live if len(live) else None for _, live in forms),
        }
    tables = compiled(mask, _table_form, inputs.compiled_length(mask), inputs.causal, inputs.device)
    keep = torch.stack([table[:, first_row : inputs.num_keys, : inputs.num_keys] for (table,) in tables])[:, None]
    return bias_and_live(keep, inputs, mask, mask.diagonal)


def bias_and_live(
    keep: torch.Tensor, inputs: MaskInputs, rules: SpecialRules, diagonal: bool | None
) -> dict[str, Any]:
    """
    A bool mask `(L, 1, H, n, m)`, causality included, as the fields `bias` and `live` of [`MaskInputs`], with what
    depends on the sequence: special tokens, padding and a sliding window.
    """
    special = special_of_batch(inputs, rules)
    if inputs.causal:
        special = special & causal_entries(inputs)
    keep = kept_entries(keep, special, diagonal)  # (L, B, H, n, m)
    if inputs.window is not None:
        keep = keep & near_entries(inputs, inputs.window)
    if inputs.padding is not None:
        first_row = inputs.num_keys - inputs.num_queries
        keep = keep & inputs.padding[:, None, None, :] & inputs.padding[:, None, first_row:, None]
    return {"bias": additive(keep).unbind(0), "live": keep.any(-1, keepdim=True).unbind(0)}


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
