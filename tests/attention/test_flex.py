"""FlexAttention under a block mask against dense attention in float64, gradients on CUDA, and what it refuses."""

import functools
import itertools
import types

import pytest
import torch

from sparsebert import SparseBertModel, SparseMask, sparse_dot_product_attention
from sparsebert.attention.kernels import flex
from sparsebert.attention.kernels.flex import BLOCK_SIZES, block_attention, full_tiles, live_tiles, make_block_mask


HEADS = 2
FLOOR = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def dense(query, key, value, keep):
    """Masked softmax attention `(B, m, H, d)` in the inputs' dtype; a query without a key gives 0."""
    scores = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~keep, -1e4)
    return (scores.softmax(-1) * keep @ value).transpose(1, 2)


def kept(case, batch):
    """Brute force: which keys each query may see, bool `(B, H, m, m)`."""
    keep = case.base.expand(batch, -1, -1, -1).clone()
    for b in range(batch):
        special = [int(token[b % len(token)]) for token in (case.first, case.last) if token is not None]
        for position in special:
            keep[b, :, position] = keep[b, :, :, position] = True
            if case.diagonal is False:
                keep[b, :, position, position] = False
        if case.padding is not None:
            keep[b] &= case.padding[b] & case.padding[b][:, None]
    return keep.tril() if case.causal else keep


def make_case(base, batch=2, padding=None, first=None, last=None, diagonal=None, causal=False, full=False):
    if diagonal is not None:
        base.diagonal(dim1=-2, dim2=-1).fill_(diagonal)
    if causal:
        base = base.tril()
    return types.SimpleNamespace(
        base=base,
        batch=batch,
        padding=padding,
        first=first,
        last=last,
        diagonal=diagonal,
        causal=causal,
        full=full,
    )


