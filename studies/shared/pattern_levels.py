"""
The patterns that O(n) Connections are Expressive Enough (arXiv 2006.04862) compares, at one or several sparsity
levels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sparsebert.masks.patterns import HEAD_CONFIGURATIONS


@dataclass
class PatternLevels:
    """
    Every pattern at several sparsity levels.

    Args:
        strides (`list[int]`): Strides w of the strided and fixed cycles.
        windows (`list[int]`): Window sizes w of the star.
        sparsities (`list[float]`): Sparsities of the random pattern.
    """

    strides: list[int] = field(default_factory=lambda: [8, 16, 32])
    windows: list[int] = field(default_factory=lambda: [4, 16, 32])
    sparsities: list[float] = field(default_factory=lambda: [0.75, 0.875, 0.95])


def pattern_cells(
    strides: Sequence[int],
    windows: Sequence[int],
    sparsities: Sequence[float],
    star: str = "star_cycle",
    dense: bool = True,
    relay: int | None = None,
) -> dict[str, dict[str, Any]]:
    """
    Make a cell for each level of each pattern: strided and fixed cycles in all head configurations, star and random.

    Source: O(n) Connections are Expressive Enough (arXiv 2006.04862), Section 5.1.
    """
    cells: dict[str, dict[str, Any]] = {}

    def add(
        series: str,
        level: float | None,
        pattern: str,
        kwargs: dict[str, float] | None,
        head_configuration: str | None = None,
    ) -> None:
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
        if relay is not None:
            add("star_relay", window, "star_cycle", {"window_size": window, "relay": relay})
    for sparsity in sparsities:
        add("random", sparsity, "random", {"sparsity": sparsity})
    return cells
