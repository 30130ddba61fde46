"""Clients that know nothing of masks: what they load, train and save keeps its mask."""

import copy
import json
import os
import re
import shutil
from pathlib import Path

import accelerate
import pytest
import torch
import transformers
from conftest import TINY
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    DataCollatorWithFlattening,
    EncoderDecoderModel,
    Trainer,
    TrainingArguments,
    pipeline,
)

from sparsebert import (
    MaskFileError,
    SparseBertConfig,
    SparseBertForMaskedLM,
    SparseBertModel,
    SparseMask,
    attach,
    build_pattern,
    detach,
    extend_positions,
    load,
    plan,
    plugin,
    sparsity,
)
from sparsebert.attention.model_masks import without_adapters
from sparsebert.commands import main
from sparsebert.models.attaching import AttachedModel
from sparsebert.training.finetuning.finetuning_arguments import FinetuningArguments
from sparsebert.training.finetuning.task_data import prepare
from sparsebert.training.finetuning.task_models import load_model


LENGTH = 12
IDS = torch.randint(5, 100, (3, LENGTH), generator=torch.Generator().manual_seed(1))
PADDING = (torch.arange(LENGTH) < torch.tensor([12, 9, 5])[:, None]).long()
REAL = PADDING.bool()
STATES = ("frozen", "searching")


def stock_model(seed=3):
    torch.manual_seed(seed)
    return BertForMaskedLM(BertConfig(**TINY | {"initializer_range": 0.1})).eval()


def with_mask(model, state):
    """`model` with a sparse mask, or one that is being searched with logits other than the initial ones."""
    if state == "frozen":
        return attach(model, "window", mask_length=LENGTH, pattern_kwargs={"window_size": 1})
    attach(model, "dam_s", mask_length=LENGTH, sparsity_weight=1e-3)
    with torch.no_grad():
        model.sparse_attention.mask_logits.normal_(generator=torch.Generator().manual_seed(2))
    return model


@pytest.fixture(params=STATES)
def state(request):
    return request.param


@pytest.fixture
def attached(state, tmp_path):
    """An attached model, and the folder it was saved to."""
    model = with_mask(stock_model(), state)
    model.save_pretrained(tmp_path / "attached")
    return model, tmp_path / "attached"


def logits(model):
    with torch.no_grad():
        return model(IDS, attention_mask=PADDING)[0][REAL]


def assert_same(model, expected):
    """The outputs of a model are those expected, and the test would see a model without the mask."""
    torch.testing.assert_close(logits(model.eval()), logits(expected), atol=1e-5, rtol=1e-5)
    assert (logits(expected) - logits(stock_model())).abs().max() > 1e-2


@pytest.fixture
def said(caplog, monkeypatch):
    monkeypatch.setattr(transformers.utils.logging.get_logger("sparsebert"), "propagate", True)
    return caplog


# Loading


@pytest.mark.parametrize("loader", [AutoModelForMaskedLM, BertForMaskedLM], ids=lambda loader: loader.__name__)
def test_from_pretrained_attaches_the_mask(loader, state, attached):
    model, folder = attached
    loaded, info = loader.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()) and not loaded.training
    assert_same(loaded, model)
    assert type(loaded) is type(model) is type(load(folder)) and type(loaded.config) is type(model.config)
    assert loaded.config._attn_implementation == "sparse_auto"
    assert loaded.sparse_attention.searching == (state == "searching")
    assert_same(type(model).from_pretrained(folder), model)
    assert type(detach(loaded)) is BertForMaskedLM and loaded.config._attn_implementation == "sdpa"


def test_an_attached_bert_is_read_as_a_sparsebert(state, attached, said, tmp_path):
    model, folder = attached
    loaded, info = SparseBertForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()) and loaded.sparse_attention.searching == (state == "searching")
    assert (loaded.config.search, loaded.config.frozen) == ((None, True) if state == "frozen" else ("dam_s", False))
    assert loaded.config.mask_length == LENGTH and (state == "frozen" or loaded.config.sparsity_weight == 1e-3)
    loaded.save_pretrained(tmp_path / "again")
    for each in (loaded, AutoModelForMaskedLM.from_pretrained(tmp_path / "again")):
        assert_same(each, model)
    new = SparseBertForMaskedLM.from_pretrained(folder, pattern="dense")
    assert new.sparse_attention.sparsity() == 0 and not new.config.allow_empty_rows
    new = SparseBertForMaskedLM.from_pretrained(folder, search="dam_s")
    assert new.sparse_attention.searching and not new.config.allow_empty_rows
    if state == "frozen":
        with pytest.raises(ValueError, match="target_sparsity 0.9 has no meaning for a frozen mask"):
            SparseBertForMaskedLM.from_pretrained(folder, target_sparsity=0.9)
        searched = with_mask(stock_model(), "searching")
        searched.freeze()
        searched.save_pretrained(folder)
        config = SparseBertConfig.from_pretrained(folder / "config.json")
        assert (config.search, config.frozen, config.mask_length) == ("dam_s", True, LENGTH)
    for name in ("mask_config.json", "search_config.json"):
        (folder / name).unlink(missing_ok=True)
    said.clear()
    SparseBertConfig.from_pretrained(folder)
    assert "nor search_config.json" in said.text and "a new search begins" in said.text


def test_other_heads_and_base_models(state, attached):
    model, folder = attached
    expected = model.bert(IDS).last_hidden_state
    base = AutoModel.from_pretrained(folder)
    torch.testing.assert_close(base(IDS).last_hidden_state, expected)
    base.save_pretrained(folder)
    for loader in (AutoModelForSequenceClassification, AutoModelForMaskedLM):
        head, info = loader.from_pretrained(folder, output_loading_info=True)
        assert {key.split(".")[0] for key in info["missing_keys"]} <= {"classifier", "cls"} and info["missing_keys"]
        torch.testing.assert_close(head.bert(IDS).last_hidden_state, expected)


