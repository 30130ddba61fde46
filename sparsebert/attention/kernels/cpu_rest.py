"""
The rest on CPUs: a C++ operator that computes what [`pooled_rest`] does, from states of any layout.

Letters: B batch, H heads, n queries (the last n of the m positions), m keys, d head size.
"""

import torch

from ..mask_inputs import MaskInputs, per_sequence
from .cpu import call, checked_sizes, empty_rows, fits, library


_STATES = "Tensor query, Tensor key, Tensor value, Tensor? keys, Tensor? starts, int longest, float scale"
library.define(f"pool_rest({_STATES}) -> (Tensor, Tensor)")
library.define(f"pool_rest_backward(Tensor grad, Tensor pooled, Tensor means, {_STATES}) -> (Tensor, Tensor, Tensor)")


def _run(function, arrays, pooled, grad, keys, starts, longest, scale):
    """Call a function of the compiled library on `arrays`: query, key, value, means and gradients."""
    sizes = checked_sizes(function, *arrays[:3], keys, starts, longest)
    batch, heads, *_, size = sizes
    shapes = (batch, heads, 2 * size + 1), (batch, heads, size + 1)
    if not all(fits(each, torch.float32, shape) for each, shape in ((pooled, shapes[0]), (arrays[3], shapes[1]))):
        raise RuntimeError(f"{function}: pooled and means must be float32 of shapes {shapes}")
    options = (*[0] * 9, 0.0, scale)  # what describes a mask is 0
    call(function, arrays, (None, None, None, keys, None, starts, pooled, grad), 0, sizes, options)


def _forward(query, key, value, keys, starts, longest, scale):
    pooled, means = _forward_shapes(query, key, value, keys, starts, longest, scale)
    _run("pool_rest", (query, key, value, means), None, pooled, keys, starts, longest, scale)
    return pooled, means


def _backward(grad, pooled, means, query, key, value, *others):
    gradients = _backward_shapes(grad, pooled, means, query, key, value, *others)
    if grad.shape != pooled.shape or grad.dtype != torch.float32:
        raise RuntimeError(f"pool_rest_backward: the gradient does not fit: {grad.dtype} {tuple(grad.shape)}")
    _run("pool_rest_backward", (query, key, value, means, *gradients), pooled, grad.contiguous(), *others)
    return gradients


library.impl("pool_rest", _forward, "CPU")
library.impl("pool_rest_backward", _backward, "CPU")


@torch.library.register_fake("sparsebert::pool_rest", lib=library)
def _forward_shapes(query, key, value, keys, starts, longest, scale):
    rows, heads, _, size = query.shape
    shape = (rows if starts is None else len(starts), heads)
    return tuple(query.new_empty(*shape, last, dtype=torch.float32) for last in (2 * size + 1, size + 1))


@torch.library.register_fake("sparsebert::pool_rest_backward", lib=library)
def _backward_shapes(grad, pooled, means, query, key, value, *others):
    return empty_rows(query), empty_rows(key), empty_rows(value)


def _remember(ctx, inputs, output):
    ctx.save_for_backward(*output, *inputs[:5])
    ctx.options = inputs[5:]
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx, grad, _):
    gradients = torch.ops.sparsebert.pool_rest_backward(grad, *ctx.saved_tensors, *ctx.options)
    return *gradients, None, None, None, None


def _no_second_derivatives(ctx, *grads):
    raise RuntimeError("sparse_cpu has no second derivatives: use sparse_eager")


torch.library.register_autograd("sparsebert::pool_rest_backward", _no_second_derivatives, lib=library)
torch.library.register_autograd("sparsebert::pool_rest", _differentiate, setup_context=_remember, lib=library)


def pooled_rest_on_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, inputs: MaskInputs, scaling: float
) -> torch.Tensor:
    """
    The rest of one layer, of packed documents where they lie: key, value and score in one tensor `(B, H, 2 d + 1)`.
    """
    documents, bias = inputs.documents, inputs.rest[0]
    pooled, _ = torch.ops.sparsebert.pool_rest(
        query,
        key,
        value,
        per_sequence(inputs.rest_keys, len(query) if documents is None else documents.shape[0]),
        None if documents is None else documents.starts,
        inputs.num_keys,
        scaling,
    )
    return pooled + torch.nn.functional.pad(bias[:, None], (2 * query.shape[-1], 0))
