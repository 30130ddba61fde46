"""
The tile form of a mask, which the fused kernels read.

Letters: H heads, m length, nq and nk tiles along queries and keys, F full and P partial tiles of all heads, T
different tiles.
"""

from typing import NamedTuple

import numpy as np
import torch


# A row of a tile is one word of this many bits.
WORDS = {16: np.int16, 32: np.int32, 64: np.int64}


class TileForm(NamedTuple):
    """
    A mask cut into tiles of `block_q` queries by `block_k` keys. All tensors are int32 but the pool.

    Entry `[h, a, b]` of a `*_start` is the position in its list of the first tile of head h and line a whose other
    index is at least b, so that `start[h, a, 0] : start[h, a, -1]` is a line and any cut of it needs no search. A
    line is a tile row (its list holds key tiles, ascending) or, in the transposed lists, a tile column (query tiles).

    Args:
        tiles (`torch.Tensor` of shape `(H, nq, nk)`): Index into `pool` of every tile: 0 is empty, 1 is full.
        pool (`torch.Tensor` of shape `(T, block_q)`): The different tiles; bit c of word r is entry (r, c). Signed
            integers of `block_k` bits.
        full_start (`torch.Tensor` of shape `(H, nq, nk + 1)`): Into `full`.
        full (`torch.Tensor` of shape `(F,)`): Key tiles without a hole.
        partial_start (`torch.Tensor` of shape `(H, nq, nk + 1)`): Into `partial`.
        partial (`torch.Tensor` of shape `(P, 2)`): Key tiles with a hole, and their index into `pool`.
        full_start_t (`torch.Tensor` of shape `(H, nk, nq + 1)`): Into `full_t`.
        full_t (`torch.Tensor` of shape `(F,)`): Query tiles without a hole, by tile column.
        partial_start_t (`torch.Tensor` of shape `(H, nk, nq + 1)`): Into `partial_t`.
        partial_t (`torch.Tensor` of shape `(P, 2)`): Query tiles with a hole, by tile column, and their index.
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


def tile_form(base, block_q=64, block_k=64):
    """
    Cut a mask into tiles.

    Args:
        base (`torch.Tensor` of shape `(H, m, m)`): Bool on the CPU, True = may attend. Rows and columns that the last
            tiles have beyond m are off.
        block_q (`int`, *optional*, defaults to 64): Queries of a tile.
        block_k (`int`, *optional*, defaults to 64): Keys of a tile: 16, 32 or 64.

    Returns:
        [`TileForm`]: On the CPU. The pool holds at most one bit per entry of the (tile-aligned) mask.
    Raises:
        ValueError: If `block_k` is not a word length.
    """
    if block_k not in WORDS:
        raise ValueError(f"block_k must be one of {', '.join(map(str, WORDS))}, got {block_k}")
    num_heads, length = base.shape[:2]
    shape = (-(-length // block_q), -(-length // block_k))
    word = WORDS[block_k]
    pool = {np.full(block_q, value, word).tobytes(): index for index, value in enumerate((0, -1))}
    tiles = np.empty((num_heads, *shape), np.int32)
    for head in range(num_heads):
        table = np.zeros((shape[0] * block_q, shape[1] * block_k), bool)
        table[:length, :length] = base[head].numpy()
        words = np.packbits(table, axis=1, bitorder="little").view(word)  # (nq * block_q, nk)
        words = words.reshape(shape[0], block_q, shape[1]).swapaxes(1, 2).copy()  # (nq, nk, block_q)
        different, inverse = np.unique(words.view(f"V{words[0, 0].nbytes}"), return_inverse=True)
        index = np.array([pool.setdefault(tile.tobytes(), len(pool)) for tile in different], np.int32)
        tiles[head] = index[inverse].reshape(shape)
    lists = _lists(tiles) + _lists(tiles.swapaxes(1, 2))
    pool = np.frombuffer(b"".join(pool), word).reshape(-1, block_q).copy()
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


def live_tiles(base, block_q, block_k=None):
    """
    How much of a mask tile skipping leaves.

    Args:
        base (`torch.Tensor` of shape `(H, m, m)`): Bool, True = may attend.
        block_q (`int`): Queries of a tile.
        block_k (`int`, *optional*): Keys of a tile; `block_q` by default.

    Returns:
        `float`: Fraction of the tiles that hold any entry, mean over heads.
    """
    block_k = block_k or block_q
    height, width = -(-base.shape[1] // block_q), -(-base.shape[2] // block_k)
    live = 0
    for table in base:
        padded = torch.nn.functional.pad(
            table, (0, width * block_k - table.shape[1], 0, height * block_q - table.shape[0])
        )
        live += int(padded.view(height, block_q, width, block_k).any(3).any(1).sum())
    return live / (len(base) * height * width)
