"""NaN and infinity: padding never reaches real tokens, and every backend says what it cannot differentiate twice."""

import math
import re

import pytest
import torch
from exactness import assert_as_good_as_plain, with_gradients
from transformers.models.bert.modeling_bert import eager_attention_forward

from sparsebert import SparseBertModel, SparseMask, sparse_dot_product_attention
from sparsebert.attention.backends import BACKENDS, refusal
from sparsebert.attention.capabilities import Request
from sparsebert.attention.kernels.bias_operator import bias_attention
from sparsebert.attention.kernels.eager import power_of_two
from sparsebert.attention.mask_inputs import MaskInputs
from sparsebert.attention.padded_tokens import clear_padding


HEADS, LENGTH, SIZE = 2, 12, 32
PADDING = torch.ones(3, LENGTH, dtype=torch.bool)
PADDING[0, 7:] = PADDING[1, :4] = PADDING[2, 5] = False


# It is compiled for every shape.
compiling = pytest.param("sparse_flex", marks=pytest.mark.slow)


def serving(dtype=torch.float32, **fields):
    request = Request("cpu", dtype, 3, HEADS, LENGTH, LENGTH, SIZE, padded=True, **fields)
    return [name for name in BACKENDS if refusal(name, request) is None]


def a_mask(special_tokens="first_last"):
    return SparseMask(torch.rand(HEADS, LENGTH, LENGTH) < 0.4, LENGTH, special_tokens=special_tokens)


def spoiled(tensor, value):
    return torch.where(PADDING[:, None, :, None], tensor, value)


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e36, 1e20], ids=str)
@pytest.mark.parametrize(("name", "dropout"), [(n, d) for d in (0.0, 0.25) for n in serving(dropout=d > 0)])
def test_padding_never_reaches_real_tokens(name, dropout, value):
    """Neither outputs nor gradients; a padded token's own output is 0 all the same."""
    gradients = name in serving(gradients=True, dropout=dropout > 0)
    tensors = torch.randn(4, 3, HEADS, LENGTH, SIZE)
    mask, results = a_mask(), []
    for given in (tensors, spoiled(tensors, value)):
        leaves = [leaf.clone().requires_grad_(gradients) for leaf in given[:3]]
        with torch.set_grad_enabled(gradients):
            torch.manual_seed(3)
            output = sparse_dot_product_attention(*leaves, mask, PADDING, dropout_p=dropout, backend=name)
            found = [output.detach()]
            if gradients:
                found += torch.autograd.grad(output, leaves, tensors[3])
        results.append(found)
    real = PADDING[:, None, :, None].expand_as(tensors[0])
    for got, want in zip(*results, strict=True):
        assert want.abs().sum() > 0 and torch.equal(got[real], want[real])
    assert (results[1][0][~real] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [None, 2.0, 64.0, 2e4])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_large_scores_of_padding_are_removed(dropout, scale, dtype):
    """The scores of real keys are as negative as those of padded ones are positive."""
    for name in serving(dtype, dropout=dropout > 0):
        if name != "sparse_flex":
            check_large_scores(name, dropout, scale, dtype)


@pytest.mark.slow
def test_large_scores_of_padding_are_removed_by_flex():
    """It is compiled for every scale and dtype."""
    check_large_scores("sparse_flex", 0.0, 2.0, torch.float16)


def check_large_scores(name, dropout, scale, dtype):
    mask, padding = SparseMask(torch.ones(1, 4, 4, dtype=torch.bool), 4), torch.tensor([[True, True, True, False]])
    for held in (100.0, 240.0, 260.0):
        query, key, value = torch.zeros(3, 1, 1, 4, 16, dtype=dtype)
        query[..., 0], key[..., 0], key[:, :, 3, 0], value[:, :, 3] = 1.0, -1.0, held, 7.0
        query[:, :, :3, 0] = min(240.0, 3e4 / (scale or 0.25))  # whose scores of real keys are finite in float16
        output = sparse_dot_product_attention(
            query, key, value, mask, padding, scale=scale, dropout_p=dropout, backend=name
        )
        assert (output == 0).all(), (name, held, output)


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("name", BACKENDS)
def test_gradients_of_padding_never_reach_real_tokens(name, dropout):
    """A residual connection has NaN at padded positions, and so has the gradient of what attention adds to it."""
    if name not in serving(gradients=True, dropout=dropout > 0):
        pytest.skip(f"{name} does not serve gradients with a dropout of {dropout}")
    tensors, mask, results = torch.randn(4, 3, HEADS, LENGTH, SIZE), a_mask(), []
    for gradient in (tensors[3], spoiled(tensors[3], math.nan)):
        leaves = [leaf.clone().requires_grad_() for leaf in spoiled(tensors[:3], math.nan)]
        torch.manual_seed(3)
        output = sparse_dot_product_attention(*leaves, mask, PADDING, dropout_p=dropout, backend=name)
        results.append(torch.autograd.grad(output, leaves, gradient))
    real = PADDING[:, None, :, None].expand_as(tensors[0])
    for got, want in zip(*results, strict=True):
        assert want[real].abs().sum() > 0 and torch.equal(got[real], want[real])


