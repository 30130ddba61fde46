"""The inputs of layers on another device than that of the model's input, as in a model with a `device_map`."""

from dataclasses import replace

import pytest
import torch
from conftest import TINY
from transformers import BertConfig, BertModel, ModernBertConfig, ModernBertModel

from sparsebert import SparseBertConfig, SparseBertModel, SparseMask, attach
from sparsebert.attention.backends import prepared
from sparsebert.attention.biases.bias_entries import REMOVED
from sparsebert.attention.interface import sparse_attention_forward
from sparsebert.attention.mask_inputs import MaskInputs
from sparsebert.attention.packed_batches import packed_documents
from sparsebert.models.architectures import attention_modules


LENGTH = 12
IDS = torch.arange(5, 5 + 2 * LENGTH).view(2, LENGTH)
PADDING = torch.arange(LENGTH) < torch.tensor([LENGTH, 7])[:, None]
META = torch.device("meta")
SEARCH = {"sparsity_weight": 1e-3, "mask_length": LENGTH}


def bert(mask, backend, **fields):
    torch.manual_seed(0)
    model = BertModel(BertConfig(**TINY | {"num_hidden_layers": 4})).eval()
    return attach(model, mask, attn_implementation=backend, mask_length=LENGTH, **fields)


def own(probability_map, **kwargs):
    torch.manual_seed(0)
    maps = {"probability_map": probability_map, "probability_map_kwargs": kwargs}
    config = SparseBertConfig(**TINY, mask_length=LENGTH, pattern="window", **maps)
    return SparseBertModel._from_config(config, attn_implementation="sparse_eager").eval()


def modern():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 32}
    config = ModernBertConfig(**sizes, vocab_size=100, pad_token_id=0, local_attention=4, global_attn_every_n_layers=2)
    return attach(ModernBertModel(config).eval(), "strided", mask_length=LENGTH, attn_implementation="sparse_sdpa")


def outputs_of_layers(model, inputs, batch=2):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(batch, 4, LENGTH, 8, generator=generator) for _ in range(3))
    modules = attention_modules(model).values()
    return [sparse_attention_forward(each, query, key, value, None, mask_inputs=inputs)[0] for each in modules]


@pytest.mark.parametrize(
    "make",
    [
        lambda: bert("window", "sparse_eager"),
        lambda: own("entmax", alpha="learned"),
        lambda: bert("bigbird", "sparse_sdpa"),
        lambda: bert("bigbird", "sparse_cpu"),
        lambda: bert("window", "sparse_cpu"),
        modern,
    ],
    ids=["eager", "probability_map", "sdpa", "cpu", "offsets", "windows"],
)
def test_a_frozen_mask_is_prepared_again_on_another_device(make):
    """Without a second device, only the name of the first one is another."""
    model = make()
    sparse_attention, name = model.sparse_attention, model.config._attn_implementation
    device = torch.device("cpu")
    inputs = sparse_attention(name, 2, LENGTH, LENGTH, PADDING, device=device)
    elsewhere = replace(inputs, device=META, bias=(torch.empty(0, device="meta"),), compiled=inputs.compiled)
    if inputs.local is not None:
        elsewhere = replace(elsewhere, local=replace(inputs.local, device=META, bias=(None,)))
    torch.testing.assert_close(outputs_of_layers(model, elsewhere), outputs_of_layers(model, inputs))
    assert list(elsewhere.moved) == [device] and not inputs.moved
    assert elsewhere.reached == inputs.reached == {id(each) for each in attention_modules(model).values()}


def split(model, *layers):
    """Let layers of a model run on the meta device, as accelerate does: their hooks move the hidden states."""

    def move(module, args, kwargs):
        return tuple(each.to("meta") if torch.is_tensor(each) else each for each in args), {
            name: each.to("meta") if torch.is_tensor(each) else each for name, each in kwargs.items()
        }

    for index in layers:
        model.encoder.layer[index].to("meta").register_forward_pre_hook(move, with_kwargs=True)
    model.pooler.to("meta")
    return model


@pytest.mark.parametrize(
    "mask, backend, fields",
    [
        ("window", "sparse_auto", {}),
        ("bigbird", "sparse_sdpa", {}),
        ("dam_s", "sparse_sdpa", {}),
        ("dam_u", "sparse_eager", {"share_layers": False}),
    ],
)
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_a_model_on_two_devices_runs(mask, backend, fields, training, monkeypatch):
    """What the layers on the second device compute is not seen here, for they are on the meta device."""
    model = split(bert(mask, backend, **fields).train(training), 2, 3)
    forward, given = model.sparse_attention.forward, []

    def recorded(*args, **kwargs):
        given.append(forward(*args, **kwargs))
        return given[0]

    monkeypatch.setattr(model.sparse_attention, "forward", recorded)
    output = model(IDS, attention_mask=PADDING.long())
    assert output.last_hidden_state.device == META and output.last_hidden_state.shape == (2, LENGTH, 32)
    assert list(given[0].moved) == [META] and given[0].moved[META].device == META


def test_inputs_that_are_learned_or_packed_keep_their_gradients_and_places():
    model = bert("dam_s", "sparse_eager").train()
    inputs = model.sparse_attention("sparse_eager", 2, LENGTH, LENGTH, PADDING, device=torch.device("cpu"))
    moved = inputs.on_device(torch.device("cpu", 0))
    outputs_of_layers(model, moved)[0].square().sum().backward()
    assert model.sparse_attention.mask_logits.grad.abs().sum() > 0
    positions = torch.arange(LENGTH) % 5
    documents = packed_documents(positions.expand(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.bool))
    moved = replace(inputs, documents=documents).on_device(META).documents
    assert moved.starts.is_meta and moved.padding.is_meta and moved.num_tokens == 2 * LENGTH


@pytest.mark.parametrize("diagonal", [None, True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_under_padding_the_bias_is_made_for_one_layer_at_a_time(dtype, diagonal):
    """In the dtype of attention, never for all layers and sequences; without padding it is not converted either."""
    keep = torch.rand(3, 2, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.4
    mask = SparseMask(keep, LENGTH, form="offsets", special_tokens="first_last", diagonal=diagonal)
    sizes = (LENGTH, LENGTH, torch.device("cpu"), mask)
    inputs = prepared(MaskInputs("sparse_sdpa", *sizes, PADDING, dtype=dtype))
    largest = max(each.numel() for each in (*inputs.bias, *inputs.by_sequence))
    assert largest <= 2 * LENGTH**2  # sequences or heads, not both
    whole = prepared(MaskInputs("sparse_sdpa", *sizes, dtype=dtype))
    removed = max(REMOVED, torch.finfo(dtype).min)
    for layer in range(3):
        bias, live = inputs.for_layer(layer).bias[0], inputs.for_layer(layer).live[0]
        assert bias.dtype == whole.for_layer(layer).bias[0].dtype == dtype
        for sequence, length in enumerate(PADDING.sum(-1).tolist()):
            expected = torch.full((2, LENGTH, LENGTH), removed, dtype=dtype)
            expected[:, :length, :length].masked_fill_(mask.to_table(length)[layer], 0)
            assert torch.equal(bias[sequence], expected)
            assert torch.equal(live[sequence], (expected == 0).any(-1, keepdim=True))
