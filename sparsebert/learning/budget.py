"""
Searches that keep a given share of the entries: the budget, its schedule, and how well the mask is decided.

Letters: L layers (1 when shared), H heads, K learned parameters per head, n mask length, P the keep probability.
"""

import math

import torch

from .decided_entries import DecidedEntries


# P of a parameter stays within what float32 resolves around 0 and 1.
_SATURATION = 15.0
_BISECTIONS = 40
# Entries of a head, for logarithms and quotients of budgets of 0.
_LEAST_BUDGET = 1e-3
# Bounds the gradient of a budget whose entries are all decided.
_LEAST_SLOPE = 1e-3


def scheduled(progress: float | torch.Tensor, start: float, end: float, initial: float, final: float) -> torch.Tensor:
    """
    A value that is `initial` before `start`, `final` after `end`, and `final + (initial - final) (1 - u)^3` at the
    fraction u of the way between them: it changes fast at first and slowly at the end.

    Source: Zhu and Gupta (arXiv 1710.01878), Section 3, for sparsity.
    """
    if not torch.is_tensor(progress):
        progress = torch.tensor(float(progress), dtype=torch.float32)
    passed = ((progress - start) / max(end - start, 1e-9)).clamp(0, 1)
    return final + (initial - final) * (1 - passed) ** 3


def geometric(progress: torch.Tensor, initial: float, final: float) -> torch.Tensor:
    """A positive value that changes from `initial` to `final` in equal ratios."""
    return initial * (final / initial) ** progress


def head_budgets(
    logits: torch.Tensor, budget: torch.Tensor | float, least: float, most: float, scope: str = "head"
) -> torch.Tensor:
    """
    How many entries each head keeps, `(L, H, 1)`, or `(1, 1, 1)` if the same in every head: between `least` and
    `most`, on average `budget`. Logits are `(L, H, K)`.

    With one budget for all heads (scope `"global"`), the share of a head is proportional to `exp(mean(logits))`. Among
    themselves, the parameters of a head only compete for its budget, which a constant added to all of them does not
    change; so their mean is free to say how large it is. Shares follow gradients better than a common threshold would,
    at which a head that attends evenly keeps all or nothing.
    """
    budget = torch.as_tensor(budget, dtype=logits.dtype, device=logits.device).clamp(least, most)
    if scope == "head":
        return budget.view(1, 1, 1)
    levels = logits.mean(-1, keepdim=True)
    with torch.no_grad():
        # At one end of this interval all heads keep the least, at the other the most.
        low = math.log(max(least, _LEAST_BUDGET)) - levels.max()
        high = math.log(max(most, _LEAST_BUDGET)) - levels.min()
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            too_few = (levels + middle).exp().clamp(least, most).mean() < budget
            low, high = torch.where(too_few, middle, low), torch.where(too_few, high, middle)
        budgets = (levels + high).exp().clamp(least, most)
    # The gradient takes heads at a bound for free ones: with their own, which is 0, they could never leave it.
    change = levels - levels.detach()
    return budgets + budgets * (change - (budgets * change).sum() / budgets.sum().clamp(min=_LEAST_BUDGET))


def budget_shift(
    logits: torch.Tensor, entries: DecidedEntries, budget: torch.Tensor | float, width: torch.Tensor | float
) -> torch.Tensor:
    """
    The multiplier mu of each head, `(L, H, 1)`, for which P = sigmoid((logits - mu) / width) keeps `budget` of the
    entries that the parameters decide. Logits are `(L, H, K)`, float32.

    Where every entry has one parameter, mu is the dual variable of the budget: among all P that keep this many
    entries, the result has the greatest `sum(P logits) + width * entropy(P)`. As mu is solved for in every step, the
    budget is met whatever the learning rate. The gradient passes through mu (implicit differentiation), so the logits
    of a head only compete with each other, and to the budget.
    """
    budget = torch.as_tensor(budget, dtype=logits.dtype, device=logits.device)
    with torch.no_grad():
        # At one end of this interval all entries are kept, at the other none.
        low = logits.amin(-1, keepdim=True) - _SATURATION * width
        high = logits.amax(-1, keepdim=True) + _SATURATION * width
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            too_many = entries.kept(torch.sigmoid((logits - middle) / width))[..., None] > budget
            low, high = torch.where(too_many, middle, low), torch.where(too_many, high, middle)
        middle = (low + high) / 2
        slope = torch.sigmoid((logits - middle) / width)
        weights = entries.decided(slope) * slope * (1 - slope)
        total = weights.sum(-1, keepdim=True)
        weights = weights / total.clamp(min=1e-12)  # d mu / d logits
        less = width / total.clamp(min=_LEAST_SLOPE)  # -d mu / d budget
    return middle + ((logits - logits.detach()) * weights).sum(-1, keepdim=True) - (budget - budget.detach()) * less


def disagreement(chosen: torch.Tensor, other: torch.Tensor, entries: DecidedEntries) -> float:
    """Share of the learned entries on which two choices of parameters differ, both bool `(L, H, K)`."""
    differing = 2 * entries.kept(chosen | other) - entries.kept(chosen) - entries.kept(other)
    return differing.sum().item() / max(entries.total * chosen[..., 0].numel(), 1)


def collapsed(chosen: torch.Tensor, entries: DecidedEntries) -> tuple[int, int]:
    """Number of heads, over all layers, that keep all their learned entries, and of those that keep none."""
    kept = entries.kept(chosen)
    return int((kept == entries.total).sum()), int((kept == 0).sum())
