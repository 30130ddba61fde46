"""What transformers promises of its models, for every head, with a mask that is frozen or being learned."""

import copy
import inspect
import json
import pickle
import re

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from bert_batch import CLASSES, HEADS, IDS, LENGTH, PADDING, SIZES, gradients, inputs_of
from conftest import covering
from huggingface_hub.errors import StrictDataclassClassValidationError
from torch import nn
from transformers import AutoModelForMaskedLM, BertConfig, EncoderDecoderModel
from transformers.utils import logging

import sparsebert
from sparsebert import SparseBertForSequenceClassification, SparseBertModel, attach, detach, sparsity_loss
from sparsebert.attention.choosing.choice import TWINS
from sparsebert.models.model_configs import STOCK_NAMED


LAYERS = 2
# Fields of the configuration in each state of the mask.
STATES = {
    "frozen": {"pattern": "window", "pattern_kwargs": {"window_size": 2}},
    "searching": {"search": "dam_s", "sparsity_weight": 0.01},
}
# Heads whose output has one row for each token.
BY_TOKEN = ("Model", "ForPreTraining", "ForMaskedLM", "LMHeadModel", "ForTokenClassification", "ForQuestionAnswering")

every_head = pytest.mark.parametrize("name", HEADS)
every_state = pytest.mark.parametrize("state", STATES)
# In turns a class of ours and a stock one with a mask attached.
every_head_and_state = pytest.mark.parametrize(
    "name, state, attached",
    [(name, state, bool((h + s) % 2)) for h, name in enumerate(HEADS) for s, state in enumerate(STATES)],
)


@pytest.fixture
def make(tiny_config):
    """`make(name, state, **fields)`: a model in evaluation, of a class of ours; `attached=True` for a stock one."""

    def build(name, state, attached=False, **fields):
        torch.manual_seed(3)
        fields = {"is_decoder": name == "LMHeadModel", "initializer_range": 0.1} | fields
        if attached:
            model = getattr(transformers, f"Bert{name}")(tiny_config(BertConfig, **fields))
            kwargs = dict(STATES[state])
            attach(model, kwargs.pop("search", None) or kwargs.pop("pattern"), mask_length=LENGTH, **kwargs)
        else:
            config = tiny_config(**STATES[state] | {"mask_length": LENGTH} | fields)
            model = getattr(sparsebert, f"SparseBert{name}")(config)
        if state == "searching":
            with torch.no_grad():  # decided, both ways
                model.sparse_attention.mask_logits.uniform_(-1, 1).mul_(5)
        return model.eval()

    return build


def result(outputs, name):
    """The logits or hidden states."""
    if name == "ForQuestionAnswering":
        return torch.stack([outputs.start_logits, outputs.end_logits], dim=-1)
    for key in ("last_hidden_state", "prediction_logits", "logits"):
        if key in outputs:
            return outputs[key]


def loss_of(outputs):
    return outputs.last_hidden_state.square().mean() if outputs.get("loss") is None else outputs.loss


# Entering through the class


@every_head_and_state
def test_forward_is_the_call(make, name, state, attached):
    model, results = make(name, state, attached), []
    for phase in ("train", "eval"):
        model.train(phase == "train")
        for run in (model, model.forward):
            torch.manual_seed(5)
            outputs = run(**inputs_of(name, labels=True))
            results.append((outputs.to_tuple(), sparsity_loss(model), torch.get_rng_state()))
        torch.testing.assert_close(*results, rtol=0.0, atol=0.0)
        results.clear()
    if name != "Model":
        model.train()
        torch.manual_seed(5)
        loss = model.forward(**inputs_of(name, labels=True)).loss
        torch.manual_seed(5)
        as_tuple = model.forward(**inputs_of(name, labels=True), return_dict=False)
        assert as_tuple[0] == loss
        assert (sparsity_loss(model) > 0) == (state == "searching")
    base = model.base_model.eval()
    torch.testing.assert_close(base.forward(IDS, PADDING)[0], base(IDS, PADDING)[0], rtol=0.0, atol=0.0)


