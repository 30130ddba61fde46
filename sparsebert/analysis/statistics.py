"""How runs are compared: mean and deviation over seeds, and the paired bootstrap over seeds and examples."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


# Confidence level of the intervals.
CONFIDENCE = 0.95


def summarize(values: Sequence[float]) -> dict[str, float]:
    """
    `"mean"` of a number over runs and, for two or more, `"std"` of the sample, NaN if a value is not finite, as of a
    run that diverged.
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
    Difference of two systems (ours minus theirs), with an interval from resampling seeds and examples jointly for
    both.

    Predictions are given by seed, `(num_seeds, num_examples)`. Runs with the same seed are a pair, and so are
    predictions of the same example. With one seed the interval says nothing about other seeds.

    Source: the Multi-Bootstrap of MultiBERTs (arXiv 2106.16163).
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
    tail = (1 - CONFIDENCE) / 2
    return {
        "difference": float(difference(np.arange(num_seeds), np.arange(num_examples))),
        "interval": [float(value) for value in np.quantile(samples, [tail, 1 - tail])],
        "confidence": CONFIDENCE,
        "num_seeds": num_seeds,
    }


def _array(values: Sequence[Any]) -> np.ndarray:
    """One item per element: NumPy would make a second dimension of texts' lists."""
    if isinstance(values[0], (str, list)):
        array = np.empty(len(values), dtype=object)
        for index, value in enumerate(values):
            array[index] = value
        return array
    return np.asarray(values)
