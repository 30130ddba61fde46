"""
Searches that keep a given share of the entries: the budget, its schedule, and how well the mask is decided.

Letters: L layers (1 when shared), H heads, K learned parameters per head, n mask length, P the keep probability.
"""

import torch


# P of a parameter stays within what float32 resolves around 0 and 1.
_SATURATION = 15.0
_BISECTIONS = 30


def scheduled(
    progress: float | torch.Tensor, start: float, end: float, initial: float, final: float, power: int = 3
) -> torch.Tensor:
    """
    A value that is `initial` before `start`, `final` after `end`, and `final + (initial - final) (1 - u)^power` at the
    fraction u of the way between them.

    Args:
        progress (`float` or `torch.Tensor`): Fraction of the training that is done, in [0, 1].
        start (`float`): Fraction at which the value starts to change.
        end (`float`): Fraction at which it has reached `final`. Equal to `start` for a step.
        initial (`float`): Value at the beginning.
        final (`float`): Value at the end.
        power (`int`, *optional*, defaults to 3): 3 is the cubic schedule, fast at first and slow at the end; 1 is
            linear.

    Returns:
        `torch.Tensor`: 0-dimensional.

    Source: Zhu and Gupta (arXiv 1710.01878), Section 3, for sparsity.
    """
    if not torch.is_tensor(progress):
        progress = torch.tensor(float(progress))
    passed = ((progress - start) / max(end - start, 1e-9)).clamp(0, 1)
    return final + (initial - final) * (1 - passed) ** power


def geometric(progress: torch.Tensor, initial: float, final: float) -> torch.Tensor:
    """A positive value that changes from `initial` to `final` in equal ratios."""
    return initial * (final / initial) ** progress


def budget_shift(
    logits: torch.Tensor, counts: torch.Tensor, budget: torch.Tensor | float, width: torch.Tensor | float
) -> torch.Tensor:
    """
    The multiplier mu of each head for which P = sigmoid((logits - mu) / width) keeps `budget` entries.

    mu is the dual variable of the budget: among all P that keep this many entries, the result has the greatest
    `sum(P logits) + width * entropy(P)`. As mu is solved for in every step, the budget is met whatever the learning
    rate. The gradient passes through mu (implicit differentiation), so the logits of a head only compete with each
    other.

    Args:
        logits (`torch.Tensor` of shape `(..., K)`): float32, usually `(L, H, K)`.
        counts (`torch.Tensor` of shape `(K,)`): Number of entries that each parameter decides. Parameters with 0 have
            no influence.
        budget (`torch.Tensor` or `float`): Number of these entries to keep in each head, at least 0.
        width (`torch.Tensor` or `float`): Positive.

    Returns:
        `torch.Tensor` of shape `(..., 1)`.
    """
    counts = counts.to(logits.dtype)
    budget = torch.as_tensor(budget, dtype=logits.dtype, device=logits.device)
    with torch.no_grad():
        # At one end of this interval all entries are kept, at the other none.
        low = logits.amin(-1, keepdim=True) - _SATURATION * width
        high = logits.amax(-1, keepdim=True) + _SATURATION * width
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            too_many = (torch.sigmoid((logits - middle) / width) * counts).sum(-1, keepdim=True) > budget
            low, high = torch.where(too_many, middle, low), torch.where(too_many, high, middle)
        middle = (low + high) / 2
        slope = torch.sigmoid((logits - middle) / width)
        weights = counts * slope * (1 - slope)
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-12)  # d mu / d logits
    return middle + ((logits - logits.detach()) * weights).sum(-1, keepdim=True)


def disagreement(chosen: torch.Tensor, other: torch.Tensor, counts: torch.Tensor) -> float:
    """
    Share of the learned entries on which two choices of parameters differ.

    Args:
        chosen, other (`torch.Tensor` of shape `(L, H, K)`): Bool.
        counts (`torch.Tensor` of shape `(K,)`): Number of entries that each parameter decides.
    """
    return ((chosen != other) * counts).sum().item() / max((counts.sum() * chosen[..., 0].numel()).item(), 1)


def collapsed(chosen: torch.Tensor, counts: torch.Tensor) -> tuple[int, int]:
    """
    Number of heads, over all layers, whose learned entries are all kept, and number of heads where none is.

    Args:
        chosen (`torch.Tensor` of shape `(L, H, K)`): Bool.
        counts (`torch.Tensor` of shape `(K,)`): Number of entries that each parameter decides.
    """
    learned = chosen[..., counts > 0]
    return int(learned.all(-1).sum()), int((~learned.any(-1)).sum())
