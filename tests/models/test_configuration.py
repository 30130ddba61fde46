"""What the configuration accepts, what it says when it does not, and what survives a round trip."""

import math

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError
from transformers import AutoConfig, AutoModelForMaskedLM, BertConfig, RobertaConfig
from transformers.utils import logging

from sparsebert import SparseBertConfig, SparseBertForMaskedLM, SparseBertModel
from sparsebert.learning.mask_search import described_search


# By the type that is allowed.
WRONG_TYPES = {
    "str": {"pattern": 3, "search": True, "mask_form": 1, "diagonal": False, "special_tokens": 2, "last_token": 1}
    | {"length_policy": 1},
    "dict": {"pattern_kwargs": "window_size=3"},
    "int": {"mask_seed": 1.5, "block_size": 64.0, "mask_length": 12.5},
    "bool": {"frozen": "no", "allow_empty_rows": 1, "hard": "true", "symmetric": 0, "share_layers": None},
    "float": {"mask_constant": "10", "mask_logit_scale": None, "temperature": [1.0], "sparsity_weight": "1e-4"}
    | {"target_sparsity": "0.9"},
}
OUT_OF_RANGE = {
    "'window'": [("pattern", "windw")],
    "'sequential', 'union', 'multihead'": [("head_configuration", "parallel")],
    "'soft', 'dam_u', 'dam_s', 'dam_b', 'vertical_slash'": [("search", "dam")],
    "16, 32, 64, 128": [("block_size", 48)],
    "'additive', 'log', 'multiplicative'": [("mask_form", "add")],
    "'learned', 'keep', 'remove'": [("diagonal", "drop")],
    "'none', 'first', 'first_last'": [("special_tokens", "last")],
    "'real', 'position'": [("last_token", "padding")],
    "'extend', 'dense', 'error'": [("length_policy", "crop")],
    "[0, ": [("mask_seed", -1), ("sparsity_weight", -1e-9)],
    "[1, ": [("mask_length", 0)],
    "(0, 1)": [("target_sparsity", value) for value in (0.0, 1.0, -0.5, 90.0)],
    "(0, ": [("mask_constant", 0.0), ("mask_constant", math.inf), ("mask_logit_scale", -1.0)]
    + [("temperature", value) for value in (0.0, math.nan, 10**400)],
}


@pytest.mark.parametrize(
    "field, value, said",
    [
        *((field, value, kind) for kind, fields in WRONG_TYPES.items() for field, value in fields.items()),
        *((field, value, f"{said}|got {value!r}") for said, values in OUT_OF_RANGE.items() for field, value in values),
    ],
    ids=str,
)
def test_wrong_type_or_value_out_of_range(field, value, said):
    fields = {"pattern": "strided_cycle"} if field == "head_configuration" else {}
    with pytest.raises(StrictDataclassFieldValidationError) as error:
        SparseBertConfig(**fields | {field: value})
    assert all(words in str(error.value) for words in (repr(field), repr(value), *said.split("|")))


def test_assignment_is_checked_too(tiny_config):
    config = tiny_config()
    with pytest.raises(StrictDataclassFieldValidationError, match="temperature"):
        config.temperature = -1.0


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"search": "soft", "hard": True}, ["hard", "'soft'"]),
        ({"pattern": "window", "search": "soft"}, ["'window'", "'soft'", "exclude"]),
        ({"pattern_kwargs": {"window_size": 3}}, ["pattern_kwargs", "pattern"]),
        ({"head_configuration": "union", "search": "dam_s"}, ["head_configuration", "pattern"]),
        ({"is_decoder": True, "special_tokens": "first_last"}, ["first_last", "decoder", "'first'"]),
        ({"search": "dam_u", "length_policy": "extend"}, ["extend", "'dam_u'", "dam_s"]),
        ({"search": "soft", "length_policy": "extend"}, ["extend", "'soft'", "dam_s"]),
        ({"search": "vertical_slash", "length_policy": "extend"}, ["extend", "'vertical_slash'", "dam_s"]),
        ({"mask_length": 2}, ["mask_length", "3", "got 2"]),
        ({"hidden_act": "eval"}, ["unknown hidden_act 'eval'; "]),
        ({"hidden_act": "gelo"}, ["unknown hidden_act 'gelo'; did you mean 'gelu'?"]),
        ({"sparsity_warmup": 0.6, "sparsity_ramp": 0.5}, ["sparsity_warmup", "at most sparsity_ramp"]),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_fields_that_exclude_each_other(tiny_config, fields, said):
    with pytest.raises(StrictDataclassClassValidationError) as error:
        tiny_config(**fields)
    assert all(words in str(error.value) for words in said)


