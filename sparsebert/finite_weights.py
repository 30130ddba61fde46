"""Weights that are not finite: found and named before a model is trained, changed or saved."""

import torch
from torch import nn


def _is_bad(name: str, tensor: torch.Tensor) -> bool:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a part of a sharded tensor
    # Pruning removes entries by logits of -inf.
    bad = local.isnan() if name.endswith("mask_logits") else ~local.isfinite()
    return bool(bad.any())


def first_bad_weight(model: nn.Module) -> str | None:
    """Name of the first weight that is not finite, or `None`."""
    return next((name for name, weight in model.named_parameters() if _is_bad(name, weight.detach())), None)


def check_weights(model: nn.Module, what: str) -> None:
    """Check that all weights of a model are finite."""
    if (name := first_bad_weight(model)) is not None:
        raise FloatingPointError(f"{what}: {name} is not finite (NaN or infinite)")
