"""
The rest of a mask and a bias per distance in the Triton kernels, against softmax with one more key and other scores in
float64. Where there is no GPU, `test_triton.py` runs this file in the process that has Triton's interpreter.

Letters: B batch, H heads, n length, d head size.
"""

import importlib.util
import os
from dataclasses import replace
from functools import partial

import pytest
import torch
from exactness import assert_as_good_as_plain, with_gradients
from test_attention import case_of, kept, laid_out, make_mask, make_padding, named
from test_triton import Recorded, poison, use_lists  # noqa: F401

from sparsebert.attention.backends import prepared, refusal
from sparsebert.attention.capabilities import Request
from sparsebert.attention.kernels import triton as backend, triton_launch
from sparsebert.attention.mask_inputs import MaskInputs
from sparsebert.attention.rest import Rest


CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.skipif(not (CUDA or INTERPRETED), reason="runs in the process with the interpreter"),
    *([pytest.mark.gpu] if CUDA else []),
]

SHORT = [
    {"length": 70, "mask": "dam_s", "padding": "mixed", "num_heads": 2, "terms": "both"},
    {"length": 7, "mask": "empty rows", "padding": "holes", "head_size": 64},
    {"length": 65, "mask": "dam_b", "diagonal": False, "terms": "distances"},
    {"length": 33, "mask": "dense", "padding": "nothing real", "dropout": 0.125, "terms": "both"},
    {"length": 40, "mask": "bigbird", "padding": "left", "dtype": torch.float16, "last_token": "position"},
]
LISTS = [
    {"length": 130, "mask": "dam_b", "padding": "mixed", "terms": "both"},
    {"length": 66, "mask": "dam_s", "padding": "holes", "dropout": 0.125, "head_size": 64, "diagonal": False},
    {"length": 65, "mask": "empty rows", "num_heads": 2, "terms": "distances"},
    {"length": 100, "mask": "columns and blocks", "padding": "holes", "terms": "both", "dropout": 0.125},
    {"length": 1, "mask": "empty rows", "padding": "right"},
    pytest.param(
        {"length": 600, "mask": "dam_b", "padding": "left"}, marks=pytest.mark.slow
    ),  # more words than one load
]


def formula(query, key, value, own_key=None, own_value=None, own_score=None, distances=None, *, keep, real, factors):
    """Softmax over the kept keys and that of the rest, then dropout, in the inputs' dtype."""
    wide, scaling = torch.promote_types(query.dtype, torch.float32), query.shape[-1] ** -0.5
    removed = real.sum(-1)[:, None, None] - keep.sum(-1)
    scores = (query @ key.mT).to(wide) * scaling
    if distances is not None:
        position = torch.arange(len(real[0]), device=DEVICE)
        scores = scores + distances[:, position[:, None] - position + len(position) - 1].to(wide)
    scores = scores.masked_fill(~keep, -torch.inf)
    if own_key is None:
        high = scores.amax(-1, keepdim=True).clamp(min=-1e4)
        weights = (scores - high).exp()
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30) * real[:, None, :, None]
        return ((weights * keep * factors).to(value.dtype) @ value).to(query.dtype)
    own = (query.to(wide) @ own_key[..., None])[..., 0] * scaling + own_score[..., None] + removed.log()
    weights = torch.cat([scores, own[..., None]], -1)
    weights = torch.where(real[:, None, :, None], weights, 0.0).softmax(-1) * real[:, None, :, None]
    kept_weights = (weights[..., :-1] * keep * factors).to(value.dtype)
    return (kept_weights @ value + weights[..., -1:] * own_value[:, :, None]).to(query.dtype)


