"""
The Triton kernels on the grid of test_attention.py, and what concerns them alone. Without a CUDA device they run in
Triton's interpreter, which must be chosen before Triton is imported: in a process of its own, which this file starts.
"""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import test_attention
import torch
from exactness import with_gradients
from test_attention import MASKS, draw, kept, named
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from sparsebert import SparseMask
from sparsebert.attention.backends import prepared
from sparsebert.attention.choosing.self_check import examine
from sparsebert.attention.choosing.self_check_results import Setting
from sparsebert.attention.kernels import triton as backend
from sparsebert.attention.kernels.triton import real_spans, tile_attention
from sparsebert.attention.kernels.triton_launch import launch
from sparsebert.attention.kernels.triton_limits import GPUS, capability, check
from sparsebert.attention.mask_inputs import MaskInputs
from sparsebert.masks.tiles import tile_form


CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if CUDA else "cpu"

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
runs_kernels = pytest.mark.skipif(not (CUDA or INTERPRETED), reason="runs in the process with the interpreter")


@pytest.mark.skipif(CUDA or INTERPRETED, reason="starts the interpreter where there is no GPU")
@pytest.mark.parametrize("marker", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_in_the_interpreter(marker):
    files = [
        __file__,
        *(str(Path(__file__).with_name(f"test_triton_{name}.py")) for name in ("models", "rest", "safety")),
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", marker, *files]
    result = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=2 * 3600,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """New memory holds NaN, so an entry that no program writes is noticed."""

    def poisoned(function):
        def make(*args, **kwargs):
            tensor = function(*args, **kwargs)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return make

    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


@pytest.fixture
def lists(monkeypatch):
    """The kernels of long inputs, at any length."""
    use_lists(monkeypatch)


def use_lists(monkeypatch):
    monkeypatch.setattr(backend, "SHORT_LENGTH", 0)
    monkeypatch.setattr(backend, "SHORT_BACKWARD", dict.fromkeys(backend.SHORT_BACKWARD, 0))


def grid_case(length, *args, **fields):
    return test_attention.case_of("sparse_triton", DEVICE, length, *args, **fields)


slow = pytest.mark.slow
QUICK = [
    {"length": 70, "mask": "dam_s", "padding": "holes", "head_size": 128},
    {"length": 7, "padding": "mixed", "layout": "strided", "num_heads": 2},
    {"length": 128, "mask": "dam_b", "diagonal": False},
    {"length": 77, "padding": "mixed", "head_size": 64, "causal": True, "dtype": torch.float16},
    {"length": 40, "mask": "bigbird", "padding": "nothing real", "dropout": 0.125},
    {"length": 70, "mask": "signed offsets", "padding": "mixed", "diagonal": False},
]
LISTS = [
    {"length": 130, "mask": "dam_b", "padding": "nothing real"},
    {"length": 65, "causal": True, "padding": "right", "num_heads": 2},
    {"length": 101, "mask": "dam_s", "padding": "mixed", "diagonal": True, "last_token": "position"},
    {"length": 1, "mask": "empty rows", "padding": "right"},
    {"length": 100, "mask": "columns and table", "padding": "left", "causal": True},
    {"length": 101, "mask": "columns and blocks", "padding": "holes", "dropout": 0.125},
    pytest.param({"length": 66, "mask": "bigbird", "padding": "holes", "dropout": 0.125}, marks=slow),
    pytest.param({"length": 330, "mask": "dam_b", "padding": "right"}, marks=slow),
]


@runs_kernels
@pytest.mark.parametrize("fields", QUICK, ids=named)
def test_short_kernels(fields):
    test_attention.check(grid_case(**fields))


@runs_kernels
@pytest.mark.parametrize("fields", LISTS, ids=named)
def test_kernels_on_lists(fields, lists):
    test_attention.check(grid_case(**fields))


@runs_kernels
def test_self_check_in_every_configuration(lists):
    steps = []
    finding = examine("sparse_triton", DEVICE, Setting("float32", 64, gradients=True), (70,), steps.append)
    assert finding["right"], finding["reason"]
    assert steps == ["sparse_triton at 70 tokens", "sparse_triton at 70 tokens, configuration 2"]


@runs_kernels
@pytest.mark.skipif(CUDA, reason="the grid runs on a GPU in test_attention.py")
@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
def test_grid(mask, monkeypatch):
    """By the kernels that the length selects, then by those of long inputs."""
    for _ in range(2):
        for length in (7, 63, 64, 100):
            test_attention.check(replace(draw("sparse_triton", DEVICE, mask, length), num_heads=1))
        use_lists(monkeypatch)


@runs_kernels
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_size", [32, 64, 128])
@pytest.mark.parametrize("padding", ["none", "holes"])
@pytest.mark.parametrize("length", [1, 100, 200, 257, 1000])
def test_dtypes_on_a_gpu(length, padding, head_size, dtype):
    if head_size not in GPUS.get(capability(), ()):
        pytest.skip("refused on this GPU")
    test_attention.check(grid_case(length, "dam_b", padding, head_size=head_size, dtype=dtype, num_heads=2))


# The operator on its own


class Case:
    """Tensors under a mask of one head with both special tokens."""

    def __init__(self, length, mask=None, padding=None, head_size=32, dropout=0.0, batch=2):
        self.table = torch.rand(1, length, length) < 0.3 if mask is None else mask
        self.mask = SparseMask(self.table, length, special_tokens="first_last")
        self.padding = padding if padding is None else padding.to(DEVICE)
        self.tensors = torch.randn(4, batch, length, 1, head_size, device=DEVICE).transpose(2, 3).unbind(0)
        self.grad, self.dropout, self.scaling = self.tensors[3].transpose(1, 2), dropout, head_size**-0.5
        inputs = MaskInputs("sparse_triton", length, length, torch.device(DEVICE), self.mask, self.padding)
        self.inputs = prepared(inputs).for_layer(0)

    def keep(self):
        padding = None if self.padding is None else self.padding.cpu()
        return kept(self.mask, self.mask.length, padding, batch=len(self.grad)).to(DEVICE)

    def arguments(self, seed=(5, 7)):
        """What follows query, key and value."""
        *tiles, spans, _ = self.inputs.compiled[0]
        tokens = (self.inputs.first_token, self.inputs.last_token)
        seed = torch.tensor(seed, device=DEVICE)
        return tiles, self.padding, *tokens, None, False, seed, self.dropout, self.scaling, spans

    def attention(self, query, key, value, seed=(5, 7)):
        return tile_attention(query, key, value, *self.arguments(seed))

    def leaves(self):
        return [tensor.detach().requires_grad_() for tensor in self.tensors[:3]]

    def run(self):
        """Output and gradients of query, key and value."""
        return with_gradients(self.attention, self.tensors[:3], self.grad)


RAGGED = torch.arange(20) < torch.tensor([20, 12])[:, None]


@runs_kernels
@pytest.mark.skipif(CUDA, reason="a GPU has configurations of its own")
@pytest.mark.parametrize("dropout", [0.0, pytest.param(0.3, marks=slow)])
def test_several_steps_in_a_tile(lists, monkeypatch, dropout):
    """Configurations differ in how many keys or queries of a tile are taken at a time."""
    padding = torch.arange(70) < torch.tensor([[70], [40]])
    case = Case(70, padding=padding, head_size=64, dropout=dropout)
    expected = case.run()
    monkeypatch.setattr(backend, "_hardware", lambda query: (torch.bfloat16, 80))
    torch.testing.assert_close(case.run(), expected, atol=2e-6, rtol=1e-5)


@runs_kernels
@pytest.mark.parametrize("padded", [False, True])
def test_whole_tiles_need_no_code_for_partial_ones(lists, monkeypatch, padded):
    """Which takes registers, so that fewer programs run at a time. Padding cuts whole tiles."""
    whole = torch.tensor([[1, 0], [1, 1]]).bool().repeat_interleave(64, 0).repeat_interleave(64, 1)
    case = Case(128, whole[None], torch.arange(128) < torch.tensor([[128], [90]]) if padded else None)
    flags = []

    def noted(kernel, grid, arguments, constants, *more):
        flags.append(constants["PARTIAL"])
        launch(kernel, grid, arguments, constants, *more)

    monkeypatch.setattr(backend, "launch", noted)
    output, *gradients = case.run()
    results = [output.transpose(1, 2), *gradients]
    test_attention.assert_right(results, *case.tensors, case.keep())
    assert flags == [False] * 3
    flags.clear()
    Case(128).run()
    assert flags == [True] * 3


@runs_kernels
def test_dropout_is_a_function_of_the_seed_and_the_same_in_all_kernels(monkeypatch):
    """Short inputs run one kernel forward and one backward, lists another forward and two backward."""
    case = Case(66, dropout=0.25, batch=1)
    results = case.run()
    for seed in ((5, 7), (6, 7), (5, 8)):
        assert torch.equal(results[0], case.attention(*case.tensors[:3], seed)) == (seed == (5, 7))
    use_lists(monkeypatch)
    torch.testing.assert_close(case.run(), results, atol=2e-6, rtol=1e-5)


@runs_kernels
@pytest.mark.slow
def test_dropout_keeps_the_mean_and_the_rate():
    """With one-hot values the output is the probabilities themselves."""
    length, dropout = 32, 0.1
    case = Case(length, torch.ones(1, length, length, dtype=torch.bool), dropout=dropout, batch=8)
    query, key, _, _ = case.tensors
    value = torch.eye(length, device=DEVICE).expand_as(query)
    probabilities = torch.stack([case.attention(query, key, value, (seed, 0)) for seed in range(4)]).transpose(2, 3)
    plain = (query @ key.mT * case.scaling).softmax(-1)
    kept = probabilities != 0
    torch.testing.assert_close(probabilities, torch.where(kept, plain / (1 - dropout), 0.0), atol=1e-6, rtol=1e-3)
    # 32768 draws: five standard deviations.
    assert kept.float().mean().item() == pytest.approx(1 - dropout, abs=5 * (0.09 / kept.numel()) ** 0.5)
    for dim in range(5):
        rates = kept.float().mean([other for other in range(5) if other != dim])
        assert (rates - (1 - dropout)).abs().max() < 5 * (0.09 * kept.shape[dim] / kept.numel()) ** 0.5
    assert torch.corrcoef(kept.float().flatten(0, 3).T).fill_diagonal_(0).abs().max() < 5 / (kept.numel() / 32) ** 0.5


@runs_kernels
@pytest.mark.slow
def test_compiles_around():
    """A compiled graph around the operator has no break and gives the same result."""
    case = Case(20, padding=RAGGED, dropout=0.1)
    arguments, leaves = case.arguments(), case.leaves()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(query, key, value):
        return 2 * tile_attention(query, key, value, *arguments)

    output = compiled(*leaves)
    results = [output.detach() / 2, *(grad / 2 for grad in torch.autograd.grad(output, leaves, case.grad))]
    torch.testing.assert_close(results, case.run())


class Recorded(TorchDispatchMode):
    """The names of the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@runs_kernels
def test_what_is_recorded_is_an_operator():
    """Other calls do not pass PyTorch's dispatcher, and give the same."""
    forward, backward = "sparsebert.tile_attention.default", "sparsebert.tile_attention_backward.default"
    case = Case(20, padding=RAGGED)
    plain = case.run()
    with Recorded() as recorded:
        results = case.run()
    assert all(torch.equal(got, want) for got, want in zip(results, plain, strict=True))
    assert [name for name in recorded.names if "tile_attention" in name] == [forward, backward]
    leaves = case.leaves()
    output = case.attention(*leaves)
    assert "_TileAttention" in output.grad_fn.name()
    with Recorded() as recorded:
        results = torch.autograd.grad(output, leaves, case.grad, retain_graph=True)
    assert backward in recorded.names
    assert all(torch.equal(got, want) for got, want in zip(results, plain[1:], strict=True))
    graph = make_fx(lambda grad: torch.autograd.grad(output, leaves, grad, retain_graph=True))(case.grad)
    assert "tile_attention_backward" in graph.code
    tiles = case.inputs.compiled[0][:-2]

    def unmasked(*tensors):
        return tile_attention(*tensors, tiles, None, None, None, None, False, None, 0.0, 1.0)

    traced = torch.jit.trace(unmasked, tuple(case.tensors[:3]), check_trace=False)
    assert "sparsebert::tile_attention" in str(traced.graph)


@runs_kernels
@pytest.mark.parametrize("longest", [None, 0])
@pytest.mark.parametrize("where", range(3), ids=("query", "key", "value"))
def test_what_is_not_a_number_stays_one(where, longest, monkeypatch):
    """By the kernel of short inputs, and that of lists."""
    if longest is not None:
        monkeypatch.setattr(backend, "SHORT_LENGTH", longest)
    case = Case(20)
    case.tensors[where][0, 0, 3] = torch.nan
    seen = case.attention(*case.tensors[:3]).isnan().any(-1).squeeze(-1)
    wanted = torch.zeros_like(seen)
    wanted[0] = case.keep()[0, 0, :, 3] if where else torch.arange(20, device=DEVICE) == 3
    assert seen[wanted].all() and not seen[1].any()
    assert where == 2 or torch.equal(seen, wanted)  # a removed value is multiplied by 0, which gives NaN


class NoGradient(torch.autograd.Function):
    """The identity, without a gradient."""

    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@runs_kernels
def test_an_output_without_a_gradient():
    case = Case(20)
    NoGradient.apply(case.attention(*(leaves := case.leaves()))).sum().backward()
    assert all(leaf.grad is None for leaf in leaves)


@runs_kernels
def test_activation_checkpointing():
    case = Case(20, padding=RAGGED)
    leaves = case.leaves()
    output = checkpoint(case.attention, *leaves, (5, 7), use_reentrant=False)
    results = [output.detach(), *torch.autograd.grad(output, leaves, case.grad)]
    assert all(torch.equal(got, want) for got, want in zip(results, case.run(), strict=True))


@runs_kernels
def test_the_operator_is_well_formed():
    """Schema, fake kernel and autograd registration, as PyTorch checks them."""
    case = Case(20, padding=RAGGED, dropout=0.1)
    tiles, padding, first, last, _, _, seed, *_, spans = case.arguments()
    sizes = (2, 1, 32), (2, 1, 32), (2, 1), (1, 39)
    *rest, distances = [torch.randn(size, device=DEVICE, requires_grad=True) for size in sizes]
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    for own in ([None] * 5, [*rest, None, distances]):
        mask = (list(tiles), padding.view(torch.int8), spans, first, last, seed, *own)
        mask = (*mask, False, False, True, 60000, 1.0)
        torch.library.opcheck(torch.ops.sparsebert.tile_attention.default, (*case.leaves(), *mask), test_utils=checks)


def test_spans():
    """The first real token, one past the last, and whether there are holes; the last sequence has no token."""
    padding = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 1, 1, 1], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]]).bool()
    spans = real_spans(padding)
    assert spans.dtype == torch.int64
    assert spans.tolist() == [[1, 5, 1, 0b10110], [0, 5, 0, 0b11111], [2, 4, 0, 0b1100], [5, 0, 0, 0]]
    assert real_spans(torch.ones(1, 130).bool()).tolist() == [[0, 130, 0, -1, -1, 3]]


