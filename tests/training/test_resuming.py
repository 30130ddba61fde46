"""Runs that are killed and resumed: the same batches, losses and mask as those of one that was not."""

import json
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch
from processes import run_code
from safetensors.torch import load_file
from transformers import TrainingArguments

from sparsebert import SparseBertConfig, SparseBertForMaskedLM, SparseMask
from sparsebert.data.examples import pretraining_collator, pretraining_dataset
from sparsebert.training.finetuning.finetuning_runs import finetune
from sparsebert.training.pretraining.pretraining_run import pretrain
from sparsebert.training.runs.checkpoint_manifests import MANIFEST_NAME
from sparsebert.training.trainer import SparseBertTrainer


STEPS = 14
CPU = {"use_cpu": True, "report_to": "none", "disable_tqdm": True}
# Kills itself as no program can prevent, in the middle of a step.
CHILD = """
import json, os, signal, sys
from transformers import TrainerCallback
from sparsebert.training.pretraining import pretraining_run as pretraining

recipe, step, event = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

class Killer(TrainerCallback):
    pass

def kill(self, args, state, control, **kwargs):
    if state.global_step >= step:
        os.kill(os.getpid(), signal.SIGKILL)

setattr(Killer, event, kill)

class Trainer(pretraining.SparseBertTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.add_callback(Killer())

pretraining.SparseBertTrainer = Trainer
pretraining.pretrain(recipe)
"""
EVENTS = ("on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_save")
FORMS = {
    "dam_s": {"search": "dam_s"},
    "dam_u": {"search": "dam_u", "allow_empty_rows": True},
    "dam_b": {"search": "dam_b", "block_size": 16},
    "vertical_slash": {"search": "vertical_slash"},
    "soft": {"search": "soft", "allow_empty_rows": True, "sparsity_weight": 0.0},
    "target": {"search": "dam_s", "target_sparsity": 0.6, "sparsity_weight": 0.0},
    "exact": {
        **{
            "search": "dam_s",
            "target_sparsity": 0.6,
            "sparsity_weight": 0.0,
            "hard": True,
            "noise_scale": 0.0,
            "mask_constant": 7.0,
        },
        **{"sparsity_scope": "global", "share_layers": False},
    },
}


@pytest.fixture(autouse=True)
def one_thread():
    """As the processes that are killed have: with another number of threads, sums are rounded otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    rng, path = random.Random(0), tmp_path_factory.mktemp("text") / "text.txt"
    sentences = (" ".join(f"word{rng.randrange(60)}" for _ in range(8)) for _ in range(500))
    path.write_text("\n\n".join(f"{sentence.capitalize()}." for sentence in sentences))
    return path


def recipe_of(text, folder, model, **training):
    """Several epochs of a few steps, with dropout and noise."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    common = {"vocab_size": 120, "max_position_embeddings": 32, "mask_length": 32, "sparsity_weight": 1e-4}
    arguments = {"output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 16}
    arguments |= {"learning_rate": 1e-2, "logging_steps": 1, "save_steps": 2} | CPU
    return {
        "data": {"text": str(text), "nsp": False, "max_length": 32, "pictures": False, "max_tokens": 3000},
        "model": sizes | common | model,
        "training": arguments | training,
    }


def log_of(folder):
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [(entry["step"], entry["loss"], entry["grad_norm"]) for entry in history if "loss" in entry]


def run_and_kill(recipe, step, event):
    """Run a recipe in a process of its own, killed at this step."""
    done = run_code(CHILD, json.dumps(recipe), step, event, folder=Path(recipe["training"]["output_dir"]).parent)
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]


def resumed(recipe, folder):
    """The recipe that goes on with a run, from its first step if there is no checkpoint yet."""
    # A Trainer writes the state last.
    checkpoints = {int(path.parent.name.split("-")[1]): path.parent for path in folder.glob("*/trainer_state.json")}
    if not checkpoints:
        return recipe | {"data": recipe["data"] | {"overwrite": True}}
    return elsewhere(recipe, checkpoints[max(checkpoints)], folder)


def elsewhere(recipe, checkpoint, folder, **changed):
    """The recipe that resumes from a checkpoint in another folder, with changes by section."""
    training = {"resume_from_checkpoint": str(checkpoint), "output_dir": str(folder)}
    new = recipe | {"training": recipe["training"] | training}
    return new | {section: new[section] | fields for section, fields in changed.items()}