def random_base(length, density=0.3):
    """A mask that differs by head, with an empty row and, if it is long enough, an empty tile row and full tiles."""
    base = torch.rand(HEADS, length, length) < density
    base[0, : length // 2, : length // 2] = True
    base[1, length // 2 :] = False
    base[:, length // 3] = False
    return base


def right_padding(length, *lengths):
    padding = torch.arange(length) < torch.tensor(lengths)[:, None]
    return padding, (padding * torch.arange(length)).argmax(-1).to(torch.int32)


def ragged(length, **fields):
    """A full sequence, a short one, one with holes that is left-padded too, and one that is all padding."""
    padding, _ = right_padding(length, length, max(length // 3, 1), length, 0)
    padding[2] &= torch.rand(length) < 0.7
    padding[2, : length // 4] = False
    last = (padding * torch.arange(length)).argmax(-1).to(torch.int32)
    return make_case(random_base(length), 4, padding, padding.int().argmax(-1).to(torch.int32), last, **fields)


def block_mask(case, device="cpu", block=None):
    block = block or BLOCK_SIZES[device]
    maps = [live_tiles(case.base, block), full_tiles(case.base, block) if case.full else None]
    base, padding, first, last, *maps = (
        None if tensor is None else tensor.to(device)
        for tensor in (case.base, case.padding, case.first, case.last, *maps)
    )
    return make_block_mask(base, maps[0], block, padding, first, last, case.diagonal, case.causal, maps[1])


def inputs(case, head_size=8, dtype=torch.float32, device="cpu"):
    """Query, key and value `(B, H, m, d)`, transposed as the host passes them."""
    size = (3, case.batch, case.base.shape[-1], HEADS, head_size)
    return [tensor.transpose(1, 2) for tensor in torch.randn(size).to(device, dtype).unbind(0)]


def assert_as_good_as_dense(got, want, other, dtype):
    """The 2x rule: at most twice plain PyTorch's error against float64, plus a few roundings."""
    assert got.dtype == dtype and got.isfinite().all()
    error, allowed = (got - want).abs().max().item(), (other - want).abs().max().item()
    assert error <= 2 * allowed + FLOOR[dtype], (error, allowed)


@torch.no_grad()
def assert_forward(case, head_size=8, dtype=torch.float32, device="cpu"):
    query, key, value = inputs(case, head_size, dtype, device)
    query.requires_grad_()  # like a parameter; no gradient is computed here
    keep = kept(case, case.batch).to(device)
    torch.full_like(query, torch.nan)  # freed at once, so that unwritten output memory holds NaN
    output = block_attention(query, key, value, block_mask(case, device), head_size**-0.5)
    assert output.shape == (case.batch, case.base.shape[-1], HEADS, head_size) and output.is_contiguous()
    truth = dense(query.double(), key.double(), value.double(), keep)
    assert_as_good_as_dense(output, truth, dense(query, key, value, keep), dtype)
    assert (output.transpose(1, 2)[~keep.any(-1)] == 0).all()


def window(length, width=8):
    position = torch.arange(length)
    return ((position[:, None] - position).abs() <= width).repeat(HEADS, 1, 1)


START = torch.tensor([0])
CASES = {
    "ragged": lambda: ragged(100),
}
SLOW_CASES = {
    "causal": lambda: make_case(random_base(64), first=START, causal=True),
    "one token": lambda: make_case(torch.ones(HEADS, 1, 1, dtype=torch.bool)),
    "ragged, full tiles, no diagonal": lambda: ragged(100, full=True, diagonal=False),
    "one last token for all": lambda: make_case(random_base(100), first=START, last=torch.tensor([99]), full=True),
    "ragged 7": lambda: ragged(7),
    "ragged 64": lambda: ragged(64, full=True),
    "ragged 128, diagonal": lambda: ragged(128, diagonal=True),
    "ragged 257": lambda: ragged(257, full=True),
    "causal, padding, no diagonal": lambda: make_case(
        random_base(100), padding=right_padding(100, 100, 40)[0], first=START, causal=True, diagonal=False
    ),
    "one token without a key": lambda: make_case(torch.zeros(HEADS, 1, 1, dtype=torch.bool)),
    "nothing kept": lambda: make_case(torch.zeros(HEADS, 64, 64, dtype=torch.bool)),
    "last token of each, no padding": lambda: make_case(random_base(64), last=torch.tensor([63, 40])),
}
ALL_CASES = CASES | SLOW_CASES


@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_CASES)], ids=str
)
def test_forward(name):
    assert_forward(ALL_CASES[name]())


@pytest.mark.slow
@pytest.mark.parametrize(
    "head_size, dtype",
    [(head_size, dtype) for head_size in (20, 32, 64, 128) for dtype in FLOOR] + [(8, torch.bfloat16)],
    ids=str,
)
def test_forward_of_dtypes_and_head_sizes(head_size, dtype):
    assert_forward(ragged(100, full=True, diagonal=False), head_size, dtype)


def tiles_of(mask):
    """Bool `(B, H, t, t)`: the tiles that a `BlockMask` visits, and those it does not mask."""
    full = mask.full_kv_num_blocks is not None
    lists = [(mask.kv_num_blocks, mask.kv_indices)]
    lists += [(mask.full_kv_num_blocks, mask.full_kv_indices)] if full else []
    tiles = []
    for counts, columns in lists:
        listed = torch.arange(columns.shape[-1]) < counts[..., None]
        tiles.append(torch.zeros(columns.shape, dtype=torch.bool).scatter(-1, columns.long(), listed))
    partial, full = tiles if full else (tiles[0], torch.zeros_like(tiles[0]))
    assert not (partial & full).any()
    return partial | full, full


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("name", ALL_CASES)
def test_tiles_cover_the_mask_exactly(name, block):
    """No live entry outside the visited tiles, no dead entry in a full one."""
    case = ALL_CASES[name]()
    keep = kept(case, case.batch)
    length = keep.shape[-1]
    live, full = (
        tiles.repeat_interleave(block, -1).repeat_interleave(block, -2)[..., :length, :length].expand(keep.shape)
        for tiles in tiles_of(block_mask(case, block=block))
    )
    assert not (keep & ~live).any()
    assert not (full & ~keep).any()


def test_tiles_that_hold_nothing_are_skipped():
    """A window visits its band, padding cuts it, and special tokens add their tile rows and columns, cut as well."""
    padding, last = right_padding(256, 256, 100)
    band = make_case(window(256))
    assert tiles_of(block_mask(band))[0].sum() == HEADS * (8 + 2 * 7)
    cut = make_case(window(256), padding=padding)
    assert tiles_of(block_mask(cut))[0].sum((1, 2, 3)).tolist() == [HEADS * 22, HEADS * 10]
    special = make_case(window(256), padding=padding, first=START, last=last)
    assert tiles_of(block_mask(special))[0].sum((1, 2, 3)).tolist() == [HEADS * (22 + 12 + 10), HEADS * (10 + 6)]


def test_full_tiles():
    padding, _ = right_padding(100, 100, 40)
    case = make_case(torch.ones(HEADS, 100, 100, dtype=torch.bool), padding=padding, full=True)
    full = tiles_of(block_mask(case))[1]
    assert full.sum((1, 2, 3)).tolist() == [HEADS * 9, HEADS * 1]


@pytest.mark.slow
def test_more_lengths_than_recompilations():
    """PyTorch compiles a function at most `recompile_limit` times; more lengths than that must work."""
    with torch._dynamo.config.patch(recompile_limit=1):
        for name in ("ragged", "causal", "one token"):
            assert_forward(ALL_CASES[name]())


def test_more_kinds_of_inputs_than_recompilations(monkeypatch):
    """PyTorch makes a graph anew for another scale or another kind of mask, too."""
    flex._compiled.cache_clear()
    # The graphs are made and guarded as always, but not compiled to code, which takes seconds each.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    states, padding = torch.randn(3, 2, HEADS, 20, 16), torch.arange(20) < torch.tensor([20, 13])[:, None]
    keep = torch.rand(HEADS, 20, 20) < 0.5
    try:
        with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1):
            for scale in (0.1, 0.2, 0.3):
                sparse_dot_product_attention(*states, SparseMask(keep, 20), scale=scale, backend="sparse_flex")
            for special, diagonal, given in itertools.product(
                ("none", "first", "first_last"), (None, False), (None, padding)
            ):
                mask = SparseMask(keep, 20, special_tokens=special, diagonal=diagonal)
                output = sparse_dot_product_attention(*states, mask, given, backend="sparse_flex")
                expected = sparse_dot_product_attention(*states, mask, given, backend="sparse_eager")
                torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)
            compiled = flex.num_compiled()
            mask = SparseMask(torch.rand(HEADS, 20, 20) < 0.5, 20, special_tokens="first_last", diagonal=False)
            sparse_dot_product_attention(*states, mask, padding, backend="sparse_flex")
            assert flex.num_compiled() == compiled
    finally:
        flex._compiled.cache_clear()


@pytest.mark.slow
def test_twelve_lengths():
    for length in range(10, 130, 10):
        assert_forward(make_case(random_base(length), first=START))


def test_new_masks_and_padding_compile_nothing():
    first, second = ragged(100), ragged(100)
    second.base = window(100)
    assert_forward(first)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_forward(second)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("full", [True, False])
def test_inside_torch_compile(full):
    """The mask is made inside the graph as well, from tensors computed there."""
    case = ragged(40, full=full)
    query, key, value = inputs(case)

    def attention(query, key, value, base, attention_mask):
        padding = attention_mask.bool()
        base = base != 0
        last = (padding * torch.arange(40)).argmax(-1).to(torch.int32)
        full = full_tiles(base, 32) if case.full else None
        first = padding.int().argmax(-1).to(torch.int32)
        mask = make_block_mask(base, live_tiles(base, 32), 32, padding, first, last, None, False, full)
        return block_attention(query + 1, key, value, mask, 0.5) * 2

    output = torch.compile(attention, fullgraph=True)(query, key, value, case.base.int(), case.padding.long())
    query = (query + 1) * (0.5 * 8**0.5)
    want = dense(query.double(), key.double(), value.double(), kept(case, 4)) * 2
    torch.testing.assert_close(output.double(), want, atol=5e-6, rtol=1e-5)
    assert output.is_contiguous()


@pytest.mark.slow
def test_strides():
    """Heads first in memory, and a non-contiguous last dimension."""
    case = make_case(window(40))
    query, key = (torch.randn(2, HEADS, 40, 8) for _ in range(2))
    value = torch.randn(2, HEADS, 8, 40).mT
    output = block_attention(query, key, value, block_mask(case), 8**-0.5)
    want = dense(query.double(), key.double(), value.double(), kept(case, 2))
    torch.testing.assert_close(output.double(), want, atol=2e-6, rtol=1e-5)
    assert output.is_contiguous()


# In a model

IDS = torch.arange(5, 37).repeat(2, 1)  # (2, 32)


def model_and_padding(tiny_config, padded, **fields):
    """A frozen model in evaluation that runs on this backend, and its `attention_mask`."""
    model = SparseBertModel(tiny_config(pattern="bigbird", **fields)).eval()
    model.set_attn_implementation("sparse_flex")
    return model, right_padding(32, 32, 20)[0].long() if padded else None


def assert_follows_eager(model, function, padding):
    output = function(IDS, attention_mask=padding).last_hidden_state
    model.set_attn_implementation("sparse_eager")
    want = model(IDS, attention_mask=padding).last_hidden_state
    torch.testing.assert_close(output, want, atol=5e-6, rtol=1e-5)


@pytest.mark.slow
@torch.no_grad()
def test_projections_inside_torch_compile():
    """Queries and keys are views of a linear layer's output, as in a model."""
    mask = SparseMask(torch.rand(HEADS, 40, 40) < 0.3, 40, special_tokens="first_last")
    padding = right_padding(40, 40, 20)[0]
    linears, hidden = [torch.nn.Linear(16, 16) for _ in range(3)], torch.randn(2, 40, 16)

    def attention(hidden, name):
        projected = [linear(hidden).view(2, 40, HEADS, 8).transpose(1, 2) for linear in linears]
        return sparse_dot_product_attention(*projected, mask, padding, backend=name)

    output = torch.compile(attention, fullgraph=True)(hidden, "sparse_flex")
    torch.testing.assert_close(output, attention(hidden, "sparse_eager"), atol=5e-6, rtol=1e-5)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(
    "padded, fields",
    [
        pytest.param(True, {}, id="padded"),
        pytest.param(False, {}, id="unpadded"),
        pytest.param(True, {"num_attention_heads": 1}, id="one head"),
        pytest.param(
            True,
            {"is_decoder": True, "special_tokens": "first", "use_cache": False},
            id="causal",
            marks=pytest.mark.slow,
        ),
    ],
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


def attend(query):
    mask = SparseMask(torch.ones(HEADS, 8, 8, dtype=torch.bool), 8)
    return sparse_dot_product_attention(query, query, query, mask, backend="sparse_flex")


def test_dtype_and_device_are_refused():
    query = torch.randn(1, HEADS, 8, 8)
    with pytest.raises(ValueError, match="dtype must be one of torch.float32.*got torch.float64"):
        attend(query.double())
    with pytest.raises(ValueError, match="runs on cpu or cuda, got device 'meta'"):
        attend(query.to("meta"))


@pytest.mark.parametrize("which", range(3), ids=("query", "key", "value"))
def test_gradients_of_any_input_are_refused_on_cpus(which):
    mask, states = SparseMask(torch.ones(HEADS, 8, 8, dtype=torch.bool), 8), torch.randn(3, 1, HEADS, 8, 8).unbind(0)
    states[which].requires_grad_()
    with pytest.raises(ValueError, match="it has no gradients on device 'cpu'"):
        sparse_dot_product_attention(*states, mask, backend="sparse_flex")


# On CUDA


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ALL_CASES)
def test_gradients(name, dtype):
    case = ALL_CASES[name]()
    leaves = [tensor.detach().requires_grad_() for tensor in inputs(case, 64, dtype, "cuda")]
    keep = kept(case, case.batch).cuda()
    grad = torch.randn(case.batch, case.base.shape[-1], HEADS, 64, device="cuda", dtype=dtype)
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    plain = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    outputs = [
        block_attention(*leaves, block_mask(case, "cuda"), 64**-0.5),
        dense(*doubles, keep),
        dense(*plain, keep),
    ]
    for output in outputs:
        output.backward(grad.to(output.dtype))
    assert_as_good_as_dense(*(output.detach() for output in outputs), dtype)
    assert (outputs[0].transpose(1, 2)[~keep.any(-1)] == 0).all()
    for got, want, other in zip(leaves, doubles, plain, strict=True):
        assert_as_good_as_dense(got.grad, want.grad, other.grad, dtype)
    assert (leaves[0].grad[~keep.any(-1)] == 0).all()
    assert (leaves[1].grad[~keep.any(-2)] == 0).all() and (leaves[2].grad[~keep.any(-2)] == 0).all()


@pytest.mark.gpu
def test_small_heads_are_refused_on_cuda():
    with pytest.raises(ValueError, match="head size must be at least 16 on CUDA, got 8"):
        attend(torch.randn(1, HEADS, 8, 8, device="cuda"))