@pytest.mark.parametrize("attached", [False, True], ids=["own", "attached"])
@every_head
def test_signatures_and_names_are_stock(make, name, attached):
    model, stock = make(name, "frozen", attached), getattr(transformers, f"Bert{name}")
    assert isinstance(model, stock)
    parameters = dict(inspect.signature(model.forward).parameters)
    own = parameters.pop("skip_logits", None)  # of the classes whose head sees masked tokens only
    assert (own is not None) == (name in ("ForMaskedLM", "ForPreTraining") and not attached)
    assert [*parameters.values()] == [*inspect.signature(stock.forward).parameters.values()][1:]
    assert inspect.signature(model.forward).return_annotation == inspect.signature(stock.forward).return_annotation
    assert inspect.signature(model.base_model.forward).parameters.keys() > {"input_ids", "attention_mask"}
    assert model.forward.__doc__ == stock.forward.__doc__
    if name != "Model":
        assert type(model.bert).__name__ == "BertModel" and isinstance(model.bert, transformers.BertModel)
    if attached:
        assert type(model).__name__ == stock.__name__ and type(model).__module__ == stock.__module__


@every_state
@pytest.mark.parametrize("name", ["Model", "ForMaskedLM"])
def test_the_mask_is_prepared_once(make, name, state):
    for attached in (False, True):
        model, prepared, seen = make(name, state, attached), [], []
        model.sparse_attention.register_forward_hook(lambda *_, prepared=prepared: prepared.append(1))
        model.base_model.register_forward_pre_hook(
            lambda _, args, kwargs, seen=seen: seen.append(kwargs.keys() | {"hook"}), with_kwargs=True
        )
        model.register_forward_hook(lambda _, args, output, seen=seen: seen.append({"after"}))
        for run, calls in ((model, 2), (model.forward, 0 if name == "Model" else 1)):
            run(**inputs_of(name))
            assert prepared == [1] and len(seen) == calls
            assert not any("mask_inputs" in keys for keys in seen)
            prepared.clear()
            seen.clear()


