"""Longer position embeddings: what stays, what is new, masks searched at a shorter length, files."""

import itertools
import json
import os
import shutil

import pytest
import torch
import transformers
from test_attach import MODELS, TEXT, config_of, head_model, row
from transformers import AutoTokenizer

from sparsebert import SparseBertForMaskedLM, SparseMask, attach, extend_positions, load
from sparsebert.commands import main
from sparsebert.models.loading import load_any


LEARNED = ("bert", "roberta", "distilbert", "electra", "xlm-roberta", "camembert", "albert", "mobilebert", "mpnet")
LEARNED += ("ernie", "layoutlm", "roberta-prelayernorm", "xmod")
OFFSETS = dict.fromkeys(("roberta", "xlm-roberta", "camembert", "roberta-prelayernorm", "xmod"), 1)
OFFSETS["mpnet"] = 2  # the padding token of TEXT is 0


def positions_of(model):
    return model.base_model.embeddings.position_embeddings.weight.detach().clone()


@pytest.mark.parametrize("name", [row(name) for name in LEARNED])
def test_models_read_longer_inputs(name):
    model, offset = head_model(name), OFFSETS.get(name, 0)
    known = TEXT["max_position_embeddings"] - offset
    ids = torch.randint(5, 100, (2, 3 * known))
    with torch.no_grad():
        before = model(ids[:, :known]).logits
        with pytest.raises((IndexError, RuntimeError)):
            model(ids)
        old = positions_of(model)
        extend_positions(model, 3 * known)
        torch.testing.assert_close(model(ids[:, :known]).logits, before)  # tiles leave the first positions alone
        assert model(ids).logits.shape[1] == 3 * known
    assert model.config.max_position_embeddings == offset + 3 * known
    torch.testing.assert_close(positions_of(model), torch.cat([old[:offset], *[old[offset:]] * 3]))


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_interpolation(name):
    model, offset = head_model(name), OFFSETS.get(name, 0)
    old = positions_of(model)
    known = len(old) - offset
    extend_positions(model, 2 * known - 1, "interpolate")
    new = positions_of(model)
    torch.testing.assert_close(new[:offset], old[:offset])
    torch.testing.assert_close(new[offset:][::2], old[offset:])
    torch.testing.assert_close(new[offset + 1], (old[offset] + old[offset + 1]) / 2)
    assert model.base_model.embeddings.position_embeddings.weight.requires_grad


def test_embeddings_that_are_not_trained_stay_so():
    model = head_model("bert")
    table = model.base_model.embeddings.position_embeddings
    table.weight.requires_grad_(False)
    extend_positions(model, 80)
    assert not table.weight.requires_grad and table.num_embeddings == 80


def test_a_mask_per_offset_extends(tmp_path):
    model = head_model("bert")
    keep = torch.arange(12) < 3
    mask = SparseMask(keep.expand(1, 4, 12), 12, form="offsets", special_tokens="first_last")
    attach(model, mask)
    extend_positions(model, 80)
    model.save_pretrained(tmp_path)
    model = load(tmp_path).eval()
    ids = torch.randint(5, 100, (1, 80))
    changed = ids.clone()
    changed[0, 40] = 99 if ids[0, 40] != 99 else 98
    with torch.no_grad():
        layer = model.bert(ids, output_hidden_states=True).hidden_states[1]
        other = model.bert(changed, output_hidden_states=True).hidden_states[1]
    moved = (layer - other).abs().amax(-1)[0] > 1e-6
    assert moved.nonzero().flatten().tolist() == [0, 38, 39, 40, 41, 42, 79]
    assert model.sparse_attention.mask.length == 12


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("bert", (40,), "length must be an integer above the model's 40 positions"),
        ("roberta", (39,), "above the model's 39 positions"),
        ("bert", (80.0,), "got 80.0"),
        ("bert", (80, "repeat"), "method must be one of 'tile', 'interpolate', got 'repeat'"),
        ("modernbert", (80,), "type 'modernbert' has no learned embeddings"),
        ("eurobert", (80,), "type 'eurobert'"),
        ("vit", (80,), "type 'vit'"),
    ],
)
def test_errors(name, arguments, message):
    model = transformers.AutoModel.from_config(config_of(name))
    with pytest.raises(ValueError, match=message):
        extend_positions(model, *arguments)
    assert set(LEARNED) < set(MODELS)


@pytest.mark.parametrize(("kind", "mask"), [("stock", False), ("window", True)])
def test_command(checkpoints, tmp_path, capsys, kind, mask):
    command = ["lengthen", checkpoints[kind], "--length", "64", "--output_dir", str(tmp_path)]
    assert main([*command, "--method", "interpolate"]) == 0
    model_class = SparseBertForMaskedLM if mask else transformers.BertForMaskedLM
    model = model_class.from_pretrained(tmp_path)
    assert model.config.max_position_embeddings == AutoTokenizer.from_pretrained(tmp_path).model_max_length == 64
    assert model(torch.ones(1, 64, dtype=torch.long)).logits.shape[1] == 64
    old, new = (
        model_class.from_pretrained(folder).bert.embeddings.position_embeddings.weight
        for folder in (checkpoints[kind], tmp_path)
    )
    torch.testing.assert_close(new[[0, -1]], old[[0, -1]])  # interpolated, not repeated
    assert main(command) == 2
    assert "not empty" in capsys.readouterr().err


