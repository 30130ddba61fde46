"""
The rest in the CPU operator, against the softmax with one more column, which `pooled_rest` makes.

Letters: B batch, H heads, n queries, m keys, d head size.
"""

from dataclasses import replace

import pytest
import torch
from exactness import assert_as_good_as_plain, with_gradients
from test_attention import kept
from test_cpu import (  # noqa: F401
    HEADS,
    csr_attention,
    every_level,
    loaded,
    numbers,
    operator,
    operator_arguments,
    padded_copies,
    skip_without,
    threads,
)

from sparsebert import SparseMask
from sparsebert.attention.kernels.cpu import compressed_rows, signed_offsets
from sparsebert.attention.mask_inputs import MaskInputs
from sparsebert.attention.rest import pooled_rest
from sparsebert.masks.compiled_forms import compiled
from sparsebert.masks.expansion import signed_parameters


NAMES = ("output", "query", "key", "value", "bias")
NEVER = torch.finfo(torch.float16).min


def dense(query, key, value, bias, keep, real, keys=None, factors=1.0):
    """
    Plain attention in the inputs' dtype; `bias` `(H,)` is added to the score of the rest, `real` and `keys`, those
    that the rest stands for, are `(B, m)`, and `factors` are those of dropout.
    """
    queries, scaling = slice(key.shape[2] - query.shape[2], None), query.shape[-1] ** -0.5
    keys = real if keys is None else keys
    rest = pooled_rest(query, key, value, MaskInputs("", rest=(bias,), rest_keys=keys), scaling)
    removed = (real.sum(-1)[:, None, None] - keep.sum(-1)) * (real & keys.any(-1, True))[:, None, queries]  # (B, H, n)
    key, value = (
        torch.cat([states, own[:, :, None].to(states.dtype)], 2)
        for states, own in ((key, rest.key), (value, rest.value))
    )
    scores = query @ key.mT * scaling
    of_rest = scores[..., -1] + removed.clamp(min=1).log().to(query.dtype) + rest.score[..., None].to(query.dtype)
    there = torch.cat([keep, removed[..., None] > 0], -1)
    scores = torch.cat([scores[..., :-1], of_rest[..., None]], -1).masked_fill(~there, NEVER)
    probabilities = scores.softmax(-1) * there
    return torch.cat([probabilities[..., :-1] * factors, probabilities[..., -1:]], -1).to(value.dtype) @ value


def assert_right(results, inputs, grad, about="", **mask):
    plain, truth = (
        with_gradients(lambda *inputs: dense(*inputs, **mask), inputs, grad, dtype) for dtype in (None, torch.float64)
    )
    assert_as_good_as_plain(results, plain, truth, about)
    queries = slice(mask["real"].shape[1] - grad.shape[2], None)
    assert (results[0].transpose(1, 2)[~mask["real"][:, queries]] == 0).all(), about  # padded queries


def attention(mask, padding, queries, bias=None, dropout=0.0, scale=None, keys=None):
    """The operator of a mask as a function of query, key and value, and of the rest's bias if it is not given."""
    length = padding.shape[1]
    last = torch.tensor([row.nonzero()[-1].item() if row.any() else 0 for row in padding], dtype=torch.int32)
    if mask.special_tokens != "first_last":
        last = None
    elif mask.last_token != "real":
        last = torch.full_like(last, length - 1)
    block = 0 if mask.form == "table" else mask.block_size or 1
    if block:
        form = signed_offsets(signed_parameters(mask.keep[0], mask.symmetric), block, mask.diagonal)
    else:
        (form,) = compiled(mask, compressed_rows, length, False, padding.device, special="first")
    known = mask.length if mask.length_policy == "dense" else length
    flags = (mask.special_tokens != "none", mask.special_rows, mask.diagonal is not False, False, block, known)
    flags = (*flags, mask.diagonal is True, -1)

    def run(query, key, value, given=bias):
        tensors = (query[:, :, length - queries :], key, value, *form, padding, last, None, given, keys, None)
        scaling = query.shape[-1] ** -0.5 if scale is None else scale
        return csr_attention(*tensors, torch.tensor([5]), *flags, length, dropout, scaling)

    return run


