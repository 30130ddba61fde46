"""The reference backend in plain PyTorch. It serves every kind of mask and returns the probabilities."""

import math

import torch
from torch import nn

from ..biases.bias_entries import REMOVED_BELOW
from ..mask_inputs import MaskInputs


def power_of_two(scaling: float) -> tuple[float, float]:
    """
    The factor of the scores as a power of two, which can scale the query without rounding, and a rest from 1 to 2.
    With the power, scores in half precision overflow no earlier than those of PyTorch's fused attention.
    """
    exponent = math.frexp(scaling)[1] - 1
    return 2.0**exponent, scaling * 2.0**-exponent


def eager_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, inputs: MaskInputs, scaling: float, dropout: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The reference in plain PyTorch, with the whole score matrix in memory. Mask and softmax are computed in float32
    (float64 for float64 inputs), whatever the autocast dtype.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    power, rest = power_of_two(scaling)
    scores = torch.matmul(query * power, key.transpose(2, 3)).to(dtype) * rest  # (B, H, n, m)
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
    last = None
    if inputs.rest[0] is not None:
        weights, last = weights.split([weights.shape[-1] - 1, 1], -1)
    dropped = nn.functional.dropout(weights, p=dropout)
    output = torch.matmul(dropped if last is None else torch.cat([dropped, last], -1), value)
    return output.transpose(1, 2).contiguous(), weights
