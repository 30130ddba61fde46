"""
The Triton kernels of tile attention.

Masks are in the tile form of `masks/tiles.py`, where a tile is BLOCK_Q queries by BLOCK_K keys. A row program computes
outputs or query gradients and takes STEP keys at a time; a column program computes key and value gradients and takes
STEP queries at a time.

An entry (i, j) that is on is computed by the row program of i and by the column program of j, once each. Special rows
and columns have a program of their own with SPECIALS lanes, which loops over everything. Any other program processes
its list of full tiles, its list of partial tiles, and one gathered tile of the special tokens, for those of their
entries that are not in the lists. Without SPECIAL_ROWS the rows of special tokens are like all others.

Letters: B batch, H heads, n length, d head size, T distinct tiles.
"""

import triton
import triton.language as tl

from .triton_loops import dense_columns, dense_rows, listed_columns, listed_rows
from .triton_rest import rest_gradient
from .triton_steps import (
    SPECIALS,
    dense_keep,
    finish_columns,
    kept_keys,
    load_span,
    place_of,
    products,
    program_place,
    special_tokens,
    start_rows,
    token_position,
)


@triton.jit(do_not_specialize=["first_b", "last_b", "heads", "length", "tile_rows", "tile_columns", "threshold"])
def row_kernel(
    query, key, value, output, lse, output_grad, delta, query_grad, tiles, pool, full_start, full, partial_start,
    partial, padding, spans, first, last, seed, rest_key, rest_value, rest_score, removed, rest_parts, distances,
    distance_grad, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, first_b, last_b, heads, length, tile_rows,
    tile_columns, scale, scaling, threshold, keep_scale,
    HEAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, DIAGONAL_OFF: tl.constexpr,
    CAUSAL: tl.constexpr, SPECIAL_ROWS: tl.constexpr, PARTIAL: tl.constexpr, SHORT: tl.constexpr,
    GRADIENT: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """
    The row programs: forward, which writes `output` and `lse`, or with GRADIENT the gradient of the queries, which
    writes `query_grad` and `delta`, the sum of the output times its gradient. SHORT: visit all keys, without tile
    lists. PARTIAL: whether the lists have partial tiles.

    `output`, `output_grad` and `query_grad` are (B, n, H, d) and contiguous. `padding` (B, n) int8, `spans`
    (B, 3 + tile_columns) int64, `first` and `last` (B,) or (1,) int32 (then `first_b` or `last_b` is 0) and `seed`
    (2,) int64 may be `None`.

    `rest_key` and `rest_value` (B, H, d), `rest_score` (B, H) are those of the rest, or `None`; `removed` (H, n) int32
    is the number of keys that the mask removes, counted here if it is `None`. The forward writes the scores of the
    rest behind `lse`. With GRADIENT, `rest_parts` (B, H, programs, 2 d + 1) is written, see [`rest_gradient`].

    `distances` (H, 2 n - 1) is added to the scores by the distance of query and key, from 1 - n on, or `None`; with
    GRADIENT its gradient is added to `distance_grad`, if that is not `None`, in an order that varies.
    """
    SPLIT: tl.constexpr = BLOCK_K // STEP
    SPECIAL: tl.constexpr = (first is not None or last is not None) and not SHORT
    PROGRAMS: tl.constexpr = 1 if SPECIAL and SPECIAL_ROWS else 0  # beyond those of blocks
    bh, block = program_place(tile_rows, SPECIAL and SPECIAL_ROWS)
    batch, head = (bh // heads).to(tl.int64), bh % heads
    query += batch * q_b + head.to(tl.int64) * q_h
    key += batch * k_b + head.to(tl.int64) * k_h
    value += batch * v_b + head.to(tl.int64) * v_h
    o_n = heads * HEAD
    o_start = batch * length * o_n + head * HEAD
    output += o_start
    lse += bh.to(tl.int64) * length
    tiles += head * tile_rows * tile_columns
    if distances is not None:
        distances += head * (2 * length - 1) + length - 1
    if distance_grad is not None:
        distance_grad += head * (2 * length - 1) + length - 1
    scores = None
    if rest_key is not None:
        scores = lse + (tl.num_programs(0) // (tile_rows + PROGRAMS)).to(tl.int64) * length
        rest_key += bh * HEAD
        rest_value += bh * HEAD
        if removed is not None:
            removed += head * length
        if GRADIENT:
            rest_parts += (bh.to(tl.int64) * (tile_rows + PROGRAMS) + block + PROGRAMS) * (2 * HEAD + 1)
        else:
            rest_score += bh
    if GRADIENT:
        output_grad += o_start
        query_grad += o_start
        delta += bh.to(tl.int64) * length
    begin, end = tile_columns * 0, tile_columns
    first_real, behind_real, holes, words = length * 0, length, length * 0, None
    if padding is not None:
        padding += batch * length
        first_real, behind_real, holes, words = load_span(spans, batch, tile_columns)
        begin, end = first_real // BLOCK_K, tl.cdiv(behind_real, BLOCK_K)
    if first is not None:
        first = token_position(first, batch, first_b, length)
    if last is not None:
        last = token_position(last, batch, last_b, length)
    specials, valid = special_tokens(first, last, SPECIALS)

    if SHORT:
        rows = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
        dense_rows(
            rows, rows < length, begin * SPLIT, end * SPLIT, first_real, behind_real, holes, words, query, key, value,
            output, lse, output_grad, delta, query_grad, tiles, pool, padding, first, last, seed, rest_key, rest_value,
            rest_score, removed, scores, rest_parts, distances, distance_grad, bh, length, tile_columns, q_n, k_n, v_n,
            o_n, scale, scaling, threshold, keep_scale, HEAD, BLOCK_Q, BLOCK_K, STEP, BLOCK_Q, DIAGONAL_OFF, CAUSAL,
            SPECIAL_ROWS, False, GRADIENT,
        )  # fmt: skip
    elif SPECIAL and SPECIAL_ROWS and block < 0:
        dense_rows(
            specials, valid, begin * SPLIT, end * SPLIT, first_real, behind_real, holes, words, query, key, value,
            output, lse, output_grad, delta, query_grad, tiles, pool, padding, first, last, seed, rest_key, rest_value,
            rest_score, removed, scores, rest_parts, distances, distance_grad, bh, length, tile_columns, q_n, k_n, v_n,
            o_n, scale, scaling, threshold, keep_scale, HEAD, BLOCK_Q, BLOCK_K, STEP, SPECIALS, DIAGONAL_OFF, CAUSAL,
            SPECIAL_ROWS, True, GRADIENT,
        )  # fmt: skip
    else:
        listed_rows(
            block, specials, valid, begin, end, first_real, behind_real, holes, words, query, key, value, output, lse,
            output_grad, delta, query_grad, tiles, pool, full_start, full, partial_start, partial, padding, first,
            last, seed, rest_key, rest_value, rest_score, removed, scores, rest_parts, distances, distance_grad, bh,
            head, length, tile_rows, tile_columns, q_n, k_n, v_n, o_n, scale, scaling, threshold, keep_scale, HEAD,
            BLOCK_Q, BLOCK_K, DIAGONAL_OFF, CAUSAL, SPECIAL, SPECIAL_ROWS, GRADIENT, STEP, PARTIAL,
        )  # fmt: skip


@triton.jit(do_not_specialize=["first_b", "last_b", "heads", "length", "tile_rows", "tile_columns", "threshold"])
def column_kernel(
    query, key, value, lse, output_grad, delta, key_grad, value_grad, tiles, pool, full_start, full, partial_start,
    partial, padding, spans, first, last, seed, distances, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, first_b,
    last_b, heads, length, tile_rows, tile_columns, scale, scaling, threshold, keep_scale,
    HEAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, DIAGONAL_OFF: tl.constexpr,
    CAUSAL: tl.constexpr, SPECIAL_ROWS: tl.constexpr, PARTIAL: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """
    The column programs: the gradients of keys and values. The lists are the transposed ones; all other arguments are
    those of [`row_kernel`]. Padded queries need no mask, since their `lse` is +inf.
    """
    SPECIAL: tl.constexpr = first is not None or last is not None
    bh, block = program_place(tile_columns, SPECIAL)
    batch, head = (bh // heads).to(tl.int64), bh % heads
    query += batch * q_b + head.to(tl.int64) * q_h
    key += batch * k_b + head.to(tl.int64) * k_h
    value += batch * v_b + head.to(tl.int64) * v_h
    o_n = heads * HEAD
    o_start = batch * length * o_n + head * HEAD
    output_grad += o_start
    key_grad += o_start
    value_grad += o_start
    lse += bh.to(tl.int64) * length
    delta += bh.to(tl.int64) * length
    tiles += head * tile_rows * tile_columns
    if distances is not None:
        distances += head * (2 * length - 1) + length - 1
    begin, end = tile_rows * 0, tile_rows
    first_real, behind_real = length * 0, length
    if padding is not None:
        padding += batch * length
        first_real, behind_real, _, _ = load_span(spans, batch, tile_columns)
        begin, end = first_real // BLOCK_Q, tl.cdiv(behind_real, BLOCK_Q)
    if first is not None:
        first = token_position(first, batch, first_b, length)
    if last is not None:
        last = token_position(last, batch, last_b, length)
    specials, valid = special_tokens(first, last, SPECIALS)

    if SPECIAL and block < 0:
        dense_columns(
            specials, valid, begin * (BLOCK_Q // STEP), end * (BLOCK_Q // STEP), query, key, value, lse, output_grad,
            delta, key_grad, value_grad, padding, first, last, seed, distances, bh, length, q_n, k_n, v_n, o_n, scale,
            scaling, threshold, keep_scale, HEAD, STEP, DIAGONAL_OFF, CAUSAL,
        )  # fmt: skip
    else:
        listed_columns(
            block, begin, end, first_real, behind_real, query, key, value, lse, output_grad, delta, key_grad,
            value_grad, tiles, pool, full_start, full, partial_start, partial, padding, first, last, seed, distances,
            bh, head, length, tile_rows, tile_columns, q_n, k_n, v_n, o_n, scale, scaling, threshold, keep_scale, HEAD,
            BLOCK_Q, BLOCK_K, DIAGONAL_OFF, CAUSAL, SPECIAL, SPECIAL_ROWS, STEP, PARTIAL,
        )  # fmt: skip


@triton.jit(do_not_specialize=["first_b", "last_b", "heads", "length", "tile_columns", "threshold"])
def short_backward_kernel(
    query, key, value, output, lse, output_grad, query_grad, key_grad, value_grad, tiles, pool, padding, spans, first,
    last, seed, rest_key, rest_value, rest_parts, distances, distance_grad, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h,
    v_n, first_b, last_b, heads, length, tile_rows, tile_columns, scale, scaling, threshold, keep_scale,
    HEAD: tl.constexpr, ROWS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    DIAGONAL_OFF: tl.constexpr, CAUSAL: tl.constexpr, SPECIAL_ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """
    All gradients of short inputs, one program per batch and head: all queries stay on the chip (ROWS is at least n),
    and the keys are loaded STEP at a time.
    """
    bh = tl.program_id(0)
    batch, head = (bh // heads).to(tl.int64), bh % heads
    query += batch * q_b + head.to(tl.int64) * q_h
    key += batch * k_b + head.to(tl.int64) * k_h
    value += batch * v_b + head.to(tl.int64) * v_h
    o_n = heads * HEAD
    o_start = batch * length * o_n + head * HEAD
    tiles += head * tile_rows * tile_columns
    if distances is not None:
        distances += head * (2 * length - 1) + length - 1
    if distance_grad is not None:
        distance_grad += head * (2 * length - 1) + length - 1
    first_real, behind_real, holes, words = length * 0, length, length * 0, None
    if padding is not None:
        padding += batch * length
        first_real, behind_real, holes, words = load_span(spans, batch, tile_columns)
    if first is not None:
        first = token_position(first, batch, first_b, length)
    if last is not None:
        last = token_position(last, batch, last_b, length)
    d, lane, rows = tl.arange(0, HEAD), tl.arange(0, STEP), tl.arange(0, ROWS)
    store = rows < length
    q, do, row_lse, row_delta, real = start_rows(
        rows, store, query, output + o_start, lse + bh.to(tl.int64) * length, output_grad + o_start, q_n, o_n, padding,
        HEAD, True,
    )  # fmt: skip
    dq = tl.zeros([ROWS, HEAD], tl.float32)
    if rest_key is not None:
        own_k, own_v = tl.load(rest_key + bh * HEAD + d), tl.load(rest_value + bh * HEAD + d)
        scores = lse + (tl.num_programs(0).to(tl.int64) + bh) * length
        rest_parts += bh.to(tl.int64) * (2 * HEAD + 1)
        rest_ds = rest_gradient(rows, store, q, do, row_lse, row_delta, own_v, scores, rest_parts, scaling, HEAD)
        dq = rest_ds[:, None] * own_k[None, :]
    for step in range(0, tl.cdiv(length, STEP)):
        columns = step * STEP + lane
        inside = columns < length
        k = tl.load(key + columns[:, None] * k_n + d[None, :], mask=inside[:, None], other=0.0)
        v = tl.load(value + columns[:, None] * v_n + d[None, :], mask=inside[:, None], other=0.0)
        keep = dense_keep(
            rows, store, columns, inside, step * STEP // BLOCK_K, tiles, pool, words, first_real, behind_real,
            holes, first, last, tile_columns, BLOCK_Q, BLOCK_K, DIAGONAL_OFF, CAUSAL, SPECIAL_ROWS, False,
        )  # fmt: skip
        place = place_of(rows[:, None], columns[None, :], length)
        s = products(q, k, distances, place, scale)
        p = tl.exp2(tl.where(keep, s * scale, float("-inf")) - row_lse[:, None])
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        dropped = p
        if seed is not None:
            kept = kept_keys(seed, bh, rows, step * STEP, threshold, STEP)
            dropped = tl.where(kept, p, 0.0)
            dp = tl.where(kept, dp * keep_scale, 0.0)
        dv = tl.dot(tl.trans(dropped.to(q.dtype)), do, input_precision="ieee")
        ds = p * (dp - row_delta[:, None])
        if distance_grad is not None:
            tl.atomic_add(distance_grad + place, ds, mask=p != 0, sem="relaxed")
        ds = ds.to(q.dtype)
        dk = tl.dot(tl.trans(ds), q, input_precision="ieee")
        finish_columns(
            columns, inside, dk, dv, key_grad + o_start, value_grad + o_start, padding, o_n, scaling, keep_scale, HEAD
        )
        dq = tl.dot(ds, k, dq, input_precision="ieee")
    at = o_start + rows[:, None] * o_n + d[None, :]
    tl.store(query_grad + at, (dq * scaling).to(query_grad.dtype.element_ty), mask=store[:, None])
