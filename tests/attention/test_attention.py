"""
Every backend against dense attention in float64, forward and gradients, and what a backend must refuse.

The tests follow the registries: a new backend, pattern or search is in them without a change here. What a backend is
expected to refuse is taken from its row.

Letters: B batch, H heads, n queries, m keys, d head size.
"""

import functools
import itertools
import math
import random
import re
from dataclasses import dataclass, replace

import pytest
import torch
from conftest import TINY
from exactness import assert_as_good_as_plain, with_gradients
from transformers import AttentionInterface, BertConfig, BertLMHeadModel, LlamaConfig, LlamaForCausalLM, StaticCache

from sparsebert import (
    PATTERNS,
    SEARCHES,
    SparseBertConfig,
    SparseBertForMaskedLM,
    SparseBertLMHeadModel,
    SparseBertModel,
    SparseMask,
    build_pattern,
    sparse_dot_product_attention,
)
from sparsebert.attention.backends import BACKENDS, refusal
from sparsebert.attention.capabilities import WANTED, Request
from sparsebert.attention.choosing.choice import ATTENTION_NAMES, CHOICES
from sparsebert.attention.interface import sparse_attention_forward
from sparsebert.attention.kernels import bias_operator, flex
from sparsebert.masks.sparse_mask import SPECIAL_TOKENS


HEADS = 4
TRAINING = Request("cpu", torch.float32, 2, HEADS, 12, 12, 8, gradients=True, padded=True)


def serving(**fields):
    """The backends whose rows do not refuse a request like `TRAINING` with these fields."""
    request = replace(TRAINING, **fields)
    return [name for name in BACKENDS if refusal(name, request) is None]


NAMES = [*serving(), *CHOICES]
ADDITIVE_NAMES = [*serving(needs=frozenset({"additive"})), *CHOICES]


def dense(query, key, value, keep, factors=1.0):
    """Softmax over the kept keys, in the inputs' dtype; the probabilities times `factors` (those of dropout)."""
    scores = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~keep, -1e4)
    return scores.softmax(-1) * keep * factors @ value


def assert_right(results, query, key, value, grad, keep, factors=1.0, about="", units=4):
    """By the 2x rule; `results` are the output and, unless there are none, the gradients."""

    def formula(*inputs):
        return dense(*inputs, keep, factors)

    plain, truth = (with_gradients(formula, (query, key, value), grad, dtype) for dtype in (None, torch.float64))
    assert_as_good_as_plain(results, plain, truth, about, units)
    # Without a live key, the output is exactly 0 and gets no gradient.
    empty, unseen = ~keep.any(-1), ~keep.any(-2)
    for got, without in zip(results, (empty, empty, unseen, unseen), strict=False):
        assert (got[without] == 0).all(), about


# The grid: backends x masks x lengths x paddings x dropout, other choices drawn