class SentenceEncoder(nn.Module):
    """A wrapper in the manner of sentence-transformers: `forward` of the inner model, then the mean of the tokens."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, features):
        states = self.inner.forward(**features, return_dict=True).last_hidden_state
        weights = features["attention_mask"][..., None].float()
        return (states * weights).sum(1) / weights.sum(1)


@pytest.mark.parametrize("attached", [False, True], ids=["own", "attached"])
@every_state
def test_wrappers_that_call_forward(make, state, attached):
    model = make("Model", state, attached)
    encoder = SentenceEncoder(model)
    features = {"input_ids": IDS, "attention_mask": PADDING}
    sentences = encoder(features)
    for row, size in enumerate(SIZES):
        alone = model(IDS[row : row + 1, :size]).last_hidden_state.mean(1)
        torch.testing.assert_close(sentences[row : row + 1], alone, atol=1e-5, rtol=1e-5)
    encoder.train()
    encoder(features).square().sum().backward()
    assert model.embeddings.word_embeddings.weight.grad.abs().sum() > 0
    torch.testing.assert_close(copy.deepcopy(encoder).eval()(features), sentences)


def test_forward_of_derived_classes(tiny_config):
    """The penalty is added once, to whatever loss the class of the user returns."""

    class Weighted(SparseBertForSequenceClassification):
        def forward(self, input_ids, attention_mask=None, labels=None, weight=1.0):
            outputs = super().forward(input_ids, attention_mask=attention_mask, labels=labels)
            outputs.loss = weight * outputs.loss
            return outputs

    class Own(sparsebert.SparseBertPreTrainedModel):
        def __init__(self, config):
            super().__init__(config)
            self.bert = transformers.BertModel(config)
            self.post_init()

        def forward(self, input_ids, labels):
            return (self.bert(input_ids).pooler_output.square().sum(),)

    config = tiny_config(sparsity_weight=1.0)
    model = Weighted(config).train()
    assert list(inspect.signature(model.forward).parameters) == ["input_ids", "attention_mask", "labels", "weight"]
    loss = model(IDS, labels=CLASSES, weight=0.0).loss
    assert loss == sparsity_loss(model) > 0
    model = Own(config).train()
    assert model(IDS, CLASSES)[0] > sparsity_loss(model) > 0
    assert model.eval()(IDS, CLASSES)[0] < 100


@pytest.mark.parametrize("attached", [False, True], ids=["own", "attached"])
@every_state
def test_whole_models_in_files(make, assert_same_model, state, attached, tmp_path):
    for name in ("Model", "ForMaskedLM"):
        model = make(name, state, attached)
        torch.save(model, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        assert type(loaded) is type(model) and type(loaded.base_model) is type(model.base_model)
        assert_same_model(loaded, model, **inputs_of(name))


@every_state
def test_adapters(make, state):
    peft = pytest.importorskip("peft")
    for name in ("Model", "ForMaskedLM"):
        model = make(name, state, attached=True)
        expected = result(model(**inputs_of(name)), name)
        wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query", "value"])).eval()
        torch.testing.assert_close(result(wrapped(**inputs_of(name)), name), expected)
        outputs = wrapped.train()(**inputs_of(name, labels=True))
        penalty = sparsity_loss(wrapped)
        if name != "Model" and state == "searching":
            assert 0 < penalty < outputs.loss


def test_models_that_accelerate_wraps_and_unwraps(make):
    """It wraps `forward` for mixed precision, and takes off all that says what it wraps."""
    for attached in (False, True):
        model = make("ForMaskedLM", "frozen", attached)
        expected = model(IDS).logits
        AcceleratorState._reset_state()  # a process has one precision
        accelerator = Accelerator(mixed_precision="bf16", cpu=True)
        prepared = accelerator.prepare(model)
        assert prepared(IDS).logits.dtype == torch.float32 and not torch.equal(prepared(IDS).logits, expected)
        torch.testing.assert_close(accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)(IDS).logits, expected)
        accelerator.free_memory()
    AcceleratorState._reset_state()


# Names of attention


STOCK = {"eager": "sparse_eager", "sdpa": "sparse_sdpa", "flex_attention": "sparse_flex"}


@pytest.fixture
def said(caplog, monkeypatch):
    """`said()`: the messages of the package so far."""
    monkeypatch.setattr(transformers.utils.logging.get_logger("transformers"), "propagate", True)
    monkeypatch.setattr(transformers.utils.logging.get_logger("sparsebert"), "propagate", True)
    transformers.utils.logging.get_logger("sparsebert").warning_once.cache_clear()
    return lambda: [record.getMessage() for record in caplog.records]


def by_from_pretrained(model, name, folder):
    model.save_pretrained(folder)
    if isinstance(model.config, sparsebert.SparseBertConfig):
        return AutoModelForMaskedLM.from_pretrained(folder, attn_implementation=name)
    return sparsebert.load(folder, attn_implementation=name)


def by_setter(model, name, folder):
    model.set_attn_implementation(name)
    return model


def by_base_model(model, name, folder):
    model.bert.set_attn_implementation(name)
    return model


def by_configuration(model, name, folder):
    model.config._attn_implementation = name
    return model


@pytest.mark.parametrize("way", [by_from_pretrained, by_setter, by_base_model, by_configuration])
@pytest.mark.parametrize("attached", [False, True], ids=["own", "attached"])
@pytest.mark.parametrize("stock", STOCK)
def test_a_stock_name_means_its_twin(make, said, tmp_path, stock, attached, way):
    model = make("ForMaskedLM", "frozen", attached)
    expected = model(**inputs_of("ForMaskedLM")).logits
    model = way(model, stock, tmp_path).eval()
    assert model.config._attn_implementation == model.bert.config._attn_implementation == STOCK[stock]
    if stock != "flex_attention":  # compiled with Inductor
        torch.testing.assert_close(model(**inputs_of("ForMaskedLM")).logits, expected, atol=1e-5, rtol=1e-5)
    model.set_attn_implementation(stock)
    assert [message for message in said() if " means " in message] == [
        f"attn_implementation {stock!r} means {STOCK[stock]!r} on a model that carries a sparse mask."
    ]


@pytest.mark.parametrize("stock", STOCK)
def test_a_stock_name_means_its_twin_from_the_start(tiny_config, stock):
    config = tiny_config(pattern="window", attn_implementation=stock)
    assert config._attn_implementation == STOCK[stock]
    assert (
        SparseBertModel._from_config(tiny_config(), attn_implementation=stock).config._attn_implementation
        == (STOCK[stock])
    )
    model = attach(transformers.BertModel(tiny_config(BertConfig)), "window", attn_implementation=stock)
    assert model.config._attn_implementation == STOCK[stock]


def test_a_name_that_another_model_wrote_means_its_twin(make):
    """A model of the user's sets the attention of all that it holds."""

    class Holder(transformers.BertPreTrainedModel):
        def __init__(self, inner):
            super().__init__(inner.config)
            self.inner = inner

    for attached in (False, True):
        inner = make("Model", "frozen", attached)
        expected = inner(IDS).last_hidden_state
        Holder(inner).set_attn_implementation("eager")
        torch.testing.assert_close(inner(IDS).last_hidden_state, expected, atol=1e-5, rtol=1e-5)
        assert inner.config._attn_implementation == "sparse_eager"


