"""
A mask as a bias of the scores: 0 where a query may attend and `REMOVED` where it may not, or what is learned.

The functions here make it from a frozen or a learned mask, its special tokens and diagonal, padding and causality.

Letters: B batch, L layers (1 when shared), H heads, n queries (the last n of the m positions), m keys.
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..masks.compiled import compiled
from ..masks.exported import exported_structure, exporting
from ..masks.sparse_mask import SparseMask, special_entries


if TYPE_CHECKING:
    from .mask_inputs import MaskInputs


# Upper limit of the constant c that a learned mask subtracts. It is far below what padding and causality subtract, so
# no mask outweighs them.
MAX_MASK_CONSTANT = 1e4
# The bias of a removed entry, which vanishes in any softmax. With values of some ten thousand, the exponential of
# PyTorch's fused attention on CPUs would meet denormal numbers, and training would take up to half as long again.
REMOVED = -1e9
# A bias below this, such as in a mask that the caller passes in float16, counts as removed.
REMOVED_BELOW = torch.finfo(torch.float16).min / 4


def additive(keep: torch.Tensor) -> torch.Tensor:
    """A bool mask as a bias: float32, 0 where `keep` is true and `REMOVED` elsewhere."""
    return torch.zeros(keep.shape, device=keep.device).masked_fill_(~keep, REMOVED)


def additive_4d(attention_mask: torch.Tensor) -> torch.Tensor:
    """A mask of the host, `(B, m)` or `(B, 1, n, m)`, bool or added to the scores, as a bias `(B, 1, n or 1, m)`."""
    if attention_mask.dim() == 2:
        attention_mask = attention_mask[:, None, None, :]
    return additive(attention_mask) if attention_mask.dtype == torch.bool else attention_mask.float()


def first_real(padding: torch.Tensor) -> torch.Tensor:
    """Position of the first real token in each row of `padding` `(B, m)`: int64 `(B,)`, 0 if there is none."""
    return padding.int().argmax(-1)


def last_real(padding: torch.Tensor) -> torch.Tensor:
    """Position of the last real token in each row of `padding` `(B, m)`: int64 `(B,)`, 0 if there is none."""
    return (padding * torch.arange(padding.shape[-1], device=padding.device)).argmax(-1)


def _additive_form(table):
    live = table.any(-1, keepdim=True)[None]
    return additive(table)[None], live[:0] if live.all() else live


def _table_form(table):
    return (table,)


def prepare_bias(mask: SparseMask, inputs: "MaskInputs") -> dict[str, Any]:
    """
    A frozen mask as a bias, padding and causality included.

    Args:
        mask ([`SparseMask`]): The mask.
        inputs ([`MaskInputs`]): Everything known so far about this forward.

    Returns:
        `dict`: The fields `bias` and `live` of [`MaskInputs`].
    """
    first_row = inputs.num_keys - inputs.num_queries
    if exporting():
        keep = exported_structure(mask, inputs.num_keys, inputs.device)[:, None, :, first_row:]
        if inputs.causal:
            keep = keep & causal_entries(inputs)
        return bias_and_live(keep, inputs, mask.special_tokens, mask.last_token, mask.diagonal)
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
    return bias_and_live(keep, inputs, mask.special_tokens, mask.last_token, mask.diagonal)


def bias_and_live(
    keep: torch.Tensor, inputs: "MaskInputs", special_tokens: str, last_token: str, diagonal: bool | None
) -> dict[str, Any]:
    """
    A bool mask as a bias, with what depends on the sequence: special tokens, padding and a sliding window.

    Args:
        keep (`torch.Tensor` of shape `(L, 1, H, n, m)`): Bool, True = may attend, causality included.
        inputs ([`MaskInputs`]): Everything known so far about this forward.
        special_tokens (`str`): See [`SparseMask`].
        last_token (`str`): See [`SparseMask`].
        diagonal (`bool`, *optional*): See [`SparseMask`].

    Returns:
        `dict`: The fields `bias` and `live` of [`MaskInputs`].
    """
    special = special_rows(inputs, special_tokens, last_token)
    if inputs.causal:
        special = special & causal_entries(inputs)
    keep = kept_entries(keep, special, diagonal)  # (L, B, H, n, m)
    if inputs.window is not None:
        keep = keep & near_entries(inputs, inputs.window)
    if inputs.padding is not None:
        first_row = inputs.num_keys - inputs.num_queries
        keep = keep & inputs.padding[:, None, None, :] & inputs.padding[:, None, first_row:, None]
    return {"bias": additive(keep).unbind(0), "live": keep.any(-1, keepdim=True).unbind(0)}


def special_rows(inputs: "MaskInputs", special_tokens: str, last_token: str) -> torch.Tensor:
    """The rows and columns of the special tokens, for the queries of this forward: bool `(B or 1, 1, n, m)`."""
    first, last = real_tokens(inputs, special_tokens, last_token)
    special = special_entries(inputs.num_keys, special_tokens, first, last, inputs.device)
    special = special.view(-1, 1, inputs.num_keys, inputs.num_keys)
    if inputs.padding is not None:
        # For all masks alike, so that gradients are summed over the sequences in one order.
        special = special.expand(inputs.padding.shape[0], -1, -1, -1)
    return special[:, :, inputs.num_keys - inputs.num_queries :]


def real_tokens(
    inputs: "MaskInputs", special_tokens: str, last_token: str
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """
    The special tokens whose positions depend on the padding.

    Args:
        inputs ([`MaskInputs`]): Its padding is read.
        special_tokens (`str`): See [`SparseMask`].
        last_token (`str`): See [`SparseMask`].

    Returns:
        `tuple`: Positions of the first and of the last token of each sequence, int64 `(B,)`; `None` for a token that
        is not special or has the same position in all sequences.
    """
    if inputs.padding is None or special_tokens == "none":
        return None, None
    follows = special_tokens == "first_last" and last_token == "real"
    return first_real(inputs.padding), last_real(inputs.padding) if follows else None


def with_cuts(bias: torch.Tensor, inputs: "MaskInputs") -> torch.Tensor:
    """A bias `(..., n, m)` with padded keys and, in a decoder, future keys removed."""
    if inputs.padding is not None:
        bias = bias.masked_fill(~inputs.padding[:, None, None, :], REMOVED)
    return bias.masked_fill(~causal_entries(inputs), REMOVED) if inputs.causal else bias


def token_entries(
    tokens: Sequence[torch.Tensor], num_queries: int, num_keys: int, with_diagonal: bool, causal: bool
) -> torch.Tensor:
    """
    The rows and columns of some tokens of each sequence.

    Args:
        tokens (`Sequence` of `torch.Tensor` of shape `(B,)`): Positions of one or more tokens.
        num_queries (`int`): n.
        num_keys (`int`): m.
        with_diagonal (`bool`): Whether the entries where a token's row and column meet are included.
        causal (`bool`): Whether keys j > query i are left out.

    Returns:
        `torch.Tensor` of shape `(B, n, m)`, bool.
    """
    position = torch.arange(num_keys, device=tokens[0].device)
    chosen = functools.reduce(torch.logical_or, [position == token[:, None] for token in tokens])  # (B, m)
    row = position[num_keys - num_queries :, None]
    entries = chosen[:, num_keys - num_queries :, None] | chosen[:, None, :]
    if causal:
        return entries & (row >= position if with_diagonal else row > position)
    return entries if with_diagonal else entries & (row != position)


def fix_entries(
    bias: torch.Tensor, inputs: "MaskInputs", special_tokens: str, diagonal: bool | None, off: float
) -> torch.Tensor:
    """
    A learned bias with the entries that are not learned set: special tokens, a fixed diagonal, causality.

    Args:
        bias (`torch.Tensor` of shape `(..., n, m)`): Any values; those of fixed entries are ignored and get no
            gradient.
        inputs ([`MaskInputs`]): Sizes, device and causality.
        special_tokens (`str`): Special tokens at a fixed position, see [`SparseMask`].
        diagonal (`bool`, *optional*): See [`SparseMask`].
        off (`float`): Bias of a removed diagonal.

    Returns:
        `torch.Tensor` of shape `(..., n, m)`.
    """
    special = special_entries(inputs.num_keys, special_tokens, device=inputs.device)
    special = special[inputs.num_keys - inputs.num_queries :]
    learned = set_entries(torch.ones(special.shape, device=inputs.device), special, diagonal, on=0.0, off=0.0)
    fixed = set_entries(torch.zeros(special.shape, device=inputs.device), special, diagonal, on=0.0, off=off)
    if inputs.causal:
        future = ~causal_entries(inputs)
        learned, fixed = learned.masked_fill(future, 0.0), fixed.masked_fill(future, REMOVED)
    # A single pass over all heads, forward and backward.
    return torch.addcmul(fixed, bias, learned)


def merged_bias(learned: torch.Tensor, inputs: "MaskInputs") -> torch.Tensor:
    """
    A learned bias `(H, n, m)` with padding and special tokens, which differ by sequence: `(B, H, n, m)`, or
    `(1, H, n, m)` without padding.
    """
    if inputs.padding is None:
        return learned[None]
    fixed = ~inputs.padding[:, None]  # (B, 1, m)
    values = torch.zeros(fixed.shape, dtype=learned.dtype, device=learned.device).masked_fill_(fixed, REMOVED)
    tokens = [token for token in (inputs.first_token, inputs.last_token) if token is not None]
    if tokens:
        sizes = inputs.num_queries, inputs.num_keys
        fixed = fixed | token_entries(tokens, *sizes, inputs.learned_diagonal, inputs.causal)
    # A single pass over all heads, forward and backward.
    return torch.where(fixed[:, None], values[:, None], learned)


def kept_entries(keep: torch.Tensor, special: torch.Tensor, diagonal: bool | None) -> torch.Tensor:
    """
    The entries that are kept, with those of special tokens and of a fixed diagonal set: [`set_entries`] for a bool
    `keep`, on which it is faster, and by operators that all runtimes of exported graphs have.
    """
    keep = keep | special
    if diagonal is None:
        return keep
    on_diagonal = _diagonal_entries(keep)
    return keep | on_diagonal if diagonal else keep & ~on_diagonal


def set_entries(
    values: torch.Tensor, special: torch.Tensor, diagonal: bool | None, on: float, off: float
) -> torch.Tensor:
    """
    Values with those of special tokens and of a fixed diagonal set.

    Args:
        values (`torch.Tensor` of shape `(..., n, m)`): Values of all entries, of a floating-point dtype.
        special (`torch.Tensor` of shape `(B or 1, 1, n, m)` or `(n, m)`): Bool, the entries of special tokens, which
            are set to `on`.
        diagonal (`bool`, *optional*): `True` sets the diagonal to `on` and `False` to `off`, special tokens included.
        on (`float`): Value of an entry that is kept.
        off (`float`): Value of an entry that is removed.

    Returns:
        `torch.Tensor`: The values, broadcast to the batch of `special`.
    """
    kept, removed = (torch.as_tensor(value, dtype=values.dtype, device=values.device) for value in (on, off))
    values = torch.where(special, kept, values)
    if diagonal is None:
        return values
    return torch.where(_diagonal_entries(values), kept if diagonal else removed, values)


def _diagonal_entries(values):
    num_queries, num_keys = values.shape[-2:]
    position = torch.arange(num_keys, device=values.device)
    return position[num_keys - num_queries :, None] == position


def causal_entries(inputs: "MaskInputs") -> torch.Tensor:
    """Bool `(n, m)`, True where key j <= query i."""
    position = torch.arange(inputs.num_keys, device=inputs.device)
    return position[inputs.num_keys - inputs.num_queries :, None] >= position


def near_entries(inputs: "MaskInputs", window: int) -> torch.Tensor:
    """Bool `(n, m)`, True where query and key are at most `window` apart."""
    position = torch.arange(inputs.num_keys, device=inputs.device)
    return (position[inputs.num_keys - inputs.num_queries :, None] - position).abs() <= window