@pytest.fixture
def poisoned_memory():
    """Output memory that a kernel leaves unwritten holds NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


# Masks with a bit per signed distance, or with the columns of special tokens alone, by their fields.
SIGNED = {
    "signed offsets": {"form": "offsets", "special_tokens": "first_last", "special_rows": False, "symmetric": False},
    "signed blocks": {"form": "blocks", "special_tokens": "first", "symmetric": False},
    "slabs": {"form": "blocks", "special_tokens": "first_last", "symmetric": False, "query_block_size": 64},
    "columns and blocks": {"form": "blocks", "special_tokens": "first_last", "special_rows": False},
    "columns and table": {"form": "table", "special_tokens": "first", "special_rows": False},
}
MASKS = [*PATTERNS, *SEARCHES, *SIGNED, "per head", "empty rows"]
LENGTHS = (1, 7, 63, 64, 100, 128, 257, 512)
PADDINGS = ("none", "right", "left", "mixed", "holes", "nothing real")
HEAD_SIZES = (8, 20, 32, 64, 128)
DROPOUTS = (0.0, 0.125)  # a multiple of 1/65536, which sparse_triton rounds to
LAYOUTS = ("contiguous", "heads last", "one projection", "strided")
BLOCK_SIZE = 16


@functools.cache
def able(name, device, field, values):
    """The values of a field of a request that a backend serves, or all if it refuses any."""
    request = replace(TRAINING, device=device, head_size=64)
    return [v for v in values if refusal(name, replace(request, **{field: v})) is None] or values


@functools.cache
def special_tokens_of(mask):
    if mask in {**SEARCHES, **SIGNED}:
        return SEARCHES[mask].special_tokens if mask in SEARCHES else SIGNED[mask]["special_tokens"]
    return build_pattern(mask, 17, 1).special_tokens if mask in PATTERNS else "first"


@dataclass(frozen=True)
class Case:
    name: str
    device: str
    mask: str
    length: int
    padding: str
    dropout: float
    head_size: int
    dtype: torch.dtype
    layout: str
    causal: bool
    diagonal: bool | None
    last_token: str
    mask_length: int
    num_heads: int = 2


def draw(name, device, mask, length, padding=None, dropout=None):
    """A case of the grid. Whatever is not given is drawn at random, with the arguments as the seed."""
    rng = random.Random(f"{name} {mask} {length} {padding} {dropout}")
    padding = padding or rng.choice(PADDINGS)
    dropout = rng.choice(able(name, device, "dropout", DROPOUTS)) if dropout is None else dropout
    sizes = able(name, device, "head_size", HEAD_SIZES)
    if dropout:  # which is read through values, as many numbers at a time as a head has
        sizes = [size for size in sizes if 8 * size >= length] or sizes
    return Case(
        *(name, device, mask, length, padding, dropout),
        rng.choice(sizes),
        rng.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16)),
        rng.choice(LAYOUTS),
        rng.random() < 0.25 and special_tokens_of(mask) != "first_last",
        rng.choice((None, None, True, False)),
        rng.choice(("real", "real", "position")),
        max(length + rng.choice((0, 0, 9)), 17),  # patterns need some tokens
    )


def case_of(name, device, length, mask="per head", padding="none", **fields):
    """A case of which the fields that are not given are plain."""
    plain = {"head_size": 32, "dtype": torch.float32, "layout": "heads last", "causal": False}
    plain |= {"dropout": 0.0, "diagonal": None, "last_token": "real", "num_heads": 1}
    return Case(name, device, mask, length, padding, mask_length=max(length, 17), **plain | fields)


def named(fields):
    """The id of a test by the fields of its case."""
    return ", ".join(f"{key} {value}" for key, value in fields.items())


def make_mask(case):
    length, num_heads = case.mask_length, case.num_heads
    fields = {"last_token": case.last_token}
    if case.diagonal is not None:
        fields["diagonal"] = case.diagonal
    if case.mask in PATTERNS:
        return build_pattern(case.mask, length, num_heads, num_layers=2).replace(**fields)
    if case.mask in SEARCHES:
        form, fields["special_tokens"] = SEARCHES[case.mask].frozen_form, special_tokens_of(case.mask)
        if form == "offsets":
            return SparseMask(torch.rand(num_heads, length) < 0.1, length, form, **fields)
        if form == "blocks":
            keep = torch.rand(num_heads, -(-length // BLOCK_SIZE)) < 0.3
            return SparseMask(keep, length, form, BLOCK_SIZE, **fields)
        table = torch.rand(num_heads, length, length) < 0.2
        return SparseMask(table | table.mT, length, form, **fields)
    if case.mask in SIGNED:
        fields |= SIGNED[case.mask]
        size, fields["block_size"] = length, BLOCK_SIZE if fields["form"] == "blocks" else None
        if fields["block_size"]:
            size = -(-length // BLOCK_SIZE)
        shape = (length, length) if fields["form"] == "table" else (2 * size - 1 if "symmetric" in fields else size,)
        return SparseMask(torch.rand(num_heads, *shape) < 0.2, length, **fields)
    table = torch.rand(num_heads, length, length) < torch.tensor([0.03, 0.7][-num_heads:])[:, None, None]
    if case.mask == "empty rows":
        table[0] = False
        table[:, ::3] = False
        return SparseMask(table, length)
    return SparseMask(table, length, special_tokens="first", **fields)


def make_padding(case):
    """Bool `(B, n)` or `None`: a full sequence, shorter ones, one of a single token."""
    length = case.length
    if case.padding == "none":
        return None
    if case.padding == "holes":
        padding = torch.rand(3, length) < 0.6
        padding[0, 0] = padding[1, -1] = False
        return padding
    padding = torch.arange(length) < torch.tensor([length, -(-2 * length // 3), 1])[:, None]
    if case.padding == "nothing real":
        padding[1] = False
    if case.padding == "mixed":
        return torch.stack([padding[1], padding[1].flip(0), padding[0] & padding[1].roll(length // 6)])
    return padding.flip(1) if case.padding == "left" else padding


def kept(mask, length, padding=None, causal=False, layer=0, batch=2):
    """Brute force: which keys each query may see, bool `(B, H, n, n)`."""
    tables = []
    for b in range(batch if padding is None else len(padding)):
        table = mask.structure(length)[layer].clone()
        real = list(range(length)) if padding is None else padding[b].nonzero()[:, 0].tolist()
        special = real[:1] if mask.special_tokens != "none" else []
        if mask.special_tokens == "first_last" and real:
            special.append(real[-1] if mask.last_token == "real" else length - 1)
        for position in special:
            table[:, :, position] = True
            if mask.special_rows:
                table[:, position] = True
        if mask.diagonal is not None:
            table.diagonal(dim1=-2, dim2=-1).fill_(mask.diagonal)
        table = table.tril() if causal else table
        padded = torch.ones(length, dtype=torch.bool)
        padded[real] = False
        table[:, padded] = table[:, :, padded] = False
        tables.append(table)
    return torch.stack(tables)


def laid_out(case, batch):
    """Query, key, value and a gradient `(B, H, n, d)` in one of the memory orders that callers have."""
    length, size, num_heads = case.length, case.head_size, case.num_heads
    if case.layout == "contiguous":
        tensors = torch.randn(4, batch, num_heads, length, size, dtype=case.dtype).unbind(0)
    elif case.layout == "heads last":
        tensors = torch.randn(4, batch, length, num_heads, size, dtype=case.dtype).transpose(2, 3).unbind(0)
    elif case.layout == "one projection":
        tensors = torch.randn(batch, length, num_heads, 4 * size, dtype=case.dtype).transpose(1, 2).chunk(4, -1)
    else:
        tensors = torch.randn(4, batch, num_heads, size, length, dtype=case.dtype).mT.unbind(0)
    return [tensor.to(case.device) for tensor in tensors]


def attend(case, mask, padding, query, key, value):
    torch.manual_seed(7)
    return sparse_dot_product_attention(
        query,
        key,
        value,
        mask,
        padding,
        layer=mask.num_layers - 1,
        dropout_p=case.dropout,
        is_causal=case.causal,
        backend=case.name,
    )


def dropout_factors(case, mask, padding, keep):
    """The factor that dropout applied to each probability, read from uniform probabilities and one-hot values."""
    width = case.head_size
    batch, num_heads, length = keep.shape[:3]
    zeros = torch.zeros(batch, num_heads, length, width, dtype=case.dtype, device=case.device)
    unit = torch.eye(length, -(-length // width) * width, dtype=case.dtype, device=case.device)
    columns = [
        attend(case, mask, padding, zeros, zeros, part.expand(batch, num_heads, -1, -1).contiguous())
        for part in unit.split(width, dim=1)
    ]
    probabilities = torch.cat(columns, dim=-1)[..., :length].double()
    factors = probabilities * keep.sum(-1, keepdim=True)
    kept_ones, factor = factors > 0.5, 1 / (1 - case.dropout)
    wanted = kept_ones.double() * factor
    assert (kept_ones <= keep).all() and (factors - wanted).abs().max() < 0.02, case
    number = int(keep.sum())
    share = 1 - int(kept_ones.sum()) / max(number, 1)
    assert abs(share - case.dropout) < 6 * (case.dropout * (1 - case.dropout) / max(number, 1)) ** 0.5 + 1e-9, case
    return wanted.to(case.dtype)


def check(case, gradients=True):
    mask, padding = make_mask(case), make_padding(case)
    query, key, value, grad = laid_out(case, 2 if padding is None else len(padding))
    shape = (*query.shape[:3], *key.shape[2:])
    flags = {"gradients": gradients, "padded": padding is not None, "causal": case.causal}
    reason = refusal(case.name, Request(case.device, case.dtype, *shape, case.dropout > 0, **flags))
    on_device = None if padding is None else padding.to(case.device)
    if reason is not None:
        with pytest.raises(ValueError, match=re.escape(f"{case.name} cannot run here: {reason}. Use ")):
            attend(case, mask, on_device, query.requires_grad_(), key, value)
        return
    keep = kept(mask, case.length, padding, case.causal, mask.num_layers - 1, len(query)).to(case.device)
    if gradients:
        results = with_gradients(lambda *inputs: attend(case, mask, on_device, *inputs), (query, key, value), grad)
    else:
        with torch.no_grad():  # of inputs that are those of parameters
            results = [attend(case, mask, on_device, query.detach().requires_grad_(), key, value)]
    factors = 1.0
    if case.dropout:
        with torch.no_grad():
            factors = dropout_factors(case, mask, on_device, keep)
        again = with_gradients(lambda *inputs: attend(case, mask, on_device, *inputs), (query, key, value), grad)
        # With the same numbers dropped the same to rounding, with others nothing like it.
        bound = 4 * torch.finfo(case.dtype).eps * max(values.double().norm() for values in results)
        assert all((got - other).double().norm() <= bound for got, other in zip(results, again, strict=True)), case
    # These are as exact as the formula; PyTorch's own fused attention, for one, is not.
    units = 4 if case.name in ("sparse_eager", "sparse_cpu", "sparse_triton", "sparse_flex") else 16
    assert_right(results, query, key, value, grad, keep, factors, case, units)


def check_sample(name, device, mask):
    turn = (MASKS.index(mask) + list(BACKENDS).index(name)) % 4  # one mask of four gets 257, none gets 512
    for length in (*LENGTHS[turn % 2 : -2 : 2], *LENGTHS[-2:-1][turn:]):
        check(draw(name, device, mask, length))


def check_all(name, device, mask):
    for chosen in itertools.product(LENGTHS, PADDINGS, able(name, device, "dropout", DROPOUTS)):
        check(draw(name, device, mask, *chosen))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", serving())
def test_grid(poisoned_memory, name, mask):
    check_sample(name, "cpu", mask)


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", BACKENDS)
def test_whole_grid(poisoned_memory, name, mask):
    check_all(name, "cpu", mask)


@pytest.mark.parametrize("head_size, diagonal", [(32, None), (64, False)])
@pytest.mark.parametrize("special_tokens", SPECIAL_TOKENS)
@pytest.mark.parametrize("name", serving())
def test_special_tokens_of_left_padded_sequences(poisoned_memory, name, special_tokens, head_size, diagonal):
    """A batch that mixes left and right padding, with a mask per head: the first token is the first real one."""
    length = 37
    table = torch.rand(2, length, length) < torch.tensor([0.05, 0.5])[:, None, None]
    masks = [SparseMask(table, length, special_tokens=special_tokens, diagonal=diagonal)]
    masks += [] if special_tokens == "none" else [masks[0].replace(special_rows=False)]
    padding = torch.ones(5, length, dtype=torch.bool)
    padding[0, 20:], padding[1, :20], padding[2, :7], padding[2, 30:] = False, False, False, False
    padding[3, :-1], padding[4] = False, False
    query, key, value, grad = torch.randn(4, 5, 2, length, head_size).unbind(0)

    def attention(*leaves):
        return sparse_dot_product_attention(*leaves, mask, padding, is_causal=causal, backend=name)

    for mask, causal in itertools.product(masks, {False, special_tokens == "first"}):
        keep = kept(mask, length, padding, causal)
        results = with_gradients(attention, (query, key, value), grad)
        assert_right(results, query, key, value, grad, keep, units=16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BACKENDS)
def test_grid_on_cuda(poisoned_memory, name):
    for mask in MASKS:
        check_sample(name, "cuda", mask)


@pytest.mark.gpu
@pytest.mark.parametrize("padding", ["none", "right"])
@pytest.mark.parametrize("length", [64, 192])
def test_queries_without_a_key_on_cuda(length, padding):
    """At these lengths, cuDNN's backward gives NaN where every key of a query is removed (pytorch#196678)."""
    check(case_of("sparse_sdpa", "cuda", length, mask="empty rows", padding=padding, dtype=torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
def test_whole_grid_on_cuda(poisoned_memory, name):
    for mask in MASKS:
        check_all(name, "cuda", mask)


# Through a layer of a model, in which the mask is prepared once for all layers


def carrying(tiny_config, table, **fields):
    """The self-attention of the layers of a model frozen to `table` `(H, n, n)` or `(L, H, n, n)`, and its mask."""
    length = table.shape[-1]
    config = tiny_config(
        frozen=True, mask_length=max(length, 3), num_attention_heads=HEADS, allow_empty_rows=True, **fields
    )
    model = SparseBertModel(config)
    model.set_mask(SparseMask(table.view(-1, *table.shape[-3:]), length))
    return [layer.attention.self for layer in model.encoder.layer], model.sparse_attention


def prepared(sparse_attention, name, length, padding=None, batch=2, needs=frozenset()):
    return sparse_attention(name, batch, length, length, padding, device=torch.device("cpu"), needs=needs)


def run(name, module, inputs, query, key, value, grad, attention_mask=None):
    """Output `(B, H, n, d)` and gradients of query, key and value."""

    def function(*leaves):
        output, _ = AttentionInterface()[name](module, *leaves, attention_mask, mask_inputs=inputs)
        assert output.is_contiguous()
        return output.transpose(1, 2)

    return with_gradients(function, (query, key, value), grad)


def random_table(length, density=0.5):
    """Different for every head, the diagonal off where it can be, no empty row."""
    table = torch.rand(HEADS, length, length) < density
    table |= torch.eye(length, dtype=torch.bool).roll(1, 0)
    return table


def numbers(batch, length, size=8):
    return torch.randn(4, batch, HEADS, length, size).unbind(0)


def cut(table, batch, padding=None, causal=False):
    """[`kept`] of a table `(H, n, n)`."""
    return kept(SparseMask(table, table.shape[-1]), table.shape[-1], padding, causal, batch=batch)


@pytest.mark.parametrize("length, causal", [(1, False), (16, False), (16, True)])
@pytest.mark.parametrize("name", NAMES)
def test_layers_equal_the_formula(poisoned_memory, tiny_config, name, length, causal):
    """Under a mask of their own with rows that keep nothing, and padding. A gradient at such rows reaches nothing."""
    table = torch.stack([random_table(length, 0.3), random_table(length, 0.3)])
    table[1, 0, 3:4], table[1, 2, 7:] = False, False
    padding = torch.arange(length) < torch.tensor([length, min(11, length), 1])[:, None]
    modules, sparse_attention = carrying(tiny_config, table, is_decoder=causal)
    query, key, value, grad = numbers(3, length)
    inputs = prepared(sparse_attention, name, length, padding, batch=3)
    for module, own in zip(modules, table, strict=True):
        keep = cut(own, 3, padding, causal)
        results = run(name, module, inputs, query, key, value, grad)
        assert_right(results, query, key, value, grad, keep)
        results = run(name, module, inputs, query, key, value, grad * ~keep.any(-1, keepdim=True))
        assert all((gradient == 0).all() for gradient in results[1:])


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("name", [*serving(num_queries=3, causal=True), *CHOICES])
def test_queries_of_a_cache_are_the_last_positions(tiny_config, name, padded):
    """3 new queries against 10 keys: rows 7 to 9 of the mask."""
    table = random_table(10) | torch.eye(10, dtype=torch.bool)
    padding = torch.arange(10) >= torch.tensor([0, 4])[:, None] if padded else None
    (module, _), sparse_attention = carrying(tiny_config, table, is_decoder=True)
    query, key, value, _ = numbers(2, 10)
    whole = dense(query.double(), key.double(), value.double(), cut(table, 2, padding, causal=True))
    inputs = sparse_attention(name, 2, 3, 10, padding, device=torch.device("cpu"))
    output, _ = AttentionInterface()[name](module, query[:, :, 7:], key, value, None, mask_inputs=inputs)
    torch.testing.assert_close(output.transpose(1, 2).double(), whole[:, :, 7:], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("name", ADDITIVE_NAMES)
def test_4d_mask_applies_on_top(tiny_config, name, kind):
    table = random_table(12)
    (module, _), sparse_attention = carrying(tiny_config, table)
    given = torch.rand(2, 1, 12, 12) < 0.6
    given[1, 0, 5] = False
    attention_mask = given if kind == "bool" else torch.zeros(given.shape).masked_fill(~given, -3.4e38)
    query, key, value, grad = numbers(2, 12)
    inputs = prepared(sparse_attention, name, 12, needs=frozenset({"additive"}))
    results = run(name, module, inputs, query, key, value, grad, attention_mask)
    assert_right(results, query, key, value, grad, table & given)


@pytest.mark.parametrize("name", ADDITIVE_NAMES)
def test_4d_mask_through_the_model(tiny_config, name):
    """A padding mask written out in 4-D gives the same as in 2-D on real tokens."""
    model = SparseBertModel(tiny_config(pattern="window", attn_implementation=name)).eval()
    ids = torch.randint(100, (2, 12))
    padding = torch.arange(12) < torch.tensor([12, 8])[:, None]
    expected_states = model(ids, attention_mask=padding.long()).last_hidden_state
    written_out = padding[:, None, None, :].expand(2, 1, 12, 12)
    states = model(ids, attention_mask=written_out).last_hidden_state
    torch.testing.assert_close(states[padding], expected_states[padding])


LEARNED = frozenset({"learned"})
NEEDS = {"additive": LEARNED, "log": LEARNED, "multiplicative": LEARNED | {"gate"}}


def assert_searched(config, name, padding, entries, special=None):
    """
    Output, and the gradients of query, key, value and logits, against the formulas written out in float64. `entries`
    gives those of a sample of the parameters `(H, K)`; `special` `(B, 1, n, n)` are always on.
    """
    model = SparseBertModel(config).train()
    sparse_attention, module = model.sparse_attention, model.encoder.layer[0].attention.self
    with torch.no_grad():
        sparse_attention.mask_logits.normal_(std=0.2)
    batch, length = padding.shape
    query, key, value, grad = numbers(batch, length)
    grad = grad * padding[:, None, :, None]  # a padded query's output means nothing
    torch.manual_seed(3)
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    inputs = prepared(sparse_attention, name, length, padding, batch)
    output = AttentionInterface()[name](module, *leaves, None, mask_inputs=inputs)[0].transpose(1, 2)
    output.backward(grad)
    results = [output * padding[:, None, :, None], *(leaf.grad for leaf in leaves), sparse_attention.mask_logits.grad]

    torch.manual_seed(3)
    theta = sparse_attention.mask_logits.detach().double().requires_grad_()
    noise = torch.logit(torch.rand(theta.shape), eps=1e-6).double()
    leaves = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    soft = (10.0 * theta + noise).sigmoid()
    sample = soft + ((soft > 0.5).double() - soft).detach() if config.hard else soft
    sample, soft = entries(sample[0]), entries(soft[0])
    off = 10.0 * (sample - 1)
    if config.mask_form == "log":
        log = torch.log(sample + (1 - sample.detach()) * math.exp(-10.0)) if config.hard else soft.log()
        off = log + (off - log).detach() if config.hard else log
    keep, position = padding[:, None, None, :], torch.arange(length)
    keep = keep & (position[:, None] >= position) if config.is_decoder else keep
    scores = leaves[0] @ leaves[1].mT * 8**-0.5
    if config.mask_form != "multiplicative":
        scores = scores + (off if special is None else off.masked_fill(special, 0.0))
    weights = scores.masked_fill(~keep, -torch.inf).softmax(-1).where(padding[:, None, :, None], 0.0).nan_to_num()
    output = (weights * sample if config.mask_form == "multiplicative" else weights) @ leaves[2]
    output.backward(grad.double())
    wanted = [output.detach(), *(leaf.grad.nan_to_num() for leaf in leaves), theta.grad.nan_to_num()]
    for got, want in zip(results, wanted, strict=True):
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=1e-4)
    assert theta.grad.abs().sum() > 0


@pytest.mark.parametrize(
    "name, form", [(name, form) for form, needs in NEEDS.items() for name in (*serving(needs=needs), *CHOICES)]
)
@pytest.mark.parametrize("hard", [True, False], ids=["hard", "soft"])
def test_searched_mask_and_its_gradient(tiny_config, name, hard, form):
    config = tiny_config(search="dam_u", symmetric=False, mask_length=9, mask_form=form, hard=hard, mask_constant=10.0)
    padding = torch.arange(9) < torch.tensor([9, 6])[:, None]
    assert_searched(config, name, padding, lambda sample: sample.view(HEADS, 9, 9))


@pytest.mark.parametrize(
    "special_tokens, causal",
    # The last token is undefined in a decoder.
    [*itertools.product(SPECIAL_TOKENS, [False]), *itertools.product(("none", "first"), [True])],
)
@pytest.mark.parametrize("name", [*serving(needs=LEARNED), *CHOICES])
def test_searched_mask_and_its_gradient_under_left_padding(tiny_config, name, special_tokens, causal):
    """A batch that mixes left and right padding."""
    fields = {"search": "dam_s", "hard": True, "mask_length": 13, "mask_constant": 10.0}
    config, position = tiny_config(**fields, special_tokens=special_tokens, is_decoder=causal), torch.arange(13)
    padding = (position >= torch.tensor([0, 5, 2, 12])[:, None]) & (position < torch.tensor([8, 13, 11, 13])[:, None])
    special = torch.zeros(4, 13, dtype=torch.bool)
    for row, real in zip(special, padding, strict=True):
        positions = real.nonzero()[:, 0]
        row[{"none": [], "first": positions[:1], "first_last": positions[[0, -1]]}[special_tokens]] = True
    offset = (position[:, None] - position).abs()

    def entries(sample):
        # Offsets without a parameter occur at special tokens alone.
        number = sample.shape[-1]
        return sample[:, offset.clamp(max=number - 1)] * (offset < number)

    assert_searched(config, name, padding, entries, special[:, None, :, None] | special[:, None, None, :])


# What must be refused


@pytest.mark.parametrize("phase", ["train", "eval", "frozen"])
def test_stock_attention_never_runs_without_the_mask(tiny_config, phase):
    """Not even where the configuration is replaced by a stock one, whose layers would run it."""
    model = SparseBertModel(tiny_config(pattern="window") if phase == "frozen" else tiny_config())
    model.train(phase == "train").config = tiny_config(BertConfig, attn_implementation="sdpa")
    with pytest.raises(ValueError, match=f"'sdpa' would ignore.*{', '.join(ATTENTION_NAMES)}"):
        model(torch.randint(100, (1, 8)))


# The reasons that backends give: head size, dtype, dropout, fewer queries than keys, gradients.
CANNOT = [
    ("sparse_triton", {}, "it needs a CUDA device, got 'cpu'"),
    ("sparse_flex", {"gradients": True}, "it has no gradients on device 'cpu'.*no_grad"),
    ("sparse_flex", {"dropout": 0.1}, "it has no attention dropout; set .*_prob to 0"),
    ("sparse_flex", {"queries": 5}, "it needs as many queries as keys, got 5 and 12"),
    ("sparse_flex", {"dtype": torch.float64}, "dtype must be one of .*got torch.float64"),
    ("sparse_cpu", {"dtype": torch.float64}, "dtype must be one of .*got torch.float64"),
    ("sparse_cpu", {"size": 300}, "head size must be at most 256, got 300"),
]


@pytest.mark.parametrize("name, fields, words", CANNOT, ids=str)
def test_refusals(name, fields, words):
    query, key, value, _ = (
        tensor.to(fields.get("dtype", torch.float32)) for tensor in numbers(2, 12, fields.get("size", 8))
    )
    query = query[:, :, 12 - fields.get("queries", 12) :]
    query.requires_grad_(fields.get("gradients", False))
    mask = SparseMask(random_table(12, 0.1), 12)

    def attention(backend):
        torch.manual_seed(0)
        dropout = fields.get("dropout", 0.0)
        return sparse_dot_product_attention(query, key, value, mask, dropout_p=dropout, backend=backend)

    with pytest.raises(ValueError, match=f"^{name} cannot run here: {words}.*Use sparse_eager, sparse_sdpa"):
        attention(name)
    output = attention("sparse_auto")
    if not fields.get("dropout"):
        torch.testing.assert_close(output, attention("sparse_eager"))


# What only some backends do on a model: the needs, the fields of the model, the arguments of its forward.
MODELS = {
    "probabilities": ({"weights"}, {"pattern": "window"}, {"output_attentions": True}),
    "4-D mask": ({"additive"}, {"pattern": "window"}, {"attention_mask": torch.ones(1, 1, 8, 8)}),
    "searching": ({"learned"}, {}, {}),
    "multiplicative": ({"learned", "gate"}, {"mask_form": "multiplicative"}, {}),
}


@pytest.mark.parametrize(
    "what, name",
    [(what, name) for what in MODELS for name, backend in BACKENDS.items() if MODELS[what][0] - backend.supports],
)
def test_refusals_of_models(tiny_config, what, name):
    needs, fields, given = MODELS[what]
    model = SparseBertModel(tiny_config(attn_implementation=name, **fields)).train()
    ids = torch.randint(100, (1, 8))
    lacking = "|".join(re.escape(WANTED[need]) for need in needs - BACKENDS[name].supports)
    with pytest.raises(
        ValueError, match=f"^{name} cannot run here: it does not support ({lacking}). Use sparse_eager"
    ):
        model(ids, **given)
    model.set_attn_implementation("sparse_auto")
    outputs = model(ids, **given)
    assert outputs.last_hidden_state.isfinite().all()
    assert what != "probabilities" or len(outputs.attentions) == 2


ONES = torch.ones(2, 4, 12, 8)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"mask": SparseMask(torch.ones(3, 12, 12, dtype=torch.bool), 12)}, "must have the query's 4 heads, got 3"),
        ({"layer": -1}, "layer must be an integer of at least 0, got -1"),
        ({"layer": 0.5}, "layer must be an integer of at least 0, got 0.5"),
        ({"layer": 2, "mask": SparseMask(torch.ones(2, 4, 12, 12) > 0, 12)}, "layer must be an integer from 0 to 1"),
        ({"dropout_p": 1.0}, "dropout_p .*got 1.0"),
        ({"dropout_p": "0.1"}, "dropout_p .*got '0.1'"),
        ({"scale": torch.ones((), requires_grad=True)}, r"scale must be a finite number, got tensor"),
        ({"scale": math.nan}, "scale must be a finite number, got nan"),
        ({"scale": 0, "mask": SparseMask(torch.ones(4, 12) > 0, 12, "offsets", rest="mean")}, "scale must not be 0"),
        ({"padding": ONES[:, 0, :11, 0] > 0}, r"padding must be bool of shape \(2, 12\).*\(2, 11\)"),
        ({"padding": ONES[:, 0, :, 0]}, "padding must be bool.*float32"),
        ({"padding": [[True] * 12] * 2}, "padding must be bool.*got list"),
        ({"padding": (ONES[:, 0, :, 0] > 0).to("meta")}, "padding must be .* on cpu, got .* on meta"),
        ({"key": ONES.to("meta")}, "key must be .* on cpu to fit the query, got .* on meta"),
        ({"query": [[0.0]]}, r"query must be a tensor of shape \(B, H, n, d\).*got list"),
        ({"query": ONES.int()}, "query must be .*, one of torch.float16, .*got torch.int32"),
        ({"query": ONES[..., :0]}, r"query must be .* with d > 0, .*got torch.float32 \(2, 4, 12, 0\)"),
        ({"key": ONES[0, 0]}, r"key must be a tensor of shape \(B, H, n, d\).*got torch.float32 \(12, 8\)"),
        ({"is_causal": True}, "is_causal needs.*got 'first_last'"),
        ({"backend": "sdpa"}, "backend must be one of sparse_eager.*got 'sdpa'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_do_not_fit(fields, words):
    mask = SparseMask(torch.ones(HEADS, 12, 12, dtype=torch.bool), 12, special_tokens="first_last")
    with pytest.raises(ValueError, match=words):
        sparse_dot_product_attention(
            **dict(zip(("query", "key", "value"), numbers(2, 12)[:3], strict=True)) | {"mask": mask} | fields
        )


@pytest.mark.parametrize("name", ["sparse_eager", "sparse_sdpa", "sparse_cpu"])
def test_layers_that_share_their_masks(name):
    mask, states = SparseMask(random_table(12, 0.3), 12), numbers(2, 12)[:3]
    first, last = (sparse_dot_product_attention(*states, mask, layer=layer, backend=name) for layer in (0, 11))
    assert torch.equal(first, last)


@pytest.mark.parametrize("name", ["sparse_eager", "sparse_sdpa", "sparse_cpu"])
def test_padding_that_vmap_maps(name):
    """Each sequence by itself, as for gradients per sample."""
    mask = SparseMask(random_table(12, 0.3), 12, special_tokens="first_last")
    states, padding = numbers(2, 12)[:3], torch.arange(12) < torch.tensor([12, 7])[:, None]

    def attention(query, key, value, real):
        return sparse_dot_product_attention(query[None], key[None], value[None], mask, real[None], backend=name)[0]

    expected = sparse_dot_product_attention(*states, mask, padding, backend=name)
    torch.testing.assert_close(torch.vmap(attention)(*states, padding), expected)


@pytest.mark.parametrize("name", ["sparse_eager", "sparse_sdpa"])
def test_autocast_leaves_float64_alone(name):
    mask = SparseMask(torch.rand(HEADS, 12, 12) < 0.5, 12)
    states = [state.double() for state in numbers(2, 12)[:3]]
    expected = sparse_dot_product_attention(*states, mask, backend=name)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(sparse_dot_product_attention(*states, mask, backend=name), expected)


DECODERS = {
    "bert": lambda name: BertLMHeadModel(BertConfig(**TINY, is_decoder=True, attn_implementation=name)),
    "llama": lambda name: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=64, attn_implementation=name,
        )
    ),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("name", ["sparse_eager", "sparse_sdpa", "sparse_auto"])
