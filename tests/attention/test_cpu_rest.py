"""
The rest in the CPU operator, against the softmax with one more column.

Letters: B batch, H heads, n queries, m keys, d head size.
"""

import pytest
import torch
from test_attention import kept
from test_cpu import (  # noqa: F401
    HEADS,
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
from sparsebert.attention.kernels.cpu_rest import pooled_rest_on_cpu
from sparsebert.attention.mask_inputs import MaskInputs
from sparsebert.attention.packed_batches import DocumentSpans, in_one_row
from sparsebert.attention.rest import pooled_rest
from sparsebert.masks.compiled_forms import compiled
from sparsebert.masks.expansion import signed_parameters


NAMES = ("output", "query", "key", "value", "rest")
NEVER = torch.finfo(torch.float16).min


def dense(query, key, value, rest, keep, real, factors=1.0):
    """
    Plain attention in the inputs' dtype; `rest` `(B, H, 2 d + 1)` is key, value and what is added to the score, `real`
    is `(B, m)`, and `factors` are those of dropout.
    """
    queries, size = slice(key.shape[2] - query.shape[2], None), query.shape[-1]
    removed = (real.sum(-1)[:, None, None] - keep.sum(-1)) * real[:, None, queries]  # (B, H, n)
    key, value = (
        torch.cat([states, own[:, :, None]], 2)
        for states, own in ((key, rest[..., :size]), (value, rest[..., size:-1]))
    )
    scores = query @ key.mT * size**-0.5
    of_rest = scores[..., -1] + removed.clamp(min=1).log().to(query.dtype) + rest[..., -1:]
    there = torch.cat([keep, removed[..., None] > 0], -1)
    scores = torch.cat([scores[..., :-1], of_rest[..., None]], -1).masked_fill(~there, NEVER)
    probabilities = scores.softmax(-1) * there
    return torch.cat([probabilities[..., :-1] * factors, probabilities[..., -1:]], -1).to(value.dtype) @ value


def rest_of(batch, heads, size):
    return torch.randn(batch, heads, 2 * size + 1)


def with_gradients(function, *tensors, dtype=None):
    """Output and gradients of all tensors but the last, which is the gradient of the output."""
    *inputs, grad = tensors
    leaves = [tensor.detach().to(dtype or tensor.dtype).requires_grad_() for tensor in inputs]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad.to(output.dtype))]


def assert_as_good_as_plain(results, *tensors, about="", **mask):
    """At most twice plain PyTorch's error in the same dtype against float64, plus a few units in the last place."""
    *states, rest, grad = tensors
    truth, plain = (
        with_gradients(lambda *inputs: dense(*inputs, **mask), *states, rest.to(dtype), grad, dtype=dtype)
        for dtype in (torch.float64, grad.dtype)
    )
    unit = torch.finfo(grad.dtype).eps * max(1.0, *(want.abs().max().item() for want in truth))
    for what, got, want, other in zip(NAMES, results, truth, plain, strict=True):
        assert got.dtype == (torch.float32 if what == "rest" else grad.dtype) and got.isfinite().all(), (about, what)
        error, allowed = (got - want).abs().max().item(), (other - want).abs().max().item()
        assert error <= 2 * allowed + 4 * unit, (about, what, error, allowed, unit)
    queries = slice(mask["real"].shape[1] - grad.shape[2], None)
    assert (results[0].transpose(1, 2)[~mask["real"][:, queries]] == 0).all(), about  # padded queries


def attention(mask, padding, queries, rest=None, dropout=0.0, scale=None):
    """The operator of a mask as a function of query, key and value, and of the rest if it is not given."""
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

    def run(query, key, value, given=rest):
        tensors = (query[:, :, length - queries :], key, value, *form, padding, last, None, given, torch.tensor([5]))
        scaling = query.shape[-1] ** -0.5 if scale is None else scale
        return torch.ops.sparsebert.csr_attention(*tensors, *flags, length, dropout, scaling)

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
SIZES = ((1, 32), (64, 20), (97, 64), (129, 32), (65, 128))


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
    """The seed of dropout drops the keys that it drops without a rest, and never the rest."""
    skip_without(level)
    loaded(level)
    options = {**FORMS[form]}
    queries, strided, dropout = (options.pop(name, 0) for name in ("queries", "strided", "dropout"))
    # A dtype that the level has code of its own for, and another; every form meets all sizes and dtypes.
    number = [*FORMS].index(form) + 2 * (place := LEVELS.index(level))
    dtypes = (torch.bfloat16 if level == "avx512_bf16" else torch.float32, DTYPES[place % 3])
    for (length, head_size), dtype in zip((SIZES[number % 5], SIZES[(number + 1) % 5]), dtypes, strict=True):
        number = min(queries or length, length)
        mask, padding = mask_of(length, **options), padding_of(length)
        size = (5, length, HEADS, 2 * head_size) if strided else (5, HEADS, length, head_size)
        states = [each.transpose(1, 2)[..., 1::2] if strided else each for each in numbers(*size, count=4)]
        *states, grad = (each.to(dtype) for each in states)
        rest, grad = rest_of(5, HEADS, head_size), grad[:, :, length - number :]
        results = with_gradients(attention(mask, padding, number, dropout=dropout), *states, rest, grad)
        results[1] = results[1][:, :, length - number :]
        keep = kept(mask, length, padding)[:, :, length - number :]
        factors = factors_of(mask, padding, number, dropout) if dropout else 1.0
        states[0] = states[0][:, :, length - number :]
        about = f"{level} {length} {head_size}"
        assert_as_good_as_plain(results, *states, rest, grad, keep=keep, real=padding, factors=factors, about=about)