def test_encoder_decoders_of_attached_models(state, attached, tmp_path):
    model, folder = attached
    stock_model().save_pretrained(tmp_path / "stock")
    for decoder in (folder, tmp_path / "stock"):
        if (state, decoder) == ("searching", folder):
            with pytest.raises(RuntimeError, match="mismatched"):  # a causal mask has other parameters
                EncoderDecoderModel.from_encoder_decoder_pretrained(folder, decoder)
            continue
        both = EncoderDecoderModel.from_encoder_decoder_pretrained(folder, decoder).eval()
        torch.testing.assert_close(both.encoder(IDS).last_hidden_state, model.bert(IDS).last_hidden_state)
        assert isinstance(both.encoder, AttachedModel) and isinstance(both.decoder, AttachedModel) == (
            decoder == folder
        )


@pytest.mark.parametrize("name, backend", [("eager", "sparse_eager"), ("sparse_cpu", "sparse_cpu")])
@pytest.mark.parametrize("loader", [AutoModel, BertModel])
def test_attention_implementation(loader, name, backend, state, attached):
    """A stock name means its twin, and the stock model is never left with one of ours."""
    if (state, name) == ("searching", "sparse_cpu"):
        name = backend = "sparse_sdpa"
    stock = "eager" if name == "eager" else "sdpa"
    _, folder = attached
    configs = {} if loader is AutoModel else {"config": AutoConfig.from_pretrained(folder, attn_implementation=name)}
    for arguments in ({"attn_implementation": name}, configs):
        if arguments:
            model = loader.from_pretrained(folder, **arguments)
            assert model.config._attn_implementation == backend
            assert detach(model).config._attn_implementation == stock
    with pytest.raises(ValueError, match="'flash_attention_2' would ignore the mask"):
        loader.from_pretrained(folder, attn_implementation="flash_attention_2")


def test_arguments_of_from_pretrained(state, attached):
    model, folder = attached
    (folder.parent / "repository").mkdir()
    nested = folder.rename(folder.parent / "repository" / "inner").parent
    loaded = AutoModelForMaskedLM.from_pretrained(nested, subfolder="inner", local_files_only=True, device_map="cpu")
    assert_same(loaded, model)
    half = BertForMaskedLM.from_pretrained(str(nested / "inner"), dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    if state == "searching":
        assert torch.equal(half.sparse_attention.mask_logits, model.sparse_attention.mask_logits)
    used = BertForMaskedLM.from_pretrained(nested / "inner", last_token="position")
    if state == "frozen":
        assert used.sparse_attention.mask == model.sparse_attention.mask.replace(last_token="position")
    else:
        assert used.sparse_attention.config.last_token == "position"


@pytest.mark.parametrize("loader", [AutoModelForMaskedLM, AutoModel])
def test_offloaded_models_keep_their_mask(loader, tmp_path):
    """Accelerate wraps the forward of the modules that it dispatches."""
    model = with_mask(stock_model(), "frozen")
    model.save_pretrained(tmp_path)
    prefix, parts = ("bert.", {"cls": "cpu"}) if loader is AutoModelForMaskedLM else ("", {"pooler": "cpu"})
    places = {f"{prefix}embeddings": "cpu", f"{prefix}encoder": "disk"} | parts
    loaded = loader.from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "offload")
    expected = model if prefix else model.bert
    torch.testing.assert_close(loaded(IDS)[0], expected(IDS)[0])
    with pytest.raises(AssertionError):
        torch.testing.assert_close(detach(loaded)(IDS)[0], expected(IDS)[0])


def test_searches_of_offloaded_models_are_refused(tmp_path):
    """They would have logits without numbers."""
    model = accelerate.cpu_offload(stock_model())
    with pytest.raises(ValueError, match="BertForMaskedLM is offloaded, so a search would have no weights"):
        attach(model, "dam_s", mask_length=LENGTH)
    attach(model, "window", mask_length=LENGTH)
    with_mask(stock_model(), "searching").save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path, device_map={"": "disk"}, offload_folder=tmp_path / "offload")
    with pytest.raises(ValueError, match="mask_logits are offloaded: load the model without a device_map"):
        loaded.freeze(sparsity=0.5)


def test_pipelines(word_tokenizer, attached):
    model, folder = attached
    word_tokenizer.save_pretrained(folder)
    fill = pipeline("fill-mask", str(folder))
    assert isinstance(fill.model, AttachedModel)
    assert_same(fill.model, model)


def test_other_folders_load_as_before(tmp_path, monkeypatch):
    stock_model().save_pretrained(tmp_path / "stock")
    assert type(AutoModelForMaskedLM.from_pretrained(tmp_path / "stock")) is BertForMaskedLM
    build_pattern("window", LENGTH, 4).save_pretrained(tmp_path / "other")
    config = transformers.GPT2Config(vocab_size=100, n_embd=32, n_layer=1, n_head=4)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "other")
    assert type(AutoModel.from_pretrained(tmp_path / "other")) is transformers.GPT2Model


@pytest.mark.parametrize("name", ["mask_config.json", "search_config.json"])
@pytest.mark.parametrize("content", [{"mask_prob": 0.15}, [], "x"], ids=["fields", "list", "text"])
def test_a_file_of_another_tool_beside_a_stock_model(name, content, assert_same_model, tmp_path):
    model = stock_model().eval()
    model.save_pretrained(tmp_path)
    (tmp_path / name).write_text(json.dumps(content))
    loaded = BertForMaskedLM.from_pretrained(tmp_path)
    assert type(loaded) is BertForMaskedLM
    assert_same_model(loaded, model, input_ids=torch.arange(5, 5 + LENGTH)[None])


