"""
Triton kernels of tile attention.

Letters: B batch, H heads, n length, d head size, T different tiles. A tile is BLOCK_Q queries by BLOCK_K keys; masks
come in the tile form of `masks/tiles.py`. Scores are in units of log 2: `scale` is the softmax scale times log2(e),
and `lse` (B, H, n) is the base-2 logarithm of the normaliser, +inf where a query has no key, so that 2^(s - lse) = 0.

Who computes an entry (i, j) that is on: forward and query gradients, the program of row i; key and value gradients,
the program of column j. Special rows (and columns) have a program of their own, of SPECIALS lanes, that loops over
everything; an ordinary program runs through its list of full tiles, its list of partial tiles, and one gathered tile
of the special tokens for those of their entries that the lists lack. So each entry is counted once.

The loops hold no branch, since that would keep the compiler from pipelining their loads: bounds are cut instead.
"""

import triton
import triton.language as tl


# Lanes of a gathered tile of special tokens, of which two are used: the smallest that a matrix unit takes.
SPECIALS = tl.constexpr(16)
# Bits of a word of dropout decisions.
WORD = tl.constexpr(64)


@triton.jit
def dropout_words(seed, head, rows, index, threshold):
    """
    Dropout decisions of keys `64 * index` to `64 * index + 63`: bit c is on if key c is kept, with probability
    `threshold / 65536`. They depend on the entry alone, not on the tile that asks.

    Bit k of the threshold halves the probability and adds 1/2 where it is on, for 32 entries in one operation, so one
    draw of Philox serves 8 entries.

    Args:
        seed: Pointer to two int64: the key of Philox and a part of its counter.
        head: Index of batch and head.
        rows (int32): Queries.
        index (int32): A number.
        threshold (int32): 1 to 65535.

    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011), Philox-4x32-7.
    """
    key = tl.load(seed)
    salt = tl.load(seed + 1).to(tl.int32) << 2
    half = tl.arange(0, 2)[None, :]
    kept = tl.zeros_like(rows[:, None] + half).to(tl.uint32)
    for draw in tl.static_range(4):
        plane = tl.philox(key, rows[:, None], 2 * index + half, head, salt + draw, 7)
        for k in tl.static_range(4):
            bit = (0 - ((threshold >> (4 * draw + k)) & 1)).to(tl.uint32, bitcast=True)
            kept = (plane[k] & kept) | (bit & (plane[k] | kept))
    return tl.sum(kept.to(tl.int64) << (32 * half).to(tl.int64), 1)


@triton.jit
def bit_at(words, position):
    """Whether bit `position` (taken modulo 64) of `words` is on."""
    return ((words.to(tl.int64) >> (position & 63).to(tl.int64)) & 1) != 0


@triton.jit
def last_token(last, batch, length):
    """Position of the last token, inside the sequence even if the caller has none to name."""
    return tl.minimum(tl.maximum(tl.load(last + batch), 0), length - 1)


@triton.jit
def special_tokens(position, FIRST: tl.constexpr):
    """Positions of the special tokens in the first lanes, and which lanes hold one; `position`: last token or `None`."""
    lane = tl.arange(0, SPECIALS)
    positions, valid = lane * 0, lane == 0
    if position is not None:
        if FIRST:
            positions = tl.where(lane == 0, 0, position)
            valid = valid | ((lane == 1) & (positions > 0))
        else:
            positions = positions + position
    return positions, valid