def assert_same_run(folder, other):
    assert len(log_of(other)) == STEPS and log_of(folder) == log_of(other)
    mask = SparseMask.from_pretrained(folder)
    assert mask == SparseMask.from_pretrained(other) and 0.05 < mask.sparsity < 0.95
    weights, expected = (load_file(path / "model.safetensors") for path in (folder, other))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_killed_and_resumed_equals_the_uninterrupted_run(text, tmp_path):
    recipe = recipe_of(text, tmp_path / "killed", FORMS["dam_s"])
    run_and_kill(recipe, 9, "on_pre_optimizer_step")
    again = resumed(recipe, tmp_path / "killed")
    state = json.loads(Path(again["training"]["resume_from_checkpoint"], "trainer_state.json").read_text())
    clock = state["stateful_callbacks"]["TrainingClock"]["attributes"]
    metrics = pretrain(again)
    assert metrics["train_seconds"] > clock["elapsed"] > 0
    whole = pretrain(recipe_of(text, tmp_path / "whole", FORMS["dam_s"]))
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    tokens = [run["tokens_per_second"] * run["train_seconds"] for run in (metrics, whole)]
    assert tokens[0] == pytest.approx(tokens[1], rel=1e-3) and tokens[0] > 0.9 * STEPS * 16 * 32  # rounded


def test_rows_grouped_by_length_go_on_in_the_same_order(text, tmp_path):
    recipe = recipe_of(text, tmp_path / "whole", FORMS["dam_s"], train_sampling_strategy="group_by_length")
    recipe["data"] |= {"nsp": True, "max_tokens": 1000}
    pretrain(recipe)
    for step in (2, 8):  # of the first epoch and of a later one
        pretrain(elsewhere(recipe, tmp_path / f"whole/checkpoint-{step}", tmp_path / f"from {step}"))
        expected, found = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", f"from {step}"))
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_what_the_search_found_goes_to_another_folder(text, tmp_path):
    recipe = recipe_of(text, tmp_path / "first", FORMS["target"], max_steps=6)
    recipe["data"]["search_end"] = 0.3
    expected = pretrain(recipe)
    (tmp_path / "second").mkdir()
    (tmp_path / "second/mask_probs.safetensors").write_bytes(b"of another search")
    found = pretrain(elsewhere(recipe, tmp_path / "first/checkpoint-4", tmp_path / "second", data={"overwrite": True}))
    assert found["search_outcome"] == expected["search_outcome"] and found["positions"] == expected["positions"]
    files = [(tmp_path / name / "mask_probs.safetensors").read_bytes() for name in ("first", "second")]
    assert files[0] == files[1]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_four_kills_of_each_form(text, tmp_path, form):
    """Each at a random step and moment, the last ones of runs that had been resumed before."""
    rng = random.Random(form)
    recipe = recipe_of(text, tmp_path / "killed", FORMS[form])
    for step in sorted(rng.sample(range(STEPS), 4)):
        run_and_kill(resumed(recipe, tmp_path / "killed"), step, rng.choice(EVENTS))
    pretrain(resumed(recipe, tmp_path / "killed"))
    pretrain(recipe_of(text, tmp_path / "whole", FORMS[form]))
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


@pytest.fixture(scope="module")
def stopped(text, tmp_path_factory):
    """A recipe, and a checkpoint of its second step."""
    folder = tmp_path_factory.mktemp("stopped")
    recipe = recipe_of(text, folder, FORMS["dam_s"], max_steps=3)
    pretrain(recipe)
    return recipe, folder / "checkpoint-2"


def test_another_text_is_refused(stopped, tmp_path):
    """The same name with other contents."""
    path = Path(stopped[0]["data"]["text"])
    before = path.read_text()
    try:
        path.write_text(before.replace("word7", "word8"))
        with pytest.raises(ValueError, match=r"inputs.checksum of the rows: \d+ -> \d+"):
            pretrain(elsewhere(*stopped, tmp_path / "new"))
        path.write_text(before)
        other = shutil.copy(path, tmp_path / "other.txt")
        with pytest.raises(ValueError, match="data.text: .* -> .*/other.txt"):
            pretrain(elsewhere(*stopped, tmp_path / "new", data={"text": str(other)}))
    finally:
        path.write_text(before)


def test_what_may_change(stopped, tmp_path):
    changed = {"logging_steps": 2, "save_steps": 5, "per_device_eval_batch_size": 2, "dataloader_num_workers": 1}
    data = {"max_validation_tokens": 1000}
    metrics = pretrain(elsewhere(*stopped, tmp_path / "new", training=changed, data=data))
    assert metrics["steps"] == 3


@pytest.fixture(scope="module")
def stopped_finetuning(checkpoints, glue_folder, tmp_path_factory):
    """The recipe of a fine-tuning on RTE, and its first checkpoint."""
    folder = tmp_path_factory.mktemp("finetuning") / "run"
    training = {"output_dir": str(folder), "max_steps": 2, "per_device_train_batch_size": 4, "save_strategy": "steps"}
    training |= {"save_steps": 1} | CPU
    data = {"task": "rte", "model": str(checkpoints["window"]), "data": str(glue_folder), "max_length": 32}
    recipe = {"data": data, "model": {}, "training": training}
    finetune(recipe)
    return recipe, folder / "checkpoint-1"