class Problem:
    """A mask, states, and a rest, a bias per distance or both (`terms`); `attention` is that of the kernels."""

    def __init__(self, terms="rest", **fields):
        self.case = case = case_of("sparse_triton", DEVICE, **fields)
        self.mask, self.padding = make_mask(case), make_padding(case)
        batch = 2 if self.padding is None else len(self.padding)
        *states, self.grad = laid_out(case, batch)
        self.tensors = dict(zip(("query", "key", "value"), states, strict=True))
        sizes = {"own_key": (case.head_size,), "own_value": (case.head_size,), "own_score": ()}
        for name, size in sizes.items() if terms != "distances" else ():
            self.tensors[name] = torch.randn(batch, case.num_heads, *size, device=DEVICE)
        if terms != "rest":
            self.tensors["distances"] = 2 * torch.randn(case.num_heads, 2 * case.length - 1, device=DEVICE)
        self.layer, self.scaling = self.mask.num_layers - 1, case.head_size**-0.5
        self.keep = kept(self.mask, case.length, self.padding, layer=self.layer, batch=batch).to(DEVICE)
        real = torch.ones(batch, case.length, dtype=torch.bool) if self.padding is None else self.padding
        self.real = real.to(DEVICE)
        self.padding = None if self.padding is None else self.real

    def attention(self, query, key, value, own_key=None, own_value=None, own_score=None, distances=None):
        length, zeros = self.case.length, torch.zeros(self.case.num_heads, device=DEVICE)
        own = None if own_key is None else zeros
        inputs = MaskInputs("sparse_triton", length, length, DEVICE, self.mask, self.padding, rest=(own,))
        inputs = replace(prepared(inputs).for_layer(self.layer), seeds=(torch.tensor([5, 7], device=DEVICE),))
        rest = None if own is None else Rest(own_key, own_value, own_score)
        inputs = replace(inputs, rest=(rest,), distance_bias=(distances,))
        output, _ = backend.triton_backend(query, key, value, inputs, self.scaling, self.case.dropout)
        return output.transpose(1, 2)

    def factors(self):
        """What dropout multiplies each probability with, read without a rest, which changes no decision."""
        if not self.case.dropout:
            return 1.0
        zeros, width = torch.zeros_like(self.tensors["query"]), self.case.head_size
        unit = torch.eye(self.case.length, -(-self.case.length // width) * width, dtype=zeros.dtype, device=DEVICE)
        columns = [self.attention(zeros, zeros, part.expand_as(zeros).contiguous()) for part in unit.split(width, 1)]
        probabilities = torch.cat(columns, -1)[..., : self.case.length]
        return (probabilities * self.keep.sum(-1, keepdim=True) > 0.5) / (1 - self.case.dropout)

    def check(self):
        plainly = partial(formula, keep=self.keep, real=self.real, factors=self.factors())
        results = self.with_gradients(self.attention)
        plain, truth = (self.with_gradients(plainly, dtype) for dtype in (None, torch.float64))
        assert_as_good_as_plain(results, plain, truth)
        assert (results[0].transpose(1, 2)[~self.real] == 0).all()

    def with_gradients(self, function, dtype=None):
        """Output and gradients of the tensors that there are, in their order."""

        def named(*leaves):
            return function(**dict(zip(self.tensors, leaves, strict=True)))

        return with_gradients(named, self.tensors.values(), self.grad, dtype)


@pytest.mark.parametrize("fields", SHORT, ids=named)
def test_short_kernels(fields):
    Problem(**fields).check()


@pytest.mark.parametrize("fields", LISTS, ids=named)
def test_kernels_on_lists(fields, monkeypatch):
    use_lists(monkeypatch)
    Problem(**fields).check()


def test_the_operator_does_the_same():
    """What is recorded is an operator, whose gradients include those of the rest and of the distances."""
    problem = Problem(length=20, mask="dam_s", padding="right", terms="both")
    plain = problem.with_gradients(problem.attention)
    with Recorded() as recorded:
        results = problem.with_gradients(problem.attention)
    assert sum("tile_attention" in name for name in recorded.names) == 2
    # All but those of the distances, the last, which are summed in an order that varies.
    assert all(map(torch.equal, results[:-1], plain[:-1]))


def test_what_adds_to_a_gradient_is_not_timed(monkeypatch):
    """Heads of 128 have two configurations of the kernel that adds to it."""
    use_lists(monkeypatch)
    numbers = {}

    def launch(kernel, grid, arguments, constants, choices, bucket):
        numbers[constants.get("GRADIENT")] = len(choices)
        triton_launch.launch(kernel, grid, arguments, constants, choices, bucket)

    monkeypatch.setattr(backend, "launch", launch)
    dtype = torch.bfloat16 if CUDA else torch.float32  # on GPUs float32 has one configuration
    problem = Problem(length=9, mask="dam_s", head_size=128, terms="distances", dtype=dtype)
    problem.with_gradients(problem.attention)
    assert numbers[True] == 1 < numbers[False]


def test_no_order_no_deterministic_gradient():
    shape = (DEVICE.type, torch.float32, 2, 1, 20, 20, 32)
    requests = [Request(*shape, gradients=given, needs=frozenset({"distance_bias"})) for given in (False, True)]
    assert [refusal("sparse_triton", request) for request in requests] == [None, None]
    torch.use_deterministic_algorithms(True)
    try:
        before, after = (refusal("sparse_triton", request) for request in requests)
    finally:
        torch.use_deterministic_algorithms(False)
    assert before is None and after == "its gradient of a bias per distance is not deterministic"


def test_keys_are_counted_as_with_padding():
    """Without padding the numbers of removed keys come with the mask; with padding that is none, from the kernel."""
    problem = Problem(length=70, mask="dam_s", diagonal=False)
    plain = problem.attention(**problem.tensors)
    problem.padding = problem.real
    assert torch.equal(problem.attention(**problem.tensors), plain)
    assert backend.SHORT_LENGTH >= 70
