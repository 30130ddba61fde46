"""
Attention under a bias per distance that is being learned, against the formula with a bias per entry in float64.

Letters: B batch, H heads, n tokens, T distances in tiles.
"""

import pytest
import torch
from conftest import growth
from test_bias_attention import HEADS, assert_right, formula, paddings, ragged, tensors, trained

from sparsebert import SparseBertForMaskedLM, SparseBertModel
from sparsebert.attention.biases.bias_entries import REMOVED
from sparsebert.attention.biases.offset_biases import OffsetBias
from sparsebert.attention.kernels import bias_operator as module
from sparsebert.attention.kernels.bias_operator import bias_attention
from sparsebert.attention.mask_inputs import MaskInputs


@pytest.fixture(params=[2**10, 2**12, 2**19], ids=["smallest blocks", "small blocks", "default blocks"])
def blocks(request, monkeypatch):
    monkeypatch.setitem(module.BLOCK_BYTES, "cpu", request.param)
    if request.param == 2**10:
        monkeypatch.setattr(module, "FEWEST_QUERIES", 5)


@pytest.fixture
def short_blocks(monkeypatch):
    """Blocks of 8 of 20 tokens, so that inputs of 20 tokens count as long."""
    monkeypatch.setitem(module.BLOCK_BYTES, "cpu", 4 * 8 * 20)
    monkeypatch.setattr(module, "FEWEST_QUERIES", 8)


