"""
An attention operator for a bias that is being learned.

The bias is the same for all sequences. Its gradient is summed over them block by block, so that nothing of the size of
all scores is kept in memory. A bias that depends on the distance of query and key alone is read, and gets its
gradient, per distance, so that nothing has an entry per pair of tokens. The operator consists of plain PyTorch
operations and runs on any device.

Letters: B batch, H heads, n queries (the last n of the m positions), m keys, d head size, b sequences and r queries of
a block.
"""

import torch

from ..biases.bias_entries import REMOVED, token_entries
from ..biases.offset_biases import OffsetBias, offset_place, offset_sums, offset_table
from .cpu import empty_rows
from .eager import power_of_two


# Bytes of the scores of one block. On CPUs the few buffers of this size share the second-level cache of a core.
BLOCK_BYTES = {"cpu": 2**20, "cuda": 2**26}
# A block has no fewer queries than this, if there are as many: products of matrices with few rows are slow.
FEWEST_QUERIES = 32
# Random bits per entry that decide about dropout.
RANDOM_BITS = 16

library = torch.library.Library("sparsebert", "FRAGMENT")
_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor bias, Tensor? padding, Tensor? first, Tensor? last, "
    "Tensor? special, Tensor seed, bool learned_diagonal, bool causal, float dropout, float scale, int block, "
    "int tile, float? diagonal, bool symmetric, bool special_rows"
)
_NUM_TENSORS = 9
library.define(f"bias_attention({_INPUTS}) -> Tensor")
# The gradient of the bias is empty if it is not `learned`.
library.define(f"bias_attention_backward(Tensor grad, bool learned, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)")


def _kept(dropout):
    """The probability of keeping an entry, rounded to what the random bits can express, and the least int16 kept."""
    dropped = min(round(dropout * 2**RANDOM_BITS), 2**RANDOM_BITS - 1)
    return 1 - dropped / 2**RANDOM_BITS, dropped - 2 ** (RANDOM_BITS - 1)


def _parts(padding, tokens, queries, num_keys, learned_diagonal, causal, special_rows, bias):
    """
    What differs between sequences, or is due to special tokens: a factor `(b, r or 1, m)` of the bias, 0 where the
    bias does not count, and the term that removes padded keys, `(b, 1, m)` or a single 0.
    """
    learned, removed = None, bias.new_zeros(())
    if padding is not None:
        learned = padding[:, None]
        removed = (~learned).to(bias.dtype) * REMOVED
    if tokens:
        free = ~token_entries(tokens, queries, num_keys, learned_diagonal, causal, special_rows)
        learned = free if learned is None else learned & free
    return None if learned is None else learned.to(bias.dtype), removed


