"""Every backend against a plain float64 loop, forward and gradients, and what a backend must refuse."""

import pytest
import torch
from transformers import AttentionInterface, StaticCache

from sparsebert import SparseBertLMHeadModel, SparseBertModel, SparseMask
from sparsebert.attention import ATTENTION_NAMES, BACKENDS


NAMES = list(ATTENTION_NAMES)
HEADS = 4


def reference(query, key, value, keep):
    """softmax over the kept keys, row by row; `keep` is `(B, H, n, m)`, the output `(B, n, H, d)`."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    rows = []
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            for i in range(query.shape[2]):
                keys = keep[b, h, i].nonzero()[:, 0]
                live = scores[b, h, i, keys].softmax(-1) @ value[b, h, keys]
                rows.append(live if len(keys) else torch.zeros_like(value[b, h, 0]))
    return torch.stack(rows).view(*query.shape[:3], -1).transpose(1, 2)


def kept(table, batch, padding=None, causal=False):
    """Brute force: which keys each query may see, bool `(B, H, n, n)`."""
    keep = table.expand(batch, *table.shape[-3:]).clone()
    if padding is not None:
        keep &= padding[:, None, None, :] & padding[:, None, :, None]
    return keep.tril() if causal else keep


def carrying(tiny_config, table, **fields):
    """A layer's self-attention in a model frozen to `table` `(H, n, n)`, and the model's [`SparseAttention`]."""
    length = table.shape[-1]
    config = tiny_config(
        frozen=True, mask_length=max(length, 3), num_attention_heads=HEADS, allow_empty_rows=True, **fields
    )
    model = SparseBertModel(config)
    model.set_mask(SparseMask(table[None], length))
    return model.encoder.layer[0].attention.self, model.sparse_attention


def prepared(sparse_attention, name, length, padding=None, batch=2):
    return sparse_attention(name, batch, length, length, padding, device=torch.device("cpu"))


def run(name, module, inputs, query, key, value, grad, attention_mask=None):
    """Output and gradients of query, key and value."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (query, key, value)]
    output, _ = AttentionInterface()[name](module, *leaves, attention_mask, mask_inputs=inputs)
    output.backward(grad)
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def expected(query, key, value, grad, keep):
    leaves = [tensor.detach().double().requires_grad_() for tensor in (query, key, value)]
    output = reference(*leaves, keep)
    output.backward(grad.double())
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def plain(query, key, value, grad, keep):
    """Dense masked softmax of PyTorch in the inputs' own dtype."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (query, key, value)]
    scores = (leaves[0] @ leaves[1].mT * query.shape[-1] ** -0.5).masked_fill(~keep, -1e4)
    weights = scores.softmax(-1) * keep.any(-1, keepdim=True)
    output = (weights @ leaves[2]).transpose(1, 2)
    output.backward(grad)
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def assert_as_good_as_plain(results, query, key, value, grad, keep):
    """The 2x rule: at most twice plain PyTorch's error against float64, plus a few roundings."""
    floor = {torch.float32: 1e-6, torch.bfloat16: 1e-2}[query.dtype]
    truth = expected(query, key, value, grad, keep)
    for what, got, want, other in zip(
        ("output", "query", "key", "value"), results, truth, plain(query, key, value, grad, keep), strict=True
    ):
        assert got.dtype == query.dtype and got.isfinite().all(), what
        error, allowed = (got - want).abs().max().item(), (other - want).abs().max().item()
        assert error <= 2 * allowed + floor, (what, error, allowed)


def random_table(length, density=0.5):
    """Different for every head, the diagonal off where it can be, no empty row."""
    table = torch.rand(HEADS, length, length) < density
    table |= torch.eye(length, dtype=torch.bool).roll(1, 0)
    return table


def case(name):
    """length, table (H, n, n), padding or None, causal"""
    if name == "one token":
        return 1, torch.ones(HEADS, 1, 1, dtype=torch.bool), None, False
    if name == "odd length":
        return 13, random_table(13, 0.3)[:1].expand(HEADS, 13, 13), None, False
    table = random_table(16, 0.3)
    padding = torch.arange(16) < torch.tensor([16, 11, 1])[:, None]
    if "empty" in name:
        table[0, 3], table[2, 7:] = False, False
    if "causal" in name:
        table |= torch.eye(16, dtype=torch.bool)
        if "empty" in name:
            table[1, 0] = False
    return 16, table, padding if "padding" in name else None, "causal" in name


CASES = [
    "one token",
    "odd length",
    "per head",
    "padding",
    "empty rows",
    "empty rows, padding",
    "causal",
    "causal, padding",
    "causal, empty rows",
]


