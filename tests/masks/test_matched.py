"""Classical patterns at a given sparsity."""

import pytest

from sparsebert.masks.matched import VARIED, matched_pattern, matched_patterns
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


STRIDES = [{"stride": stride} for stride in range(2, 101)]
WINDOWS = [{"window_size": size} for size in range(100)]
CANDIDATES = {
    "strided": STRIDES, "fixed": STRIDES, "strided_cycle": STRIDES, "fixed_cycle": STRIDES,
    "star": WINDOWS[1:50], "star_cycle": WINDOWS[1:50],
    "bigbird": [{**size, "num_random_keys": size["window_size"] + more} for size in WINDOWS[:50] for more in range(3)],
    "longformer": [
        {**size, "num_global_tokens": size["window_size"] + more} for size in WINDOWS[:50] for more in range(3)
    ],
    "window": [{**size, "num_global_tokens": 2} for size in WINDOWS],
}  # fmt: skip


@pytest.mark.parametrize("name", CANDIDATES)
def test_no_other_parameters_come_nearer(name):
    sparsities = [build_pattern(name, 100, 1, 2, **parameters).sparsity for parameters in CANDIDATES[name]]
    for sparsity in (0.0, 0.3, 0.6, 0.85, 0.9, 0.97, 1.0):
        found = abs(matched_pattern(name, sparsity, 100, 1, 2).sparsity - sparsity)
        nearest = min(abs(other - sparsity) for other in sparsities)
        assert found <= nearest + 0.002 * ("stride" in CANDIDATES[name][0]), sparsity


@pytest.mark.parametrize(("arguments", "message"), [((1.2, 64), "sparsity must be"), ((0.5, 4), "length must be")])
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        matched_patterns(*arguments, 4)
