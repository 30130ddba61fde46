"""Pre-training and fine-tuning as a user runs them: every recipe for two steps, the artifacts, bad input."""

import json
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file
from transformers import AutoTokenizer
from transformers.utils import logging

from sparsebert.commands import parse
from sparsebert.data.tasks import TASKS
from sparsebert.data.tasks.glue import GLUE
from sparsebert.recipe_files import load_recipe
from sparsebert.training.finetuning.finetuning_arguments import FinetuningArguments
from sparsebert.training.finetuning.finetuning_runs import SECTIONS
from sparsebert.training.finetuning.task_data import prepare


ROOT = Path(__file__).parents[2]
SMALL, FINETUNE_RECIPE = ROOT / "recipes/small.yaml", ROOT / "recipes/finetune_small.yaml"
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
PRETRAIN_RECIPES = [path for path in RECIPES if "text" in yaml.safe_load(path.read_text())["data"]]
OTHERS = ("translation", "demo_minilm")
FINETUNE_RECIPES = [path for path in RECIPES if path not in PRETRAIN_RECIPES and path.stem not in OTHERS]
TINY = (
    "--max_steps 2 --per_device_train_batch_size 2 --gradient_accumulation_steps 1 --hidden_size 32 "
    "--intermediate_size 32 --num_hidden_layers 2 --num_attention_heads 4 --vocab_size 600 --bf16 false"
).split()
# Their tasks are run by test_finetuning.py; the recipes of GLUE are like mrpc.
SLOW = {"glue", *GLUE, "squad", "squad_v2", "swag"} - {"mrpc"}
ONE_RUN = "--sweep false --seeds 1 --max_steps 2 --report_to none".split()