def test_damaged_and_unfit_masks_are_refused(state, attached):
    _, folder = attached
    with pytest.raises(MaskFileError, match="4 heads" if state == "frozen" else "4 heads|mask_length"):
        if state == "searching":
            with_mask(stock_model(), "frozen").sparse_attention.mask.save_pretrained(folder)
        AutoModel.from_pretrained(folder, num_attention_heads=2, ignore_mismatched_sizes=True)
    if state == "frozen":
        (folder / "mask.safetensors").write_bytes(b"damaged")
        message = "mask.safetensors"
    else:
        for name in ("mask_config.json", "mask.safetensors"):
            (folder / name).unlink()
        (folder / "search_config.json").write_text("[]")
        message = "not a search"
    for loader in (AutoModel, BertForMaskedLM, pipeline):
        with pytest.raises(ValueError, match=message) as raised:
            if loader is pipeline:
                pipeline("feature-extraction", str(folder))
            else:
                loader.from_pretrained(folder)
        assert loader is pipeline or raised.type is MaskFileError


@pytest.mark.parametrize(
    "search",
    [
        {"search": "dam_z"},
        {"search": "dam_s", "mask_length": -1},
        {"no": 1},
        {"search": "dam_s", "layer_norm_eps": 0.5},  # a field of the model
        {"search": "dam_s", "temperature": 10**400},
    ],
    ids=["search", "length", "field", "model", "huge"],
)
def test_wrong_searches_are_refused(search, tmp_path):
    with_mask(stock_model(), "searching").save_pretrained(tmp_path)
    (tmp_path / "search_config.json").write_text(json.dumps(search))
    for loader in (AutoModel, SparseBertModel):
        with pytest.raises(MaskFileError, match=str(tmp_path)):
            loader.from_pretrained(tmp_path)


def test_mask_beside_changed_weights_is_warned_of(said, tmp_path):
    model = with_mask(stock_model(), "frozen")
    model.save_pretrained(tmp_path)
    AutoModel.from_pretrained(tmp_path)
    assert "the weights are not those" not in said.text
    with torch.no_grad():
        detach(model).bert.pooler = None
        model.cls.predictions.bias.add_(1)
    model.save_pretrained(tmp_path / "dense")
    shutil.copytree(tmp_path / "dense", tmp_path, dirs_exist_ok=True)
    for loader, kind in ((AutoModel, AttachedModel), (SparseBertModel, SparseBertModel)):
        said.clear()
        assert isinstance(loader.from_pretrained(tmp_path), kind)
        assert f"{tmp_path}: the weights are not those that the mask was saved with" in said.text


# Training


def test_finetuning_takes_another_mask_for_an_attached_model(attached, word_tokenizer, glue_folder):
    _, folder = attached
    word_tokenizer.save_pretrained(folder)
    options = FinetuningArguments(task="rte", data=glue_folder, model=str(folder), mask="star", max_length=LENGTH)
    model = load_model(prepare(options), {})
    assert model.base_model.sparse_attention.mask == build_pattern("star", LENGTH, 4, num_layers=2)


class Sentences(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return {"input_ids": IDS[index % 3], "attention_mask": PADDING[index % 3], "labels": index % 2}


def train(model, folder, **fields):
    fields = {"max_steps": 2, "save_steps": 1, "eval_steps": 1, "report_to": "none", "use_cpu": True} | fields
    arguments = TrainingArguments(folder, per_device_train_batch_size=4, disable_tqdm=True, **fields)
    trainer = Trainer(model, arguments, train_dataset=Sentences(), eval_dataset=Sentences())
    trainer.train()
    return trainer


def test_trainer_keeps_the_mask_in_checkpoints_and_the_best_model(attached, state, tmp_path):
    """As `run_glue` does it: with a new head, from the folder and back."""
    _, folder = attached
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}
    trainer = train(model, tmp_path / "run", learning_rate=0.05, **best)
    checkpoint = trainer.state.best_model_checkpoint
    for loaded in (AutoModelForSequenceClassification.from_pretrained(checkpoint), load(checkpoint)):
        assert loaded.sparse_attention.searching == (state == "searching")
        assert loaded.sparse_attention.mask == model.sparse_attention.mask
        torch.testing.assert_close(loaded(IDS).logits, model.eval()(IDS).logits)
    resumed = AutoModelForSequenceClassification.from_pretrained(folder)
    other = Trainer(resumed, trainer.args, train_dataset=Sentences(), eval_dataset=Sentences())
    other.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    torch.testing.assert_close(resumed.state_dict(), model.state_dict())


# Adapters


@pytest.fixture
def peft():
    return pytest.importorskip("peft")


def lora(peft, **fields):
    torch.manual_seed(4)
    return peft.LoraConfig(target_modules=["query", "value"], r=2, init_lora_weights=False, **fields)


@pytest.fixture
def adapter(peft, state, tmp_path):
    """A model with an adapter, the folder of its adapter, and that of its stock base model."""
    stock_model().save_pretrained(tmp_path / "stock")
    model = with_mask(BertForMaskedLM.from_pretrained(tmp_path / "stock"), state)
    model = peft.get_peft_model(model, lora(peft)).eval()
    model.save_pretrained(tmp_path / "adapter")
    return model, tmp_path / "adapter", tmp_path / "stock"


