"""
An attention operator for a bias that is being learned.

The bias is the same for all sequences. Its gradient is summed over them block by block, so that nothing of the size of
all scores is kept in memory. The operator consists of plain PyTorch operations and runs on any device.

Letters: B batch, H heads, n queries (the last n of the m positions), m keys, d head size, b sequences of a block.
"""

import torch

from .eager import power_of_two
from .mask_biases import REMOVED, token_entries


# Bytes of the scores of one block. On CPUs the few buffers of this size share the second-level cache of a core.
BLOCK_BYTES = {"cpu": 2**20, "cuda": 2**26}
# Random bits per entry that decide about dropout.
RANDOM_BITS = 16

library = torch.library.Library("sparsebert", "FRAGMENT")
_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor bias, Tensor? padding, Tensor? first, Tensor? last, Tensor seed, "
    "bool learned_diagonal, bool causal, float dropout, float scale, int block"
)
library.define(f"bias_attention({_INPUTS}) -> Tensor")
library.define(f"bias_attention_backward(Tensor grad, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)")


def _rows(tensor):
    """Empty, like `tensor` `(B, H, n, d)`, in the memory order `(B, n, H, d)` that the host's next layer reads."""
    return torch.empty_like(tensor.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


def _kept(dropout):
    """The probability of keeping an entry, rounded to what the random bits can express, and the least int16 kept."""
    dropped = min(round(dropout * 2**RANDOM_BITS), 2**RANDOM_BITS - 1)
    return 1 - dropped / 2**RANDOM_BITS, dropped - 2 ** (RANDOM_BITS - 1)


def _parts(padding, tokens, learned_diagonal, causal, num_queries, dtype):
    """
    What differs between sequences: a factor `(b, n or 1, m)` of the bias, 0 where the bias does not count, and the
    term `(b, 1, m)` that removes padded keys.
    """
    real = padding[:, None]
    learned = real
    if tokens:
        learned = real & ~token_entries(tokens, num_queries, padding.shape[1], learned_diagonal, causal)
    return learned.to(dtype), (~real).to(dtype) * REMOVED


def _blocks(query, key, bias, padding, first, last, seed, learned_diagonal, causal, dropout, scale, block):
    """
    The attention probabilities, block by block. A block is one head of some sequences. The order of the blocks and
    their random numbers are always the same.

    Yields:
        The index of the block, its probabilities `(b, n, m)`, what dropout keeps of them (0 or 1; `None` without
        dropout), a buffer of that shape, and the factor of the bias (`None` for 1).
    """
    batch, num_heads, num_queries = query.shape[:3]
    num_keys = key.shape[2]
    size = (min(block, batch), num_queries, num_keys)
    scores, weights, learned, keep = bias.new_empty(size), bias.new_empty(size), None, None
    if dropout:
        keep = torch.empty_like(scores)
        generator = torch.Generator(query.device).manual_seed(seed.item())
        # One call gives 64 bits, enough for four entries.
        per_number = 64 // RANDOM_BITS
        numbers = torch.empty(-(-scores.numel() // per_number), dtype=torch.int64, device=query.device)
        bits = numbers.view(torch.int16)[: scores.numel()].view(size)
        threshold = _kept(dropout)[1]
    tokens = [token for token in (first, last) if token is not None]
    for start in range(0, batch, size[0]):
        rows = slice(start, min(start + size[0], batch))
        count = rows.stop - start
        scores, weights, keep = scores[:count], weights[:count], None if keep is None else keep[:count]
        if padding is not None:
            own = [token[rows] for token in tokens]
            learned, removed = _parts(padding[rows], own, learned_diagonal, causal, num_queries, bias.dtype)
        for head in range(num_heads):
            at = (rows, head)
            term = bias[head].expand(scores.shape)
            if learned is not None:
                term = torch.addcmul(removed, learned, bias[head], out=scores)
            if query.dtype == bias.dtype:
                torch.baddbmm(term, query[at], key[at].mT, alpha=scale, out=scores)
            else:
                power, rest = power_of_two(scale)
                torch.add(term, torch.bmm(query[at] * power, key[at].mT), alpha=rest, out=scores)
            torch.softmax(scores, -1, out=weights)
            if dropout:
                numbers.random_(-(2**63), None, generator=generator)
                torch.ge(bits[:count], threshold, out=keep)
            yield at, weights, keep, scores, learned


def _forward(query, key, value, *rest):
    bias, *_, dropout, _, _ = rest
    output = _rows(query)
    factor = 1 / _kept(dropout)[0]
    for at, weights, keep, _, _ in _blocks(query, key, *rest):
        if keep is not None:
            weights.mul_(keep)
        output[at].baddbmm_(weights.to(value.dtype), value[at], beta=0, alpha=factor)
    return output


def _backward(grad, query, key, value, *rest):
    bias, *_, dropout, scale, _ = rest
    dquery, dkey, dvalue, dbias = _rows(query), _rows(key), _rows(value), torch.zeros_like(bias)
    factor = 1 / _kept(dropout)[0]
    for at, weights, keep, buffer, learned in _blocks(query, key, *rest):
        dropped = weights if keep is None else torch.mul(weights, keep, out=buffer)
        dvalue[at].baddbmm_(dropped.to(grad.dtype).mT, grad[at], beta=0, alpha=factor)
        if value.dtype == bias.dtype:
            buffer.baddbmm_(grad[at], value[at].mT, beta=0, alpha=factor)
        else:
            torch.mul(torch.bmm(grad[at], value[at].mT), factor, out=buffer)
        if keep is not None:
            buffer.mul_(keep)
        dscores = torch._softmax_backward_data(buffer, weights, -1, bias.dtype)
        low = dscores.to(query.dtype)
        dquery[at].baddbmm_(low, key[at], beta=0, alpha=scale)
        dkey[at].baddbmm_(low.mT, query[at], beta=0, alpha=scale)
        if learned is not None:
            dscores.mul_(learned)
        dbias[at[1]] += dscores.sum(0)
    return dquery, dkey, dvalue, dbias


library.impl("bias_attention", _forward, "CompositeExplicitAutograd")
library.impl("bias_attention_backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("sparsebert::bias_attention", lib=library)
def _forward_shape(query, key, value, *rest):
    return _rows(query)


@torch.library.register_fake("sparsebert::bias_attention_backward", lib=library)
def _backward_shapes(grad, query, key, value, bias, *rest):
    return _rows(query), _rows(key), _rows(value), torch.empty_like(bias)


def _remember(ctx, inputs, output):
    *tensors, ctx.learned_diagonal, ctx.causal, ctx.dropout, ctx.scale, ctx.block = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, grad):
    gradients = torch.ops.sparsebert.bias_attention_backward(
        grad, *ctx.saved_tensors, ctx.learned_diagonal, ctx.causal, ctx.dropout, ctx.scale, ctx.block
    )
    return *gradients, *[None] * 9


def _no_second_derivatives(ctx, *grads):
    raise RuntimeError(
        "a mask being learned and dropout on CPUs have no second derivatives in sparse_sdpa: use sparse_eager"
    )


torch.library.register_autograd("sparsebert::bias_attention_backward", _no_second_derivatives, lib=library)
torch.library.register_autograd("sparsebert::bias_attention", _differentiate, setup_context=_remember, lib=library)


def bias_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    padding: torch.Tensor | None = None,
    first: torch.Tensor | None = None,
    last: torch.Tensor | None = None,
    learned_diagonal: bool = True,
    causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
) -> torch.Tensor:
    """
    Attention under a bias that gets a gradient.

    Args:
        query (`torch.Tensor` of shape `(B, H, n, d)`): The last n of m positions; any strides.
        key (`torch.Tensor` of shape `(B, H, m, d)`): Keys, in the dtype of the query; any strides.
        value (`torch.Tensor` of shape `(B, H, m, d)`): Values, in the dtype of the query; any strides.
        bias (`torch.Tensor` of shape `(H, n, m)`): Added to the scores of every sequence; float32 (float64 for float64
            inputs). The softmax is computed in this dtype.
        padding (`torch.Tensor` of shape `(B, m)`, *optional*): Bool, True = real token. Padded keys are removed.
        first (`torch.Tensor` of shape `(B,)`, *optional*): Position in each sequence of a token in whose row and
            column the bias does not count. Requires `padding`.
        last (`torch.Tensor` of shape `(B,)`, *optional*): The same for another token.
        learned_diagonal (`bool`, *optional*, defaults to `True`): Whether these rows and columns contain their
            diagonal entries. If not, the bias counts there.
        causal (`bool`, *optional*, defaults to `False`): Whether these rows and columns end at the diagonal. If so,
            the bias counts at keys j > query i.
        dropout (`float`, *optional*, defaults to 0.0): Probability of attention dropout, in [0, 1), rounded to
            multiples of 2^-16. Its seed is drawn from the global generator.
        scale (`float`, *optional*): Factor of the scores. Defaults to `d ** -0.5`.

    Returns:
        `torch.Tensor` of shape `(B, H, n, d)`, in the memory order `(B, n, H, d)`.
    """
    # The size of a block must not depend on the number of threads, or the random numbers would.
    block_bytes = BLOCK_BYTES.get(query.device.type, BLOCK_BYTES["cuda"])
    return torch.ops.sparsebert.bias_attention(
        query,
        key,
        value,
        bias,
        padding,
        first,
        last,
        torch.randint(2**62, (1,), device="cpu") if dropout else torch.zeros(1, dtype=torch.int64, device="cpu"),
        learned_diagonal,
        causal,
        dropout,
        query.shape[-1] ** -0.5 if scale is None else scale,
        max(1, block_bytes // (4 * query.shape[2] * key.shape[2])),
    )
