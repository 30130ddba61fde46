"""Mistakes of a careful user: each ends before any work in one line that names what is wrong, with exit code 2."""

import json
import os
import shutil
from pathlib import Path

import pytest
from huggingface_hub.errors import HTTPError
from transformers import AutoTokenizer

from sparsebert.commands import main
from sparsebert.masks.sparse_mask import SparseMask
from sparsebert.models.loading import load


DEEP = "[" * 100_000 + "]" * 100_000
HALF = r'"w1 \ud800 w2"'


def finetuning_words(model, data, *flags):
    fields = {"task": "rte", "model": model, "data": data, "max_length": 32, "max_steps": 2, "use_cpu": True}
    return ["finetune", *(str(word) for name, value in fields.items() for word in (f"--{name}", value)), *flags]


# Recipes


@pytest.mark.parametrize(
    "content, said",
    [
        (b"1:\n  max_steps: 3\n", "unknown section '1'"),
        (b"data:\n  1: 2\n", "unknown field in section 'data' '1'"),
        (b"data:\n  null: 2\n", "unknown field in section 'data' 'None'"),
        (b"training:\n  max_steps: 3\n  max_steps: 4\n", "the key 'max_steps' comes twice"),
        (b"data: {}\ndata: {}\n", "the key 'data' comes twice"),
        ("data:\n  text: caf\u00e9.txt\n".encode("latin-1"), "not UTF-8"),
        ("data:\n  nsp: false\n".encode("utf-16"), "not UTF-8"),
        (b"data: " + DEEP.encode(), "nested too deeply"),
        (b"data:\n  text: \x01\n", "recipe.yaml"),
    ],
    ids=["section", "number", "null", "field twice", "section twice", "Latin-1", "UTF-16", "deep", "control"],
)
def test_recipes(refused, tmp_path, content, said):
    (tmp_path / "recipe.yaml").write_bytes(content)
    line = refused(["pretrain", tmp_path / "recipe.yaml", "--output_dir", tmp_path / "run"])
    assert said in line
    assert "recipe.yaml" in line or "unknown" in line


# Fields of pre-training


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--max_length 64", "max_length must be at most the model's 40 positions (max_position_embeddings), got 64"),
        ("--gradient_accumulation_steps 0", "gradient_accumulation_steps must be an integer of at least 1, got 0"),
        ("--per_device_train_batch_size 0", "per_device_train_batch_size must be an integer of at least 1, got 0"),
        ("--num_attention_heads 0", "num_attention_heads must be an integer of at least 1, got 0"),
        ("--num_attention_heads -4", "num_attention_heads must be an integer of at least 1, got -4"),
        ("--num_attention_heads 3", "hidden_size must be a multiple of num_attention_heads 3, got 32"),
        ("--num_hidden_layers 0", "num_hidden_layers must be an integer of at least 1, got 0"),
        ("--hidden_act gelo", "unknown hidden_act 'gelo'; did you mean 'gelu'"),
        ("--hidden_dropout_prob 2", "hidden_dropout_prob must be a number from 0 to 1, got 2"),
        ("--initializer_range .nan", "initializer_range must be a number from 0 to 1, got nan"),
        ("--layer_norm_eps -1", "layer_norm_eps must be a number from 0 to 1, got -1"),
        ("--vocab_size 100 --pad_token_id 100", "pad_token_id must be an integer from 0 to 99, got 100"),
        ("--dtype float23", "dtype must be one of 'float32', 'bfloat16', 'float16', got 'float23'"),
        ("--id2label 5", "--id2label must be fields such as {name: value}, got 5"),
        ("--save_steps 0", "save_steps must be more than 0, or left out for the default, got 0"),
        ("--save_total_limit 0", "save_total_limit must be more than 0, or left out to keep all checkpoints, got 0"),
        ("--text [1,2]", "no such file: '1'"),
        ("--text nowhere.txt", "no such file: 'nowhere.txt'"),
        ("--freeze_sparsity 1.5", "freeze_sparsity must be in [0, 1), got 1.5"),
        ("--freeze_threshold 2", "freeze_threshold must be in [0, 1), got 2.0"),
        ("--freeze_threshold 0.4 --freeze_sparsity 0.5", "freeze_threshold 0.4 and freeze_sparsity 0.5 exclude"),
        ("--weight_decay -1", "weight_decay must be a number of at least 0, got -1.0"),
        ("--learning_rate -1", "learning_rate must be a number of at least 0, got -1.0"),
        ("--learning_rate .inf", "learning_rate must be finite, got inf"),
        ("--max_steps 0", "max_steps must be an integer of at least 1, got 0"),
        ("--max_steps -3", "max_steps must be an integer of at least 1, got -3"),
        ("--max_steps -1 --num_train_epochs -1", "num_train_epochs must be more than 0, got -1.0"),
        ("--max_steps -1 --num_train_epochs 0", "num_train_epochs must be more than 0, got 0.0"),
        ("--max_validation_tokens 3", "max_validation_tokens must be at least max_length 16, got 3"),
        ("--max_tokens 3", "max_tokens must be at least max_length 16, got 3"),
        ("--mlm_probability 0", "mlm_probability must be in (0, 1), got 0.0"),
        ("--mlm_probability 1", "mlm_probability must be in (0, 1), got 1.0"),
        ("--mlm_probability 0.3 --is_decoder true", "mlm_probability has no meaning with is_decoder true"),
        ("--attn_implementation sparse_triton", "sparse_triton cannot run here"),
        ("--attn_implementation sparse_cpu", "sparse_cpu cannot run here: it does not support a mask"),
        ("--base_model runs/nothing/here", "base_model: there is no folder 'runs/nothing/here'"),
        ("--tokenizer ./nothing", "tokenizer: there is no folder './nothing'"),
        ("--mask ~/nothing", f"mask: there is no folder '{Path.home()}/nothing'"),
        ("--resume_from_checkpoint ./nothing", "resume_from_checkpoint: there is no folder './nothing'"),
    ],
    ids=lambda value: value if value.startswith("--") else "",
)
def test_fields_of_pretraining(refused, pretraining_flags, tmp_path, flags, said):
    assert said in refused(pretraining_flags(tmp_path / "run", "--search", "dam_s", *flags.split()))


