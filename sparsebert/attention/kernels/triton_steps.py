"""
The device functions that the Triton kernels are composed of.

Scores are in units of log 2: `scale` is the softmax scale times log2(e), and `lse` is the base-2 logarithm of the
normalizer, +inf for a query without a key, so that 2^(s - lse) = 0.

Letters: B batch, H heads, n length, d head size.
"""

import triton
import triton.language as tl


# Lanes of a gathered tile of special tokens: the fewest that a matrix unit takes. At most two of them are used.
SPECIALS = tl.constexpr(16)
# Keys per word of a mask.
WORD = tl.constexpr(64)
# Keys whose dropout decisions are drawn together, by four draws.
GROUP = tl.constexpr(32)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def draw_kept(seed, head, rows, lane, threshold):
    """
    Dropout decisions for some queries, 8 in each number: that of lane `4 * g + q` has bit `2 * j + b` on if the key
    `32 * g + 8 * j + 2 * q + b` is kept (`q`, `j` < 4, `b` < 2), which has the probability `threshold / 65536`. These
    are the columns that a thread holds of a matrix product, so that it draws for its own entries. A decision depends
    on the entry alone, not on the tile in which it is needed.

    Args:
        seed: Pointer to two int64, the key of Philox and a part of its counter.
        head: Index of batch and head.
        rows, lane (int32): Indices of the queries and of the numbers, which broadcast.
        threshold (int32): From 1 to 65535.

    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011), Philox-4x32-7.
    """
    drawn = tl.philox(tl.load(seed), rows, lane, head, tl.load(seed + 1).to(tl.int32), 7)
    kept = (rows + lane) * 0
    for k in tl.static_range(4):
        kept |= ((drawn[k] & 0xFFFF).to(tl.int32) < threshold).to(tl.int32) << 2 * k
        kept |= ((drawn[k] >> 16).to(tl.int32) < threshold).to(tl.int32) << 2 * k + 1
    return kept