def entries(bias, length, causal=False):
    """The bias of every entry, by its definition."""
    place = torch.arange(length)
    special = torch.isin(place, bias.special)
    table = bias.values[:, (place[:, None] // bias.tile - place // bias.tile).abs()]
    table = table.masked_fill(special[:, None] | special, 0.0)
    if bias.diagonal is not None:
        table = table.masked_fill(place[:, None] == place, bias.diagonal)
    return table.masked_fill(place > place[:, None], REMOVED) if causal else table


CASES = [
    # batch, tokens, head size, padded, tokens apart, special, diagonal, causal, tile, layout
    (5, 33, 32, True, "last", [0], None, False, 1, "host"),
    (5, 33, 32, True, "first last", [0], -20.0, False, 1, "contiguous"),
    (4, 61, 64, True, "first", [0, 60], 0.0, False, 1, "strided"),
    (3, 61, 128, False, "", [0, 60], None, False, 7, "host"),
    (2, 100, 64, False, "", [], -20.0, False, 16, "host"),
    (4, 100, 64, True, "first", [0], None, True, 1, "strided"),
    (2, 129, 32, False, "", [0], -20.0, True, 64, "host"),
    (2, 130, 32, True, "first last", [0], 0.0, True, 3, "host"),
    (1, 1, 8, False, "", [0, 0], None, False, 1, "strided"),
]


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_a_bias_per_entry_in_float64(case, dtype):
    batch, length, head_size, padded, tokens, special, diagonal, causal, tile, layout = case
    *inputs, _, grad = tensors(batch, length, length, head_size, dtype, layout)
    values = -2e1 * (torch.rand(HEADS, -(-length // tile)) < 0.4)
    inputs.append(values.to(torch.promote_types(dtype, torch.float32)))
    padding = ragged(batch, length) if padded else None
    first = padding.int().argmax(-1) if "first" in tokens else None
    last = torch.arange(batch) % length if "last" in tokens else None
    rest = (padding, first, last, diagonal is None, causal)

    def bias_of(values):
        return OffsetBias(values, tile, torch.tensor(special, dtype=torch.int64), diagonal)

    def ours(query, key, value, values):
        return bias_attention(query, key, value, bias_of(values), *rest)

    def reference(query, key, value, values):
        return formula(query, key, value, entries(bias_of(values), length, causal), *rest)

    assert_right(ours, reference, inputs, grad, padding)


@pytest.mark.parametrize("tile", [1, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("diagonal", [None, 0.0, -5.0])
def test_bias_of_every_entry(tile, causal, diagonal):
    bias = OffsetBias(torch.randn(HEADS, -(-11 // tile)), tile, torch.tensor([0, 10]), diagonal)
    torch.testing.assert_close(bias.table(11, causal), entries(bias, 11, causal), rtol=0, atol=0)
    none = OffsetBias(bias.values, tile, torch.tensor([], dtype=torch.int64), diagonal)
    torch.testing.assert_close(none.table(11, causal), entries(none, 11, causal), rtol=0, atol=0)


@pytest.mark.parametrize("tile", [1, 2])
def test_gradients_under_dropout_agree_with_finite_differences(tile, monkeypatch):
    monkeypatch.setitem(module.BLOCK_BYTES, "cpu", 1)
    monkeypatch.setattr(module, "FEWEST_QUERIES", 2)
    *inputs, _, grad = tensors(2, 5, 5, 3, torch.float64)
    inputs.append(torch.randn(HEADS, -(-5 // tile), dtype=torch.float64))
    padding = torch.tensor([[True] * 5, [True] * 4 + [False]])

    def loss(query, key, value, values):
        torch.manual_seed(3)
        bias = OffsetBias(values, tile, torch.tensor([0]))
        return (bias_attention(query, key, value, bias, padding, last=torch.tensor([4, 3]), dropout=0.25) * grad).sum()

    assert torch.autograd.gradcheck(loss, [tensor.requires_grad_() for tensor in inputs])


def test_dropout_of_blocks_of_queries(short_blocks):
    """Rate and scale are right in every row, and no two rows drop the same."""
    query, key, _, _, _ = tensors(8, 20, 20, 20)
    bias = OffsetBias(torch.zeros(HEADS, 20), 1, torch.tensor([0]))
    identity = torch.eye(20).expand(8, HEADS, 20, 20)
    factors = 20 * bias_attention(0 * query, key, identity, bias, dropout=0.25)
    torch.testing.assert_close(factors, (factors > 0.5) / 0.75)
    rates = (factors == 0).double().mean((0, 1, 3))
    assert ((rates - 0.25).abs() < 6 * (0.25 * 0.75 / (8 * HEADS * 20)) ** 0.5).all()
    rows = (factors == 0).reshape(-1, 20)
    assert len(rows.unique(dim=0)) > 0.9 * len(rows)


# In a model


def learned(model, length=20, **kwargs):
    return model.sparse_attention("sparse_sdpa", 3, length, length, device=torch.device("cpu"), **kwargs).learned


every_search = pytest.mark.parametrize(
    "fields",
    [
        {"search": "dam_s"},
        {"search": "dam_s", "share_layers": False, "mask_length": 12},
        {"search": "dam_s", "mask_form": "log", "special_tokens": "first"},
        {"search": "dam_b", "block_size": 16, "special_tokens": "none"},
        {"search": "dam_b", "block_size": 16, "is_decoder": True, "special_tokens": "first"},
    ],
    ids=str,
)


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("last_token", ["real", "position"])
@pytest.mark.parametrize("diagonal", ["learned", "keep", "remove"])
@every_search
def test_a_search_trains_as_with_sparse_eager(tiny_config, fields, diagonal, last_token, padded):
    fields = {"mask_constant": 5.0, "initializer_range": 0.3, "diagonal": diagonal, "last_token": last_token} | fields
    model = SparseBertForMaskedLM(tiny_config(**fields)).train()
    assert all(isinstance(bias, OffsetBias) for bias in learned(model.bert))
    ids, mask = paddings()
    mask = mask if padded else None
    eager, ours = (trained(model, name, ids, mask) for name in ("sparse_eager", "sparse_sdpa"))
    assert eager.keys() == ours.keys() and any("mask_logits" in name for name in ours)
    for name in eager:
        torch.testing.assert_close(ours[name], eager[name], rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("diagonal", ["learned", "keep", "remove"])
@every_search
def test_a_search_is_evaluated_as_with_sparse_eager(tiny_config, fields, diagonal, padded):
    model = SparseBertForMaskedLM(tiny_config(**{"initializer_range": 0.3, "diagonal": diagonal} | fields)).eval()
    model.bert.sparse_attention.mask_logits.normal_(std=0.1)
    assert all(isinstance(bias, OffsetBias) for bias in learned(model.bert))
    ids, mask = paddings()
    outputs = []
    for name in ("sparse_eager", "sparse_sdpa"):
        model.set_attn_implementation(name)
        outputs.append(model(ids, attention_mask=mask if padded else None).logits)
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("short_blocks")
def test_which_searches_have_a_bias_per_distance(tiny_config):
    for fields, length, expected in (
        ({"search": "dam_s"}, 20, OffsetBias),
        ({"search": "dam_s"}, 12, torch.Tensor),
        ({"search": "dam_s", "mask_length": 18, "length_policy": "dense"}, 18, OffsetBias),
        ({"search": "dam_s", "mask_length": 18, "length_policy": "dense"}, 20, torch.Tensor),
        ({"search": "dam_u"}, 20, torch.Tensor),
        ({"search": "vertical_slash"}, 20, torch.Tensor),
    ):
        model = SparseBertModel(tiny_config(**fields)).train()
        assert all(isinstance(bias, expected) for bias in learned(model, length)), (fields, length)
    model = SparseBertModel(tiny_config(search="dam_s", mask_length=16, length_policy="error")).train()
    with pytest.raises(ValueError, match="input of 20 tokens is longer than the mask"):
        learned(model)


@pytest.mark.usefixtures("short_blocks")
def test_compiled_in_one_graph(tiny_config):
    torch.compiler.reset()
    model = SparseBertModel(tiny_config(search="dam_s"), add_pooling_layer=False).train()
    model.set_attn_implementation("sparse_sdpa")
    ids, mask = paddings()
    results = []
    for function in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(1)
        model.zero_grad()
        output = function(ids, attention_mask=mask).last_hidden_state
        output.square().sum().backward()
        results.append([output.detach(), *(p.grad.clone() for p in model.parameters())])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_layer_s_own_4d_mask_applies_on_top():
    bias = OffsetBias(torch.randn(HEADS, 4), 1, torch.tensor([0]), -5.0)
    inputs = MaskInputs("sparse_sdpa", 4, 4, learned=(bias,), padding=torch.ones(2, 4) > 0, learned_diagonal=False)
    extra = torch.rand(2, 1, 4, 4) < 0.5
    layer = inputs.for_layer(0, extra)
    assert layer.learned == (None,)
    want = entries(bias, 4) + torch.zeros(2, HEADS, 4, 4)
    torch.testing.assert_close(layer.bias[0][extra.expand_as(want)], want[extra.expand_as(want)])
    assert (layer.bias[0][~extra.expand_as(want)] < -1e3).all()


LONG_TABLE = 4 * 4 * 2600**2


def long_model(tiny_config, length=2600, **fields):
    """A model, of whose 4 heads a table with an entry per pair of tokens takes `LONG_TABLE` bytes, and an input."""
    sizes = {"mask_length": length, "max_position_embeddings": length, "num_hidden_layers": 1}
    model = SparseBertModel(tiny_config(**sizes, **fields), add_pooling_layer=False)
    return model, torch.randint(5, 100, (1, length))


@pytest.mark.parametrize(
    "fields", [{"search": "dam_s"}, {"pattern": "dense", "attention_probs_dropout_prob": 0.1}], ids=str
)
def test_a_step_needs_no_memory_per_pair_of_tokens(tiny_config, fields):
    """Neither for a bias per distance, nor for the gradient of a bias that has none."""
    model, ids = long_model(tiny_config, attn_implementation="sparse_sdpa", **fields)
    assert growth(lambda: model.train()(ids).last_hidden_state.sum().backward()) < LONG_TABLE


@torch.no_grad()
def test_evaluation_of_a_search_needs_no_memory_per_pair_of_tokens(tiny_config):
    model, ids = long_model(tiny_config, search="dam_s")
    assert growth(lambda: model.eval()(ids)) < LONG_TABLE
