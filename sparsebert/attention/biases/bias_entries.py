"""
Entries of a bias of the scores, which is 0 where a query may attend and `REMOVED` where it may not.

Letters: B batch, n queries (the last n of the m positions), m keys.
"""

import functools
from collections.abc import Sequence

import torch


# Upper limit of the constant c that a learned mask subtracts. It is far below what padding and causality subtract, so
# no mask outweighs them.
MAX_MASK_CONSTANT = 1e4
# The bias of a removed entry, which vanishes in any softmax. With values of some ten thousand, the exponential of
# PyTorch's fused attention on CPUs would meet denormal numbers, and training would take up to half as long again.
REMOVED = -1e9
# A bias below this, such as in a mask that the caller passes in float16, counts as removed.
REMOVED_BELOW = torch.finfo(torch.float16).min / 4


def additive(keep: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A bool mask as a bias: 0 where `keep` is true, elsewhere `REMOVED` or what comes nearest in this dtype."""
    # Finite in float16, since a query without a key would otherwise give NaN.
    removed = max(REMOVED, torch.finfo(dtype).min)
    return torch.zeros_like(keep, dtype=dtype).masked_fill_(~keep, removed)


def with_sequences(keep: torch.Tensor, fixed: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    A bool mask `(1, H, n, m)` as a bias `(B, H, n, m)` in which the entries that depend on the sequence, bool `(B or
    1, 1, n, m)`, have `values` of the same shape; and whether a query has a key, bool `(B, H, n, 1)`.
    """
    bias = torch.where(fixed, values, additive(keep, values.dtype))
    return bias, bias.amax(-1, keepdim=True) > REMOVED_BELOW


def additive_4d(attention_mask: torch.Tensor) -> torch.Tensor:
    """A mask of the host, `(B, m)` or `(B, 1, n, m)`, bool or added to the scores, as a bias `(B, 1, n or 1, m)`."""
    if attention_mask.dim() == 2:
        attention_mask = attention_mask[:, None, None, :]
    if attention_mask.dtype == torch.bool:
        return additive(attention_mask)
    return attention_mask.to(torch.promote_types(attention_mask.dtype, torch.float32))


def first_real(padding: torch.Tensor) -> torch.Tensor:
    """Position of the first real token in each row of `padding` `(B, m)`: int64 `(B,)`, 0 if there is none."""
    return padding.int().argmax(-1)


def last_real(padding: torch.Tensor) -> torch.Tensor:
    """Position of the last real token in each row of `padding` `(B, m)`: int64 `(B,)`, 0 if there is none."""
    return (padding * torch.arange(padding.shape[-1], device=padding.device)).argmax(-1)


def token_entries(
    tokens: Sequence[torch.Tensor],
    queries: slice,
    num_keys: int,
    with_diagonal: bool,
    causal: bool,
    special_rows: bool = True,
) -> torch.Tensor:
    """
    The rows and columns of some tokens of each sequence, bool `(B, n, m)`, where `tokens` are positions `(B,)` and
    `queries` those of the n queries. `with_diagonal` includes the entries where a token's row and column meet;
    `causal` leaves out keys j > query i. Without `special_rows` the columns alone.
    """
    position = torch.arange(num_keys, device=tokens[0].device)
    chosen = functools.reduce(torch.logical_or, [position == token[:, None] for token in tokens])  # (B, m)
    row = position[queries, None]
    entries = chosen[:, queries, None] & special_rows | chosen[:, None, :]
    if causal:
        return entries & (row >= position if with_diagonal else row > position)
    return entries if with_diagonal else entries & (row != position)


def kept_entries(keep: torch.Tensor, special: torch.Tensor, diagonal: bool | None) -> torch.Tensor:
    """
    The entries that are kept, with those of special tokens and of a fixed diagonal set: [`set_entries`] for a bool
    `keep`, on which it is faster, and by operators that all runtimes of exported graphs have.
    """
    keep = keep | special
    if diagonal is None:
        return keep
    on_diagonal = diagonal_entries(keep)
    return keep | on_diagonal if diagonal else keep & ~on_diagonal


def set_entries(
    values: torch.Tensor, special: torch.Tensor, diagonal: bool | None, on: float, off: float
) -> torch.Tensor:
    """
    Values `(..., n, m)`, broadcast to the batch of `special`, with those of special tokens, bool `(B or 1, 1, n, m)`
    or `(n, m)`, set to `on`. A `diagonal` of `True` sets the diagonal to `on` and `False` to `off`, special tokens
    included.
    """
    kept, removed = (torch.as_tensor(value, dtype=values.dtype, device=values.device) for value in (on, off))
    values = torch.where(special, kept, values)
    if diagonal is None:
        return values
    return torch.where(diagonal_entries(values), kept if diagonal else removed, values)


def diagonal_entries(values: torch.Tensor) -> torch.Tensor:
    """The entries of values `(..., n, m)` of a query and its own key, bool `(n, m)`."""
    num_queries, num_keys = values.shape[-2:]
    position = torch.arange(num_keys, device=values.device)
    return position[num_keys - num_queries :, None] == position
