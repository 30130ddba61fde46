"""
Which positions matter: means of P by group of positions and by offset, their intervals, and the sketch at 16 tokens.

Letters: S runs (seeds of one search), L layers, H heads, n length, K offsets, P the probability that a position is
kept (a mask is the case of 0 and 1).
"""

import numpy as np
import torch
from scipy import stats

from ..masks.expansion import toeplitz_index
from ..masks.sparse_mask import special_entries


CONFIDENCE = 0.95
SKETCH_LENGTH = 16

# First and last offset of each group; None is the longest.
OFFSET_GROUPS = {
    "diagonal": (0, 0),
    "offset_1": (1, 1),
    "offsets_2_3": (2, 3),
    "offsets_4_8": (4, 8),
    "beyond_8": (9, None),
}
# Those of the importance analysis: the paper's, its neighbours one by one.
IMPORTANCE_GROUPS = {
    "diagonal": (0, 0),
    "offset_1": (1, 1),
    "offset_2": (2, 2),
    "offset_3": (3, 3),
    "others": (4, None),
}


def as_runs(probs):
    """
    P as `(S, L, H, n, n)`, float32, on the CPU.

    Args:
        probs (`torch.Tensor`): `(H, n, n)`, `(L, H, n, n)` or `(S, L, H, n, n)`.
    Raises:
        ValueError: If it has another shape.
    """
    probs = torch.as_tensor(probs).detach().cpu().float()
    if probs.dim() not in (3, 4, 5) or probs.shape[-1] != probs.shape[-2] or 0 in probs.shape:
        raise ValueError(f"probs must have shape (H, n, n), (L, H, n, n) or (S, L, H, n, n), got {tuple(probs.shape)}")
    return probs[(None,) * (5 - probs.dim())]


def _sums_by_offset(probs, special):
    """Per head the sum of P at each offset outside the special tokens, `(S, L, H, n)`, and their number `(n,)`."""
    length = probs.shape[-1]
    offset = toeplitz_index(length)[~special]
    # Head by head, in double precision: n^2 entries of many heads.
    sums = [torch.bincount(offset, weights=head[~special].double(), minlength=length) for head in probs.flatten(0, 2)]
    return torch.stack(sums).view(*probs.shape[:3], length).numpy(), offset.bincount(minlength=length).numpy()


def offset_profile(probs, special_tokens="first_last"):
    """
    Mean P at each offset `abs(i - j)`, per head.

    Args:
        probs (`torch.Tensor`): As [`as_runs`].
        special_tokens (`str`, *optional*, defaults to `"first_last"`): Tokens whose rows and columns are left out:
            `"none"`, `"first"` or `"first_last"`.

    Returns:
        `tuple` of two `np.ndarray`: the offsets `(K,)`, int64, and the means `(S, L, H, K)`, float64.
    Raises:
        ValueError: If `probs` has another shape, `special_tokens` is unknown, or these tokens are all there is.
    """
    probs = as_runs(probs)
    length = probs.shape[-1]
    special = special_entries(length, special_tokens)
    if special.all():
        raise ValueError(f"probs of {length} tokens have no position outside special_tokens {special_tokens!r}")
    sums, counts = _sums_by_offset(probs, special)
    offsets = counts.nonzero()[0]
    return offsets, sums[..., offsets] / counts[offsets]


def head_groups(probs, special_tokens="first_last", groups=IMPORTANCE_GROUPS):
    """
    Mean P of each group of positions, per head.

    Args:
        probs (`torch.Tensor`): As [`as_runs`].
        special_tokens (`str`, *optional*, defaults to `"first_last"`): `"none"`, `"first"` or `"first_last"`; their
            rows and columns are a group of their own and are left out of the others.
        groups (`dict[str, tuple]`, *optional*): First and last offset of each.

    Returns:
        `dict[str, np.ndarray]`: The names of `groups` and `special_tokens`, each `(S, L, H)`, float64; a group without
        positions is left out.
    Raises:
        ValueError: If `probs` has another shape or `special_tokens` is unknown.
    Source: SparseBERT (arXiv 2102.12871), Section 3.1.2 and Figure 2.
    """
    probs = as_runs(probs)
    special = special_entries(probs.shape[-1], special_tokens)
    sums, counts = _sums_by_offset(probs, special)
    means = {}
    for name, (first, last) in groups.items():
        where = slice(first, None if last is None else last + 1)
        if counts[where].any():
            means[name] = sums[..., where].sum(-1) / counts[where].sum()
    if special.any():
        means["special_tokens"] = probs[..., special].double().mean(-1).numpy()
    return means


def position_groups(probs, special_tokens="first_last"):
    """
    Mean P over heads of the diagonal, of near and far offsets, and of the special tokens, for the metrics of a run.

    Args:
        probs, special_tokens: As [`head_groups`].

    Returns:
        `dict[str, float]` with `diagonal`, `offset_1`, `offsets_2_3`, `offsets_4_8`, `beyond_8` and `special_tokens`;
        a group without positions is left out.
    Raises:
        ValueError: As [`head_groups`].
    """
    return {name: float(values.mean()) for name, values in head_groups(probs, special_tokens, OFFSET_GROUPS).items()}


def estimate(values):
    """
    Mean and 95 % intervals of one or many numbers between 0 and 1: Student's t, cut at 0 and 1.

    Not a bootstrap, which is too narrow for the 4 to 12 heads and the few seeds of a search.

    Args:
        values (`np.ndarray`): `(S, N, ...)`: S runs of N heads each.

    Returns:
        `dict`: `"mean"` `(...)`; `"over_heads"`, `(2, ...)`, low and high, if there are two heads or more (those of
        all runs are one sample); `"over_seeds"`, the same of the means of the runs, if there are two runs or more.
    """
    samples = {"over_heads": values.reshape(-1, *values.shape[2:]), "over_seeds": values.mean(1)}
    result = {"mean": values.mean((0, 1))}
    for name, sample in samples.items():
        size = len(sample)
        if size > 1:
            half = stats.t.ppf((1 + CONFIDENCE) / 2, size - 1) * stats.sem(sample, axis=0)
            result[name] = np.clip([result["mean"] - half, result["mean"] + half], 0, 1)
    return result


def sketch(probs, special_tokens="first_last", length=SKETCH_LENGTH):
    """
    P pooled onto a few tokens so that diagonal, neighbours and special tokens stay what they are.

    Pooling square tiles would mix the diagonal with its neighbours. Here the row and column of a special token are
    pooled alone. Of the other cells those at offsets 0, 1, 2 and 3 hold these offsets and nothing else; the cells
    beyond share the longer offsets, and along each offset its positions, in equal parts. Every entry of P counts in
    exactly one cell, and P of `length` tokens is its own sketch.

    Args:
        probs (`torch.Tensor`): `(..., n, n)`.
        special_tokens (`str`, *optional*, defaults to `"first_last"`): `"none"`, `"first"` or `"first_last"`.
        length (`int`, *optional*, defaults to 16): Tokens of the sketch, 8 to n.

    Returns:
        `torch.Tensor` of shape `(..., length, length)`, float32: the mean of each cell.
    Raises:
        ValueError: If there are fewer than `length` tokens, `length` is below 8 or `special_tokens` is unknown.
    Source: SparseBERT (arXiv 2102.12871), Figure 2b; how it was pooled is not published.
    """
    num_tokens = probs.shape[-1]
    if not 8 <= length <= num_tokens:
        raise ValueError(f"length of a sketch of {num_tokens} tokens must be in [8, {num_tokens}], got {length}")
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
