"""How systems of an experiment are compared: paired differences over seeds with intervals, and their correction."""

import math
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from scipy import stats

from sparsebert.analysis.statistics import CONFIDENCE, summarize


Key = TypeVar("Key", bound=Hashable)
# Note of tables with the results of `compare_seeds`.
COMPARED = "difference: paired t interval of 95 %, not corrected; p: two-sided, corrected by Holm for this table"


def paired_difference(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """
    Difference of two systems that ran with the same seeds, by Student's t test for pairs.

    `"difference"` is the mean of ours minus theirs, `"low"` and `"high"` are its 95 % interval, `"p"` is two-sided. If
    all differences are equal but not 0, as can happen with a small test set, nothing is known about their spread: the
    interval is infinite, and p is 1.
    """
    if len(ours) != len(theirs) or len(ours) < 2:
        raise ValueError(f"a paired test needs two or more pairs, got {len(ours)} and {len(theirs)} numbers")
    if all(a == b for a, b in zip(ours, theirs, strict=True)):
        return {"difference": 0.0, "low": 0.0, "high": 0.0, "p": 1.0}
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    if max(differences) - min(differences) <= 1e-9 * max(map(abs, (*ours, *theirs))):
        return {"difference": statistics.fmean(differences), "low": -math.inf, "high": math.inf, "p": 1.0}
    test = stats.ttest_rel(ours, theirs)
    interval = test.confidence_interval(CONFIDENCE)
    return {
        "difference": statistics.fmean(differences),
        "low": float(interval.low),
        "high": float(interval.high),
        "p": float(test.pvalue),
    }


def holm(p_values: Sequence[float]) -> list[float]:
    """P values corrected for their number (Holm, 1979, A simple sequentially rejective multiple test procedure)."""
    order = np.argsort(p_values)
    factors = len(p_values) - np.arange(len(p_values))
    corrected = np.maximum.accumulate(np.asarray(p_values, dtype=float)[order] * factors).clip(max=1.0)
    result = np.empty(len(p_values))
    result[order] = corrected
    return result.tolist()


def compare_seeds(
    pairs: Mapping[Key, tuple[Mapping[int, float], Mapping[int, float]]], digits: int
) -> dict[Key, tuple[str, str]]:
    """
    Compare systems over the seeds that they share, as texts for a table.

    For each pair of numbers by seed: the difference (first minus second) with its interval, and P corrected for all of
    these comparisons. Pairs with fewer than two shared seeds are left out.
    """
    tests = {}
    for key, (ours, theirs) in pairs.items():
        shared = sorted(ours.keys() & theirs.keys())
        if len(shared) > 1:
            tests[key] = paired_difference([ours[seed] for seed in shared], [theirs[seed] for seed in shared])
    corrected = holm([test["p"] for test in tests.values()])
    return {
        key: ("{difference:+.{0}f} [{low:+.{0}f}, {high:+.{0}f}]".format(digits, **test), f"{p:.3g}")
        for (key, test), p in zip(tests.items(), corrected, strict=True)
    }


def mean_text(values: Iterable[float], digits: int) -> str:
    """Mean and, for two or more values, deviation as text: `"0.951 ± 0.004"`."""
    summary = summarize(list(values))
    deviation = f" ± {summary['std']:.{digits}f}" if "std" in summary else ""
    return f"{summary['mean']:.{digits}f}{deviation}"