def test_decoders_without_a_mask_stay_causal(name, decoder):
    """Models whose configuration names our attention, but that carry no mask."""
    stock, ours = DECODERS[decoder]("sdpa").eval(), DECODERS[decoder](name).eval()
    ours.load_state_dict(stock.state_dict())
    ids = torch.randint(100, (2, 10))
    for padding in (None, torch.tensor([[1] * 10, [0] * 3 + [1] * 7])):
        real = torch.ones(2, 10, dtype=torch.bool) if padding is None else padding.bool()
        got, expected = (model(ids, attention_mask=padding).logits[real] for model in (ours, stock))
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    for cache in (None, lambda: StaticCache(config=stock.config, max_cache_len=24)):
        results = []
        for model in (ours, stock):
            past = model(ids[:, :6], use_cache=True, past_key_values=cache and cache()).past_key_values
            results.append(model(ids[:, 6:], use_cache=True, past_key_values=past).logits)
        torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("given", [None, False, True])
@pytest.mark.parametrize("own", [None, False, True])
def test_a_module_without_a_mask_runs_as_in_transformers(own, given):
    """Its causality is the argument, or else its own attribute, or else true."""
    module, states = torch.nn.Module(), numbers(2, 12)[:3]
    if own is not None:
        module.is_causal = own
    got, expected = (
        attention(module, *states, None, scaling=0.2, is_causal=given)[0]
        for attention in (sparse_attention_forward, AttentionInterface()["sdpa"])
    )
    torch.testing.assert_close(got, expected)