@pytest.mark.parametrize("how", ["peft", "auto_peft", "auto", "concrete", "pipeline", "load_adapter", "add_adapter"])
def test_adapters_bring_their_mask(peft, how, adapter, state, word_tokenizer, tmp_path):
    model, folder, stock = adapter
    if how == "peft":
        loaded = peft.PeftModel.from_pretrained(BertForMaskedLM.from_pretrained(stock), folder)
    elif how == "auto_peft":
        loaded = peft.AutoPeftModel.from_pretrained(folder)
    elif how == "auto":
        loaded = AutoModelForMaskedLM.from_pretrained(folder)
    elif how == "concrete":
        loaded = BertForMaskedLM.from_pretrained(folder)
    elif how == "pipeline":
        word_tokenizer.save_pretrained(folder)
        loaded = pipeline("fill-mask", str(folder)).model
    else:
        loaded = BertForMaskedLM.from_pretrained(stock)
        loaded.load_adapter(folder)
        if how == "add_adapter":
            loaded.save_pretrained(tmp_path / "again")
            loaded = BertForMaskedLM.from_pretrained(stock)
            loaded.load_adapter(tmp_path / "again")
    assert_same(loaded, model)
    attention = loaded.base_model.sparse_attention if how != "peft" else loaded.get_base_model().sparse_attention
    assert attention.searching == (state == "searching")


@pytest.mark.parametrize("trainable", [False, True])
def test_logits_beside_an_adapter(peft, trainable, tmp_path):
    """Their search goes on where it was."""
    model = with_mask(stock_model(), "searching")
    model.sparse_attention.set_progress(0.5)
    peft.get_peft_model(model, lora(peft)).save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(stock_model(), tmp_path, is_trainable=trainable)
    attention = loaded.get_base_model().sparse_attention
    assert attention.mask_logits.requires_grad == trainable and attention.progress == 0.5
    # The same in a model with this search, which may be elsewhere in it.
    other = with_mask(stock_model(), "searching")
    peft.PeftModel.from_pretrained(other, tmp_path, is_trainable=trainable)
    assert torch.equal(other.sparse_attention.mask_logits, attention.mask_logits)
    assert other.sparse_attention.progress == 0.5
    # Pruning goes on, too: a resumed run loads the adapter into a new search.
    model.sparse_attention.start_pruning()
    peft.get_peft_model(model, lora(peft)).save_pretrained(tmp_path / "pruned")
    resumed = with_mask(stock_model(), "searching")
    peft.PeftModel.from_pretrained(resumed, tmp_path / "pruned", is_trainable=trainable)
    assert resumed.sparse_attention.search.pruned and resumed.sparse_attention.config.pruned
    path = tmp_path / "pruned/search_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"search_progress": "half"}))
    with pytest.raises(MaskFileError, match="search_progress must be a number from 0 to 1, got 'half'"):
        peft.PeftModel.from_pretrained(with_mask(stock_model(), "searching"), tmp_path / "pruned")
    mask = loaded.get_base_model().freeze(sparsity=0.5)
    loaded.save_pretrained(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"mask_config.json", "mask.safetensors"} <= names
    assert not names & {"mask_logits.safetensors", "search_config.json"}
    again = peft.PeftModel.from_pretrained(stock_model(), tmp_path).get_base_model()
    assert again.sparse_attention.mask == mask


@pytest.mark.parametrize("wanted", ["requires_grad", "modules_to_save"])
def test_logits_are_trained_and_saved_with_an_adapter(peft, wanted, tmp_path):
    model = with_mask(stock_model(), "searching")
    fields = {"modules_to_save": ["sparse_attention"]} if wanted == "modules_to_save" else {}
    model = peft.get_peft_model(model, lora(peft, **fields))
    before = model.get_base_model().sparse_attention.mask_logits.detach().clone()
    if wanted == "requires_grad":
        model.get_base_model().sparse_attention.mask_logits.requires_grad_()
    model.train()(IDS, labels=IDS).loss.backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=10.0).step()
    after = model.get_base_model().sparse_attention.mask_logits
    assert not torch.equal(after, before)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(stock_model(), tmp_path)
    assert torch.equal(loaded.get_base_model().sparse_attention.mask_logits, after)
    assert_same(loaded, model.eval())


def test_trainer_saves_the_mask_with_an_adapter(peft, adapter, state, tmp_path):
    _, _, stock = adapter
    AutoModelForSequenceClassification.from_pretrained(stock).save_pretrained(stock)  # with a pooler
    model = with_mask(AutoModelForSequenceClassification.from_pretrained(stock), state)
    model = peft.get_peft_model(model, lora(peft, task_type="SEQ_CLS"))
    train(model, tmp_path / "run")
    loaded = peft.AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "run" / "checkpoint-2")
    assert loaded.get_base_model().sparse_attention.searching == (state == "searching")
    torch.testing.assert_close(loaded(IDS).logits, model.eval()(IDS).logits)


def test_positions_are_extended_below_an_adapter(peft):
    model = peft.get_peft_model(with_mask(stock_model(), "frozen"), lora(peft))
    before, length = model(IDS).logits, model.config.max_position_embeddings
    assert extend_positions(model, length + 30) is model and model.config.max_position_embeddings == length + 30
    torch.testing.assert_close(model(IDS).logits, before)


def test_merging_keeps_the_mask(peft, adapter, tmp_path):
    model, folder, stock = adapter
    merged = peft.PeftModel.from_pretrained(BertForMaskedLM.from_pretrained(stock), folder).merge_and_unload()
    assert_same(merged, model)
    merged.save_pretrained(tmp_path / "merged")
    assert_same(AutoModelForMaskedLM.from_pretrained(tmp_path / "merged"), model)


