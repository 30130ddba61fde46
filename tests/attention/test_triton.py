"""
Tile attention by Triton kernels against float64. Without a CUDA device the kernels run in Triton's interpreter, which
must be chosen before Triton is imported: in a process of its own, which this file starts on itself.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from sparsebert.attention.kernels import triton as backend
from sparsebert.attention.kernels.triton import real_spans, tile_attention
from sparsebert.attention.kernels.triton_limits import GPUS, capability, check
from sparsebert.masks.tiles import tile_form


CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if CUDA else "cpu"

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
runs_kernels = pytest.mark.skipif(not (CUDA or INTERPRETED), reason="runs in the process with the interpreter")
FLOOR = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.mark.skipif(CUDA or INTERPRETED, reason="starts the interpreter where there is no GPU")
@pytest.mark.parametrize("marker", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_in_the_interpreter(marker):
    files = [__file__, str(Path(__file__).with_name("test_triton_models.py"))]
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


class Case:
    """Tensors, a mask and its padding and special tokens."""

    def __init__(
        self,
        length,
        mask="random",
        padding=None,
        first=True,
        last=True,
        diagonal=None,
        causal=False,
        head_size=32,
        transposed=True,
        dropout=0.0,
        dtype=torch.float32,
        batch=2,
        heads=2,
    ):
        self.base = MASKS[mask](heads, length)
        self.base[0, length // 2] = mask == "dense"  # an empty row where no special token fills it
        self.padding = None if padding is None else PADDINGS[padding](batch, length)
        self.diagonal, self.causal, self.dropout = diagonal, causal, dropout
        if diagonal is not None:
            self.base.diagonal(dim1=1, dim2=2).fill_(diagonal)
        if causal:
            self.base = self.base.tril()
        real = torch.ones(batch, length, dtype=torch.bool) if self.padding is None else self.padding
        self.first = real.int().argmax(1).int() if first else None
        self.last = (real * torch.arange(length)).amax(1).int() if last and not causal else None
        shape = (4, batch, length, heads, head_size) if transposed else (4, batch, heads, length, head_size)
        tensors = torch.randn(shape).to(dtype).to(DEVICE)
        self.tensors = (tensors.transpose(2, 3) if transposed else tensors).unbind(0)
        self.grad = self.tensors[3].transpose(1, 2)
        self.scaling = head_size**-0.5
        self.factors = None  # what dropout multiplies each probability with, for the reference

    def keep(self):
        """Every live entry, bool (B, H, n, n)."""
        batch, _, length, _ = self.tensors[0].shape
        position = torch.arange(length)
        special = torch.zeros(batch, length, dtype=torch.bool)
        for token in (self.first, self.last):
            if token is not None:
                special = special | (position == token[:, None])
        special = special[:, None, :, None] | special[:, None, None, :]
        if self.diagonal is False:
            special = special & (position[:, None] != position)
        keep = (self.base | special).expand(batch, *self.base.shape)
        keep = keep.tril() if self.causal else keep
        if self.padding is not None:
            keep = keep & self.padding[:, None, None, :] & self.padding[:, None, :, None]
        return keep.to(DEVICE)

    def run(self, seed=(5, 7)):
        """Output and gradients of query, key and value."""
        leaves = [tensor.detach().requires_grad_() for tensor in self.tensors[:3]]
        output = self.attention(*leaves, seed)
        return [output.detach(), *torch.autograd.grad(output, leaves, self.grad)]

    def attention(self, query, key, value, seed=(5, 7)):
        sequences = [None if given is None else given.to(DEVICE) for given in (self.padding, self.first, self.last)]
        return tile_attention(
            query,
            key,
            value,
            move(tile_form(self.base)),
            *sequences,
            self.diagonal,
            self.causal,
            torch.tensor(seed, device=DEVICE),
            self.dropout,
            self.scaling,
        )

    def reference(self, dtype=None):
        """Dense masked softmax, in float64 or in the dtype of the inputs."""
        leaves = [tensor.detach().to(dtype or tensor.dtype).requires_grad_() for tensor in self.tensors[:3]]
        query, key, value = leaves
        keep = self.keep()
        scores = (query @ key.mT * self.scaling).masked_fill(~keep, torch.finfo(query.dtype).min / 2)
        weights = scores.softmax(-1) * keep.any(-1, keepdim=True)
        weights = weights if self.factors is None else weights * self.factors.to(weights.dtype)
        output = (weights @ value).transpose(1, 2)
        return [output.detach(), *torch.autograd.grad(output, leaves, self.grad.to(query.dtype))]


def blocks(heads, length):
    count = -(-length // 64)
    table = torch.rand(heads, count, count) < 0.5
    return table.repeat_interleave(64, 1).repeat_interleave(64, 2)[:, :length, :length].clone()


MASKS = {
    "random": lambda heads, length: torch.rand(heads, length, length) < 0.3,
    "blocks": blocks,
    "dense": lambda heads, length: torch.ones(heads, length, length, dtype=torch.bool),
}


def lengths(batch, length):
    """Number of real tokens: all, then fewer; none in the last sequence of three."""
    return torch.tensor([length, max(length * 5 // 8, 1), 0][:batch])[:, None]


PADDINGS = {
    "ragged": lambda batch, length: torch.arange(length) < lengths(batch, length),
    "left": lambda batch, length: torch.arange(length) >= length - lengths(batch, length),
    "mixed": lambda batch, length: (
        (torch.arange(length) >= torch.tensor([0, length // 3, length // 5][:batch])[:, None])
        & (torch.arange(length) < torch.tensor([length - length // 3, length, length - length // 5][:batch])[:, None])
    ),
    "holes": lambda batch, length: torch.rand(batch, length) < 0.6,
    "one token": lambda batch, length: (torch.arange(length) < 1).expand(batch, length),
}


def move(tiles):
    return tuple(tensor.to(DEVICE) for tensor in tiles)


def assert_right(case, results):
    """The 2x rule against plain PyTorch in the same dtype, and exact zeros where nothing is seen."""
    dtype = results[0].dtype
    truth, plain = case.reference(torch.float64), case.reference()
    for what, got, want, other in zip(("output", "query", "key", "value"), results, truth, plain, strict=True):
        assert got.dtype == dtype and got.isfinite().all(), what
        error, allowed = (got - want).abs().max().item(), (other - want).abs().max().item()
        assert error <= 2 * allowed + FLOOR[dtype] * max(1.0, want.abs().max().item()), (what, error, allowed)
    keep = case.keep()
    empty, unseen = ~keep.any(-1), ~keep.any(-2)
    assert (results[0].transpose(1, 2)[empty] == 0).all() and (results[1][empty] == 0).all()
    assert (results[2][unseen] == 0).all() and (results[3][unseen] == 0).all()


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


# QUICK runs the kernels that the length selects, LISTS those of long inputs.
QUICK = [
    {"length": 100, "head_size": 128, "padding": "holes", "heads": 1},
    {"length": 7, "padding": "holes", "last": False},
    {"length": 63, "padding": "left", "first": False},
    {"length": 64, "causal": True, "padding": "ragged", "transposed": False},
    {"length": 100, "padding": "ragged", "batch": 3, "head_size": 64},
    {"length": 1},
    {"length": 128, "mask": "blocks", "diagonal": False},
    {"length": 128, "mask": "dense", "first": False, "last": False, "causal": True},
    {"length": 100, "padding": "one token", "diagonal": True},
    {"length": 101, "padding": "left", "batch": 3, "mask": "blocks", "heads": 1},
    {"length": 77, "padding": "mixed", "batch": 3, "last": False, "head_size": 64, "causal": True, "heads": 1},
    {"length": 70, "padding": "mixed", "diagonal": False, "head_size": 128, "heads": 1},
]
LISTS = [
    {"length": 130, "mask": "blocks", "padding": "ragged", "batch": 3, "heads": 1},
    {"length": 100, "padding": "holes", "diagonal": False, "head_size": 64, "heads": 1},
    {"length": 100, "padding": "left", "first": False, "transposed": False, "heads": 1},
    {"length": 65, "causal": True, "padding": "ragged", "last": False},
    {"length": 101, "padding": "left", "batch": 3, "mask": "blocks", "heads": 1},
    {"length": 150, "padding": "mixed", "batch": 3, "diagonal": False, "heads": 1},
    {"length": 99, "causal": True, "padding": "left", "last": False, "head_size": 64, "heads": 1},
    {"length": 1, "padding": "ragged", "batch": 3},
    {"length": 128, "mask": "dense", "last": False, "head_size": 128, "heads": 1, "batch": 1},
    {"length": 65, "first": False, "last": False, "causal": True, "diagonal": True, "batch": 1},
]


def thinned(cases):
    """Every other case, in the interpreter: the others are slow."""
    return [pytest.param(case, marks=[pytest.mark.slow] * (index % 2)) for index, case in enumerate(cases)]


def name(fields):
    return ", ".join(f"{key} {value}" for key, value in fields.items())


@runs_kernels
@pytest.mark.parametrize("fields", thinned(QUICK), ids=name)
def test_short_kernels(fields):
    case = Case(**fields)
    assert_right(case, case.run())


@runs_kernels
@pytest.mark.parametrize("fields", thinned(LISTS), ids=name)
def test_kernels_on_lists(fields, monkeypatch):
    """The kernels of long inputs are right at any length."""
    monkeypatch.setattr(backend, "SHORT_LENGTH", 0)
    monkeypatch.setattr(backend, "SHORT_BACKWARD", dict.fromkeys(backend.SHORT_BACKWARD, 0))
    case = Case(**fields)
    assert_right(case, case.run())


@runs_kernels
@pytest.mark.skipif(CUDA, reason="a GPU has configurations of its own")
@pytest.mark.parametrize("dropout", [0.0, pytest.param(0.3, marks=pytest.mark.slow)])
def test_several_steps_in_a_tile(dropout, monkeypatch):
    """Configurations differ in how many keys or queries of a tile are taken at a time."""
    monkeypatch.setattr(backend, "SHORT_LENGTH", 0)
    monkeypatch.setattr(backend, "SHORT_BACKWARD", dict.fromkeys(backend.SHORT_BACKWARD, 0))
    case = Case(100, mask="blocks", padding="mixed", heads=1, head_size=64, dropout=dropout)
    expected = case.run() if dropout else []
    monkeypatch.setattr(backend, "_hardware", lambda query: (torch.bfloat16, 80))
    results = case.run()
    for one, two in zip(results, expected, strict=False):
        torch.testing.assert_close(one, two, atol=2e-6, rtol=1e-5)
    if not dropout:
        assert_right(case, results)


@runs_kernels
@pytest.mark.slow
def test_a_long_input():
    case = Case(330, mask="blocks", padding="ragged", heads=1)
    assert_right(case, case.run())


@runs_kernels
@pytest.mark.slow
@pytest.mark.parametrize(
    "first, last, diagonal, causal",
    [
        (False, False, None, False),
        (True, False, True, False),
        (True, True, None, False),
        (True, True, False, False),
        (False, True, False, False),
        (True, False, None, True),
        (False, False, False, True),
    ],
)
@pytest.mark.parametrize("padding", [None, *PADDINGS])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("length", [1, 7, 63, 64, 100, 128, 257, 320])
def test_all_combinations(length, mask, padding, first, last, diagonal, causal):
    case = Case(length, mask, padding, first, last, diagonal, causal, batch=3)
    assert_right(case, case.run())


@runs_kernels
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOOR)
@pytest.mark.parametrize("head_size", [32, 64, 128])
@pytest.mark.parametrize("padding", [None, "holes"])
@pytest.mark.parametrize("length", [1, 100, 200, 257, 1000])
def test_dtypes_on_a_gpu(length, padding, head_size, dtype):
    if head_size not in GPUS.get(capability(), ()):
        pytest.skip("refused on this GPU")
    case = Case(length, "blocks", padding, head_size=head_size, dtype=dtype, batch=3, heads=4)
    assert_right(case, case.run())


@runs_kernels
def test_dropout_is_a_function_of_the_seed():
    case = Case(40, dropout=0.1, heads=1, batch=1)
    once, again = case.run(), case.run()
    assert all(torch.equal(one, two) for one, two in zip(once, again, strict=True))
    for seed in ((6, 7), (5, 8)):
        assert not torch.equal(once[0], case.attention(*case.tensors[:3], seed))


@runs_kernels
def test_dropout_in_all_kernels(monkeypatch):
    """
    Short inputs run one kernel forward and one backward, lists another forward and two backward, and all decide alike.
    With one-hot values the output of the first shows how.
    """
    case = Case(66, padding="holes", dropout=0.25, heads=1, batch=1, head_size=64)
    query, key, _, _ = case.tensors
    parts = torch.eye(66, 128, device=DEVICE).split(64, dim=1)
    kept = torch.cat([case.attention(query, key, part.expand_as(query)) for part in parts], dim=-1)
    kept, keep = kept.transpose(1, 2)[..., :66] != 0, case.keep()
    assert not (kept & ~keep).any()
    assert kept.sum() / keep.sum() == pytest.approx(0.75, abs=6 * (0.1875 / keep.sum().item()) ** 0.5)
    case.factors = kept / 0.75
    assert_right(case, case.run())
    monkeypatch.setattr(backend, "SHORT_LENGTH", 0)
    monkeypatch.setattr(backend, "SHORT_BACKWARD", dict.fromkeys(backend.SHORT_BACKWARD, 0))
    assert_right(case, case.run())


@runs_kernels
@pytest.mark.slow
def test_dropout_keeps_the_mean_and_the_rate():
    """With one-hot values the output is the probabilities themselves."""
    length, dropout = 32, 0.1
    case = Case(length, "dense", dropout=dropout, batch=4, heads=2)
    query, key, _, _ = case.tensors
    value = torch.eye(length, device=DEVICE).expand_as(query)
    probabilities = torch.stack([case.attention(query, key, value, (seed, 0)) for seed in range(4)]).transpose(2, 3)
    plain = (query @ key.mT * case.scaling).softmax(-1)
    kept = probabilities != 0
    torch.testing.assert_close(probabilities, torch.where(kept, plain / (1 - dropout), 0.0), atol=1e-6, rtol=1e-3)
    # 32768 draws: five standard deviations.
    assert kept.float().mean().item() == pytest.approx(1 - dropout, abs=5 * (0.09 / kept.numel()) ** 0.5)
    for dim in range(5):
        others = [other for other in range(5) if other != dim]
        rates = kept.float().mean(others)
        deviation = (0.09 * kept.shape[dim] / kept.numel()) ** 0.5
        assert (rates - (1 - dropout)).abs().max() < 5 * deviation
    assert torch.corrcoef(kept.float().flatten(0, 3).T).fill_diagonal_(0).abs().max() < 5 / (kept.numel() / 32) ** 0.5


@runs_kernels
@pytest.mark.slow
def test_compiles_around():
    """A compiled graph around the operator has no break and gives the same result."""
    case = Case(70, padding="ragged", dropout=0.1, heads=1)
    plain = case.run()
    tiles, padding = move(tile_form(case.base)), case.padding.to(DEVICE)
    first, last = case.first.to(DEVICE), case.last.to(DEVICE)
    seed = torch.tensor((5, 7), device=DEVICE)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(query, key, value):
        return 2 * tile_attention(
            query, key, value, tiles, padding, first, last, None, False, seed, case.dropout, case.scaling
        )

    leaves = [tensor.detach().requires_grad_() for tensor in case.tensors[:3]]
    output = compiled(*leaves)
    results = [output.detach() / 2, *(grad / 2 for grad in torch.autograd.grad(output, leaves, case.grad))]
    for got, want in zip(results, plain, strict=True):
        torch.testing.assert_close(got, want)


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
    case = Case(20, padding="ragged", dropout=0.1, heads=1)
    plain = case.run()
    with Recorded() as recorded:
        results = case.run()
    assert all(torch.equal(got, want) for got, want in zip(results, plain, strict=True))
    assert [name for name in recorded.names if "tile_attention" in name] == [forward, backward]
    leaves = [tensor.detach().requires_grad_() for tensor in case.tensors[:3]]
    output = case.attention(*leaves)
    assert "_TileAttention" in output.grad_fn.name()
    with Recorded() as recorded:
        results = torch.autograd.grad(output, leaves, case.grad, retain_graph=True)
    assert backward in recorded.names
    assert all(torch.equal(got, want) for got, want in zip(results, plain[1:], strict=True))
    graph = make_fx(lambda grad: torch.autograd.grad(output, leaves, grad, retain_graph=True))(case.grad)
    assert "tile_attention_backward" in graph.code
    tiles = move(tile_form(case.base))

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
    case = Case(20, heads=1)
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
    case = Case(20, heads=1)
    leaves = [tensor.detach().requires_grad_() for tensor in case.tensors[:3]]
    NoGradient.apply(case.attention(*leaves)).sum().backward()
    assert all(leaf.grad is None for leaf in leaves)


@runs_kernels
def test_activation_checkpointing():
    case = Case(20, padding="ragged", heads=1)
    leaves = [tensor.detach().requires_grad_() for tensor in case.tensors[:3]]
    output = checkpoint(case.attention, *leaves, (5, 7), use_reentrant=False)
    results = [output.detach(), *torch.autograd.grad(output, leaves, case.grad)]
    assert all(torch.equal(got, want) for got, want in zip(results, case.run(), strict=True))


@runs_kernels
def test_the_operator_is_well_formed():
    """Schema, fake kernel and autograd registration, as PyTorch checks them."""
    case = Case(20, padding="ragged", dropout=0.1, heads=1)
    leaves = [tensor.detach().requires_grad_() for tensor in case.tensors[:3]]
    padding, seed = case.padding.to(DEVICE).view(torch.int8), torch.tensor((5, 7), device=DEVICE)
    first, last = case.first.to(DEVICE), case.last.to(DEVICE)
    spans = real_spans(case.padding).to(DEVICE)
    rest = (list(move(tile_form(case.base))), padding, spans, first, last, seed, False, False, 60000, 1.0)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.sparsebert.tile_attention.default, (*leaves, *rest), test_utils=checks)


def test_spans():
    """The first real token, one past the last, and whether there are holes; the last sequence has no token."""
    padding = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 1, 1, 1], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]]).bool()
    spans = real_spans(padding)
    assert spans.dtype == torch.int64
    assert spans.tolist() == [[1, 5, 1, 0b10110], [0, 5, 0, 0b11111], [2, 4, 0, 0b1100], [5, 0, 0, 0]]
    assert real_spans(torch.ones(1, 130).bool()).tolist() == [[0, 130, 0, -1, -1, 3]]


@runs_kernels
@pytest.mark.parametrize("batch", [2, 1])
def test_special_tokens_at_the_same_position_in_all_sequences(batch, monkeypatch):
    """`first` and `last` of shape (1,) mean the same as one per sequence."""
    monkeypatch.setattr(backend, "SHORT_LENGTH", 0)
    monkeypatch.setattr(backend, "SHORT_BACKWARD", dict.fromkeys(backend.SHORT_BACKWARD, 0))
    case = Case(70, heads=1, batch=batch)
    several = case.run()
    case.first, case.last = case.first[:1], case.last[:1]
    for one, two in zip(several, case.run(), strict=True):
        assert torch.equal(one, two)


def test_shapes_without_running():
    """The operators' fake kernels: shapes, dtypes and strides, without Triton."""
    mask = tile_form(torch.ones(3, 70, 70, dtype=torch.bool))
    with FakeTensorMode() as mode:
        leaves = [mode.from_tensor(torch.randn(2, 70, 3, 32).transpose(1, 2).bfloat16()) for _ in range(3)]
        tiles = [mode.from_tensor(tensor) for tensor in mask]
        rest = (tiles, None, None, None, None, None, False, False, 65536, 1.0)
        output, lse = torch.ops.sparsebert.tile_attention(*leaves, *rest)
        gradients = torch.ops.sparsebert.tile_attention_backward(output, *leaves, output, lse, *rest)
    assert output.shape == (2, 70, 3, 32) and output.is_contiguous() and output.dtype == torch.bfloat16
    assert lse.shape == (2, 3, 70) and lse.dtype == torch.float32
    for gradient, leaf in zip(gradients, leaves, strict=True):
        assert gradient.shape == leaf.shape and gradient.stride() == leaf.stride() and gradient.dtype == leaf.dtype


