"""
A bias per head and distance on every backend that has one: against softmax in float64, forward and gradients.

Letters: B batch, H heads, n tokens, d head size.
"""

from functools import partial

import pytest
import torch
from exactness import assert_as_good_as_plain, with_gradients
from test_attention import kept, serving
from test_rest import HEADS, MASKS, formula, padding_of

from sparsebert import SparseMask, sparse_dot_product_attention


NEEDS = frozenset({"distance_bias"})
NAMES = serving(needs=NEEDS)
UNTRAINED = [name for name in serving(needs=NEEDS, gradients=False) if name not in NAMES]
LENGTH = 33
EMPTY = {"keep": torch.arange(7).expand(HEADS, -1) == 6, "diagonal": False}  # rows in the middle keep no key
CASES = (
    ("none", "none", 32, torch.float32),
    ("none", "with holes", 64, torch.bfloat16),
    ("mean", "right and left", 128, torch.float32),
)
ONES = SparseMask(torch.ones(HEADS, 16).bool(), 16, "offsets")


@pytest.mark.parametrize(
    ("name", "mask"),
    [*((name, mask) for name in NAMES for mask in (*MASKS, "empty")), *((each, "table") for each in UNTRAINED)],
)
def test_equals_softmax_of_the_sum(name, mask):
    torch.manual_seed(0)
    fields = {"length": LENGTH, "form": "offsets"} | (EMPTY if mask == "empty" else MASKS[mask])
    mask, bias = SparseMask(**fields), 2 * torch.randn(HEADS, 2 * LENGTH - 1)
    for rest, padding, size, dtype in CASES if name in NAMES else CASES[1:]:
        mask = mask.replace(rest=rest, rest_bias=torch.randn(1, HEADS) if rest == "mean" else None)
        padding = padding_of(padding)
        *inputs, grad = torch.randn(4, 3, HEADS, LENGTH, size).to(dtype)
        inputs.append(bias)
        truth = partial(formula, keep=kept(mask, LENGTH, padding, batch=3), padding=padding, mask=mask)
        plain, want = (with_gradients(truth, inputs, grad, wide) for wide in (dtype, torch.float64))

        def attention(query, key, value, bias, mask=mask, padding=padding):
            return sparse_dot_product_attention(
                query, key, value, mask, padding=padding, backend=name, distance_bias=bias.float()
            )

        if name in NAMES:
            results = with_gradients(attention, inputs, grad, dtype)
        else:
            with torch.no_grad():
                results = [attention(*inputs[:3], bias.to(dtype))]
        assert_as_good_as_plain(results, plain, want)


@pytest.mark.parametrize(
    "fields", [{"form": "offsets"}, {"form": "blocks", "block_size": 16}], ids=["offsets", "blocks"]
)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("sparse_eager", "sparse_sdpa")])
def test_many_queries_at_a_time(name, fields):
    """Kernels with tiles of queries, at an odd length, with special tokens, padding and a rest."""
    torch.manual_seed(0)
    length = 117
    count = length if fields["form"] == "offsets" else 8
    keep = torch.rand(HEADS, 2 * count - 1) < 0.3
    keep[:, count - 1] = True
    bias = 2 * torch.randn(HEADS, 2 * length - 1)
    padding = torch.rand(2, length) < torch.tensor([[0.9], [1.0]])
    for rest, rows, size, dtype in (("none", True, 32, torch.float32), ("mean", False, 64, torch.bfloat16)):
        mask = SparseMask(
            keep, length, symmetric=False, special_tokens="first_last", special_rows=rows, rest=rest, **fields
        )
        query, key, value = torch.randn(3, 2, HEADS, length, size).to(dtype)

        def run(dtype, backend, states=(query, key, value), mask=mask):
            states = (each.to(dtype) for each in states)
            with torch.no_grad():
                return sparse_dot_product_attention(
                    *states, mask, padding=padding, backend=backend, distance_bias=bias
                )

        want = run(torch.float64, "sparse_eager")
        assert_as_good_as_plain([run(dtype, name)], [run(dtype, "sparse_eager")], [want])


@pytest.mark.parametrize("name", serving(needs=NEEDS, dropout=True))
def test_dropout(name):
    """Its factors, from probabilities that are seen, are the same in the gradients."""
    torch.manual_seed(0)
    query, key, value, grad = torch.randn(4, 2, HEADS, 16, 16)
    bias = torch.randn(HEADS, 31)
    position = torch.arange(16)

    def scores(query, key, bias):
        return query @ key.mT / 4 + bias[:, position[:, None] - position + 15]

    def attention(query, key, value, bias):
        torch.manual_seed(1)
        return sparse_dot_product_attention(query, key, value, ONES, dropout_p=0.25, backend=name, distance_bias=bias)

    seen = attention(query, key, torch.eye(16).expand(2, HEADS, 16, 16), bias)
    factors = seen / scores(query, key, bias).softmax(-1)
    torch.testing.assert_close(factors, 4 / 3 * (factors > 1), atol=1e-3, rtol=1e-3)
    assert 0.15 < (factors < 1).float().mean() < 0.35
    got = with_gradients(attention, (query, key, value, bias), grad)
    want = with_gradients(
        lambda query, key, value, bias: scores(query, key, bias).softmax(-1) * (4 / 3 * (factors > 1)) @ value,
        *((query, key, value, bias), grad),
    )
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", serving(needs=NEEDS, causal=True))
def test_the_last_queries_of_longer_keys(name):
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, HEADS, 16, 16)
    attention = partial(sparse_dot_product_attention, mask=ONES, is_causal=True, backend=name)
    bias = torch.randn(HEADS, 31)
    whole = attention(query, key, value, distance_bias=bias)
    torch.testing.assert_close(attention(query[:, :, 11:], key, value, distance_bias=bias), whole[:, :, 11:])
    assert not torch.allclose(whole, attention(query, key, value))


@pytest.mark.parametrize(
    ("bias", "got"),
    [
        (torch.ones(HEADS, 16), r"torch.float32 \(4, 16\) on cpu"),
        (torch.ones(HEADS, 31).long(), r"torch.int64 \(4, 31\)"),
        (1.0, "float"),
    ],
)
def test_other_shapes_are_refused(bias, got):
    states = torch.randn(3, 1, HEADS, 16, 8)
    with pytest.raises(ValueError, match=rf"distance_bias must be .* of shape \(4, 31\) on cpu, got {got}"):
        sparse_dot_product_attention(*states, ONES, distance_bias=bias)