def test_mask_of_an_adapter_and_of_its_base(peft, said, tmp_path):
    """The mask of the adapter is the one that it was trained with. Without one, that of the base stays."""
    base = with_mask(stock_model(), "frozen")
    base.save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(BertForMaskedLM.from_pretrained(tmp_path / "base"), lora(peft))
    model.save_pretrained(tmp_path / "same")
    model.save_pretrained(tmp_path / "none")
    other = build_pattern("dense", LENGTH, 4)
    model.get_base_model().set_mask(other)
    model.save_pretrained(tmp_path / "other")
    for name in ("mask_config.json", "mask.safetensors"):
        (tmp_path / "none" / name).unlink()
    for name, mask in (("same", base.sparse_attention.mask), ("none", base.sparse_attention.mask), ("other", other)):
        assert "another mask" not in said.text
        for loader in (AutoModelForMaskedLM, BertForMaskedLM):
            assert loader.from_pretrained(tmp_path / name).sparse_attention.mask == mask
    peft.PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "other")
    assert "the adapter was trained with another mask than that of the model" in said.text


@pytest.mark.parametrize("library", ["peft", "transformers"])
def test_the_mask_is_that_of_the_active_adapter(peft, library, tmp_path):
    masks = {"a": build_pattern("window", LENGTH, 4), "b": build_pattern("dense", LENGTH, 4)}
    for name, mask in masks.items():
        peft.get_peft_model(attach(stock_model(), mask), lora(peft)).save_pretrained(tmp_path / name)
    if library == "peft":
        model = peft.PeftModel.from_pretrained(stock_model(), tmp_path / "a", adapter_name="a")
        model.load_adapter(tmp_path / "b", "b")
        assert without_adapters(model).sparse_attention.mask == masks["a"]  # which is still active
        model.save_pretrained(tmp_path / "both")
        assert [SparseMask.from_pretrained(tmp_path / "both" / name) for name in masks] == list(masks.values())
        build_pattern("window", LENGTH, 2).write_beside_model(tmp_path / "b")
        with pytest.raises(MaskFileError, match="2 heads"):  # before it is active
            model.load_adapter(tmp_path / "b", "c")
    else:
        model = stock_model()
        for name in masks:
            model.load_adapter(str(tmp_path / name), name)
    for name in ("b", "a", "b", "a"):
        model.set_adapter(name)
        assert without_adapters(model).sparse_attention.mask == masks[name]


def test_an_adapter_without_a_mask_runs_through_that_of_another_one_and_says_so(peft, said, tmp_path):
    peft.get_peft_model(attach(stock_model(), "window", mask_length=LENGTH), lora(peft)).save_pretrained(
        tmp_path / "a"
    )
    peft.get_peft_model(stock_model(), lora(peft)).save_pretrained(tmp_path / "b")
    model = peft.PeftModel.from_pretrained(stock_model(), tmp_path / "a", adapter_name="a")
    model.load_adapter(tmp_path / "b", "b")
    assert "mask" not in said.text
    model.set_adapter("b")
    assert "b: the adapter has no mask of its own" in said.text
    model = peft.PeftModel.from_pretrained(stock_model(), tmp_path / "b", adapter_name="b")
    model.load_adapter(tmp_path / "a", "a")
    assert "the mask of this adapter is now that of the model, also under b" in said.text


def test_what_is_asked_of_the_mask_of_an_adapter(peft, adapter, state):
    """As of that of a model."""
    if state == "searching":
        pytest.skip("a search has no length policy")
    asked = {"length_policy": "dense", "skip_padding": True, "attn_implementation": "sparse_eager"}
    model = BertForMaskedLM.from_pretrained(adapter[1], **asked)
    attention = model.base_model.sparse_attention
    assert (attention.mask.length_policy, attention.config.skip_padding) == ("dense", True)
    assert model.config._attn_implementation == "sparse_eager"


