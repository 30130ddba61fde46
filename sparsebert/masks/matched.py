"""Patterns at a given sparsity, to compare with a learned mask at equal cost."""

import math
from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from typing import Any

from ..checks import check_choice, check_range
from .patterns import build_pattern
from .sparse_mask import SparseMask


def _strides(first):
    """All strides from the one that keeps the least: below it, each step changes far more."""
    return lambda length, _: [[{"stride": stride} for stride in range(first(length), length + 1)]]


def _windows(length, _):
    return [[{"window_size": size} for size in range(1, length // 2)]]


def _windows_and(name):
    return lambda length, _: [
        [{"window_size": size, name: min(size + more, length)} for size in range(length // 2)] for more in range(3)
    ]


# The parameters to try for each sparse pattern, given the length and the sparsity; others keep their defaults. In a
# series, each entry keeps more than the one before it, except for dips of about 1 / length.
VARIED: dict[str, Callable[[int, float], list[list[dict[str, Any]]]]] = {
    "strided": _strides(lambda length: math.isqrt(length // 2)),
    "fixed": _strides(math.isqrt),
    "logsparse": lambda length, _: [[{}]],
    "star": _windows,
    "bigbird": _windows_and("num_random_keys"),
    "longformer": _windows_and("num_global_tokens"),
    "window": lambda length, _: [[{"window_size": size, "num_global_tokens": 2} for size in range(length)]],
    "random": lambda length, sparsity: [[{"sparsity": sparsity}]],
    "strided_cycle": _strides(math.isqrt),
    "fixed_cycle": _strides(math.isqrt),
    "star_cycle": _windows,
}
# How many neighbors in a series are tried too, because of the dips.
_NEIGHBORS = 3
# Note of tables that show them.
MATCHED = "manual masks: with the parameters that come nearest to the sparsity; window: first and last token global"


def matched_patterns(
    sparsity: float, length: int, num_heads: int, num_layers: int = 1, seed: int = 0
) -> dict[str, SparseMask]:
    """
    Every pattern of `VARIED`, by name, with the parameters that come nearest to a sparsity, which `logsparse` has none
    for.
    """
    return {name: matched_pattern(name, sparsity, length, num_heads, num_layers, seed) for name in VARIED}


def matched_pattern(
    name: str, sparsity: float, length: int, num_heads: int, num_layers: int = 1, seed: int = 0
) -> SparseMask:
    """A pattern of `VARIED` with the parameters that come nearest to a sparsity, at a length of at least 8."""
    check_choice("pattern", name, tuple(VARIED))
    check_range("sparsity", sparsity, 0, 1, kinds=(int, float))
    check_range("length", length, 8)
    # One head is enough to choose by: the heads of a random pattern differ only a little.
    found: list[tuple[float, dict[str, Any]]] = []
    for series in VARIED[name](length, sparsity):

        @cache
        def density(index, series=series):
            return build_pattern(name, length, 1, num_layers, seed=seed, **series[index]).density

        middle = bisect_left(range(len(series)), 1 - sparsity, key=density)
        near = range(max(middle - _NEIGHBORS, 0), min(middle + _NEIGHBORS, len(series)))
        found += [(abs(density(index) - (1 - sparsity)), series[index]) for index in near]
    nearest = min(found, key=lambda pair: pair[0])[1]
    return build_pattern(name, length, num_heads, num_layers, seed=seed, **nearest)
