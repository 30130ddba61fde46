"""The patterns that [O] compares, at one or several sparsity levels."""

from dataclasses import dataclass

from ..masks.patterns import HEAD_CONFIGURATIONS


@dataclass
class PatternLevels:
    """
    Every pattern at several sparsity levels.

    Args:
        strides (`list` of `int`): w of the strided and fixed cycles.
        windows (`list` of `int`): w of the star.
        sparsities (`list` of `float`): Of the random pattern.
    """

    strides: list = (8, 16, 32)
    windows: list = (4, 16, 32)
    sparsities: list = (0.75, 0.875, 0.95)


def pattern_cells(strides, windows, sparsities, star="star_cycle", dense=True):
    """
    Strided and fixed cycles in the three head configurations, star, random, and dense.

    Args:
        strides (`list` of `int`): w of the cycles.
        windows (`list` of `int`): w of the star.
        sparsities (`list` of `float`): Fractions removed at random.
        star (`str`): Which pattern the star is.
        dense (`bool`): Whether to have a cell without a mask.

    Returns:
        `dict[str, dict]`: By name of the cell, `"series"` (the pattern, whatever its level), `"pattern"`,
        `"pattern_kwargs"` and `"head_configuration"`.
    Source: O(n) Connections are Expressive Enough (arXiv 2006.04862), Section 5.1.
    """
    cells = {}

    def add(series, level, pattern, kwargs, head_configuration=None):
        cells[f"{series}_{level}" if level is not None else series] = {
            "series": series,
            "pattern": pattern,
            "pattern_kwargs": kwargs,
            "head_configuration": head_configuration,
        }

    if dense:
        add("dense", None, "dense", None)
    for pattern in ("strided", "fixed"):
        for configuration in sorted(HEAD_CONFIGURATIONS, reverse=True):
            for stride in strides:
                add(f"{pattern}_{configuration}", stride, f"{pattern}_cycle", {"stride": stride}, configuration)
    for window in windows:
        add("star", window, star, {"window_size": window})
    for sparsity in sparsities:
        add("random", sparsity, "random", {"sparsity": sparsity})
    return cells
