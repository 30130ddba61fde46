"""The forms of a mask that kernels read: against brute force, and how long they are kept."""

import weakref

import pytest
import torch
from torch._subclasses import FakeTensorMode

from sparsebert import SparseBertModel, SparseMask, build_pattern, sparse_dot_product_attention
from sparsebert.attention.backends import BACKENDS, refusal
from sparsebert.attention.capabilities import Request
from sparsebert.attention.mask_inputs import MaskInputs
from sparsebert.masks import compiled_forms as module
from sparsebert.masks.compiled_forms import base_table, compiled
from sparsebert.masks.patterns import PATTERNS


HEADS = 2
CPU = torch.device("cpu")


def table_form(table):
    return (table,)


def count_form(table):
    return table.sum(-1), table.sum(-2)


def make_mask(length=9, **fields):
    return SparseMask(torch.rand(2, HEADS, length, length) < 0.4, length, **fields)


@pytest.mark.parametrize("diagonal", [None, True, False])
@pytest.mark.parametrize("special_tokens", ["none", "first", "first_last"])
@pytest.mark.parametrize("special", ["none", "first", "all"])
@pytest.mark.parametrize("causal", [False, True])
def test_base_table(causal, special, special_tokens, diagonal):
    """The entries of the mask with some of its special tokens, and no key after its query."""
    mask = make_mask(special_tokens=special_tokens, diagonal=diagonal)
    shown = {"none": "none", "first": "first" if special_tokens != "none" else "none", "all": special_tokens}[special]
    for length in (1, 6, 9):
        want = mask.replace(special_tokens=shown).to_table(length)
        assert torch.equal(base_table(mask, length, causal, special), want.tril() if causal else want), length


def test_base_table_leaves_the_mask_as_it_is():
    mask = make_mask(diagonal=False)
    before = mask.keep.clone()
    base_table(mask, 9, causal=True, special="all").fill_(True)
    assert torch.equal(mask.keep, before)


def test_each_layer_has_its_form():
    mask = make_mask(special_tokens="first")
    forms = compiled(mask, count_form, 9, False, CPU, special="first")
    tables = base_table(mask, 9, special="first")
    assert len(forms) == 2
    for (rows, columns), table in zip(forms, tables, strict=True):
        assert torch.equal(rows, table.sum(-1)) and torch.equal(columns, table.sum(-2))


def test_made_once_per_form_length_and_causality():
    mask = make_mask()
    made = []

    def form(table):
        made.append(table.shape[-1])
        return (table,)

    for length, causal in ((9, False), (5, False), (9, True), (9, False), (5, False)):
        first = compiled(mask, form, length, causal, CPU)
        assert compiled(mask, form, length, causal, CPU)[0][0] is first[0][0]
    assert made == [9, 9, 5, 5, 9, 9]  # twice, for two layers
    other = make_mask()
    assert not torch.equal(compiled(other, form, 9, False, CPU)[0][0], compiled(mask, form, 9, False, CPU)[0][0])


def test_the_newest_forms_are_kept_up_to_a_bound(monkeypatch):
    mask = SparseMask(torch.rand(HEADS, 64) < 0.3, 64, "offsets")
    monkeypatch.setattr(module, "MAX_BYTES", 2 * HEADS * 64 * 64)
    kept = {}
    for length in (64, 62, 61, 63, 10, 11, 12, 60):
        kept[length] = weakref.ref(compiled(mask, table_form, length, False, CPU)[0][0])
        sizes = [form().nbytes for form in kept.values() if form() is not None]
        assert sum(sizes) - max(sizes) <= module.MAX_BYTES
    assert [length for length, form in kept.items() if form() is not None] == [61, 63, 10, 11, 12, 60]
    # A single form above the limit is still kept, and not driven out by a small one that every forward needs too.
    for length in (200, 5, 200, 5):
        form = compiled(mask, table_form, length, False, CPU)[0][0]
        assert kept.setdefault(length, weakref.ref(form))() is form
    assert [length for length, form in kept.items() if form() is not None] == [63, 10, 11, 12, 60, 200, 5]


@pytest.mark.parametrize("policy", ["dense", "error"])
def test_the_lengths_of_generation_share_forms(policy):
    mask = make_mask(23, length_policy=policy)
    longest = 70 if policy == "dense" else 23
    lengths = [
        MaskInputs("sparse_eager", 1, number, CPU, mask, causal=True).compiled_length(mask)
        for number in range(1, longest + 1)
    ]
    assert all(number <= length for number, length in enumerate(lengths, 1)) and max(lengths[:23]) == 23
    assert len(set(lengths)) <= 2 + longest.bit_length()