def test_what_is_more_than_a_mask_is_refused(tiny_config):
    layer = SparseBertModel(tiny_config(pattern="window")).encoder.layer[0].attention.self
    for name in ("softcap", "position_bias", "s_aux"):
        with pytest.raises(ValueError, match=f"BertSelfAttention needs an attention with {name}"):
            sparse_attention_forward(layer, *numbers(2, 12)[:3], None, **{name: 1.0})


def test_static_cache_is_refused(tiny_config):
    config = tiny_config(pattern="window", is_decoder=True)
    model = SparseBertLMHeadModel(config).eval()
    cache = StaticCache(config=config, max_cache_len=20)
    with pytest.raises(ValueError, match="static key/value caches are not supported.*DynamicCache"):
        model(torch.randint(100, (1, 8)), past_key_values=cache, use_cache=True)


@torch.no_grad()
@pytest.mark.parametrize("name", [*serving(gradients=False), *CHOICES])
def test_model_in_evaluation_equals_eager(tiny_config, name, monkeypatch):
    """Includes backends that have no gradients on CPU; `sparse_flex` without its compiler, which takes a minute."""
    monkeypatch.setattr(flex, "_compiled", lambda *kind: torch.compile(flex._attention, backend="eager"))
    model = SparseBertForMaskedLM(tiny_config(pattern="bigbird", attn_implementation="sparse_eager")).eval()
    ids = torch.randint(100, (2, 40))
    attention_mask = (torch.arange(40) < torch.tensor([40, 23])[:, None]).long()
    expected = model(ids, attention_mask=attention_mask).logits
    model.set_attn_implementation(name)
    logits = model(ids, attention_mask=attention_mask).logits
    real = attention_mask.bool()
    torch.testing.assert_close(logits[real], expected[real])


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*serving(device="cuda", head_size=32), *CHOICES])
def test_training_on_cuda_equals_eager(tiny_config, name):
    config = tiny_config(pattern="bigbird", hidden_size=128, attn_implementation="sparse_eager")
    model = SparseBertForMaskedLM(config).cuda().train()
    ids = torch.randint(100, (2, 40), device="cuda")
    attention_mask = (torch.arange(40) < torch.tensor([40, 23])[:, None]).long().cuda()
    results = []
    for chosen in ("sparse_eager", name):
        model.set_attn_implementation(chosen)
        model.zero_grad()
        loss = model(ids, attention_mask=attention_mask, labels=ids.where(attention_mask > 0, -100)).loss
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*results, atol=2e-4, rtol=2e-3)  # matrix products may run in TF32


