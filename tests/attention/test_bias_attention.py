"""
Attention under a bias that is being learned, against the formula in float64.

Letters: B batch, H heads, n queries, m keys, d head size.
"""

import copy

import pytest
import torch

from sparsebert import SEARCHES, SparseBertForMaskedLM, SparseBertModel
from sparsebert.attention.backends import BACKENDS
from sparsebert.attention.kernels import bias_operator as module
from sparsebert.attention.kernels.bias_operator import bias_attention
from sparsebert.attention.mask_inputs import MaskInputs


HEADS = 3
NAMES = ("output", "query", "key", "value", "bias")


@pytest.fixture(params=[2**12, 2**19], ids=["small blocks", "default blocks"])
def block_bytes(request, monkeypatch):
    monkeypatch.setitem(module.BLOCK_BYTES, "cpu", request.param)


@pytest.fixture
def poisoned_memory():
    """Memory that is left unwritten holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


def tensors(batch, num_queries, num_keys, head_size, dtype=torch.float32, layout="host"):
    """query, key, value, bias, and the gradient of the output."""
    made = []
    for rows in (num_queries, num_keys, num_keys, num_queries):
        if layout == "host":
            made.append(torch.randn(batch, rows, HEADS, head_size).transpose(1, 2))
        elif layout == "contiguous":
            made.append(torch.randn(batch, HEADS, rows, head_size))
        else:
            made.append(torch.randn(batch, HEADS, head_size, 2 * rows).mT[:, :, ::2])
    bias = -2e1 * (torch.rand(HEADS, num_queries, num_keys) < 0.4)
    return *(tensor.to(dtype) for tensor in made[:3]), bias, made[3].to(dtype)


def ragged(batch, length):
    """Right, left and inner padding, and a sequence of nothing else."""
    padding = torch.ones(batch, length, dtype=torch.bool)
    padding[1 % batch, length - length // 3 :] = False
    padding[2 % batch, : length // 2] = False
    padding[3 % batch] = False
    return padding


def formula(
    query, key, value, bias, padding=None, first=None, last=None, learned_diagonal=True, causal=False, factors=1.0
):
    """The same with all scores in memory, in the inputs' dtype; the probabilities times `factors`."""
    tokens = {"first_token": first, "last_token": last, "learned_diagonal": learned_diagonal}
    inputs = MaskInputs("", bias.shape[1], bias.shape[2], padding=padding, causal=causal, **tokens)
    scores = (query @ key.mT).to(bias.dtype) * query.shape[-1] ** -0.5 + inputs.merged(bias)
    return (scores.softmax(-1) * factors).to(value.dtype) @ value


def with_gradients(function, inputs, grad, dtype=None):
    """Output and gradients of query, key, value and bias, by name; inputs keep their strides."""
    dtypes = [dtype or tensor.dtype for tensor in inputs]
    leaves = [tensor.detach().to(dtype).requires_grad_() for tensor, dtype in zip(inputs, dtypes, strict=True)]
    output = function(*leaves)
    gradients = torch.autograd.grad(output, leaves, grad.to(output.dtype))
    return dict(zip(NAMES, (output.detach(), *gradients), strict=True))


def assert_as_good_as_plain(results, plain, truth):
    """The 2x rule: at most twice plain PyTorch's error against float64, plus a few units of the greatest number."""
    for name, got in results.items():
        assert got.dtype == plain[name].dtype and got.isfinite().all(), name
        unit = torch.finfo(results["output"].dtype).eps * max(
            1.0, *(values.abs().max().item() for values in truth.values())
        )
        error, allowed = ((values - truth[name]).abs().max().item() for values in (got, plain[name]))
        assert error <= 2 * allowed + 8 * unit, (name, error, allowed, unit)