@pytest.mark.parametrize("attached", [False, True], ids=["own", "attached"])
@pytest.mark.parametrize("other", ["flash_attention_2", "paged|eager", "kernels-community/flash-attn", "sparse"])
def test_a_name_without_a_twin_is_refused(make, tmp_path, attached, other):
    model = make("ForMaskedLM", "frozen", attached)
    for way in (by_setter, by_base_model, by_configuration, by_from_pretrained):
        with pytest.raises(
            ValueError,
            match=f"{re.escape(repr(other))} would ignore the mask.*use one of sparse_eager.*or eager, sdpa",
        ):
            way(model, other, tmp_path)
        assert model.config._attn_implementation == "sparse_auto"


# Attentions and hidden states


@every_head_and_state
def test_attentions(make, name, state, attached):
    """In the standard ways, one per layer: rows that sum to one, and nothing where the mask or padding removes."""
    model = make(name, state, attached)
    mask = model.sparse_attention.mask
    if mask is None:
        mask = model.sparse_attention.thresholded_mask()
    with torch.no_grad():
        expected = result(model(**inputs_of(name)), name)
        asked = model(**inputs_of(name), output_attentions=True)
        model.config.output_attentions = True
        configured = model(**inputs_of(name))
        assert "attentions" not in model(**inputs_of(name), output_attentions=False)
    for outputs in (asked, configured):
        torch.testing.assert_close(result(outputs, name), expected, atol=1e-5, rtol=1e-5)
        assert len(outputs.attentions) == LAYERS
        for weights in outputs.attentions:
            assert weights.shape == (3, 4, LENGTH, LENGTH)
            for row, size in enumerate(SIZES):
                kept = mask.to_table(size)[0]
                if name == "LMHeadModel":
                    kept = kept.tril()
                real = weights[row, :, :size, :size]
                torch.testing.assert_close(real.sum(-1), torch.ones(4, size))
                assert not weights[row, :, :size, size:].any()
                if state == "frozen":
                    assert torch.equal(real > 0, kept)
                else:
                    assert real[~kept].max() < 1e-6


@pytest.mark.parametrize("attached", [False, True], ids=["own", "attached"])
def test_attentions_survive_saving(make, attached, tmp_path):
    model = make("ForMaskedLM", "frozen", attached)
    model.config.output_attentions = True
    expected = model(IDS)
    model.save_pretrained(tmp_path)
    loaded = sparsebert.load(tmp_path).eval()
    assert loaded.config.output_attentions and loaded.config._attn_implementation == "sparse_auto"
    torch.testing.assert_close(loaded(IDS).attentions, expected.attentions, atol=1e-5, rtol=1e-5)
    read = json.loads((tmp_path / "config.json").read_text())
    assert "sparse_" not in json.dumps({key: value for key, value in read.items() if key != "pattern"})
    if attached:
        stock = transformers.BertForMaskedLM.from_pretrained(tmp_path, attn_implementation="eager")
        assert isinstance(stock.config, BertConfig) and len(stock(IDS).attentions) == LAYERS
        assert stock.sparse_attention.mask == model.sparse_attention.mask
    again = sparsebert.load(tmp_path, output_attentions=False)
    assert "attentions" not in again(IDS)
    sparsebert.load(tmp_path, output_attentions=True, attn_implementation="eager")


