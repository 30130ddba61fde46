"""Classical patterns at a given sparsity."""

import pytest

from sparsebert.masks.matched import VARIED, matched_patterns
from sparsebert.masks.patterns import PATTERNS, build_pattern


# Strided patterns have a limited sparsity, and logsparse has no parameter.
COARSE = {"logsparse", "strided", "fixed", "strided_cycle", "fixed_cycle"}


@pytest.mark.parametrize("sparsity", [0.75, 0.9])
def test_sparsity_is_the_nearest(sparsity):
    masks = matched_patterns(sparsity, 64, 4, 2, seed=3)
    assert set(masks) == set(VARIED) <= set(PATTERNS)
    for name, mask in masks.items():
        assert (mask.num_heads, mask.length) == (4, 64)
        assert name in COARSE or abs(mask.sparsity - sparsity) < 0.02, (name, mask.sparsity)
        again = build_pattern(name, 64, 4, 2, seed=3, **mask.metadata["pattern_parameters"])
        assert again == mask
    others = [build_pattern("window", 64, 4, window_size=size, num_global_tokens=2) for size in range(64)]
    assert abs(masks["window"].sparsity - sparsity) == min(abs(other.sparsity - sparsity) for other in others)


@pytest.mark.parametrize(("arguments", "message"), [((1.2, 64), "sparsity must be"), ((0.5, 4), "length must be")])
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        matched_patterns(*arguments, 4)