@pytest.mark.parametrize("form", ["table", "offsets", "tiles"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_row_without_a_key_returns_the_value_of_the_rest(form, dtype):
    mask, padding = mask_of(97, **FORMS[form] | {"special_tokens": "none"}), padding_of(97)
    states, rest = (each.to(dtype) for each in numbers(5, HEADS, 97, 32)), rest_of(5, HEADS, 32)
    output = attention(mask, padding, 97, rest)(*states)
    rows = padding[:, None, :] & ~kept(mask, 97, padding).any(-1)
    assert rows[:4].any((1, 2)).all()
    want = rest[:, :, None, 32:-1].expand(-1, -1, 97, -1)[rows]
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
        attention(mask, padding, 97, rest, dropout)(*states) for rest in (torch.full((5, HEADS, 65), 9.0), None)
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
    rest = rest_of(5, HEADS, 32).bfloat16().float()
    for scale in (0.0, 1e-6, -0.3, 3.0):
        got = attention(mask, padding, 97, rest, scale=scale)(query, key, value)
        want = attention(mask, padding, 97, rest, scale=1.0)(query.float() * scale, key.float(), value.float())
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
    rest = rest_of(5, HEADS, 32)
    clean, got = (with_gradients(attention(mask, padding, 97), *some[:3], rest, some[3]) for some in (states, spoiled))
    for one, other in zip(clean, got, strict=True):
        assert one.isfinite().all() and one.equal(other)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("size", [(1, 1, 257, 64), (2, HEADS, 70, 16)], ids=["one head", "six heads"])
def test_threads_do_not_change_results(size, dropout):
    """But for the gradients of keys and values where a head's rows are split, which are sums of the threads' own."""
    states, rest = numbers(*size, count=4), rest_of(*size[:2], size[3])
    arguments = operator_arguments(size[2], size[1], dropout, padded=size[0] == 2)

    def run(*inputs):
        return torch.ops.sparsebert.csr_attention(*inputs[:3], *arguments[:6], inputs[3], *arguments[7:])

    results = []
    for number in (1, 2, 7):
        torch.set_num_threads(number)
        results.append(with_gradients(run, *states[:3], rest, states[3]))
    for other in results[1:]:
        for what, got, want in zip(NAMES, other, results[0], strict=True):
            if what in ("key", "value", "rest") and size[1] == 1:
                torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
                assert what != "rest" or got[..., -1].equal(want[..., -1])
            else:
                assert got.equal(want), what


@pytest.mark.parametrize("number", [1, 7])
def test_packed_sequences_get_what_they_get_alone(number):
    """Each has a rest of its own."""
    torch.set_num_threads(number)
    places = (slice(2, 302), slice(305, 318))
    apart = operator_arguments(length=300, dropout=0.1)
    padding, rest = apart[3], rest_of(2, HEADS, 8)
    starts = torch.tensor([place.start for place in places])
    tensors = numbers(1, HEADS, 320, 8, count=4)
    padded = padded_copies(tensors, padding, places)
    results = []
    for states, where in ((tensors, starts), (padded, None)):

        def run(*inputs, where=where):
            return torch.ops.sparsebert.csr_attention(*inputs[:3], *apart[:5], where, inputs[3], *apart[7:])

        results.append(with_gradients(run, *states[:3], rest, states[3]))
    (*packed, of_rest), (*alone, want_of_rest) = results
    torch.testing.assert_close(of_rest, want_of_rest)
    for got, want in zip(packed, alone, strict=True):
        expected = torch.zeros_like(got)
        for row, place in enumerate(places):
            expected[0, :, place] = want[row, :, padding[row]]
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_packed_offsets():
    """Several queries at once, of sequences after a longer one, whose keys are still in memory."""
    keep, rest = signed_parameters(torch.rand(HEADS, 200) < 0.2, True), rest_of(3, HEADS, 32)
    form, lengths = signed_offsets(keep, 1, None), (200, 70, 9)
    padding = torch.arange(200) < torch.tensor(lengths)[:, None]
    flags = (torch.tensor([0]), True, True, True, False, 1, 200, False, -1, 200, 0.0, 0.2)
    for dtype in (torch.float32, torch.bfloat16):
        states = [each.to(dtype) for each in numbers(1, HEADS, sum(lengths), 32)]
        starts = torch.tensor([0, 200, 270])
        got = torch.ops.sparsebert.csr_attention(*states, *form, padding, None, starts, rest, *flags)
        for start, length, own in zip(starts, lengths, rest, strict=True):
            alone = [each[:, :, start : start + length] for each in states]
            shorter = (*flags[:-3], length, *flags[-2:])
            want = torch.ops.sparsebert.csr_attention(*alone, *form, None, None, None, own[None], *shorter)
            near = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.02}
            torch.testing.assert_close(got[:, :, start : start + length], want, **near)


# The operator that pools the rest


def keys_of(name, length):
    """The keys of three sequences that the rest stands for."""
    keys = torch.ones(3, length, dtype=torch.bool)
    if name == "all":
        return None
    if name == "but special tokens":
        keys[:, 0] = keys[:, -1] = False
        return keys[:1]
    keys[0, length - length // 3 :] = keys[1, : length // 2] = False
    if name == "holes":
        keys[1:, ::3] = keys[2, 40:80] = False
    if name == "none":
        keys[1] = False
    return keys


def pooled_in_python(query, key, value, inputs, scaling):
    """The reference, as the operator returns it."""
    rest = pooled_rest(query, key, value, inputs, scaling)
    return torch.cat([rest.key, rest.value, rest.score[..., None]], -1)


def gradients_of_pooling(function, query, key, value, bias, grad, keys, dtype=None, documents=None):
    """What `function` returns and its gradients with respect to states and bias."""

    def run(query, key, value, bias):
        longest = key.shape[2] if documents is None else documents.shape[1]
        inputs = MaskInputs("", num_keys=longest, rest=(bias,), rest_keys=keys, documents=documents)
        return function(query, key, value, inputs, query.shape[-1] ** -0.5)

    return with_gradients(run, query, key, value, bias, grad, dtype=dtype)


@every_level
@pytest.mark.parametrize("keys", ["all", "but special tokens", "right and left", "holes", "none"])
def test_pooling_equals_the_formula(level, keys, loaded):  # noqa: F811
    """At most twice the error of the formula in PyTorch; to the bit with any number of threads."""
    skip_without(level)
    loaded(level)
    sizes = ((1, 8), (2, 32), (33, 64), (97, 8), (97, 20), (64, 32), (131, 64), (33, 256))
    for place, (length, head_size) in enumerate(sizes):
        dtype = DTYPES[(place + LEVELS.index(level)) % 3]
        queries, there = length - place % 3 * (length // 3), keys_of(keys, length)
        states = [2 * each.to(dtype) for each in numbers(3, length, HEADS, head_size)]
        for each in states if there is not None else ():
            each[~there.expand(3, -1)] = torch.nan
        states = [each.transpose(1, 2) for each in states]
        states[0] = states[0][:, :, length - queries :]
        arguments = (*states, torch.randn(HEADS), rest_of(3, HEADS, head_size), there)
        torch.set_num_threads(1)
        got = gradients_of_pooling(pooled_rest_on_cpu, *arguments)
        if length == 64:
            torch.set_num_threads(2)
            again = gradients_of_pooling(pooled_rest_on_cpu, *arguments)
            torch.set_num_threads(1)
            assert all(one.equal(other) for one, other in zip(got, again, strict=True))
        truth, plain = (
            gradients_of_pooling(pooled_in_python, *states, arguments[3].to(wide), *arguments[4:], dtype=narrow)
            for wide, narrow in ((torch.float64, torch.float64), (torch.float32, None))
        )
        largest = max(1.0, *(want[want.abs() < 1e8].abs().max().item() for want in truth if want.numel()))
        for what, one, want, other in zip(NAMES, got, truth, plain, strict=True):
            near = 16 * largest * torch.finfo(one.dtype).eps
            error, allowed = ((each - want).abs().max().item() for each in (one, other))
            assert one.dtype == other.dtype and one.isfinite().all(), (length, what)
            assert error <= 2 * allowed + near, (length, head_size, dtype, what, error, allowed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_documents_are_pooled_where_they_lie(dtype):
    """What is between them, or padding within them, is no part of any, and receives gradients of 0."""
    real = torch.rand(2, 60) < 0.8
    documents = DocumentSpans.of_lengths(torch.tensor([2, 40, 60, 77]), torch.tensor([38, 9, 17, 43]), real)
    keys = documents.padding.clone()
    keys[:, 0] = False
    states = [each.to(dtype) for each in numbers(2, 60, HEADS, 32)]
    inside = torch.zeros(120, dtype=torch.bool).index_fill(0, documents.tokens, True).view(2, 60)
    for each in states:
        each[~inside] = torch.nan
    states, bias, grad = [each.transpose(1, 2) for each in states], torch.randn(HEADS), rest_of(4, HEADS, 32)

    def apart(query, key, value, inputs, scaling):
        return pooled_in_python(*map(documents.unpack, (query, key, value)), inputs, scaling)

    def lying(query, key, value, inputs, scaling):
        return pooled_rest_on_cpu(*map(in_one_row, (query, key, value)), inputs, scaling)

    want, got = (
        gradients_of_pooling(function, *states, bias, grad, keys, documents=documents) for function in (apart, lying)
    )
    for what, one, other in zip(NAMES, got, want, strict=True):
        near = 1e-5 if one.dtype == torch.float32 else 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(one, other, atol=near, rtol=near, msg=lambda text, what=what: f"{what}: {text}")


def test_opcheck_of_pooling():
    states = [each.requires_grad_() for each in numbers(2, HEADS, 20, 8)]
    arguments = (*states, torch.rand(2, 20) < 0.7, None, 20, 0.3)
    torch.library.opcheck(torch.ops.sparsebert.pool_rest, arguments)
    (pooled, means), states = torch.ops.sparsebert.pool_rest(*arguments), [each.detach() for each in states]
    arguments = (torch.randn(2, HEADS, 17), pooled.detach(), means, *states, *arguments[3:])
    torch.library.opcheck(torch.ops.sparsebert.pool_rest_backward, arguments)


WRONG = {
    "query": lambda t: t.double(),
    "key": lambda t: t[:, :, 1:],
    "value": lambda t: t[:1],
    "keys": lambda t: t[:1],
    "starts": lambda t: torch.tensor([0, 20]),  # two rows are not packed
    "pooled": lambda t: t[..., 1:],
    "means": lambda t: t.double(),
    "grad": lambda t: t[:1],
}


@pytest.mark.parametrize("what", WRONG)
def test_pooling_stays_within_its_memory(what):
    """What no caller of this package passes."""
    names = ("grad", "pooled", "means", "query", "key", "value", "keys", "starts")
    tensors = [rest_of(2, HEADS, 8), rest_of(2, HEADS, 8), torch.zeros(2, HEADS, 9), *numbers(2, HEADS, 20, 8)]
    tensors += [torch.ones(2, 20, dtype=torch.bool), None]
    tensors[names.index(what)] = WRONG[what](tensors[names.index(what)])
    with pytest.raises(RuntimeError, match="pool_rest_backward: "):
        torch.ops.sparsebert.pool_rest_backward(*tensors, 20, 0.3)
    if names.index(what) > 2:
        with pytest.raises(RuntimeError, match="pool_rest: "):
            torch.ops.sparsebert.pool_rest(*tensors[3:], 20, 0.3)


def test_pooled_documents_must_be_among_the_tokens():
    packed = numbers(1, HEADS, 33, 8)
    torch.ops.sparsebert.pool_rest(*packed, None, torch.tensor([0, 13]), 20, 0.3)
    for starts in ([0, 14], [-1, 13]):
        with pytest.raises(RuntimeError, match="a packed sequence is not among the tokens"):
            torch.ops.sparsebert.pool_rest(*packed, None, torch.tensor(starts), 20, 0.3)


def test_opcheck():
    arguments = operator_arguments(20, dropout=0.1, rest=rest_of(2, HEADS, 8))
    *inputs, grad = numbers(2, HEADS, 20, 8, count=4)
    torch.library.opcheck(torch.ops.sparsebert.csr_attention_backward, (grad, *inputs, *arguments))
    arguments[6].requires_grad_()
    inputs = [tensor.requires_grad_() for tensor in inputs]
    torch.library.opcheck(torch.ops.sparsebert.csr_attention, (*inputs, *arguments))


@pytest.mark.parametrize("place, option", [(10, True), (14, 4)], ids=["causal", "window"])
def test_what_has_no_rest_is_refused(place, option):
    """By the operator, for who calls it."""
    arguments = [*operator_arguments(rest=rest_of(2, HEADS, 8))]
    arguments[place + 1] = option
    with pytest.raises(RuntimeError, match="csr_attention: rest must be"):
        torch.ops.sparsebert.csr_attention(*numbers(2, HEADS, 20, 8), *arguments)