@pytest.mark.parametrize("library", ["peft", "transformers"])
def test_an_adapter_without_a_mask_replaces_one_with_it(peft, library, state, tmp_path):
    """Its mask or search goes; that of a model in the same folder, or that is there alone, stays."""
    model = peft.get_peft_model(with_mask(stock_model(), state), lora(peft))
    model.add_adapter("second", lora(peft))
    model.save_pretrained(tmp_path / "all")
    dense = stock_model()
    if library == "peft":
        dense = peft.get_peft_model(dense, lora(peft))
    else:
        dense.add_adapter(lora(peft))
    dense.save_pretrained(tmp_path / "all")
    masks = [path for path in (tmp_path / "all").rglob("*") if path.name.startswith(("mask", "search"))]
    assert masks and {path.parent.name for path in masks} == {"second"}
    loaded = peft.PeftModel.from_pretrained(stock_model(), tmp_path / "all")
    assert loaded.get_base_model().base_model._modules.keys() == stock_model().base_model._modules.keys()
    with_mask(stock_model(), state).save_pretrained(tmp_path / "model")
    build_pattern("window", LENGTH, 4).save_pretrained(tmp_path / "alone")
    for folder in (tmp_path / "model", tmp_path / "alone"):
        before = {path.name for path in folder.iterdir()}
        dense.save_pretrained(folder)
        assert before <= {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("task", [None, "TOKEN_CLS"])
def test_peft_alone_refuses_an_adapter_with_a_mask(peft, adapter, task, state, word_tokenizer, tmp_path):
    """What the configuration of the adapter says is gone once it is loaded, and there again once it is saved."""
    model, folder, stock = adapter
    model.peft_config["default"].task_type = task
    model.save_pretrained(folder)
    loaders = (
        peft.AutoPeftModel.from_pretrained,
        AutoModelForMaskedLM.from_pretrained,
        stock_model().load_adapter,
        lambda path: peft.PeftModel.from_pretrained(stock_model(), path),
    )
    for place in ("adapter", "again"):
        plugin.disable()
        try:
            for loader in loaders:
                with pytest.raises(ValueError, match=r"with a sparse attention mask \(of the package sparsebert\)'"):
                    loader(str(tmp_path / place))
        finally:
            plugin.enable()
        loaded = peft.PeftModel.from_pretrained(stock_model(), tmp_path / place)
        assert loaded.peft_config["default"].task_type == task
        assert_same(loaded, model)
        loaded.save_pretrained(tmp_path / "again")
    detach(loaded.get_base_model())
    loaded.save_pretrained(tmp_path / "again")
    plugin.disable()
    try:
        assert peft.PeftConfig.from_pretrained(tmp_path / "again").task_type == task
    finally:
        plugin.enable()


def test_an_adapter_runs_where_the_code_of_its_base_applies_the_mask(peft, tmp_path):
    with_mask(stock_model(), "frozen").save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(BertForMaskedLM.from_pretrained(tmp_path / "base"), lora(peft)).eval()
    model.save_pretrained(tmp_path / "adapter")
    other = load(tmp_path / "base")
    other.set_mask(build_pattern("dense", LENGTH, 4))
    peft.get_peft_model(other, lora(peft)).save_pretrained(tmp_path / "other")
    plugin.disable()
    try:
        base = AutoModelForMaskedLM.from_pretrained(tmp_path / "base", trust_remote_code=True)
        assert_same(peft.PeftModel.from_pretrained(base, tmp_path / "adapter"), model)
        with pytest.raises(ValueError, match="of the package sparsebert"):
            peft.PeftModel.from_pretrained(stock_model(), tmp_path / "other")
    finally:
        plugin.enable()


def test_a_mixed_model_of_peft_refuses_the_mask_of_an_adapter(peft, tmp_path):
    peft.get_peft_model(with_mask(stock_model(), "frozen"), lora(peft)).save_pretrained(tmp_path)
    with pytest.raises(MaskFileError, match="which a PeftMixedModel cannot have"):
        peft.PeftMixedModel.from_pretrained(stock_model(), tmp_path)


def test_adapters_with_names_bring_their_mask(peft, tmp_path):
    model = peft.get_peft_model(with_mask(stock_model(), "frozen"), lora(peft))
    model.add_adapter("second", lora(peft))
    model.save_pretrained(tmp_path / "all")
    model.save_pretrained(tmp_path / "one", selected_adapters=["second"])
    folders = sorted(path.parent.relative_to(tmp_path) for path in tmp_path.rglob("mask_config.json"))
    assert folders == [Path("all"), Path("all/second"), Path("one/second")]
    for folder in folders:
        loaded = peft.PeftModel.from_pretrained(stock_model(), tmp_path / folder).get_base_model()
        assert loaded.sparse_attention.mask == model.get_base_model().sparse_attention.mask


def test_each_adapter_with_a_mask_of_its_own_keeps_it(peft, tmp_path):
    """With `modules_to_save` PEFT gives every adapter a copy of the search."""
    config = lora(peft, modules_to_save=["sparse_attention"])
    model = peft.get_peft_model(with_mask(stock_model(), "searching"), config)
    model.add_adapter("second", config)
    found = {}
    for name, value in (("default", 1.0), ("second", -1.0)):
        model.set_adapter(name)
        model.get_base_model().sparse_attention.mask_logits.data.fill_(value)
        found[name] = sparsity(model)
    assert found["default"] < found["second"]
    model.save_pretrained(tmp_path / "searching")
    both = peft.PeftModel.from_pretrained(with_mask(stock_model(), "searching"), tmp_path / "searching")
    both.load_adapter(tmp_path / "searching" / "second", "second")
    for name, place in (("default", ""), ("second", "second")):
        alone = peft.PeftModel.from_pretrained(stock_model(), tmp_path / "searching" / place)
        both.set_adapter(name)
        assert sparsity(alone) == sparsity(both) == found[name]
    for name, target in (("default", 0.2), ("second", 0.7)):
        model.set_adapter(name)
        logits = model.get_base_model().sparse_attention.mask_logits
        logits.data = torch.linspace(-1, 1, logits.numel()).view_as(logits)
        model.get_base_model().sparse_attention.freeze(sparsity=target)
        found[name] = sparsity(model)
    model.save_pretrained(tmp_path / "frozen")
    for name, place in (("default", ""), ("second", "second")):
        assert sparsity(peft.PeftModel.from_pretrained(stock_model(), tmp_path / "frozen" / place)) == found[name]


def test_an_adapter_with_a_search_replaces_one_with_a_mask(peft, tmp_path):
    for state in ("frozen", "searching"):
        model = peft.get_peft_model(with_mask(stock_model(), state), lora(peft))
        model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(stock_model(), tmp_path).get_base_model().sparse_attention
    assert loaded.searching
    assert torch.equal(loaded.mask_logits, model.get_base_model().sparse_attention.mask_logits)


def test_adapters_of_sparsebert(peft, tiny_config, state, tmp_path):
    fields = {"pattern": "window"} if state == "frozen" else {"search": "dam_s"}
    model = SparseBertForMaskedLM(SparseBertConfig(**TINY, mask_length=LENGTH, **fields))
    model.save_pretrained(tmp_path / "base")
    if state == "searching":
        torch.nn.init.normal_(model.sparse_attention.mask_logits)
    model = peft.get_peft_model(model, lora(peft)).eval()
    for step in ("as it is", "frozen"):
        if step == "frozen" and state == "searching":
            model.get_base_model().freeze(sparsity=0.5)
        model.save_pretrained(tmp_path / step)
        base = SparseBertForMaskedLM.from_pretrained(tmp_path / "base")
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / step)
        torch.testing.assert_close(logits(loaded), logits(model))