def test_defaults(tiny_config):
    config = tiny_config()
    assert (config.search, config.pattern, config.frozen) == ("dam_s", None, False)
    assert config.mask_length == 40
    assert tiny_config(max_position_embeddings=1024).mask_length == 512
    assert tiny_config(pattern="window").search is None
    assert tiny_config(frozen=True).search is None
    assert (config.mask_logit_scale, config.temperature, config.hard, config.symmetric) == (10.0, 1.0, None, True)
    assert (config.mask_form, config.share_layers, config.diagonal, config.last_token) == (None, True, None, None)


@pytest.mark.parametrize(
    "search, constant, special_tokens",
    [
        ("soft", 10.0, "none"),
        ("dam_u", 1e4, "none"),
        ("dam_s", 1e4, "first_last"),
        ("dam_b", 1e4, "first_last"),
        ("vertical_slash", 1e4, "first_last"),
    ],
)
def test_defaults_that_depend_on_the_search(tiny_config, search, constant, special_tokens):
    made = SparseBertModel(tiny_config(search=search)).sparse_attention.search
    assert (made.mask_constant, made.special_tokens) == (constant, special_tokens)
    assert (made.last_token, made.diagonal, made.fixed_diagonal) == ("real", "learned", None)
    assert made.length_policy == ("extend" if search in ("dam_s", "dam_b") else "error")
    config = tiny_config(search=search, is_decoder=True)
    decoder = described_search(config, config.carrier)
    assert decoder.special_tokens == ("none" if special_tokens == "none" else "first")
    config = tiny_config(search=search, special_tokens="first", mask_constant=7)
    asked = described_search(config, config.carrier)
    assert (asked.special_tokens, asked.mask_constant) == ("first", 7.0)


FULL = {
    "a search": {
        "search": "dam_b", "block_size": 16, "mask_form": "log", "mask_constant": 50.0, "mask_logit_scale": 3.0,
        "temperature": 0.5, "hard": False, "symmetric": False, "share_layers": False, "diagonal": "remove",
        "special_tokens": "first", "special_rows": False, "last_token": "position", "sparsity_weight": 1e-3,
        "target_sparsity": 0.75, "mask_length": 32, "length_policy": "dense",
    },
    "a pattern": {
        "pattern": "strided_cycle", "pattern_kwargs": {"stride": 3}, "head_configuration": "multihead",
        "mask_seed": 5, "allow_empty_rows": True, "mask_length": 24,
    },
}  # fmt: skip


