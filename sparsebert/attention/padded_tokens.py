"""Padded tokens in attention: their content never affects the other tokens."""

import math
from collections.abc import Sequence

import torch

from ..masks.exported import exporting
from .mask_inputs import MaskInputs


# Two vectors of this length have a product that is finite in float16.
_LARGE = 250.0
# The difference of two scores that is no match for what removes an entry in float16, which is -65504.
_MOST_APART = 65000.0


def _limit(scaling):
    """The length up to which vectors are harmless: their scores are at most the length squared times the scale."""
    most = _MOST_APART / 2
    return _LARGE if abs(scaling) * _LARGE**2 <= most else math.sqrt(most / abs(scaling))


def clear_padding(inputs: MaskInputs, scaling: float, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """
    Query, key or value `(B, H, n, d)` with 0 at padded positions, for backends that compute with padded tokens and
    then remove them: a removed key has the weight 0, but 0 times NaN or infinity is NaN, and a finite score may be too
    large to be removed. Under a mask that is not frozen, where padded queries have an output, only what is NaN or
    large becomes 0. On CPUs nothing is copied if no state is large.
    """
    if inputs.padding is None or inputs.documents is not None or _known_small(states, scaling):
        return states
    real, frozen = inputs.padding[:, None, :, None], inputs.sparse_mask is not None
    cleared = []
    for each in states:
        keep = real[:, :, real.shape[2] - each.shape[2] :]
        keep = keep if frozen else keep | (torch.linalg.vector_norm(each, dim=-1, keepdim=True) < _limit(scaling))
        cleared.append(torch.where(keep, each, each.new_zeros(())))
    return tuple(cleared)


def clear_output(inputs: MaskInputs, output: torch.Tensor) -> torch.Tensor:
    """
    An output `(B, n, H, d)` with 0 for queries without a key, and for padded ones under a frozen mask. They pass no
    gradient on, even if it is NaN, which a product with 0 would.
    """
    live = inputs.live[0]
    if live is None and inputs.padding is not None and inputs.sparse_mask is not None and torch.is_grad_enabled():
        live = inputs.padding[:, None, -output.shape[1] :, None]
    if live is None:
        return output
    # Contiguous, as the strides of the result follow it.
    return torch.where(live.transpose(1, 2).contiguous(), output, output.new_zeros(()))


def _known_small(states: Sequence[torch.Tensor], scaling: float) -> bool:
    """Whether no vector is large, where it costs little to ask: on CPUs, a tenth of setting padding to 0."""
    if torch.compiler.is_compiling() or exporting() or states[0].device.type != "cpu":
        return False
    limit = _limit(scaling)
    try:
        with torch.no_grad():
            return all(bool(torch.linalg.vector_norm(each, dim=-1).amax() < limit) for each in states)
    except RuntimeError:  # tensors without values, or under vmap
        return False
