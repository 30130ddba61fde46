"""Means, deviations and the paired bootstrap."""

from math import inf

import numpy as np
import pytest

from sparsebert.analysis.statistics import (
    compare_seeds,
    holm,
    mean_text,
    paired_bootstrap,
    paired_difference,
    summarize,
)


def accuracy(predictions, references):
    return float(np.mean(predictions == references))


def test_mean_and_sample_deviation():
    assert summarize([1.0, 2.0, 6.0]) == {"mean": 3.0, "std": pytest.approx(7**0.5)}
    assert summarize([2.0]) == {"mean": 2.0}


def test_equal_systems_do_not_differ():
    system = [[0, 1, 1, 0], [1, 1, 0, 0]]
    result = paired_bootstrap(accuracy, system, system, [0, 1, 0, 1])
    assert result["difference"] == 0 and result["interval"] == [0, 0] and result["num_seeds"] == 2


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


def test_resampling_is_reproducible():
    ours, theirs, references = np.random.default_rng(2).integers(2, size=(3, 200)).tolist()
    first, again, other = (paired_bootstrap(accuracy, [ours], [theirs], references, 100, seed) for seed in (3, 3, 4))
    assert first == again and first["interval"] != other["interval"]


def test_texts_and_lists_can_be_resampled():
    """Answers as in SQuAD: texts against lists of texts, also when all lists are equally long."""

    def metric(predictions, references):
        return float(np.mean([text in answers for text, answers in zip(predictions, references, strict=True)]))

    references = [["a", "b"], ["c", "d"], ["e", "f"]]
    result = paired_bootstrap(metric, [["a", "d", "x"]], [["x", "x", "x"]], references)
    assert result["difference"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    "ours, theirs", [([[0, 1]], [[0, 1], [1, 1]]), ([[0, 1, 1]], [[0, 1, 1]])], ids=["seeds", "examples"]
)
def test_systems_that_cannot_be_paired(ours, theirs):
    with pytest.raises(ValueError, match="the same seeds and examples"):
        paired_bootstrap(accuracy, ours, theirs, [0, 1])


def test_paired_difference_is_students():
    ours, theirs = [3.0, 5.0, 4.0], [1.0, 2.0, 3.0]
    found = paired_difference(ours, theirs)
    half = 4.302653 * 1 / 3**0.5  # t of two degrees of freedom; the differences 2, 3 and 1 have the deviation 1
    assert found["difference"] == 2
    assert (found["low"], found["high"]) == pytest.approx((2 - half, 2 + half), abs=1e-4)
    assert found["p"] == pytest.approx(0.0742, abs=1e-4)
    with pytest.raises(ValueError, match="two or more pairs, got 1 and 1"):
        paired_difference([1.0], [2.0])
    same = paired_difference([0.5, 0.6, 0.75], [0.4, 0.5, 0.65])
    assert same["difference"] == pytest.approx(0.1) and (same["low"], same["high"], same["p"]) == (-inf, inf, 1.0)
    assert paired_difference([1.0, 2.0], [1.0, 2.0])["p"] == 1.0


def test_pairs_that_are_equal_do_not_differ():
    same = {1: 0.5, 2: 0.75, 3: 0.25}
    assert paired_difference([0.5, 0.75], [0.5, 0.75]) == {"difference": 0, "low": 0, "high": 0, "p": 1}
    compared = compare_seeds({"same": (same, same), "other": ({1: 3.0, 2: 5.0, 3: 4.0}, same)}, 2)
    assert compared["same"] == ("+0.00 [+0.00, +0.00]", "1") and "nan" not in compared["other"][1]


def test_one_seed_has_no_interval():
    assert compare_seeds({"one": ({1: 0.5}, {1: 0.25}), "none": ({1: 0.5}, {2: 0.25})}, 2) == {}
    assert mean_text([0.5], 2) == "0.50"


def test_holm():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0] and holm([]) == []