@pytest.mark.parametrize("fields", FULL.values(), ids=FULL)
def test_round_trip(tiny_config, tmp_path, fields):
    config = tiny_config(**fields)
    config.save_pretrained(tmp_path)
    for loaded in (SparseBertConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is SparseBertConfig
        assert loaded.to_dict() | {"_name_or_path": ""} == config.to_dict()
        assert {name: getattr(loaded, name) for name in fields} == fields
        assert loaded._attn_implementation == "sparse_auto"
    assert SparseBertConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()


@pytest.mark.parametrize(
    "overrides, search, pattern",
    [
        ({}, "dam_s", None),
        ({"search": "soft", "special_tokens": "first"}, "soft", None),
        ({"pattern": "window", "pattern_kwargs": {"window_size": 2}}, None, "window"),
    ],
    ids=["default", "search", "pattern"],
)
def test_stock_configuration_takes_overrides(tiny_config, tmp_path, overrides, search, pattern):
    tiny_config(BertConfig).save_pretrained(tmp_path)
    config = SparseBertConfig.from_pretrained(tmp_path, **overrides)
    assert (config.search, config.pattern, config.mask_length) == (search, pattern, 40)
    assert (config.hidden_size, config.vocab_size, config.num_hidden_layers) == (32, 100, 2)
    assert {name: getattr(config, name) for name in overrides} == overrides


def test_overrides_are_checked_and_a_saved_search_can_be_replaced(tiny_config, tmp_path):
    tiny_config(search="dam_u").save_pretrained(tmp_path)
    with pytest.raises(StrictDataclassFieldValidationError, match="search"):
        SparseBertConfig.from_pretrained(tmp_path, search="dam")
    with pytest.raises(StrictDataclassClassValidationError, match="exclude each other"):
        SparseBertConfig.from_pretrained(tmp_path, pattern="window", search="soft")
    config = SparseBertConfig.from_pretrained(tmp_path, pattern="window")
    assert (config.pattern, config.search) == ("window", None)
    assert SparseBertConfig.from_pretrained(tmp_path, search="soft").search == "soft"
    config.save_pretrained(tmp_path)
    config = SparseBertConfig.from_pretrained(tmp_path, search="dam_s")
    assert (config.pattern, config.search, config.frozen) == (None, "dam_s", False)


def test_a_new_search_takes_nothing_from_that_of_the_checkpoint(tiny_config, tmp_path):
    searching, frozen = tmp_path / "searching", tmp_path / "frozen"
    model = SparseBertForMaskedLM(tiny_config(search="dam_s", target_sparsity=0.7, sparsity_scope="global"))
    torch.nn.init.normal_(model.sparse_attention.mask_logits)
    model.sparse_attention.set_progress(0.2)
    model.save_pretrained(searching)
    model.freeze()
    assert model.config.search_progress is None
    model.save_pretrained(frozen)
    words = model.bert.embeddings.word_embeddings.weight
    for source in (searching, frozen):
        for search in ("dam_s", "dam_u"):
            made = SparseBertForMaskedLM.from_pretrained(source, search=search, sparsity_weight=0.1)
            assert made.config.target_sparsity is None and made.sparse_attention.search.sparsity_scope == "head"
            assert made.sparse_attention.mask_logits.abs().max() < 0.01 and made.sparse_attention.progress == 1
            assert torch.equal(made.bert.embeddings.word_embeddings.weight, words)
    for search in ("dam_s", "dam_u"):
        auto = AutoModelForMaskedLM.from_pretrained(searching, search=search)
        assert auto.sparse_attention.mask_logits.abs().max() < 0.01
        assert not any("new" in name for name in auto.config.to_dict())
        torch.nn.init.ones_(auto.sparse_attention.mask_logits)
        auto.save_pretrained(tmp_path / "later")
        config = AutoConfig.from_pretrained(searching, search=search)
        for given in (config, auto.config):
            later = SparseBertForMaskedLM.from_pretrained(tmp_path / "later", config=given)
            assert torch.equal(later.sparse_attention.mask_logits, auto.sparse_attention.mask_logits)
    again = SparseBertForMaskedLM.from_pretrained(searching)
    assert again.sparse_attention.mask_logits.abs().max() > 0.5
    with pytest.raises(RuntimeError, match="word_embeddings.weight.* have other sizes"):
        SparseBertForMaskedLM.from_pretrained(searching, search="dam_u", vocab_size=99)


def test_fields_of_a_derived_configuration_stay(tiny_config, tmp_path):
    class OwnConfig(SparseBertConfig):
        own_field: int = 3

    for fields in ({"search": "dam_s"}, {"frozen": True}):
        OwnConfig(**tiny_config(**fields).to_dict() | {"own_field": 7}).save_pretrained(tmp_path)
        assert OwnConfig.from_pretrained(tmp_path, search="dam_u").own_field == 7
        assert OwnConfig.from_pretrained(tmp_path, own_field=8).own_field == 8


@pytest.mark.parametrize("length, said", [(40, 0), (41, 1)])
def test_a_mask_longer_than_any_input_is_said_once(monkeypatch, tiny_config, length, said):
    warned = []
    monkeypatch.setattr("sparsebert.learning.mask_description.logger.warning_once", warned.append)
    tiny_config(mask_length=length, max_position_embeddings=40)
    assert len(warned) == said and all("longer than any input that the model takes" in line for line in warned)


@pytest.mark.parametrize("fields", [{"target_sparsity": 0.9}, {"mask_length": 16}, {"special_tokens": "none"}])
def test_fields_that_a_frozen_mask_cannot_follow(tiny_config, tmp_path, fields):
    model = SparseBertModel(tiny_config(search="dam_s", target_sparsity=0.7))
    model.freeze()
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{next(iter(fields))} .* has no meaning for a frozen mask"):
        SparseBertModel.from_pretrained(tmp_path, **fields)
    loaded = SparseBertModel.from_pretrained(tmp_path, target_sparsity=0.7, length_policy="error")
    assert loaded.sparse_attention.mask.length_policy == "error"


def test_overrides_reach_the_model(tiny_config, tmp_path):
    SparseBertForMaskedLM(tiny_config(search="dam_u")).save_pretrained(tmp_path)
    model = SparseBertForMaskedLM.from_pretrained(tmp_path, temperature=0.25, sparsity_weight=0.5)
    assert (model.sparse_attention.config.temperature, model.config.sparsity_weight) == (0.25, 0.5)


@pytest.mark.parametrize("parameter, nearest", [("window", "window_size"), ("num_global", "num_global_tokens")])
def test_unknown_pattern_parameter_names_the_nearest(tiny_config, parameter, nearest):
    with pytest.raises(ValueError, match=nearest):
        SparseBertModel(tiny_config(pattern="window", pattern_kwargs={parameter: 1}))


def test_only_another_architecture_is_warned_of(tiny_config, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.get_logger("transformers"), "propagate", True)
    for kind, warned in ((BertConfig, False), (RobertaConfig, True)):
        tiny_config(kind).save_pretrained(tmp_path)
        config = SparseBertConfig.from_pretrained(tmp_path, pattern="window")
        assert config.pattern == "window" and (config.model_type == "sparsebert") != warned
        assert ("instantiate a model of type" in caplog.text) == warned
