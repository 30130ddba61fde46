"""
The CPU operator over compressed rows: what concerns this backend alone. test_attention.py has what concerns all.

Letters: B batch, H heads, n queries, m keys, d head size.
"""

import copy
import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import covering, growth
from exactness import with_gradients
from test_attention import assert_right, kept
from torch.utils.data import DataLoader
from transformers.utils import logging

from sparsebert import SparseBertModel, SparseMask, build_pattern, sparse_dot_product_attention
from sparsebert.attention.kernels import compilation, cpu
from sparsebert.attention.kernels.compilation import LEVELS, library_name
from sparsebert.attention.kernels.cpu import compressed_rows, find_level, in_engine, signed_offsets, unavailable
from sparsebert.masks.expansion import signed_parameters


HEADS = 3
LENGTH = 20


@pytest.fixture(autouse=True, scope="module")
def operator():
    assert unavailable() is None


@pytest.fixture(autouse=True)
def threads():
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)


def numbers(*shape, count=3):
    return torch.randn(count, *shape).unbind(0)


def csr_attention(*arguments):
    """The output of the operator, without what it keeps for its backward."""
    return torch.ops.sparsebert.csr_attention(*arguments)[0]


def operator_arguments(
    length=LENGTH, heads=HEADS, dropout=0.0, padded=True, seed=11, density=0.3, starts=None, rest=(None, None)
):
    """
    The arguments after query, key and value, for sequences of `length` and 13 tokens with their last tokens on; with
    `starts` they are packed. `rest` is the bias of the rest and its keys.
    """
    begin, end, columns = compressed_rows(torch.rand(heads, length, length) < density)
    padding = torch.arange(length) < torch.tensor([length, 13])[:, None] if padded else None
    last = torch.tensor([length - 1, 12], dtype=torch.int32) if padded else None
    flags = (True, True, True, False, 0, 0, False, -1)
    return begin, end, columns, padding, last, starts, *rest, None, torch.tensor([seed]), *flags, length, dropout, 0.3