@triton.jit
def kept_keys(seed, head, rows, start, threshold, STEP: tl.constexpr):
    """Which keys from `start` to `start + STEP` dropout keeps, bool (queries, STEP)."""
    QUERIES: tl.constexpr = rows.shape[0]
    GROUPS: tl.constexpr = triton.cdiv(STEP, GROUP)
    EIGHTS: tl.constexpr = STEP // GROUPS // 8
    lane = start // GROUP * 4 + tl.arange(0, 4 * GROUPS)
    kept = draw_kept(seed, head, rows[:, None], lane[None, :], threshold).reshape(QUERIES, GROUPS, 1, 4, 1)
    # The part of a group that a shorter step has.
    place = (
        2 * tl.arange(0, EIGHTS)[:, None, None]
        + tl.arange(0, 2)[None, None, :]
        + (start - start // GROUP * GROUP) // 4
    )
    return ((kept >> place[None, None]).reshape(QUERIES, STEP) & 1) != 0


@triton.jit
def kept_queries(seed, head, rows, start, threshold):
    """Which of `WORD` keys from `start` on dropout keeps, bool (WORD, queries)."""
    GROUPS: tl.constexpr = WORD // GROUP
    lane = start // GROUP * 4 + tl.arange(0, 4 * GROUPS)
    kept = draw_kept(seed, head, rows[:, None], lane[None, :], threshold).reshape(rows.shape[0], GROUPS, 4)
    words = tl.sum(kept << 8 * tl.arange(0, 4)[None, None, :], 2)
    key = tl.arange(0, GROUP)
    place = key % 8 // 2 * 8 + key // 8 * 2 + key % 2
    return ((tl.trans(words)[:, None, :] >> place[None, :, None]).reshape(WORD, rows.shape[0]) & 1) != 0


@triton.jit
def kept_at(seed, head, rows, columns, threshold):
    """Which entries dropout keeps; rows and columns broadcast."""
    kept = draw_kept(seed, head, rows, columns // GROUP * 4 + columns % 8 // 2, threshold)
    return ((kept >> (columns % GROUP // 8 * 2 + columns % 2)) & 1) != 0


@triton.jit
def bit_at(words, position):
    """Whether bit `position` (taken modulo 64) of `words`, int64, is on. Half a word is what a register holds."""
    half = tl.where((position & 32) != 0, (words >> 32).to(tl.int32), words.to(tl.int32))
    return ((half >> (position & 31)) & 1) != 0


@triton.jit
def token_position(positions, batch, stride, length):
    """Position of a special token of a sequence, clamped to the sequence. Triton 3.6 cannot return `None` for none."""
    return tl.minimum(tl.maximum(tl.load(positions + batch * stride), 0), length - 1)


@triton.jit
def program_place(blocks, SPECIAL: tl.constexpr):
    """
    The index of batch and head of a program, and its block of queries or keys, -1 for special tokens. Their programs
    take the longest, so they are the first of the whole grid.
    """
    program = tl.program_id(0)
    pair, block = program // blocks, program % blocks
    if SPECIAL:
        pairs = tl.num_programs(0) // (blocks + 1)
        other = program - pairs
        pair = tl.where(other < 0, program, other // blocks)
        block = tl.where(other < 0, -1, other % blocks)
    return pair, block


@triton.jit
def special_tokens(first, last, LANES: tl.constexpr):
    """
    Positions of the special tokens, in the first lanes, and which lanes hold one.

    Args:
        first, last: Positions of the first and the last token, or `None` if it is not special.
    """
    lane = tl.arange(0, LANES)
    positions, valid = lane * 0, lane == 0
    if first is not None:
        positions = positions + first
        if last is not None:
            positions = tl.where(lane == 0, positions, last)
            # Not of scalars: `first != last` is no truth value in every lane, in the interpreter of Triton 3.9.
            valid = valid | ((lane == 1) & (positions != first))
    elif last is not None:
        positions = positions + last
    return positions, valid


@triton.jit
def load_span(spans, batch, tiles):
    """
    A row of `spans`: the position of a sequence's first real token, one past that of its last, whether there are holes
    between, and the pointer to the words of its tiles.
    """
    span = spans + batch * (tiles + 3)
    return tl.load(span).to(tl.int32), tl.load(span + 1).to(tl.int32), tl.load(span + 2).to(tl.int32), span + 3


@triton.jit
def bits_from(position):
    """A word whose bits are on from `position` on, which is cut to 0 to 64."""
    place = tl.minimum(tl.maximum(position, 0), WORD - 1).to(tl.int64)
    ones = place * 0 - 1
    return tl.where(position < WORD, ones << place, 0)


@triton.jit
def real_word(words, tile, first_real, behind_real, holes):
    """
    Which keys of a tile are real tokens: those of the span, of which only a sequence with holes has to read its words.
    """
    real = bits_from(first_real - tile * WORD) & ~bits_from(behind_real - tile * WORD)
    return real & tl.load(words + tile, mask=holes != 0, other=-1)


@triton.jit
def next_entry(entries, step, stop, SPLIT: tl.constexpr):
    """
    The pointer to the list entry of the step after `step`, or to the last one. Loops load an entry one step ahead: if
    the addresses of a step depended on a load of the same step, the compiler would start copies half as early.
    """
    return entries + tl.minimum((step + 1) // SPLIT, stop - 1)


@triton.jit
def masked_entry(full, partial, entry, count, before, edge, full_begin, full_end, partial_begin):
    """
    The tile of an entry and its index in the pool, where the entries are first the full tiles at both edges of the
    real tokens, then the partial tiles; the last of them from `count` on.

    Args:
        entry, count: Index of the entry, and how many there are.
        before, edge: How many of them are full tiles at the first edge, and at both.
        full_begin, full_end, partial_begin: Where in the lists those at either edge and the partial ones begin.
    """
    at = tl.minimum(entry, count - 1)
    from_full = (at < edge) & (count > 0)
    from_partial = at >= edge
    position = tl.where(at < before, full_begin + at, full_end + at - before)
    item = partial + 2 * (partial_begin + at - edge)
    # Loads without arithmetic behind them, which the compiler would move to a later stage of the pipeline.
    tile = tl.load(item, mask=from_partial, other=tl.load(full + position, mask=from_full, other=0))
    return tile, tl.load(item + 1, mask=from_partial, other=1)


@triton.jit
def guarded(on, rows, columns, DIAGONAL_OFF: tl.constexpr, CAUSAL: tl.constexpr):
    """`on` without the entries that special tokens cannot turn on; rows and columns broadcast."""
    if DIAGONAL_OFF:
        on &= rows != columns
    if CAUSAL:
        on &= rows >= columns
    return on


@triton.jit
def dense_keep(
    rows, store, columns, inside, tile, tiles, pool, words, first_real, behind_real, holes, first, last,
    tile_columns, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, DIAGONAL_OFF: tl.constexpr, CAUSAL: tl.constexpr,
    SPECIAL_ROWS: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    """The whole mask for some queries and the keys of a tile. GATHERED: all queries are special tokens."""
    if words is not None:
        inside &= bit_at(real_word(words, tile, first_real, behind_real, holes), columns)
    keep = guarded(store[:, None] & inside[None, :], rows[:, None], columns[None, :], DIAGONAL_OFF, CAUSAL)
    if not GATHERED:
        index = tl.load(tiles + rows // BLOCK_Q * tile_columns + tile, mask=store, other=0)
        on = bit_at(tl.load(pool + index * BLOCK_Q + rows % BLOCK_Q)[:, None], (columns % BLOCK_K)[None, :])
        if first is not None:
            on |= columns[None, :] == first
            if SPECIAL_ROWS:
                on |= rows[:, None] == first
        if last is not None:
            on |= columns[None, :] == last
            if SPECIAL_ROWS:
                on |= rows[:, None] == last
        keep &= on
    return keep


@triton.jit
def place_of(rows, columns, length):
    """Where the distance of some entries is, from that of distance 0 on; rows and columns broadcast."""
    return tl.minimum(tl.maximum(rows - columns, 1 - length), length - 1)


@triton.jit
def products(first, second, distances, place, scale):
    """The scores before they are scaled: `first @ second.T`, and what the bias per distance adds, if there is one."""
    if distances is None:
        s = tl.dot(first, tl.trans(second), input_precision="ieee")
    else:
        # The product is added to it where the matrix unit sums.
        bias = tl.load(distances + place) * (LOG2_E / scale)
        s = tl.dot(first, tl.trans(second), bias, input_precision="ieee")
    return s


@triton.jit
def row_step(
    acc, top, total, q, output_grad, lse, delta, k, v, rows, columns, keep, kept, distances, distance_grad, length,
    scale, keep_scale, GRADIENT: tl.constexpr,
):  # fmt: skip
    """
    Process some keys for some queries: update the running output, maximum and sum of the softmax or, with GRADIENT,
    the gradient of the queries.

    Args:
        rows, columns: Positions of the queries and of the keys.
        keep: The mask, bool (queries, keys), or `None` if all entries are on.
        distances, distance_grad: Pointers to the bias of distance 0 and to its gradient, or `None`.
        kept: Bool (queries, keys), False where dropout removes an entry, or `None` without dropout.
    """
    place = place_of(rows[:, None], columns[None, :], length)
    s = products(q, k, distances, place, scale)
    if keep is not None:
        s = tl.where(keep, s, float("-inf"))
    if GRADIENT:
        p = tl.exp2(s * scale - lse[:, None])
        dp = tl.dot(output_grad, tl.trans(v), input_precision="ieee")
        if kept is not None:
            dp = tl.where(kept, dp * keep_scale, 0.0)
        ds = p * (dp - delta[:, None])
        if distance_grad is not None:
            tl.atomic_add(distance_grad + place, ds, mask=p != 0, sem="relaxed")
        acc = tl.dot(ds.to(k.dtype), k, acc, input_precision="ieee")
    else:
        new = tl.maximum(top, tl.max(s, 1) * scale)
        # If nothing has been seen yet, any finite maximum will do; -inf would give NaN.
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
def column_step(
    dk, dv, k, v, q, output_grad, lse, delta, rows, columns, keep, kept, distances, length, scale, keep_scale
):
    """
    Process some queries for some keys: update the running gradients of keys and values. `keep` and `kept` are those of
    [`row_step`], but (keys, queries). So k and v, which stay the same from step to step, are the first operands of the
    products, where they take the fewest registers.
    """
    s = products(k, q, distances, place_of(rows[None, :], columns[:, None], length), scale)
    if keep is not None:
        s = tl.where(keep, s, float("-inf"))
    p = tl.exp2(s * scale - lse[None, :])
    dp = tl.dot(v, tl.trans(output_grad), input_precision="ieee")
    if kept is not None:
        dv = tl.dot(tl.where(kept, p, 0.0).to(q.dtype), output_grad, dv, input_precision="ieee")
        dp = tl.where(kept, dp * keep_scale, 0.0)
    else:
        dv = tl.dot(p.to(q.dtype), output_grad, dv, input_precision="ieee")
    ds = p * (dp - delta[None, :])
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def start_rows(
    rows, store, query, output, lse, output_grad, q_n, o_n, padding, HEAD: tl.constexpr, GRADIENT: tl.constexpr
):
    """Load some queries and what their program needs: `q, output_grad, lse, delta, real`."""
    d = tl.arange(0, HEAD)
    real = store
    if padding is not None:
        real &= tl.load(padding + rows, mask=store, other=0) != 0
    q = tl.load(query + rows[:, None] * q_n + d[None, :], mask=store[:, None], other=0.0)
    # Never read without GRADIENT; Triton 3.6 cannot return None.
    do, normalizer, row_delta = q, real, real
    if GRADIENT:
        at = rows[:, None] * o_n + d[None, :]
        o = tl.load(output + at, mask=store[:, None], other=0.0)
        do = tl.load(output_grad + at, mask=store[:, None], other=0.0)
        normalizer = tl.load(lse + rows, mask=store, other=float("inf"))
        row_delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    return q, do, normalizer, row_delta, real


@triton.jit
def finish_rows(
    rows, store, real, acc, top, total, row_delta, output, lse, delta, query_grad, o_n, scaling, keep_scale,
    HEAD: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """Write the results of a program for its queries."""
    at = rows[:, None] * o_n + tl.arange(0, HEAD)[None, :]
    if GRADIENT:
        tl.store(query_grad + at, (acc * scaling).to(query_grad.dtype.element_ty), mask=store[:, None])
        tl.store(delta + rows, row_delta, mask=store)
    else:
        live = real & (total != 0)  # NaN is live: it must not be hidden
        result = tl.where(live[:, None], acc * (keep_scale / tl.where(live, total, 1.0))[:, None], 0.0)
        tl.store(output + at, result.to(output.dtype.element_ty), mask=store[:, None])
        tl.store(lse + rows, tl.where(live, top + tl.log2(tl.where(live, total, 1.0)), float("inf")), mask=store)


@triton.jit
def load_queries(rows, inside, query, output_grad, lse, delta, q_n, o_n, HEAD: tl.constexpr):
    """Load `q, output_grad, lse, delta` of some queries. `inside`: which of them exist, `None` if all do."""
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
    """Write the gradients of some keys and values, 0 for padded ones, whose sums are meaningless."""
    real = store
    if padding is not None:
        real &= tl.load(padding + columns, mask=store, other=0) != 0
    at = columns[:, None] * o_n + tl.arange(0, HEAD)[None, :]
    dk, dv = tl.where(real[:, None], dk * scaling, 0.0), tl.where(real[:, None], dv * keep_scale, 0.0)
    tl.store(key_grad + at, dk.to(key_grad.dtype.element_ty), mask=store[:, None])
    tl.store(value_grad + at, dv.to(value_grad.dtype.element_ty), mask=store[:, None])
