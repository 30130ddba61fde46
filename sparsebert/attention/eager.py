"""The reference backend: plain PyTorch, any mask form, returns the probabilities; the oracle of all others."""

import torch
from torch import nn

from .mask_inputs import REMOVED_BELOW


def eager_attention(query, key, value, inputs, scaling, dropout):
    """
    Attention with the whole score matrix in memory. Shapes: see [`Backend`].

    Mask and softmax are float32 (float64 for float64 inputs) whatever the autocast dtype.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = torch.matmul(query, key.transpose(2, 3)).to(dtype) * scaling  # (B, H, n, m)
    probability_map = inputs.probability_map[0]
    if inputs.bias[0] is not None:
        scores = scores + inputs.bias[0].to(dtype)
        if probability_map is not None:
            scores = scores.masked_fill(inputs.bias[0] <= REMOVED_BELOW, -torch.inf)
    weights = torch.softmax(scores, dim=-1) if probability_map is None else probability_map(scores)
    if inputs.gate[0] is not None:
        weights = weights * inputs.gate[0].to(dtype)
    if inputs.live[0] is not None:
        weights = weights * inputs.live[0]
    weights = weights.to(value.dtype)
    dropped = nn.functional.dropout(weights, p=dropout)
    return torch.matmul(dropped, value).transpose(1, 2).contiguous(), weights