@pytest.mark.parametrize("attached", [False, True], ids=["own", "attached"])
def test_a_backend_without_attentions_says_so(make, tiny_config, attached):
    model = make("ForMaskedLM", "frozen", attached)
    for name in ("sdpa", "sparse_sdpa", "sparse_cpu"):
        model.set_attn_implementation(name)
        with pytest.raises(ValueError, match="does not return attentions, use sparse_eager or sparse_auto"):
            model.config.output_attentions = True
        if name == "sdpa":
            continue  # as in transformers, see below
        with torch.no_grad(), pytest.raises(ValueError, match="output_attentions=True.*Use sparse_eager or"):
            model(IDS, output_attentions=True)
        assert not model.config.output_attentions and "attentions" not in model(IDS)
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    assert len(model(IDS).attentions) == LAYERS
    with pytest.raises(StrictDataclassClassValidationError, match="sparse_sdpa does not return attentions"):
        tiny_config(output_attentions=True, attn_implementation="sdpa")


@every_state
def test_class_attributes_that_transformers_looks_for(make, tiny_config, state, tmp_path):
    assert transformers.GenerationMixin in sparsebert.SparseBertLMHeadModel.__bases__
    maps = {"probability_map": "entmax", "probability_map_kwargs": {"alpha": "learned"}} if state == "frozen" else {}
    for fields in ({}, maps):
        model = make("ForMaskedLM", state, **fields)
        names = [name.rpartition(".")[2] for name in model.state_dict()]
        kept = {"mask_logits"} if state == "searching" else {"alpha_logits"} if fields else set()
        assert model._keep_in_fp32_modules_strict == kept <= set(names)
        model.save_pretrained(tmp_path / str(len(fields)))
        half = type(model).from_pretrained(tmp_path / str(len(fields)), dtype=torch.bfloat16)
        dtypes = {name.rpartition(".")[2]: weights.dtype for name, weights in half.state_dict().items()}
        assert all((dtype == torch.float32) == (name in kept) for name, dtype in dtypes.items() if name != "progress")


