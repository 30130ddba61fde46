"""A mask reaches all attention of a model, or an error names the part that it does not reach."""

import copy
import sys

import pytest
import torch
import torch.nn.parallel.replicate
from datasets.fingerprint import Hasher
from torch import nn
from transformers import (
    AlbertConfig,
    AlbertModel,
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    BertModel,
    EncoderDecoderModel,
    PreTrainedModel,
)

import sparsebert
from sparsebert import attach, detach


LENGTH = 12
IDS = torch.arange(5, 5 + 2 * LENGTH).view(2, LENGTH)
SIZES = dict(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32)
WINDOW = {"mask_length": LENGTH, "pattern_kwargs": {"window_size": 3}}


def bert(model_class=BertModel, **fields):
    torch.manual_seed(0)
    return model_class(BertConfig(**SIZES, initializer_range=0.2, **fields)).eval()


def decoder():
    return bert(BertLMHeadModel, is_decoder=True, add_cross_attention=True)


class Injected(nn.Module):
    """What an inference engine puts in the place of self-attention."""

    def __init__(self, old):
        super().__init__()
        self.old = old.value

    def forward(self, hidden_states, *args, **kwargs):
        return self.old(hidden_states), None


def inject(model, index):
    layer = model.encoder.layer[index].attention
    layer.self = Injected(layer.self)


@pytest.mark.parametrize("layers", [(0, 1), (1,)])
def test_layers_without_attention_are_named_when_a_mask_is_attached(layers):
    model = bert()
    for index in layers:
        inject(model, index)
    with pytest.raises(ValueError, match=f"encoder.layer.{layers[0]}"):
        attach(model, "window", **WINDOW)
    assert type(model) is BertModel


def _replace(model):
    inject(model, 1)


def _copy_from_another(model):
    model.encoder.layer[1] = bert().encoder.layer[1]


def _copy_attention_of_another(model):
    model.encoder.layer[1].attention.self = bert().encoder.layer[1].attention.self


def _add(model):
    model.encoder.layer.append(bert().encoder.layer[0])


def _remove(model):
    model.encoder.layer = model.encoder.layer[:1]


def _change_forward(model):
    attention = model.encoder.layer[1].attention.self
    attention.forward = lambda hidden_states, *args, **kwargs: (attention.value(hidden_states), None)


def _copy_within(model):
    model.encoder.layer[1] = copy.deepcopy(model.encoder.layer[0])


def _change_class(model):
    attention = model.encoder.layer[1].attention.self
    forward = lambda self, hidden_states, *args, **kwargs: (self.value(hidden_states), None)  # noqa: E731
    attention.__class__ = type("BertSelfAttention", (type(attention),), {"forward": forward})


CHANGES = [
    _replace,
    _copy_from_another,
    _copy_attention_of_another,
    _copy_within,
    _add,
    _remove,
    _change_forward,
    _change_class,
]


