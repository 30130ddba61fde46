"""
A bias per distance of query and key, without a row for each query.

Neighboring queries see the same values, shifted by one key. So a table of a few rows, wide enough for all shifts,
holds the bias of all queries: those of a block begin in another of its columns.

Letters: H heads, n tokens, B tile size, T tiles of n tokens, R rows of the table (a multiple of B), W its columns,
i query, j key.
"""

from dataclasses import dataclass, replace

import torch

from ...masks.expansion import num_distances
from .bias_entries import REMOVED, token_entries


@dataclass(frozen=True)
class OffsetBias:
    """
    A bias that is being learned and depends on the distance of query and key.

    Args:
        values (`torch.Tensor` of shape `(H, T)`): The bias of the entries by their distance `abs(i // B - j // B)`, or
            of shape `(H, 2T - 1)`, by their signed distance.
        tile (`int`): B; 1 for a value per offset.
        special (`torch.Tensor` of shape `(S,)`): Positions of tokens in whose rows and columns it is 0, int64.
        diagonal (`float`, *optional*): The bias of all entries (i, i), if it is not learned.
        symmetric (`bool`): Whether the distances have no sign.
        special_rows (`bool`): Whether it is 0 in the rows of the special tokens, or in their columns alone.
    """

    values: torch.Tensor
    tile: int
    special: torch.Tensor
    diagonal: float | None = None
    symmetric: bool = True
    special_rows: bool = True

    def to(self, dtype: torch.dtype) -> "OffsetBias":
        """The same in another dtype."""
        return replace(self, values=self.values.to(dtype))

    def table(self, length: int, causal: bool) -> torch.Tensor:
        """The bias of all entries, `(H, n, n)`; `causal` removes keys j > i."""
        num_rows = num_distances(self.values.shape[1], self.symmetric) * self.tile
        table = offset_table(self.values, num_rows, self.tile, self.diagonal, causal, self.symmetric)
        table = table[:, :length, :length]
        tokens = list(self.special[:, None])
        if not tokens:
            return table
        zero = token_entries(tokens, slice(0, length), length, self.diagonal is None, causal, self.special_rows)[0]
        return table.masked_fill(zero, 0.0)


def _distances(size, num_rows, tile, device, symmetric):
    """The index among `size` values, and `j - i`, of every entry of the table: `(R, W)`."""
    num_tiles = num_distances(size, symmetric)
    ahead = num_tiles - num_rows // tile
    row = torch.arange(num_rows, device=device)[:, None]
    column = torch.arange((num_tiles + ahead) * tile, device=device)
    distance = row // tile + ahead - column // tile
    return distance.abs() if symmetric else distance + size // 2, column - row - ahead * tile


def offset_table(
    values: torch.Tensor, num_rows: int, tile: int, diagonal: float | None, causal: bool, symmetric: bool = True
) -> torch.Tensor:
    """
    The table `(H, R, W)` from which [`offset_place`] cuts the rows of a block of `num_rows` queries (R, at most T B),
    of `values`, `tile`, `diagonal` and `symmetric` as in [`OffsetBias`].
    """
    index, ahead = _distances(values.shape[1], num_rows, tile, values.device, symmetric)
    table = values[:, index]
    if diagonal is not None:
        table = table.masked_fill(ahead == 0, diagonal)
    return table.masked_fill(ahead > 0, REMOVED) if causal else table


def offset_sums(
    table: torch.Tensor, size: int, tile: int, diagonal: float | None, causal: bool, symmetric: bool = True
) -> torch.Tensor:
    """
    The gradient `(H, size)` of the values of [`offset_table`], from that of the table `(H, R, W)`, which is changed.
    """
    index, ahead = _distances(size, table.shape[1], tile, table.device, symmetric)
    if diagonal is not None:
        table.masked_fill_(ahead == 0, 0.0)
    if causal:
        table.masked_fill_(ahead > 0, 0.0)
    sums = table.new_zeros(table.shape[0], size)
    return sums.index_add_(1, index.flatten(), table.flatten(1))


def offset_place(start: int, stop: int, length: int, num_rows: int, tile: int) -> tuple[slice, slice]:
    """
    Where in [`offset_table`] the rows of the queries from `start`, a multiple of R, to `stop` and their n keys are.
    """
    tiles = -(-(stop - start) // tile)
    row = num_rows - tiles * tile
    column = (-(-length // tile) - start // tile - tiles) * tile
    return slice(row, row + stop - start), slice(column, column + length)
