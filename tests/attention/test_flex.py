"""FlexAttention on the grid of test_attention.py (gradients on CUDA alone), its tiles, and what is compiled when."""

import pytest
import torch
from test_attention import attend, case_of, check, kept, make_mask, make_padding, named

from sparsebert import SparseBertModel, SparseMask, sparse_dot_product_attention
from sparsebert.attention.backends import prepared
from sparsebert.attention.kernels import flex
from sparsebert.attention.kernels.flex import BLOCK_SIZES
from sparsebert.attention.mask_inputs import MaskInputs


HEADS = 2

CASES = [
    {"length": 100, "mask": "empty rows", "padding": "holes", "head_size": 8, "num_heads": 2},
    {"length": 64, "causal": True, "head_size": 20},
    {"length": 1, "mask": "dense"},
    {"length": 100, "mask": "dam_b", "padding": "mixed", "diagonal": False, "num_heads": 2},
    {"length": 100, "mask": "bigbird", "last_token": "position", "layout": "strided"},
    {"length": 7, "mask": "dam_s", "padding": "nothing real", "layout": "contiguous"},
    {"length": 128, "diagonal": True, "padding": "left", "head_size": 128, "dtype": torch.bfloat16},
    {"length": 257, "mask": "dam_b", "padding": "right", "head_size": 64, "dtype": torch.float16},
    {"length": 100, "padding": "right", "causal": True, "diagonal": False, "layout": "one projection"},
    {"length": 1, "mask": "empty rows"},
    {"length": 100, "mask": "signed offsets", "padding": "mixed"},
    {"length": 100, "mask": "columns and table", "padding": "left", "causal": True},
]


def grid_case(length, *args, **fields):
    return case_of("sparse_flex", "cpu", length, *args, **fields)


@pytest.mark.parametrize(
    "fields", [CASES[0], *(pytest.param(fields, marks=pytest.mark.slow) for fields in CASES[1:])], ids=named
)
def test_forward(fields):
    """It is compiled for every shape."""
    check(grid_case(**fields), gradients=False)


@pytest.mark.slow
def test_more_lengths_than_recompilations():
    """PyTorch compiles a function at most `recompile_limit` times; more lengths than that must work."""
    with torch._dynamo.config.patch(recompile_limit=1):
        for length in range(10, 130, 10):
            check(grid_case(length), gradients=False)


# Tiles


def block_mask(mask, length, padding=None, causal=False):
    inputs = MaskInputs("sparse_flex", length, length, torch.device("cpu"), mask, padding, causal)
    return prepared(inputs).compiled[-1]


def tiles_of(mask):
    """Bool `(B, H, t, t)`: the tiles that a `BlockMask` visits, and those it does not mask."""
    tiles = []
    for counts, columns in (
        (mask.kv_num_blocks, mask.kv_indices),
        (mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        listed = torch.arange(columns.shape[-1]) < counts[..., None]
        tiles.append(torch.zeros(columns.shape, dtype=torch.bool).scatter(-1, columns.long(), listed))
    partial, full = tiles
    assert not (partial & full).any()
    return partial | full, full


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("fields", CASES, ids=named)
def test_tiles_cover_the_mask_exactly(fields, block, monkeypatch):
    """No live entry outside the visited tiles, no dead entry in a full one."""
    monkeypatch.setitem(BLOCK_SIZES, "cpu", block)
    case = grid_case(**fields)
    mask, padding, length = make_mask(case), make_padding(case), case.length
    keep = kept(mask, length, padding, case.causal, mask.num_layers - 1)
    live, full = (
        tiles.repeat_interleave(block, -1).repeat_interleave(block, -2)[..., :length, :length].expand(keep.shape)
        for tiles in tiles_of(block_mask(mask, length, padding, case.causal))
    )
    assert not (keep & ~live).any() and not (full & ~keep).any()


def right_padding(length, *lengths):
    return torch.arange(length) < torch.tensor(lengths)[:, None]


def test_tiles_that_hold_nothing_are_skipped():
    """A window visits its band, padding cuts it, and special tokens add their tile rows and columns, cut as well."""
    position, padding = torch.arange(256), right_padding(256, 256, 100)
    window = ((position[:, None] - position).abs() <= 8).repeat(HEADS, 1, 1)
    for special, given, expected in (
        ("none", None, [8 + 2 * 7]),
        ("none", padding, [22, 10]),
        ("first_last", padding, [22 + 12 + 10, 10 + 6]),
    ):
        mask = SparseMask(window, 256, special_tokens=special)
        tiles = tiles_of(block_mask(mask, 256, given))[0].sum((1, 2, 3)).tolist()
        assert tiles == [HEADS * number for number in expected]


def test_full_tiles():
    mask = SparseMask(torch.ones(HEADS, 100, 100, dtype=torch.bool), 100)
    full = tiles_of(block_mask(mask, 100, right_padding(100, 100, 40)))[1]
    assert full.sum((1, 2, 3)).tolist() == [HEADS * 9, HEADS * 1]


# What is compiled


def test_more_kinds_of_inputs_than_recompilations(monkeypatch):
    """PyTorch makes a graph anew for another scale or another kind of mask, too."""
    flex._compiled.cache_clear()
    # The graphs are made and guarded as always, but not compiled to code, which takes seconds each.
    compile = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: compile(function, **options | {"backend": "eager"})
    )
    states, padding = torch.randn(3, 2, HEADS, 20, 16), right_padding(20, 20, 13)
    keep = torch.rand(HEADS, 20, 20) < 0.5
    try:
        with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1):
            for scale in (0.1, 0.2):
                sparse_dot_product_attention(*states, SparseMask(keep, 20), scale=scale, backend="sparse_flex")
            for special, diagonal, given in (
                *(("none", None, None), ("first", False, None)),
                *(("none", None, padding), ("first_last", False, padding)),
            ):
                mask = SparseMask(keep, 20, special_tokens=special, diagonal=diagonal)
                output = sparse_dot_product_attention(*states, mask, given, backend="sparse_flex")
                expected = sparse_dot_product_attention(*states, mask, given, backend="sparse_eager")
                torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)
            compiled = flex.num_compiled()
            mask = SparseMask(torch.rand(HEADS, 20, 20) < 0.5, 20, special_tokens="first_last", diagonal=False)
            sparse_dot_product_attention(*states, mask, right_padding(20, 9, 20), backend="sparse_flex")
            assert flex.num_compiled() == compiled
    finally:
        flex._compiled.cache_clear()