def run(verb, *arguments):
    command, values = parse([verb, *map(str, arguments)])
    return command.run(values)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A text file of 30 documents: paragraphs of the license, in turn."""
    paragraphs = [" ".join(block.split()) for block in (ROOT / "LICENSE").read_text().split("\n\n") if block.split()]
    starts = (i % (len(paragraphs) - 8) for i in range(30))
    documents = ["\n".join([*paragraphs[start : start + 8], f"It begins at {start}."]) for start in starts]
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text("\n\n".join(documents) + "\n")
    return path


@pytest.fixture(scope="session")
def pretrained(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrained") / "model"
    rest = ["--nsp", "true", "--pictures", "false", "--output_dir", folder]
    run("pretrain", SMALL, "--text", text, "--validation", text, *TINY, *rest)
    assert 0 <= json.loads((folder / "metrics.json").read_text())["nsp_accuracy"] <= 1
    return folder


@pytest.mark.parametrize("recipe", PRETRAIN_RECIPES, ids=lambda path: path.stem)
def test_pretraining_recipe(recipe, text, pretrained, tmp_path):
    folder = tmp_path / "run"
    mixers = yaml.safe_load(recipe.read_text())["model"].get("token_mixers")
    pictures = {"heads.png", "mean_probs.png", "offset_profile.png"} if recipe == SMALL else set()
    arguments = [*TINY, "--pictures", bool(pictures), "--output_dir", folder]
    arguments += ["--token_mixers", mixers[:2]] if mixers else []
    if recipe.stem == "cramming":
        arguments += ["--gradient_accumulation_steps", 2]  # its batch grows
    if recipe.stem == "continue":
        arguments += ["--base_model", pretrained, "--max_length", 32, "--mask_length", 32, "--target_sparsity", 0.7]
    run("pretrain", recipe, "--text", text, "--validation", text, *arguments)
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["steps"] == 2 and 0 <= metrics["sparsity"] < 1
    if "lm_loss" in metrics:
        assert 4 < metrics["lm_loss"] < 9
    else:
        assert 4 < metrics["mlm_loss"] < 9 and 0 <= metrics["mlm_accuracy"] <= 1
    assert (metrics["nsp_accuracy"] is None) != yaml.safe_load(recipe.read_text())["data"]["nsp"]
    assert {"diagonal", "offset_1", "special_tokens"} <= set(metrics["positions"])
    files = {path.name for path in folder.iterdir()}
    assert {"model.safetensors", "config.json", "mask.safetensors", "mask_config.json", "tokenizer.json"} <= files
    assert {name for name in files if name.endswith(".png")} == pictures
    assert list(folder.rglob("events.out.tfevents*")), "no TensorBoard log"


def test_finetuning_on_the_builtin_task(pretrained, small_corpus, tmp_path):
    arguments = ["--task", "builtin", "--task_kwargs", json.dumps(small_corpus), *ONE_RUN]
    arguments += ["--report_to", "tensorboard", "--model", pretrained]
    arguments += ["--output_dir", tmp_path / "run"]
    run("finetune", FINETUNE_RECIPE, *arguments)
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["sparsity"] == json.loads((pretrained / "metrics.json").read_text())["sparsity"]
    assert 0 <= metrics["score"] <= 1 and 0 <= metrics["simple_baseline"]["accuracy"] <= 1
    assert (tmp_path / "run" / "mask.safetensors").read_bytes() == (pretrained / "mask.safetensors").read_bytes()
    assert json.loads((tmp_path / "run" / "config.json").read_text())["id2label"] == {"0": "email", "1": "json"}
    assert list((tmp_path / "run").rglob("events.out.tfevents*")), "no TensorBoard log"


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(r, marks=[pytest.mark.slow] * (r.stem in SLOW)) for r in FINETUNE_RECIPES],
    ids=lambda path: path.stem,
)
def test_finetuning_recipe(recipe, checkpoints, task_data, tmp_path):
    data = yaml.safe_load(recipe.read_text())["data"]
    arguments = [*ONE_RUN, "--model", checkpoints["window"], "--output_dir", tmp_path / "run", "--max_length", 32]
    arguments += ["--data", task_data(data.get("task")), "--doc_stride", 8, "--max_question_length", 8]
    if not {"task", "all"} & data.keys():
        arguments += ["--task", "rte"]
    run("finetune", recipe, *arguments)
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    runs = metrics["glue"] if "glue" in metrics else {recipe.stem: metrics}
    for task, values in runs.items():
        assert values["steps"] == 2 and values["mask"] == "window" and 0 < values["sparsity"] < 1, task
    assert (tmp_path / "run/results.md").read_text().startswith("**Fine-tuning**")


@pytest.mark.parametrize("task", [name for name, task in TASKS.items() if task.paper_settings])
def test_recipes_hold_the_papers_protocol(task):
    """SparseBERT, Table 5, and three repetitions; the settings of the tasks are tested with them."""
    for name, what in ((task, {"task": task}), ("glue", {"all": True})):
        recipe = load_recipe(name, SECTIONS)
        assert recipe["data"] == what | {"sweep": True, "seeds": 3} and set(recipe["training"]) == {"output_dir"}


def test_training_through_a_found_mask(pretrained, text, tmp_path):
    folder = tmp_path / "run"
    arguments = [SMALL, "--text", text, "--validation", text, *TINY, "--output_dir", folder, "--pictures", "false"]
    arguments += ["--mask", pretrained, "--tokenizer", pretrained]
    run("pretrain", *arguments)
    assert (folder / "mask.safetensors").read_bytes() == (pretrained / "mask.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match="is not empty"):
        run("pretrain", *arguments)


def test_weights_are_trained_with_their_own_tokenizer(checkpoints, pretraining_flags, tmp_path):
    folder = tmp_path / "my runs/\u00fcn\u00ef/"
    words = pretraining_flags(folder, "--base_model", checkpoints["stock"], "--search", "dam_s", "--max_steps", "2")
    place = words.index("--tokenizer")
    run(*words[:place], *words[place + 2 :])
    base, trained = (AutoTokenizer.from_pretrained(each) for each in (checkpoints["stock"], folder))
    assert base.get_vocab() == trained.get_vocab()
    assert load_file(folder / "mask_probs.safetensors")["probs"].shape == (4, 14)


def test_one_class_is_said(checkpoints, caplog, monkeypatch, tmp_path):
    monkeypatch.setattr(logging.get_logger("transformers"), "propagate", True)
    for name, label in (("train", "entailment"), ("dev", "not_entailment")):
        rows = "".join(f"{i}\tw1 w{i}\tw2\t{label}\n" for i in range(8))
        (tmp_path / f"{name}.tsv").write_text("index\tsentence1\tsentence2\tlabel\n" + rows)
    prepare(FinetuningArguments(task="rte", model=checkpoints["window"], data=str(tmp_path), max_length=32))
    assert "all 8 examples of train are of one class, 'entailment'" in caplog.text
