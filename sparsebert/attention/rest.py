"""
The rest of a mask: one more key, which stands for all that the mask removes. See `rest` of [`SparseMask`].

Letters: B batch, H heads, n queries (the last n of the m positions), m keys, d head size.
"""

from dataclasses import replace

import torch

from ..masks.sparse_mask import SparseMask
from .biases.bias_entries import REMOVED
from .mask_inputs import MaskInputs


# A query for which less than this is removed, which only a mask being learned has, or nothing, has no rest.
LEAST_REMOVED = 1e-3


def mean_states(states: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
    """
    The mean over the real tokens of keys or values `(B, H, m, d)`: `(B, H, 1, d)`, summed up in float32 (float64 for
    float64). Padded states must be finite.
    """
    dtype = torch.promote_types(states.dtype, torch.float32)
    if padding is None:
        return states.mean(2, keepdim=True, dtype=dtype)
    shares = padding.to(dtype) / padding.sum(-1, keepdim=True).clamp(min=1)
    return torch.einsum("bm,bhmd->bhd", shares, states.to(dtype))[:, :, None]


def num_removed(bias: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
    """
    How many real keys a bias `(B or 1, H or 1, n, m)` removes for each query, `(B or 1, H or 1, n, 1)`. A key that is
    lowered by x counts by `1 - exp(-x)`.
    """
    kept = bias.exp().sum(-1, keepdim=True)
    return (bias.shape[-1] if padding is None else padding.sum(-1)[:, None, None, None]) - kept


def with_rest(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, inputs: MaskInputs
) -> tuple[torch.Tensor, torch.Tensor, MaskInputs]:
    """
    Key and value `(B, H, m + 1, d)` whose last row is the rest, and inputs whose bias and `live` know of it. The
    probabilities under this bias have a last column for it.
    """
    learned, own, padding = inputs.learned[0], inputs.rest[0], inputs.padding
    bias = inputs.bias[0] if learned is None else learned[None]
    assert bias is not None and own is not None
    bias = bias.to(torch.promote_types(query.dtype, torch.float32))
    removed = num_removed(bias, padding)
    scores = removed.clamp(min=LEAST_REMOVED).log() + own.to(bias.dtype)[:, None, None]
    scores = torch.where(removed < LEAST_REMOVED, REMOVED, scores)
    shape = torch.broadcast_shapes(bias.shape[:3], scores.shape[:3])
    bias = torch.cat([bias.expand(*shape, -1), scores.expand(*shape, 1)], -1)
    key, value = (torch.cat([states, mean_states(states, padding).to(states.dtype)], 2) for states in (key, value))
    if learned is not None:
        return key, value, replace(inputs, learned=(bias[0],))
    live = None if padding is None else padding[:, None, -query.shape[2] :, None]
    return key, value, replace(inputs, bias=(bias,), live=(live,))


def check_rest(mask: SparseMask, causal: bool, probability_map: str) -> None:
    """Refuse what a mask with a rest has no meaning for."""
    if mask.rest == "none":
        return
    if causal:
        raise ValueError(f"rest {mask.rest!r} is undefined in causal attention: use mask.replace(rest='none')")
    if probability_map != "softmax":
        raise ValueError(f"rest {mask.rest!r} needs the probability_map 'softmax', got {probability_map!r}")