@pytest.mark.parametrize("length", [1, 5, 40])
def test_compressed_rows(length):
    table = torch.rand(HEADS, length, length) < 0.4
    table[0, length // 2] = False
    table[1] = True
    begin, end, columns = compressed_rows(table)
    assert begin.dtype == end.dtype == torch.int32 and columns.dtype == torch.uint16
    assert len(columns) == table.sum()
    for head in range(HEADS):
        for row in range(length):
            keys = columns[begin[head, row] : end[head, row]].tolist()
            assert keys == [key for key in range(length) if table[head, row, key]]


def test_longest_rows_do_not_wrap():
    """Columns are unsigned 16-bit integers."""
    table = torch.zeros(1, 3, 2**16, dtype=torch.bool)
    table[0, 1, [0, 2**15, 2**16 - 1]] = True
    assert compressed_rows(table)[2].tolist() == [0, 2**15, 2**16 - 1]


# Compiled libraries


@pytest.fixture
def loaded(monkeypatch):
    """`loaded(level)`: run the operator that is compiled for one of `LEVELS`."""

    def load(level):
        monkeypatch.setattr(cpu, "find_level", lambda: level)
        cpu._operator.cache_clear()

    yield load
    monkeypatch.undo()
    cpu._operator.cache_clear()


every_level = pytest.mark.parametrize("level", ["default", "avx2", "avx512", "avx512_bf16"])


def skip_without(level):
    """Skip where this CPU lacks a level: those up to the one that PyTorch finds can run."""
    levels = list(LEVELS)
    if level not in levels[: levels.index(find_level()) + 1]:
        pytest.skip(f"this CPU lacks {level}")


@every_level
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_level_of_vector_instructions(level, dtype, loaded):
    """The 2x rule, forward and gradients."""
    skip_without(level)
    loaded(level)
    for length, head_size in ((1, 32), (37, 20), (37, 64), (129, 32), (65, 128)):
        table = torch.rand(HEADS, length, length) < torch.tensor([0.03, 0.3, 0.9])[:, None, None]
        table[0, ::3] = False
        mask = SparseMask(table, length)
        padding = torch.arange(length) < torch.tensor([length, -(-length // 2)])[:, None]
        query, key, value, grad = torch.randn(4, 2, HEADS, length, head_size).to(dtype).unbind(0)
        results = with_gradients(
            lambda *inputs, mask=mask, padding=padding: sparse_dot_product_attention(
                *inputs, mask, padding, backend="sparse_cpu"
            ),
            *((query, key, value), grad),
        )
        keep = kept(mask, length, padding)
        assert_right(results, query, key, value, grad, keep, about=f"{level} {length} {head_size}")


FORMS = [
    {},
    {"special_tokens": "none", "diagonal": True},
    {"special_tokens": "first", "diagonal": False},
    {"special_tokens": "first", "causal": True},
    {"special_tokens": "first", "causal": True, "block_size": 16},
    {"last_token": "real", "window": 7},
    {"window": 21, "block_size": 16},
    {"block_size": 3},
    {"block_size": 16, "diagonal": True},
    {"block_size": 32, "diagonal": False},
    {"block_size": 48, "special_tokens": "first"},
    {"queries": 21},
    {"queries": 21, "block_size": 16},
    {"queries": 33, "block_size": 16, "causal": True, "special_tokens": "none"},
    {"strided": True},
    {"symmetric": False},
    {"symmetric": False, "block_size": 16, "queries": 21},
    {"symmetric": False, "block_size": 16, "query_block_size": 48, "diagonal": False},
    {"symmetric": False, "causal": True, "special_tokens": "first", "special_rows": False},
    {"special_rows": False},
    {"special_rows": False, "diagonal": False, "window": 7},
    {"special_rows": False, "block_size": 16, "last_token": "position"},
    {"special_rows": False, "block_size": 32, "diagonal": False},
    {"special_rows": False, "block_size": 48, "diagonal": True, "special_tokens": "first"},
]


@pytest.mark.parametrize("diagonal", [None, True, False])
@pytest.mark.parametrize(("width", "height"), [(1, 2), (1, 16), (2, 4)])
def test_tiles_that_are_higher_than_wide(width, height, diagonal):
    """Only the first query of such a tile has its own token at distance 0."""
    keep = torch.rand(2, 2 * -(-20 // width) - 1) < 0.4
    mask = SparseMask(keep, 20, "blocks", width, symmetric=False, query_block_size=height, diagonal=diagonal)
    query, key, value = numbers(1, 2, 20, 32, count=3)
    want, got = (
        sparse_dot_product_attention(query, key, value, mask, backend=f"sparse_{name}") for name in ("eager", "cpu")
    )
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "level", "dtype"),
    covering(FORMS * 2, [*LEVELS], [torch.float32, torch.bfloat16]),
    ids=str,
)
def test_toeplitz_forms_at_every_level(level, dtype, options, loaded):
    """The forward that computes several queries at once: any length, head size and padding, by the 2x rule."""
    skip_without(level)
    loaded(level)
    options = {"special_tokens": "first_last", **options}
    causal, window, strided = options.pop("causal", False), options.pop("window", -1), options.pop("strided", False)
    queries, block_size = options.pop("queries", None), options.pop("block_size", 1)
    for length, head_size in ((1, 32), (64, 20), (97, 64), (129, 32), (65, 128), (70, 16)):
        size = -(-length // block_size)
        size = size if options.get("symmetric", True) else 2 * size - 1
        keep = torch.rand(HEADS, size) < torch.tensor([0.03, 0.3, 0.9])[:, None]
        form = {"form": "blocks", "block_size": block_size} if block_size > 1 else {"form": "offsets"}
        mask = SparseMask(keep, length, **form, **options)
        padding = torch.ones(4, length, dtype=torch.bool)
        padding[1, length // 2 + 1 :] = padding[2, : length // 3] = padding[3, 1 : length - 1 : 4] = False
        size = (4, length, HEADS, 2 * head_size) if strided else (4, HEADS, length, head_size)
        tensors = [tensor.transpose(1, 2)[..., 1::2] if strided else tensor for tensor in numbers(*size, count=4)]
        first = length - min(queries or length, length)
        query, key, value, grad = (tensor.to(dtype) for tensor in tensors)
        query, grad = query[:, :, first:], grad[:, :, first:]
        near = torch.ones(length, length, dtype=torch.bool)
        near = near.triu(-window).tril(window) if window >= 0 else near
        kept_entries = (kept(mask, length, padding, causal) & near)[:, :, first:]
        last = torch.tensor([row.nonzero()[-1].item() if row.any() else 0 for row in padding], dtype=torch.int32)
        last = None if options["special_tokens"] != "first_last" else last
        if last is not None and mask.last_token != "real":
            last = torch.full_like(last, length - 1)
        flags = (options["special_tokens"] != "none", mask.special_rows, mask.diagonal is not False, causal)
        flags = (*flags, mask.query_block_size or block_size, length)
        signed = signed_parameters(mask.keep[0], mask.symmetric)
        output = csr_attention(
            *(query, key, value, *signed_offsets(signed, block_size, mask.diagonal), padding, last, None),
            *(None, None, None, torch.tensor([0]), *flags),
            *(mask.diagonal is True, window, length, 0.0, head_size**-0.5),
        )
        assert_right([output], query, key, value, grad, kept_entries, about=f"{length} {head_size}")


@pytest.mark.parametrize("block_size", [1, 16])
def test_a_toeplitz_form_under_any_scale(block_size):
    """In bfloat16, a query cannot be scaled before it is multiplied."""
    keep = signed_parameters(torch.rand(HEADS, 64 // block_size) < 0.5, True)
    query, key, value = (tensor.bfloat16() for tensor in numbers(2, HEADS, 64, 32))
    form = (*signed_offsets(keep, block_size, None), *[None] * 6, torch.tensor([0]), True, True, True, False)
    for scale in (0.0, -0.3, 3.0):
        got, want = (
            csr_attention(*each, *form, block_size, 64, False, -1, 64, 0.0, factor)
            for each, factor in (
                ((query, key, value), scale),
                ((query.float() * scale, key.float(), value.float()), 1),
            )
        )
        torch.testing.assert_close(got.float(), want, atol=0.02, rtol=0.02)


def test_what_is_not_finite_reaches_no_query_that_does_not_see_it():
    """Of a key that other queries see, in the vectors of keys that a Toeplitz form is read by."""
    mask = SparseMask(torch.rand(HEADS, 70) < 0.3, 70, "offsets", special_tokens="first")
    for dtype in (torch.float32, torch.bfloat16):
        query, key, value = (tensor.to(dtype) for tensor in numbers(1, HEADS, 70, 32))
        clean = sparse_dot_product_attention(query, key, value, mask, backend="sparse_cpu")
        key[:, :, 40], value[:, :, 40] = torch.nan, torch.inf
        spoiled = sparse_dot_product_attention(query, key, value, mask, backend="sparse_cpu")
        unseen = ~kept(mask, 70, batch=1)[:, :, :, 40]
        assert unseen.any() and spoiled[unseen].equal(clean[unseen])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_read_and_rounded_as_by_pytorch(dtype):
    """Every number of 16 bits, through a token that attends to itself alone; and sums of two of them."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).view(1, 1, 1024, 64)
    flags = (False, True, True, False, 0, 0, False, -1)
    none, nothing = torch.zeros_like(every), (*[None] * 6, torch.tensor([0]), *flags, 0, 0.0, 1.0)
    single = csr_attention(none, none, every, *compressed_rows(torch.eye(1024)[None] > 0), *nothing)
    assert single.isnan().equal(every.isnan()) and single.nan_to_num(0).equal(every.nan_to_num(0))
    shuffled = every.flatten()[torch.randperm(2**16)].view_as(every).nan_to_num(0, 0, 0)
    pairs = compressed_rows(torch.eye(1024)[None] + torch.eye(1024).flip(0) > 0)
    rounded = csr_attention(none, none, shuffled, *pairs, *nothing)
    exact = csr_attention(none.float(), none.float(), shuffled.float(), *pairs, *nothing)
    assert rounded.equal(exact.to(dtype)) and rounded.float().ne(exact).float().mean() > 0.05


def test_compiled_at_first_use_where_none_was_installed(loaded, monkeypatch, tmp_path, caplog):
    """Into PyTorch's folder of extensions, with a line that says so; afterwards it is there."""
    monkeypatch.setenv("CXX", " ")  # as if there were no such variable
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    monkeypatch.setattr(cpu, "FOLDER", tmp_path)
    monkeypatch.setattr(compilation, "FLAGS", (*compilation.FLAGS, "-O0"))  # for the time it takes
    logging.warning_once.cache_clear()
    path = tmp_path / "built" / library_name("default")
    cpu.load_library("default")
    assert "compiles its operator" in caplog.text and list(path.parent.iterdir()) == [path]
    monkeypatch.setenv("CXX", "no-such-compiler")
    cpu.load_library("default")
    path.chmod(0o777)  # another user may have written it
    with pytest.raises(compilation.CompilationError, match="no-such-compiler"):
        cpu.load_library("default")


def test_without_library_or_compiler_the_reason_is_named(loaded, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    monkeypatch.setattr(cpu, "FOLDER", tmp_path)
    for compiler, reason in (
        ("no-such-compiler -O1", "there is no C++ compiler 'no-such-compiler'; install one"),
        ("false", "its operator could not be compiled: the compiler ended with 1"),
        ("c++ -no-such-flag", "no-such-flag"),
    ):
        monkeypatch.setenv("CXX", compiler)
        cpu._operator.cache_clear()
        unavailable.cache_clear()
        assert reason in unavailable()
    assert not list((tmp_path / "built").iterdir())
    (tmp_path / library_name(find_level())).write_text("not a library")
    unavailable.cache_clear()
    assert "cannot be loaded" in unavailable()
    unavailable.cache_clear()


def test_a_library_is_of_its_sources(monkeypatch, tmp_path):
    """One that was compiled from other sources, or with other flags, has another name."""
    names = [library_name(level) for level in LEVELS]
    monkeypatch.setattr(compilation, "FLAGS", ("-O2", *compilation.FLAGS))
    names += [library_name(level) for level in LEVELS]
    monkeypatch.undo()
    for path in compilation.FOLDER.glob("*.h"):
        (tmp_path / path.name).write_text(path.read_text() + "//")
    monkeypatch.setattr(compilation, "FOLDER", tmp_path)
    names += [library_name(level) for level in LEVELS]
    assert len(set(names)) == 3 * len(LEVELS)


def test_runs_on_the_threads_of_pytorch():
    torch.set_num_threads(2)
    (torch.randn(512, 512) @ torch.randn(512, 512)).sum()
    torch.randn(2**20).sort()
    before = len(os.listdir("/proc/self/task"))
    csr_attention(*numbers(2, HEADS, 100, 64), *operator_arguments(100))
    assert len(os.listdir("/proc/self/task")) == before


class Attended(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        torch.manual_seed(index)
        return csr_attention(*numbers(2, HEADS, LENGTH, 8), *operator_arguments())


def test_runs_in_a_forked_process():
    """After it has run on several threads in the parent."""
    torch.set_num_threads(2)
    expected = [Attended()[index] for index in range(2)]
    loader = DataLoader(Attended(), batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=60)
    for got, want in zip(loader, expected, strict=True):
        torch.testing.assert_close(got, want)


# Dropout


def kept_probabilities(dropout, seed=11, heads=4, length=300):
    """Dropped probabilities `(B, H, n, n)` times n, of a full mask and equal scores, read through values of 1."""
    arguments = operator_arguments(length, heads, dropout, padded=False, seed=seed, density=2.0)
    unit = torch.eye(length).expand(2, heads, -1, -1).split(100, dim=-1)
    parts = [csr_attention(torch.zeros_like(part), torch.zeros_like(part), part, *arguments) for part in unit]
    return torch.cat(parts, dim=-1) * length


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_fraction_dropped_and_mean(dropout):
    kept = kept_probabilities(dropout)
    fraction, tolerance = (kept == 0).float().mean(), 5 * (dropout * (1 - dropout) / kept.numel()) ** 0.5
    assert abs(fraction - dropout) < tolerance
    assert abs(kept.mean() - 1) < tolerance / (1 - dropout)
    # Rows, heads and sequences have their own random numbers.
    rows = (kept == 0).flatten(0, 2).float() - dropout
    correlation = rows @ rows.T / rows.square().sum(-1).sqrt().outer(rows.square().sum(-1).sqrt())
    assert correlation.fill_diagonal_(0).abs().max() < 0.5


def test_seeds_are_64_bits():
    seeds = (1, 1 + 2**32, -1, 2**63 - 1)
    masks = [kept_probabilities(0.5, seed, heads=1, length=30) for seed in seeds]
    assert all(not torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])
    assert torch.equal(kept_probabilities(0.5, 1, heads=1, length=30), masks[0])


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("size", [(1, 1, 257, 64), (2, HEADS, 70, 16)], ids=["one head", "six heads"])
def test_threads_do_not_change_results(size, dropout):
    """One head's rows are split over threads; each has its own sums of the gradients of key and value."""
    inputs, grad = numbers(*size), torch.randn(size)
    arguments = operator_arguments(size[2], size[1], dropout, padded=size[0] == 2)
    results = []
    for number in (1, 2, 7):
        torch.set_num_threads(number)
        results.append(with_gradients(lambda *leaves: csr_attention(*leaves, *arguments), inputs, grad))
    for other in results[1:]:
        assert torch.equal(other[0], results[0][0])  # no sum of the forward is split
        torch.testing.assert_close(other, results[0], atol=1e-5, rtol=1e-5)


# As an operator of PyTorch


@pytest.mark.parametrize("layout, dropout", [("heads first", 0.1), ("heads last", 0.0), ("strided", 0.1)])
def test_opcheck(layout, dropout):
    arguments = operator_arguments(dropout=dropout, padded=layout != "strided")
    if layout == "heads first":
        tensors = numbers(2, HEADS, LENGTH, 8, count=4)
    elif layout == "heads last":
        tensors = [tensor.transpose(1, 2) for tensor in numbers(2, LENGTH, HEADS, 8, count=4)]
    else:
        tensors = [tensor.mT for tensor in numbers(2, HEADS, 8, LENGTH, count=4)]
    *inputs, grad = tensors
    torch.library.opcheck(
        torch.ops.sparsebert.csr_attention_backward, (grad, torch.zeros(0), False, *inputs, *arguments)
    )
    inputs = [tensor.requires_grad_() for tensor in inputs]
    torch.library.opcheck(torch.ops.sparsebert.csr_attention, (*inputs, *arguments))


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_dropout_is_drawn_anew(compiler):
    torch._dynamo.reset()
    query, key, value = numbers(2, HEADS, LENGTH, 8)
    mask = SparseMask(torch.rand(HEADS, LENGTH, LENGTH) < 0.5, LENGTH)

    @torch.compile(fullgraph=True, backend=compiler)
    def attention(query, key, value):
        return sparse_dot_product_attention(query, key, value, mask, dropout_p=0.5, backend="sparse_cpu")

    drawn = torch.stack([attention(query, key, value) for _ in range(200)])
    assert len(drawn.flatten(1).unique(dim=0)) == 200
    plain = sparse_dot_product_attention(query, key, value, mask, backend="sparse_cpu")
    assert ((drawn.mean(0) - plain).abs() / (drawn.std(0) / 200**0.5 + 1e-6)).max() < 5


def test_autocast(tiny_config):
    model = SparseBertModel(tiny_config(pattern="window", attn_implementation="sparse_cpu"))
    ids, attention_mask = torch.randint(100, (2, 20)), torch.ones(2, 20, dtype=torch.long)
    attention_mask[1, 9:] = 0
    states = {}
    for name in ("sparse_cpu", "sparse_eager"):
        model.set_attn_implementation(name)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            states[name] = model(ids, attention_mask=attention_mask).last_hidden_state
    torch.testing.assert_close(states["sparse_cpu"], states["sparse_eager"], atol=0.1, rtol=0.02)
    states["sparse_cpu"].square().mean().backward()
    gradient = model.encoder.layer[0].attention.self.query.weight.grad
    assert gradient.dtype == torch.float32 and gradient.isfinite().all() and gradient.abs().sum() > 0
    mask, states = build_pattern("window", LENGTH, HEADS), numbers(1, HEADS, LENGTH, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert sparse_dot_product_attention(*states, mask, backend="sparse_cpu").dtype == torch.bfloat16


def test_padding_of_any_strides():
    mask = SparseMask(torch.rand(HEADS, LENGTH, LENGTH) < 0.5, LENGTH, special_tokens="first_last")
    inputs, padding = numbers(2, HEADS, LENGTH, 8), torch.arange(LENGTH) < torch.tensor([LENGTH, 13])[:, None]
    wider = torch.nn.functional.pad(padding, (0, 3))[:, :LENGTH]
    outputs = [
        sparse_dot_product_attention(*inputs, mask, given, backend="sparse_cpu")
        for given in (padding, padding.mT.contiguous().mT, wider)
    ]
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_inputs_that_share_memory():
    """Expanded over batch and heads (stride 0), and a gradient that is one number everywhere."""
    query = torch.randn(2, HEADS, LENGTH, 8)
    shared = torch.randn(1, 1, LENGTH, 8)
    mask = SparseMask(torch.rand(HEADS, LENGTH, LENGTH) < 0.5, LENGTH)
    results = []
    for name in ("sparse_cpu", "sparse_eager"):
        leaves = [query.clone().requires_grad_(), shared.clone().requires_grad_()]
        expanded = leaves[1].expand_as(query)
        output = sparse_dot_product_attention(leaves[0], expanded, expanded, mask, backend=name)
        output.sum().backward()
        results.append([output.detach(), *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


def test_copies_of_a_frozen_model_run(tiny_config, assert_same_model):
    model = SparseBertModel(tiny_config(pattern="bigbird", attn_implementation="sparse_cpu")).eval()
    ids = torch.randint(100, (2, 20))
    model(ids)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_model(other, model, input_ids=ids)


def test_no_allocation_of_n_times_n():
    length = 4096
    mask = SparseMask(torch.ones(1, 33, dtype=torch.bool), length, "offsets", special_tokens="first_last")
    inputs = numbers(1, 1, length, 64)
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    table = 4 * length**2

    def train():
        sparse_dot_product_attention(*leaves, mask, dropout_p=0.1, backend="sparse_cpu").sum().backward()

    assert growth(lambda: inputs[0][0, 0] @ inputs[1][0, 0].T) > 0.9 * table  # the measurement would notice a table
    assert growth(train) < table / 4


def test_the_output_can_be_changed_in_place():
    query, key, value = torch.randn(3, 2, 4, 12, 8)
    gradients = []
    for change in (torch.Tensor.mul, torch.Tensor.mul_):
        query.grad = None
        output = sparse_dot_product_attention(
            query.requires_grad_(), key, value, build_pattern("window", 12, 4), backend="sparse_cpu"
        )
        change(output, 2).sum().backward()
        gradients.append(query.grad)
    torch.testing.assert_close(*gradients)


def test_gradients_of_torch_func_are_refused():
    query, key, value = torch.randn(3, 2, 4, 12, 8)

    def loss(query, backend):
        mask = build_pattern("window", 12, 4, window_size=1)
        return sparse_dot_product_attention(query, key, value, mask, backend=backend).sum()

    with pytest.raises(ValueError, match="^sparse_cpu cannot run here: it has no gradients under torch.func"):
        torch.func.grad(loss)(query, "sparse_cpu")
    expected = torch.autograd.grad(loss(query.requires_grad_(), "sparse_cpu"), query)[0]
    torch.testing.assert_close(torch.func.grad(loss)(query.detach(), "sparse_auto"), expected)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda q, k, v: (q, k[..., :4], v), "key must be"),
        (lambda q, k, v: (q, k, v[:, :, :5]), "value must be"),
        (lambda q, k, v: (q, k[:, :1], v), "key must be"),
        (lambda q, k, v: (q, k.bfloat16(), v), "key must be torch.float32"),
        (lambda q, k, v: (q[:0], k[:0], v[:0]), "at least 1 sequence"),
        (lambda q, k, v: (q, k[:, :, :5], v[:, :, :5]), "from 1 to 5 positions"),
    ],
    ids=["head size", "value length", "heads", "dtype", "no sequence", "more queries than keys"],
)
def test_inputs_that_do_not_fit_are_refused(change, message):
    """By the function, and by the operator for who calls it."""
    states = change(*numbers(2, HEADS, LENGTH, 8))
    with pytest.raises(ValueError, match=message):
        sparse_dot_product_attention(*states, build_pattern("window", LENGTH, HEADS), backend="sparse_cpu")
    with pytest.raises(RuntimeError):
        csr_attention(*states, *operator_arguments())


@pytest.mark.parametrize(
    "change",
    [
        {"begin": lambda t: t[:, :5]},
        {"begin": lambda t: t.long()},
        {"end": lambda t: t[:1]},
        {"columns": lambda t: t.int()},
        {"padding": lambda t: t[:1]},
        {"padding": lambda t: t.int()},
        {"padding": lambda t: t.mT.contiguous().mT},
        {"last": lambda t: t[:1]},
        {"last": lambda t: t.long()},
        {"starts": lambda t: torch.tensor([0, 20])},  # two rows are not packed
        {"rest_bias": lambda t: torch.zeros(HEADS + 1)},
        {"rest_bias": lambda t: torch.zeros(HEADS, dtype=torch.float64)},
        {"rest_bias": lambda t: torch.zeros(2 * HEADS)[::2]},
        {"rest_keys": lambda t: torch.ones(1, LENGTH, dtype=torch.bool)},
        {"rest_keys": lambda t: torch.ones(2, LENGTH)},
        {"distances": lambda t: torch.zeros(HEADS, 2 * LENGTH)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_operator_stays_within_its_memory(change):
    """What no caller of this package passes."""
    names = ("begin", "end", "columns", "padding", "last", "starts", "rest_bias", "rest_keys", "distances")
    arguments = [*operator_arguments()]
    for name, function in change.items():
        arguments[names.index(name)] = function(arguments[names.index(name)])
    query, key, value, grad = numbers(2, HEADS, LENGTH, 8, count=4)
    with pytest.raises(RuntimeError, match="csr_attention: "):
        csr_attention(query, key, value, *arguments)
    with pytest.raises(RuntimeError, match="csr_attention_backward: "):
        torch.ops.sparsebert.csr_attention_backward(grad, torch.zeros(0), False, query, key, value, *arguments)


def test_packed_sequences_must_be_among_the_tokens():
    packed = numbers(1, HEADS, 33, 8)
    csr_attention(*packed, *operator_arguments(starts=torch.tensor([0, 20])))
    for starts in ([0, 21], [-1, 20]):
        with pytest.raises(RuntimeError, match="a packed sequence is not among the tokens"):
            csr_attention(*packed, *operator_arguments(starts=torch.tensor(starts)))


def padded_copies(tensors, padding, places):
    """Sequences that lie at some places of one row, as a padded batch of two."""
    padded = [torch.zeros(2, HEADS, padding.shape[1], 8) for _ in tensors]
    for given, batch in zip(tensors, padded, strict=True):
        for row, place in enumerate(places):
            batch[row, :, padding[row]] = given[0, :, place]
    return padded


@pytest.mark.parametrize("number", [1, 7])
def test_packed_sequences_get_what_they_get_alone(number):
    """Long enough for the rows of a head to be split over threads. Tokens between them get nothing."""
    torch.set_num_threads(number)
    places = (slice(2, 302), slice(305, 318))
    apart = operator_arguments(length=300, dropout=0.1)
    padding, together = apart[3], list(apart)
    together[5] = torch.tensor([place.start for place in places])
    tensors = numbers(1, HEADS, 320, 8, count=4)
    padded = padded_copies(tensors, padding, places)
    results = []
    for (*inputs, grad), arguments in ((tensors, together), (padded, apart)):

        def run(*leaves, arguments=arguments):
            return csr_attention(*leaves, *arguments)

        results.append(with_gradients(run, inputs, grad))
    for got, want in zip(*results, strict=True):
        expected = torch.zeros_like(got)
        for row, place in enumerate(places):
            expected[0, :, place] = want[row, :, padding[row]]
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_calls_of_an_inference_engine():
    """
    The same results, in the memory of the engine and on threads that sleep between loops, again and again, also for
    several callers at once.
    """
    mask = build_pattern("window", 200, 4, window_size=9)
    query, key, value = torch.randn(3, 2, 4, 200, 32).unbind()
    want = sparse_dot_product_attention(query, key, value, mask, backend="sparse_cpu")

    def run():
        output = torch.full((2, 200, 4, 32), torch.nan)
        with in_engine(output):
            sparse_dot_product_attention(query, key, value, mask, backend="sparse_cpu")
        return output.transpose(1, 2)

    assert all(torch.equal(run(), want) for _ in range(20))
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(each, want) for each in pool.map(lambda _: run(), range(40)))
