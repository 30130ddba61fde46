"""
Which positions matter: the mean of P by group of positions and by offset, confidence intervals, and a 16-token sketch.

Letters: S runs (seeds of one search), L layers, H heads, n length, K offsets, P the probability that a position is
kept (0 or 1 for a mask).
"""

from collections.abc import Mapping

import numpy as np
import torch

from ..checks import check_installed
from ..masks.expansion import parameter_index, special_entries, toeplitz_index
from ..masks.sparse_mask import SparseMask
from .statistics import CONFIDENCE


KEPT = "P, probability that the position is kept"
SKETCH_LENGTH = 16

# First and last offset of each group; None stands for the longest.
OFFSET_GROUPS: dict[str, tuple[int, int | None]] = {
    "diagonal": (0, 0),
    "offset_1": (1, 1),
    "offsets_2_3": (2, 3),
    "offsets_4_8": (4, 8),
    "beyond_8": (9, None),
}
# The paper's groups, with its neighbors one by one.
IMPORTANCE_GROUPS: dict[str, tuple[int, int | None]] = {
    "diagonal": (0, 0),
    "offset_1": (1, 1),
    "offset_2": (2, 2),
    "offset_3": (3, 3),
    "others": (4, None),
}


def as_runs(probs: torch.Tensor) -> torch.Tensor:
    """P of shape `(H, n, n)`, `(L, H, n, n)` or `(S, L, H, n, n)` as `(S, L, H, n, n)`, float32, on the CPU."""
    probs = torch.as_tensor(probs).detach().cpu().float()
    if probs.dim() not in (3, 4, 5) or probs.shape[-1] != probs.shape[-2] or 0 in probs.shape:
        raise ValueError(f"probs must have shape (H, n, n), (L, H, n, n) or (S, L, H, n, n), got {tuple(probs.shape)}")
    return probs[(None,) * (5 - probs.dim())]


def _sums_by_offset(probs, special, signed=False):
    """
    The sum of P at each offset outside the special tokens, `(S, L, H, n)`, and the number of entries, `(n,)`; 2n - 1
    of them if they are signed, from 1 - n on.
    """
    length = probs.shape[-1]
    index, size = toeplitz_index(length), length
    if signed:
        size = 2 * length - 1
        index = parameter_index("offsets", length, length, symmetric=False, size=size)
    offset = index[~special]
    # Head by head, in double precision: n^2 entries of many heads.
    sums = [torch.bincount(offset, weights=head[~special].double(), minlength=size) for head in probs.flatten(0, 2)]
    return torch.stack(sums).view(*probs.shape[:3], size).numpy(), offset.bincount(minlength=size).numpy()


