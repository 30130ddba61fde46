"""Means, deviations and the paired bootstrap."""

import numpy as np
import pytest

from sparsebert.analysis.statistics import paired_bootstrap, summarize


def accuracy(predictions, references):
    return float(np.mean(predictions == references))


def test_interval_with_one_seed_is_that_of_the_mean():
    """Per-example differences of 0 and 1: the interval of their mean is the normal one."""
    rng = np.random.default_rng(1)
    references = np.zeros(400, dtype=int)
    ours, theirs = (rng.random(400) > 0.6).astype(int), (rng.random(400) > 0.4).astype(int)
    result = paired_bootstrap(accuracy, [list(ours)], [list(theirs)], list(references), resamples=4000)
    gains = (ours == 0).astype(float) - (theirs == 0)
    margin = 1.96 * gains.std() / 20
    assert result["difference"] == pytest.approx(gains.mean())
    assert result["interval"] == pytest.approx([gains.mean() - margin, gains.mean() + margin], abs=0.01)


def test_seeds_that_disagree_widen_the_interval():
    references = [0] * 200
    right, wrong = [0] * 200, [1] * 200
    chance = [0, 1] * 100
    agreed = paired_bootstrap(accuracy, [right, right], [chance, chance], references)
    disagreed = paired_bootstrap(accuracy, [right, wrong], [chance, chance], references)
    assert agreed["interval"][0] > 0.4
    assert disagreed["difference"] == 0 and disagreed["interval"][0] < -0.4 and disagreed["interval"][1] > 0.4


def test_texts_and_lists_can_be_resampled():
    """Answers as in SQuAD: texts against lists of texts, also when all lists are equally long."""

    def metric(predictions, references):
        return float(np.mean([text in answers for text, answers in zip(predictions, references, strict=True)]))

    references = [["a", "b"], ["c", "d"], ["e", "f"]]
    result = paired_bootstrap(metric, [["a", "d", "x"]], [["x", "x", "x"]], references)
    assert result["difference"] == pytest.approx(2 / 3)


def test_summaries_and_pairs():
    assert summarize([1.0, 2.0, 6.0]) == {"mean": 3.0, "std": pytest.approx(7**0.5)}
    assert summarize([2.0]) == {"mean": 2.0}
    system = [[0, 1, 1, 0], [1, 1, 0, 0]]
    result = paired_bootstrap(accuracy, system, system, [0, 1, 0, 1])
    assert result["difference"] == 0 and result["interval"] == [0, 0] and result["num_seeds"] == 2
    for ours, theirs in (([[0, 1]], [[0, 1], [1, 1]]), ([[0, 1, 1]], [[0, 1, 1]])):
        with pytest.raises(ValueError, match="the same seeds and examples"):
            paired_bootstrap(accuracy, ours, theirs, [0, 1])
    ours, theirs, references = np.random.default_rng(2).integers(2, size=(3, 200)).tolist()
    first, again, other = (paired_bootstrap(accuracy, [ours], [theirs], references, 100, seed) for seed in (3, 3, 4))
    assert first == again and first["interval"] != other["interval"]
