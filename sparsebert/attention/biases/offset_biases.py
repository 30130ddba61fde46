"""
A bias per distance of query and key, without a row for each query.

Neighboring queries see the same values, shifted by one key. So a table of a few rows, wide enough for all shifts,
holds the bias of all queries: those of a block begin in another of its columns.

Letters: H heads, n tokens, B tile size, T tiles of n tokens, R rows of the table (a multiple of B), W its columns,
i query, j key.
"""

from dataclasses import dataclass, replace

import torch

from .bias_entries import REMOVED, token_entries


@dataclass(frozen=True)
class OffsetBias:
    """
    A bias that is being learned and depends on the distance of query and key.

    Args:
        values (`torch.Tensor` of shape `(H, T)`): The bias of the entries by their distance `abs(i // B - j // B)`.
        tile (`int`): B; 1 for a value per offset.
        special (`torch.Tensor` of shape `(S,)`): Positions of tokens in whose rows and columns it is 0, int64.
        diagonal (`float`, *optional*): The bias of all entries (i, i), if it is not learned.
    """

    values: torch.Tensor
    tile: int
    special: torch.Tensor
    diagonal: float | None = None

    def to(self, dtype: torch.dtype) -> "OffsetBias":
        """The same in another dtype."""
        return replace(self, values=self.values.to(dtype))

    def table(self, length: int, causal: bool) -> torch.Tensor:
        """The bias of all entries, `(H, n, n)`; `causal` removes keys j > i."""
        num_rows = self.values.shape[1] * self.tile
        table = offset_table(self.values, num_rows, self.tile, self.diagonal, causal)[:, :length, :length]
        tokens = list(self.special[:, None])
        if not tokens:
            return table
        zero = token_entries(tokens, slice(0, length), length, self.diagonal is None, causal)[0]
        return table.masked_fill(zero, 0.0)


def _distances(num_tiles, num_rows, tile, device):
    """Distance in tiles and `j - i` of every entry of the table: `(R, W)`."""
    ahead = num_tiles - num_rows // tile
    row = torch.arange(num_rows, device=device)[:, None]
    column = torch.arange((num_tiles + ahead) * tile, device=device)
    return (column // tile - row // tile - ahead).abs(), column - row - ahead * tile


def offset_table(values: torch.Tensor, num_rows: int, tile: int, diagonal: float | None, causal: bool) -> torch.Tensor:
    """
    The table `(H, R, W)` from which [`offset_place`] cuts the rows of a block of `num_rows` queries (R, at most T B),
    of `values`, `tile` and `diagonal` as in [`OffsetBias`].
    """
    distance, ahead = _distances(values.shape[1], num_rows, tile, values.device)
    table = values[:, distance]
    if diagonal is not None:
        table = table.masked_fill(ahead == 0, diagonal)
    return table.masked_fill(ahead > 0, REMOVED) if causal else table


def offset_sums(table: torch.Tensor, num_tiles: int, tile: int, diagonal: float | None, causal: bool) -> torch.Tensor:
    """
    The gradient `(H, T)` of the values of [`offset_table`], from that of the table `(H, R, W)`, which is changed.
    """
    distance, ahead = _distances(num_tiles, table.shape[1], tile, table.device)
    if diagonal is not None:
        table.masked_fill_(ahead == 0, 0.0)
    if causal:
        table.masked_fill_(ahead > 0, 0.0)
    sums = table.new_zeros(table.shape[0], num_tiles)
    return sums.index_add_(1, distance.flatten(), table.flatten(1))


def offset_place(start: int, stop: int, length: int, num_rows: int, tile: int) -> tuple[slice, slice]:
    """
    Where in [`offset_table`] the rows of the queries from `start`, a multiple of R, to `stop` and their n keys are.
    """
    tiles = -(-(stop - start) // tile)
    row = num_rows - tiles * tile
    column = (-(-length // tile) - start // tile - tiles) * tile
    return slice(row, row + stop - start), slice(column, column + length)