def assert_right(ours, reference, inputs, grad, padding):
    """Both in the dtype of the inputs, and the reference in float64, by the 2x rule."""
    results, plain = (with_gradients(function, inputs, grad) for function in (ours, reference))
    truth = with_gradients(reference, inputs, grad, torch.float64)
    if padding is not None:
        # Where all is padding, scores are rounded to the unit of REMOVED: in float32 to 64, so that all keys weigh the
        # same, and in float64 to 1.2e-7, which is also float32's eps.
        nothing, dtype = ~padding.any(-1), inputs[0].dtype
        unit = torch.finfo(dtype if dtype == torch.bfloat16 else torch.float32).eps
        for name in NAMES[:4]:
            got, want = results[name][nothing], plain[name][nothing]
            assert not nothing.any() or (got - want).abs().max() <= 8 * unit * max(1.0, want.abs().max().item()), name
        results, plain, truth = (
            {name: values if name == "bias" else values[~nothing] for name, values in tensors.items()}
            for tensors in (results, plain, truth)
        )
    assert_as_good_as_plain(results, plain, truth)


CASES = [
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


@pytest.mark.usefixtures("block_bytes", "poisoned_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_formula_in_float64(case, dtype):
    batch, num_queries, num_keys, head_size, padded, tokens, learned_diagonal, causal, layout = case
    *inputs, grad = tensors(batch, num_queries, num_keys, head_size, dtype, layout)
    inputs[3] = inputs[3].to(torch.promote_types(dtype, torch.float32))
    padding = ragged(batch, num_keys) if padded else None
    first = padding.int().argmax(-1) if "first" in tokens else None
    last = torch.arange(batch) % num_keys if "last" in tokens else None
    rest = (padding, first, last, learned_diagonal, causal)
    assert_right(
        lambda *leaves: bias_attention(*leaves, *rest), lambda *leaves: formula(*leaves, *rest), inputs, grad, padding
    )
    if last is not None:
        # Neither a padded key nor a last token's row moves the bias.
        alone = torch.zeros_like(padding)
        alone[0] = True
        grad = torch.zeros_like(grad)
        grad[0, :, -1] = 1.0
        last = torch.full((batch,), num_keys - 1)
        moved = with_gradients(lambda *leaves: bias_attention(*leaves, alone, None, last), inputs, grad)["bias"]
        assert (moved == 0).all()


def factors_of(query, key, bias, seed, dropout, *rest):
    """What dropout multiplies the probabilities by, read back through values that are the identity."""
    num_keys = key.shape[2]
    identity = torch.eye(num_keys).expand(*query.shape[:2], num_keys, num_keys)
    torch.manual_seed(seed)
    dropped = bias_attention(query, key, identity, bias, *rest, dropout=dropout)
    return dropped / bias_attention(query, key, identity, bias, *rest)


@pytest.mark.usefixtures("block_bytes")
@pytest.mark.parametrize("padded", [False, True])
def test_backward_sees_the_dropout_mask_of_forward(padded):
    *inputs, grad = tensors(5, 33, 33, 33)
    inputs[3] = inputs[3] / 20
    rest = (None, None)
    if padded:
        rest = (ragged(5, 33).index_fill(1, torch.tensor([0]), True).index_fill(0, torch.tensor([3]), True), None)
    query, key, _, bias = inputs
    factors = factors_of(query, key, bias, 7, 0.3, *rest).nan_to_num(0.0)
    torch.testing.assert_close(factors, (factors > 0.5) / (1 - round(0.3 * 2**16) / 2**16))

    def dropped(*leaves):
        torch.manual_seed(7)
        return bias_attention(*leaves, *rest, dropout=0.3)

    results = with_gradients(dropped, inputs, grad)
    plain = with_gradients(lambda *leaves: formula(*leaves, *rest, factors=factors), inputs, grad)
    truth = with_gradients(
        lambda *leaves: formula(*leaves, *rest, factors=factors.double()), inputs, grad, torch.float64
    )
    assert_as_good_as_plain(results, plain, truth)
    again = with_gradients(dropped, inputs, grad)
    for name in NAMES:
        torch.testing.assert_close(again[name], results[name])


def test_gradients_under_dropout_agree_with_finite_differences():
    *inputs, grad = tensors(2, 4, 4, 3, torch.float64)
    inputs[3] = torch.randn(HEADS, 4, 4, dtype=torch.float64)

    def loss(*leaves):
        torch.manual_seed(3)
        padding = torch.tensor([[True] * 4, [True] * 3 + [False]])
        return (bias_attention(*leaves, padding, last=torch.tensor([3, 2]), dropout=0.25) * grad).sum()

    assert torch.autograd.gradcheck(loss, [tensor.requires_grad_() for tensor in inputs])


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.9999])
def test_rate_and_mean_of_dropout(dropout):
    query, key, _, bias, _ = tensors(16, 64, 64, 64)
    query = torch.zeros_like(query)
    factors = factors_of(query, key, torch.zeros_like(bias), 0, dropout)
    count = factors.numel()
    deviation = (dropout * (1 - dropout) / count) ** 0.5
    assert abs((factors == 0).double().mean().item() - dropout) <= 5 * deviation + 2**-17
    # Entries of different heads, sequences and rows are dropped apart from each other.
    dropped = (factors == 0).double()
    for dim in range(4):
        both = (dropped * dropped.roll(1, dim)).mean().item()
        assert abs(both - dropout**2) <= 12 * deviation + 2**-16
    torch.manual_seed(1)
    first, second = (bias_attention(query, key, key, bias, dropout=dropout) for _ in range(2))
    assert not torch.allclose(first, second, atol=1e-2)


