"""
What `sparse_triton` refuses, and how it behaves in Triton's interpreter; `test_triton.py` runs this file in the
process that has it.
"""

import importlib.util
import math
import os
from dataclasses import replace

import pytest
import test_not_finite
import torch

from sparsebert import SparseMask, sparse_dot_product_attention
from sparsebert.attention.backends import BACKENDS, refusal
from sparsebert.attention.capabilities import Request
from sparsebert.attention.choosing.self_check import examine
from sparsebert.attention.choosing.self_check_process import run_self_checks
from sparsebert.attention.choosing.self_check_results import FINISHED, Setting


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
REQUEST = Request("cuda", torch.float16, 2, 2, 512, 512, 64)
SETTING = Setting("float32", 32, padded=True, gradients=True, length=64)

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process with the interpreter")
on_gpus = pytest.mark.skipif(INTERPRETED, reason="the interpreter needs no GPU")


# GPUs, by what PyTorch says of them


@pytest.fixture
def gpus(monkeypatch):
    """`gpus(*capabilities)`: this machine has GPUs of these compute capabilities, as far as a choice can see."""

    def make(*capabilities):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capabilities[index or 0])

    return make


@on_gpus
@pytest.mark.parametrize(
    "capability, head_sizes",
    [
        ((7, 0), ()),
        ((7, 5), ()),
        ((8, 0), (32, 64)),
        ((8, 6), (32, 64)),
        ((8, 7), ()),
        ((8, 9), (32, 64)),
        ((9, 0), (32, 64, 128)),
        ((10, 0), (32, 64, 128)),
        ((10, 3), ()),
        ((12, 0), ()),
        ((12, 1), ()),
        ((13, 0), ()),
    ],
    ids=str,
)
def test_only_known_gpus_are_served(gpus, capability, head_sizes):
    gpus(capability)
    major, minor = capability
    for size in (32, 64, 128):
        reason = refusal("sparse_triton", replace(REQUEST, head_size=size))
        assert (reason is None) == (size in head_sizes)
        if reason is not None:
            able = "9.0, 10.0" if size == 128 else "8.0, 8.6, 8.9, 9.0, 10.0"
            needed = f"with heads of {size} it needs a GPU of compute capability {able}"
            assert reason == f"{needed}, got {major}.{minor}"


@on_gpus
def test_the_gpu_is_that_of_the_tensors(gpus):
    gpus((7, 5), (9, 0))
    assert "got 7.5" in refusal("sparse_triton", REQUEST)
    assert "got 7.5" in refusal("sparse_triton", replace(REQUEST, index=0))
    assert refusal("sparse_triton", replace(REQUEST, index=1)) is None


@on_gpus
def test_rocm_is_refused(gpus, monkeypatch):
    gpus((9, 0))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    reason = refusal("sparse_triton", REQUEST)
    assert reason == "it runs on NVIDIA GPUs, and this PyTorch is built for ROCm"


def test_an_interpreter_that_is_chosen_too_late(monkeypatch):
    """Triton reads the variable for its own functions when it is imported, for the kernels when they are."""
    from sparsebert.attention.kernels import triton_kernels

    states, mask = torch.randn(3, 1, 2, 8, 32), SparseMask(torch.ones(2, 8, 8, dtype=torch.bool), 8)
    try:
        with monkeypatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "0" if INTERPRETED else "1")
            importlib.reload(triton_kernels)
        with pytest.raises(ValueError, match="TRITON_INTERPRET was changed after Triton was imported: set it before"):
            sparse_dot_product_attention(*states, mask, backend="sparse_triton")
    finally:
        importlib.reload(triton_kernels)


# In the interpreter


@interpreted
def test_interpreter_refuses_bfloat16():
    query = torch.randn(3, 1, 2, 8, 32).bfloat16()
    mask = SparseMask(torch.ones(2, 8, 8, dtype=torch.bool), 8)
    with pytest.raises(ValueError, match="interpreter computes wrong numbers in torch.bfloat16; use float16"):
        sparse_dot_product_attention(*query, mask, backend="sparse_triton")
    half = sparse_dot_product_attention(*query.half(), mask, backend="sparse_triton")
    torch.testing.assert_close(
        half.float(), sparse_dot_product_attention(*query.float(), mask, backend="sparse_eager"), atol=5e-3, rtol=5e-3
    )


@interpreted
@pytest.mark.parametrize("dropout", [0.0, pytest.param(0.25, marks=pytest.mark.slow)])
def test_interpreter_keeps_padding_away_from_real_tokens(dropout):
    test_not_finite.test_padding_never_reaches_real_tokens("sparse_triton", dropout, math.nan)
    test_not_finite.test_gradients_of_padding_never_reach_real_tokens("sparse_triton", dropout)


@interpreted
def test_interpreter_refuses_second_derivatives():
    test_not_finite.test_second_derivatives_are_right_or_refused("sparse_triton")


@interpreted
def test_interpreter_passes_the_self_check():
    finding = examine("sparse_triton", "cpu", SETTING, (9,))
    assert finding["right"], finding["reason"]


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["special tokens forgotten", "another mask"])
def test_interpreter_with_a_fault_does_not_pass(fault, monkeypatch):
    row = BACKENDS["sparse_triton"]

    def prepare(mask, inputs):
        if fault == "another mask":
            table = mask.structure(inputs.num_keys)[0].flip(-1)
            return row.prepare(SparseMask(table, inputs.num_keys, special_tokens=mask.special_tokens), inputs)
        return row.prepare(mask, inputs) | {"first_token": None, "last_token": None}

    monkeypatch.setitem(BACKENDS, "sparse_triton", replace(row, prepare=prepare))
    finding = examine("sparse_triton", "cpu", replace(SETTING, gradients=False), (9,))
    assert not finding["right"] and "is off by" in finding["reason"]


OTHERS = [(32, "float16", True), (64, "float32", True), (128, "float16", False)]


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("size, dtype, dropout", OTHERS)
def test_interpreter_passes_at_other_sizes(size, dtype, dropout):
    setting = Setting(dtype, size, True, dropout, True)
    finding = examine("sparse_triton", "cpu", setting, (77,))
    assert finding["right"], finding["reason"]


@interpreted
@pytest.mark.slow
def test_interpreter_passes_in_a_process_of_its_own():
    asked = [(replace(SETTING, gradients=False), ("sparse_triton",))]
    (outcome,) = run_self_checks("cpu", asked, 600.0, lengths=(9,), num_heads=1)
    assert outcome.ended == FINISHED and outcome.problems() == [] and outcome.passed()["sparse_triton"] > 0