@pytest.mark.parametrize(
    "change, message",
    [
        ("mask", "mask.safetensors"),
        ("no mask", "saved with a mask, but beside it .* there is neither mask_config.json"),
        ("pipe", "mask_logits.safetensors is a pipe"),
        ("heads", "4 heads"),
        ("logits", "not the logits of a search"),
        ("length", "the search of the adapter has mask_length 5, that of the model 12: load the adapter into a model"),
        ("target", "the search of the adapter has target_sparsity 0.6, that of the model None"),
        ("frozen", "still being searched, but that of the model is frozen"),
    ],
)
def test_wrong_masks_of_adapters_are_refused(peft, change, message, tmp_path):
    searching = change in ("pipe", "logits", "length", "target", "frozen")
    model = with_mask(stock_model(), "searching" if searching else "frozen")
    peft.get_peft_model(model, lora(peft)).save_pretrained(tmp_path)
    base = stock_model()
    if change == "mask":
        (tmp_path / "mask.safetensors").write_bytes(b"damaged")
    elif change == "no mask":
        (tmp_path / "mask_config.json").unlink()
    elif change == "pipe":
        (tmp_path / "mask_logits.safetensors").unlink()
        os.mkfifo(tmp_path / "mask_logits.safetensors")
    elif change == "heads":
        base = BertForMaskedLM(BertConfig(**TINY | {"num_attention_heads": 2}))
    elif change == "logits":
        (tmp_path / "mask_logits.safetensors").write_bytes(b"damaged")
    elif change in ("length", "target"):
        base = attach(base, "dam_s", mask_length=LENGTH)
        other = {"mask_length": 5} if change == "length" else {"mask_length": LENGTH, "target_sparsity": 0.6}
        peft.get_peft_model(attach(stock_model(), "dam_s", **other), lora(peft)).save_pretrained(tmp_path)
    else:
        with_mask(base, "frozen")
    with pytest.raises(MaskFileError, match=message):
        peft.PeftModel.from_pretrained(base, tmp_path)


# Sentence-transformers

TEXTS = ["w1 w2 w3 w4 w5 w6 w7 w8", "w4 w5", "w7 w8 w9 w1 w2 w3 w4 w5 w6 w7"]


@pytest.fixture
def sentence_transformers():
    return pytest.importorskip("sentence_transformers")


@pytest.fixture(params=["attached", "sparsebert"])
def encoder(request, tmp_path, word_tokenizer):
    """A base model with a mask, and the folder of it and its tokenizer."""
    torch.manual_seed(3)
    fields = TINY | {"initializer_range": 0.1}
    mask = build_pattern("window", LENGTH, 4, window_size=1)
    if request.param == "attached":
        model = attach(BertModel(BertConfig(**fields)), mask)
    else:
        model = SparseBertModel(SparseBertConfig(**fields, pattern="dense"))
        model.set_mask(mask)
    model.save_pretrained(tmp_path / "encoder")
    word_tokenizer.save_pretrained(tmp_path / "encoder")
    return model.eval(), tmp_path / "encoder"


def embeddings_of(model, tokenizer, side):
    """The means of the states of the stock model with the same weights, under the mask as an additive one."""
    stock = BertModel(BertConfig(**TINY), add_pooling_layer=True).eval()
    stock.load_state_dict(model.state_dict())
    # A copy: the tokenizer keeps the side.
    batch = copy.deepcopy(tokenizer)(TEXTS, padding=True, return_tensors="pt", padding_side=side)
    real = batch.attention_mask.bool()
    keep = model.sparse_attention.mask.to_table(real.shape[1]) & real[:, None, None]
    additive = torch.zeros(keep.shape).masked_fill(~keep, -1e9)
    with torch.no_grad():
        states = stock(batch.input_ids, attention_mask=additive).last_hidden_state
    return (states * real[..., None]).sum(1) / real.sum(1, keepdim=True)


@pytest.mark.parametrize("side", ["right", "left"])
def test_sentences_are_encoded_through_the_mask(sentence_transformers, encoder, side, word_tokenizer, tmp_path):
    model, folder = encoder
    expected = embeddings_of(model, word_tokenizer, side)
    sentences = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    for step in ("loaded", "saved"):
        sentences.tokenizer.padding_side = side
        torch.testing.assert_close(sentences.encode(TEXTS, convert_to_tensor=True), expected, atol=1e-5, rtol=1e-4)
        if step == "loaded":
            sentences.save_pretrained(str(tmp_path / "saved"))
            sentences = sentence_transformers.SentenceTransformer(str(tmp_path / "saved"), device="cpu")


def test_sentences_are_encoded_without_their_padding(sentence_transformers, encoder, word_tokenizer):
    """By `skip_padding`, and in rows that sentence-transformers packs itself where it finds flash attention."""
    model, folder = encoder
    expected = embeddings_of(model, word_tokenizer, "right")
    arguments = {"device": "cpu", "model_kwargs": {"skip_padding": True}}
    sentences = sentence_transformers.SentenceTransformer(str(folder), **arguments)
    sentences[0].unpad_inputs = True  # only a warning
    seen, tokens = [], sum(map(len, word_tokenizer(TEXTS).input_ids))
    layer = sentences.transformers_model.encoder.layer[0]
    layer.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape[:2])))
    torch.testing.assert_close(sentences.encode(TEXTS, convert_to_tensor=True), expected, atol=1e-5, rtol=1e-4)
    packing = DataCollatorWithFlattening(return_position_ids=True, return_flash_attn_kwargs=True, return_seq_idx=True)
    rows = packing([{"input_ids": ids} for ids in word_tokenizer(TEXTS).input_ids])
    rows.pop("labels")
    packed = sentences(dict(rows))["sentence_embedding"]
    torch.testing.assert_close(packed, expected, atol=1e-5, rtol=1e-4)
    assert seen == [(1, tokens)] * 2


