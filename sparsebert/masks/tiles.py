"""
The tile form of a mask, which the Triton kernels read.

Letters: H heads, m length, K parameters of a Toeplitz form, nq and nk tiles along queries and keys, F full and P
partial tiles of all heads, T distinct tiles.
"""

from typing import NamedTuple

import numpy as np
import torch

from .compiled_forms import base_table
from .expansion import signed_parameters
from .sparse_mask import SparseMask


# Queries and keys in a tile: the usual block of `dam_b`, one bit per key in an int64, and small enough that two tiles
# fit on the chip of a GPU.
TILE = 64


class TileForm(NamedTuple):
    """
    A mask cut into tiles of `TILE` queries by `TILE` keys. All tensors but the pool are int32.

    The full and the partial tiles are listed line by line. A line is a tile row, whose list holds its key tiles in
    ascending order, or in the transposed lists (`*_t`) a tile column, whose list holds its query tiles. Entry
    `[h, a, b]` of a `*_start` tensor is the position in its list of the first tile of head h and line a whose other
    index is at least b. So `start[h, a, 0] : start[h, a, -1]` is the whole line, and any range of it needs no search.

    Args:
        tiles (`torch.Tensor` of shape `(H, nq, nk)`): Index of every tile in `pool`; 0 is the empty tile, 1 the full.
        pool (`torch.Tensor` of shape `(T, TILE)`): The distinct tiles, int64. Bit c of word r is entry (r, c).
        full_start (`torch.Tensor` of shape `(H, nq, nk + 1)`): Positions in `full`.
        full (`torch.Tensor` of shape `(F,)`): Key tiles whose entries are all on.
        partial_start (`torch.Tensor` of shape `(H, nq, nk + 1)`): Positions in `partial`.
        partial (`torch.Tensor` of shape `(P, 2)`): Key tiles of which some entries are on, and their index in `pool`.
        full_start_t (`torch.Tensor` of shape `(H, nk, nq + 1)`): Positions in `full_t`.
        full_t (`torch.Tensor` of shape `(F,)`): Query tiles whose entries are all on.
        partial_start_t (`torch.Tensor` of shape `(H, nk, nq + 1)`): Positions in `partial_t`.
        partial_t (`torch.Tensor` of shape `(P, 2)`): Query tiles of which some entries are on, and their index in
            `pool`.
    """

    tiles: torch.Tensor
    pool: torch.Tensor
    full_start: torch.Tensor
    full: torch.Tensor
    partial_start: torch.Tensor
    partial: torch.Tensor
    full_start_t: torch.Tensor
    full_t: torch.Tensor
    partial_start_t: torch.Tensor
    partial_t: torch.Tensor