@triton.jit
def special_words(seed, head, rows, position, threshold, FIRST: tl.constexpr):
    """The words of dropout decisions that hold the keys of [`special_tokens`], one per query and lane."""
    if FIRST:
        words = dropout_words(seed, head, rows, 0, threshold)[:, None]
        if position is not None:
            other_words = dropout_words(seed, head, rows, position // WORD, threshold)[:, None]
            words = tl.where(tl.arange(0, SPECIALS)[None, :] == 0, words, other_words)
    else:
        words = dropout_words(seed, head, rows, position // WORD, threshold)[:, None]
    return words


@triton.jit
def real_tokens(padding, length):
    """First and behind-last real token of a sequence; `(length, 0)` if it has none."""
    lane = tl.arange(0, 1024)
    begin, end = length, 0
    for start in range(0, length, 1024):
        at = start + lane
        real = tl.load(padding + at, mask=at < length, other=0) != 0
        begin = tl.minimum(begin, tl.min(tl.where(real, at, length)))
        end = tl.maximum(end, tl.max(tl.where(real, at + 1, 0)))
    return begin, end


@triton.jit
def guarded(on, rows, columns, DIAGONAL_OFF: tl.constexpr, CAUSAL: tl.constexpr):
    """`on` without what not even a special token turns on; rows and columns broadcast."""
    if DIAGONAL_OFF:
        on &= rows != columns
    if CAUSAL:
        on &= rows >= columns
    return on


@triton.jit
def row_step(acc, top, total, q, output_grad, lse, delta, k, v, keep, kept, scale, keep_scale, GRADIENT: tl.constexpr):
    """
    Some keys for some queries: the running output, maximum and sum of the softmax, or the query gradient.

    Args:
        keep: Bool (queries, keys), `None` if all are on.
        kept: Bool (queries, keys), False where dropped, or `None`.
    """
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if keep is not None:
        s = tl.where(keep, s, float("-inf"))
    if GRADIENT:
        p = tl.exp2(s * scale - lse[:, None])
        dp = tl.dot(output_grad, tl.trans(v), input_precision="ieee")
        if kept is not None:
            dp = tl.where(kept, dp * keep_scale, 0.0)
        ds = p * (dp - delta[:, None])
        acc = tl.dot(ds.to(k.dtype), k, acc, input_precision="ieee")
    else:
        new = tl.maximum(top, tl.max(s, 1) * scale)
        # Nothing seen yet: any finite maximum will do, and -inf would make NaN.
        finite = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(s * scale - finite[:, None])
        shrink = tl.exp2(top - finite)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        if kept is not None:
            p = tl.where(kept, p, 0.0)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        top = new
    return acc, top, total


@triton.jit
def column_step(dk, dv, k, v, q, output_grad, lse, delta, keep, kept, scale, keep_scale):
    """
    Some queries for some keys: the running gradients of keys and values, and the gradient of the scores. `keep` and
    `kept` as in [`row_step`]: with queries as rows, a thread needs the words and normalisers of two queries only.
    """
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if keep is not None:
        s = tl.where(keep, s, float("-inf"))
    p = tl.exp2(s * scale - lse[:, None])
    dp = tl.dot(output_grad, tl.trans(v), input_precision="ieee")
    if kept is not None:
        dropped = tl.where(kept, p, 0.0)
        dp = tl.where(kept, dp * keep_scale, 0.0)
    else:
        dropped = p
    ds = (p * (dp - delta[:, None])).to(q.dtype)
    dv = tl.dot(tl.trans(dropped.to(q.dtype)), output_grad, dv, input_precision="ieee")
    dk = tl.dot(tl.trans(ds), q, dk, input_precision="ieee")
    return dk, dv, ds


@triton.jit
def start_rows(
    rows, store, query, output, lse, output_grad, q_n, o_n, padding, HEAD: tl.constexpr, GRADIENT: tl.constexpr
):
    """Queries, and what else their programs need: `q, output_grad, lse, delta, real`."""
    d = tl.arange(0, HEAD)
    real = store
    if padding is not None:
        real &= tl.load(padding + rows, mask=store, other=0) != 0
    q = tl.load(query + rows[:, None] * q_n + d[None, :], mask=store[:, None], other=0.0)
    do, normaliser, row_delta = None, None, None
    if GRADIENT:
        at = rows[:, None] * o_n + d[None, :]
        o = tl.load(output + at, mask=store[:, None], other=0.0)
        do = tl.load(output_grad + at, mask=store[:, None], other=0.0)
        normaliser = tl.load(lse + rows, mask=store, other=float("inf"))
        row_delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    return q, do, normaliser, row_delta, real


@triton.jit
def finish_rows(
    rows, store, real, acc, top, total, row_delta, output, lse, delta, query_grad, o_n, scaling, keep_scale,
    HEAD: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """Write what a program found for its queries."""
    at = rows[:, None] * o_n + tl.arange(0, HEAD)[None, :]
    if GRADIENT:
        tl.store(query_grad + at, (acc * scaling).to(query_grad.dtype.element_ty), mask=store[:, None])
        tl.store(delta + rows, row_delta, mask=store)
    else:
        live = real & (total > 0)
        result = tl.where(live[:, None], acc * (keep_scale / tl.where(live, total, 1.0))[:, None], 0.0)
        tl.store(output + at, result.to(output.dtype.element_ty), mask=store[:, None])
        tl.store(lse + rows, tl.where(live, top + tl.log2(tl.where(live, total, 1.0)), float("inf")), mask=store)


@triton.jit
def dense_keep(
    rows, store, columns, inside, tile, tiles, pool, padding, last, tile_columns,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, FIRST: tl.constexpr, DIAGONAL_OFF: tl.constexpr,
    CAUSAL: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    """All of the mask of some queries and the keys of a tile; GATHERED: all queries are special tokens."""
    if padding is not None:
        inside = tl.load(padding + columns, mask=inside, other=0) != 0
    keep = guarded(store[:, None] & inside[None, :], rows[:, None], columns[None, :], DIAGONAL_OFF, CAUSAL)
    if not GATHERED:
        index = tl.load(tiles + rows // BLOCK_Q * tile_columns + tile, mask=store, other=0)
        on = bit_at(tl.load(pool + index * BLOCK_Q + rows % BLOCK_Q)[:, None], (columns % BLOCK_K)[None, :])
        if FIRST:
            on |= (rows[:, None] == 0) | (columns[None, :] == 0)
        if last is not None:
            on |= (rows[:, None] == last) | (columns[None, :] == last)
        keep &= on
    return keep


@triton.jit
def dense_rows(
    rows, store, begin, end, query, key, value, output, lse, output_grad, delta, query_grad, tiles, pool, padding,
    last, seed, bh, length, tile_columns, q_n, k_n, v_n, o_n, scale, scaling, threshold, keep_scale,
    HEAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, NUM_ROWS: tl.constexpr, FIRST: tl.constexpr,
    DIAGONAL_OFF: tl.constexpr, CAUSAL: tl.constexpr, GATHERED: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """Some queries against all key tiles `begin` to `end`; GATHERED: the queries are special tokens."""
    d, lane = tl.arange(0, HEAD), tl.arange(0, BLOCK_K)
    q, do, row_lse, row_delta, real = start_rows(
        rows, store, query, output, lse, output_grad, q_n, o_n, padding, HEAD, GRADIENT
    )
    acc = tl.zeros([NUM_ROWS, HEAD], tl.float32)
    top = tl.full([NUM_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([NUM_ROWS], tl.float32)
    for tile in range(begin, end):
        columns = tile * BLOCK_K + lane
        inside = columns < length
        k = tl.load(key + columns[:, None] * k_n + d[None, :], mask=inside[:, None], other=0.0)
        v = tl.load(value + columns[:, None] * v_n + d[None, :], mask=inside[:, None], other=0.0)
        keep = dense_keep(
            rows, store, columns, inside, tile, tiles, pool, padding, last, tile_columns,
            BLOCK_Q, BLOCK_K, FIRST, DIAGONAL_OFF, CAUSAL, GATHERED,
        )  # fmt: skip
        kept = None
        if seed is not None:
            words = dropout_words(seed, bh, rows, tile * BLOCK_K // WORD, threshold)
            kept = bit_at(words[:, None], columns[None, :])
        acc, top, total = row_step(
            acc, top, total, q, do, row_lse, row_delta, k, v, keep, kept, scale, keep_scale, GRADIENT
        )
    finish_rows(
        rows, store, real, acc, top, total, row_delta, output, lse, delta, query_grad, o_n, scaling, keep_scale,
        HEAD, GRADIENT,
    )  # fmt: skip


@triton.jit
def listed_rows(
    block, specials, valid, begin, end, query, key, value, output, lse, output_grad, delta, query_grad, tiles, pool,
    full_start, full, partial_start, partial, padding, last, seed, bh, head, length, tile_rows, tile_columns, q_n, k_n,
    v_n, o_n, scale, scaling, threshold, keep_scale,
    HEAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, FIRST: tl.constexpr, DIAGONAL_OFF: tl.constexpr,
    CAUSAL: tl.constexpr, SPECIAL: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """A block of queries against its lists of key tiles, of which only `begin` to `end` hold a real token."""
    d, lane, row_lane = tl.arange(0, HEAD), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_Q)
    rows = block * BLOCK_Q + row_lane
    store = rows < length
    q, do, row_lse, row_delta, real = start_rows(
        rows, store, query, output, lse, output_grad, q_n, o_n, padding, HEAD, GRADIENT
    )
    acc = tl.zeros([BLOCK_Q, HEAD], tl.float32)
    top = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    line = (head * tile_rows + block) * (tile_columns + 1)
    # Blocks of padding have nothing to do.
    begin = tl.where((block + 1) * BLOCK_Q <= begin * BLOCK_K, end, begin)
    stop = tl.where(block * BLOCK_Q >= end * BLOCK_K, begin, end)

    for item in range(tl.load(full_start + line + begin), tl.load(full_start + line + stop)):
        columns = tl.load(full + item) * BLOCK_K + lane
        k = tl.load(key + columns[:, None] * k_n + d[None, :])
        v = tl.load(value + columns[:, None] * v_n + d[None, :])
        keep, kept = None, None
        if padding is not None:
            keep = (tl.load(padding + columns) != 0)[None, :]
        if seed is not None:
            words = dropout_words(seed, bh, rows, tl.load(full + item) * BLOCK_K // WORD, threshold)
            kept = bit_at(words[:, None], columns[None, :])
        acc, top, total = row_step(
            acc, top, total, q, do, row_lse, row_delta, k, v, keep, kept, scale, keep_scale, GRADIENT
        )

    for item in range(tl.load(partial_start + line + begin), tl.load(partial_start + line + stop)):
        tile = tl.load(partial + 2 * item)
        columns = tile * BLOCK_K + lane
        inside = columns < length
        k = tl.load(key + columns[:, None] * k_n + d[None, :], mask=inside[:, None], other=0.0)
        v = tl.load(value + columns[:, None] * v_n + d[None, :], mask=inside[:, None], other=0.0)
        bits = tl.load(pool + tl.load(partial + 2 * item + 1) * BLOCK_Q + row_lane)
        keep = bit_at(bits[:, None], lane[None, :])
        if padding is not None:
            keep &= (tl.load(padding + columns, mask=inside, other=0) != 0)[None, :]
        kept = None
        if seed is not None:
            words = dropout_words(seed, bh, rows, tile * BLOCK_K // WORD, threshold)
            kept = bit_at(words[:, None], columns[None, :])
        acc, top, total = row_step(
            acc, top, total, q, do, row_lse, row_delta, k, v, keep, kept, scale, keep_scale, GRADIENT
        )

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
            kept = bit_at(special_words(seed, bh, rows, last, threshold, FIRST), specials[None, :])
        acc, top, total = row_step(
            acc, top, total, q, do, row_lse, row_delta, k, v, keep, kept, scale, keep_scale, GRADIENT
        )
        if FIRST:
            store &= rows != 0
        if last is not None:
            store &= rows != last
    finish_rows(
        rows, store, real, acc, top, total, row_delta, output, lse, delta, query_grad, o_n, scaling, keep_scale,
        HEAD, GRADIENT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["heads", "length", "tile_rows", "tile_columns", "threshold"])
def row_kernel(
    query, key, value, output, lse, output_grad, delta, query_grad, tiles, pool, full_start, full, partial_start,
    partial, padding, last, seed, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, heads, length, tile_rows, tile_columns,
    scale, scaling, threshold, keep_scale,
    HEAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, FIRST: tl.constexpr, DIAGONAL_OFF: tl.constexpr,
    CAUSAL: tl.constexpr, SHORT: tl.constexpr, GRADIENT: tl.constexpr, BUCKET: tl.constexpr,
):  # fmt: skip
    """
    The programs of rows: forward (writes `output` and `lse`) or, with GRADIENT, the gradient of the queries (writes
    `query_grad` and `delta`, the sum of output times its gradient). SHORT: all keys are looked at, and no tile list.

    `output`, `output_grad` and `query_grad` are (B, n, H, d) and contiguous. `padding` (B, n) int8, `last` (B,) int32
    and `seed` (2,) int64 are `None` where there is none. BUCKET serves as a key of the autotuner only.
    """
    SPECIAL: tl.constexpr = (FIRST or last is not None) and not SHORT
    programs = tile_rows + SPECIAL
    bh = tl.program_id(0) // programs
    # Programs of special tokens are the longest and start first.
    block = tl.program_id(0) % programs - SPECIAL
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
    if padding is not None:
        padding += batch * length
        if not SHORT:
            first_real, behind_real = real_tokens(padding, length)
            begin, end = first_real // BLOCK_K, tl.cdiv(behind_real, BLOCK_K)
    position = None
    if last is not None:
        position = last_token(last, batch, length)
    specials, valid = special_tokens(position, FIRST)

    if SHORT:
        rows = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
        dense_rows(
            rows, rows < length, begin, end, query, key, value, output, lse, output_grad, delta, query_grad, tiles,
            pool, padding, position, seed, bh, length, tile_columns, q_n, k_n, v_n, o_n, scale, scaling, threshold,
            keep_scale, HEAD, BLOCK_Q, BLOCK_K, BLOCK_Q, FIRST, DIAGONAL_OFF, CAUSAL, False, GRADIENT,
        )  # fmt: skip
    elif SPECIAL:
        if block < 0:
            dense_rows(
                specials, valid, begin, end, query, key, value, output, lse, output_grad, delta, query_grad, tiles,
                pool, padding, position, seed, bh, length, tile_columns, q_n, k_n, v_n, o_n, scale, scaling, threshold,
                keep_scale, HEAD, BLOCK_Q, BLOCK_K, SPECIALS, FIRST, DIAGONAL_OFF, CAUSAL, True, GRADIENT,
            )  # fmt: skip
        else:
            listed_rows(
                block, specials, valid, begin, end, query, key, value, output, lse, output_grad, delta, query_grad, tiles, pool,
                full_start, full, partial_start, partial, padding, position, seed, bh, head, length, tile_rows, tile_columns,
                q_n, k_n, v_n, o_n, scale, scaling, threshold, keep_scale, HEAD, BLOCK_Q, BLOCK_K, FIRST, DIAGONAL_OFF, CAUSAL,
                SPECIAL, GRADIENT,
            )  # fmt: skip
    else:
        listed_rows(
            block, specials, valid, begin, end, query, key, value, output, lse, output_grad, delta, query_grad, tiles, pool,
            full_start, full, partial_start, partial, padding, position, seed, bh, head, length, tile_rows, tile_columns,
            q_n, k_n, v_n, o_n, scale, scaling, threshold, keep_scale, HEAD, BLOCK_Q, BLOCK_K, FIRST, DIAGONAL_OFF, CAUSAL,
            SPECIAL, GRADIENT,
        )  # fmt: skip


@triton.jit
def load_queries(rows, inside, query, output_grad, lse, delta, q_n, o_n, HEAD: tl.constexpr):
    """`q, output_grad, lse, delta` of some queries; `inside`: which of them exist, `None` if all do."""
    d = tl.arange(0, HEAD)
    at, o_at = rows[:, None] * q_n + d[None, :], rows[:, None] * o_n + d[None, :]
    if inside is None:
        q, do = tl.load(query + at), tl.load(output_grad + o_at)
        row_lse, row_delta = tl.load(lse + rows), tl.load(delta + rows)
    else:
        q = tl.load(query + at, mask=inside[:, None], other=0.0)
        do = tl.load(output_grad + o_at, mask=inside[:, None], other=0.0)
        row_lse = tl.load(lse + rows, mask=inside, other=float("inf"))
        row_delta = tl.load(delta + rows, mask=inside, other=0.0)
    return q, do, row_lse, row_delta


@triton.jit
def finish_columns(
    columns, store, dk, dv, key_grad, value_grad, padding, o_n, scaling, keep_scale, HEAD: tl.constexpr
):
    """Write the gradients of some keys and values; padded keys got sums of no meaning."""
    real = store
    if padding is not None:
        real &= tl.load(padding + columns, mask=store, other=0) != 0
    at = columns[:, None] * o_n + tl.arange(0, HEAD)[None, :]
    dk, dv = tl.where(real[:, None], dk * scaling, 0.0), tl.where(real[:, None], dv * keep_scale, 0.0)
    tl.store(key_grad + at, dk.to(key_grad.dtype.element_ty), mask=store[:, None])
    tl.store(value_grad + at, dv.to(value_grad.dtype.element_ty), mask=store[:, None])


@triton.jit
def dense_columns(
    specials, valid, begin, end, query, key, value, lse, output_grad, delta, key_grad, value_grad, padding, last, seed,
    bh, length, q_n, k_n, v_n, o_n, scale, scaling, threshold, keep_scale, HEAD: tl.constexpr, BLOCK_Q: tl.constexpr,
    FIRST: tl.constexpr, DIAGONAL_OFF: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The keys of the special tokens against all query tiles `begin` to `end`."""
    d, row_lane = tl.arange(0, HEAD), tl.arange(0, BLOCK_Q)
    k = tl.load(key + specials[:, None] * k_n + d[None, :], mask=valid[:, None], other=0.0)
    v = tl.load(value + specials[:, None] * v_n + d[None, :], mask=valid[:, None], other=0.0)
    dk = tl.zeros([SPECIALS, HEAD], tl.float32)
    dv = tl.zeros([SPECIALS, HEAD], tl.float32)
    for tile in range(begin, end):
        rows = tile * BLOCK_Q + row_lane
        inside = rows < length
        q, do, row_lse, row_delta = load_queries(rows, inside, query, output_grad, lse, delta, q_n, o_n, HEAD)
        keep = guarded(inside[:, None] & valid[None, :], rows[:, None], specials[None, :], DIAGONAL_OFF, CAUSAL)
        kept = None
        if seed is not None:
            kept = bit_at(special_words(seed, bh, rows, last, threshold, FIRST), specials[None, :])
        dk, dv, _ = column_step(dk, dv, k, v, q, do, row_lse, row_delta, keep, kept, scale, keep_scale)
    finish_columns(specials, valid, dk, dv, key_grad, value_grad, padding, o_n, scaling, keep_scale, HEAD)


@triton.jit
def listed_columns(
    block, specials, valid, begin, end, first_real, behind_real, query, key, value, lse, output_grad, delta, key_grad,
    value_grad, tiles, pool, full_start, full, partial_start, partial, padding, last, seed, bh, head, length, tile_rows,
    tile_columns, q_n, k_n, v_n, o_n, scale, scaling, threshold, keep_scale,
    HEAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, FIRST: tl.constexpr, DIAGONAL_OFF: tl.constexpr,
    CAUSAL: tl.constexpr, SPECIAL: tl.constexpr,
):  # fmt: skip
    """A block of keys against its lists of query tiles, of which only `begin` to `end` hold a real token."""
    d, lane, row_lane = tl.arange(0, HEAD), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_Q)
    columns = block * BLOCK_K + lane
    store = columns < length
    k = tl.load(key + columns[:, None] * k_n + d[None, :], mask=store[:, None], other=0.0)
    v = tl.load(value + columns[:, None] * v_n + d[None, :], mask=store[:, None], other=0.0)
    dk = tl.zeros([BLOCK_K, HEAD], tl.float32)
    dv = tl.zeros([BLOCK_K, HEAD], tl.float32)
    line = (head * tile_columns + block) * (tile_rows + 1)
    begin = tl.where((block + 1) * BLOCK_K <= first_real, end, begin)
    stop = tl.where(block * BLOCK_K >= behind_real, begin, end)

    for item in range(tl.load(full_start + line + begin), tl.load(full_start + line + stop)):
        rows = tl.load(full + item) * BLOCK_Q + row_lane
        q, do, row_lse, row_delta = load_queries(rows, None, query, output_grad, lse, delta, q_n, o_n, HEAD)
        kept = None
        if seed is not None:
            words = dropout_words(seed, bh, rows, block * BLOCK_K // WORD, threshold)
            kept = bit_at(words[:, None], columns[None, :])
        dk, dv, _ = column_step(dk, dv, k, v, q, do, row_lse, row_delta, None, kept, scale, keep_scale)

    for item in range(tl.load(partial_start + line + begin), tl.load(partial_start + line + stop)):
        rows = tl.load(partial + 2 * item) * BLOCK_Q + row_lane
        q, do, row_lse, row_delta = load_queries(rows, rows < length, query, output_grad, lse, delta, q_n, o_n, HEAD)
        bits = tl.load(pool + tl.load(partial + 2 * item + 1) * BLOCK_Q + row_lane)
        keep = bit_at(bits[:, None], lane[None, :])
        kept = None
        if seed is not None:
            words = dropout_words(seed, bh, rows, block * BLOCK_K // WORD, threshold)
            kept = bit_at(words[:, None], columns[None, :])
        dk, dv, _ = column_step(dk, dv, k, v, q, do, row_lse, row_delta, keep, kept, scale, keep_scale)

    if SPECIAL:
        q, do, row_lse, row_delta = load_queries(specials, valid, query, output_grad, lse, delta, q_n, o_n, HEAD)
        index = tl.load(tiles + specials // BLOCK_Q * tile_columns + block)
        bits = tl.load(pool + index * BLOCK_Q + specials % BLOCK_Q)
        listed = bit_at(bits[:, None], lane[None, :])
        keep = guarded(valid[:, None] & ~listed, specials[:, None], columns[None, :], DIAGONAL_OFF, CAUSAL)
        kept = None
        if seed is not None:
            words = dropout_words(seed, bh, specials, block * BLOCK_K // WORD, threshold)
            kept = bit_at(words[:, None], columns[None, :])
        dk, dv, _ = column_step(dk, dv, k, v, q, do, row_lse, row_delta, keep, kept, scale, keep_scale)
        if FIRST:
            store &= columns != 0
        if last is not None:
            store &= columns != last
    finish_columns(columns, store, dk, dv, key_grad, value_grad, padding, o_n, scaling, keep_scale, HEAD)


@triton.jit(do_not_specialize=["heads", "length", "tile_rows", "tile_columns", "threshold"])
def column_kernel(
    query, key, value, lse, output_grad, delta, key_grad, value_grad, tiles, pool, full_start, full, partial_start,
    partial, padding, last, seed, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, heads, length, tile_rows, tile_columns,
    scale, scaling, threshold, keep_scale,
    HEAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, FIRST: tl.constexpr, DIAGONAL_OFF: tl.constexpr,
    CAUSAL: tl.constexpr, BUCKET: tl.constexpr,
):  # fmt: skip
    """
    The programs of columns: gradients of keys and values. The lists are the transposed ones, everything else is as in
    [`row_kernel`]. Padded queries need no mask, since their `lse` is +inf.
    """
    SPECIAL: tl.constexpr = FIRST or last is not None
    programs = tile_columns + SPECIAL
    bh = tl.program_id(0) // programs
    block = tl.program_id(0) % programs - SPECIAL
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
        first_real, behind_real = real_tokens(padding, length)
        begin, end = first_real // BLOCK_Q, tl.cdiv(behind_real, BLOCK_Q)
    position = None
    if last is not None:
        position = last_token(last, batch, length)
    specials, valid = special_tokens(position, FIRST)

    if SPECIAL:
        if block < 0:
            dense_columns(
                specials, valid, begin, end, query, key, value, lse, output_grad, delta, key_grad, value_grad, padding,
                position, seed, bh, length, q_n, k_n, v_n, o_n, scale, scaling, threshold, keep_scale, HEAD, BLOCK_Q,
                FIRST, DIAGONAL_OFF, CAUSAL,
            )  # fmt: skip
        else:
            listed_columns(
                block, specials, valid, begin, end, first_real, behind_real, query, key, value, lse, output_grad, delta,
                key_grad, value_grad, tiles, pool, full_start, full, partial_start, partial, padding, position, seed, bh, head,
                length, tile_rows, tile_columns, q_n, k_n, v_n, o_n, scale, scaling, threshold, keep_scale, HEAD, BLOCK_Q,
                BLOCK_K, FIRST, DIAGONAL_OFF, CAUSAL, SPECIAL,
            )  # fmt: skip
    else:
        listed_columns(
            block, specials, valid, begin, end, first_real, behind_real, query, key, value, lse, output_grad, delta,
            key_grad, value_grad, tiles, pool, full_start, full, partial_start, partial, padding, position, seed, bh, head,
            length, tile_rows, tile_columns, q_n, k_n, v_n, o_n, scale, scaling, threshold, keep_scale, HEAD, BLOCK_Q,
            BLOCK_K, FIRST, DIAGONAL_OFF, CAUSAL, SPECIAL,
        )  # fmt: skip


@triton.jit(do_not_specialize=["heads", "length", "tile_columns", "threshold"])
def short_backward_kernel(
    query, key, value, output, lse, output_grad, query_grad, key_grad, value_grad, tiles, pool, padding, last, seed,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, heads, length, tile_rows, tile_columns, scale, scaling, threshold,
    keep_scale,
    HEAD: tl.constexpr, ROWS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, FIRST: tl.constexpr,
    DIAGONAL_OFF: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """One program per batch and head: all queries (ROWS at least n) stay on the chip, key tiles pass by."""
    bh = tl.program_id(0)
    batch, head = (bh // heads).to(tl.int64), bh % heads
    query += batch * q_b + head.to(tl.int64) * q_h
    key += batch * k_b + head.to(tl.int64) * k_h
    value += batch * v_b + head.to(tl.int64) * v_h
    o_n = heads * HEAD
    o_start = batch * length * o_n + head * HEAD
    tiles += head * tile_rows * tile_columns
    if padding is not None:
        padding += batch * length
    position = None
    if last is not None:
        position = last_token(last, batch, length)
    d, lane, rows = tl.arange(0, HEAD), tl.arange(0, BLOCK_K), tl.arange(0, ROWS)
    store = rows < length
    q, do, row_lse, row_delta, real = start_rows(
        rows, store, query, output + o_start, lse + bh.to(tl.int64) * length, output_grad + o_start, q_n, o_n,
        padding, HEAD, True,
    )  # fmt: skip
    dq = tl.zeros([ROWS, HEAD], tl.float32)
    for tile in range(0, tile_columns):
        columns = tile * BLOCK_K + lane
        inside = columns < length
        k = tl.load(key + columns[:, None] * k_n + d[None, :], mask=inside[:, None], other=0.0)
        v = tl.load(value + columns[:, None] * v_n + d[None, :], mask=inside[:, None], other=0.0)
        keep = dense_keep(
            rows, store, columns, inside, tile, tiles, pool, padding, position, tile_columns,
            BLOCK_Q, BLOCK_K, FIRST, DIAGONAL_OFF, CAUSAL, False,
        )  # fmt: skip
        kept = None
        if seed is not None:
            words = dropout_words(seed, bh, rows, tile * BLOCK_K // WORD, threshold)
            kept = bit_at(words[:, None], columns[None, :])
        zero = tl.zeros([BLOCK_K, HEAD], tl.float32)
        dk, dv, ds = column_step(zero, zero, k, v, q, do, row_lse, row_delta, keep, kept, scale, keep_scale)
        finish_columns(
            columns, inside, dk, dv, key_grad + o_start, value_grad + o_start, padding, o_n, scaling, keep_scale, HEAD
        )
        dq = tl.dot(ds, k, dq, input_precision="ieee")
    at = o_start + rows[:, None] * o_n + d[None, :]
    tl.store(query_grad + at, (dq * scaling).to(query_grad.dtype.element_ty), mask=store[:, None])