FORMS = {
    "table": {"form": "table", "special_tokens": "none"},
    "table, special": {"form": "table", "special_tokens": "first_last"},
    "offsets": {"special_tokens": "first_last"},
    "offsets alone": {"special_tokens": "none", "diagonal": True},
    "offsets, no diagonal": {"special_tokens": "first_last", "diagonal": False},
    "offsets beyond": {"special_tokens": "first", "length_policy": "dense"},
    "last token": {"special_tokens": "first_last", "last_token": "position"},
    "tiles of 3": {"block_size": 3},
    "tiles": {"block_size": 16, "special_tokens": "first_last"},
    "tiles, no diagonal": {"block_size": 16, "special_tokens": "first_last", "diagonal": False},
    "tiles, diagonal": {"block_size": 32, "diagonal": True, "special_tokens": "none"},
    "queries": {"queries": 21},
    "queries, tiles": {"queries": 33, "block_size": 16},
    "strided": {"strided": True},
    "dropout": {"dropout": 0.25},
    "dropout, tiles": {"dropout": 0.25, "block_size": 16, "diagonal": False},
    "dropout, table": {"dropout": 0.25, "form": "table"},
}
LEVELS = ("default", "avx2", "avx512", "avx512_bf16")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SIZES = ((1, 32), (64, 20), (97, 64), (129, 32), (65, 128), (2, 128))


