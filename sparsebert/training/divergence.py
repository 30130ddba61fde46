"""Numbers that are not finite: found and named before they are saved, frozen or trained on."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from transformers.trainer_utils import get_last_checkpoint


def _is_bad(name: str, tensor: torch.Tensor) -> bool:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a part of a sharded tensor
    # Pruning removes entries by logits of -inf.
    bad = local.isnan() if name.endswith("mask_logits") else ~local.isfinite()
    return bool(bad.any())


def first_bad_weight(model: nn.Module) -> str | None:
    """Name of the first weight that is not finite, or `None`."""
    return next((name for name, weight in model.named_parameters() if _is_bad(name, weight.detach())), None)


def first_bad_gradient(model: nn.Module) -> str | None:
    """Name of the first weight whose gradient is not finite, or `None`."""
    gradients = ((name, weight.grad) for name, weight in model.named_parameters() if weight.grad is not None)
    return next((name for name, gradient in gradients if not gradient.isfinite().all()), None)


def check_weights(model: nn.Module, what: str) -> None:
    """Check that all weights of a model are finite."""
    if (name := first_bad_weight(model)) is not None:
        raise FloatingPointError(f"{what}: {name} is not finite (NaN or infinite)")


def diverged(
    model: nn.Module, losses: Iterable[torch.Tensor], step: int, output_dir: str | None, skipped: int = 0
) -> FloatingPointError:
    """The error of a step whose loss, gradient or weights are not finite."""
    problems = [f"the loss is {float(loss)}" for loss in losses if not loss.isfinite()][:1]
    if (name := first_bad_weight(model)) is not None:
        problems.append(f"{name} is not finite")
    elif (name := first_bad_gradient(model)) is not None:
        problems.append(f"the first gradient that is not finite is that of {name}")
    elif not problems:
        problems.append("the norm of the gradient is not finite")
    if skipped:
        problems.append(f"{skipped} steps in a row overflowed under fp16: use bf16 (--bf16) instead of fp16")
    last = get_last_checkpoint(output_dir) if output_dir is not None and Path(output_dir).is_dir() else None
    kept = f"the last checkpoint is {last}" if last else "there is no checkpoint"
    return FloatingPointError(f"step {step}: {', '.join(problems)}; the training stops before its update: {kept}")
