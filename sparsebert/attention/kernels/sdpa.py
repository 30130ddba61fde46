"""PyTorch's fused attention with the mask as a bias, or our own operator if that bias is being learned."""

from typing import Any

import torch

from ...masks.exported import exporting
from ...masks.sparse_mask import SparseMask
from ..biases.mask_biases import prepare_bias
from ..mask_inputs import MaskInputs, autocast_dtype
from .bias_operator import bias_attention


def prepare(mask: SparseMask, inputs: MaskInputs) -> dict[str, Any]:
    """The fields of [`MaskInputs`] of a frozen mask, in the dtype of the scores if nothing is added to its bias."""
    alone = inputs.rest[0] is None and inputs.distance_bias[0] is None
    return prepare_bias(mask, inputs, inputs.dtype if alone else torch.float32)


def sdpa_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, inputs: MaskInputs, scaling: float, dropout: float
) -> tuple[torch.Tensor, None]:
    """PyTorch's fused attention with the mask as a bias, or our own operator if that bias is being learned."""
    if inputs.learned[0] is not None:
        # PyTorch's attention would take its slow path and keep the gradient of the bias for every sequence.
        output = bias_attention(
            query,
            key,
            value,
            inputs.learned[0].to(torch.promote_types(query.dtype, torch.float32)),
            inputs.padding,
            inputs.first_token,
            inputs.last_token,
            inputs.learned_diagonal,
            inputs.causal,
            dropout,
            scaling,
            inputs.special_rows,
        )
        return output.transpose(1, 2), None
    bias = inputs.bias[0]
    if dropout and query.device.type == "cpu" and (bias is None or len(bias) == 1) and not exporting():
        # PyTorch has no fused attention with dropout on CPUs, and would keep the scores of all sequences and heads.
        fixed = torch.zeros(1) if bias is None else bias[0]
        fixed = fixed.to(torch.promote_types(query.dtype, torch.float32))
        shape = (query.shape[1], query.shape[2], key.shape[2])
        output = bias_attention(query, key, value, fixed.expand(shape), dropout=dropout, scale=scaling)
        return output.transpose(1, 2).contiguous(), None
    if bias is not None:
        # Under autocast the operator casts its inputs, the bias included.
        dtype = autocast_dtype(query.device.type, query.dtype)
        if dtype == torch.float16 != bias.dtype:
            # Kept finite, since a query without a key would otherwise give NaN.
            bias = bias.clamp(min=torch.finfo(dtype).min)
        bias = bias.to(dtype)
    if query.device.type == "cuda":
        query, key, value = map(_aligned, (query, key, value))
        if bias is not None and inputs.live[0] is not None:
            # cuDNN's backward gives NaN where every key of a query is removed (pytorch#196678).
            bias = bias.masked_fill(~inputs.live[0], 0.0)
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, dropout_p=dropout, scale=scaling
    )
    return output.transpose(1, 2).contiguous(), None


def _aligned(tensor):
    """The same values. PyTorch's kernels on CUDA refuse odd strides, even the unused one of a single token."""
    return tensor.squeeze(2).unsqueeze(2) if tensor.shape[2] == 1 else tensor
