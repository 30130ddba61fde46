"""PyTorch's fused attention with the mask as an additive term; where that is being learned, an operator of ours."""

import torch

from .bias_attention import bias_attention


def sdpa_attention(query, key, value, inputs, scaling, dropout):
    """`scaled_dot_product_attention` under an additive mask. Shapes: see [`Backend`]; returns no probabilities."""
    if inputs.learned[0] is not None:
        # PyTorch's would take its slow path, and keep the gradient of every sequence's bias.
        output = bias_attention(
            query,
            key,
            value,
            inputs.learned[0].to(torch.promote_types(query.dtype, torch.float32)),
            inputs.padding,
            inputs.last_token,
            inputs.learned_diagonal,
            dropout,
            scaling,
        )
        return output.transpose(1, 2), None
    bias = inputs.bias[0]
    if bias is not None:
        # Under autocast the operator casts its inputs, the mask too.
        bias = bias if torch.is_autocast_enabled(query.device.type) else bias.to(query.dtype)
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, dropout_p=dropout, scale=scaling
    )
    if inputs.live[0] is not None:
        output = output * inputs.live[0]
    return output.transpose(1, 2).contiguous(), None