@pytest.mark.parametrize("name", ["--output_dir", "--text"])
def test_names_that_are_not_text(refused, pretraining_flags, tmp_path, name):
    line = refused(pretraining_flags(tmp_path / "run", name, os.fsdecode(b"t\xf6.txt")))
    assert "'t\\udcf6.txt' is not text in the encoding of this locale (utf-8): set PYTHONUTF8=1" in line


def test_held_out_text_without_pairs(refused, pretraining_flags, tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join(f"w{number % 7} w{number}" for number in range(120)))
    flags = ("--text", tmp_path / "text.txt", "--validation", "null", "--nsp", "true", "--num_attention_heads", "2")
    line = refused(pretraining_flags(tmp_path / "run", *flags))
    assert "text (its held-out part; validation names another text): next-sentence pairs need at least 2" in line


def test_held_out_text_without_masked_tokens(refused, pretraining_flags, tmp_path):
    (tmp_path / "text.txt").write_text("w1 w2 w3 w4 w5 w6 w7 w8\n" * 4)
    flags = ("--validation", tmp_path / "text.txt", "--mlm_probability", "0.001")
    assert "validation: no token of it is masked" in refused(pretraining_flags(tmp_path / "run", *flags))


@pytest.mark.parametrize(
    "mask, said", [("winodw", "unknown mask 'winodw'; did you mean 'window'?"), ("dam_s", "'dam_s' is a search")]
)
def test_names_of_masks(refused, checkpoints, glue_folder, pretraining_flags, tmp_path, mask, said):
    output = ("--output_dir", str(tmp_path / "run"))
    assert said in refused(pretraining_flags(tmp_path / "run", "--mask", mask))
    assert said in refused(finetuning_words(checkpoints["window"], glue_folder, "--mask", mask, *output))
    search = ["search", "--model", checkpoints["stock"], "--data", "builtin", "--max_length", "32", "--recover", "1"]
    assert said in refused([*search, "--mask", mask, *output])


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--gradient_accumulation_steps 0", "gradient_accumulation_steps must be an integer of at least 1, got 0"),
        ("--weight_decay -1", "weight_decay must be a number of at least 0, got -1.0"),
        ("--max_steps 0", "max_steps must be an integer of at least 1, got 0"),
        ("--sweep {learning_rate:[1e-3,-1]}", "learning_rate must be a number of at least 0, got -1.0"),
        ("--max_length 64", "max_length 64 is more than the 40 positions"),
        ("--dtype float23", "dtype must be one of 'float32', 'bfloat16', 'float16', got 'float23'"),
        ("--model runs/nothing/here", "model: there is no folder 'runs/nothing/here'"),
        ("--attn_implementation sparse_triton", "sparse_triton cannot run here"),
    ],
    ids=lambda value: value if value.startswith("--") else "",
)
def test_fields_of_finetuning(refused, checkpoints, glue_folder, tmp_path, flags, said):
    flags = [word.replace(":[", ": [").replace(",", ", ") for word in flags.split()]
    words = finetuning_words(checkpoints["window"], glue_folder, "--output_dir", str(tmp_path / "run"), *flags)
    assert said in refused(words)


# Files


def test_damaged_weights_are_named(refused, checkpoints, glue_folder, pretraining_flags, tmp_path):
    model = Path(shutil.copytree(checkpoints["window"], tmp_path / "model"))
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    line = refused(finetuning_words(model, glue_folder, "--output_dir", str(tmp_path / "run")))
    assert f"{weights} is damaged" in line
    line = refused(pretraining_flags(tmp_path / "run", "--base_model", model))
    assert f"{weights} is damaged" in line