def test_forms_go_with_their_mask():
    mask = make_mask()
    form = weakref.ref(compiled(mask, table_form, 9, False, CPU)[0][0])
    assert form() is not None
    del mask
    assert form() is None


def test_what_is_made_in_inference_mode_serves_training():
    mask = build_pattern("bigbird", 20, HEADS)
    leaves = torch.randn(3, 2, HEADS, 20, 8).unbind(0)
    padding = torch.arange(20) < torch.tensor([20, 12])[:, None]
    request = Request("cpu", torch.float32, 2, HEADS, 20, 20, 8, gradients=True, padded=True)
    for name in (name for name in BACKENDS if refusal(name, request) is None):
        for given in (None, padding):
            with torch.inference_mode():
                sparse_dot_product_attention(*leaves, mask, given, backend=name)
            trained = [leaf.clone().requires_grad_() for leaf in leaves]
            sparse_dot_product_attention(*trained, mask, given, backend=name).sum().backward()
            assert all(leaf.grad.isfinite().all() for leaf in trained)
    with torch.inference_mode():
        ((form,),) = compiled(mask, table_form, 20, False, CPU)
    assert not form.is_inference() and not form.requires_grad


@pytest.mark.parametrize("name", ["sparse_eager", "sparse_sdpa"])
def test_what_is_made_of_fake_tensors_is_not_kept(name):
    """As in an estimate of the memory that a model takes."""
    mask, padding = make_mask(special_tokens="first_last"), torch.arange(9) < torch.tensor([9, 5])[:, None]

    def attend():
        query, key, value = torch.randn(3, 2, HEADS, 9, 8)
        return sparse_dot_product_attention(query, key, value, mask, padding, layer=0, backend=name)

    with FakeTensorMode(allow_non_fake_inputs=True):
        assert attend().shape == (2, HEADS, 9, 8)
    output = attend()
    assert type(output) is torch.Tensor and output.isfinite().all()


@pytest.mark.parametrize("form", ["table", "offsets"])
@pytest.mark.parametrize(
    "name",
    ["sparse_auto", *(pytest.param(n, marks=pytest.mark.slow) for n in ("sparse_eager", "sparse_sdpa", "sparse_cpu"))],
)
def test_one_graph_for_sizes_masks_and_dropout_that_vary(name, form):
    """Sizes, the mask and the probability of dropout are variables of the graph at the second call, or at once."""
    states = torch.randn(3, 2, HEADS, 9, 8)
    first = make_mask() if form == "table" else build_pattern("window", 9, HEADS)

    def attention(query, key, value, mask, dropout=0.0):
        return sparse_dot_product_attention(query, key, value, mask, layer=0, dropout_p=dropout, backend=name)

    dynamic = True if name == "sparse_auto" and form == "offsets" else None
    torch.compiler.reset()
    graph = torch.compile(attention, backend="eager", fullgraph=True, dynamic=dynamic)
    for mask in (first, first.replace(diagonal=False), first.replace(diagonal=True)):
        torch.testing.assert_close(graph(*states, mask), attention(*states, mask))
    for dropout in (0.1, 0.2, 0.3):
        assert graph(*states, first, dropout).isfinite().all()
    torch.testing.assert_close(graph(*states, first, 0.0), attention(*states, first))


def test_a_default_device_changes_nothing():
    """Models are built under `torch.device("meta")`; a mask is data."""
    mask = make_mask(special_tokens="first_last", diagonal=True)
    toeplitz = SparseMask(torch.tensor([[[True, False, True]]]), 3, "offsets")
    with torch.device("meta"):
        forms = compiled(mask, table_form, 9, False, CPU, special="all")
        assert toeplitz.density == 5 / 9 and toeplitz.num_empty_rows() == 0
        patterns = [build_pattern(name, 16, num_heads=4) for name in PATTERNS]
    assert torch.equal(forms[0][0], mask.to_table()[0])
    assert patterns == [build_pattern(name, 16, num_heads=4) for name in PATTERNS]


def test_forms_are_not_saved(tiny_config, assert_same_model, tmp_path):
    model = SparseBertModel(tiny_config(pattern="bigbird", attn_implementation="sparse_cpu")).eval()
    before = list(model.state_dict())
    ids = torch.arange(20)[None]
    model(ids)
    assert list(model.state_dict()) == before and not any("mask" in name for name in before)
    model.save_pretrained(tmp_path)
    loaded = SparseBertModel.from_pretrained(tmp_path, attn_implementation="sparse_cpu").eval()
    assert_same_model(loaded, model, input_ids=ids)