def _num_rows(num_queries, block, tile):
    """Queries of a block, about as many in each: a multiple of a tile."""
    rows = -(-num_queries // -(-num_queries // block))
    return -(-rows // max(tile, 1)) * max(tile, 1)


def _blocks(query, key, table, *rest):
    """
    The attention probabilities, block by block: one head of some sequences, or of some queries of one sequence. The
    order of the blocks and their random numbers are always the same. Yields the sequences, head and queries of the
    block, its place in `table`, its probabilities `(b, r, m)`, what dropout keeps of them (0 or 1; `None` without
    dropout), a buffer of that shape, and the factor of the bias (`None` for 1).
    """
    padding, first, last, special, seed, learned_diagonal, causal, dropout, scale, block, tile, *_, rows_too = rest
    batch, num_heads, num_queries = query.shape[:3]
    num_keys = key.shape[2]
    num_rows = _num_rows(num_queries, block, tile)
    size = (max(1, min(block // num_queries, batch)), min(num_rows, num_queries), num_keys)
    buffers = [table.new_empty(size) for _ in range(3 if dropout else 2)]
    if dropout:
        generator = torch.Generator(query.device).manual_seed(seed.item())
        # One call gives 64 bits, enough for four entries.
        per_number = 64 // RANDOM_BITS
        numbers = torch.empty(-(-buffers[0].numel() // per_number), dtype=torch.int64, device=query.device)
        bits = numbers.view(torch.int16)[: buffers[0].numel()].view(size)
        threshold = _kept(dropout)[1]
    positions = [token for token in (first, last) if token is not None]
    fixed = [] if special is None else list(special)
    for start in range(0, batch, size[0]):
        rows = slice(start, min(start + size[0], batch))
        count = rows.stop - start
        real = None if padding is None else padding[rows]
        tokens = [token[rows] for token in positions] + [token.expand(count) for token in fixed]
        for begin in range(0, num_queries, num_rows):
            queries = slice(begin, min(begin + num_rows, num_queries))
            scores, weights, *more = (buffer[:count, : queries.stop - begin] for buffer in buffers)
            keep = more[0] if more else None
            shift = num_keys - num_queries
            own = slice(shift + begin, shift + queries.stop)
            learned, removed = _parts(real, tokens, own, num_keys, learned_diagonal, causal, rows_too, table)
            place = offset_place(begin, queries.stop, num_keys, num_rows, tile) if tile else (queries, slice(None))
            for head in range(num_heads):
                at, here = (rows, head, queries), (head, *place)
                term = table[here].expand(scores.shape)
                if learned is not None:
                    term = torch.addcmul(removed, learned, table[here], out=scores)
                if query.dtype == table.dtype:
                    torch.baddbmm(term, query[at], key[rows, head].mT, alpha=scale, out=scores)
                else:
                    power, rest = power_of_two(scale)
                    torch.add(term, torch.bmm(query[at] * power, key[rows, head].mT), alpha=rest, out=scores)
                torch.softmax(scores, -1, out=weights)
                if dropout:
                    numbers.random_(-(2**63), None, generator=generator)
                    torch.ge(bits[:count, : queries.stop - begin], threshold, out=keep)
                yield at, here, weights, keep, scores, learned


def _add_product(total, first, second, alpha, more):
    """Set `total` to a product of matrices, or add it if there is `more` in it; its dtype may be wider."""
    if total.dtype == first.dtype:
        total.baddbmm_(first, second, beta=int(more), alpha=alpha)
    elif more:
        total.add_(torch.bmm(first, second), alpha=alpha)
    else:
        torch.mul(torch.bmm(first, second), alpha, out=total)


def _table(query, bias, causal, block, tile, diagonal, symmetric):
    """What the blocks read of the bias, and how many queries a block has."""
    num_rows = _num_rows(query.shape[2], block, tile)
    return offset_table(bias, num_rows, tile, diagonal, causal, symmetric) if tile else bias, num_rows


def _forward(query, key, value, bias, *rest):
    *_, causal, dropout, _, block, tile, diagonal, symmetric, _ = rest
    output = empty_rows(query)
    factor = 1 / _kept(dropout)[0]
    table, _ = _table(query, bias, causal, block, tile, diagonal, symmetric)
    for at, _, weights, keep, _, _ in _blocks(query, key, table, *rest):
        if keep is not None:
            weights.mul_(keep)
        output[at].baddbmm_(weights.to(value.dtype), value[at[:2]], beta=0, alpha=factor)
    return output


def _backward(grad, learned, query, key, value, bias, *rest):
    *_, causal, dropout, scale, block, tile, diagonal, symmetric, _ = rest
    table, num_rows = _table(query, bias, causal, block, tile, diagonal, symmetric)
    # Sums over blocks of queries are rounded once.
    dtype = query.dtype if num_rows >= query.shape[2] else table.dtype
    dquery, dkey, dvalue = empty_rows(query), empty_rows(key, dtype), empty_rows(value, dtype)
    dbias = torch.zeros_like(table) if learned else table.new_empty(0)
    factor = 1 / _kept(dropout)[0]
    for at, place, weights, keep, buffer, free in _blocks(query, key, table, *rest):
        keys, more = at[:2], at[2].start > 0
        dropped = weights if keep is None else torch.mul(weights, keep, out=buffer)
        _add_product(dvalue[keys], dropped.to(grad.dtype).mT, grad[at], factor, more)
        if value.dtype == table.dtype:
            buffer.baddbmm_(grad[at], value[keys].mT, beta=0, alpha=factor)
        else:
            torch.mul(torch.bmm(grad[at], value[keys].mT), factor, out=buffer)
        if keep is not None:
            buffer.mul_(keep)
        dscores = torch._softmax_backward_data(buffer, weights, -1, table.dtype)
        low = dscores.to(query.dtype)
        dquery[at].baddbmm_(low, key[keys], beta=0, alpha=scale)
        _add_product(dkey[keys], low.mT, query[at], scale, more)
        if not learned:
            continue
        if free is not None:
            dscores.mul_(free)
        dbias[place].add_(dscores[0] if len(dscores) == 1 else dscores.sum(0))
    if learned and tile:
        dbias = offset_sums(dbias, bias.shape[1], tile, diagonal, causal, symmetric)
    return dquery, dkey.to(key.dtype), dvalue.to(value.dtype), dbias


library.impl("bias_attention", _forward, "CompositeExplicitAutograd")
library.impl("bias_attention_backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("sparsebert::bias_attention", lib=library)
def _forward_shape(query, key, value, *rest):
    return empty_rows(query)


@torch.library.register_fake("sparsebert::bias_attention_backward", lib=library)
def _backward_shapes(grad, learned, query, key, value, bias, *rest):
    return *map(empty_rows, (query, key, value)), torch.empty_like(bias) if learned else bias.new_empty(0)


def _remember(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:_NUM_TENSORS])
    ctx.options = inputs[_NUM_TENSORS:]


def _differentiate(ctx, grad):
    learned = ctx.needs_input_grad[3]
    *gradients, dbias = torch.ops.sparsebert.bias_attention_backward(grad, learned, *ctx.saved_tensors, *ctx.options)
    return *gradients, dbias if learned else None, *[None] * (_NUM_TENSORS - 4 + len(ctx.options))


def _no_second_derivatives(ctx, *grads):
    raise RuntimeError(
        "a mask being learned and dropout on CPUs have no second derivatives in sparse_sdpa: use sparse_eager"
    )


torch.library.register_autograd("sparsebert::bias_attention_backward", _no_second_derivatives, lib=library)
torch.library.register_autograd("sparsebert::bias_attention", _differentiate, setup_context=_remember, lib=library)


def _block_bytes(device):
    return BLOCK_BYTES.get(device.type, BLOCK_BYTES["cuda"])


def has_many_blocks(num_queries: int, num_keys: int, device: torch.device) -> bool:
    """
    Whether the scores of one head of one sequence fill more than two blocks. Then an [`OffsetBias`] is faster than a
    table: its own is small against one with all queries.
    """
    return 4 * num_queries * num_keys > 2 * _block_bytes(device)


def bias_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | OffsetBias,
    padding: torch.Tensor | None = None,
    first: torch.Tensor | None = None,
    last: torch.Tensor | None = None,
    learned_diagonal: bool = True,
    causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
    special_rows: bool = True,
) -> torch.Tensor:
    """
    Attention under a bias that gets a gradient: `(B, H, n, d)`, in the memory order `(B, n, H, d)`.

    `bias` `(H, n, m)` or an [`OffsetBias`] (n = m) is added to the scores of every sequence, in float32 (float64 for
    float64 inputs), in which the softmax is computed. Keys that are padded `(B, m)` are removed. In the rows and
    columns of the tokens at `first` and `last` `(B,)` the bias does not count; they contain their diagonal entries
    unless `learned_diagonal` is false, and end at the diagonal if `causal`; without `special_rows`, it counts in the
    rows. An [`OffsetBias`] removes keys j > i if `causal`. `dropout` is rounded to multiples of 2^-16; its seed is
    drawn from the global generator.
    """
    offsets = bias if isinstance(bias, OffsetBias) else None
    assert offsets is None or query.shape[2] == key.shape[2]
    # The size of a block must not depend on the number of threads, or the random numbers would.
    block = max(FEWEST_QUERIES, _block_bytes(query.device) // (4 * key.shape[2]))
    return torch.ops.sparsebert.bias_attention(
        query,
        key,
        value,
        bias if offsets is None else offsets.values,
        padding,
        first,
        last,
        None if offsets is None else offsets.special,
        torch.randint(2**62, (1,), device="cpu") if dropout else torch.zeros(1, dtype=torch.int64, device="cpu"),
        learned_diagonal,
        causal,
        dropout,
        query.shape[-1] ** -0.5 if scale is None else scale,
        block,
        0 if offsets is None else offsets.tile,
        None if offsets is None else offsets.diagonal,
        offsets is None or offsets.symmetric,
        special_rows if offsets is None else offsets.special_rows,
    )