def tile_form(base: torch.Tensor) -> TileForm:
    """The tiles of a mask, bool `(H, m, m)` on the CPU. Beyond m the entries of the last ones are off."""
    num_heads, length = base.shape[:2]
    count = -(-length // TILE)
    pool = {np.full(TILE, value, np.int64).tobytes(): index for index, value in enumerate((0, -1))}
    tiles = np.empty((num_heads, count, count), np.int32)
    for head in range(num_heads):
        table = np.zeros((count * TILE, count * TILE), bool)
        table[:length, :length] = base[head].numpy()
        words = np.packbits(table, axis=1, bitorder="little").view(np.int64)  # (nq * TILE, nk)
        words = words.reshape(count, TILE, count).swapaxes(1, 2).copy()  # (nq, nk, TILE)
        different, inverse = np.unique(words.view(f"V{words[0, 0].nbytes}"), return_inverse=True)
        index = np.array([pool.setdefault(tile.tobytes(), len(pool)) for tile in different], np.int32)
        tiles[head] = index[inverse].reshape(count, count)
    lists = _lists(tiles) + _lists(tiles.swapaxes(1, 2))
    pool = np.frombuffer(b"".join(pool), np.int64).reshape(-1, TILE).copy()
    return TileForm(*map(torch.from_numpy, (tiles, pool, *lists)))


def _lists(tiles):
    """`full_start, full, partial_start, partial` of the lines of `tiles` `(H, lines, others)`."""
    result = []
    for chosen in (tiles == 1, tiles > 1):
        others = chosen.shape[2]
        before = np.zeros((*chosen.shape[:2], others + 1), np.int64)
        np.cumsum(chosen, axis=2, out=before[..., 1:])
        totals = before[..., -1].reshape(-1)
        before += (np.cumsum(totals) - totals).reshape(*chosen.shape[:2], 1)
        result += [before.astype(np.int32), chosen.nonzero()[2].astype(np.int32)]
    index = tiles[tiles > 1].astype(np.int32)
    result[-1] = np.stack([result[-1], index], axis=1)
    return tuple(result)


def tile_shares(base: torch.Tensor, side: int) -> tuple[float, float]:
    """
    The share of tiles of `side` x `side` with at least one entry on, which a kernel cannot skip, and with all on, for
    which it needs no mask: means over the heads of a mask, bool `(H, m, m)`.
    """
    length = base.shape[1]
    count = -(-length // side)
    beyond = (0, count * side - length, 0, count * side - length)
    live = full = 0
    for table in base:
        some, every = (
            torch.nn.functional.pad(table, beyond, value=value).view(count, side, count, side)
            for value in (False, True)
        )
        live += int(some.any(3).any(1).sum())
        full += int(every.all(3).all(1).sum())
    tiles = len(base) * count**2
    return live / tiles, full / tiles


def mask_tile_shares(mask: SparseMask, length: int, side: int, causal: bool = False) -> tuple[float, float]:
    """
    [`tile_shares`] of a mask, over all its layers, without the rows and columns of special tokens. For Toeplitz forms
    of square tiles no table is made.
    """
    if mask.form == "table" or mask.query_block_size is not None:
        layers = (base_table(mask.replace(keep=layer), length, causal)[0] for layer in mask.keep)
        shares = torch.tensor([tile_shares(table, side) for table in layers], dtype=torch.float64)
        some, every = shares.mean(0).tolist()
        return some, every
    mask.check_length(length)
    block = mask.block_size or 1
    known = min(length, mask.length) if mask.length_policy == "dense" else length
    first = torch.arange(0, length, side)  # the first token of every tile
    size = (first + side).clamp(max=length) - first
    new = first + size > known  # whether a tile has tokens whose rows and columns are on
    low, high = first // block, ((first + size).clamp(max=known) - 1) // block  # the blocks that its others are in
    num_blocks = -(-length // block)
    # By the block of the query less the key's, (L * H, 2K - 1).
    both = signed_parameters(mask.keep.flatten(0, 1), mask.symmetric)
    beyond = num_blocks - (both.shape[-1] + 1) // 2  # negative if there are fewer blocks than in the mask
    both = torch.nn.functional.pad(both, (beyond, beyond))
    before = torch.nn.functional.pad(both.int().cumsum(-1), (1, 0))  # how many smaller differences are kept
    own = both[:, num_blocks - 1]
    all_new = first >= known
    # Whether two known tokens of a tile are in one block, so that their difference of 0 is not only on the diagonal.
    two_of_a_block = (first + size).clamp(max=known) - first - 1 > high - low
    live = full = 0
    for row in range(len(first)):
        # All differences between the nearest and the farthest tokens of two tiles occur.
        least, most = low[row] - high, high[row] - low
        missing = most - least + 1 - (before[:, most + num_blocks] - before[:, least + num_blocks - 1])  # (L * H, nk)
        least = least.clamp(min=0) if causal else least
        count = before[:, most + num_blocks] - before[:, least + num_blocks - 1]  # (L * H, nk)
        row_live = (count > 0) | new | new[row]
        row_full = (missing == 0) | all_new | all_new[row]
        if mask.diagonal:
            row_live[:, row] = True
            row_full[:, row] |= ~(own | two_of_a_block[row]) & (missing[:, row] == 1)
        elif mask.diagonal is False:
            others = own & (size[row] - 1 > (high[row] - low[row]).clamp(min=0))
            row_live[:, row] = (count[:, row] > own) | others | (new[row] & (size[row] > 1))
            row_full[:, row] = False
        if causal:
            row_live, row_full = row_live[:, : row + 1], row_full & (first + size - 1 <= first[row])
        live, full = live + int(row_live.sum()), full + int(row_full.sum())
    tiles = len(both) * len(first) ** 2
    return live / tiles, full / tiles