def mask_of(length, form="offsets", special_tokens="first", block_size=1, length_policy="error", **options):
    """A mask of three heads that keep few, some and most of their entries; the first has rows without a key."""
    part = -(-length // 2) if length_policy == "dense" else length
    share = torch.tensor([0.03, 0.3, 0.9])[:, None]
    options |= {"special_tokens": special_tokens, "length_policy": length_policy}
    if form == "table":
        keep = torch.rand(HEADS, length, length) < share[..., None]
        keep[0, ::3] = False
        return SparseMask(keep, length, **options)
    keep = torch.rand(HEADS, -(-part // block_size)) < share
    keep[0] = False
    form = {"form": "blocks", "block_size": block_size} if block_size > 1 else {"form": "offsets"}
    return SparseMask(keep, part, **form, **options)


def padding_of(length):
    """No padding, padding on the right and left, holes, and nothing real."""
    padding = torch.ones(5, length, dtype=torch.bool)
    padding[1, length // 2 + 1 :] = padding[2, : length // 3] = padding[3, 1 : length - 1 : 4] = padding[4] = False
    return padding


def keys_of(name, padding):
    """The keys that the rest stands for."""
    keys = padding.clone()
    if name == "but special tokens":
        keys[:, 0] = keys[:, -1] = False
    elif name == "holes":
        keys[1:, ::3] = keys[2, 40:80] = False
    elif name == "none":
        keys[1] = False
    return None if name == "all" else keys


def factors_of(mask, padding, queries, dropout):
    """What dropout multiplies each probability by, read with equal scores and values that tell the keys apart."""
    length = padding.shape[1]
    run, zero = attention(mask, padding, queries, dropout=dropout), torch.zeros(len(padding), HEADS, length, length)
    shares = run(zero, zero, torch.eye(length).expand_as(zero))
    plain = attention(mask, padding, queries)(zero, zero, torch.eye(length).expand_as(zero))
    return torch.where(plain > 0, shares / plain, 0.0)


@every_level
@pytest.mark.parametrize("form", FORMS)
def test_output_and_all_gradients(level, form, loaded):  # noqa: F811
    """The seed of dropout drops the keys that it drops without a rest, and never the rest. Its keys differ by case."""
    skip_without(level)
    loaded(level)
    options = {**FORMS[form]}
    queries, strided, dropout = (options.pop(name, 0) for name in ("queries", "strided", "dropout"))
    # A dtype that the level has code of its own for, and another; every form meets all sizes and dtypes.
    number = [*FORMS].index(form) + 2 * (place := LEVELS.index(level))
    dtypes = (torch.bfloat16 if level == "avx512_bf16" else torch.float32, DTYPES[place % 3])
    for (length, head_size), dtype in zip((SIZES[number % 6], SIZES[(number + 1) % 6]), dtypes, strict=True):
        number = min(queries or length, length)
        mask, padding = mask_of(length, **options), padding_of(length)
        size = (5, length, HEADS, 2 * head_size) if strided else (5, HEADS, length, head_size)
        states = [each.transpose(1, 2)[..., 1::2] if strided else each for each in numbers(*size, count=4)]
        # So that the mean query attends to some keys more.
        states = [states[0] + 2 * torch.randn(HEADS, 1, head_size), *states[1:]]
        *states, grad = (each.to(dtype) for each in states)
        keys = keys_of(("all", "but special tokens", "holes", "none")[(length + len(form)) % 4], padding)
        bias, grad = torch.randn(HEADS), grad[:, :, length - number :]
        ours = attention(mask, padding, number, dropout=dropout, keys=keys)
        results = with_gradients(ours, (*states, bias), grad)
        results[1] = results[1][:, :, length - number :]
        keep = kept(mask, length, padding)[:, :, length - number :]
        factors = factors_of(mask, padding, number, dropout) if dropout else 1.0
        states[0] = states[0][:, :, length - number :]
        about = f"{level} {length} {head_size}"
        entries = {"keep": keep, "real": padding, "keys": keys, "factors": factors}
        assert_right(results, (*states, bias), grad, about, **entries)


@pytest.mark.parametrize("form", ["table", "offsets", "tiles"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_row_without_a_key_returns_the_value_of_the_rest(form, dtype):
    mask, padding = mask_of(97, **FORMS[form] | {"special_tokens": "none"}), padding_of(97)
    states, inputs = [each.to(dtype) for each in numbers(5, HEADS, 97, 32)], MaskInputs("", rest_keys=padding)
    output = attention(mask, padding, 97, torch.randn(HEADS))(*states)
    rows = padding[:, None, :] & ~kept(mask, 97, padding).any(-1)
    assert rows[:4].any((1, 2)).all()
    rest = pooled_rest(*states, replace(inputs, rest=(torch.zeros(HEADS),)), 32**-0.5)
    want = rest.value[:, :, None].expand(-1, -1, 97, -1)[rows]
    torch.testing.assert_close(output[rows].float(), want, atol=1e-6, rtol=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("form", ["table", "offsets", "tiles"])
def test_where_nothing_is_removed_the_rest_changes_nothing(form, dropout):
    """To the bit, in rows that keep all real keys; those of special tokens do without a mask that says so."""
    mask, padding = (
        mask_of(97, **FORMS[form] | {"special_tokens": "first"}),
        padding_of(97),
    )
    states = numbers(5, HEADS, 97, 32)
    with_rest, without = (
        attention(mask, padding, 97, bias, dropout)(*states) for bias in (torch.full((HEADS,), 200.0), None)
    )
    same = kept(mask, 97, padding).sum(-1) == padding.sum(-1)[:, None, None]
    assert same[:4].any((1, 2)).all() and with_rest[same].equal(without[same])
    removed = padding[:, None, :] & ~same
    assert removed[:4].any((1, 2)).all() and (with_rest[removed] != without[removed]).any(-1).all()


@pytest.mark.parametrize("block_size", [1, 16])
def test_the_rest_under_any_scale(block_size):
    """It is added to the scores after they are scaled."""
    mask, padding = mask_of(97, block_size=block_size), padding_of(97)
    query, key, value = (each.bfloat16() for each in numbers(5, HEADS, 97, 32))
    bias = torch.randn(HEADS)
    for scale in (0.0, 1e-6, -0.3, 3.0):
        got = attention(mask, padding, 97, bias, scale=scale)(query, key, value)
        want = attention(mask, padding, 97, bias, scale=1.0)(query.float() * scale, key.float(), value.float())
        torch.testing.assert_close(got.float(), want, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("form", ["table", "offsets", "tiles"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padding_changes_nothing(form, dtype):
    """Whatever it holds, and whatever the gradient of its output is."""
    mask, padding = mask_of(97, **FORMS[form]), padding_of(97)
    states = [each.to(dtype) for each in numbers(5, HEADS, 97, 32, count=4)]
    spoiled = [each.clone() for each in states]
    for each, what in zip(spoiled, (torch.nan, torch.nan, torch.inf, torch.nan), strict=True):
        each.transpose(1, 2)[~padding] = what
    bias = torch.randn(HEADS)
    run = attention(mask, padding, 97)
    clean, got = (with_gradients(run, (*inputs, bias), grad) for *inputs, grad in (states, spoiled))
    for one, other in zip(clean, got, strict=True):
        assert one.isfinite().all() and one.equal(other)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("size", [(1, 1, 257, 64), (2, HEADS, 70, 16)], ids=["one head", "six heads"])
def test_threads_do_not_change_results(size, dropout):
    """But for gradients where a head's rows are split, which are sums of the threads' own."""
    states, bias = numbers(*size, count=4), torch.randn(size[1])
    arguments = operator_arguments(size[2], size[1], dropout, padded=size[0] == 2)

    def run(*inputs):
        return csr_attention(*inputs[:3], *arguments[:6], inputs[3], *arguments[7:])

    results = []
    for number in (1, 2, 7):
        torch.set_num_threads(number)
        results.append(with_gradients(run, (*states[:3], bias), states[3]))
    for other in results[1:]:
        for what, got, want in zip(NAMES, other, results[0], strict=True):
            if what in ("query", "key", "value") and size[1] == 1:
                torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
            else:
                assert got.equal(want), what


@pytest.mark.parametrize("number", [1, 7])
def test_packed_sequences_get_what_they_get_alone(number):
    """Each has a rest of its own."""
    torch.set_num_threads(number)
    places = (slice(2, 302), slice(305, 318))
    apart = operator_arguments(length=300, dropout=0.1)
    padding, bias = apart[3], torch.randn(HEADS)
    keys = keys_of("but special tokens", padding)
    starts = torch.tensor([place.start for place in places])
    tensors = numbers(1, HEADS, 320, 8, count=4)
    padded = padded_copies(tensors, padding, places)
    results = []
    for states, where in ((tensors, starts), (padded, None)):

        def run(*inputs, where=where):
            return csr_attention(*inputs[:3], *apart[:5], where, inputs[3], keys, *apart[8:])

        results.append(with_gradients(run, (*states[:3], bias), states[3]))
    (*packed, of_bias), (*alone, want_of_bias) = results
    torch.testing.assert_close(of_bias, want_of_bias)
    for got, want in zip(packed, alone, strict=True):
        expected = torch.zeros_like(got)
        for row, place in enumerate(places):
            expected[0, :, place] = want[row, :, padding[row]]
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_packed_offsets():
    """Several queries at once, of sequences after a longer one, whose keys are still in memory."""
    keep, bias = signed_parameters(torch.rand(HEADS, 200) < 0.2, True), torch.randn(HEADS)
    form, lengths = signed_offsets(keep, 1, None), (200, 70, 9)
    padding = torch.arange(200) < torch.tensor(lengths)[:, None]
    flags = (torch.tensor([0]), True, True, True, False, 1, 200, False, -1, 200, 0.0, 0.2)
    for dtype in (torch.float32, torch.bfloat16):
        states = [each.to(dtype) for each in numbers(1, HEADS, sum(lengths), 32)]
        starts = torch.tensor([0, 200, 270])
        got = csr_attention(*states, *form, padding, None, starts, bias, None, None, *flags)
        for start, length in zip(starts, lengths, strict=True):
            alone = [each[:, :, start : start + length] for each in states]
            shorter = (*flags[:-3], length, *flags[-2:])
            want = csr_attention(*alone, *form, None, None, None, bias, None, None, *shorter)
            near = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.02}
            torch.testing.assert_close(got[:, :, start : start + length], want, **near)


def test_opcheck():
    arguments = [*operator_arguments(20, dropout=0.1, rest=(torch.randn(HEADS), torch.rand(2, 20) < 0.7))]
    *inputs, grad = numbers(2, HEADS, 20, 8, count=4)
    _, rest = torch.ops.sparsebert.csr_attention(*inputs, *arguments)
    torch.library.opcheck(torch.ops.sparsebert.csr_attention_backward, (grad, rest, False, *inputs, *arguments))
    arguments[6].requires_grad_()
    inputs = [tensor.requires_grad_() for tensor in inputs]
    torch.library.opcheck(torch.ops.sparsebert.csr_attention, (*inputs, *arguments))


@pytest.mark.parametrize("place, option", [(13, True), (17, 4)], ids=["causal", "window"])
def test_what_has_no_rest_is_refused(place, option):
    """By the operator, for who calls it."""
    arguments = [*operator_arguments(rest=(torch.randn(HEADS), None))]
    arguments[place] = option
    with pytest.raises(RuntimeError, match="csr_attention: rest_bias must be"):
        csr_attention(*numbers(2, HEADS, 20, 8), *arguments)


@pytest.mark.parametrize("rest", [torch.zeros(0), torch.zeros(2, HEADS, 44), torch.zeros(2, HEADS, 45).double()])
def test_the_backward_stays_within_its_memory(rest):
    """What no caller of this package passes, instead of what the forward kept."""
    arguments, states = operator_arguments(rest=(torch.randn(HEADS), None)), numbers(2, HEADS, 20, 8, count=4)
    with pytest.raises(RuntimeError, match="csr_attention_backward: the rest does not fit"):
        torch.ops.sparsebert.csr_attention_backward(states[0], rest, False, *states[1:], *arguments)