def test_shapes_without_running():
    """The operators' fake kernels: shapes, dtypes and strides, without Triton."""
    mask = tile_form(torch.ones(3, 70, 70, dtype=torch.bool))
    with FakeTensorMode() as mode:
        leaves = [mode.from_tensor(torch.randn(2, 70, 3, 32).transpose(1, 2).bfloat16()) for _ in range(3)]
        tiles = [mode.from_tensor(tensor) for tensor in mask]
        mask = (tiles, *[None] * 10, False, False, True, 65536, 1.0)
        output, lse = torch.ops.sparsebert.tile_attention(*leaves, *mask)
        gradients = torch.ops.sparsebert.tile_attention_backward(output, False, *leaves, output, lse, *mask)
    assert output.shape == (2, 70, 3, 32) and output.is_contiguous() and output.dtype == torch.bfloat16
    assert lse.shape == (2, 3, 70) and lse.dtype == torch.float32
    for gradient, leaf in zip(gradients, leaves, strict=True):
        assert gradient.shape == leaf.shape and gradient.stride() == leaf.stride() and gradient.dtype == leaf.dtype


REFUSALS = {
    "query must be bfloat16, float16 or float32.*got torch.float64": {"dtype": torch.float64},
    "as many keys as queries, got 9 keys and 8 queries": {"keys": 9},
    "dropout must be at least 0 and below 1, got 1.0": {"dropout": 1.0},
    "dropout 0.1 needs a seed, got None": {"dropout": 0.1},
    "scaling must be positive in sparse_triton, got 0": {"scaling": 0},
    r"tiles must be 64 queries by 64 keys.*got 64 queries, torch.int64 and \(2, 2, 2\)": {"mask_length": 100},
    "got 128 queries": {"block_q": 128},
}


@pytest.mark.parametrize("message", REFUSALS)
def test_refusals(message):
    fields = {"dtype": torch.float32, "keys": 8, "mask_length": 8, "block_q": 64, "dropout": 0, "scaling": 1}
    fields |= REFUSALS[message]
    query = torch.randn(1, 2, 8, 32, dtype=fields["dtype"])
    key = torch.randn(1, 2, fields["keys"], 32, dtype=fields["dtype"])
    tiles = tile_form(torch.ones(2, fields["mask_length"], fields["mask_length"], dtype=torch.bool))
    tiles = tiles._replace(pool=torch.zeros(2, fields["block_q"], dtype=torch.int64))
    with pytest.raises(ValueError, match=message):
        check(query, key, key, tiles, None, fields["dropout"], fields["scaling"])
