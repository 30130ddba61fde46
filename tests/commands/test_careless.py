"""Mistakes of a careless or hurried user: one clear error before any work, or what was meant."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import BertForMaskedLM, TrainingArguments

from sparsebert import (
    ProgressivePruning,
    SearchSchedule,
    SparseBertConfig,
    SparseBertTrainer,
    SparseMask,
    attach,
    build_pattern,
    extend_positions,
    load,
    plan,
    quantize,
    sparse_dot_product_attention,
    sparsity,
)
from sparsebert.commands import main
from sparsebert.training.pretraining.pretraining_run import SECTIONS
from sparsebert.training.recipes import load_recipe, read_recipe, recipe_names, recipes_folder


ROOT = Path(__file__).parents[2]
HEADER = "index\tsentence1\tsentence2\tlabel\n"
ROWS = "".join(f"{i}\tw1 w{i}\tw2\t{'entailment' if i % 2 else 'not_entailment'}\n" for i in range(8))
GOOD = HEADER + ROWS


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    """Every mistake is made in an empty folder."""
    monkeypatch.chdir(tmp_path)


def words_of(fields):
    return [str(word) for name, value in fields.items() for word in (f"--{name}", value)]


# Recipes


@pytest.mark.parametrize(
    "content, said",
    [
        ("training:\n\tmax_steps: 3\n", "recipe r.yaml: while scanning for the next token found character '\\t'"),
        ("training:\n  max_steps: 3\n   seed: 3\n", "recipe r.yaml: mapping values are not allowed here"),
        ("training:\n  max_steps:3\n", "section 'training' must hold fields, got 'max_steps:3'"),
        ("training:\n  - max_steps: 3\n", "section 'training' must hold fields, got [{'max_steps': 3}]"),
        ("training: {}\n---\ndata: {}\n", "recipe r.yaml: expected a single document"),
        ("training: *base\n", "recipe r.yaml: found undefined alias 'base'"),
        ("base: &base {}\ntraining:\n  <<: *base\n", "unknown section 'base'"),
        ("[training]\nmax_steps = 3\n", "recipe r.yaml: expected '<document start>'"),
        ("training:\n  seed: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
        ("max_steps: 3\n", "unknown section 'max_steps': it is a field of section 'training'"),
        ("training:\n  search: dam_s\n", "section 'training' 'search': it is a field of section 'model'"),
        ("data:\n  learning_rate: 1\n", "'learning_rate': it is a field of section 'training'"),
        ("training:\n  seed: 2024-01-01\n", "training.seed must be a whole number, got '2024-01-01'"),
        ("training:\n  max_steps: yes\n", "training.max_steps must be a whole number, got 'yes'"),
        ("training:\n  max_steps:\n", "training.max_steps needs a value, got null"),
        ("data:\n  text: null\n", "data.text needs a value, got null"),
        ("data:\n  pictures: ~\n", "data.pictures needs a value, got null"),
        ("data:\n  pictures: n\n", "data.pictures must be true or false, got 'n'"),
        ("data:\n  pictures: 1\n", "data.pictures must be true or false, got 1"),
        ("data:\n  max_tokens: 10M\n", "data.max_tokens must be a whole number, got '10M'"),
        ("data:\n  validation: []\n", "must be \"builtin\", \"hub:owner/name\" or one or more files, got []"),
        ("data:\n  tokenizer: 1.10\n", "data.tokenizer must be text, got 1.1: put it in quotes"),
        ("data:\n  tokenizer: [a, b]\n", "data.tokenizer must be text, got ['a', 'b']"),
        ("data:\n  pruning: 0.9\n", "data.pruning must be fields such as {name: value}, got 0.9"),
        ("training:\n  learning_rate: 1,5e-4\n", "training.learning_rate must be a number, got '1,5e-4'"),
        ("training:\n  learning_rate: [1e-3, 1e-4]\n", "training.learning_rate must be a number, got [0.001, 0.0001]"),
        ("training:\n  learning_rate: .nan\n", "learning_rate must be a number of at least 0, got nan"),
        ("model:\n  target_sparsity: 90%\n", "model.target_sparsity must be a number, got '90%'"),
        ("model:\n  target_sparsity: 90\n", "target_sparsity must be in (0, 1), got 90.0"),
        (
            "model:\n  search: off\n",
            "search must be one of 'soft', 'dam_u', 'dam_s', 'dam_b', 'vertical_slash', got 'off'",
        ),
        ("model:\n  pattern: window\n  pattern_kwargs: window_size=3\n", "model.pattern_kwargs must be fields"),
    ],
)  # fmt: skip
def test_recipes(refused, content, said):
    Path("r.yaml").write_text(content)
    assert said in refused(["pretrain", "r.yaml", "--output_dir", "run"])


@pytest.mark.parametrize("content", ["", "# later\n", "training:\n"])
def test_recipes_that_say_nothing(refused, content):
    Path("r.yaml").write_text(content)
    assert "recipe r.yaml sets nothing" in refused(["pretrain", "r.yaml"])


@pytest.mark.parametrize(
    "line, section, name, meant",
    [
        ("save_strategy: no", "training", "save_strategy", "no"),
        ("output_dir: 2024-01-01", "training", "output_dir", "2024-01-01"),
        ("output_dir: 12", "training", "output_dir", "12"),
        ("seed: 010", "training", "seed", 10),
        ('learning_rate: "1e-4"', "training", "learning_rate", 1e-4),
        ("learning_rate: 1e-4", "training", "learning_rate", 1e-4),
        ("resume_from_checkpoint: true", "training", "resume_from_checkpoint", "true"),
        ("pictures: No", "data", "pictures", False),
        ('pictures: "yes"', "data", "pictures", True),
        ("max_tokens: 1_000", "data", "max_tokens", 1000),
        ("max_tokens: 6e3", "data", "max_tokens", 6000),
        ("mask: no", "data", "mask", "no"),
        ("text: [1.txt, 2]", "data", "text", ["1.txt", "2"]),
        ("base_model: ~/bert", "data", "base_model", "HOME/bert"),
        ("search: null", "model", "search", None),
    ],
)
def test_what_recipes_mean(line, section, name, meant):
    Path("r.yaml").write_text(f"{section}:\n  {line}\n")
    if isinstance(meant, str):
        meant = meant.replace("HOME", str(Path.home()))
    assert load_recipe(["r.yaml"], SECTIONS)[section][name] == meant


@pytest.mark.parametrize("name", recipe_names())
def test_shipped_recipes_read_the_same_in_yaml_of_1_1(name):
    # Only words are read in another way, and the recipes that ship have none of these.
    path = recipes_folder() / f"{name}.yaml"
    stock = yaml.safe_load(path.read_text())
    for section, fields in read_recipe(path).items():
        for field, value in (fields or {}).items():
            assert str(stock[section][field]) == str(value) or float(stock[section][field]) == value


@pytest.mark.parametrize(
    "words, said",
    [
        ("pretrain folder", "recipe 'folder' is a folder, expected a YAML file"),
        ("pretrain small.yaml", "recipe small.yaml: no such file; the recipe that ships with the package is 'small'"),
        ("pretrain recipes/small.yaml", "the recipe that ships with the package is 'small'"),
        ("pretrain -output_dir run", "got '-output_dir': fields begin with two dashes"),
        ("pretrain --max_steps=", "--max_steps needs a value"),
        ("pretrain --output_dir=", "--output_dir needs a value"),
        ("pretrain --output-dir run", "unknown field '--output-dir'; did you mean '--output_dir'?"),
        ("pretrain --max_steps 2 small", "--max_steps takes one value, got '2', 'small'"),
        ("pretrain --text *.txt", "no such file: '*.txt'"),
        ("pretrain --text a.txt,b.txt", "no such file: 'a.txt,b.txt'"),
        ("pretrain --pattern window --pattern_kwargs {window_size:3", "is not YAML"),
        ("Pretrain small", "unknown verb 'Pretrain'; did you mean 'pretrain'?"),
        ("report nowhere", "nowhere: config.json or mask_config.json is not in the cache"),
        ("report folder", "folder/metrics.json: damaged or not JSON"),
        (
            "report other",
            "other/metrics.json: not the metrics of a pre-training, a fine-tuning, a GLUE run, a search or",
        ),
        ("report list", "list/metrics.json: not the metrics of"),
        ("report --json list", "--json must be true or false, got 'list'"),
        ("draw windw --output_dir out", "did you mean 'window'?"),
        ("draw window --sources bigbird --output_dir out", "--sources is given twice: 'window'"),
        ("draw window --output_dir file", "output_dir file cannot be made: file is a file"),
        ("draw window --output_dir file/out", "output_dir file/out cannot be made: file is a file"),
        ("draw window --output_dir out --length 1000000", "length must be an integer from 1 to 65536, got 1000000"),
        ("draw --output_dir out --length 8", "--length needs the name of a pattern"),
        ("draw random --output_dir out --seed -1", "seed must be an integer from 0"),
        ("plan MASK --device gpu", "device must be a device of torch, such as cpu or cuda, got 'gpu'"),
        ("plan MASK --length 1000000000", "length must be an integer from 1 to 65536, got 1000000000"),
        ("plan MASK --dtype fp16", "dtype must be one of 'float32', 'bfloat16', 'float16', got 'fp16'"),
        ("theory window --parameters window_size=3", "--parameters must be fields such as {name: value}"),
        ("theory window --parameters 3", "--parameters must be fields such as {name: value}, got 3"),
        ("theory window --length 10000000", "length must be an integer from 1 to 65536, got 10000000"),
        ("lengthen MODEL --length 1000000000000 --output_dir out", "from 1 to 1048576, got 1000000000000"),
        ("lengthen MASK --length 64 --output_dir out", "model: there is no config.json in the folder"),
        ("lengthen MODEL --length 64 --output_dir file", "output_dir file cannot be made: file is a file"),
        ("lengthen MODEL/config.json --length 64 --output_dir out", "is a file, expected a folder or Hub id"),
        ("lengthen TABLE --length 64 --output_dir out", "input of 64 tokens is longer than the mask (16)"),
        ("lengthen TABLE --length 64 --length_policy x --output_dir out", "length_policy must be one of 'extend', "),
        ("lengthen STOCK --length 64 --length_policy dense --output_dir out", "which has no mask"),
        ("lengthen DAMAGED --length 64 --output_dir out", "model.safetensors is damaged or truncated"),
        ("plan DAMAGED", "model.safetensors is damaged or truncated"),
        ("lengthen SIZELESS --length 64 --output_dir out", "hidden_size in the config.json of SIZELESS"),
        ("search SEARCH --model SIZELESS", "hidden_size in the config.json of SIZELESS must be at least 1, got 0"),
        *((f"{verb} UNKNOWN", "UNKNOWN: pattern must be one of") for verb in ("plan", "report", "theory")),
        ("plan folder/nothing", "there is no folder 'folder/nothing'; if it is a Hub id, the folder folder hides it"),
        ("plan ./nothing", "there is no folder './nothing'"),
        ("draw folder/nothing --output_dir out", "there is no folder 'folder/nothing'; if it is a Hub id, the folder"),
        ("analyze DAMAGED --output_dir out", "model.safetensors is damaged or truncated"),
        ("push DAMAGED --repo_id user/name", "model.safetensors is damaged or truncated"),
        ("push TRUNCATED --repo_id user/name", "TRUNCATED/mask.safetensors: damaged"),
        ("masks file", "'file' is a file, expected a folder or Hub id"),
        ("prune MODEL --output_dir out --sparsities []", "sparsities must name at least one fraction to remove"),
        ("prune MODEL --output_dir out --sparsities 0.5,0.9", "--sparsities must be a number, got '0.5,0.9'"),
        ("analyze MASK --output_dir file", "output_dir file cannot be made: file is a file"),
        ("search SEARCH --learning_rate -1", "learning_rate must be a number from 0 to 1000000.0, got -1.0"),
        ("search SEARCH --recover 2 --recover_learning_rate .nan", "recover_learning_rate must be a number from 0"),
        ("search SEARCH --max_tokens 3", "max_tokens must be an integer of at least 16, got 3"),
        ("search SEARCH --model STOCK/config.json", "model: 'STOCK/config.json' is a file"),
        ("search SEARCH --output_dir file", "output_dir file cannot be made: file is a file"),
        ("search SEARCH --initial_decay 0", "initial_decay has no meaning here: the search starts from what"),
        ("translate PAIRS --max_steps 0", "max_steps must be an integer of at least 1, got 0"),
        ("translate PAIRS --learning_rate -1", "learning_rate must be a number of at least 0, got -1.0"),
        ("translate PAIRS --num_attention_heads 0", "num_attention_heads must be an integer of at least 1, got 0"),
        ("reproduce copying --only depth_1", "unknown cell in --only 'depth_1'"),
        ("reproduce copying --output file --only star_depth_1_*", "output file cannot be made: file is a file"),
    ],
)
def test_verbs(refused, checkpoints, words, said):
    for name, content in (("folder", "{"), ("other", '{"accuracy": 1}'), ("list", "[1]")):
        Path(name).mkdir()
        Path(name, "metrics.json").write_text(content)
    Path("file").write_text("mine")
    Path("pairs.tsv").write_text("a b\tc d\n")
    build_pattern("window", 16, 2).save_pretrained("MASK")
    Path("text.txt").write_text("\n\n".join(["w1 w2 w3 w4"] * 40))
    shutil.copytree("MASK", "TRUNCATED")
    Path("TRUNCATED/mask.safetensors").write_bytes(Path("MASK/mask.safetensors").read_bytes()[:20])
    shutil.copytree(checkpoints["searching"], "DAMAGED")
    Path("DAMAGED/model.safetensors").write_bytes(Path("DAMAGED/model.safetensors").read_bytes()[:20])
    changes = {"UNKNOWN": ("window", {"pattern": "halves"}), "SIZELESS": ("stock", {"hidden_size": 0})}
    for name, (checkpoint, fields) in changes.items():
        shutil.copytree(checkpoints[checkpoint], name)
        config = Path(name, "config.json")
        config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    model = BertForMaskedLM.from_pretrained(checkpoints["stock"])
    attach(model, "bigbird", mask_length=16, length_policy="error").save_pretrained("TABLE")
    search = f"--model {checkpoints['stock']} --data text.txt --target_sparsity 0.5 --max_length 16 --output_dir out"
    pairs = "--train pairs.tsv --test pairs.tsv --pattern window --output_dir out"
    places = {"SEARCH": search, "PAIRS": pairs, "MODEL": checkpoints["window"], "STOCK": checkpoints["stock"]}
    for name, place in places.items():
        words, said = words.replace(name, place), said.replace(name, place)
    assert said in refused(words.split())
    assert Path("file").read_text() == "mine" and not Path("out").exists()


# Training


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--mask MASK --search dam_s", "model.search has no meaning with the mask MASK"),
        ("--mask MASK --pattern window", "model.pattern has no meaning with the mask MASK"),
        ("--mask MASK --freeze_sparsity 0.5", "freeze_sparsity 0.5 has no meaning with the mask MASK"),
        (
            "--base_model FROZEN --freeze_sparsity 0.5",
            "freeze_sparsity 0.5 has no meaning with the mask of base_model",
        ),
        ("--base_model FROZEN --search_end 0.5", "search_end 0.5 has no meaning with the mask of base_model FROZEN"),
        ("--validation one.txt", "validation: the text has only 1 tokens, too few for one row of max_length=16"),
        (f"--output_dir {'x' * 300}", f"too long for the name of a file or folder: '{'x' * 190}"),
        ("--pattern window --target_sparsity 0.5", "model.target_sparsity has no meaning with the pattern 'window'"),
        ("--pattern window --search_end 0.5", "search_end 0.5 has no meaning with the pattern 'window'"),
        ("--search dam_u --mask_seed 3", "model.mask_seed has no meaning with the search 'dam_u'"),
        ("--mask_seed 3", "model.mask_seed has no meaning with the search 'dam_s'"),
        ("--freeze_sparsity 0.99", "freeze_sparsity must be at most 0.7656, got 0.99"),
        ("--pattern bigbird --mask_length 8", "max_length must be at most the mask's length 8 (mask_length)"),
        ("--search dam_u --mask_length 8", "max_length must be at most the mask's length 8 (mask_length)"),
        ("--base_model STOCK --hidden_size 64", "hidden_size must be 32, as in base_model STOCK, got 64"),
        ("--base_model STOCK --vocab_size 200", "vocab_size must be 100, as in base_model STOCK, got 200"),
        ("--base_model STOCK --num_hidden_layers 3", "num_hidden_layers must be 2, as in base_model STOCK, got 3"),
        ("--base_model STOCK/model.safetensors", "base_model: 'STOCK/model.safetensors' is a file"),
        ("--base_model PARENT", "base_model: there is no config.json in the folder 'PARENT'; there is one in STOCK"),
        ("--base_model MASK", "base_model: there is no config.json in the folder 'MASK'"),
        ("--mask STOCK", "mask: there is no mask_config.json in the folder 'STOCK'"),
        ("--mask MASK/mask.safetensors", "mask: 'MASK/mask.safetensors' is a file"),
        ("--tokenizer MASK", "tokenizer: there is no tokenizer.json or tokenizer_config.json or vocab.txt"),
        ("--report_to wandbb", "report_to must be all, none or what is installed"),
        ("--report_to neptune", "report_to must be all, none or what is installed"),
        ("--prediction_loss_only true", "prediction_loss_only must be false, since metrics are computed from all"),
        ("--nsp true --label_smoothing_factor 0.1", "label_smoothing_factor must be 0 with nsp true"),
        (
            '--lr_scheduler_kwargs {"a":1}',
            "lr_scheduler_type 'linear' with lr_scheduler_kwargs {'a': 1} cannot be used: ",
        ),
        ("--deepspeed ds.json", "deepspeed"),
        (
            "--base_model same --output_dir ./same --overwrite",
            "output_dir same is the folder of base_model",
        ),
        ("--output_dir file", "output_dir file cannot be made: file is a file"),
        ("--output_dir file/run", "output_dir file/run cannot be made: file is a file"),
        ("--output_dir broken", "output_dir broken cannot be made: broken is a broken link"),
        ("--output_dir loop", "output_dir loop cannot be made: loop is a broken link"),
        ("--output_dir loop/run", "output_dir loop/run cannot be made: "),
        ("--resume_from_checkpoint latest", "resume_from_checkpoint: there is no folder 'latest'"),
        ("--text hub:", "source must be 'hub:owner/name'"),
        ("--text text.TXT", "'text.TXT' is not a supported text file; its name must end in .txt"),
        ("--text corpus", "'corpus' is not a supported text file"),
        ("--text plain.txt.gz", "plain.txt.gz: corrupt .gz file"),
    ],
)
def test_pretraining(refused, checkpoints, pretraining_flags, flags, said):
    Path("file").write_text("mine")
    Path("broken").symlink_to("gone")
    Path("loop").symlink_to("loop")
    Path("corpus").mkdir()
    for name in ("text.TXT", "plain.txt.gz"):
        Path(name).write_text("w1 w2")
    build_pattern("window", 32, 4).save_pretrained("MASK")
    Path("one.txt").write_text("w1")
    shutil.copytree(checkpoints["stock"], "same")
    places = {"STOCK": checkpoints["stock"], "PARENT": str(Path(checkpoints["stock"]).parent)}
    for name, place in (places | {"FROZEN": checkpoints["window"]}).items():
        flags, said = flags.replace(name, place), said.replace(name, place)
    assert said in refused(pretraining_flags("run", *flags.split()))
    assert Path("file").read_text() == "mine"


def test_pretraining_keeps_what_the_search_found(pretraining_flags):
    assert main(pretraining_flags("my runs/\u00fcn\u00ef/", "--search", "dam_s", "--max_steps", "2")) == 0
    probs = load_file("my runs/\u00fcn\u00ef/mask_probs.safetensors")["probs"]
    assert probs.shape == (4, 14)  # of each distance between tokens that are not special


@pytest.mark.parametrize(
    "files, said",
    [
        ({"train.csv": GOOD.replace("\t", ";")}, "d/train.csv: row 1: no column sentence1"),
        ({"train.tsv": GOOD.replace("\t", ",")}, "d/train.tsv: row 1: no column sentence1"),
        ({"train.tsv": ROWS}, "d/train.tsv: row 1: no column sentence1"),
        ({"train.tsv": ""}, "d/train.tsv: no rows"),
        ({"train.tsv": HEADER}, "d/train.tsv: no usable rows"),
        ({"train.tsv/x": ""}, "split 'train' is missing in d"),
        ({"train.xlsx": "PK"}, "files end in .tsv, .csv, .json, .jsonl"),
        ({"train.parquet": "PAR1"}, "train.parquet: not a Parquet file"),
        ({"train.tsv.gz": GOOD}, "d/train.tsv.gz: cannot be decompressed"),
        ({"train.tsv": GOOD.encode("utf-16")}, "d/train.tsv: not UTF-8 text"),
        ({"train.tsv": GOOD.replace("index", "label")}, "d/train.tsv: row 1: the column 'label' comes 2 times"),
        (
            {"train.tsv": GOOD.replace("sentence1", "Sentence1")},
            "no column sentence1; did you mean 'Sentence1'? available: index, Sentence1",
        ),
        ({"train.tsv": GOOD.replace("not_entailment", "1.0")}, "'1.0' is not one of entailment, not_entailment"),
        ({"train.tsv": GOOD + "9\ta\tb\tc\tentailment\n"}, "d/train.tsv: row 10: 5 fields, expected 4"),
        ({"train.csv": GOOD.replace("\t", ",") + '9,"w1,w2,entailment\n'}, "d/train.csv: row 10"),
        ({"train.jsonl": '[{"sentence1": "a"}]'}, "d/train.jsonl: row 1: not a JSON object but list"),
        ({"train.json": '{"a": 1}\n{"a": 2}\n'}, "a file with one object per line must be named .jsonl"),
        ({"train.tsv": GOOD, "train.csv": GOOD}, "train.csv and train.tsv are both for the split 'train'"),
    ],
)
def test_files_of_a_task(refused, checkpoints, files, said):
    for name, content in ({"dev.tsv": GOOD} | files).items():
        path = Path("d", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    fields = {"task": "rte", "model": checkpoints["window"], "data": "d", "max_length": 32, "output_dir": "run"}
    assert said in refused(["finetune", *words_of(fields)])


@pytest.mark.parametrize("content", ["\ufeff" + GOOD, GOOD.replace("\n", "\r\n"), GOOD + "\n\n"])
def test_files_that_are_meant(content):
    from sparsebert.data.tasks import TASKS

    Path("train.tsv").write_bytes(content.encode())
    rows = TASKS["rte"].load(data=".", splits=["train"], skip_bad=False)["train"]
    assert rows["text"][:2] == ["w1 w0", "w1 w1"] and rows["label"][:2] == [1, 0]


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--hidden_size 64", "hidden_size must be 32, as in model MODEL, got 64"),
        ("--type_vocab_size 3", "type_vocab_size must be 2, as in model MODEL, got 3"),
        ("--model PARENT", "model: there is no config.json in the folder 'PARENT'; there is one in MODEL"),
        ("--model MODEL/model.safetensors", "model: 'MODEL/model.safetensors' is a file"),
        ("--model ~/nothing", "model: there is no folder 'HOME/nothing'"),
        ("--mask widow", "unknown mask 'widow'; did you mean 'window'?"),
        ("--mask STOCK", "mask: there is no mask_config.json in the folder 'STOCK'"),
        ("--sweep learning_rate", "--sweep must be true or false, or fields such as"),
        ("--seeds 1 4294967296", "seeds must be at most 4294967295, got 4294967296"),
        ("--seeds 4294967290", "seeds must be at most 10000 runs, got 4294967290"),
        ("--no_answer_threshold nan", "no_answer_threshold must be finite, got nan"),
        ("--seeds 1,2", "seeds must be a number of runs or a list of seeds, got ['1,2']"),
        ("--data DATA/RTE/train.tsv", "data: there is no folder"),
        ("--train_split dev", "split 'dev' is missing"),
        ("--output_dir MODEL", "output_dir MODEL is the folder of model, which would be replaced"),
        ("--output_dir MODEL --overwrite", "output_dir MODEL is the folder of model, which would be replaced"),
        ("--output_dir STOCK", "output_dir STOCK is not empty"),
        ("--prediction_loss_only true", "prediction_loss_only must be false, since metrics are computed from all"),
        ("--batch_eval_metrics true", "batch_eval_metrics must be false"),
        ("--eval_do_concat_batches false", "eval_do_concat_batches must be true"),
        (
            '--lr_scheduler_kwargs {"a":1}',
            "lr_scheduler_type 'linear' with lr_scheduler_kwargs {'a': 1} cannot be used: ",
        ),
        ("--task stsb --label_smoothing_factor 0.1", "label_smoothing_factor must be 0 for task stsb, whose labels"),
        (
            "--task squad --max_length 40 --label_smoothing_factor 0.1",
            "label_smoothing_factor must be 0 for task squad",
        ),
        ("--metric_for_best_model acuracy", "metric_for_best_model of task rte 'acuracy'; did you mean 'accuracy'?"),
        ("--metric_for_best_model eval_f1", "metric_for_best_model of task rte 'eval_f1'; allowed: accuracy, loss"),
        ('--sweep {"optim":["adamw_torch","adamw_toch"]}', "adamw_toch is not a valid OptimizerNames"),
        ('--sweep {"label_smoothing_factor":[0.0,0.1]} --task stsb', "label_smoothing_factor must be 0 for task stsb"),
    ],
)
def test_finetuning(refused, checkpoints, glue_folder, flags, said):
    fields = {"task": "rte", "model": checkpoints["window"], "data": glue_folder, "max_length": 32}
    fields |= {"output_dir": "run"}
    places = {"MODEL": fields["model"], "PARENT": str(Path(fields["model"]).parent), "STOCK": checkpoints["stock"]}
    for name, place in (places | {"DATA": str(glue_folder), "HOME": str(Path.home())}).items():
        flags, said = flags.replace(name, place), said.replace(name, place)
    assert said in refused(["finetune", *words_of(fields), *flags.split()])


def test_settings_that_a_task_of_glue_refuses(refused, checkpoints, glue_folder):
    fields = {"model": checkpoints["window"], "data": glue_folder, "max_length": 32, "output_dir": "run"}
    words = ["finetune", "--all", *words_of(fields)]
    assert "must be 0 for task stsb" in refused([*words, "--label_smoothing_factor", "0.1"])
    assert "metric_for_best_model of task stsb 'accuracy'" in refused([*words, "--metric_for_best_model", "accuracy"])


def test_one_class_is_said(checkpoints, caplog, monkeypatch):
    from transformers.utils import logging

    from sparsebert.training.finetuning.finetuning_arguments import FinetuningArguments
    from sparsebert.training.finetuning.task_data import prepare

    monkeypatch.setattr(logging.get_logger("transformers"), "propagate", True)
    for name, content in (("train", GOOD.replace("not_entailment", "entailment")), ("dev", GOOD)):
        Path(f"{name}.tsv").write_text(content)
    prepare(FinetuningArguments(task="rte", model=checkpoints["window"], data=".", max_length=32))
    assert "all 8 examples of train are of one class, 'entailment'" in caplog.text


# The library


def window(heads=4, **fields):
    return build_pattern("window", 32, heads, **fields)


def saved(**metadata):
    keep = torch.ones(1, 4, 8, dtype=torch.bool)
    SparseMask(keep, 8, "offsets", metadata=metadata).save_pretrained("mask")


def attention(mask, **arguments):
    return sparse_dot_product_attention(*torch.rand(3, 1, 4, 8, 4), mask, **arguments)


MISTAKES = {
    "progress in percent": (lambda m: m("dam_s").sparse_attention.set_progress(50), "must be in [0, 1], got 50"),
    "progress NaN": (lambda m: m("dam_s").sparse_attention.set_progress(float("nan")), "progress must be in [0, 1]"),
    "set a table": (lambda m: m().set_mask(window().to_table()), "set_mask needs a SparseMask, got Tensor"),
    "set a name": (lambda m: m().set_mask("bigbird"), "set_mask needs a SparseMask, got str"),
    "set nothing": (lambda m: m().set_mask(None), "set_mask needs a SparseMask, got NoneType"),
    "freeze text": (lambda m: m("dam_s").freeze(sparsity="0.9"), "sparsity must be in [0, 1), got '0.9'"),
    "freeze twice said": (lambda m: m("dam_s").freeze(0.5, 0.5), "threshold 0.5 and sparsity 0.5 exclude each other"),
    "attach a tensor": (lambda m: m(window().to_table()), "attach needs a SparseMask or the name of one, got Tensor"),
    "schedule text": (lambda m: SearchSchedule("0.5"), "search_end must be a number from 0 to 1, got '0.5'"),
    "schedule steps": (lambda m: SearchSchedule(1000), "search_end must be a number from 0 to 1, got 1000"),
    "schedule threshold": (lambda m: SearchSchedule(0.5, threshold=2), "threshold must be in [0, 1), got 2"),
    "schedule percent": (lambda m: SearchSchedule(0.5, sparsity=90), "sparsity must be in [0, 1), got 90"),
    "schedule metadata": (
        lambda m: SearchSchedule(0.5, metadata={"sparsity": 0.5}),
        "metadata: the names must be text, and not those of a mask's own fields, got 'sparsity'",
    ),
    "freeze metadata": (lambda m: m("dam_s").freeze(metadata={"length": 5}), "metadata: the names must be text"),
    "metadata tuple": (lambda m: saved(run=(1, 2)), "metadata: run must hold JSON values, such as lists instead of"),
    "metadata keys": (lambda m: saved(run={1: 2}), "metadata: run must hold JSON values, such as lists instead of"),
    "schedule both": (lambda m: SearchSchedule(0.5, 0.4, 0.5), "threshold 0.4 and sparsity 0.5 exclude each other"),
    "config typo": (lambda m: SparseBertConfig(target_sparsty=0.9), "'target_sparsty'; did you mean 'target_sp"),
    "config search": (lambda m: SparseBertConfig(serach="dam_u"), "unknown field 'serach'; did you mean 'search'?"),
    "load nothing": (lambda m: load("runs/nothing/here"), "there is no folder 'runs/nothing/here'"),
    "load file": (lambda m: (saved(), load("mask/mask_config.json")), "is a file, expected a folder or Hub id"),
    "load mask": (lambda m: (saved(), load("mask")), "mask holds a mask without a model: give it to"),
    "load name of class": (lambda m: load("x", "BertModel"), "model_class must be a class of transformers"),
    "mask of numpy": (lambda m: SparseMask(np.ones((4, 8, 8), bool), 8), "keep must be a bool tensor, got ndarray"),
    "mask without data": (lambda m: SparseMask(torch.ones(4, 8, 8, dtype=torch.bool, device="meta"), 8), "on meta"),
    "mask sparse": (lambda m: SparseMask(torch.ones(4, 8, 8, dtype=torch.bool).to_sparse(), 8), "torch.sparse_coo"),
    "metadata text": (lambda m: window().replace(metadata="mine"), "metadata must be a dict, got str"),
    "metadata tensor": (lambda m: saved(loss=torch.tensor(1.0)), "metadata: loss must hold JSON values"),
    "metadata search": (lambda m: saved(search=5), "metadata: search must be a name or null, got 5"),
    "metadata form": (lambda m: saved(form="mine"), "metadata: the names must be text, and not those of a mask's own"),
    "metadata sample": (lambda m: saved(model_weights_sample=""), "not those of a mask's own fields, got 'model_w"),
    "length text": (lambda m: window().to_table("8"), "length must be an integer from 1 to 65536, got '8'"),
    "length fraction": (lambda m: window().to_table(2.5), "length must be an integer from 1 to 65536, got 2.5"),
    "density of no token": (lambda m: window().density_at(0), "length must be an integer of at least 1, got 0"),
    "empty rows of fewer": (lambda m: window().num_empty_rows(-3), "length must be an integer of at least 1, got -3"),
    "pattern huge": (lambda m: build_pattern("random", 10**6, 12), "length must be an integer from 1 to 65536"),
    "plan name": (lambda m: plan("window"), "expected a model of transformers, got str"),
    "plan dtype": (lambda m: plan(window(), 32, dtype="bfloat16"), "dtype must be a dtype of torch, got 'bfloat16'"),
    "plan device": (lambda m: plan(window(), 32, device="gpu"), "device must be a device of torch"),
    "sparsity of nothing": (lambda m: sparsity(None), "expected a model of transformers, got NoneType"),
    "extend nothing": (lambda m: extend_positions(None, 80), "expected a model of transformers, got NoneType"),
    "quantize nothing": (lambda m: quantize(None), "quantize needs a model of transformers, got NoneType"),
    "attention table": (lambda m: attention(window().to_table(8)), "mask must be a SparseMask, got Tensor"),
    "attention backend": (lambda m: attention(window(), backend="cpu"), "backend must be one of sparse_eager"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_library(tiny_config, name):
    from transformers import BertConfig

    def make(mask="window", **fields):
        return attach(BertForMaskedLM(tiny_config(BertConfig)), mask, **fields)

    mistake, said = MISTAKES[name]
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        mistake(make)
    assert said in str(caught.value)
    assert not Path("mask/mask_config.json").exists() or "load" in name


def test_a_class_that_would_ignore_the_mask(checkpoints):
    with pytest.raises(ValueError, match="model_class BertForMaskedLM would ignore the mask of"):
        load(checkpoints["window"], BertForMaskedLM)


def test_pruning_and_a_search_that_ends(tiny_config, tmp_path):
    from transformers import BertConfig

    model = attach(BertForMaskedLM(tiny_config(BertConfig)), "dam_s")
    rows = [{"input_ids": torch.ones(8, dtype=torch.long), "labels": torch.ones(8, dtype=torch.long)}] * 4
    arguments = TrainingArguments(str(tmp_path / "run"), max_steps=4, use_cpu=True, report_to=[], disable_tqdm=True)
    callbacks = [ProgressivePruning(0.5), SearchSchedule(0.5)]
    trainer = SparseBertTrainer(model, arguments, train_dataset=rows, callbacks=callbacks)
    with pytest.raises(ValueError, match="search_end 0.5 has no meaning with pruning"):
        trainer.train()
    assert trainer.state.global_step == 0


# The environment


@pytest.mark.slow
@pytest.mark.parametrize(
    "variables, line, code, said",
    [
        ({"PYTHONIOENCODING": "ascii"}, "{} theory bigbird --length 8", 0, "Universality"),
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, "{} theory bigbird --length 8", 0, "Univ"),
        ({}, "{} theory --all --length 8 | head -1", 1, "Universality"),
        ({}, "{} --version >&-", 0, ""),
        ({}, "{} theory windw 2>&-", 2, ""),
        ({"OMP_NUM_THREADS": "abc"}, "{} theory window --length 8", 0, "Universality"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, "{} theory window --length 8", 0, "Universality"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "{} theory window --length 8", 2, "MASTER_ADDR"),
        ({"HOME": "/nowhere"}, "{} theory window --length 8", 0, "Universality"),
    ],
)  # fmt: skip
def test_environments(variables, line, code, said):
    command = line.format(f"{sys.executable} -m sparsebert")
    if "|" in command:
        command = f"{command}; exit ${{PIPESTATUS[0]}}"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr and "Traceback" not in done.stderr
