"""
The Triton kernels of tile attention.

Masks are in the tile form of `masks/tiles.py`, where a tile is BLOCK_Q queries by BLOCK_K keys. A row program computes
outputs or query gradients and takes STEP keys at a time; a column program computes key and value gradients and takes
STEP queries at a time.

An entry (i, j) that is on is computed by the row program of i and by the column program of j, once each. Special rows
and columns have a program of their own with SPECIALS lanes, which loops over everything. Any other program processes
its list of full tiles, its list of partial tiles, and one gathered tile of the special tokens, for those of their
entries that are not in the lists.

The loops have no branches, which would keep the compiler from pipelining their loads; their bounds are cut instead.

Letters: B batch, H heads, n length, d head size, T distinct tiles.
"""

import triton
import triton.language as tl

from .triton_steps import (
    SPECIALS,
    WORD,
    bit_at,
    column_step,
    dense_columns,
    dense_keep,
    dense_rows,
    dropout_words,
    finish_columns,
    finish_rows,
    guarded,
    load_queries,
    load_span,
    masked_entry,
    next_entry,
    program_place,
    real_word,
    row_step,
    special_tokens,
    special_words,
    start_rows,
    token_position,
)


@triton.jit
def listed_rows(
    block, specials, valid, begin, end, first_real, behind_real, holes, words, query, key, value, output, lse,
    output_grad, delta, query_grad, tiles, pool, full_start, full, partial_start, partial, padding, first, last, seed,
    bh, head, length, tile_rows, tile_columns, q_n, k_n, v_n, o_n, scale, scaling, threshold, keep_scale,
    HEAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, DIAGONAL_OFF: tl.constexpr,
    CAUSAL: tl.constexpr, SPECIAL: tl.constexpr, GRADIENT: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """A block of queries against its lists of key tiles, of which only `begin` to `end` contain real tokens."""
    SPLIT: tl.constexpr = BLOCK_K // STEP
    d, lane, row_lane = tl.arange(0, HEAD), tl.arange(0, STEP), tl.arange(0, BLOCK_Q)
    rows = block * BLOCK_Q + row_lane
    store = rows < length
    q, do, row_lse, row_delta, real = start_rows(
        rows, store, query, output, lse, output_grad, q_n, o_n, padding, HEAD, GRADIENT
    )
    acc = tl.zeros([BLOCK_Q, HEAD], tl.float32)
    top = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    line = (head * tile_rows + block) * (tile_columns + 1)
    # A block of padding has nothing to do.
    begin = tl.where((block + 1) * BLOCK_Q <= begin * BLOCK_K, end, begin)
    stop = tl.where(block * BLOCK_Q >= end * BLOCK_K, begin, end)

    # The full tiles of real tokens alone, from `inner` on, need no mask. The others are masked like the partial ones.
    inner, inner_stop = begin, stop
    if words is not None:
        inner = tl.where(holes != 0, begin, tl.cdiv(first_real, BLOCK_K))
        inner = tl.minimum(tl.maximum(inner, begin), stop)
        inner_stop = tl.where(holes != 0, inner, behind_real // BLOCK_K)
        inner_stop = tl.minimum(tl.maximum(inner_stop, inner), stop)
    entry, stop_entry = tl.load(full_start + line + inner), tl.load(full_start + line + inner_stop)
    full_begin, full_stop = tl.load(full_start + line + begin), tl.load(full_start + line + stop)
    tile = tl.load(full + entry, mask=entry < stop_entry, other=0)
    for step in range(entry * SPLIT, stop_entry * SPLIT):
        next_tile = tl.load(next_entry(full, step, stop_entry, SPLIT))
        start = tile * BLOCK_K + step % SPLIT * STEP
        columns = start + lane
        k = tl.load(key + columns[:, None] * k_n + d[None, :])
        v = tl.load(value + columns[:, None] * v_n + d[None, :])
        kept = None
        if seed is not None:
            drawn = dropout_words(seed, bh, rows, start // WORD, threshold)
            kept = bit_at(drawn[:, None], columns[None, :])
        acc, top, total = row_step(
            acc, top, total, q, do, row_lse, row_delta, k, v, None, kept, scale, keep_scale, GRADIENT
        )
        tile = next_tile

    before = entry - full_begin
    edge = before + full_stop - stop_entry
    partial_begin = tl.load(partial_start + line + begin)
    count = edge + tl.load(partial_start + line + stop) - partial_begin
    tile, index = masked_entry(full, partial, 0, count, before, edge, full_begin, stop_entry, partial_begin)
    for step in range(0, count * SPLIT):
        next_tile, next_index = masked_entry(
            full, partial, (step + 1) // SPLIT, count, before, edge, full_begin, stop_entry, partial_begin
        )
        part = step % SPLIT * STEP
        start = tile * BLOCK_K + part
        columns = start + lane
        inside = columns < length
        k = tl.load(key + columns[:, None] * k_n + d[None, :], mask=inside[:, None], other=0.0)
        v = tl.load(value + columns[:, None] * v_n + d[None, :], mask=inside[:, None], other=0.0)
        bits = tl.load(pool + index * BLOCK_Q + row_lane)
        if words is not None:
            bits &= real_word(words, tile, first_real, behind_real, holes)
        keep = bit_at(bits[:, None], (part + lane)[None, :])
        kept = None
        if seed is not None:
            drawn = dropout_words(seed, bh, rows, start // WORD, threshold)
            kept = bit_at(drawn[:, None], columns[None, :])
        acc, top, total = row_step(
            acc, top, total, q, do, row_lse, row_delta, k, v, keep, kept, scale, keep_scale, GRADIENT
        )
        tile, index = next_tile, next_index

    if SPECIAL:
        seen = valid
        if padding is not None:
            seen = valid & (tl.load(padding + specials) != 0)
        k = tl.load(key + specials[:, None] * k_n + d[None, :], mask=valid[:, None], other=0.0)
        v = tl.load(value + specials[:, None] * v_n + d[None, :], mask=valid[:, None], other=0.0)
        index = tl.load(tiles + block * tile_columns + specials // BLOCK_K)
        bits = tl.load(pool + index[None, :] * BLOCK_Q + row_lane[:, None])
        listed = bit_at(bits, (specials % BLOCK_K)[None, :])
        keep = guarded(seen[None, :] & ~listed, rows[:, None], specials[None, :], DIAGONAL_OFF, CAUSAL)
        kept = None
        if seed is not None:
            kept = bit_at(special_words(seed, bh, rows, first, last, threshold, 1), specials[None, :])
        acc, top, total = row_step(
            acc, top, total, q, do, row_lse, row_delta, k, v, keep, kept, scale, keep_scale, GRADIENT
        )
        if first is not None:
            store &= rows != first
        if last is not None:
            store &= rows != last
    finish_rows(
        rows, store, real, acc, top, total, row_delta, output, lse, delta, query_grad, o_n, scaling, keep_scale, HEAD,
        GRADIENT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first_b", "last_b", "heads", "length", "tile_rows", "tile_columns", "threshold"])
def row_kernel(
    query, key, value, output, lse, output_grad, delta, query_grad, tiles, pool, full_start, full, partial_start,
    partial, padding, spans, first, last, seed, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, first_b, last_b, heads,
    length, tile_rows, tile_columns, scale, scaling, threshold, keep_scale,
    HEAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, DIAGONAL_OFF: tl.constexpr,
    CAUSAL: tl.constexpr, SHORT: tl.constexpr, GRADIENT: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """
    The row programs: forward, which writes `output` and `lse`, or with GRADIENT the gradient of the queries, which
    writes `query_grad` and `delta`, the sum of the output times its gradient. SHORT: visit all keys, without tile
    lists.

    `output`, `output_grad` and `query_grad` are (B, n, H, d) and contiguous. `padding` (B, n) int8, `spans`
    (B, 3 + tile_columns) int64, `first` and `last` (B,) or (1,) int32 (then `first_b` or `last_b` is 0) and `seed`
    (2,) int64 may be `None`.
    """
    SPLIT: tl.constexpr = BLOCK_K // STEP
    SPECIAL: tl.constexpr = (first is not None or last is not None) and not SHORT
    bh, block = program_place(tile_rows, SPECIAL)
    batch, head = (bh // heads).to(tl.int64), bh % heads
    query += batch * q_b + head.to(tl.int64) * q_h
    key += batch * k_b + head.to(tl.int64) * k_h
    value += batch * v_b + head.to(tl.int64) * v_h
    o_n = heads * HEAD
    o_start = batch * length * o_n + head * HEAD
    output += o_start
    lse += bh.to(tl.int64) * length
    tiles += head * tile_rows * tile_columns
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
            output, lse, output_grad, delta, query_grad, tiles, pool, padding, first, last, seed, bh, length,
            tile_columns, q_n, k_n, v_n, o_n, scale, scaling, threshold, keep_scale, HEAD, BLOCK_Q, BLOCK_K, STEP,
            BLOCK_Q, DIAGONAL_OFF, CAUSAL, False, GRADIENT,
        )  # fmt: skip
    elif SPECIAL:
        if block < 0:
            dense_rows(
                specials, valid, begin * SPLIT, end * SPLIT, first_real, behind_real, holes, words, query, key, value,
                output, lse, output_grad, delta, query_grad, tiles, pool, padding, first, last, seed, bh, length,
                tile_columns, q_n, k_n, v_n, o_n, scale, scaling, threshold, keep_scale, HEAD, BLOCK_Q, BLOCK_K, STEP,
                SPECIALS, DIAGONAL_OFF, CAUSAL, True, GRADIENT,
            )  # fmt: skip
        else:
            listed_rows(
                block, specials, valid, begin, end, first_real, behind_real, holes, words, query, key, value, output,
                lse, output_grad, delta, query_grad, tiles, pool, full_start, full, partial_start, partial, padding,
                first, last, seed, bh, head, length, tile_rows, tile_columns, q_n, k_n, v_n, o_n, scale, scaling,
                threshold, keep_scale, HEAD, BLOCK_Q, BLOCK_K, DIAGONAL_OFF, CAUSAL, SPECIAL, GRADIENT, STEP,
            )  # fmt: skip
    else:
        listed_rows(
            block, specials, valid, begin, end, first_real, behind_real, holes, words, query, key, value, output, lse,
            output_grad, delta, query_grad, tiles, pool, full_start, full, partial_start, partial, padding, first,
            last, seed, bh, head, length, tile_rows, tile_columns, q_n, k_n, v_n, o_n, scale, scaling, threshold,
            keep_scale, HEAD, BLOCK_Q, BLOCK_K, DIAGONAL_OFF, CAUSAL, SPECIAL, GRADIENT, STEP,
        )  # fmt: skip


@triton.jit
def listed_columns(
    block, begin, end, first_real, behind_real, query, key, value, lse, output_grad, delta, key_grad, value_grad,
    tiles, pool, full_start, full, partial_start, partial, padding, first, last, seed, bh, head, length, tile_rows,
    tile_columns, q_n, k_n, v_n, o_n, scale, scaling, threshold, keep_scale,
    HEAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, DIAGONAL_OFF: tl.constexpr,
    CAUSAL: tl.constexpr, SPECIAL: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """A block of keys against its lists of query tiles, of which only `begin` to `end` contain real tokens."""
    SPLIT: tl.constexpr = BLOCK_Q // STEP
    d, lane, row_lane = tl.arange(0, HEAD), tl.arange(0, BLOCK_K), tl.arange(0, STEP)
    columns = block * BLOCK_K + lane
    store = columns < length
    k = tl.load(key + columns[:, None] * k_n + d[None, :], mask=store[:, None], other=0.0)
    v = tl.load(value + columns[:, None] * v_n + d[None, :], mask=store[:, None], other=0.0)
    dk = tl.zeros([BLOCK_K, HEAD], tl.float32)
    dv = tl.zeros([BLOCK_K, HEAD], tl.float32)
    line = (head * tile_columns + block) * (tile_rows + 1)
    begin = tl.where((block + 1) * BLOCK_K <= first_real, end, begin)
    stop = tl.where(block * BLOCK_K >= behind_real, begin, end)

    entry, stop_entry = tl.load(full_start + line + begin), tl.load(full_start + line + stop)
    tile = tl.load(full + entry, mask=entry < stop_entry, other=0)
    for step in range(entry * SPLIT, stop_entry * SPLIT):
        next_tile = tl.load(next_entry(full, step, stop_entry, SPLIT))
        rows = tile * BLOCK_Q + step % SPLIT * STEP + row_lane
        q, do, row_lse, row_delta = load_queries(rows, None, query, output_grad, lse, delta, q_n, o_n, HEAD)
        kept = None
        if seed is not None:
            drawn = dropout_words(seed, bh, rows, block * BLOCK_K // WORD, threshold)
            kept = bit_at(drawn[None, :], columns[:, None])
        dk, dv = column_step(dk, dv, k, v, q, do, row_lse, row_delta, None, kept, scale, keep_scale)
        tile = next_tile

    entry, stop_entry = tl.load(partial_start + line + begin), tl.load(partial_start + line + stop)
    count = stop_entry - entry
    tile, index = masked_entry(full, partial, 0, count, 0, 0, entry, entry, entry)
    for step in range(0, count * SPLIT):
        next_tile, next_index = masked_entry(full, partial, (step + 1) // SPLIT, count, 0, 0, entry, entry, entry)
        part = step % SPLIT * STEP
        rows = tile * BLOCK_Q + part + row_lane
        q, do, row_lse, row_delta = load_queries(rows, rows < length, query, output_grad, lse, delta, q_n, o_n, HEAD)
        bits = tl.load(pool + index * BLOCK_Q + part + row_lane)
        keep = bit_at(bits[None, :], lane[:, None])
        kept = None
        if seed is not None:
            drawn = dropout_words(seed, bh, rows, block * BLOCK_K // WORD, threshold)
            kept = bit_at(drawn[None, :], columns[:, None])
        dk, dv = column_step(dk, dv, k, v, q, do, row_lse, row_delta, keep, kept, scale, keep_scale)
        tile, index = next_tile, next_index

    if SPECIAL:
        # As wide as a step, so that the k and v in registers fit.
        specials, valid = special_tokens(first, last, STEP)
        q, do, row_lse, row_delta = load_queries(specials, valid, query, output_grad, lse, delta, q_n, o_n, HEAD)
        index = tl.load(tiles + specials // BLOCK_Q * tile_columns + block)
        bits = tl.load(pool + index * BLOCK_Q + specials % BLOCK_Q)
        listed = bit_at(bits[None, :], lane[:, None])
        keep = guarded(valid[None, :] & ~listed, specials[None, :], columns[:, None], DIAGONAL_OFF, CAUSAL)
        kept = None
        if seed is not None:
            drawn = dropout_words(seed, bh, specials, block * BLOCK_K // WORD, threshold)
            kept = bit_at(drawn[None, :], columns[:, None])
        dk, dv = column_step(dk, dv, k, v, q, do, row_lse, row_delta, keep, kept, scale, keep_scale)
        if first is not None:
            store &= columns != first
        if last is not None:
            store &= columns != last
    finish_columns(columns, store, dk, dv, key_grad, value_grad, padding, o_n, scaling, keep_scale, HEAD)


@triton.jit(do_not_specialize=["first_b", "last_b", "heads", "length", "tile_rows", "tile_columns", "threshold"])
def column_kernel(
    query, key, value, lse, output_grad, delta, key_grad, value_grad, tiles, pool, full_start, full, partial_start,
    partial, padding, spans, first, last, seed, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, first_b, last_b, heads,
    length, tile_rows, tile_columns, scale, scaling, threshold, keep_scale,
    HEAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, DIAGONAL_OFF: tl.constexpr,
    CAUSAL: tl.constexpr, STEP: tl.constexpr,
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

    if SPECIAL:
        if block < 0:
            dense_columns(
                specials, valid, begin * (BLOCK_Q // STEP), end * (BLOCK_Q // STEP), query, key, value, lse,
                output_grad, delta, key_grad, value_grad, padding, first, last, seed, bh, length, q_n, k_n, v_n, o_n,
                scale, scaling, threshold, keep_scale, HEAD, STEP, DIAGONAL_OFF, CAUSAL,
            )  # fmt: skip
        else:
            listed_columns(
                block, begin, end, first_real, behind_real, query, key, value, lse, output_grad, delta, key_grad,
                value_grad, tiles, pool, full_start, full, partial_start, partial, padding, first, last, seed, bh,
                head, length, tile_rows, tile_columns, q_n, k_n, v_n, o_n, scale, scaling, threshold, keep_scale, HEAD,
                BLOCK_Q, BLOCK_K, DIAGONAL_OFF, CAUSAL, SPECIAL, STEP,
            )  # fmt: skip
    else:
        listed_columns(
            block, begin, end, first_real, behind_real, query, key, value, lse, output_grad, delta, key_grad,
            value_grad, tiles, pool, full_start, full, partial_start, partial, padding, first, last, seed, bh, head,
            length, tile_rows, tile_columns, q_n, k_n, v_n, o_n, scale, scaling, threshold, keep_scale, HEAD, BLOCK_Q,
            BLOCK_K, DIAGONAL_OFF, CAUSAL, SPECIAL, STEP,
        )  # fmt: skip


@triton.jit(do_not_specialize=["first_b", "last_b", "heads", "length", "tile_columns", "threshold"])
def short_backward_kernel(
    query, key, value, output, lse, output_grad, query_grad, key_grad, value_grad, tiles, pool, padding, spans, first,
    last, seed, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, first_b, last_b, heads, length, tile_rows, tile_columns,
    scale, scaling, threshold, keep_scale,
    HEAD: tl.constexpr, ROWS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    DIAGONAL_OFF: tl.constexpr, CAUSAL: tl.constexpr, STEP: tl.constexpr,
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
    for step in range(0, tl.cdiv(length, STEP)):
        columns = step * STEP + lane
        inside = columns < length
        k = tl.load(key + columns[:, None] * k_n + d[None, :], mask=inside[:, None], other=0.0)
        v = tl.load(value + columns[:, None] * v_n + d[None, :], mask=inside[:, None], other=0.0)
        keep = dense_keep(
            rows, store, columns, inside, step * STEP // BLOCK_K, tiles, pool, words, first_real, behind_real,
            holes, first, last, tile_columns, BLOCK_Q, BLOCK_K, DIAGONAL_OFF, CAUSAL, False,
        )  # fmt: skip
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        p = tl.exp2(tl.where(keep, s * scale, float("-inf")) - row_lse[:, None])
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        dropped = p
        if seed is not None:
            drawn = dropout_words(seed, bh, rows, step * STEP // WORD, threshold)
            kept = bit_at(drawn[:, None], columns[None, :])
            dropped = tl.where(kept, p, 0.0)
            dp = tl.where(kept, dp * keep_scale, 0.0)
        dv = tl.dot(tl.trans(dropped.to(q.dtype)), do, input_precision="ieee")
        ds = (p * (dp - row_delta[:, None])).to(q.dtype)
        dk = tl.dot(tl.trans(ds), q, input_precision="ieee")
        finish_columns(
            columns, inside, dk, dv, key_grad + o_start, value_grad + o_start, padding, o_n, scaling, keep_scale, HEAD
        )
        dq = tl.dot(ds, k, dq, input_precision="ieee")
    at = o_start + rows[:, None] * o_n + d[None, :]
    tl.store(query_grad + at, (dq * scaling).to(query_grad.dtype.element_ty), mask=store[:, None])