def _without_tokenizer(words):
    place = words.index("--tokenizer")
    return words[:place] + words[place + 2 :]


def test_weights_are_trained_with_their_own_tokenizer(checkpoints, pretraining_flags, tmp_path):
    base = checkpoints["stock"]
    assert main(_without_tokenizer(pretraining_flags(tmp_path / "run", "--base_model", base))) == 0
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (base, tmp_path / "run")]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()


def test_weights_without_a_tokenizer_are_refused(refused, checkpoints, pretraining_flags, tmp_path):
    model = Path(shutil.copytree(checkpoints["stock"], tmp_path / "model"))
    for path in model.glob("tokenizer*"):
        path.unlink()
    line = refused(_without_tokenizer(pretraining_flags(tmp_path / "run", "--base_model", model)))
    assert f"tokenizer: that of base_model {model} cannot be read (there is no tokenizer" in line


@pytest.mark.parametrize("content", ["{", f'{{"a": {DEEP}}}'], ids=["cut", "deep"])
def test_damaged_configurations_are_named(refused, checkpoints, glue_folder, tmp_path, content):
    model = Path(shutil.copytree(checkpoints["window"], tmp_path / "model"))
    (model / "config.json").write_text(content)
    line = refused(finetuning_words(model, glue_folder, "--output_dir", str(tmp_path / "run")))
    assert f"{model / 'config.json'} is damaged" in line


@pytest.mark.parametrize(
    ("name", "content"),
    [("config.json", "null"), ("config.json", "3"), ("tokenizer_config.json", "null"), ("tokenizer.json", "null")],
)
def test_files_of_something_else_are_one_line(refused, checkpoints, tmp_path, name, content):
    model = Path(shutil.copytree(checkpoints["stock"], tmp_path / "model"))
    (model / name).write_text(content)
    line = refused(["lengthen", model, "--length", "64", "--output_dir", tmp_path / "run"])
    assert f"{model}: the files of its configuration or tokenizer are not what transformers writes" in line


@pytest.mark.parametrize("name", ["logging", "set_seed", "__file__", "Trainer", ["BertModel"], 5, ""], ids=str)
def test_forged_architectures_are_not_called(checkpoints, tmp_path, name):
    model = Path(shutil.copytree(checkpoints["window"], tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
    with pytest.raises(ValueError, match="architectures"):
        load(model)


@pytest.mark.parametrize("content, said", [(HALF, "half of a surrogate pair"), (DEEP, "nested too deeply")])
def test_text_that_is_none(refused, pretraining_flags, tmp_path, content, said):
    path = tmp_path / "text.jsonl"
    path.write_text(f'{{"text": "w1 w2"}}\n{{"text": {content}}}\n')
    line = refused(pretraining_flags(tmp_path / "run", "--text", path))
    assert f"{path}:2" in line and said in line


@pytest.mark.parametrize(
    "row, said",
    [
        (f'{{"sentence1": {HALF}, "sentence2": "w1", "label": "entailment"}}', "half of a surrogate pair"),
        (f'{{"sentence1": {DEEP}}}', "nested too deeply"),
        ('{"sentence1": "w1", "sentence2": "", "label": "entailment"}', "field 'sentence2': is empty"),
        ('{"sentence1": " ", "sentence2": "w1", "label": "entailment"}', "field 'sentence1': is empty"),
    ],
    ids=["surrogate", "deep", "second empty", "first empty"],
)
def test_rows_of_a_task(refused, checkpoints, tmp_path, row, said):
    good = '{"sentence1": "w1", "sentence2": "w2", "label": "not_entailment"}'
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text(f"{good}\n{row}\n")
    line = refused(finetuning_words(checkpoints["window"], tmp_path, "--output_dir", str(tmp_path / "run")))
    assert "jsonl: row 2" in line and said in line


def test_a_connection_that_is_cut(refused, checkpoints, glue_folder, pretraining_flags, monkeypatch, tmp_path):
    def cut(*args, **kwargs):
        raise HTTPError("peer closed connection without sending complete message body")

    monkeypatch.setattr(SparseMask, "from_pretrained", cut)
    output = ("--output_dir", str(tmp_path / "run"))
    words = finetuning_words(checkpoints["window"], glue_folder, "--mask", "owner/name", *output)
    for each in (words, pretraining_flags(tmp_path / "run", "--mask", "owner/name")):
        line = refused(each)
        assert "owner/name" in line and "peer closed connection" in line


def test_one_line_whatever_is_nested(monkeypatch, capsys):
    def fail(*args):
        raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setattr("sparsebert.commands.parse", fail)
    assert main(["report", "a"]) == 2
    assert capsys.readouterr().err == "sparsebert report: what was given is nested too deeply\n"
