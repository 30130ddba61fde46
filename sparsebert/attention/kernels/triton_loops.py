"""
The loops of the Triton kernels over keys or queries: by tile lists, or all in order.

They have no branches, which would keep the compiler from pipelining their loads; their bounds are cut instead.

Letters: B batch, H heads, n length, d head size.
"""

import triton
import triton.language as tl

from .triton_rest import first_sums
from .triton_steps import (
    SPECIALS,
    bit_at,
    column_step,
    dense_keep,
    finish_columns,
    finish_rows,
    guarded,
    kept_at,
    kept_keys,
    kept_queries,
    load_queries,
    masked_entry,
    next_entry,
    real_word,
    row_step,
    special_tokens,
    start_rows,
)


@triton.jit
def listed_rows(
    block, specials, valid, begin, end, first_real, behind_real, holes, words, query, key, value, output, lse,
    output_grad, delta, query_grad, tiles, pool, full_start, full, partial_start, partial, padding, first, last, seed,
    rest_key, rest_value, rest_score, removed, scores, rest_parts, distances, distance_grad, bh, head, length,
    tile_rows, tile_columns, q_n, k_n, v_n, o_n, scale, scaling, threshold, keep_scale,
    HEAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, DIAGONAL_OFF: tl.constexpr,
    CAUSAL: tl.constexpr, SPECIAL: tl.constexpr, SPECIAL_ROWS: tl.constexpr, GRADIENT: tl.constexpr,
    STEP: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """
    A block of queries against its lists of key tiles, of which only `begin` to `end` contain real tokens. PARTIAL:
    whether there are partial tiles in any list, whose code takes registers.
    """
    SPLIT: tl.constexpr = BLOCK_K // STEP
    d, lane, row_lane = tl.arange(0, HEAD), tl.arange(0, STEP), tl.arange(0, BLOCK_Q)
    rows = block * BLOCK_Q + row_lane
    store = rows < length
    q, do, row_lse, row_delta, real = start_rows(
        rows, store, query, output, lse, output_grad, q_n, o_n, padding, HEAD, GRADIENT
    )
    own = store
    if SPECIAL and SPECIAL_ROWS and (rest_key is not None or distance_grad is not None):
        if first is not None:
            own &= rows != first
        if last is not None:
            own &= rows != last
        if distance_grad is not None:  # to which the program of special rows adds theirs
            row_lse = tl.where(own, row_lse, float("inf"))
    acc, top, total = first_sums(
        rows, own, real, q, do, row_lse, row_delta, begin, end, first_real, behind_real, holes, words, tiles, pool,
        first, last, tile_columns, rest_key, rest_value, rest_score, removed, scores, rest_parts, scale, scaling,
        keep_scale, BLOCK_Q, HEAD, BLOCK_Q, DIAGONAL_OFF, SPECIAL_ROWS, GRADIENT,
    )  # fmt: skip
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
        kept = kept_keys(seed, bh, rows, start, threshold, STEP) if seed is not None else None
        acc, top, total = row_step(
            acc, top, total, q, do, row_lse, row_delta, k, v, rows, columns, None, kept, distances, distance_grad,
            length, scale, keep_scale, GRADIENT,
        )  # fmt: skip
        tile = next_tile

    if PARTIAL or words is not None:
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
            kept = kept_keys(seed, bh, rows, start, threshold, STEP) if seed is not None else None
            acc, top, total = row_step(
                acc, top, total, q, do, row_lse, row_delta, k, v, rows, columns, keep, kept, distances, distance_grad,
                length, scale, keep_scale, GRADIENT,
            )  # fmt: skip
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
        kept = kept_at(seed, bh, rows[:, None], specials[None, :], threshold) if seed is not None else None
        acc, top, total = row_step(
            acc, top, total, q, do, row_lse, row_delta, k, v, rows, specials, keep, kept, distances, distance_grad,
            length, scale, keep_scale, GRADIENT,
        )  # fmt: skip
        if SPECIAL_ROWS:
            if first is not None:
                store &= rows != first
            if last is not None:
                store &= rows != last
    finish_rows(
        rows, store, real, acc, top, total, row_delta, output, lse, delta, query_grad, o_n, scaling, keep_scale, HEAD,
        GRADIENT,
    )  # fmt: skip


@triton.jit
def listed_columns(
    block, begin, end, first_real, behind_real, query, key, value, lse, output_grad, delta, key_grad, value_grad,
    tiles, pool, full_start, full, partial_start, partial, padding, first, last, seed, distances, bh, head, length,
    tile_rows, tile_columns, q_n, k_n, v_n, o_n, scale, scaling, threshold, keep_scale,
    HEAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, DIAGONAL_OFF: tl.constexpr,
    CAUSAL: tl.constexpr, SPECIAL: tl.constexpr, SPECIAL_ROWS: tl.constexpr, STEP: tl.constexpr,
    PARTIAL: tl.constexpr,
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
        kept = kept_queries(seed, bh, rows, block * BLOCK_K, threshold) if seed is not None else None
        dk, dv = column_step(
            dk, dv, k, v, q, do, row_lse, row_delta, rows, columns, None, kept, distances, length, scale,
            keep_scale,
        )  # fmt: skip
        tile = next_tile

    if PARTIAL:
        entry, stop_entry = tl.load(partial_start + line + begin), tl.load(partial_start + line + stop)
        count = stop_entry - entry
        tile, index = masked_entry(full, partial, 0, count, 0, 0, entry, entry, entry)
        for step in range(0, count * SPLIT):
            next_tile, next_index = masked_entry(full, partial, (step + 1) // SPLIT, count, 0, 0, entry, entry, entry)
            part = step % SPLIT * STEP
            rows = tile * BLOCK_Q + part + row_lane
            q, do, row_lse, row_delta = load_queries(
                rows, rows < length, query, output_grad, lse, delta, q_n, o_n, HEAD
            )
            bits = tl.load(pool + index * BLOCK_Q + part + row_lane)
            keep = bit_at(bits[None, :], lane[:, None])
            kept = kept_queries(seed, bh, rows, block * BLOCK_K, threshold) if seed is not None else None
            dk, dv = column_step(
                dk, dv, k, v, q, do, row_lse, row_delta, rows, columns, keep, kept, distances, length, scale,
                keep_scale,
            )  # fmt: skip
            tile, index = next_tile, next_index

    if SPECIAL and SPECIAL_ROWS:
        # As wide as a step, so that the k and v in registers fit.
        specials, valid = special_tokens(first, last, STEP)
        q, do, row_lse, row_delta = load_queries(specials, valid, query, output_grad, lse, delta, q_n, o_n, HEAD)
        index = tl.load(tiles + specials // BLOCK_Q * tile_columns + block)
        bits = tl.load(pool + index * BLOCK_Q + specials % BLOCK_Q)
        listed = bit_at(bits[None, :], lane[:, None])
        keep = guarded(valid[None, :] & ~listed, specials[None, :], columns[:, None], DIAGONAL_OFF, CAUSAL)
        kept = kept_at(seed, bh, specials[None, :], columns[:, None], threshold) if seed is not None else None
        dk, dv = column_step(
            dk, dv, k, v, q, do, row_lse, row_delta, specials, columns, keep, kept, distances, length, scale,
            keep_scale,
        )  # fmt: skip
    if SPECIAL:
        if first is not None:
            store &= columns != first
        if last is not None:
            store &= columns != last
    finish_columns(columns, store, dk, dv, key_grad, value_grad, padding, o_n, scaling, keep_scale, HEAD)


@triton.jit
def dense_rows(
    rows, store, begin, end, first_real, behind_real, holes, words, query, key, value, output, lse, output_grad, delta,
    query_grad, tiles, pool, padding, first, last, seed, rest_key, rest_value, rest_score, removed, scores, rest_parts,
    distances, distance_grad, bh, length, tile_columns, q_n, k_n, v_n, o_n, scale, scaling, threshold, keep_scale,
    HEAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, STEP: tl.constexpr, NUM_ROWS: tl.constexpr,
    DIAGONAL_OFF: tl.constexpr, CAUSAL: tl.constexpr, SPECIAL_ROWS: tl.constexpr, GATHERED: tl.constexpr,
    GRADIENT: tl.constexpr,
):  # fmt: skip
    """Some queries (GATHERED: special tokens) against the keys from `STEP * begin` to `STEP * end`."""
    d, lane = tl.arange(0, HEAD), tl.arange(0, STEP)
    q, do, row_lse, row_delta, real = start_rows(
        rows, store, query, output, lse, output_grad, q_n, o_n, padding, HEAD, GRADIENT
    )
    SPLIT: tl.constexpr = BLOCK_K // STEP
    acc, top, total = first_sums(
        rows, store, real, q, do, row_lse, row_delta, begin // SPLIT, end // SPLIT, first_real, behind_real, holes,
        words, tiles, pool, first, last, tile_columns, rest_key, rest_value, rest_score, removed, scores, rest_parts,
        scale, scaling, keep_scale, NUM_ROWS, HEAD, BLOCK_Q, DIAGONAL_OFF, SPECIAL_ROWS, GRADIENT,
    )  # fmt: skip
    for step in range(begin, end):
        columns = step * STEP + lane
        inside = columns < length
        k = tl.load(key + columns[:, None] * k_n + d[None, :], mask=inside[:, None], other=0.0)
        v = tl.load(value + columns[:, None] * v_n + d[None, :], mask=inside[:, None], other=0.0)
        keep = dense_keep(
            rows, store, columns, inside, step * STEP // BLOCK_K, tiles, pool, words, first_real, behind_real,
            holes, first, last, tile_columns, BLOCK_Q, BLOCK_K, DIAGONAL_OFF, CAUSAL, SPECIAL_ROWS, GATHERED,
        )  # fmt: skip
        kept = kept_keys(seed, bh, rows, step * STEP, threshold, STEP) if seed is not None else None
        acc, top, total = row_step(
            acc, top, total, q, do, row_lse, row_delta, k, v, rows, columns, keep, kept, distances, distance_grad,
            length, scale, keep_scale, GRADIENT,
        )  # fmt: skip
    finish_rows(
        rows, store, real, acc, top, total, row_delta, output, lse, delta, query_grad, o_n, scaling, keep_scale, HEAD,
        GRADIENT,
    )  # fmt: skip


@triton.jit
def dense_columns(
    specials, valid, begin, end, query, key, value, lse, output_grad, delta, key_grad, value_grad, padding, first,
    last, seed, distances, bh, length, q_n, k_n, v_n, o_n, scale, scaling, threshold, keep_scale,
    HEAD: tl.constexpr, STEP: tl.constexpr, DIAGONAL_OFF: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The keys of the special tokens against the queries from `STEP * begin` to `STEP * end`."""
    d, row_lane = tl.arange(0, HEAD), tl.arange(0, STEP)
    k = tl.load(key + specials[:, None] * k_n + d[None, :], mask=valid[:, None], other=0.0)
    v = tl.load(value + specials[:, None] * v_n + d[None, :], mask=valid[:, None], other=0.0)
    dk = tl.zeros([SPECIALS, HEAD], tl.float32)
    dv = tl.zeros([SPECIALS, HEAD], tl.float32)
    for step in range(begin, end):
        rows = step * STEP + row_lane
        inside = rows < length
        q, do, row_lse, row_delta = load_queries(rows, inside, query, output_grad, lse, delta, q_n, o_n, HEAD)
        keep = guarded(valid[:, None] & inside[None, :], rows[None, :], specials[:, None], DIAGONAL_OFF, CAUSAL)
        kept = kept_at(seed, bh, rows[None, :], specials[:, None], threshold) if seed is not None else None
        dk, dv = column_step(
            dk, dv, k, v, q, do, row_lse, row_delta, rows, specials, keep, kept, distances, length, scale,
            keep_scale,
        )  # fmt: skip
    finish_columns(specials, valid, dk, dv, key_grad, value_grad, padding, o_n, scaling, keep_scale, HEAD)
