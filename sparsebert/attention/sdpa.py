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
        device = query.device.type
        # Under autocast the operator casts its inputs, the mask too.
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
        if dtype == torch.float16:
            bias = bias.clamp(min=torch.finfo(dtype).min)  # finite, or a query without a key would give NaN
        bias = bias.to(dtype).expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, dropout_p=dropout, scale=scaling
    )
    if inputs.live[0] is not None:
        output = output * inputs.live[0]
    return output.transpose(1, 2).contiguous(), None
