"""
Attention under a bias that is being learned, per entry or per distance, against the formula in float64.

Letters: B batch, H heads, n queries, m keys, d head size, T distances in tiles.
"""

import itertools
from functools import partial

import pytest
import torch
from conftest import covering, growth
from exactness import assert_as_good_as_plain, with_gradients
from test_attention import poisoned_memory  # noqa: F401

from sparsebert import SEARCHES, SparseBertForMaskedLM, SparseBertModel
from sparsebert.attention.backends import BACKENDS
from sparsebert.attention.biases.bias_entries import REMOVED
from sparsebert.attention.biases.offset_biases import OffsetBias
from sparsebert.attention.kernels import bias_operator as module
from sparsebert.attention.kernels.bias_operator import bias_attention
from sparsebert.attention.mask_inputs import MaskInputs


HEADS = 3


@pytest.fixture(params=[(2**10, 5), (2**12, None), (2**19, None)], ids=["smallest blocks", "small blocks", "blocks"])
def blocks(request, monkeypatch):
    size, queries = request.param
    monkeypatch.setitem(module.BLOCK_BYTES, "cpu", size)
    monkeypatch.setattr(module, "FEWEST_QUERIES", queries or module.FEWEST_QUERIES)


@pytest.fixture
def short_blocks(monkeypatch):
    """Blocks of 8 of 20 tokens, so that inputs of 20 tokens count as long and have a bias per distance."""
    monkeypatch.setitem(module.BLOCK_BYTES, "cpu", 4 * 8 * 20)
    monkeypatch.setattr(module, "FEWEST_QUERIES", 8)


def tensors(batch, num_queries, num_keys, head_size, dtype=torch.float32, layout="host"):
    """query, key, value, and the gradient of the output."""
    made = []
    for rows in (num_queries, num_keys, num_keys, num_queries):
        if layout == "host":
            made.append(torch.randn(batch, rows, HEADS, head_size).transpose(1, 2))
        elif layout == "contiguous":
            made.append(torch.randn(batch, HEADS, rows, head_size))
        else:
            made.append(torch.randn(batch, HEADS, head_size, 2 * rows).mT[:, :, ::2])
    return [tensor.to(dtype) for tensor in made]


def biases(*shape):
    return -2e1 * (torch.rand(HEADS, *shape) < 0.4)


