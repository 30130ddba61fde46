"""
Models on `sparse_triton`. Where there is no GPU, `test_triton.py` runs this file in the process that has Triton's
interpreter.
"""

import importlib.util
import os

import pytest
import torch
from bert_batch import check_sequence_of_padding
from test_triton import lists  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AlbertConfig, AlbertModel, BertModel, MPNetModel

from sparsebert import SparseBertConfig, SparseBertModel, attach, build_pattern


CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LAYERS = 2
# One head of 32, since the interpreter takes its time.
SIZES = {"hidden_size": 32, "num_attention_heads": 1, "num_hidden_layers": LAYERS, "max_position_embeddings": 70}

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.skipif(not (CUDA or INTERPRETED), reason="runs in the process with the interpreter"),
]


@pytest.mark.usefixtures("lists")
@pytest.mark.parametrize(
    ("made", "padded"),
    [*(pytest.param(BertModel, padded, marks=pytest.mark.slow) for padded in (False, True)), (MPNetModel, True)],
)
def test_through_a_model(made, padded, tiny_config):
    """What is prepared once per forward is what the kernels read, with an MPNet's bias per distance."""
    config = tiny_config(
        made.config_class, **SIZES | {"num_hidden_layers": 1, "max_position_embeddings": 72, "initializer_range": 0.3}
    )
    model = attach(made(config), build_pattern("bigbird", 70, 1)).to(DEVICE)
    ids = torch.randint(5, 100, (3, 70), device=DEVICE)
    padding = torch.ones(3, 70, dtype=torch.long, device=DEVICE)
    if padded:
        padding[1, 50:] = padding[2, :20] = padding[2, 40:45] = 0
    results = []
    for name in ("sparse_eager", "sparse_triton"):
        model.set_attn_implementation(name)
        model.zero_grad()
        states = model(ids, attention_mask=padding if padded else None).last_hidden_state[padding.bool()]
        (states.pow(3).sum() / 100).backward()
        gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        results.append({"states": states.detach()} | gradients)
    assert made is BertModel or results[0]["encoder.relative_attention_bias.weight"].abs().max() > 1e-3
    torch.testing.assert_close(*results, atol=2e-5, rtol=1e-4)


class Calls(TorchDispatchMode):
    """Notes the seeds of attention, and how often random integers are drawn."""

    def __init__(self):
        super().__init__()
        self.seeds, self.draws = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.sparsebert.tile_attention.default:
            self.seeds.append(args[8] if args[8] is None else tuple(args[8].tolist()))
        self.draws += function.overloadpacket is torch.ops.aten.randint
        return function(*args, **(kwargs or {}))


@pytest.fixture
def dropping(tiny_config):
    """A model in training, with attention dropout."""
    config = tiny_config(SparseBertConfig, pattern="bigbird", attention_probs_dropout_prob=0.3, **SIZES)
    model = SparseBertModel(config).train().to(DEVICE)
    model.set_attn_implementation("sparse_triton")
    return model


@pytest.fixture
def ids():
    return torch.randint(5, 100, (1, 9), device=DEVICE)


def test_seeds_of_all_layers_are_drawn_at_once(dropping, ids):
    with torch.no_grad(), Calls() as calls:
        for _ in range(2):
            dropping(ids)
    assert calls.draws == 2 and len(set(calls.seeds)) == len(calls.seeds) == 2 * LAYERS
    with torch.no_grad(), Calls() as calls:
        dropping.eval()(ids)
    assert not calls.draws and calls.seeds == LAYERS * [None]


def test_a_layer_that_runs_several_times_draws_a_seed_each_time(ids):
    sizes = {name: size for name, size in SIZES.items() if name != "max_position_embeddings"}
    config = AlbertConfig(
        vocab_size=100, embedding_size=16, intermediate_size=32, attention_probs_dropout_prob=0.3, **sizes
    )
    model = attach(AlbertModel(config), build_pattern("bigbird", 70, 1), attn_implementation="sparse_triton")
    model.train().to(DEVICE)
    with torch.no_grad(), Calls() as calls:
        model(ids)
    assert calls.draws == len(set(calls.seeds)) == len(calls.seeds) == LAYERS


def test_a_layer_alone_in_training_has_dropout(dropping, ids):
    dropping.eval().encoder.layer[1].train()
    with torch.no_grad():
        once, again = (dropping(ids).last_hidden_state for _ in range(2))
    assert not torch.equal(once, again)


def test_checkpointing_repeats_the_dropout(dropping, ids):
    """Also if it does not restore the state of the random numbers, as nothing is drawn in the layers."""
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            dropping.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        dropping.zero_grad()
        torch.manual_seed(1)
        dropping(ids).last_hidden_state.square().sum().backward()
        gradients.append([layer.attention.self.value.weight.grad.clone() for layer in dropping.encoder.layer])
    assert len(gradients[0]) == LAYERS
    for one, two in zip(*gradients, strict=True):
        assert torch.equal(one, two) and one.abs().sum() > 0


@pytest.mark.slow
def test_a_compiled_model_draws_the_same_dropout(dropping, ids):
    compiled = torch.compile(dropping, fullgraph=True, backend="aot_eager")
    results = []
    for model in (dropping, compiled):
        torch.manual_seed(1)
        results.append(model(ids).last_hidden_state.detach())
    assert torch.equal(*results)
    assert not torch.equal(results[1], compiled(ids).last_hidden_state)


@pytest.mark.gpu
def test_every_replay_of_a_graph_draws_other_dropout(dropping, ids):
    with torch.no_grad():
        dropping(ids)  # what is compiled and chosen once
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = dropping(ids).last_hidden_state
        results = []
        for _ in range(2):
            graph.replay()
            results.append(output.clone())
    assert not torch.equal(*results)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs CUDA")
def test_sequence_of_padding_on_cuda(tiny_config, caplog):
    backends = ("sparse_eager", "sparse_sdpa", "sparse_triton", "sparse_flex")
    check_sequence_of_padding(tiny_config, caplog, backends, "cuda")
