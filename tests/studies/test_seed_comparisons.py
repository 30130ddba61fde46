"""Paired differences over seeds, and their correction."""

from math import inf

import pytest

from studies.harness.seed_comparisons import compare_seeds, holm, mean_text, paired_difference


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
