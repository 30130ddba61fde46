"""
A search that keeps a given share of the entries: the budget, its schedule, and how well the mask is decided.

Letters: L layers (1 when shared), H heads, K learned parameters per head, n mask length, P the keep probability.
"""

import torch


# P of a parameter stays within what float32 resolves around 0 and 1.
_SATURATION = 15.0
_BISECTIONS = 30


def scheduled(progress, start, end, initial, final, power=3):
    """
    A quantity that is `initial` before `start`, `final` from `end` on, and in between
    `final + (initial - final) (1 - u)^power`, fast at first and slow in the end.

    Args:
        progress (`float` or `torch.Tensor`): Fraction of the training that is done, in [0, 1].
        start, end (`float`): Fractions; equal ones make a step.
        initial, final (`float`): Values.
        power (`int`): 3 is the cubic schedule, 1 a line.

    Source: Zhu and Gupta (arXiv 1710.01878), Section 3, for sparsity.
    """
    if not torch.is_tensor(progress):
        progress = torch.tensor(float(progress))
    passed = ((progress - start) / max(end - start, 1e-9)).clamp(0, 1)
    return final + (initial - final) * (1 - passed) ** power


def geometric(progress, initial, final):
    """A positive quantity that goes from `initial` to `final` in equal ratios."""
    return initial * (final / initial) ** progress


def budget_shift(logits, counts, budget, width):
    """
    The multiplier mu of each head for which P = sigmoid((logits - mu) / width) keeps `budget` entries.

    It is the dual variable of the budget: among all P that keep so many entries, this one has the greatest
    `sum(P logits) + width * entropy(P)`. Being solved for instead of climbed to, it is met at every step, whatever the
    optimiser does to the size of a penalty's gradient. The gradient passes through mu (implicit differentiation), so
    the logits of a head only compete with each other.

    Args:
        logits (`torch.Tensor` of shape `(L, H, K)`): float32.
        counts (`torch.Tensor` of shape `(K,)`): Entries that a parameter decides; parameters of 0 are left out.
        budget (`torch.Tensor` or `float`): Entries to keep among those, at least 0.
        width (`torch.Tensor` or `float`): Positive.

    Returns:
        `torch.Tensor` of shape `(L, H, 1)`.
    """
    counts = counts.to(logits.dtype)
    budget = torch.as_tensor(budget, dtype=logits.dtype, device=logits.device)
    with torch.no_grad():
        # At the ends of this interval all that can be kept is kept, or nothing is.
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


def disagreement(chosen, other, counts):
    """
    Share of the learned entries on which two choices of parameters `(L, H, K)` differ.

    Args:
        chosen, other (`torch.Tensor` of shape `(L, H, K)`): Bool.
        counts (`torch.Tensor` of shape `(K,)`): Entries that a parameter decides.
    """
    return ((chosen != other) * counts).sum().item() / max((counts.sum() * chosen[..., 0].numel()).item(), 1)


def collapsed(chosen, counts):
    """Heads whose learned entries are all kept, and all removed: two numbers, over all layers."""
    learned = chosen[..., counts > 0]
    return int(learned.all(-1).sum()), int((~learned.any(-1)).sum())