def offset_profile(
    probs: torch.Tensor, special_tokens: str = "first_last", signed: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """
    The offsets `abs(i - j)`, or if `signed` `i - j`, outside the special tokens, `(K,)`, and the mean P at each, per
    head, `(S, L, H, K)`.
    """
    probs = as_runs(probs)
    length = probs.shape[-1]
    special = special_entries(length, special_tokens)
    if special.all():
        raise ValueError(f"probs of {length} tokens have no position outside special_tokens {special_tokens!r}")
    sums, counts = _sums_by_offset(probs, special, signed)
    places = counts.nonzero()[0]
    return places - (length - 1 if signed else 0), sums[..., places] / counts[places]


def head_groups(
    probs: torch.Tensor,
    special_tokens: str = "first_last",
    groups: Mapping[str, tuple[int, int | None]] = IMPORTANCE_GROUPS,
) -> dict[str, np.ndarray]:
    """
    The mean P `(S, L, H)` of each group of offsets and of `"special_tokens"`, whose rows and columns are left out of
    the others. Groups without positions are left out.

    Source: SparseBERT (arXiv 2102.12871), Section 3.1.2 and Figure 2.
    """
    probs = as_runs(probs)
    special = special_entries(probs.shape[-1], special_tokens)
    sums, counts = _sums_by_offset(probs, special)
    means: dict[str, np.ndarray] = {}
    for name, (first, last) in groups.items():
        where = slice(first, None if last is None else last + 1)
        if counts[where].any():
            means[name] = sums[..., where].sum(-1) / counts[where].sum()
    if special.any():
        means["special_tokens"] = probs[..., special].double().mean(-1).numpy()
    return means


def analyzed_special_tokens(mask: SparseMask) -> str:
    """Which tokens count as special: the first if a mask keeps that one alone, as in a decoder, or first and last."""
    return "first" if mask.special_tokens == "first" else "first_last"


def position_groups(probs: torch.Tensor, special_tokens: str = "first_last") -> dict[str, float]:
    """Means of `OFFSET_GROUPS` and `"special_tokens"` over all heads, for the metrics of a run."""
    return {name: float(values.mean()) for name, values in head_groups(probs, special_tokens, OFFSET_GROUPS).items()}


def estimate(values: np.ndarray) -> dict[str, np.ndarray]:
    """
    Mean and 95 % intervals of numbers between 0 and 1, `(S, N, ...)` of S runs with N heads each, clipped to [0, 1].

    `"over_heads"` `(2, ...)` holds the low and high ends over the heads of all runs, if there are two or more;
    `"over_seeds"` the same over the means of the runs. By Student's t: a bootstrap would be too narrow for the 4 to 12
    heads and the few seeds of a search.
    """
    check_installed("an interval", "scipy")
    from scipy import stats

    samples = {"over_heads": values.reshape(-1, *values.shape[2:]), "over_seeds": values.mean(1)}
    result = {"mean": values.mean((0, 1))}
    for name, sample in samples.items():
        size = len(sample)
        if size > 1:
            half = stats.t.ppf((1 + CONFIDENCE) / 2, size - 1) * stats.sem(sample, axis=0)
            result[name] = np.clip([result["mean"] - half, result["mean"] + half], 0, 1)
    return result


def sketch(probs: torch.Tensor, special_tokens: str = "first_last") -> torch.Tensor:
    """
    Pool P `(..., n, n)` onto 16 tokens, `(..., 16, 16)`, without mixing the diagonal, its neighbors and special
    tokens.

    The row and column of a special token are pooled on their own. The other cells at offsets 0, 1, 2 and 3 hold
    exactly these offsets; the cells beyond share the longer offsets, and along each offset its positions, in equal
    parts. Every entry of P counts in exactly one cell, and P of 16 tokens is its own sketch.

    Source: SparseBERT (arXiv 2102.12871), Figure 2b; how it was pooled is not published.
    """
    length, num_tokens = SKETCH_LENGTH, probs.shape[-1]
    if num_tokens < length:
        raise ValueError(f"a sketch needs at least {length} tokens, got {num_tokens}")
    special = special_entries(num_tokens, special_tokens)
    first = int(special_tokens != "none")
    num_inner = num_tokens - first - (special_tokens == "first_last")
    num_cells = length - first - (special_tokens == "first_last")

    position = torch.arange(num_tokens) - first
    token_cell = (first + position * num_cells // num_inner).clamp_(0, length - 1)
    row, column = position[:, None], position[None, :]
    offset = (row - column).abs()
    cell_offset = torch.where(offset < 4, offset, 4 + (offset - 4) * (num_cells - 4) // (num_inner - 4))
    along = torch.minimum(row, column) * (num_cells - cell_offset) // (num_inner - offset).clamp(min=1)
    cell_row = torch.where(special, token_cell[:, None], first + along + cell_offset * (row > column))
    cell_column = torch.where(special, token_cell[None, :], first + along + cell_offset * (column > row))
    cell = (cell_row * length + cell_column).flatten()

    heads = torch.as_tensor(probs).detach().cpu().double().reshape(-1, num_tokens**2)
    sums = torch.stack([torch.bincount(cell, weights=head, minlength=length**2) for head in heads])
    return (sums / cell.bincount(minlength=length**2)).float().view(*probs.shape[:-2], length, length)