def test_finetuning_with_another_recipe_is_refused(stopped_finetuning, tmp_path):
    changed = elsewhere(
        *stopped_finetuning,
        tmp_path / "new",
        data={"mask": "bigbird", "max_length": 24, "max_train_examples": 40},
        model={"hidden_dropout_prob": 0.2},
        training={"learning_rate": 1e-3, "seed": 1},
    )
    with pytest.raises(ValueError, match="cannot resume with another recipe") as error:
        finetune(changed)
    assert {line.strip() for line in str(error.value).splitlines()} > {
        *("training.learning_rate: 2e-05 -> 0.001", "training.seed: 42 -> 1", "data.mask: None -> 'bigbird'"),
        *("data.max_length: 32 -> 24", "data.max_train_examples: None -> 40"),
        "model.hidden_dropout_prob: 0.0 -> 0.2",
    }
    assert not (tmp_path / "new").exists()


def test_finetuning_on_other_examples_is_refused(stopped_finetuning, glue_folder, tmp_path):
    """Files of the same names, number of rows and words, with one label changed."""
    recipe, checkpoint = stopped_finetuning
    path = glue_folder / "RTE/train.tsv"
    before = path.read_text()
    try:
        path.write_text(before.replace("\tnot_entailment", "\tentailment", 1))
        with pytest.raises(ValueError, match=r"inputs.checksum of the rows: \d+ -> \d+") as error:
            finetune(elsewhere(recipe, checkpoint, tmp_path / "new"))
        assert len(str(error.value).splitlines()) == 2
    finally:
        path.write_text(before)


def test_what_may_change_in_finetuning(stopped_finetuning, tmp_path):
    changed = {"seeds": [42], "simple_baseline": False, "test_split": [], "n_best_size": 3}
    recipe = elsewhere(*stopped_finetuning, tmp_path / "new", data=changed)
    recipe["training"] |= {"logging_steps": 1, "save_steps": 2, "dataloader_num_workers": 1}
    finetune(recipe)
    metrics = json.loads((tmp_path / "new/metrics.json").read_text())
    assert metrics["steps"] == 2 and "simple_baseline" not in metrics
    assert sorted(path.name for path in (tmp_path / "new").glob("checkpoint-*")) == ["checkpoint-2"]


def test_checkpoint_without_a_recipe_is_not_compared(stopped, tmp_path, caplog):
    """It can be resumed from, and what comes after has the record."""
    recipe, checkpoint = stopped
    old = shutil.copytree(checkpoint, tmp_path / "checkpoint-2")
    state = json.loads((old / "trainer_state.json").read_text())
    record = state["stateful_callbacks"].pop("RecipeRecord")
    (old / "trainer_state.json").write_text(json.dumps(state))
    (old / MANIFEST_NAME).unlink()
    pretrain(elsewhere(recipe, old, tmp_path / "new", data={"allow_partial_resume": True}))
    assert "does not hold the recipe it was trained with" in caplog.text
    later = json.loads((tmp_path / "new/checkpoint-3/trainer_state.json").read_text())
    assert later["stateful_callbacks"]["RecipeRecord"] == record


def test_workers_and_prefetching_change_nothing(word_tokenizer, tmp_path):
    """Batches, noise and dropout, over several epochs; persistent workers were started in the first one."""
    documents = [[" ".join(f"w{(7 * i + j) % 90}" for j in range(60))] for i in range(20)]
    rows = pretraining_dataset(documents, word_tokenizer, 32)
    losses = []
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    sizes |= {"vocab_size": 100, "max_position_embeddings": 32, "search": "dam_s", "sparsity_weight": 1e-4}
    fields = {"save_strategy": "no", "logging_steps": 1, "num_train_epochs": 2, "per_device_train_batch_size": 8}
    fields |= {"eval_strategy": "epoch"} | CPU
    two = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}
    for workers in ({}, two):
        torch.manual_seed(0)
        model = SparseBertForMaskedLM(SparseBertConfig(**sizes))
        collator = pretraining_collator(word_tokenizer, seed=0)
        arguments = TrainingArguments(str(tmp_path), **fields, **workers)
        trainer = SparseBertTrainer(model, arguments, collator, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        losses.append([entry.get("loss", entry.get("eval_loss")) for entry in trainer.state.log_history])
    assert losses[0] == losses[1] and len(set(losses[0])) > 3


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_resumed_with_other_workers_equals_the_uninterrupted_run(text, tmp_path, workers):
    """From the middle of an epoch and over the next ones."""
    recipe = recipe_of(text, tmp_path / "whole", FORMS["dam_s"], max_steps=9, save_steps=3)
    pretrain(recipe)
    workers = {"dataloader_num_workers": workers}
    pretrain(elsewhere(recipe, tmp_path / "whole/checkpoint-3", tmp_path / "new", training=workers))
    assert log_of(tmp_path / "whole") == log_of(tmp_path / "new") and len(log_of(tmp_path / "new")) == 9