@pytest.mark.parametrize("what", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_backend_equals_the_loop(tiny_config, name, what):
    length, table, padding, causal = case(what)
    module, sparse_attention = carrying(tiny_config, table, is_decoder=causal)
    query, key, value = torch.randn(3, 3, HEADS, length, 8).unbind(0)
    grad = torch.randn(3, length, HEADS, 8)
    inputs = prepared(sparse_attention, name, length, padding)
    results = run(name, module, inputs, query, key, value, grad)
    keep = kept(table, 3, padding, causal)
    assert_as_good_as_plain(results, query, key, value, grad, keep)
    # Without a live key: exactly 0, and nothing flows back.
    empty = ~keep.any(-1)
    assert (results[0].transpose(1, 2)[empty] == 0).all() and (results[1][empty] == 0).all()
    unseen = ~keep.any(-2)
    assert (results[2][unseen] == 0).all() and (results[3][unseen] == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_at_empty_rows_reaches_nothing(tiny_config, name):
    length, table, padding, _ = case("empty rows, padding")
    module, sparse_attention = carrying(tiny_config, table)
    query, key, value = torch.randn(3, 3, HEADS, length, 8).unbind(0)
    empty = ~kept(table, 3, padding).any(-1)
    grad = torch.randn(3, length, HEADS, 8) * empty.transpose(1, 2)[..., None]
    assert grad.abs().sum() > 0
    results = run(name, module, prepared(sparse_attention, name, length, padding), query, key, value, grad)
    assert all((gradient == 0).all() for gradient in results[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("head_size", [32, 64, 128])
@pytest.mark.parametrize("name", NAMES)
def test_accuracy_of_dtypes_and_head_sizes(tiny_config, name, head_size, dtype):
    length = 17
    table = random_table(length)
    module, sparse_attention = carrying(tiny_config, table)
    query, key, value = torch.randn(3, 2, HEADS, length, head_size, dtype=dtype).unbind(0)
    grad = torch.randn(2, length, HEADS, head_size, dtype=dtype)
    padding = torch.arange(length) < torch.tensor([17, 10])[:, None]
    results = run(name, module, prepared(sparse_attention, name, length, padding), query, key, value, grad)
    assert_as_good_as_plain(results, query, key, value, grad, kept(table, 2, padding))


@pytest.mark.parametrize("name", NAMES)
def test_mask_of_each_layer_is_its_own(tiny_config, name):
    table = torch.stack([random_table(12), random_table(12)])
    config = tiny_config(frozen=True, mask_length=12)
    model = SparseBertModel(config)
    model.set_mask(SparseMask(table, 12))
    query, key, value = torch.randn(3, 2, HEADS, 12, 8).unbind(0)
    inputs = prepared(model.sparse_attention, name, 12)
    for layer in range(2):
        module = model.encoder.layer[layer].attention.self
        results = run(name, module, inputs, query, key, value, torch.ones(2, 12, HEADS, 8))
        keep = kept(table[layer], 2)
        assert_as_good_as_plain(results, query, key, value, torch.ones(2, 12, HEADS, 8), keep)


@pytest.mark.parametrize("name", NAMES)
def test_queries_of_a_cache_are_the_last_positions(tiny_config, name):
    """3 new queries against 10 keys: rows 7 to 9 of the mask."""
    table = random_table(10) | torch.eye(10, dtype=torch.bool)
    module, sparse_attention = carrying(tiny_config, table, is_decoder=True)
    query, key, value = torch.randn(3, 2, HEADS, 10, 8).unbind(0)
    whole = expected(query, key, value, torch.ones(2, 10, HEADS, 8), kept(table, 2, causal=True))[0]
    inputs = sparse_attention(name, 2, 3, 10, device=torch.device("cpu"))
    output, _ = AttentionInterface()[name](module, query[:, :, 7:], key, value, None, mask_inputs=inputs)
    torch.testing.assert_close(output.double(), whole[:, 7:], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("name", NAMES)
def test_4d_mask_applies_on_top(tiny_config, name, kind):
    table = random_table(12)
    module, sparse_attention = carrying(tiny_config, table)
    given = torch.rand(2, 1, 12, 12) < 0.6
    given[1, 0, 5] = False
    attention_mask = given if kind == "bool" else torch.zeros(given.shape).masked_fill(~given, -3.4e38)
    query, key, value = torch.randn(3, 2, HEADS, 12, 8).unbind(0)
    grad = torch.randn(2, 12, HEADS, 8)
    results = run(name, module, prepared(sparse_attention, name, 12), query, key, value, grad, attention_mask)
    keep = table & given
    assert_as_good_as_plain(results, query, key, value, grad, keep)
    assert (results[0].transpose(1, 2)[~keep.any(-1)] == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_4d_mask_through_the_model(tiny_config, name):
    """The padding mask, written out, gives what the 2-D mask gives on real tokens."""
    model = SparseBertModel(tiny_config(pattern="window", attn_implementation=name)).eval()
    ids = torch.randint(100, (2, 12))
    padding = torch.arange(12) < torch.tensor([12, 8])[:, None]
    expected_states = model(ids, attention_mask=padding.long()).last_hidden_state
    written_out = padding[:, None, None, :].expand(2, 1, 12, 12)
    states = model(ids, attention_mask=written_out).last_hidden_state
    torch.testing.assert_close(states[padding], expected_states[padding])


# Of the forms sparse_sdpa refuses the multiplicative one, see test_refusals.
@pytest.mark.parametrize(
    "name, form",
    [
        (name, form)
        for name in NAMES
        for form in ("additive", "log", "multiplicative")
        if (name, form) != ("sparse_sdpa", "multiplicative")
    ],
)
@pytest.mark.parametrize("hard", [True, False], ids=["hard", "soft"])
def test_searched_mask_and_its_gradient(tiny_config, name, hard, form):
    """Output, and the gradients of query, key, value and logits, against the formulas written out in float64."""
    length = 9
    config = tiny_config(search="dam_u", symmetric=False, mask_length=length, mask_form=form, hard=hard)
    config.mask_constant = 10.0
    model = SparseBertModel(config).train()
    sparse_attention = model.sparse_attention
    with torch.no_grad():
        sparse_attention.mask_logits.normal_(std=0.2)
    module = model.encoder.layer[0].attention.self
    padding = torch.arange(length) < torch.tensor([9, 6])[:, None]
    query, key, value = torch.randn(3, 2, HEADS, length, 8).unbind(0)
    grad = torch.randn(2, length, HEADS, 8)
    torch.manual_seed(3)
    results = run(name, module, prepared(sparse_attention, name, length, padding), query, key, value, grad)

    torch.manual_seed(3)
    noise = torch.logit(torch.rand(1, HEADS, length**2), eps=1e-6).double()
    theta = sparse_attention.mask_logits.detach().double().requires_grad_()
    leaves = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    noisy = (10.0 * theta + noise).view(1, HEADS, length, length)
    soft = noisy.sigmoid()
    sample = soft + ((soft > 0.5).double() - soft).detach() if hard else soft
    scores = (leaves[0] @ leaves[1].mT * 8**-0.5).masked_fill(~padding[:, None, None, :], -torch.inf)
    if form == "additive":
        weights = (scores - 10.0 * (1 - sample)).softmax(-1)
    elif form == "multiplicative":
        weights = sample * scores.softmax(-1)
    else:
        log = soft.log()
        weights = (scores + (log + (-10.0 * (1 - sample) - log).detach() if hard else log)).softmax(-1)
    output = (weights @ leaves[2]).transpose(1, 2)
    output.backward(grad.double())
    wanted = [output.detach(), *(leaf.grad for leaf in leaves), theta.grad]
    for got, want in zip([*results, sparse_attention.mask_logits.grad], wanted, strict=True):
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=1e-4)
    assert theta.grad.abs().sum() > 0


# What must be refused


@pytest.mark.parametrize("phase", ["train", "eval", "frozen"])
@pytest.mark.parametrize("stock", ["eager", "sdpa"])
def test_stock_name_on_a_masked_model_is_refused(tiny_config, stock, phase):
    model = SparseBertModel(tiny_config(pattern="window") if phase == "frozen" else tiny_config())
    model.train(phase == "train")
    model.set_attn_implementation(stock)
    with pytest.raises(ValueError, match=f"{stock!r} would ignore.*sparse_eager.*sparse_sdpa.*sparse_auto"):
        model(torch.randint(100, (1, 8)))


@pytest.mark.parametrize("phase", ["train", "frozen"])
def test_sdpa_refuses_probabilities(tiny_config, phase):
    fields = {"pattern": "window"} if phase == "frozen" else {}
    model = SparseBertModel(tiny_config(attn_implementation="sparse_sdpa", **fields)).train(phase == "train")
    with pytest.raises(ValueError, match="sparse_sdpa does not support output_attentions=True: use sparse_eager"):
        model(torch.randint(100, (1, 8)), output_attentions=True)


def test_sdpa_refuses_multiplicative_masks_while_searching(tiny_config):
    model = SparseBertModel(tiny_config(mask_form="multiplicative", attn_implementation="sparse_sdpa"))
    with pytest.raises(ValueError, match="sparse_sdpa does not support.*multiplicative.*sparse_eager"):
        model.train()(torch.randint(100, (1, 8)))
    model.set_attn_implementation("sparse_auto")
    assert model(torch.randint(100, (1, 8))).last_hidden_state.isfinite().all()


def test_static_cache_is_refused(tiny_config):
    config = tiny_config(pattern="window", is_decoder=True)
    model = SparseBertLMHeadModel(config).eval()
    cache = StaticCache(config=config, max_cache_len=20)
    with pytest.raises(ValueError, match="static key/value caches are not supported.*DynamicCache"):
        model(torch.randint(100, (1, 8)), past_key_values=cache, use_cache=True)


def test_only_auto_chooses(tiny_config):
    ids = torch.randint(100, (1, 8))
    model = SparseBertModel(tiny_config(pattern="window")).eval()
    assert len(model(ids, output_attentions=True).attentions) == 2
    for name in BACKENDS:
        model.set_attn_implementation(name)
        assert model(ids).last_hidden_state.shape == (1, 8, 32)


@pytest.mark.parametrize("name", NAMES)
def test_layer_without_its_base_model_is_an_error(tiny_config, name):
    model = SparseBertModel(tiny_config(pattern="window", attn_implementation=name))
    with pytest.raises(RuntimeError, match="without its base model"):
        model.encoder.layer[0](torch.randn(1, 8, 32))
