"""The description of a mask and its search: one declaration, from which all lists of fields follow."""

import json
from dataclasses import FrozenInstanceError, fields, replace

import pytest
from transformers import BertConfig, BertModel, TrainingArguments, ViTConfig, ViTModel

from sparsebert import SearchSchedule, SparseBertConfig, SparseBertForMaskedLM, SparseBertTrainer, attach
from sparsebert.learning.mask_description import (
    MAY_CHANGE,
    OWN_FIELDS,
    RESUMED_FIELDS,
    SEARCH_FIELDS,
    STATE_FIELDS,
    MaskDescription,
    MaskFields,
    allowed_fields,
)
from sparsebert.training.runs.resuming import check_checkpoint


# Another value of every field than that of `SEARCHED`.
SEARCHED = {"search": "dam_b", "mask_length": 32, "allow_empty_rows": True, "share_layers": False}
OTHERS = {
    "search": "dam_s", "block_size": 16, "mask_form": "log", "mask_constant": 3.0, "mask_logit_scale": 2.0,
    "temperature": 0.5, "temperature_end": 0.25, "noise_scale": 0.5, "share_noise": True, "hard": False,
    "symmetric": False, "share_layers": True, "diagonal": "keep", "special_tokens": "first",
    "special_rows": False, "last_token": "position", "rest": "mean",
    "sparsity_weight": 1e-3, "target_sparsity": 0.4, "sparsity_scope": "global",
    "initial_decay": 2.0, "initial_sparsity": 0.1, "sparsity_warmup": 0.1, "sparsity_ramp": 0.5, "mask_length": 40,
    "length_policy": "dense", "probability_map": "sparsemax", "mask_seed": 1, "allow_empty_rows": False,
    "skip_padding": True, "pruned": True, "search_progress": 0.5, "base_model": "a/b", "base_model_revision": "c",
}  # fmt: skip
# Only beside another one.
TOGETHER = {
    "query_block_size": {"query_block_size": 128, "symmetric": False},
    "probability_map_kwargs": {"probability_map": "topk", "probability_map_kwargs": {"k": 4}},
    "token_mixers": {"token_mixers": ["average", "attention"]},
    "pattern": {"search": None, "pattern": "dense"},
    "pattern_kwargs": {"search": None, "pattern": "window", "pattern_kwargs": {"window_size": 2}},
    "head_configuration": {"search": None, "pattern": "star_cycle", "head_configuration": "union"},
    "frozen": {"frozen": True},
}


def test_every_field_is_declared_once():
    names = [item.name for item in fields(MaskFields)]
    own = [item.name for item in fields(SparseBertConfig) if item.name not in BertConfig.__dataclass_fields__]
    assert names == list(OWN_FIELDS) == own == [item.name for item in fields(MaskDescription)]
    assert {*RESUMED_FIELDS, *MAY_CHANGE} == set(names) == OTHERS.keys() | TOGETHER.keys()
    assert all(why for why in MAY_CHANGE.values()) and {*STATE_FIELDS} < MAY_CHANGE.keys()
    assert not {*SEARCH_FIELDS, *allowed_fields("dam_s")} & {*STATE_FIELDS}


@pytest.mark.parametrize("field", [*OTHERS, *TOGETHER])
def test_a_run_resumes_with_the_search_of_its_checkpoint_only(tiny_config, tmp_path, field):
    SparseBertForMaskedLM(tiny_config(**SEARCHED)).save_pretrained(tmp_path)
    changes = TOGETHER.get(field) or {field: OTHERS[field]}
    model = SparseBertForMaskedLM(tiny_config(**SEARCHED | changes))
    if field in MAY_CHANGE and field != "frozen":
        check_checkpoint(tmp_path, model)
    else:
        with pytest.raises(ValueError, match=f"({'|'.join(changes)}) was .* is "):
            check_checkpoint(tmp_path, model)


def test_the_trainer_refuses_another_search(tiny_config, tmp_path):
    """Of a search, and of one whose mask was frozen before the checkpoint was saved."""
    arguments = {"max_steps": 4, "save_steps": 1, "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    arguments = TrainingArguments(str(tmp_path), **arguments)
    rows = [{"input_ids": [index] * 4, "labels": [index] * 4} for index in range(8)]

    def trainer(**fields):
        model = SparseBertForMaskedLM(tiny_config(**SEARCHED | {"search": "dam_b", "block_size": 16} | fields))
        schedule = SearchSchedule(end=0.5, sparsity=0.3)
        return SparseBertTrainer(model, arguments, train_dataset=rows, callbacks=[schedule])

    trainer().train()
    for step in (1, 3):  # searching, frozen
        checkpoint = str(tmp_path / f"checkpoint-{step}")
        for field, value in {"sparsity_weight": 1e-3, "block_size": 32, "last_token": "position"}.items():
            with pytest.raises(ValueError, match=f"{field} was .* is "):
                trainer(**{field: value}).train(resume_from_checkpoint=checkpoint)
    trainer(allow_empty_rows=True).train(resume_from_checkpoint=checkpoint)


def test_a_description_is_frozen_and_its_file_is_read_back(tmp_path):
    """A model of another architecture is described by itself, and not by the configuration of a BERT."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model = attach(ViTModel(ViTConfig(**sizes, image_size=16, patch_size=4)), "dam_u", mask_length=17, hard=False)
    description = model.sparse_attention.config
    assert type(description) is MaskDescription and (description.mask_length, description.hard) == (17, False)
    assert model.sparse_attention.carrier.head_size == 8
    with pytest.raises(FrozenInstanceError):
        description.hard = True
    assert replace(description, hard=True).hard and not description.hard
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "search_config.json").read_text())
    assert list(stored) == list(OWN_FIELDS)
    assert ViTModel.from_pretrained(tmp_path).sparse_attention.config == replace(description, base_model="")
    model.freeze(sparsity=0.5)
    assert model.sparse_attention.config.frozen and not description.frozen
    bert = attach(BertModel(BertConfig(**sizes)), "window", mask_length=16)
    assert bert.sparse_attention.config.pattern == "window"