def test_finite_states_are_not_copied():
    states, mask = torch.randn(3, 3, HEADS, LENGTH, SIZE).unbind(0), a_mask()
    inputs = MaskInputs("sparse_sdpa", LENGTH, LENGTH, sparse_mask=mask, padding=PADDING)
    assert all(one is other for one, other in zip(clear_padding(inputs, 1.0, *states), states, strict=True))
    for value in (math.inf, 100.0):  # whose scores overflow in float16
        for state in clear_padding(inputs, 1.0, spoiled(states[0], value), *states[1:]):
            assert (state.transpose(1, 2)[~PADDING] == 0).all()


@pytest.mark.parametrize("name", ["sparse_eager", "sparse_sdpa", "sparse_cpu"])
def test_padding_never_reaches_the_queries_of_a_cache(name):
    """The last positions alone, of which fewer are padded than of all."""
    tensors, mask = torch.randn(3, 3, HEADS, LENGTH, SIZE), a_mask("first")
    query, key, value = spoiled(tensors, math.nan)
    fields = {"is_causal": True, "backend": name}
    whole = sparse_dot_product_attention(*tensors, mask, PADDING, **fields)
    last = sparse_dot_product_attention(query[:, :, -9:], key, value, mask, PADDING, **fields)
    torch.testing.assert_close(last, whole[:, :, -9:])


@pytest.mark.parametrize("name", ["sparse_eager", "sparse_sdpa"])
def test_under_vmap_and_in_a_compiled_graph(name):
    tensors, mask = torch.randn(2, 3, 3, HEADS, LENGTH, SIZE), a_mask()
    given = torch.where(PADDING[:, None, :, None], tensors, math.nan)

    def attention(query, key, value):
        return sparse_dot_product_attention(query, key, value, mask, PADDING, backend=name)

    want = torch.stack([attention(*each) for each in tensors])
    torch.testing.assert_close(torch.vmap(attention)(*given.unbind(1)), want)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(attention, backend="eager", fullgraph=True)(*given[0]), want[0])


@pytest.mark.parametrize("state", ["frozen", "searching"])
@pytest.mark.parametrize("name", ["sparse_auto", *(compiling if row == "sparse_flex" else row for row in BACKENDS)])
def test_padding_never_reaches_real_tokens_in_a_model(tiny_config, name, state):
    """An embedding of padding that training has ruined."""
    fields = {"pattern": "bigbird"} if state == "frozen" else {}
    model = SparseBertModel(tiny_config(**fields)).eval()
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[0] = math.nan
    ids = torch.randint(1, 100, (3, LENGTH)).where(PADDING, 0)
    needs = frozenset() if state == "frozen" else frozenset({"additive"})
    if name in BACKENDS and name not in serving(needs=needs):
        pytest.skip("refused here")
    model.set_attn_implementation(name)
    with torch.no_grad():
        output = model(ids, attention_mask=PADDING.long()).last_hidden_state
    assert output[PADDING].isfinite().all()


