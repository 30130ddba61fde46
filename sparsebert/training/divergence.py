"""A training that diverges: what is not finite is found and named before it is saved, frozen or trained on."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from transformers.trainer_utils import get_last_checkpoint

from ..files import CHECKPOINT
from ..finite_weights import first_bad_weight


def first_bad_gradient(model: nn.Module) -> str | None:
    """Name of the first weight whose gradient is not finite, or `None`."""
    gradients = ((name, weight.grad) for name, weight in model.named_parameters() if weight.grad is not None)
    return next((name for name, gradient in gradients if not gradient.isfinite().all()), None)


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
    if last is None and output_dir is not None and CHECKPOINT.fullmatch(Path(output_dir).parent.name):
        last = Path(output_dir).parent  # of the search, in which its recovery keeps its own
    kept = f"the last checkpoint is {last}" if last else "there is no checkpoint"
    return FloatingPointError(f"step {step}: {', '.join(problems)}; the training stops before its update: {kept}")
