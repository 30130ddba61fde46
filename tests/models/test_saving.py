"""What is saved is what is loaded, for every search, and a folder holds one state of a mask."""

import copy
import hashlib
import json
from dataclasses import replace

import pytest
import torch
from conftest import TINY, covering
from transformers import AutoModel, BertConfig, BertModel

from sparsebert import (
    SEARCHES,
    MaskFileError,
    SparseBertConfig,
    SparseBertForMaskedLM,
    SparseBertLMHeadModel,
    SparseBertModel,
    SparseMask,
    attach,
    build_pattern,
    detach,
    load,
    plugin,
)
from sparsebert.analysis.saved_runs import read_run
from sparsebert.learning.mask_description import MASK_FORMS


TARGET = {"target_sparsity": 0.6, "initial_sparsity": 0.0}
KINDS = {
    "penalty": {},
    "target": TARGET,
    "signed": TARGET | {"symmetric": False},
    "exact": TARGET | {"hard": True, "noise_scale": 0.0, "sparsity_scope": "global", "share_layers": False},
}
ONE_LAYER = TINY | {"num_hidden_layers": 1, "vocab_size": 10, "intermediate_size": 8}


def hashes(folder):
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.name != "README.md"
    }


def searching_model(attached, search, **fields):
    fields = {"mask_length": 40, "block_size": 16, "allow_empty_rows": True} | fields
    if attached:
        return attach(BertModel(BertConfig(**ONE_LAYER)), search, **fields)
    return SparseBertModel(SparseBertConfig(**ONE_LAYER, search=search, **fields))


@pytest.mark.parametrize(("search", "kind", "attached"), covering([*SEARCHES] * 2, [*KINDS], [False, True]))
def test_search_is_loaded_as_it_was_saved(tmp_path, search, kind, attached):
    fields = KINDS[kind] if SEARCHES[search].stochastic else KINDS[kind] | {"hard": False}
    if kind == "signed" and SEARCHES[search].toeplitz:
        fields = fields | {"special_rows": False}
    for form in MASK_FORMS:
        model = searching_model(attached, search, mask_form=form, **fields)
        with torch.no_grad():
            model.sparse_attention.mask_logits.add_(torch.randn_like(model.sparse_attention.mask_logits) / 10)
        if form == "log":
            model.sparse_attention.learned.prune(model.sparse_attention.mask_logits, 0.3)
            model.sparse_attention.start_pruning()
        model.sparse_attention.set_progress(0.2)
        folders = [tmp_path / f"{form}{index}" for index in range(2)]
        model.save_pretrained(folders[0])
        loaded = load(folders[0])
        loaded.save_pretrained(folders[1])
        assert hashes(folders[0]) == hashes(folders[1])
        before, after = model.sparse_attention, loaded.sparse_attention
        assert torch.equal(after.mask_logits, before.mask_logits)
        assert after.thresholded_mask() == before.thresholded_mask()
        assert torch.equal(after.mask_probs(), before.mask_probs())
        # What `analyze` reports of a checkpoint is what was learned so far.
        run = read_run(folders[0])
        assert run.mask == before.thresholded_mask() and torch.equal(run.probs, before.mask_probs())
        assert loaded.freeze() == copy.deepcopy(model).freeze()
        frozen = [tmp_path / f"{form}_frozen{index}" for index in range(2)]
        loaded.save_pretrained(frozen[0])
        load(frozen[0]).save_pretrained(frozen[1])
        assert hashes(frozen[0]) == hashes(frozen[1])


@pytest.mark.parametrize("attached", [False, True], ids=["own", "attached"])
@pytest.mark.parametrize("search", ["dam_s", "dam_b", "dam_u"])
def test_what_symmetric_meant_before_distances_had_a_sign(tmp_path, search, attached):
    """It said nothing about distances in files that do not know of `special_rows`, and logits are as many as then."""
    signed = searching_model(attached, search, symmetric=False)
    signed.save_pretrained(tmp_path / "new")
    assert load(tmp_path / "new").sparse_attention.search.symmetric is False
    old = signed if search == "dam_u" else searching_model(attached, search)
    old.save_pretrained(tmp_path / "old")
    path = tmp_path / "old" / ("search_config.json" if attached else "config.json")
    fields = json.loads(path.read_text())
    fields.pop("special_rows", None)
    path.write_text(json.dumps(fields | {"symmetric": False}))
    loaded = load(tmp_path / "old").sparse_attention
    assert loaded.search.symmetric is (search != "dam_u")
    assert torch.equal(loaded.mask_logits, old.sparse_attention.mask_logits)