REFUSALS = {
    "head size must be one of 32, 64, 128.*got 48": {"size": 48},
    "query must be bfloat16, float16 or float32.*got torch.float64": {"dtype": torch.float64},
    "as many keys as queries, got 9 keys and 8 queries": {"keys": 9},
    "dropout must be at least 0 and below 1, got 1.0": {"dropout": 1.0},
    "dropout 0.1 needs a seed, got None": {"dropout": 0.1},
    "scaling must be positive in sparse_triton, got 0": {"scaling": 0},
    r"tiles must be 64 queries by 64 keys.*got 64 queries, torch.int64 and \(2, 2, 2\)": {"mask_length": 100},
    "got 128 queries": {"block_q": 128},
}


@runs_kernels
@pytest.mark.parametrize("message", REFUSALS)
def test_refusals(message):
    fields = {"size": 32, "dtype": torch.float32, "keys": 8, "mask_length": 8, "block_q": 64}
    fields |= {"dropout": 0, "scaling": 1} | REFUSALS[message]
    query = torch.randn(1, 2, 8, fields["size"], dtype=fields["dtype"], device=DEVICE)
    key = torch.randn(1, 2, fields["keys"], fields["size"], dtype=fields["dtype"], device=DEVICE)
    tiles = tile_form(torch.ones(2, fields["mask_length"], fields["mask_length"], dtype=torch.bool))
    tiles = tiles._replace(pool=torch.zeros(2, fields["block_q"], dtype=torch.int64))
    with pytest.raises(ValueError, match=message):
        check(query, key, key, tiles, None, fields["dropout"], fields["scaling"])


@pytest.mark.skipif(CUDA or INTERPRETED, reason="needs a machine that cannot run the kernels")
def test_cpu_is_refused():
    query = torch.randn(1, 2, 8, 32)
    tiles = tile_form(torch.ones(2, 8, 8, dtype=torch.bool))
    with pytest.raises(ValueError, match="needs a CUDA device, got query on cpu: use sparse_sdpa"):
        check(query, query, query, tiles, None, 0.0, 1.0)
