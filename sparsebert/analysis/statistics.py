"""How runs are compared: mean and deviation over seeds, paired differences with intervals, and their correction."""

import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from scipy import stats


Key = TypeVar("Key", bound=Hashable)
# Confidence level of the intervals.
_CONFIDENCE = 0.95
# Notes of tables with the results of `compare_seeds`.
COMPARED = "difference: paired t interval of 95 %, not corrected; p: two-sided, corrected by Holm for this table"


def summarize(values: Sequence[float]) -> dict[str, float]:
    """
    Mean and standard deviation of a number over runs.

    Args:
        values (`list[float]`): The number in each run, one per seed.

    Returns:
        `dict[str, float]`: `"mean"` and, for two or more values, `"std"` (of the sample, n - 1), NaN if a value is not
        finite, such as the loss of a run that diverged.
    """
    summary = {"mean": statistics.fmean(values)}
    if len(values) > 1:
        summary["std"] = statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan
    return summary


def paired_bootstrap(
    metric: Callable[[np.ndarray, np.ndarray], float],
    ours: Sequence[Sequence[Any]],
    theirs: Sequence[Sequence[Any]],
    references: Sequence[Any],
    resamples: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """
    Difference of two systems, with an interval from resampling seeds and examples jointly for both.

    Runs with the same seed are a pair, and so are predictions of the same example: the Multi-Bootstrap of
    MultiBERTs (arXiv 2106.16163). With one seed the interval says nothing about other seeds.

    Args:
        metric (`Callable[[np.ndarray, np.ndarray], float]`): Score of predictions, given the references.
        ours, theirs (`list[list]`): Predictions of each system by seed, `(num_seeds, num_examples)`.
        references (`list`): Reference of each example.
        resamples (`int`, *optional*, defaults to 1000): Number of resamples.
        seed (`int`, *optional*, defaults to 0): Seed of the resampling.

    Returns:
        `dict`: `"difference"` (ours minus theirs, mean over seeds), `"interval"` `[low, high]`, `"confidence"` and
        `"num_seeds"`.
    Raises:
        ValueError: If the systems differ in the number of seeds or examples.
    """
    sizes = {len(predictions) for predictions in (*ours, *theirs)}
    if len(ours) != len(theirs) or sizes != {len(references)}:
        raise ValueError(
            f"a paired comparison needs the same seeds and examples, got {len(ours)} and {len(theirs)} seeds and "
            f"{sorted(sizes | {len(references)})} examples"
        )
    our_runs, their_runs = ([_array(predictions) for predictions in system] for system in (ours, theirs))
    targets = _array(references)
    rng = np.random.default_rng(seed)
    num_seeds, num_examples = len(our_runs), len(targets)

    def difference(seeds: np.ndarray, examples: np.ndarray) -> float:
        gold = targets[examples]
        # A seed that was drawn twice is scored once.
        weights = np.bincount(seeds, minlength=num_seeds) / num_seeds
        pairs = ((our_runs[s][examples], their_runs[s][examples]) for s in range(num_seeds))
        return sum(w * (metric(a, gold) - metric(b, gold)) for w, (a, b) in zip(weights, pairs, strict=True) if w)

    samples = [
        difference(rng.integers(num_seeds, size=num_seeds), rng.integers(num_examples, size=num_examples))
        for _ in range(resamples)
    ]
    tail = (1 - _CONFIDENCE) / 2
    return {
        "difference": float(difference(np.arange(num_seeds), np.arange(num_examples))),
        "interval": [float(value) for value in np.quantile(samples, [tail, 1 - tail])],
        "confidence": _CONFIDENCE,
        "num_seeds": num_seeds,
    }


def paired_difference(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """
    Difference of two systems that ran with the same seeds, by Student's t test for pairs.

    Args:
        ours, theirs (`list[float]`): A number of each system by seed, two or more.

    Returns:
        `dict[str, float]`: `"difference"` (ours minus theirs, mean over seeds), `"low"` and `"high"` of its 95 %
        interval, and `"p"` of the two-sided test. For pairs that are all equal: 0, 0, 0 and 1. If all differences are
        equal but not 0, as can happen with a small test set, nothing is known about their spread: the interval is
        infinite, and p is 1.
    Raises:
        ValueError: If there are fewer than two pairs.
    """
    if len(ours) != len(theirs) or len(ours) < 2:
        raise ValueError(f"a paired test needs two or more pairs, got {len(ours)} and {len(theirs)} numbers")
    if all(a == b for a, b in zip(ours, theirs, strict=True)):
        return {"difference": 0.0, "low": 0.0, "high": 0.0, "p": 1.0}
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    if max(differences) - min(differences) <= 1e-9 * max(map(abs, (*ours, *theirs))):
        return {"difference": statistics.fmean(differences), "low": -math.inf, "high": math.inf, "p": 1.0}
    test = stats.ttest_rel(ours, theirs)
    interval = test.confidence_interval(_CONFIDENCE)
    return {
        "difference": statistics.fmean(differences),
        "low": float(interval.low),
        "high": float(interval.high),
        "p": float(test.pvalue),
    }


def holm(p_values: Sequence[float]) -> list[float]:
    """
    P values corrected for the number of comparisons.

    Args:
        p_values (`list[float]`): One per comparison.

    Returns:
        `list[float]`: In the same order. The probability that any true hypothesis has one below alpha is at most
        alpha.

    Source: Holm (1979), A simple sequentially rejective multiple test procedure.
    """
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

    Args:
        pairs (`dict[Key, tuple[dict, dict]]`): Numbers of two systems by seed, for each comparison. Those with fewer
            than two shared seeds are left out.
        digits (`int`): Digits after the point.

    Returns:
        `dict[Key, tuple[str, str]]`: The difference (first minus second) with its interval, see [`paired_difference`],
        and P corrected for all of these comparisons, see [`holm`].
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


def _array(values: Sequence[Any]) -> np.ndarray:
    """One item per element: NumPy would make a second dimension of texts' lists."""
    if isinstance(values[0], (str, list)):
        array = np.empty(len(values), dtype=object)
        for index, value in enumerate(values):
            array[index] = value
        return array
    return np.asarray(values)