@pytest.mark.parametrize("name", ["sdpa", "flex_attention"])
@pytest.mark.parametrize("attached", [False, True], ids=["own", "attached"])
def test_a_call_for_attentions_goes_on_under_a_stock_name(make, attached, name, caplog, tmp_path):
    """As in transformers, but with the attentions, and said once. The names of this package are explicit."""
    logging.get_logger("sparsebert").warning_once.cache_clear()
    model = make("ForMaskedLM", "frozen", attached)
    expected = model(IDS, output_attentions=True)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation=name).eval()
    model.set_attn_implementation(name)
    for each in (model, loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(loaded))):
        assert each.config._attn_implementation == TWINS[name] and STOCK_NAMED not in each.config.to_dict()
        output = each(IDS, output_attentions=True)
        torch.testing.assert_close(output.attentions, expected.attentions, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(output.logits, expected.logits, atol=1e-5, rtol=1e-5)
    assert caplog.text.count("so sparse_eager runs instead") == 1
    if not attached:  # whose part in a composite has the configuration of the composite, a stock one
        EncoderDecoderModel(encoder=model.bert, decoder=make("LMHeadModel", "frozen")).set_attn_implementation("sdpa")
        assert len(model.bert(IDS, output_attentions=True).attentions) == LAYERS
    for each in (model, loaded):
        each.set_attn_implementation(TWINS[name])
        with pytest.raises(ValueError, match="does not support output_attentions=True"):
            each(IDS, output_attentions=True)
    if attached:
        model.set_attn_implementation(name)
        assert STOCK_NAMED not in vars(detach(model).config)


def test_configuration_of_an_attached_model(make, tiny_config):
    """It is a stock one to all who look: equal, copied, and stock again with the model."""
    stock = tiny_config(BertConfig, initializer_range=0.1, attn_implementation="eager")
    model = attach(transformers.BertForMaskedLM(copy.deepcopy(stock)), "window", mask_length=LENGTH)
    config = model.config
    assert isinstance(config, BertConfig) and type(config).__name__ == "BertConfig"
    assert config == stock == config and config != tiny_config(BertConfig) != config
    assert type(config) in transformers.MODEL_MAPPING
    twins = copy.deepcopy(config), pickle.loads(pickle.dumps(config))
    assert all(type(twin) is type(config) and twin == config for twin in twins)
    assert json.loads(config.to_json_string()) == json.loads(BertConfig.from_dict(config.to_dict()).to_json_string())
    assert transformers.AutoModelForMaskedLM.from_config(config).config.model_type == "bert"
    sparsebert.detach(model)
    assert type(config) is type(model.bert.config) is BertConfig and config._attn_implementation == "eager"


@every_state
@pytest.mark.parametrize("name", ["Model", "ForMaskedLM"])
def test_hidden_states_and_their_gradients(make, name, state):
    model = make(name, state).train()
    outputs = model(**inputs_of(name, labels=True), output_hidden_states=True, output_attentions=True)
    assert len(outputs.hidden_states) == LAYERS + 1
    assert all(states.shape == (3, LENGTH, 32) for states in outputs.hidden_states)
    if name == "Model":
        assert outputs.hidden_states[-1] is outputs.last_hidden_state
    kept = (outputs.hidden_states[0], outputs.hidden_states[1], *outputs.attentions)
    for tensor in kept:
        tensor.retain_grad()
    loss_of(outputs).backward()
    assert all(tensor.grad.abs().sum() > 0 for tensor in kept)


# Backends, padding


@every_state
@every_head
def test_backends_agree(make, name, state):
    outputs, grads = {}, {}
    for backend in ("eager", "sdpa", "sparse_auto", *(["sparse_cpu"] if state == "frozen" else [])):
        model = make(name, state, attn_implementation=backend)
        outputs[backend] = result(model(**inputs_of(name)), name)
        model.train()
        torch.manual_seed(5)
        loss_of(model(**inputs_of(name, labels=True))).backward()
        grads[backend] = gradients(model)
    for backend in outputs:
        real = PADDING.bool() if name in BY_TOKEN else slice(None)
        torch.testing.assert_close(outputs[backend][real], outputs["eager"][real], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(grads[backend], grads["eager"], atol=1e-5, rtol=1e-3)


@every_state
@every_head
def test_padding_changes_nothing(make, name, state):
    """On the right; see test_modeling.py for padding on the left."""
    model = make(name, state)
    for size in SIZES[1:]:
        ids, zeros = IDS[:, :size], torch.zeros(3, LENGTH - size, dtype=torch.long)
        real = torch.cat([torch.ones_like(ids), zeros], dim=1)
        inputs, alone = {"input_ids": torch.cat([ids, zeros], dim=1), "attention_mask": real}, {"input_ids": ids}
        if name == "ForMultipleChoice":
            inputs, alone = ({key: value[None] for key, value in given.items()} for given in (inputs, alone))
        with torch.no_grad():
            got, expected = result(model(**inputs), name), result(model(**alone), name)
        if name in BY_TOKEN:
            got = got[real.bool()].view_as(expected)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


# Generation


@pytest.mark.parametrize(
    "beams, backend", [(1, "sparse_auto"), (3, "sparse_auto"), (1, "eager"), (1, "sdpa"), (1, "cpu")]
)
@every_state
def test_generation(make, state, beams, backend):
    """A batch padded on the left generates what each of its texts does alone, with a cache and without."""
    if state == "searching" and backend == "cpu":
        pytest.skip("refused in a search")
    fields = {"special_tokens": "none"} if state == "searching" else {}
    model = make("LMHeadModel", state, attn_implementation="sparse_" + backend.removeprefix("sparse_"), **fields)
    settings = {"max_new_tokens": 8, "num_beams": beams, "do_sample": False, "pad_token_id": 0}
    settings |= {"eos_token_id": None}
    left, real = torch.zeros(2, 3, LENGTH, dtype=torch.long)
    for row, size in enumerate(SIZES):
        left[row, LENGTH - size :], real[row, LENGTH - size :] = IDS[row, :size], 1
    batch = model.generate(left, attention_mask=real, **settings)
    assert torch.equal(model.generate(left, attention_mask=real, use_cache=False, **settings), batch)
    for row, size in enumerate(SIZES):
        alone = model.generate(IDS[row : row + 1, :size], **settings)
        assert torch.equal(alone[0, size:], batch[row, LENGTH:])
    if backend in ("sdpa", "cpu"):
        return  # has no attentions
    outputs = model.generate(
        left, attention_mask=real, **settings, return_dict_in_generate=True, output_attentions=True, output_logits=True
    )
    assert torch.equal(outputs.sequences, batch)
    assert [step[0].shape[-1] for step in outputs.attentions] == list(range(LENGTH, LENGTH + 8))


# Training


@pytest.mark.parametrize("name, way", covering([*HEADS], [("frozen", True), ("searching", False)]))
def test_activation_checkpointing(make, assert_same_gradients, name, way):
    (state, reentrant), results = way, []
    for checkpointing in (False, True):
        model = make(name, state, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(5)
        loss = loss_of(model.forward(**inputs_of(name, labels=True)))
        loss.backward()
        results.append((loss.item(), gradients(model)))
    assert results[0][0] == results[1][0]
    assert_same_gradients(results[1][1], results[0][1])


@pytest.mark.parametrize(
    "name, state",
    [
        pytest.param(
            name, state, marks=[] if (name, state) == ("ForQuestionAnswering", "searching") else pytest.mark.slow
        )
        for name in HEADS
        for state in STATES
    ],
)
def test_compiles_as_one_graph(make, name, state):
    """A frozen model in evaluation, one that is being searched in training."""
    torch._dynamo.reset()
    model = make(name, state, num_hidden_layers=1).train(state == "searching")
    results = []
    for run in (torch.compile(model, fullgraph=True, backend="eager"), model):
        torch.manual_seed(5)
        outputs = run(**inputs_of(name, labels=True))
        results.append((result(outputs, name)[PADDING.bool() if name in BY_TOKEN else ...], loss_of(outputs)))
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)
    torch._dynamo.reset()


# Inputs, weights, files


@every_state
@every_head
def test_embeddings_as_inputs(make, name, state):
    model = make(name, state)
    inputs = inputs_of(name)
    ids = inputs.pop("input_ids")
    embeddings = model.get_input_embeddings()(ids)
    with torch.no_grad():
        expected = result(model(input_ids=ids, **inputs), name)
        torch.testing.assert_close(result(model(inputs_embeds=embeddings, **inputs), name), expected)
    with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
        model.base_model()


@every_state
@pytest.mark.parametrize("name", ["Model", "ForMaskedLM", "ForMultipleChoice"])
def test_resized_vocabulary_and_tied_weights(make, name, state, tmp_path):
    model = make(name, state)
    tied = name in ("ForPreTraining", "ForMaskedLM", "LMHeadModel")
    model.resize_token_embeddings(107)
    assert model.config.vocab_size == model.get_input_embeddings().weight.shape[0] == 107
    new = torch.full_like(IDS, 106)
    inputs = {"input_ids": new[None] if name == "ForMultipleChoice" else new}
    if tied:
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert result(model(**inputs), name).shape[-1] == 107
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(result(loaded(**inputs), name), result(model(**inputs), name))
    if tied:
        assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight


@every_state
@pytest.mark.parametrize("name", ["Model", "ForMaskedLM", "ForSequenceClassification"])
def test_loading_with_little_memory_and_in_other_dtypes(make, assert_same_model, name, state, tmp_path):
    model = make(name, state)
    model.save_pretrained(tmp_path)
    before = torch.get_rng_state()
    for arguments in ({"device_map": "cpu"}, {"device_map": {"": "cpu"}, "dtype": "auto"}):
        loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True, **arguments)
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        assert_same_model(loaded.eval(), model, **inputs_of(name))
    assert torch.equal(torch.get_rng_state(), before)
    half = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    kinds = {key: weight.dtype for key, weight in half.named_parameters()}
    assert all((kind == torch.float32) == ("mask_logits" in key) for key, kind in kinds.items())
    got, expected = result(half(**inputs_of(name)), name), result(model(**inputs_of(name)), name)
    assert got.dtype == torch.bfloat16 and (got - expected).abs().max() < 0.2
    half.save_pretrained(tmp_path / "half")
    again = type(model).from_pretrained(tmp_path / "half", dtype="auto").eval()
    assert_same_model(again, half, **inputs_of(name))


@every_state
def test_models_without_weights(make, state):
    with torch.device("meta"):
        model = type(make("ForMaskedLM", "frozen"))(make("ForMaskedLM", state).config)
    assert {weight.device.type for weight in model.parameters()} == {"meta"}
    model.to_empty(device="cpu").init_weights()
    assert model(IDS, PADDING).logits.isfinite().all()