@pytest.mark.parametrize("attached", [False, True], ids=["own", "attached"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_progress_of_a_search_is_loaded_as_it_was_saved_in_any_dtype(tmp_path, attached, dtype):
    model = searching_model(attached, "dam_u", target_sparsity=0.99)
    model.sparse_attention.set_progress(0.4)
    model.save_pretrained(tmp_path / "0")
    loaded = AutoModel.from_pretrained(tmp_path / "0", dtype=dtype)
    assert loaded.dtype == dtype
    loaded.to(dtype).save_pretrained(tmp_path / "1")
    again = AutoModel.from_pretrained(tmp_path / "1", dtype=torch.float32)
    for found in (loaded.sparse_attention, again.sparse_attention):
        assert torch.equal(found.progress, model.sparse_attention.progress)
        assert found.mask_logits.dtype == torch.float32
        assert torch.equal(found.mask_logits, model.sparse_attention.mask_logits)
    loaded.sparse_attention.set_progress(0.9985)
    assert loaded.sparse_attention.progress.item() == pytest.approx(0.9985, abs=1e-6)
    model.sparse_attention.set_progress(0.9985)
    assert loaded.freeze() == model.freeze()


@pytest.mark.parametrize("attached", [False, True], ids=["own", "attached"])
def test_a_search_keeps_the_model_that_it_began_with(tmp_path, attached):
    for base in ("user/base", ""):
        model = searching_model(attached, "dam_s")
        model.sparse_attention.carrier = replace(model.sparse_attention.carrier, name=base)
        for name in ("0", "1"):
            model.save_pretrained(tmp_path / name)
            model = load(tmp_path / name)
        assert model.freeze(sparsity=0.5).metadata["base_model"] == (base or None)
        model.save_pretrained(tmp_path / "frozen")
        assert load(tmp_path / "frozen").sparse_attention.mask.metadata["base_model"] == (base or None)


def test_heads_that_share_an_encoder_save_its_mask(tmp_path):
    """The configuration that the mask changes is that of the first head."""
    fields = {"search": "dam_u", "mask_length": 40, "target_sparsity": 0.5}
    first, second = (SparseBertForMaskedLM(SparseBertConfig(**ONE_LAYER, **fields)) for _ in range(2))
    second.bert = first.bert
    first.sparse_attention.set_progress(0.25)
    second.save_pretrained(tmp_path)
    assert load(tmp_path).sparse_attention.progress == 0.25
    mask = first.freeze()
    second.save_pretrained(tmp_path)
    assert load(tmp_path).sparse_attention.mask == mask
    second.bert = SparseBertForMaskedLM(SparseBertConfig(**ONE_LAYER, **fields)).bert
    second.save_pretrained(tmp_path)
    loaded = load(tmp_path).sparse_attention
    assert loaded.searching and torch.equal(loaded.mask_logits, second.sparse_attention.mask_logits)


STATE_FILES = {"mask_config.json", "mask.safetensors", "search_config.json", "mask_probs.safetensors"}
FROZEN = {"mask_config.json", "mask.safetensors"}


def model_in_state(attached, search):
    """A model and the files that its state has."""
    if search:
        return searching_model(attached, "dam_s"), {"search_config.json"} if attached else set()
    model = searching_model(attached, "dam_u")
    model.freeze(sparsity=0.3)
    return model, FROZEN


@pytest.mark.parametrize("second", [(False, False), (False, True), (True, False), (True, True)], ids=str)
@pytest.mark.parametrize("first", [(False, False), (False, True), (True, False), (True, True)], ids=str)
def test_folder_holds_one_state_of_a_mask(tmp_path, first, second):
    model_in_state(*first)[0].save_pretrained(tmp_path)
    if second[1]:
        (tmp_path / "mask_probs.safetensors").touch()
    model, files = model_in_state(*second)
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} & STATE_FILES == files
    loaded = load(tmp_path).sparse_attention
    assert loaded.searching == model.sparse_attention.searching and loaded.mask == model.sparse_attention.mask
    if second[1]:
        with pytest.raises(MaskFileError, match="no such file|still being searched"):
            SparseMask.from_pretrained(tmp_path)


@pytest.mark.parametrize("second", [False, True], ids=["frozen over search", "search over frozen"])
def test_interrupted_save_does_not_pass_for_the_old_state(tmp_path, monkeypatch, second):
    model_in_state(True, not second)[0].save_pretrained(tmp_path)
    model, _ = model_in_state(True, second)
    monkeypatch.setattr(type(model), "_save_mask", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.save_pretrained(tmp_path)
    with pytest.raises(MaskFileError, match="no mask_config.json and no search_config.json"):
        load(tmp_path)


def test_a_mask_that_is_missing_is_missed(tmp_path, caplog):
    attached_bert("window").save_pretrained(tmp_path / "model")
    path = tmp_path / "model/config.json"
    (tmp_path / "model/mask_config.json").rename(tmp_path / "mask_config.json")
    with pytest.raises(
        MaskFileError,
        match="saved with a mask, but beside it .* delete attn_implementation, how_to_load, auto_map from",
    ):
        BertModel.from_pretrained(tmp_path / "model")
    config = json.loads(path.read_text())
    saved = {"how_to_load", "attn_implementation", "auto_map"}
    path.write_text(json.dumps({name: config[name] for name in config.keys() - saved}))
    BertModel.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "dense")
    # The code of others stays in the configuration.
    (tmp_path / "mask_config.json").rename(tmp_path / "model/mask_config.json")
    config["auto_map"]["AutoModelForTokenClassification"] = "theirs.Tagger"
    path.write_text(json.dumps(config))
    others = BertModel.from_pretrained(tmp_path / "model").config.auto_map
    assert others == {"AutoModelForTokenClassification": "theirs.Tagger"}
    caplog.clear()
    BertModel.from_pretrained(tmp_path / "dense")
    config = (tmp_path / "dense/config.json").read_text()
    assert not caplog.text and "how_to_load" not in config and "auto_map" not in config


# A mask beside a model


def attached_bert(name, **fields):
    torch.manual_seed(0)
    return attach(BertModel(BertConfig(**ONE_LAYER)), name, mask_length=40, **fields)


def test_a_mask_saved_alone_ends_the_search_of_an_attached_model(tmp_path):
    model = attached_bert("dam_s")
    model.save_pretrained(tmp_path)
    assert load(tmp_path).sparse_attention.searching and (tmp_path / "search_config.json").exists()
    mask = copy.deepcopy(model).freeze(sparsity=0.5)
    mask.save_pretrained(tmp_path)
    assert not (tmp_path / "search_config.json").exists()
    loaded = load(tmp_path)
    assert loaded.sparse_attention.mask == mask == read_run(tmp_path).mask
    assert all(torch.equal(loaded.state_dict()[name], weight) for name, weight in detach(model).state_dict().items())


def test_a_mask_is_not_saved_alone_beside_a_search_that_would_ignore_it(tmp_path):
    model = SparseBertModel(SparseBertConfig(**ONE_LAYER, search="dam_s"))
    model.save_pretrained(tmp_path)
    before = hashes(tmp_path)
    mask = copy.deepcopy(model).freeze(sparsity=0.5)
    with pytest.raises(ValueError, match="holds a SparseBERT that is being searched"):
        mask.save_pretrained(tmp_path)
    assert hashes(tmp_path) == before and load(tmp_path).sparse_attention.searching
    model.set_mask(mask)
    model.save_pretrained(tmp_path)
    mask.save_pretrained(tmp_path)
    assert load(tmp_path).sparse_attention.mask == mask


def test_a_mask_is_not_saved_alone_beside_a_pattern_that_would_ignore_it(tmp_path):
    """The code beside the model would run this mask, and the package the pattern."""
    model = SparseBertModel(SparseBertConfig(**ONE_LAYER, pattern="window", mask_length=40))
    model.save_pretrained(tmp_path)
    before = hashes(tmp_path)
    with pytest.raises(ValueError, match="holds a SparseBERT with the pattern 'window', and would not use a mask"):
        build_pattern("bigbird", 40, 4).save_pretrained(tmp_path)
    assert hashes(tmp_path) == before
    load(tmp_path).save_pretrained(tmp_path)
    assert SparseMask.from_pretrained(tmp_path) == model.sparse_attention.mask
    (tmp_path / "config.json").write_text("[]")  # not of a model
    build_pattern("bigbird", 40, 4).save_pretrained(tmp_path)


def test_a_model_without_a_mask_saved_over_one_with_it_is_noticed(tmp_path, caplog):
    """Its files are those of any stock model: only the weights tell."""
    model = attached_bert("window")
    model.save_pretrained(tmp_path)
    before = hashes(tmp_path)
    loaded = load(tmp_path)
    loaded.save_pretrained(tmp_path)
    assert hashes(tmp_path) == before and "weights" not in caplog.text
    assert not {"model_weights_sample"} & loaded.sparse_attention.mask.metadata.keys()
    loaded.save_pretrained(tmp_path, variant="fp16")
    load(tmp_path)
    (tmp_path / "model.fp16.safetensors").unlink()  # as in the cache of the Hub, which fetches one of them
    load(tmp_path)
    assert "weights" not in caplog.text
    stock = detach(loaded)
    with torch.no_grad():
        stock.encoder.layer[0].output.dense.bias += 1e-3
    plugin.disable()  # as in a process without this package
    stock.save_pretrained(tmp_path)
    plugin.enable()
    again = load(tmp_path)
    assert "the weights are not those that the mask was saved with" in caplog.text
    caplog.clear()
    again.save_pretrained(tmp_path)
    load(tmp_path)
    assert "weights" not in caplog.text


@pytest.mark.parametrize("state", ["window", "dam_s", "own"])
def test_a_model_without_a_mask_replaces_one_with_it(tmp_path, caplog, state):
    """With its mask, code and card; the files of others stay, and so does a mask that no model was saved with."""
    model = SparseBertModel(SparseBertConfig(**ONE_LAYER)) if state == "own" else attached_bert(state)
    model.save_pretrained(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "metrics.json").write_text("{}")
    stock = BertModel(BertConfig(**ONE_LAYER)) if state == "own" else detach(model)
    stock.save_pretrained(tmp_path, is_main_process=False)
    assert (tmp_path / "README.md").is_file()
    for told in (True, False):
        caplog.clear()
        stock.save_pretrained(str(tmp_path))
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {"config.json", "model.safetensors", "notes.txt", "metrics.json"}
        assert (f"{tmp_path}: the mask that was saved here is removed" in caplog.text) is told
    assert type(AutoModel.from_pretrained(tmp_path)) is BertModel
    attached_bert("window").save_pretrained(tmp_path)
    (tmp_path / "README.md").write_text("# Mine")
    (tmp_path / "search_config.json").write_text('{"of": "a tuner"}')
    stock.save_pretrained(tmp_path)
    kept = {path.name for path in tmp_path.iterdir()} - names
    assert kept == {"README.md", "search_config.json"}


def test_a_mask_written_beside_any_weights_is_no_cause_for_a_warning(tmp_path, caplog):
    model = BertModel(BertConfig(**ONE_LAYER))
    mask = attached_bert("window").sparse_attention.mask
    mask.save_pretrained(tmp_path / "before")
    model.save_pretrained(tmp_path / "before")
    model.save_pretrained(tmp_path / "after")
    mask.save_pretrained(tmp_path / "after")
    for folder in (tmp_path / "before", tmp_path / "after"):
        assert load(folder).sparse_attention.mask == mask
    assert "weights" not in caplog.text


def test_temperature_of_the_search_is_not_that_of_generation(tmp_path):
    model = SparseBertLMHeadModel(SparseBertConfig(**TINY, search="dam_s", temperature=0.5, is_decoder=True))
    assert model.generation_config.temperature is None
    model.generation_config.update(temperature=0.7, do_sample=True)
    model.save_pretrained(tmp_path)
    loaded = SparseBertLMHeadModel.from_pretrained(tmp_path)
    assert (loaded.generation_config.temperature, loaded.config.temperature) == (0.7, 0.5)


@pytest.mark.parametrize("attached", [False, True], ids=["own", "attached"])
def test_layers_removed_from_the_model_alone(tmp_path, attached):
    mask = SparseMask(torch.ones(2, 4, 20, 20, dtype=torch.bool), 20)
    if attached:
        model = attach(BertModel(BertConfig(**TINY)), mask)
    else:
        model = SparseBertModel(SparseBertConfig(**TINY, pattern="window", mask_length=20))
        model.set_mask(mask)
    model.encoder.layer = model.encoder.layer[:1]
    model.config.num_hidden_layers = 1
    with pytest.raises(ValueError, match="the mask has 2 layers, the configuration 1 with attention"):
        model.save_pretrained(tmp_path / "cut")
    assert not (tmp_path / "cut").exists()
    shared = mask.replace(keep=mask.keep[:1], rest="mean", rest_bias=torch.ones(2, 4))
    model.sparse_attention._mask = shared
    with pytest.raises(ValueError, match="the mask has 2 layers, the configuration 1 with attention"):
        model.save_pretrained(tmp_path / "cut")
    stock = BertModel(BertConfig(**TINY | {"num_hidden_layers": 1}))
    with pytest.raises(ValueError, match="for 1 layer.s., its rest_bias for 2 and 4 heads .* the model has 1 layers"):
        attach(stock, shared)
    attach(stock, mask.replace(keep=mask.keep[:1])).save_pretrained(tmp_path / "cut")
    assert load(tmp_path / "cut").sparse_attention.mask.num_layers == 1
