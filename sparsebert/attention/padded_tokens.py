"""Padded tokens on their way into attention: whatever they hold, the other tokens do not notice."""

import torch

from .mask_inputs import MaskInputs


def without_padding(inputs: MaskInputs, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """
    States with 0 at padded positions, for backends that compute with padded tokens and then remove them. A removed key
    has the weight 0, but 0 times NaN or infinity is NaN.

    Args:
        inputs ([`MaskInputs`]): Its padding is read.
        states (`torch.Tensor` of shape `(B, H, n, d)`): Query, key or value: the last n of the m positions.

    Returns:
        `tuple` of `torch.Tensor`: The states themselves if there is no padding, or if it is 0 already, as in the
        documents of a packed batch.
    """
    if inputs.padding is None or inputs.documents is not None:
        return states
    real = inputs.padding[:, None, :, None]
    return tuple(torch.where(real[:, :, real.shape[2] - each.shape[2] :], each, each.new_zeros(())) for each in states)
