"""
Toeplitz masks at any length without a table of their entries: as lists of offsets in the CPU operator, and in whatever
is asked about a mask.

Letters: B batch, H heads, n queries, d head size, K parameters.
"""

import dataclasses
import itertools
from functools import partial

import pytest
import torch
from conftest import TINY, covering, growth
from exactness import with_gradients

from sparsebert import SparseBertModel, SparseMask, plan, sparse_dot_product_attention
from sparsebert.attention.kernels.cpu import signed_offsets, unavailable
from sparsebert.masks.compiled_forms import base_table
from sparsebert.masks.expansion import SPECIAL_TOKENS, parameter_index, signed_parameters
from sparsebert.masks.tiles import mask_tile_shares, tile_shares
from sparsebert.models.bert.configuration_sparsebert import SparseBertConfig
from sparsebert.models.sparse_attention import SparseAttention
from sparsebert.training.finetuning.task_models import input_sparsity


HEADS = 3
DIAGONALS = (None, True, False)


@pytest.fixture(scope="module")
def operator():
    assert unavailable() is None


def toeplitz(form, length, density=0.3, **fields):
    block_size = fields.pop("block_size", 5) if form == "blocks" else None
    size = -(-length // block_size) if block_size else length - 2 * (length > 8)
    size = size if fields.get("symmetric", True) else 2 * size - 1
    return SparseMask(torch.rand(2, HEADS, size) < density, length, form, block_size, **fields)


def tabled(mask, length):
    """The same mask at one length, entry by entry."""
    names = ("special_tokens", "special_rows", "last_token", "diagonal")
    return SparseMask(mask.structure(length), length, **{name: getattr(mask, name) for name in names})


def paddings(length):
    """No padding, right, left, and with holes."""
    right = torch.arange(length) < torch.tensor([length, -(-length // 2)])[:, None]
    holes = torch.rand(2, length) < 0.7
    return None, right, right.flip(1), holes


def results(mask, padding, inputs, grad, **arguments):
    torch.manual_seed(7)
    arguments |= {"layer": 1, "backend": "sparse_cpu"}
    return with_gradients(partial(sparse_dot_product_attention, mask=mask, padding=padding, **arguments), inputs, grad)


@pytest.mark.parametrize(
    ("form", "policy", "diagonal", "symmetric"),
    covering(["offsets", "blocks"] * 6, ["extend", "dense"], DIAGONALS, [True, True, False, False]),
)
def test_offsets_give_the_results_of_rows(operator, form, diagonal, policy, symmetric):
    """To the bit, also which entries dropout removes, at the mask's own length and at others."""
    turns = itertools.cycle(itertools.product(("real", "position"), (0.0, 0.25)))
    # Not in step with the turns.
    rows, two = itertools.cycle((True, True, False, False, False)), itertools.cycle((0, 1, 2, 3, 1, 3, 2))
    for length, special_tokens, causal in itertools.product((1, 13, 37, 50), SPECIAL_TOKENS, (False, True)):
        if causal and special_tokens == "first_last":
            continue
        *inputs, grad = torch.randn(4, 2, HEADS, length, 8).unbind(0)
        given = paddings(length)
        for padding in (given[next(two)], given[next(two)]):
            last_token, dropout = next(turns)
            fields = {"special_tokens": special_tokens, "last_token": last_token, "length_policy": policy}
            fields |= {"symmetric": symmetric, "special_rows": next(rows) or special_tokens == "none"}
            mask = toeplitz(form, 37, diagonal=diagonal, **fields)
            arguments = {"dropout_p": dropout, "is_causal": causal}
            got = results(mask, padding, inputs, grad, **arguments)
            want = results(tabled(mask, length), padding, inputs, grad, **arguments)
            for one, other in zip(got, want, strict=True):
                assert torch.equal(one, other), (length, fields, arguments)


@pytest.mark.parametrize("special_tokens", SPECIAL_TOKENS)
def test_no_offset_at_all(operator, special_tokens):
    mask = SparseMask(torch.zeros(2, HEADS, 20, dtype=torch.bool), 20, "offsets", special_tokens=special_tokens)
    *inputs, grad = torch.randn(4, 2, HEADS, 20, 8).unbind(0)
    for padding in paddings(20):
        for one, other in zip(*(results(m, padding, inputs, grad) for m in (mask, tabled(mask, 20))), strict=True):
            assert torch.equal(one, other)


def test_the_last_queries_alone(operator):
    """As in a decoder with a cache of keys and values."""
    for form, policy in itertools.product(("offsets", "blocks"), ("extend", "dense")):
        mask = toeplitz(form, 20, special_tokens="first", length_policy=policy)
        query, key, value = torch.randn(3, 2, HEADS, 30, 8).unbind(0)
        whole = sparse_dot_product_attention(query, key, value, mask, layer=0, is_causal=True, backend="sparse_cpu")
        last = sparse_dot_product_attention(
            query[:, :, -3:], key, value, mask, layer=0, is_causal=True, backend="sparse_cpu"
        )
        assert torch.equal(last, whole[:, :, -3:])


@pytest.mark.parametrize("block_size", [1, 4])
def test_signed_offsets(block_size):
    keep = torch.tensor([[True, False, True, False], [False, False, False, True], [False] * 4])
    keep = signed_parameters(keep, True)
    before = keep.clone()
    begin, end, offsets = signed_offsets(keep, block_size, None)
    assert begin.dtype == end.dtype == offsets.dtype == torch.int32
    blocks = [[-2, 0, 2], [-3, 3], []]
    for head, expected in enumerate(blocks):
        tokens = [block * block_size + token for block in expected for token in range(block_size)]
        assert offsets[begin[head, 0] : end[head, 0]].tolist() == tokens
    assert (len(signed_offsets(keep, 1, True)[2]), len(signed_offsets(keep, 1, False)[2])) == (7, 4)
    assert torch.equal(keep, before)  # it is the mask's own
    # A query that is 2 ahead of its key finds it 2 before itself.
    keep = torch.tensor([[False, False, False, False, True]])
    assert signed_offsets(keep, block_size, None)[2].tolist() == list(range(-2 * block_size, -block_size))


def test_longer_masks_are_refused_as_tables_are(operator):
    mask, states = toeplitz("offsets", 12, length_policy="error"), torch.randn(3, 1, HEADS, 13, 8).unbind(0)
    for one, causal in itertools.product((mask, tabled(mask, 12)), (False, True)):
        with pytest.raises(ValueError, match="input of 13 tokens is longer than the mask"):
            sparse_dot_product_attention(*states, one, layer=0, is_causal=causal, backend="sparse_cpu")


def test_more_tokens_than_a_column_index_can_count(operator):
    length = 2**16 + 100
    keep = torch.zeros(1, 60_001, dtype=torch.bool)
    keep[0, [0, 3, 60_000]] = True
    mask = SparseMask(keep, 60_001, "offsets", special_tokens="first")
    query, key, value = torch.randn(3, 1, 1, length, 8).unbind(0)
    output = sparse_dot_product_attention(query, key, value, mask, backend="sparse_cpu")[0, 0]
    for row in (1, 3, 2**16 - 1, 2**16, length - 1):
        keys = sorted({0} | {j for d in (0, 3, 60_000) for j in (row - d, row + d) if 0 <= j < length})
        weights = (key[0, 0, keys] @ query[0, 0, row] * 8**-0.5).softmax(-1)
        torch.testing.assert_close(output[row], weights @ value[0, 0, keys], atol=1e-5, rtol=1e-5)


# Memory


def model_of(length, dropout):
    keep = torch.rand(2, TINY["num_attention_heads"], 2048) < 0.02
    mask = SparseMask(keep, length, "offsets", special_tokens="first_last")
    config = SparseBertConfig(
        **TINY
        | {"max_position_embeddings": length, "attention_probs_dropout_prob": dropout, "hidden_dropout_prob": dropout},
        frozen=True,
        mask_length=length,
    )
    model = SparseBertModel(config, add_pooling_layer=False)
    model.set_mask(mask)
    return model


def forward(length):
    model = model_of(length, 0.0).eval()
    with torch.no_grad():
        model(torch.randint(5, 100, (1, length)))
    assert plan(model, length).choices["inference"][0] == "sparse_cpu"


def step(length):
    """A training step on a padded sequence."""
    model = model_of(length, 0.1).train()
    padding = (torch.arange(length) < length - 7)[None].long()
    model(torch.randint(5, 100, (1, length)), attention_mask=padding).last_hidden_state.sum().backward()


@pytest.mark.parametrize("run", [forward, step])
def test_memory_grows_with_the_length_alone(operator, run):
    """In a whole model, from a new mask to its output: nothing as large as one bit per entry, let alone a byte."""
    length = 16384
    assert growth(lambda: run(length)) < TINY["num_attention_heads"] * length**2 / 8


def test_packed_documents_in_linear_memory(operator):
    model = model_of(16384, 0.0).eval()
    positions = torch.cat([torch.arange(12000), torch.arange(4384)])[None]

    def run():
        with torch.no_grad():
            return model(torch.randint(5, 100, (1, 16384)), position_ids=positions)

    assert growth(run) < 16384**2 / 4


# Questions about a mask


SIZES = ((9, 4, 0.3), (24, 5, 0.1), (24, 11, 0.5), (17, 16, 0.0))  # length, block size, density


# How special tokens and distances are treated: signed or not, with the rows of special tokens or not.
KINDS = ((True, True), (True, True), (False, True), (True, False), (False, False))


def cases():
    sizes, rows = itertools.cycle(SIZES), itertools.cycle((2, 3))
    for form, policy, diagonal, special, (symmetric, special_rows) in itertools.product(
        ("offsets", "blocks"), ("extend", "dense"), DIAGONALS, SPECIAL_TOKENS, KINDS
    ):
        length, block_size, density = next(sizes)
        fields = {"length_policy": policy, "diagonal": diagonal, "special_tokens": special}
        fields |= {"symmetric": symmetric, "special_rows": special_rows or special == "none"}
        if form == "blocks":
            fields["block_size"] = block_size
            yield toeplitz(form, length, density, **fields)
            fields |= {"symmetric": False, "query_block_size": next(rows) * block_size}
        yield toeplitz(form, length, density, **fields)


def tables():
    for diagonal, special, density in itertools.product(DIAGONALS, SPECIAL_TOKENS, (0.0, 0.4, 1.0)):
        keep = torch.rand(2, HEADS, 9, 9) < density
        for special_rows in {True, special == "none"}:
            rules = {"special_tokens": special, "special_rows": special_rows}
            yield SparseMask(keep, 9, length_policy="dense", diagonal=diagonal, **rules)


def test_counts_are_those_of_the_table():
    """Density and empty rows, which are counted without making the table, at the mask's length and others."""
    for mask in [*cases(), *tables()]:
        for length in (1, 2, mask.length - 1, mask.length, 33):
            table = mask.to_table(length)
            assert mask.density_at(length) == table.sum().item() / table.numel(), (mask, length)
            assert mask.density_at(length, causal=True) == table.tril().sum().item() / table.numel(), (mask, length)
            for window in (None, 0, 1, 4):
                near = table if window is None else table.triu(-window).tril(window)
                assert mask.num_empty_rows(length, window) == (~near.any(-1)).sum().item(), (mask, length, window)
    with pytest.raises(ValueError, match="input of 10 tokens is longer"):
        toeplitz("offsets", 9, length_policy="error").density_at(10)


@pytest.mark.parametrize("causal", [False, True])
def test_tiles_without_a_table(causal):
    """The share of live tiles, and that of full ones."""
    found = set()
    for mask in itertools.islice(cases(), int(causal), None, 3):
        for length, side in ((5, 3), (5, 16), (mask.length, 3), (33, 1), (33, 16)):
            expected = tile_shares(base_table(mask, length, causal).flatten(0, 1), side)
            found_shares = mask_tile_shares(mask, length, side, causal)
            assert found_shares == pytest.approx(expected), (mask, length, side)
            found.add((side, expected[0] > expected[1] > 0))
    assert {(3, True), (16, True)} <= found
    table = SparseMask(torch.rand(2, HEADS, 9, 9) < torch.tensor([0.02, 0.3])[:, None, None, None], 9)
    expected = tile_shares(base_table(table, 7, causal).flatten(0, 1), 3)
    assert mask_tile_shares(table, 7, 3, causal) == pytest.approx(expected)


def test_sparsity_on_inputs():
    mask = toeplitz("offsets", 24, special_tokens="first_last")
    lengths = [5, 24, 24, 11]
    kept = sum(mask.to_table(length).sum().item() for length in lengths)
    entries = sum(length**2 for length in lengths)
    assert input_sparsity(mask, lengths) == pytest.approx(1 - kept / (2 * HEADS * entries))


@pytest.mark.parametrize("name", ["dam_s", "dam_b", "dam_u", "soft"])
def test_what_a_search_decides_is_counted_without_its_table(tiny_config, name):
    lengths = itertools.cycle((4, 17, 40))
    for special_tokens, diagonal, (symmetric, special_rows) in itertools.product(
        SPECIAL_TOKENS, ("learned", "keep", "remove"), KINDS[1:]
    ):
        length = next(lengths)
        fields = {"special_tokens": special_tokens, "diagonal": diagonal, "mask_length": length, "block_size": 16}
        fields |= {"symmetric": symmetric, "special_rows": special_rows or special_tokens == "none"}
        if name == "dam_b" and not symmetric:
            fields["query_block_size"] = 32
        config = tiny_config(search=name, **fields)
        search = SparseAttention(config).search
        assert "fixed" not in vars(search) or search.form == "table"
        size = search.num_parameters
        sizes = {"size": size, "query_block_size": search.query_block_size}
        index = parameter_index(search.form, length, length, symmetric, search.block_size, **sizes)
        learned = index[search.fixed == -1]
        assert torch.equal(search.counts, learned.bincount(minlength=search.num_parameters).float()), fields
        assert search.num_fixed == (search.fixed == 1).sum(), fields
        assert search.num_learned == learned.numel() == search.counts.sum(), fields
        for allowed in (False, True):
            rows = 0 if allowed else int((search.fixed != 1).all(-1).sum())
            assert dataclasses.replace(search, allow_empty_rows=allowed).least_kept == search.num_fixed + rows, fields


def test_a_search_over_long_inputs_freezes_without_a_table(tiny_config):
    def run():
        fields = {"search": "dam_s", "target_sparsity": 0.91, "mask_length": 16384, "max_position_embeddings": 16384}
        return SparseAttention(tiny_config(**fields)).freeze()

    assert growth(run) < 16384**2 / 8
    assert run().sparsity == pytest.approx(0.91, abs=1e-3)
