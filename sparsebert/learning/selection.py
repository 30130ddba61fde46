"""
Choosing the parameters of a search that the mask keeps: by a threshold, to a sparsity, or those left after pruning.

Letters: L layers (1 when shared), H heads, n mask length, K learned parameters per head, R rows, P the keep
probability.
"""

import torch

from .decided_entries import DecidedEntries, TiedEntries


# Where a sparsity is met: in every head, or over all heads and layers together.
SCOPES = ("head", "global")


def check_selection(threshold: float | None, sparsity: float | None) -> None:
    """Check the threshold or the sparsity that a mask is selected by: one of them, in [0, 1)."""
    for name, value in (("threshold", threshold), ("sparsity", sparsity)):
        if value is not None and not (isinstance(value, (int, float)) and 0 <= value < 1):
            raise ValueError(f"{name} must be in [0, 1), got {value!r}")
    if threshold is not None and sparsity is not None:
        raise ValueError(f"threshold {threshold} and sparsity {sparsity} exclude each other: give one of them")


def select(
    probs: torch.Tensor,
    entries: DecidedEntries,
    fixed: int,
    threshold: float = 0.5,
    sparsity: float | None = None,
    *,
    length: int,
    scope: str = "head",
) -> torch.Tensor:
    """
    Choose the parameters to keep, bool `(L, H, K)`: those with P above `threshold`, or the largest P, so that the
    fraction of the `length`^2 entries that is removed is as near as possible to `sparsity`. `fixed` entries per head
    are always on.
    """
    if sparsity is None:
        return probs > threshold
    return keep_largest(probs, entries, (1.0 - sparsity) * length**2 - fixed, scope)


def keep_largest(
    scores: torch.Tensor, entries: DecidedEntries, budget: float | torch.Tensor, scope: str = "head"
) -> torch.Tensor:
    """
    Choose the parameters with the largest scores `(L, H, K)`, so many that they keep as near as possible to `budget`
    entries per head; with the scope `"global"` all heads together, with the budget of all.
    """
    joint = scope == "global"
    rank = _rank(scores.flatten() if joint else scores).view_as(scores)
    heads = scores[..., 0].numel() if joint else 1
    return rank < entries.nearest_number(rank, heads * budget, joint)


def keep_shares(scores: torch.Tensor, entries: DecidedEntries, budgets: torch.Tensor) -> torch.Tensor:
    """
    Choose the parameters with the largest scores `(L, H, K)` of each head, so many that they keep as near as possible
    to its budget `(L, H, 1)`; and one more or one less in the heads where that costs least, so that all heads together
    keep as near as possible to the sum of the budgets.
    """
    rank = _rank(scores)
    number = entries.nearest_number(rank, budgets, joint=False)
    kept = entries.kept(rank < number)[..., None]
    missing = (budgets - kept).sum()
    other = number + missing.sign().long()
    gain = entries.kept(rank < other)[..., None] - kept
    cost = (budgets - kept - gain).abs() - (budgets - kept).abs()
    order = cost.flatten().argsort(stable=True)
    gains = torch.nn.functional.pad(gain.flatten()[order].cumsum(0), (1, 0))
    changed = order.argsort() < (gains - missing).abs().argmin()
    return rank < torch.where(changed.view_as(number), other, number)


def _rank(scores):
    """The order of the scores along the last dimension, from 0 for the largest."""
    return scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1, stable=True)


def best_of_rows(scores: torch.Tensor, index: torch.Tensor, fixed: torch.Tensor) -> torch.Tensor:
    """
    The parameters of each row's best entry, bool `(L, H, K)`, for rows that no fixed entry keeps from being empty.
    `index` `(n, n)` or `(n, n, 3)` has the parameters of each entry; `fixed` `(n, n)` is 1 where an entry is always
    on, 0 where always off, and -1 where learned.
    """
    rows = ~(fixed == 1).any(-1)
    index = index.view(*fixed.shape, -1)
    index = torch.where(fixed[..., None] == -1, index, scores.shape[-1])[rows].flatten(1)  # (R, n) or (R, 3n)
    if not len(index):
        return torch.zeros_like(scores, dtype=torch.bool)
    padded = torch.nn.functional.pad(scores, (0, 1), value=-torch.inf)
    columns = padded[..., index].argmax(-1)  # (L, H, R)
    best = index[torch.arange(len(index)), columns]
    return torch.zeros_like(padded, dtype=torch.bool).scatter_(-1, best, True)[..., :-1]


def prune(
    kept: torch.Tensor,
    scores: torch.Tensor,
    index: torch.Tensor,
    fixed: torch.Tensor,
    sparsity: float,
    scope: str = "head",
    empty_rows: bool = False,
    entries: DecidedEntries | None = None,
) -> torch.Tensor:
    """
    Remove the parameters with the lowest scores, of those that are `kept` `(L, H, K)`, until a sparsity of the `n^2`
    entries is reached in every head, or on average with the scope `"global"`. `index` and `fixed` are those of
    [`best_of_rows`], `entries` by default those of `index`, one parameter each.
    """
    if entries is None:
        entries = TiedEntries(index[fixed == -1].bincount(minlength=scores.shape[-1]))
    budget = (1.0 - sparsity) * fixed.numel() - (fixed == 1).sum().item()
    scores = scores.masked_fill(~kept, -torch.inf)
    needed = torch.zeros_like(kept) if empty_rows else best_of_rows(scores, index, fixed)
    scores = scores.masked_fill(needed, torch.inf)
    chosen = keep_largest(scores, entries, budget, scope)
    return (chosen | needed) & kept
