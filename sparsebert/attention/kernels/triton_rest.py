"""
The rest in the Triton kernels: one more key of each head and sequence, which stands for all that a mask removes. The
loops over keys begin with it, so they are the same with and without it.

Letters: B batch, H heads, d head size.
"""

import triton
import triton.language as tl

from .triton_steps import LOG2_E, WORD, bits_from


# Words of the mask that are counted at a time, for each query.
COUNTED = tl.constexpr(8)


@triton.jit
def number_of_ones(words):
    """How many bits of int64 words are on."""
    words -= (words >> 1) & 0x5555555555555555
    words = (words & 0x3333333333333333) + ((words >> 2) & 0x3333333333333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((words * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def bit_of(position, tile):
    """The word of a tile in which only the bit of a position is on, if that is in the tile."""
    bit = ((position + tile) * 0 + 1).to(tl.int64) << (position % WORD + tile * 0).to(tl.int64)
    return tl.where(position // WORD == tile, bit, 0)


@triton.jit
def removed_keys(
    rows, inside, begin, end, first_real, behind_real, holes, words, tiles, pool, first, last, tile_columns,
    BLOCK_Q: tl.constexpr, DIAGONAL_OFF: tl.constexpr, SPECIAL_ROWS: tl.constexpr,
):  # fmt: skip
    """How many real keys the mask removes for some queries, by the words of the tiles from `begin` to `end`."""
    removed = rows * 0
    row = rows[:, None]
    for start in range(begin, end, COUNTED):
        tile = (start + tl.arange(0, COUNTED))[None, :]
        seen = tile < end
        index = tl.load(tiles + row // BLOCK_Q * tile_columns + tile, mask=inside[:, None] & seen, other=0)
        on = tl.load(pool + index * BLOCK_Q + row % BLOCK_Q)
        if first is not None:
            on |= bit_of(first, tile)
            if SPECIAL_ROWS:
                on = tl.where(row == first, -1, on)
        if last is not None:
            on |= bit_of(last, tile)
            if SPECIAL_ROWS:
                on = tl.where(row == last, -1, on)
        if DIAGONAL_OFF:
            on &= ~bit_of(row, tile)
        real = bits_from(first_real - tile * WORD) & ~bits_from(behind_real - tile * WORD)
        if words is not None:
            real &= tl.load(words + tile, mask=seen & (holes != 0), other=-1)
        removed += tl.sum(number_of_ones(real & ~on), 1)
    return removed


@triton.jit
def first_sums(
    rows, own, real, q, do, row_lse, row_delta, begin, end, first_real, behind_real, holes, words, tiles, pool, first,
    last, tile_columns, rest_key, rest_value, rest_score, removed, scores, rest_parts, scale, scaling, keep_scale,
    NUM_ROWS: tl.constexpr, HEAD: tl.constexpr, BLOCK_Q: tl.constexpr, DIAGONAL_OFF: tl.constexpr,
    SPECIAL_ROWS: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """
    What a loop over keys begins with, the running output or gradient, maximum and sum: those of the rest, or of
    nothing. Writes the scores of the rest, or with GRADIENT its gradients, for the queries in `own`, which have no
    other program.
    """
    acc = tl.zeros([NUM_ROWS, HEAD], tl.float32)
    top = tl.full([NUM_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([NUM_ROWS], tl.float32)
    if rest_key is not None:
        d = tl.arange(0, HEAD)
        own_k, own_v = tl.load(rest_key + d), tl.load(rest_value + d)
        if GRADIENT:
            ds = rest_gradient(rows, own, q, do, row_lse, row_delta, own_v, scores, rest_parts, scaling, HEAD)
            acc = ds[:, None] * own_k[None, :]
        else:
            if removed is not None:
                number = tl.load(removed + rows, mask=own, other=0)
            else:
                number = removed_keys(
                    rows, own, begin, end, first_real, behind_real, holes, words, tiles, pool, first, last,
                    tile_columns, BLOCK_Q, DIAGONAL_OFF, SPECIAL_ROWS,
                )  # fmt: skip
            stands = real & (number > 0)
            weight = tl.log2(tl.where(stands, number, 1).to(tl.float32)) + tl.load(rest_score) * LOG2_E
            score = tl.sum(q.to(tl.float32) * own_k[None, :], 1) * scale + weight
            top = tl.where(stands, score, float("-inf"))
            total = tl.where(stands, 1.0, 0.0)
            # Dropout, which never drops the rest, is made up for when the output is written.
            acc = tl.where(stands[:, None], (own_v / keep_scale)[None, :], 0.0)
            tl.store(scores + rows, top, mask=own)
    return acc, top, total


@triton.jit
def rest_gradient(rows, own, q, do, row_lse, row_delta, own_v, scores, rest_parts, scaling, HEAD: tl.constexpr):
    """
    The gradient of the rest's scores of some queries. Writes what those in `own` add to the gradients of its key, its
    value and its score, (2 HEAD + 1,).
    """
    d = tl.arange(0, HEAD)
    p = tl.exp2(tl.load(scores + rows, mask=own, other=float("-inf")) - row_lse)
    ds = p * (tl.sum(do.to(tl.float32) * own_v[None, :], 1) - row_delta)
    tl.store(rest_parts + d, tl.sum(ds[:, None] * q.to(tl.float32), 0) * scaling)
    tl.store(rest_parts + HEAD + d, tl.sum(p[:, None] * do.to(tl.float32), 0))
    tl.store(rest_parts + 2 * HEAD, tl.sum(ds, 0))
    return ds