# Operators of this package, under a mask that is frozen and one that is being learned.
TRAINED = [("sparse_cpu", {"pattern": "bigbird"}), ("sparse_sdpa", {"search": "dam_s"})]


def trained(model, function, attention_mask):
    """Loss and gradients of a training step with fixed draws."""
    ids = torch.arange(5, 45).view(2, 20)
    model.zero_grad()
    torch.manual_seed(1)
    loss = function(ids, attention_mask=attention_mask).last_hidden_state.square().mean()
    loss.backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    return {"loss": loss.detach()} | gradients


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name, fields", TRAINED, ids=str)
def test_a_compiled_model_trains_in_one_graph(tiny_config, assert_same_gradients, name, fields, backend, monkeypatch):
    """Also with a bias per distance, which long inputs have in a search; other padding compiles nothing anew."""
    torch.compiler.reset()
    monkeypatch.setitem(bias_operator.BLOCK_BYTES, "cpu", 4 * 8 * 20)
    monkeypatch.setattr(bias_operator, "FEWEST_QUERIES", 8)
    config = tiny_config(num_hidden_layers=1, attn_implementation=name, **fields)
    model = SparseBertModel(config, add_pooling_layer=False).train()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    first, second = ((torch.arange(20) < torch.tensor(sizes)[:, None]).long() for sizes in ([20, 13], [7, 20]))
    assert_same_gradients(trained(model, compiled, first), trained(model, model, first))
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_same_gradients(trained(model, compiled, second), trained(model, model, second))


@pytest.mark.parametrize("name", ATTENTION_NAMES)
def test_layer_without_its_base_model_is_an_error(tiny_config, name):
    model = SparseBertModel(tiny_config(pattern="window", attn_implementation=name))
    with pytest.raises(RuntimeError, match="without its base model"):
        model.encoder.layer[0](torch.randn(1, 8, 32))


@pytest.mark.parametrize("backend", ["eager", "sdpa", "sparse_auto"])
def test_shapes_on_the_meta_device(backend):
    config = SparseBertConfig(**TINY, pattern="window", mask_length=20, attn_implementation=backend)
    with torch.device("meta"):
        model, ids = SparseBertModel(config), torch.zeros(2, 20, dtype=torch.long)
    assert model(ids).last_hidden_state.shape == (2, 20, config.hidden_size)
