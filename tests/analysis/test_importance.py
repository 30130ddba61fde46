"""Groups, profile, intervals and sketch hold the right means."""

import json

import numpy as np
import pytest
import torch
from scipy import stats

from sparsebert.analysis.importance import (
    analyzed_special_tokens,
    as_runs,
    estimate,
    head_groups,
    offset_profile,
    position_groups,
    sketch,
)
from sparsebert.masks.expansion import toeplitz_index
from sparsebert.masks.sparse_mask import SPECIAL_TOKENS, SparseMask


def framed(length):
    """P is a hundredth of the offset, 1 in the rows and columns of the special tokens."""
    probs = toeplitz_index(length).float().div(100)
    probs[[0, -1]] = 1.0
    probs[:, [0, -1]] = 1.0
    return probs


def test_groups_by_hand():
    probs = framed(12).repeat(2, 1, 1)
    # Offset d occurs 2 (10 - d) times among the 10 inner tokens, the diagonal 10 times.
    expected = {
        "diagonal": 0.0,
        "offset_1": 0.01,
        "offsets_2_3": (8 * 0.02 + 7 * 0.03) / 15,
        "offsets_4_8": (6 * 0.04 + 5 * 0.05 + 4 * 0.06 + 3 * 0.07 + 2 * 0.08) / 20,
        "beyond_8": 0.09,
        "special_tokens": 1.0,
    }
    assert position_groups(probs, "first_last") == pytest.approx(expected)
    # A head more, all zero, halves the means of one.
    assert position_groups(torch.stack([probs[0], 0 * probs[0]]))["special_tokens"] == pytest.approx(0.5)
    json.dumps(position_groups(probs))
    # Groups without positions are left out.
    assert list(position_groups(torch.ones(1, 4, 4), "none")) == ["diagonal", "offset_1", "offsets_2_3"]
    assert list(position_groups(torch.ones(1, 2, 2), "first_last")) == ["special_tokens"]


def test_groups_partition_the_matrix():
    probs = torch.rand(3, 15, 15, generator=torch.Generator().manual_seed(0))
    probs[:, 0] = probs[:, :, 0] = 0.25
    groups = position_groups(probs, "first")
    assert groups["special_tokens"] == pytest.approx(0.25)
    sizes = {"diagonal": 14, "offset_1": 26, "offsets_2_3": 46, "offsets_4_8": 80, "beyond_8": 30}
    total = sum(size * groups[name] for name, size in sizes.items()) + (15 * 15 - sum(sizes.values())) * 0.25
    assert total == pytest.approx(probs.sum(dtype=torch.float64).item() / 3)


def test_each_head_has_its_own_means():
    probs = torch.rand(2, 3, 4, 20, 20)
    groups = head_groups(probs)
    assert list(groups) == ["diagonal", "offset_1", "offset_2", "offset_3", "others", "special_tokens"]
    inner = probs[1, 2, 3, 1:-1, 1:-1]
    assert groups["diagonal"][1, 2, 3] == pytest.approx(inner.diagonal().mean().item())
    assert groups["others"][1, 2, 3] == pytest.approx(inner[toeplitz_index(18) > 3].mean().item())
    offsets, profile = offset_profile(probs)
    assert offsets.tolist() == list(range(18))
    assert profile.shape == (2, 3, 4, 18)
    np.testing.assert_allclose(profile[..., 2], groups["offset_2"])
    signed, sides = offset_profile(probs, signed=True)
    assert signed.tolist() == list(range(-17, 18))
    for place in (0, 15, 17, 20):  # a diagonal of torch has the offset j - i
        mean = probs[..., 1:-1, 1:-1].diagonal(17 - place, -2, -1).mean(-1)
        np.testing.assert_allclose(sides[..., place], mean, rtol=1e-5)


def test_shapes():
    assert as_runs(torch.ones(4, 5, 5)).shape == (1, 1, 4, 5, 5)
    assert as_runs(torch.ones(2, 4, 5, 5)).shape == (1, 2, 4, 5, 5)
    for probs in (torch.ones(5, 5), torch.ones(2, 5, 6), torch.ones(0, 5, 5)):
        with pytest.raises(ValueError, match="probs must have shape"):
            as_runs(probs)
    with pytest.raises(ValueError, match="special_tokens must be one of"):
        position_groups(torch.rand(1, 4, 4), "last")
    with pytest.raises(ValueError, match="no position outside special_tokens"):
        offset_profile(torch.rand(1, 2, 2))


def test_intervals_are_those_of_t():
    values = np.random.default_rng(0).uniform(0.4, 0.6, (3, 4))
    number = estimate(values)
    assert number["mean"] == pytest.approx(values.mean())
    heads = stats.ttest_1samp(values.ravel(), 0.5).confidence_interval(0.95)
    np.testing.assert_allclose(number["over_heads"], heads)
    seeds = stats.ttest_1samp(values.mean(1), 0.5).confidence_interval(0.95)
    np.testing.assert_allclose(number["over_seeds"], seeds)

    assert set(estimate(values[:1])) == {"mean", "over_heads"}
    assert set(estimate(values[:1, :1])) == {"mean"}
    np.testing.assert_allclose(estimate(np.array([[0.0, 1.0]]))["over_heads"], [0, 1])  # cut
    np.testing.assert_allclose(estimate(np.ones((1, 4)))["over_heads"], [1, 1])


@pytest.mark.parametrize("special_tokens", ["none", "first", "first_last"])
def test_sketch_of_its_own_length_is_the_same(special_tokens):
    probs = torch.rand(2, 16, 16)
    torch.testing.assert_close(sketch(probs, special_tokens), probs)


@pytest.mark.parametrize("length", [17, 40, 128])
def test_sketch_keeps_diagonal_neighbors_and_special_tokens(length):
    probs = toeplitz_index(length).float()
    probs[[0, -1]] = probs[:, [0, -1]] = -1.0
    cells = sketch(probs)
    assert (cells[[0, -1]] == -1).all() and (cells[:, [0, -1]] == -1).all()
    inner = cells[1:-1, 1:-1]
    index = toeplitz_index(14)
    for offset in range(4):
        assert (inner[index == offset] == offset).all()
    # Beyond, longer offsets in longer cells, up to the longest.
    means = [inner[index == offset].mean() for offset in range(14)]
    assert means == sorted(means)
    torch.testing.assert_close(cells, cells.T)
    assert (length - 3) - 1.3 * length / 10 <= means[-1] <= length - 3
    # What attends only early in the sequence does so in the sketch.
    early = torch.zeros(128, 128)
    early[1:64, 1:64] = 1.0
    cells = sketch(early)
    assert (cells[1:8, 1:8].diagonal() == 1).all() and (cells[8:-1, 8:-1] == 0).all()


def test_the_last_token_counts_as_special_unless_a_decoder_learned_it():
    keep = torch.ones(1, 1, 8, dtype=torch.bool)
    found = {
        name: analyzed_special_tokens(SparseMask(keep, 8, "offsets", special_tokens=name)) for name in SPECIAL_TOKENS
    }
    assert found == {"none": "first_last", "first": "first", "first_last": "first_last"}