@pytest.mark.parametrize("mask", ["window", "dam_s"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_part_that_changed_since_is_named(change, mask):
    model = attach(bert(BertForMaskedLM), mask, mask_length=LENGTH)
    model(IDS)
    change(model.bert)
    with pytest.raises(RuntimeError, match=r"encoder\.layer"):
        model(IDS)
    detach(model)
    model(IDS)


def test_a_layer_that_is_skipped_or_compiled_on_its_own_is_no_fault():
    model = attach(bert(), "window", **WINDOW)
    expected = model(IDS)[0]
    model.encoder.layer[0].forward = torch.compile(model.encoder.layer[0].forward, backend="eager")
    model.encoder.layer[1].compile(backend="eager")
    torch.testing.assert_close(model(IDS)[0], expected)
    skipped = attach(bert(), "window", **WINDOW)
    skipped.encoder.layer[1].forward = lambda hidden_states, *args, **kwargs: hidden_states
    assert not torch.equal(skipped(IDS)[0], expected)


def test_copied_layers_run_under_the_mask():
    def deep():
        model = bert()
        model.encoder.layer.extend(copy.deepcopy(layer) for layer in list(model.encoder.layer))
        model.config.num_hidden_layers = 4
        return model

    model = attach(deep(), "window", **WINDOW)
    model.set_attn_implementation("sparse_eager")
    removed = ~model.sparse_attention.mask.to_table(LENGTH)[0]
    for weights in model(IDS, output_attentions=True).attentions:
        assert not weights[:, removed].any()
    unset = deep()
    unset.config.num_hidden_layers = 2
    with pytest.raises(ValueError, match="num_hidden_layers"):
        attach(unset, "window", **WINDOW)


@pytest.mark.parametrize("mask", ["window", "dam_s"])
def test_an_encoder_that_is_part_of_another_model_already(mask):
    fields = WINDOW if mask == "window" else {"mask_length": LENGTH, "target_sparsity": 0.5}
    expected = attach(bert(), mask, **fields)(IDS)[0]
    both = EncoderDecoderModel(encoder=bert(), decoder=decoder()).eval()
    attach(both.encoder, mask, **fields)
    torch.testing.assert_close(both.encoder(IDS)[0], expected)
    if mask == "dam_s":
        both.train()(input_ids=IDS, decoder_input_ids=IDS).logits.square().mean().backward()
        assert both.encoder.sparse_attention.mask_logits.grad.abs().sum() > 0


def test_a_model_of_parts_names_them(caplog):
    both = EncoderDecoderModel(encoder=bert(), decoder=decoder()).eval()
    with pytest.raises(ValueError, match="encoder, decoder"):
        attach(both, "window", **WINDOW)

    class Pair(BertForMaskedLM):
        def __init__(self, config):
            super().__init__(config)
            self.second = BertModel(config)
            self.post_init()

    attach(bert(Pair), "window", **WINDOW)
    assert "second stay" in caplog.text

    class Tower(PreTrainedModel):
        config_class = BertConfig

        def __init__(self, config):
            super().__init__(config)
            self.encoder = BertModel(config)
            self.post_init()

    with pytest.raises(ValueError, match="base_model_prefix.*encoder"):
        attach(bert(Tower), "window", **WINDOW)


@pytest.mark.parametrize("sizes", [(2, 2, 1), (4, 2, 1), (2, 1, 3), (2, 2, 2), (2, 4, 1)])
def test_albert_with_groups(sizes, assert_same_model, tmp_path):
    def albert(dropout=0.0):
        torch.manual_seed(0)
        fields = dict(zip(("num_hidden_layers", "num_hidden_groups", "inner_group_num"), sizes, strict=True))
        config = AlbertConfig(
            **SIZES | fields, embedding_size=16, attention_probs_dropout_prob=dropout, hidden_dropout_prob=0.0
        )
        return AlbertModel(config).eval()

    torch.testing.assert_close(attach(albert(), "dense", mask_length=LENGTH)(IDS)[0], albert()(IDS)[0])
    attach(albert(0.1), "window", **WINDOW).train()(IDS)[0].sum().backward()
    if sizes != (2, 2, 1):
        with pytest.raises(ValueError, match="share_layers"):
            attach(albert(), "dam_s", mask_length=LENGTH, share_layers=False)
    model = attach(albert(), "dam_s", mask_length=LENGTH, share_layers=True)
    model.train()(IDS)[0].square().mean().backward()
    model.freeze(sparsity=0.4)
    model.eval().save_pretrained(tmp_path)
    assert_same_model(sparsebert.load(tmp_path), model, input_ids=IDS)


@pytest.mark.parametrize("mask", ["window", "dam_s"])
def test_replicas_of_data_parallel(mask, monkeypatch):
    module = sys.modules["torch.nn.parallel.replicate"]

    def copies(tensors, devices, detach=False):
        return [[tensor.clone() for tensor in tensors] for _ in devices]

    monkeypatch.setattr(module, "_broadcast_coalesced_reshape", copies)
    model = attach(bert(), mask, mask_length=LENGTH)
    replica = module.replicate(model, [0])[0]
    torch.testing.assert_close(replica(IDS)[0], model(IDS)[0])
    if mask == "dam_s":
        module.replicate(model.train(), [0])[0](IDS)[0].square().mean().backward()
        assert model.sparse_attention.mask_logits.grad.abs().sum() > 0


@pytest.mark.parametrize("mask", ["window", "dam_s"])
def test_equal_models_have_equal_pickles_before_and_after_a_forward(mask):
    models = [attach(bert(), mask, mask_length=LENGTH) for _ in range(2)]
    first = Hasher.hash(models[0])
    with torch.no_grad():
        models[0](IDS)
    sparsebert.sparsity(models[0])
    assert Hasher.hash(models[0]) == first == Hasher.hash(models[1])