# In a model

IDS = torch.arange(5, 37).repeat(2, 1)  # (2, 32)


def model_and_padding(tiny_config, padded, **fields):
    """A frozen model in evaluation that runs on this backend, and its `attention_mask`."""
    model = SparseBertModel(tiny_config(pattern="bigbird", **fields)).eval()
    model.set_attn_implementation("sparse_flex")
    return model, right_padding(32, 32, 20).long() if padded else None


def assert_follows_eager(model, function, padding):
    output = function(IDS, attention_mask=padding).last_hidden_state
    model.set_attn_implementation("sparse_eager")
    want = model(IDS, attention_mask=padding).last_hidden_state
    torch.testing.assert_close(output, want, atol=5e-6, rtol=1e-5)


@pytest.mark.slow
@torch.no_grad()
def test_inside_torch_compile():
    """The mask is made inside the graph as well; queries and keys are views of a linear layer's output."""
    mask = SparseMask(torch.rand(HEADS, 40, 40) < 0.3, 40, special_tokens="first_last")
    linears, hidden = [torch.nn.Linear(16, 16) for _ in range(3)], torch.randn(2, 40, 16)

    def attention(hidden, attention_mask, name):
        projected = [linear(hidden).view(2, 40, HEADS, 8).transpose(1, 2) for linear in linears]
        return sparse_dot_product_attention(*projected, mask, attention_mask.bool(), backend=name)

    padding = right_padding(40, 40, 20).long()
    output = torch.compile(attention, fullgraph=True)(hidden, padding, "sparse_flex")
    torch.testing.assert_close(output, attention(hidden, padding, "sparse_eager"), atol=5e-6, rtol=1e-5)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(
    "padded, fields",
    [
        (True, {}),
        (False, {}),
        (True, {"num_attention_heads": 1}),
        (True, {"is_decoder": True, "special_tokens": "first", "use_cache": False}),
    ],
    ids=["padded", "unpadded", "one head", "causal"],
)
def test_model_inside_torch_compile(tiny_config, padded, fields):
    model, padding = model_and_padding(tiny_config, padded, **fields)
    assert_follows_eager(model, torch.compile(model, fullgraph=True, dynamic=False), padding)


@torch.no_grad()
@pytest.mark.parametrize("padded", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_layers_of_a_compiled_model_share_one_block_mask(tiny_config, padded):
    """In the graph the lists of tiles are sorted once for all layers."""
    model, padding = model_and_padding(tiny_config, padded)
    calls = []

    def count(graph, example_inputs):
        calls.extend(node.target.__name__ for node in graph.graph.nodes if callable(node.target))
        return graph.forward

    assert_follows_eager(model, torch.compile(model, fullgraph=True, backend=count), padding)
    assert calls.count("flex_attention") == 2
    assert calls.count("argsort") == 2  # tiles with some entries on, tiles with all


def test_layers_share_one_block_mask(tiny_config):
    """There is one block mask per forward or, without padding, one for all forwards."""
    model, padding = model_and_padding(tiny_config, True)
    with torch.no_grad():
        padded, first, second = (
            model.sparse_attention("sparse_flex", 2, 32, 32, rows, device=IDS.device).compiled
            for rows in (padding.bool(), None, None)
        )
    assert len(padded) == len(first) == len(second) == 1
    assert first[0] is second[0]


@pytest.mark.slow
@torch.no_grad()
def test_layers_share_one_kernel(tiny_config):
    """The code compiled for one layer serves the two layers of another model."""
    one_layer, padding = model_and_padding(tiny_config, True, num_hidden_layers=1)
    one_layer(IDS, attention_mask=padding)
    model, _ = model_and_padding(tiny_config, True)
    with torch._dynamo.config.patch(error_on_recompile=True), torch.compiler.set_stance("fail_on_recompile"):
        assert_follows_eager(model, model, padding)


# What must be refused


@pytest.mark.parametrize("which", range(3), ids=("query", "key", "value"))
def test_gradients_of_any_input_are_refused_on_cpus(which):
    case = grid_case(8)
    states = torch.randn(3, 1, 1, 8, 8).unbind(0)
    states[which].requires_grad_()
    with pytest.raises(ValueError, match="it has no gradients on device 'cpu'"):
        attend(case, make_mask(case), None, *states)


@pytest.mark.gpu
def test_small_heads_are_refused_on_cuda():
    case = grid_case(8)
    with pytest.raises(ValueError, match="head size must be at least 16 on CUDA, got 8"):
        attend(case, make_mask(case), None, *torch.randn(3, 1, 1, 8, 8, device="cuda"))