def test_sentences_with_an_adapter(sentence_transformers, peft, encoder, tmp_path):
    _, folder = encoder
    sentences = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    assert plan(sentences).length == LENGTH
    sentences.add_adapter(lora(peft))
    mask = build_pattern("window", LENGTH, 4, window_size=2)
    sentences.transformers_model.set_mask(mask)
    sentences.save_pretrained(str(tmp_path / "adapter"))
    again = sentence_transformers.SentenceTransformer(str(tmp_path / "adapter"), device="cpu")
    assert again.transformers_model.sparse_attention.mask == mask
    torch.testing.assert_close(*(model.encode(TEXTS, convert_to_tensor=True) for model in (again, sentences)))


@pytest.mark.parametrize("verb", ["search", "lengthen", "compile", "compare"])
def test_a_module_in_a_folder_of_its_own_is_refused(encoder, tmp_path, monkeypatch, capsys, verb):
    """What lies beside it, such as the pooling, would be lost. Given as a folder, or as a subfolder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(encoder[1], "model/0_Transformer")
    Path("a.txt").write_text("\n\n".join(TEXTS * 4))
    Path("model/modules.json").write_text(json.dumps([{"path": "0_Transformer"}, {"path": "1_Pooling"}]))
    places = ["model/0_Transformer", "model --subfolder 0_Transformer"]
    words = {"lengthen": "--length 64", "search": "--data a.txt --target_sparsity 0.5", "compile": ""}
    words["compare"] = f"{encoder[1]} --data a.txt"
    option = "--model " if verb == "search" else ""
    output = "" if verb == "compare" else "--output_dir out"
    for place in places[: 1 if verb == "compare" else 2]:
        assert main(f"{verb} {option}{place} {words[verb]} {output}".split()) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "0_Transformer is a module of the sentence-transformers model" in said and "save_pretrained" in said
        assert not Path("out").exists()


def test_commands_keep_pooling_and_length(sentence_transformers, word_tokenizer, tmp_path, monkeypatch, capsys):
    """Of a model that takes the first token and normalizes; without the package nobody loads it without its mask."""
    BertModel(BertConfig(**TINY)).save_pretrained(tmp_path / "stock")
    word_tokenizer.save_pretrained(tmp_path / "stock")
    part = sentence_transformers.sentence_transformer.modules
    modules = [part.Transformer(str(tmp_path / "stock"), max_seq_length=8), part.Pooling(32, "cls"), part.Normalize()]
    sentence_transformers.SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(tmp_path / "model"))
    (tmp_path / "a.txt").write_text("\n\n".join(TEXTS * 4))
    text = str(tmp_path / "a.txt")
    words = ["--model", str(tmp_path / "model"), "--data", text, "--validation", text, "--max_length", str(LENGTH)]
    words += ["--target_sparsity", "0.5", "--steps", "0", "--patterns", "false", "--timed", "false"]
    assert main(["search", *words, "--output_dir", str(tmp_path / "masked")]) == 0
    words = ["lengthen", str(tmp_path / "masked"), "--length", "64", "--output_dir", str(tmp_path / "long")]
    assert main(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("`import sparsebert` first") == 2 and "cuts texts to 8 tokens, as before" in said
    for name, length in (("masked", 8), ("long", 64)):
        sentences = sentence_transformers.SentenceTransformer(str(tmp_path / name), device="cpu")
        assert sentences.max_seq_length == length and sentences[1].pooling_mode == "cls"
        torch.testing.assert_close(torch.tensor(sentences.encode(TEXTS)).norm(dim=1), torch.ones(3))
    plugin.disable()
    with pytest.raises(ValueError, match="of the package sparsebert"):
        sentence_transformers.SentenceTransformer(str(tmp_path / "masked"), device="cpu")
    config = tmp_path / "masked" / "config.json"  # as other versions wrote it
    config.write_text(config.read_text().replace("of the package sparsebert", "pip install sparsebert"))
    plugin.enable()
    sentences = sentence_transformers.SentenceTransformer(str(tmp_path / "masked"), device="cpu")
    assert sentences.transformers_model.sparse_attention.mask.length == LENGTH
    assert "pip install" not in sentences.transformers_model.config.to_json_string()


PAGE = Path(__file__).parents[2] / "docs" / "sentence_transformers.md"


def run_page(folder, monkeypatch, pool):
    """Run the blocks of the page in order, on a tiny model instead of the one from the Hub, and shorter documents."""
    monkeypatch.chdir(folder)
    vocabulary = " ".join(f"w{i}" for i in range(60))
    names = {"queries": TEXTS[:2], "documents": [f"{vocabulary} " * 4, vocabulary], "__name__": "__main__"}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S):
        if pool or "pool" not in block:
            block = block.replace("2048, 12,", "2048, 4,").replace("2048", "256").replace("64", "8")
            exec(block.replace("sentence-transformers/all-MiniLM-L6-v2", str(folder)), names)
    return names


@pytest.mark.parametrize("pool", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_page_of_sentence_transformers(sentence_transformers, pool, word_tokenizer, monkeypatch, tmp_path, capsys):
    BertModel(BertConfig(**TINY)).save_pretrained(tmp_path)
    word_tokenizer.save_pretrained(tmp_path)
    names = run_page(tmp_path, monkeypatch, pool)
    assert re.findall(r"^(\d+%) (?:of the|as before)", capsys.readouterr().out, re.M) == ["93%", "93%"]
    model = names["model"]
    mask = model.transformers_model.sparse_attention.mask
    assert mask.sparsity == pytest.approx(0.9, abs=0.01) and mask.length == 256
    again = sentence_transformers.SentenceTransformer("my-model", device="cpu")
    assert again.transformers_model.sparse_attention.mask == mask
    expected = again.encode(names["documents"])
    torch.testing.assert_close(model.encode(names["documents"]), expected, atol=1e-5, rtol=1e-4)
    if pool:
        torch.testing.assert_close(names["embeddings"], expected, atol=1e-5, rtol=1e-4)