def test_blocks_do_not_depend_on_anything_but_their_size(monkeypatch):
    *inputs, grad = tensors(7, 20, 20, 16)
    results = []
    for size in (2**10, 2**13, 2**20):
        monkeypatch.setitem(module.BLOCK_BYTES, "cpu", size)
        results.append(with_gradients(bias_attention, inputs, grad))
    for other in results[1:]:
        for name in NAMES:
            torch.testing.assert_close(other[name], results[0][name])


def test_second_derivatives_are_refused():
    *inputs, _ = tensors(1, 4, 4, 8)
    inputs = [tensor.requires_grad_() for tensor in inputs]
    (first,) = torch.autograd.grad(bias_attention(*inputs).sum(), inputs[3], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives.*sparse_eager"):
        first.sum().backward()


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


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("last_token", ["real", "position"])
@pytest.mark.parametrize("diagonal", ["learned", "keep", "remove"])
@pytest.mark.parametrize("fields", [*({"search": name} for name in SEARCHES), {"share_layers": False}], ids=str)
def test_a_search_trains_as_with_sparse_eager(tiny_config, fields, diagonal, last_token, padded):
    fields = {"search": "dam_s", "mask_constant": 5.0, "initializer_range": 0.3} | fields
    model = SparseBertForMaskedLM(tiny_config(**fields, diagonal=diagonal, last_token=last_token)).train()
    ids, mask = paddings()
    mask = mask if padded else None
    eager, ours = (trained(model, name, ids, mask) for name in ("sparse_eager", "sparse_sdpa"))
    assert eager.keys() == ours.keys() and any("mask_logits" in name for name in ours)
    for name in eager:
        torch.testing.assert_close(ours[name], eager[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["sparse_sdpa", "sparse_auto"])
def test_a_decoder_searches_without_seeing_the_future(tiny_config, name):
    model = SparseBertModel(tiny_config(search="dam_s", is_decoder=True), add_pooling_layer=False).train()
    model.set_attn_implementation(name)
    ids, mask = paddings()
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    model(inputs_embeds=embeddings, attention_mask=mask).last_hidden_state[0, 7, :5].sum().backward()
    assert (embeddings.grad[0, 8:] == 0).all() and (embeddings.grad[0, :8] != 0).any()


def test_a_caller_s_4d_mask_applies_on_top(tiny_config):
    model = SparseBertForMaskedLM(tiny_config(search="dam_s", mask_constant=5.0)).train()
    ids, _ = paddings()
    mask = torch.rand(3, 1, 20, 20) < 0.7
    eager, ours = (trained(model, name, ids, mask) for name in ("sparse_eager", "sparse_sdpa"))
    for name in eager:
        torch.testing.assert_close(ours[name], eager[name], rtol=1e-4, atol=1e-5)
    mask[..., 7] = False  # then nothing depends on this token
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    for name in ("sparse_eager", "sparse_sdpa"):
        model.set_attn_implementation(name)
        states = model.bert(inputs_embeds=embeddings, attention_mask=mask).last_hidden_state
        (grad,) = torch.autograd.grad(states[:, 8:, :5].sum(), embeddings)
        assert (grad[:, 7] == 0).all() and (grad[:, 6] != 0).any(), name


def test_a_layer_s_own_4d_mask_applies_on_top():
    inputs = MaskInputs("sparse_sdpa", 4, 4, learned=(torch.randn(HEADS, 4, 4),), padding=torch.ones(2, 4) > 0)
    extra = torch.rand(2, 1, 4, 4) < 0.5
    layer = inputs.for_layer(0, extra)
    assert layer.learned == (None,)
    want = inputs.learned[0] + torch.zeros(2, HEADS, 4, 4)
    torch.testing.assert_close(layer.bias[0][extra.expand_as(want)], want[extra.expand_as(want)])
    assert (layer.bias[0][~extra.expand_as(want)] < -1e3).all()


def saved_bytes(function):
    """Memory that autograd keeps for backward, shared storages once."""
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = function()  # noqa: F841
    return sum(storages.values())


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
        used[name] = saved_bytes(lambda: model(ids, attention_mask=mask).last_hidden_state)
    assert used["sparse_eager"] - used["sparse_sdpa"] >= 2 * model.config.num_hidden_layers * scores


@pytest.mark.parametrize("padded", [False, True])
def test_bfloat16_autocast(tiny_config, padded):
    model = SparseBertForMaskedLM(tiny_config(search="dam_s", mask_constant=5.0)).train()
    ids, mask = paddings()
    with torch.autocast("cpu", torch.bfloat16):
        eager, ours = (trained(model, name, ids, mask if padded else None) for name in ("sparse_eager", "sparse_sdpa"))
    for name in eager:
        scale = eager[name].abs().max().item()
        assert (ours[name] - eager[name]).abs().max().item() <= 0.03 * scale + 1e-4, name


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_activation_checkpointing_changes_nothing(tiny_config, assert_same_gradients, dropout):
    model = SparseBertForMaskedLM(tiny_config(search="dam_s", attention_probs_dropout_prob=dropout)).train()
    recomputed = copy.deepcopy(model)
    recomputed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids, mask = paddings()
    want, got = (trained(each, "sparse_sdpa", ids, mask) for each in (model, recomputed))
    assert_same_gradients(got, want)


def test_compiled_in_one_graph(tiny_config):
    torch.compiler.reset()
    model = SparseBertModel(tiny_config(search="dam_s", attention_probs_dropout_prob=0.2), add_pooling_layer=False)
    model.train().set_attn_implementation("sparse_sdpa")
    ids, mask = paddings()
    graphs = torch.compile(model, fullgraph=True, backend="aot_eager")
    results = []
    for function in (model, graphs):
        torch.manual_seed(1)
        model.zero_grad()
        output = function(ids, attention_mask=mask).last_hidden_state
        output.square().sum().backward()
        results.append([output.detach(), *(p.grad.clone() for p in model.parameters())])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_operator_is_registered_as_pytorch_asks():
    *inputs, _ = tensors(2, 6, 6, 8)
    inputs = [tensor.requires_grad_() for tensor in inputs]
    tokens = (ragged(2, 6), torch.tensor([0, 1]), torch.tensor([5, 3]))
    options = (torch.tensor([1]), True, False, 0.25, 0.3, 4)
    operator = torch.ops.sparsebert.bias_attention.default
    torch.library.opcheck(operator, (*inputs, *tokens, None, *options, 0, None))
    values = torch.randn(HEADS, 3, requires_grad=True)
    torch.library.opcheck(operator, (*inputs[:3], values, *tokens, torch.tensor([2]), *options, 2, None))


@pytest.mark.parametrize("pattern", ["dense", "window"])
def test_dropout_on_cpus_keeps_no_scores(pattern, tiny_config):
    """Nothing of the size of all scores is kept for backward, and the probabilities that are dropped are the same."""
    length, batch = 40, 6
    fields = {"pattern": pattern, "attention_probs_dropout_prob": 0.5, "mask_length": length}
    model = SparseBertModel(tiny_config(**fields, attn_implementation="sparse_sdpa")).train()
    ids, sizes = torch.randint(5, 100, (batch, length)), []

    def keep(tensor):
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(ids).last_hidden_state
    scores = batch * model.config.num_attention_heads * length**2
    assert sizes and max(sizes) < scores / 2
    output.sum().backward()
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