def test_the_command_extends_a_mask_that_has_no_rule_for_it(tmp_path, word_tokenizer):
    """As the user says."""
    attach(head_model("bert"), "bigbird", mask_length=16, length_policy="error").save_pretrained(tmp_path / "model")
    word_tokenizer.save_pretrained(tmp_path / "model")
    words = ["lengthen", str(tmp_path / "model"), "--length", "64", "--output_dir", str(tmp_path / "out")]
    assert main(words) == 2 and not (tmp_path / "out").exists()
    assert main([*words, "--length_policy", "dense"]) == 0
    assert load(tmp_path / "out").base_model(torch.ones(1, 64, dtype=torch.long))[0].shape[1] == 64


@pytest.mark.parametrize("mask", [False, True])
def test_the_command_refuses_a_model_that_diverged(tmp_path, capsys, word_tokenizer, mask):
    model = head_model("bert")
    with torch.no_grad():
        model.bert.encoder.layer[0].output.dense.bias[0] = torch.nan
    (attach(model, "window", mask_length=16) if mask else model).save_pretrained(tmp_path / "model")
    word_tokenizer.save_pretrained(tmp_path / "model")
    words = ["lengthen", str(tmp_path / "model"), "--length", "64", "--output_dir", str(tmp_path / "out")]
    assert main(words) == 1 and not (tmp_path / "out").exists()
    assert "layer.0.output.dense.bias is not finite" in capsys.readouterr().err


def test_the_command_goes_on_where_it_was_killed(checkpoints, tmp_path):
    for name in ("_lock", "_unfinished.json", "_unfinished/out/config.json"):
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text("{}")
    words = ["lengthen", checkpoints["stock"], "--length", "64", "--output_dir", str(tmp_path / "out")]
    checkpoint = tmp_path / "out/_unfinished/out/checkpoint-1"
    checkpoint.mkdir()  # of a training, which can go on
    assert main(words) == 2
    checkpoint.rmdir()
    assert main(words) == 0
    assert {"_unfinished", "_unfinished.json"}.isdisjoint(path.name for path in (tmp_path / "out").iterdir())


def test_the_command_moves_the_rest_where_it_was_killed_while_moving(checkpoints, tmp_path, monkeypatch):
    words = ["lengthen", checkpoints["stock"], "--length", "64", "--output_dir"]
    assert main([*words, str(tmp_path / "whole")]) == 0
    names, replace = {path.name for path in (tmp_path / "whole").iterdir()}, os.replace
    for number in range(1, len(names)):
        folder, moves = tmp_path / str(number), itertools.count()

        def move(path, target, folder=folder, moves=moves, number=number):
            if str(target).startswith(f"{folder}/") and "_unfinished" not in str(target) and next(moves) == number:
                raise KeyboardInterrupt
            replace(path, target)

        monkeypatch.setattr(os, "replace", move)
        assert main([*words, str(folder)]) == 130
        monkeypatch.setattr(os, "replace", replace)
        assert (folder / "_unfinished").is_dir()
        assert main([*words, str(folder)]) == 2  # what was finished is moved, and stays
        assert {path.name for path in folder.iterdir()} - {"_lock"} == names - {"_lock"}
        assert load_any(folder).config.max_position_embeddings == 64


def test_the_command_refuses_a_length_that_a_search_cannot_take(tmp_path, capsys, word_tokenizer, tiny_config):
    for saved in (SparseBertForMaskedLM(tiny_config(search="dam_u", mask_length=16)), word_tokenizer):
        saved.save_pretrained(tmp_path / "model")
    words = ["lengthen", str(tmp_path / "model"), "--length", "64", "--output_dir", str(tmp_path / "out")]
    assert main(words) == 2
    assert "length must be at most 16" in (line := capsys.readouterr().err) and line.endswith(
        "length_policy 'dense'\n"
    )


def test_what_sentence_transformers_adds_is_kept(checkpoints, tmp_path):
    shutil.copytree(checkpoints["stock"], tmp_path / "model")
    modules = [{"idx": 0, "path": ""}, {"idx": 1, "path": "1_Pooling"}, {"idx": 2, "path": "../elsewhere"}]
    settings = {"max_seq_length": 16, "do_lower_case": False}
    files = {
        "modules.json": modules,
        "1_Pooling/config.json": {"pooling_mode": "cls"},
        "sentence_bert_config.json": settings,
        "../elsewhere/x": {},
    }
    for name, content in files.items():
        (tmp_path / "model" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "model" / name).write_text(json.dumps(content))
    words = ["lengthen", str(tmp_path / "model"), "--length", "64", "--output_dir", str(tmp_path / "out")]
    assert main(words) == 0
    files["sentence_bert_config.json"] = settings | {"max_seq_length": 64}
    del files["../elsewhere/x"]
    assert {name: json.loads((tmp_path / "out" / name).read_text()) for name in files} == files


@pytest.mark.parametrize("name", ["modules.json", "sentence_bert_config.json"])
def test_damaged_files_of_sentence_transformers_are_named(checkpoints, tmp_path, caplog, name):
    shutil.copytree(checkpoints["stock"], tmp_path / "model")
    (tmp_path / "model/modules.json").write_text("[]")
    (tmp_path / "model" / name).write_text('{"max_seq')
    words = ["lengthen", str(tmp_path / "model"), "--length", "64", "--output_dir", str(tmp_path / "out")]
    assert main(words) == 0 and f"{name} is damaged" in caplog.text


def test_the_command_leaves_no_mask_of_another_model(checkpoints, tmp_path):
    attach(head_model("bert"), "window", mask_length=16).save_pretrained(tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    assert {"mask_config.json", "mask.safetensors"} < before
    assert (
        main(["lengthen", checkpoints["stock"], "--length", "64", "--output_dir", str(tmp_path), "--overwrite"]) == 0
    )
    assert not {"mask_config.json", "mask.safetensors", "_unfinished"} & {path.name for path in tmp_path.iterdir()}
    assert not hasattr(transformers.AutoModel.from_pretrained(tmp_path), "sparse_attention")