@pytest.mark.parametrize("where", range(3), ids=("query", "key", "value"))
@pytest.mark.parametrize("name", BACKENDS)
def test_real_tokens_reach_those_that_attend_to_them(name, where):
    """What is not a number stays one, instead of being hidden."""
    if name not in serving():
        pytest.skip("refused here")
    if name == "sparse_flex" and where < 2:
        pytest.skip("PyTorch's FlexAttention takes such a query for one without a key")
    tensors = torch.randn(3, 3, HEADS, LENGTH, SIZE).unbind(0)
    mask = a_mask()
    tensors[where][0, 0, 2] = math.nan
    with torch.no_grad():
        output = sparse_dot_product_attention(*tensors, mask, PADDING, backend=name)
    attending = mask.structure(LENGTH)[0, 0, :, 2] & PADDING[0]
    attending[[0, 6]] = True  # the special tokens
    if where == 0:
        attending = torch.arange(LENGTH) == 2
    assert output[0, 0, attending].isnan().all()
    assert output[1:].isfinite().all() and output[0, 1].isfinite().all()


@pytest.mark.parametrize("name", serving(gradients=True))
def test_second_derivatives_are_right_or_refused(name):
    leaves = [leaf.requires_grad_() for leaf in torch.randn(3, 1, HEADS, 6, SIZE)]
    mask = SparseMask(torch.rand(HEADS, 6, 6) < 0.7, 6)

    def attention(*given):
        return sparse_dot_product_attention(*given, mask, backend=name)

    gradient = torch.autograd.grad(attention(*leaves).square().sum(), leaves, create_graph=True)
    try:
        sum(part.square().sum() for part in gradient).backward()
    except RuntimeError as error:
        assert name != "sparse_eager"
        assert re.search("no second derivatives: use sparse_eager|is not implemented", str(error))
    else:
        leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
        assert torch.autograd.gradgradcheck(attention, leaves, fast_mode=True)


# Scores in half precision


@pytest.mark.parametrize("scaling", [0.125, 1.0, 3.0, 32**-0.5, 128**-0.5, 1e-3])
def test_the_factor_is_a_power_of_two_and_a_rest(scaling):
    power, rest = power_of_two(scaling)
    assert math.frexp(power)[0] == 0.5 and 1 <= rest < 2 and power * rest == scaling


@pytest.mark.parametrize("name", ["sparse_eager", "sparse_sdpa", "sparse_cpu"])
@pytest.mark.parametrize("size", [32, 64, 128])
def test_large_scores_do_not_overflow(name, size):
    """The products of queries and keys exceed what float16 can hold; the scores, after their factor, do not."""
    query, key, value = torch.randn(3, 1, HEADS, LENGTH, size).unbind(0)
    query, key = 1e5**0.5 * query.sign() * size**-0.25, 1e5**0.5 * key.sign() * size**-0.25
    query, key, value = query.half(), key.half(), value.half()
    mask = SparseMask(torch.ones(HEADS, LENGTH, LENGTH, dtype=torch.bool), LENGTH)
    scores = query.double() @ key.double().mT
    assert scores.abs().max() > 65504 and (scores * size**-0.5).abs().max() < 65504
    want = torch.softmax(scores * size**-0.5, -1) @ value.double()
    got = sparse_dot_product_attention(query, key, value, mask, backend=name)
    torch.testing.assert_close(got.double(), want, atol=4e-3, rtol=4e-3)


def test_large_scores_of_a_mask_that_is_learned_do_not_overflow():
    query, key, value = torch.randn(3, 1, HEADS, LENGTH, 64).unbind(0)
    query, key, value = (100 * query.sign()).half(), (100 * key.sign()).half(), value.half()
    bias = torch.randn(HEADS, LENGTH, LENGTH)
    want = torch.softmax(query.double() @ key.double().mT / 8 + bias, -1) @ value.double()
    assert (query.double() @ key.double().mT).abs().max() > 65504
    torch.testing.assert_close(bias_attention(query, key, value, bias).double(), want, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_reference_is_as_good_as_that_of_transformers(size, dtype, factor):
    tensors = torch.randn(4, 2, HEADS, 40, size)
    tensors[0] *= factor
    mask = SparseMask(torch.ones(HEADS, 40, 40, dtype=torch.bool), 40)

    def ours(*leaves):
        return sparse_dot_product_attention(*leaves, mask, backend="sparse_eager")

    def stock(*leaves):
        module = torch.nn.Module().eval()
        module.num_key_value_groups = 1
        return eager_attention_forward(module, *leaves, None, scaling=size**-0.5)[0].transpose(1, 2)

    *inputs, grad = tensors.to(dtype)
    plain, truth = (with_gradients(stock, inputs, grad, kind) for kind in (dtype, torch.float64))
    assert_as_good_as_plain(with_gradients(ours, inputs, grad), plain, truth, units=1)