def ragged(batch, length):
    """Right, left and inner padding, and a sequence of nothing else."""
    padding = torch.ones(batch, length, dtype=torch.bool)
    padding[1 % batch, length - length // 3 :] = False
    padding[2 % batch, : length // 2] = False
    padding[3 % batch] = False
    return padding


def padding_and_tokens(batch, length, padded, tokens):
    """The padding, and the positions of the first and the last token as far as they are among `tokens`."""
    padding = ragged(batch, length) if padded else None
    first = padding.int().argmax(-1) if "first" in tokens else None
    return padding, first, torch.arange(batch) % length if "last" in tokens else None


def entries(bias, length, causal=False):
    """A bias per distance as one of every entry, by its definition."""
    place = torch.arange(length)
    special = torch.isin(place, bias.special)
    distance = place[:, None] // bias.tile - place // bias.tile
    table = bias.values[:, distance.abs() if bias.symmetric else distance + bias.values.shape[1] // 2]
    table = table.masked_fill(special[:, None] & bias.special_rows | special, 0.0)
    if bias.diagonal is not None:
        table = table.masked_fill(place[:, None] == place, bias.diagonal)
    return table.masked_fill(place > place[:, None], REMOVED) if causal else table


def formula(
    query,
    key,
    value,
    bias,
    padding=None,
    first=None,
    last=None,
    learned_diagonal=True,
    causal=False,
    factors=1.0,
    special_rows=True,
):
    """The same with all scores in memory, in the inputs' dtype; the probabilities times `factors`."""
    if isinstance(bias, OffsetBias):
        special_rows = bias.special_rows
        bias = entries(bias, query.shape[2], causal)
    tokens = {"first_token": first, "last_token": last, "learned_diagonal": learned_diagonal}
    tokens["special_rows"] = special_rows
    inputs = MaskInputs("", bias.shape[1], bias.shape[2], padding=padding, causal=causal, **tokens)
    scores = (query @ key.mT).to(bias.dtype) * query.shape[-1] ** -0.5 + inputs.merged(bias)
    return (scores.softmax(-1) * factors).to(value.dtype) @ value


def assert_right(ours, reference, inputs, grad, padding):
    """Both in the dtype of the inputs, and the reference in float64, by the 2x rule."""
    results, plain = (with_gradients(function, inputs, grad) for function in (ours, reference))
    truth = with_gradients(reference, inputs, grad, torch.float64)
    if padding is not None:
        # Where all is padding, scores are rounded to the unit of REMOVED: in float32 to 64, so that all keys weigh the
        # same, and in float64 to 1.2e-7, which is also float32's eps.
        nothing, dtype = ~padding.any(-1), inputs[0].dtype
        unit = torch.finfo(dtype if dtype == torch.bfloat16 else torch.float32).eps
        for got, want in zip(results[:4], plain, strict=False):
            got, want = got[nothing], want[nothing]
            assert not nothing.any() or (got - want).abs().max() <= 8 * unit * max(1.0, want.abs().max().item())
        results, plain, truth = (
            [*(values[~nothing] for values in given[:4]), given[4]] for given in (results, plain, truth)
        )
    assert_as_good_as_plain(results, plain, truth)


PER_ENTRY = [
    # batch, queries, keys, head size, padded, tokens apart, learned diagonal, causal, layout
    (5, 33, 33, 32, True, "last", True, False, "host"),
    (5, 33, 33, 32, True, "last", False, False, "contiguous"),
    (5, 33, 33, 32, True, "first last", True, False, "host"),
    (5, 33, 33, 64, True, "first", True, True, "host"),
    (4, 61, 61, 128, True, "first last", False, False, "strided"),
    (4, 100, 100, 64, True, "", True, False, "strided"),
    (3, 61, 61, 128, False, "", True, False, "host"),
    (4, 7, 30, 20, True, "last", True, False, "host"),
    (4, 7, 30, 20, True, "first", False, True, "host"),
    (1, 1, 1, 8, False, "", True, False, "strided"),
]


@pytest.mark.usefixtures("blocks", "poisoned_memory")
@pytest.mark.parametrize(
    ("case", "dtype"), covering(PER_ENTRY, [torch.float32, torch.bfloat16, torch.float64]), ids=str
)
def test_a_bias_per_entry_equals_the_formula(case, dtype):
    batch, num_queries, num_keys, head_size, padded, tokens, learned_diagonal, causal, layout = case
    *inputs, grad = tensors(batch, num_queries, num_keys, head_size, dtype, layout)
    inputs.append(biases(num_queries, num_keys).to(torch.promote_types(dtype, torch.float32)))
    padding, first, last = apart = padding_and_tokens(batch, num_keys, padded, tokens)
    rest = (*apart, learned_diagonal, causal)
    assert_right(
        lambda *leaves: bias_attention(*leaves, *rest), lambda *leaves: formula(*leaves, *rest), inputs, grad, padding
    )
    rows = {"special_rows": False}  # the special tokens' own, which are learned then
    assert_right(
        lambda *leaves: bias_attention(*leaves, *rest, **rows),
        lambda *leaves: formula(*leaves, *rest, **rows),
        *(inputs, grad, padding),
    )
    if last is not None:
        # Neither a padded key nor a last token's row moves the bias.
        alone = torch.zeros_like(padding)
        alone[0] = True
        grad = torch.zeros_like(grad)
        grad[0, :, -1] = 1.0
        last = torch.full((batch,), num_keys - 1)
        moved = with_gradients(lambda *leaves: bias_attention(*leaves, alone, None, last), inputs, grad)[-1]
        assert (moved == 0).all()


PER_DISTANCE = [
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
@pytest.mark.parametrize(
    ("case", "rules", "dtype"),
    covering(PER_DISTANCE, [(True, True), (False, True), (False, False)], [torch.float32, torch.bfloat16]),
    ids=str,
)
def test_a_bias_per_distance_equals_the_formula(case, dtype, rules):
    """`rules`: whether the distances have no sign, and whether special tokens have rows."""
    batch, length, head_size, padded, tokens, special, diagonal, causal, tile, layout = case
    *inputs, grad = tensors(batch, length, length, head_size, dtype, layout)
    size = -(-length // tile)
    inputs.append(biases(size if rules[0] else 2 * size - 1))
    rest = (*padding_and_tokens(batch, length, padded, tokens), diagonal is None, causal)

    def run(attention, *states):
        bias = OffsetBias(states[-1], tile, torch.tensor(special, dtype=torch.int64), diagonal, *rules)
        return attention(*states[:-1], bias, *rest)

    assert_right(partial(run, bias_attention), partial(run, formula), inputs, grad, rest[0])


@pytest.mark.parametrize("tile", [1, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("diagonal", [None, 0.0, -5.0])
def test_bias_of_every_entry(tile, causal, diagonal):
    for special, symmetric in itertools.product(([0, 10], []), (True, False)):
        values = torch.randn(HEADS, -(-11 // tile) if symmetric else 2 * -(-11 // tile) - 1)
        rules = (diagonal, symmetric, symmetric)
        bias = OffsetBias(values, tile, torch.tensor(special, dtype=torch.int64), *rules)
        torch.testing.assert_close(bias.table(11, causal), entries(bias, 11, causal), rtol=0, atol=0)


# Dropout


def factors_of(query, key, bias, seed, dropout, *rest):
    """What dropout multiplies the probabilities by, read back through values that are the identity."""
    num_keys = key.shape[2]
    identity = torch.eye(num_keys).expand(*query.shape[:2], num_keys, num_keys)
    torch.manual_seed(seed)
    dropped = bias_attention(query, key, identity, bias, *rest, dropout=dropout)
    return dropped / bias_attention(query, key, identity, bias, *rest)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("padded", [False, True])
def test_backward_sees_the_dropout_mask_of_forward(padded):
    *inputs, grad = tensors(5, 33, 33, 33)
    inputs.append(biases(33, 33) / 20)
    rest = (None, None)
    if padded:
        rest = (ragged(5, 33).index_fill(1, torch.tensor([0]), True).index_fill(0, torch.tensor([3]), True), None)
    query, key, _, bias = inputs
    factors = factors_of(query, key, bias, 7, 0.3, *rest).nan_to_num(0.0)
    torch.testing.assert_close(factors, (factors > 0.5) / (1 - round(0.3 * 2**16) / 2**16))

    def dropped(*leaves):
        torch.manual_seed(7)
        return bias_attention(*leaves, *rest, dropout=0.3)

    results, again = with_gradients(dropped, inputs, grad), with_gradients(dropped, inputs, grad)
    plain = with_gradients(lambda *leaves: formula(*leaves, *rest, factors=factors), inputs, grad)
    truth = with_gradients(
        lambda *leaves: formula(*leaves, *rest, factors=factors.double()), inputs, grad, torch.float64
    )
    assert_as_good_as_plain(results, plain, truth)
    torch.testing.assert_close(again, results)


@pytest.mark.parametrize("tile", [0, 1, 2])
def test_gradients_under_dropout_agree_with_finite_differences(tile, monkeypatch):
    """Of a bias per entry (tile 0) and per distance."""
    monkeypatch.setitem(module.BLOCK_BYTES, "cpu", 1)
    monkeypatch.setattr(module, "FEWEST_QUERIES", 2)
    *inputs, grad = tensors(2, 5, 5, 3, torch.float64)
    inputs.append(torch.randn(HEADS, *((-(-5 // tile),) if tile else (5, 5)), dtype=torch.float64))
    padding = torch.tensor([[True] * 5, [True] * 4 + [False]])

    def loss(query, key, value, bias):
        torch.manual_seed(3)
        bias = OffsetBias(bias, tile, torch.tensor([0])) if tile else bias
        return (bias_attention(query, key, value, bias, padding, last=torch.tensor([4, 3]), dropout=0.25) * grad).sum()

    assert torch.autograd.gradcheck(loss, [tensor.requires_grad_() for tensor in inputs], fast_mode=True)


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.9999])
def test_rate_and_mean_of_dropout(dropout):
    query, key, _, _ = tensors(16, 64, 64, 64)
    query, bias = torch.zeros_like(query), torch.zeros(HEADS, 64, 64)
    factors = factors_of(query, key, bias, 0, dropout)
    deviation = (dropout * (1 - dropout) / factors.numel()) ** 0.5
    assert abs((factors == 0).double().mean().item() - dropout) <= 5 * deviation + 2**-17
    # Entries of different heads, sequences and rows are dropped apart from each other.
    dropped = (factors == 0).double()
    for dim in range(4):
        both = (dropped * dropped.roll(1, dim)).mean().item()
        assert abs(both - dropout**2) <= 12 * deviation + 2**-16
    torch.manual_seed(1)
    first, second = (bias_attention(query, key, key, bias, dropout=dropout) for _ in range(2))
    assert not torch.allclose(first, second, atol=1e-2)


def test_dropout_of_blocks_of_queries(short_blocks):
    """Rate and scale are right in every row, and no two rows drop the same."""
    query, key, _, _ = tensors(8, 20, 20, 20)
    bias = OffsetBias(torch.zeros(HEADS, 20), 1, torch.tensor([0]))
    identity = torch.eye(20).expand(8, HEADS, 20, 20)
    factors = 20 * bias_attention(0 * query, key, identity, bias, dropout=0.25)
    torch.testing.assert_close(factors, (factors > 0.5) / 0.75)
    rates = (factors == 0).double().mean((0, 1, 3))
    assert ((rates - 0.25).abs() < 6 * (0.25 * 0.75 / (8 * HEADS * 20)) ** 0.5).all()
    rows = (factors == 0).reshape(-1, 20)
    assert len(rows.unique(dim=0)) > 0.9 * len(rows)


# As an operator of PyTorch


def test_second_derivatives_are_refused():
    inputs = [tensor.requires_grad_() for tensor in (*tensors(1, 4, 4, 8)[:3], biases(4, 4))]
    (first,) = torch.autograd.grad(bias_attention(*inputs).sum(), inputs[3], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives.*sparse_eager"):
        first.sum().backward()


def test_operator_is_registered_as_pytorch_asks():
    inputs = [tensor.requires_grad_() for tensor in (*tensors(2, 6, 6, 8)[:3], biases(6, 6))]
    tokens = (ragged(2, 6), torch.tensor([0, 1]), torch.tensor([5, 3]))
    options = (torch.tensor([1]), True, False, 0.25, 0.3, 4)
    operator = torch.ops.sparsebert.bias_attention.default
    torch.library.opcheck(operator, (*inputs, *tokens, None, *options, 0, None, True, True))
    values = torch.randn(HEADS, 3, requires_grad=True)
    torch.library.opcheck(operator, (*inputs[:3], values, *tokens, torch.tensor([2]), *options, 2, None, True, True))


# In a model


def paddings(length=20):
    ids = torch.arange(5, 5 + 3 * length).view(3, length)
    mask = torch.ones_like(ids)
    mask[1, length // 2 :] = 0
    mask[2, :4] = 0
    return ids, mask


def trained(model, name, ids, mask, **kwargs):
    """Loss and all gradients of one training forward with fixed draws."""
    model.set_attn_implementation(name)
    model.zero_grad()
    torch.manual_seed(1)
    loss = model(ids, attention_mask=mask, labels=ids, **kwargs).loss
    loss.backward()
    return {"loss": loss.detach()} | {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}


def biases_of(model, length=20):
    return model.sparse_attention("sparse_sdpa", 3, length, length, device=torch.device("cpu")).learned


# Those of which `short_blocks` makes a bias per distance, and all as a bias per entry.
DISTANCES = [
    {"search": "dam_s"},
    {"search": "dam_s", "share_layers": False, "mask_length": 12},
    {"search": "dam_s", "mask_form": "log", "special_tokens": "first"},
    {"search": "dam_b", "block_size": 16, "special_tokens": "none"},
    {"search": "dam_b", "block_size": 16, "is_decoder": True, "special_tokens": "first"},
]
ENTRIES = [*({"search": name} for name in SEARCHES), {"search": "dam_s", "share_layers": False}]
KINDS = [*((fields, True) for fields in DISTANCES), *((fields, False) for fields in ENTRIES)]


@pytest.mark.parametrize(
    "diagonal, last_token, padded",
    [("learned", "real", True), ("keep", "position", True), ("remove", "real", True), ("keep", "real", False)],
)
@pytest.mark.parametrize("fields, per_distance", KINDS, ids=str)
def test_a_search_runs_as_with_sparse_eager(tiny_config, fields, per_distance, diagonal, last_token, padded, request):
    if per_distance:
        request.getfixturevalue("short_blocks")
    fields = {"mask_constant": 5.0, "initializer_range": 0.3, "diagonal": diagonal, "last_token": last_token} | fields
    model = SparseBertForMaskedLM(tiny_config(**fields)).train()
    assert all(isinstance(bias, OffsetBias) == per_distance for bias in biases_of(model.bert))
    ids, mask = paddings()
    mask = mask if padded else None
    eager, ours = (trained(model, name, ids, mask) for name in ("sparse_eager", "sparse_sdpa"))
    assert any("mask_logits" in name for name in ours)
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        model.eval().sparse_attention.mask_logits.normal_(std=0.1)
        outputs = []
        for name in ("sparse_eager", "sparse_sdpa"):
            model.set_attn_implementation(name)
            outputs.append(model(ids, attention_mask=mask).logits)
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
        assert all(isinstance(bias, expected) for bias in biases_of(model, length)), (fields, length)
    model = SparseBertModel(tiny_config(search="dam_s", mask_length=16, length_policy="error")).train()
    with pytest.raises(ValueError, match="input of 20 tokens is longer than the mask"):
        biases_of(model)


def test_a_caller_s_4d_mask_applies_on_top(tiny_config):
    model = SparseBertForMaskedLM(tiny_config(search="dam_s", mask_constant=5.0)).train()
    ids, _ = paddings()
    mask = torch.rand(3, 1, 20, 20) < 0.7
    eager, ours = (trained(model, name, ids, mask) for name in ("sparse_eager", "sparse_sdpa"))
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
    mask[..., 7] = False  # then nothing depends on this token
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    for name in ("sparse_eager", "sparse_sdpa"):
        model.set_attn_implementation(name)
        states = model.bert(inputs_embeds=embeddings, attention_mask=mask).last_hidden_state
        (grad,) = torch.autograd.grad(states[:, 8:, :5].sum(), embeddings)
        assert (grad[:, 7] == 0).all() and (grad[:, 6] != 0).any(), name


@pytest.mark.parametrize("per_distance", [False, True])
def test_a_layer_s_own_4d_mask_applies_on_top(per_distance):
    bias = OffsetBias(torch.randn(HEADS, 4), 1, torch.tensor([0]), -5.0) if per_distance else torch.randn(HEADS, 4, 4)
    fields = {"padding": torch.ones(2, 4) > 0, "learned_diagonal": not per_distance}
    inputs = MaskInputs("sparse_sdpa", 4, 4, learned=(bias,), **fields)
    extra = torch.rand(2, 1, 4, 4) < 0.5
    layer = inputs.for_layer(0, extra)
    assert layer.learned == (None,)
    want = (entries(bias, 4) if per_distance else bias) + torch.zeros(2, HEADS, 4, 4)
    torch.testing.assert_close(layer.bias[0][extra.expand_as(want)], want[extra.expand_as(want)])
    assert (layer.bias[0][~extra.expand_as(want)] < -1e3).all()


@pytest.mark.parametrize("padded", [False, True])
def test_bfloat16_autocast(tiny_config, padded):
    model = SparseBertForMaskedLM(tiny_config(search="dam_s", mask_constant=5.0)).train()
    ids, mask = paddings()
    with torch.autocast("cpu", torch.bfloat16):
        eager, ours = (trained(model, name, ids, mask if padded else None) for name in ("sparse_eager", "sparse_sdpa"))
    for name in eager:
        scale = eager[name].abs().max().item()
        assert (ours[name] - eager[name]).abs().max().item() <= 0.03 * scale + 1e-4, name


# Memory


def saved_sizes(function):
    """Bytes that autograd keeps for backward, by storage."""
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = function()  # noqa: F841
    return storages.values()


@pytest.mark.parametrize("padded", [False, True])
def test_memory_does_not_grow_with_scores(tiny_config, padded):
    length, batch = 40, 64
    model = SparseBertModel(tiny_config(search="dam_s", attention_probs_dropout_prob=0.1)).train()
    ids = torch.randint(5, 100, (batch, length))
    mask = torch.ones_like(ids)
    mask[1:, 30:] = 1 - int(padded)
    scores = 4 * batch * 4 * length * length
    used = {}
    for name in ("sparse_eager", "sparse_sdpa"):
        model.set_attn_implementation(name)
        used[name] = sum(saved_sizes(lambda: model(ids, attention_mask=mask).last_hidden_state))
    assert used["sparse_eager"] - used["sparse_sdpa"] >= 2 * model.config.num_hidden_layers * scores


@pytest.mark.parametrize("pattern", ["dense", "window"])
def test_dropout_on_cpus_keeps_no_scores(pattern, tiny_config):
    """Nothing of the size of all scores is kept for backward, and the probabilities that are dropped are the same."""
    length, batch = 40, 6
    fields = {"pattern": pattern, "attention_probs_dropout_prob": 0.5, "mask_length": length}
    model = SparseBertModel(tiny_config(**fields, attn_implementation="sparse_sdpa")).train()
    ids = torch.randint(5, 100, (batch, length))
    sizes = saved_sizes(lambda: model(ids).last_hidden_state)
    assert sizes and max(sizes) < 4 * batch * model.config.num_attention_heads * length**2 / 2
    query, key, value = (torch.randn(batch, 4, length, 8, requires_grad=True) for _ in range(3))
    inputs = model.sparse_attention("sparse_sdpa", batch, length, length, dropout=0.5, device=ids.device)
    attention = BACKENDS["sparse_sdpa"].function
    result = attention(query, key, value, inputs, 1.0, 0.5)[0]
    grads = torch.autograd.grad(result, (query, key, value), grad := torch.randn_like(result))
    # The output is linear in the values, and scores are products: both hold for one dropout mask in both directions.
    torch.testing.assert_close((result * grad).sum(), (value * grads[2]).sum(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close((query * grads[0]).sum(), (key * grads[1]).sum(), rtol=1e-3, atol=1e-3)
    kept = attention(query, key, torch.ones_like(value), inputs, 1.0, 0.5)[0]
    assert kept.std() > 0.05 and kept.mean().item() == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize(
    "fields", [{"search": "dam_s"}, {"pattern": "dense", "attention_probs_dropout_prob": 0.1}], ids=str
)
def test_nothing_has_an_entry_per_pair_of_tokens(tiny_config, fields):
    """Neither a bias per distance, in training and evaluation, nor the gradient of a bias that has none."""
    length, sizes = 2600, {"num_hidden_layers": 1, "attn_implementation": "sparse_sdpa"}
    lengths = {"mask_length": length, "max_position_embeddings": length}
    model = SparseBertModel(tiny_config(**sizes, **lengths, **fields), add_pooling_layer=False)
    ids, table = torch.randint(5, 100, (1, length)), 4 * 4 * length**2  # of 4 heads
    assert growth(lambda: model.train()(ids).last_hidden_state.sum().backward()) < table
    if "search" in fields:
        model.set_attn_implementation("sparse_auto")
        with torch.no_grad():
            assert growth(lambda: model.eval()(ids)) < table
