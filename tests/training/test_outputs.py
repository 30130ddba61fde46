"""Output folders: nothing in them is lost, one run has them at a time, and what did not finish can go on."""

import itertools
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from conftest import SEARCH, contents
from filelock import FileLock
from processes import start, start_command, wait_for
from safetensors import SafetensorError

from sparsebert import load
from sparsebert.analysis.reporting.reports import read_metrics, report_tables
from sparsebert.commands import main
from sparsebert.files import LOCK_NAME, UNFINISHED_NAME, locked_output, take_lock, write_metrics
from sparsebert.masks.sparse_mask import SparseMask
from sparsebert.output_folders import ASIDE_NAME, check_free, replacing
from sparsebert.training.runs import checkpoint_manifests
from sparsebert.training.runs.checkpoint_manifests import MANIFEST_NAME, check_whole, newest_whole, whole_checkpoint
from sparsebert.training.runs.run_folders import choose_folder, run_folder


pytestmark = pytest.mark.usefixtures("without_matplotlib")


# Nothing old is lost


def test_a_mistake_leaves_the_finished_run(finished, finetuning_flags, said, tmp_path):
    folder = finished("finetune", tmp_path / "run")
    before = contents(folder)
    for flags, what in (
        ("--learning_rate -1", "learning_rate must be a number of at least 0, got -1.0"),
        ("--mask nowhere/x/y", "mask: there is no folder"),
        ("--optim adamx", "adamx"),
        ("--dataloader_drop_last --per_device_train_batch_size 64", "take a smaller batch"),  # in the first step
    ):
        assert what in said(finetuning_flags(folder, "--overwrite", *flags.split()))
        assert contents(folder) == before


def test_a_run_that_replaces_another_does_so_at_the_end(finished, pretraining_flags, tmp_path, monkeypatch):
    folder = finished("pretrain", tmp_path / "run")
    (folder / "notes.txt").write_text("mine")
    before = contents(folder)

    def fail(*args, **kwargs):
        assert contents(folder).items() >= before.items()
        raise OSError("the last step fails")

    monkeypatch.setattr("sparsebert.training.runs.run_life.write_metrics", fail)
    assert main(pretraining_flags(folder, "--pattern", "window", "--overwrite")) == 1
    assert contents(folder).items() >= before.items()
    assert newest_whole(folder / ASIDE_NAME / "run").name == "checkpoint-6"
    monkeypatch.undo()
    # The run that failed at its end goes on there, and replaces the first one when it is done.
    assert main(pretraining_flags(folder, "--pattern", "window", "--overwrite", "--resume")) == 0
    metrics = json.loads((folder / "metrics.json").read_text())
    assert (metrics["pattern"], metrics["steps"]) == ("window", 6)
    assert SparseMask.from_pretrained(folder).metadata["pattern"] == "window"
    assert (folder / "notes.txt").read_text() == "mine"
    assert not {ASIDE_NAME, LOCK_NAME, UNFINISHED_NAME, "mask_probs.safetensors"} & set(os.listdir(folder))


def _killed_in_a_move(words, number):
    """A command that is killed when it would move its file of this number into the output folder."""
    replace, moves = os.replace, itertools.count()

    def move(source, target):
        if ASIDE_NAME in Path(source).parts and ASIDE_NAME not in Path(target).parts and next(moves) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.replace, sys.modules["matplotlib"] = move, None
    main(words)


def kill_in_a_move(words, number, folder):
    process = start(_killed_in_a_move, words, number)
    process.join(120)
    assert process.exitcode == -signal.SIGKILL and ASIDE_NAME in os.listdir(folder)


def test_a_run_that_is_killed_while_it_replaces_another(finished, pretraining_flags, said, tmp_path):
    """No part of it passes for the whole, and `--resume` moves the rest."""
    folder, flags = finished("pretrain", tmp_path / "run"), ("--pattern", "window", "--save_strategy", "no")
    kill_in_a_move(pretraining_flags(folder, *flags, "--overwrite"), 3, folder)
    assert not (folder / "metrics.json").exists()
    with pytest.raises(FileExistsError, match="stopped while its files were moved: add --resume"):
        choose_folder(folder, False, None, False, False)
    assert "holds a finished run, there is nothing to resume" in said(pretraining_flags(folder, *flags, "--resume"))
    assert json.loads((folder / "metrics.json").read_text())["pattern"] == "window"
    assert SparseMask.from_pretrained(folder) == load(folder).sparse_attention.mask
    assert not {ASIDE_NAME, UNFINISHED_NAME, "mask_probs.safetensors"} & set(os.listdir(folder))


def test_a_fine_tuning_that_is_killed_while_it_replaces_another(finished, finetuning_flags, tmp_path):
    """`--resume` moves the rest and reads the result, with the recipe that it is of."""
    folder, flags = finished("finetune", tmp_path / "run"), ("--learning_rate", "1e-3")
    kill_in_a_move(finetuning_flags(folder, *flags, "--overwrite"), 0, folder)
    assert not (folder / "metrics.json").exists()
    done = json.loads((folder / ASIDE_NAME / "run" / "metrics.json").read_text())
    assert main(finetuning_flags(folder, *flags, "--resume")) == 0
    assert json.loads((folder / "metrics.json").read_text()) == done
    assert "learning_rate: 0.001" in (folder / "recipe.yaml").read_text()
    assert not {ASIDE_NAME, UNFINISHED_NAME} & set(os.listdir(folder))
    assert main(finetuning_flags(folder)) == 2


def test_a_run_that_was_killed_before_it_replaced_anything(finished, pretraining_flags, said, tmp_path):
    before = contents(finished("pretrain", tmp_path))
    for flags in ([], ["--resume"]):
        process = start(_killed_at_the_start, tmp_path)
        process.join(120)
        assert process.exitcode == -signal.SIGKILL
        assert {LOCK_NAME, UNFINISHED_NAME} <= set(os.listdir(tmp_path))  # the lock ends with its process
        assert "holds a finished run" in said(pretraining_flags(tmp_path, *SEARCH, *flags))
        assert contents(tmp_path) == before


def _killed_at_the_start(folder):
    with locked_output(folder):
        os.kill(os.getpid(), signal.SIGKILL)


def test_resuming_elsewhere_does_not_replace_a_finished_run(finished, pretraining_flags, said, tmp_path):
    finished("pretrain", tmp_path / "a")
    before = contents(finished("pretrain", tmp_path / "b"))
    resumed = pretraining_flags(tmp_path / "b", *SEARCH, "--resume_from_checkpoint", tmp_path / "a/checkpoint-4")
    assert "--overwrite" in said(resumed)
    assert contents(tmp_path / "b") == before
    assert main([*resumed, "--overwrite"]) == 0
    assert json.loads((tmp_path / "b/metrics.json").read_text())["steps"] == 6
    assert not (tmp_path / "b/checkpoint-2").exists() and (tmp_path / "a/checkpoint-4").exists()


@pytest.mark.parametrize("place", [".", ".."])
def test_the_current_folder_as_the_output_folder(
    finetuning_flags, pretraining_flags, post_hoc_flags, checkpoints, tmp_path, monkeypatch, place
):
    """Files of the user stay, in it and around it, also those with names like the files of a run."""
    here = tmp_path / "here"
    (here / "sub").mkdir(parents=True)
    (tmp_path / "beside").mkdir()
    output = Path(os.path.normpath(here / place))
    names = ("model-backup.safetensors", "checkpoint-old/w.bin", "_unfinished/draft.txt", "scores.csv")
    mine = [here / "sub/notes.txt", tmp_path / "beside/notes.txt", *(output / name for name in names)]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    monkeypatch.chdir(here)
    lengthen = ["lengthen", checkpoints["stock"], "--length", "128", "--output_dir", place]
    pretrain = pretraining_flags(place, *SEARCH)
    for words in (lengthen, pretrain if place == "." else finetuning_flags(place), post_hoc_flags(place)):
        assert main([*words, "--overwrite"]) == 0
        assert [path.read_text() for path in mine] == ["mine"] * len(mine)
        assert os.listdir(output / ASIDE_NAME) == ["draft.txt"]
        assert not {UNFINISHED_NAME, LOCK_NAME} & set(os.listdir(output))
    assert json.loads((output / "metrics.json").read_text())["sparsity"]
    assert not (output / "trainer_state.json").exists()
    assert SparseMask.from_pretrained(output).metadata["run"] == output.name


def test_a_folder_with_a_name_like_that_of_a_run_is_not_replaced(post_hoc_flags, said, checkpoints, tmp_path):
    output = tmp_path / "out"
    (output / ASIDE_NAME).mkdir(parents=True)
    (output / ASIDE_NAME / "thesis.txt").write_text("mine")
    before = contents(output)
    lengthen = ["lengthen", checkpoints["stock"], "--length", "128", "--output_dir", output]
    for words in (lengthen, post_hoc_flags(output)):
        assert "is not empty" in said(words) and contents(output) == before


def test_a_run_does_not_replace_what_it_starts_from(finetuning_flags, said, checkpoints, tmp_path):
    repo, same = tmp_path / "repo", "is the folder of model"
    for name in ("v1", "checkpoint-6"):
        shutil.copytree(checkpoints["window"], repo / name)
    before = contents(tmp_path)
    inside = ("--subfolder", "v1", "--output_dir", repo / "v1")
    for words, what in (
        (["lengthen", repo, "--length", "128", *inside], same),
        (finetuning_flags(tmp_path, "--model", repo, *inside), same),
        (finetuning_flags(tmp_path, "--model", repo / "v1", "--output_dir", tmp_path / "no/../repo/v1"), same),
        (finetuning_flags(repo, "--model", repo / "checkpoint-6"), "holds model"),
    ):
        assert what in said([*words, "--overwrite"])
        assert contents(tmp_path) == before


def test_the_root_is_no_output_folder():
    for check in (lambda: choose_folder(Path("/"), True, None, False, False), lambda: check_free("/", overwrite=True)):
        with pytest.raises(ValueError, match="output_dir / is the root of the file system"):
            check()


def test_a_refused_run_leaves_no_folder(pretraining_flags, said, tmp_path):
    said(pretraining_flags(tmp_path / "new/run", "--base_model", tmp_path / "nothing"))
    said(pretraining_flags(tmp_path / "new/run", *SEARCH, "--attn_implementation", "sparse_cpu"))
    assert not (tmp_path / "new").exists()


# Seeds of random masks


def test_a_random_mask_follows_the_seed_of_its_run(finetuning_flags, pretraining_flags, tmp_path):
    bigbird = ("--mask", "bigbird")
    assert main(finetuning_flags(tmp_path / "three", *bigbird, "--seeds", "[1, 2]")) == 0
    masks = [SparseMask.from_pretrained(tmp_path / f"three/seed-{seed}") for seed in (1, 2)]
    assert masks[0] != masks[1]
    runs = [json.loads((tmp_path / f"three/seed-{seed}/metrics.json").read_text()) for seed in (1, 2)]
    assert [run["mask_seed"] for run in runs] == [1, 2]
    metrics = json.loads((tmp_path / "three/metrics.json").read_text())
    assert [run["mask_seed"] for run in metrics["seeds"].values()] == [1, 2] and "mask_seed" not in metrics
    assert main(finetuning_flags(tmp_path / "given", *bigbird, "--seed", "2", "--mask_seed", "1")) == 0
    assert SparseMask.from_pretrained(tmp_path / "given") == masks[0]
    for seed in (1, 2):
        output, flags = tmp_path / f"pretrained-{seed}", ("--pattern", "bigbird", "--seed", seed)
        assert main(pretraining_flags(output, *flags, "--save_strategy", "no", "--max_steps", "1")) == 0
        assert json.loads((output / "metrics.json").read_text())["mask_seed"] == seed
        masks.append(SparseMask.from_pretrained(output))
    assert masks[2] != masks[3]


# Signals


def signaled(process, number, errors):
    """What a process has said on its error stream after a signal."""
    os.kill(process.pid, number)
    process.join(120)
    if process.exitcode is None:
        process.kill()  # it would run on beside the other tests
    return errors.read_text()


@pytest.fixture
def post_hoc_flags(checkpoints, tmp_path):
    """`post_hoc_flags(output, *flags)`: words of `sparsebert search` on a tiny BERT."""
    text = tmp_path / "words.txt"
    text.write_text("\n\n".join(" ".join(f"w{(i * j) % 90}" for j in range(60)) for i in range(1, 260)))
    fields = {"model": checkpoints["stock"], "data": text, "validation": text}
    fields |= {"target_sparsity": 0.5, "max_length": 16, "steps": 2, "patterns": False, "max_validation_tokens": 256}
    fields |= {"timed": False, "rest": "none"}
    words = [str(word) for name, value in fields.items() for word in (f"--{name}", value)]
    return lambda output, *flags: ["search", *words, "--output_dir", str(output), *map(str, flags)]


def test_a_search_leaves_nothing_of_a_fine_tuned_model_or_several(finetuning_flags, post_hoc_flags, tmp_path):
    for folder, flags in ((tmp_path / "one", ()), (tmp_path / "several", ("--seeds", "2"))):
        assert main(finetuning_flags(folder, *flags)) == 0
        (folder / "notes.txt").touch()
        assert main(post_hoc_flags(folder, "--overwrite")) == 0
        patterns = ("predictions_*", "recipe.yaml", "results.md", "seed-*", "experiment.yaml")
        assert not [path for pattern in patterns for path in folder.glob(pattern)]
        assert (folder / "mask.safetensors").is_file() and (folder / "notes.txt").is_file()


def test_a_run_that_replaces_another_leaves_the_files_of_the_user(finished, pretraining_flags, tmp_path):
    folder = finished("pretrain", tmp_path / "run")
    names = ("recipe.yaml", "results.md", "translations.txt", "RTE.tsv", "predictions_mine.json")
    for name in names:
        (folder / name).write_text("mine")
    assert main(pretraining_flags(folder, "--overwrite")) == 0
    assert [(folder / name).read_text() for name in names] == ["mine"] * len(names)


def test_runs_that_replace_others_leave_nothing_of_them(finished, finetuning_flags, tmp_path):
    """One run where there were two, two where there was one, and fewer than before; the user's files stay."""
    folder = finished("finetune", tmp_path / "run")
    single = {"model.safetensors", "mask.safetensors", "config.json", "recipe.yaml", "README.md"}
    (folder / "notes.txt").touch()
    assert single < {path.name for path in folder.iterdir()}
    assert main(finetuning_flags(folder, "--seeds", "2", "--overwrite")) == 0
    several = {"seed-42", "seed-43", "metrics.json", "results.md", "experiment.yaml", "notes.txt"}
    assert {path.name for path in folder.iterdir()} - {"runs"} == several
    assert single < {path.name for path in (folder / "seed-42").iterdir()}
    assert main(finetuning_flags(folder, "--seeds", "[43, 44]", "--overwrite")) == 0
    assert {path.name for path in folder.glob("seed-*")} == {"seed-43", "seed-44"}
    assert main(finetuning_flags(folder, "--overwrite")) == 0
    assert not [*folder.glob("seed-*"), *folder.glob("experiment.yaml")]
    assert single | {"notes.txt"} < {path.name for path in folder.iterdir()}


def test_metrics_of_strangers_name_no_folder_to_remove(finished, finetuning_flags, tmp_path):
    folder, victim = finished("finetune", tmp_path / "run"), tmp_path / "victim"
    for path in (victim, folder / "mine"):
        path.mkdir()
    names = ["../victim", str(victim), "..", ".", "", "/", "mine", "seed-1/../../victim", "x=/../../victim", 3, None]
    seeds = {str(number): {"folder": name} for number, name in enumerate(names)}
    cells = {"cells": [{"folder": name} for name in names]}
    for metrics in (
        {"seeds": seeds, "sweep": cells, "glue": {str(name): {} for name in names}},
        {"seeds": {"1": {}, "2": 3}, "sweep": "best", "glue": 3},
        [1, 2],
    ):
        (folder / "metrics.json").write_text(json.dumps(metrics))
        assert main(finetuning_flags(folder, "--overwrite")) == 0
        assert victim.is_dir() and (folder / "mine").is_dir()
        assert json.loads((folder / "metrics.json").read_text())["task"] == "rte"


def test_a_run_elsewhere_that_is_linked_is_kept(finetuning_flags, said, tmp_path):
    """Nor does a run of the same name write to it."""
    folder, elsewhere = tmp_path / "run", tmp_path / "disk"
    assert main(finetuning_flags(folder, "--seeds", "2")) == 0
    (folder / "seed-43").rename(elsewhere)
    (folder / "seed-43").symlink_to(elsewhere)
    (folder / "latest").symlink_to(folder / "nowhere")
    before = contents(elsewhere)
    assert "seed-43 is a link" in said(finetuning_flags(folder, "--seeds", "2", "--overwrite"))
    assert contents(elsewhere) == before
    assert main(finetuning_flags(folder, "--overwrite")) == 0
    assert not (folder / "seed-43").exists() and (elsewhere / "model.safetensors").is_file()
    assert (folder / "results.md").is_file() and (folder / "latest").is_symlink()


def test_a_search_whose_mask_has_empty_rows_is_frozen_when_that_is_accepted(pretraining_flags, tmp_path, capsys):
    """The training is not lost: the field that the message asks for may change when the run is resumed."""
    words = ["--search", "dam_u", "--target_sparsity", "0.95", "--hard", "false"]
    flags = pretraining_flags(tmp_path / "run", *words)
    assert main(flags) == 2 and "mask rows keep nothing" in capsys.readouterr().err
    assert main([*flags, "--resume", "--allow_empty_rows", "true"]) == 0
    assert load(tmp_path / "run").sparse_attention.mask.sparsity > 0.9


def test_a_search_for_a_trained_model_leaves_no_row_empty(post_hoc_flags, tmp_path, caplog):
    """A mask that would is mended, so that the search is not lost."""
    flags = ("--search", "soft", "--diagonal", "remove", "--special_tokens", "none", "--target_sparsity", "0.9")
    assert main(post_hoc_flags(tmp_path / "empty", *flags, "--allow_empty_rows")) == 0
    assert not SparseMask.from_pretrained(tmp_path / "empty").to_table().any(-1).all()
    assert main(post_hoc_flags(tmp_path / "mended", *flags)) == 0
    assert "Now each of them keeps its best entry" in caplog.text
    mask = SparseMask.from_pretrained(tmp_path / "mended")
    assert mask.to_table().any(-1).all() and abs(mask.sparsity - 0.9) < 0.005


def test_a_file_of_the_user_is_not_taken_for_runs(finished, finetuning_flags, said, tmp_path):
    """Neither as permission to go on in the folder, nor as a file to replace or remove."""
    folder = finished("finetune", tmp_path / "run")
    mine = "# my notes\ndata: {task: rte}\nmodel: {}\ntraining: {}\n"
    (folder / "experiment.yaml").write_text(mine)
    for flags in ((), ("--overwrite",)):
        assert main(finetuning_flags(folder, *flags)) == 0
        assert (folder / "experiment.yaml").read_text() == mine
    for flags in ((), ("--overwrite",)):
        assert "experiment.yaml is not of a fine-tuning" in said(finetuning_flags(folder, "--seeds", "2", *flags))
    assert (folder / "model.safetensors").is_file() and (folder / "experiment.yaml").read_text() == mine


def test_damaged_recipes_are_named(finished, finetuning_flags, said, tmp_path):
    (finished("finetune", tmp_path) / "recipe.yaml").write_text("")
    assert "recipe.yaml was changed or is damaged" in said(finetuning_flags(tmp_path))


def test_other_folders_for_runs_need_overwrite(finetuning_flags, said, tmp_path):
    sweep = ("--sweep", "{learning_rate: [1e-4, 2e-4]}")
    assert main(finetuning_flags(tmp_path, "--seeds", "2")) == 0
    assert "holds runs with sweep False and seeds 2" in said(finetuning_flags(tmp_path, *sweep))
    assert main(finetuning_flags(tmp_path, *sweep, "--overwrite")) == 0
    assert not list(tmp_path.glob("seed-*")) and len(list(tmp_path.glob("learning_rate=*"))) == 2
    assert main(finetuning_flags(tmp_path, *sweep, "--seeds", "2")) == 0


def test_runs_that_go_on_without_overwrite_leave_nothing_of_the_replaced_one(finished, finetuning_flags, tmp_path):
    """As after a kill of the second of two runs that replace one."""
    folder = finished("finetune", tmp_path / "run")
    before = (folder / "metrics.json").read_bytes()
    assert main(finetuning_flags(folder, "--seeds", "2", "--overwrite")) == 0
    shutil.rmtree(folder / "seed-43")
    (folder / "metrics.json").write_bytes(before)
    for name in ("model.safetensors", "config.json"):
        shutil.copy(folder / "seed-42" / name, folder)
    assert main(finetuning_flags(folder, "--seeds", "2")) == 0
    assert not [*folder.glob("*.safetensors"), *folder.glob("config.json")]
    assert {path.name for path in folder.glob("seed-*")} == {"seed-42", "seed-43"}
    # More runs, or fewer, beside the finished ones remove none.
    assert main(finetuning_flags(folder, "--seeds", "[42, 44]")) == 0
    assert {path.name for path in folder.glob("seed-*")} == {"seed-42", "seed-43", "seed-44"}


def test_a_signal_in_a_post_hoc_search_saves_a_checkpoint_and_leaves_what_was_there(post_hoc_flags, said, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.json").write_text("{}")
    words = post_hoc_flags(folder, "--steps", "1000000", "--save_steps", "1", "--overwrite")
    process = start_command(words, tmp_path / "errors")
    wait_for(process, lambda: list(folder.rglob(MANIFEST_NAME)))
    errors = signaled(process, signal.SIGHUP, tmp_path / "errors")
    assert process.exitcode == 129, errors
    last = errors.strip().splitlines()[-1]
    assert re.search(r"stopped by SIGHUP at step \d+, with a checkpoint: add --resume", last)
    assert (folder / "metrics.json").read_text() == "{}" and newest_whole(folder / ASIDE_NAME / "run") is not None
    assert "data.steps: 1000000 -> 2" in said(post_hoc_flags(folder, "--resume"))


@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "over another"])
def test_a_signal_while_a_post_hoc_search_is_written(post_hoc_flags, said, tmp_path, monkeypatch, overwrite):
    """All files but the last are there by then."""
    folder = tmp_path / "run"
    if overwrite:
        folder.mkdir()
        (folder / "metrics.json").write_text("{}")
    before = contents(folder)

    def terminate(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("sparsebert.training.searching.search_run.write_metrics", terminate)
    words = post_hoc_flags(folder, "--steps", "3", *["--overwrite"] * overwrite)
    assert main(words) == 143
    assert before.items() <= contents(folder).items()
    monkeypatch.undo()
    assert overwrite or "complete up to checkpoint-3: add --resume" in said(words)
    assert main([*words, "--resume"]) == 0 and json.loads((folder / "metrics.json").read_text())["steps"] == 3
    assert not (folder / ASIDE_NAME).exists() and not list(folder.rglob("checkpoint-*"))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_signal_in_a_translation_saves_and_the_run_goes_on(tmp_path, said):
    pytest.importorskip("sacrebleu")
    (tmp_path / "pairs.tsv").write_text("".join(f"a{i % 7} b{i % 5}\tc{i % 7} d{i % 5}\n" for i in range(60)))
    folder, pairs = tmp_path / "run", tmp_path / "pairs.tsv"
    fields = {
        **{"train": pairs, "test": pairs, "max_test_pairs": 4, "num_beams": 1, "max_length": 8, "pattern": "dense"},
        **{"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "mask_length": 8},
        **{"intermediate_size": 16, "max_position_embeddings": 8, "max_steps": 90, "save_strategy": "steps"},
        **{"save_steps": 20, "per_device_train_batch_size": 4, "use_cpu": True, "report_to": "none"},
        **{"disable_tqdm": True, "output_dir": folder},
    }
    words = ["translate", *(str(word) for name, value in fields.items() for word in (f"--{name}", value))]
    process = start_command(words, tmp_path / "errors")
    wait_for(process, (folder / "checkpoint-20" / MANIFEST_NAME).exists)
    errors = signaled(process, signal.SIGTERM, tmp_path / "errors")
    assert process.exitcode == 143 and "--resume" in errors.strip().splitlines()[-1], errors
    checkpoint = newest_whole(folder)
    assert 20 < int(checkpoint.name.partition("-")[2]) < 90 and not (folder / "metrics.json").exists()
    assert "SIGTERM" in json.loads((folder / UNFINISHED_NAME).read_text())["stopped"]
    assert f"complete up to {checkpoint.name}: add --resume" in said(words)
    assert "data.max_length: 8 -> 7" in said([*words, "--resume", "--max_length", "7"])
    assert main([*words, "--resume", "--max_test_pairs", "3"]) == 0
    assert json.loads((folder / "metrics.json").read_text())["steps"] == 90
    assert not (folder / UNFINISHED_NAME).exists()
    (table,) = report_tables(read_metrics([folder]))
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["mask"], row["training pairs"], row["test pairs"], row["steps"]) == ("dense", "60", "3", "90")


# Complete checkpoints


@pytest.fixture
def saved(saved_run, tmp_path):
    """A copy of the folder of `saved_run`."""
    return Path(shutil.copytree(saved_run, tmp_path / "saved"))


DAMAGED = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "config.json", "model.safetensors")


def test_a_damaged_checkpoint_is_refused_by_name(saved):
    checkpoint = saved / "checkpoint-6"
    for name in (*DAMAGED, MANIFEST_NAME):
        content = (path := checkpoint / name).read_bytes()
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        for damaged in (content[:middle], flipped if name != MANIFEST_NAME else b"", None):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            with pytest.raises(ValueError, match=name):
                check_whole(checkpoint)
            if damaged is None:
                if name != "model.safetensors":
                    check_whole(checkpoint, allow_partial=True)
            else:
                with pytest.raises(ValueError, match=name):
                    check_whole(checkpoint, allow_partial=True)
            assert newest_whole(saved) == saved / "checkpoint-4"
        path.write_bytes(content)
        check_whole(checkpoint)


def test_a_manifest_of_something_else_is_refused_by_name(saved):
    for content in ("[]", "{}", '{"files": {"a": 3}}', '{"files": {"a": {"size": 1}}}'):
        (saved / "checkpoint-6" / MANIFEST_NAME).write_text(content)
        with pytest.raises(ValueError, match=f"{MANIFEST_NAME} is damaged"):
            check_whole(saved / "checkpoint-6", allow_partial=True)
        assert newest_whole(saved) == saved / "checkpoint-4"


@pytest.mark.parametrize("flag", [["--resume"], ["--resume_from_checkpoint", "true"]], ids=lambda flag: flag[0])
def test_resuming_takes_the_newest_complete_checkpoint(saved, pretraining_flags, caplog, flag):
    for path in (saved / "checkpoint-6/optimizer.pt", saved / "checkpoint-6" / MANIFEST_NAME):
        path.unlink()
    assert main(pretraining_flags(saved, *SEARCH, *flag)) == 0
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "checkpoint-6" in said and MANIFEST_NAME in said and f"Resuming from {saved / 'checkpoint-4'}" in said
    assert json.loads((saved / "metrics.json").read_text())["steps"] == 6


def test_resuming_without_a_checkpoint(saved, pretraining_flags, said, tmp_path):
    assert "there is no folder" in said(pretraining_flags(saved, "--resume_from_checkpoint", tmp_path / "none"))
    for path in saved.glob(f"checkpoint-*/{MANIFEST_NAME}"):
        path.unlink()
    line = said(pretraining_flags(saved, *SEARCH, "--resume"))
    assert "no complete checkpoint" in line and "checkpoint-6" in line and "checkpoint-2" in line
    assert "not empty" in said(pretraining_flags(saved, *SEARCH))
    assert main(pretraining_flags(tmp_path / "new", *SEARCH, "--resume")) == 0  # nothing is there to go on from
    assert "finished run" in said(pretraining_flags(tmp_path / "new", *SEARCH, "--resume"))


def test_several_seeds_of_a_pre_training(pretraining_flags, said, tmp_path, capsys):
    """The finished ones are kept when the command goes on, and all are of one recipe."""
    words = pretraining_flags(
        tmp_path / "runs", "--pattern", "window", "--seeds", "2", "--seed", "7", "--max_steps", "2"
    )
    for flags, line in (
        (["--resume_from_checkpoint", "true"], "resume_from_checkpoint has no meaning with several seeds"),
        (["--seeds", "[3, 3]"], "a list of different seeds"),
    ):
        assert line in said([*words, *flags])
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "Mean of 2 runs" in out and f"written to {tmp_path / 'runs/seed-8'}" in out
    assert main(["report", str(tmp_path / "runs"), "--seeds"]) == 0 and "Mean of 2 runs" in capsys.readouterr().out
    before = contents(tmp_path / "runs/seed-7")
    assert "seed-7 holds a finished run: add --resume" in said(words)
    (tmp_path / "runs/seed-8/metrics.json").unlink()  # as in a run that was killed
    assert main(["report", str(tmp_path / "runs"), "--seeds"]) == 2
    assert (
        f"needs two or more pre-trainings, searches or translations of one recipe, got {tmp_path / 'runs/seed-7'}"
        in (capsys.readouterr().err)
    )
    shutil.rmtree(tmp_path / "runs/seed-8")
    assert main([*words, "--resume"]) == 0 and contents(tmp_path / "runs/seed-7") == before
    shutil.rmtree(tmp_path / "runs/seed-8")
    line = said([*words, "--resume", "--learning_rate", "0.5"])
    assert "seed-7: cannot resume with another recipe" in line and "training.learning_rate: 0.001 -> 0.5" in line
    assert not (tmp_path / "runs/seed-8").exists()


@pytest.mark.parametrize("replacing", [False, True])
def test_a_run_killed_in_its_first_checkpoint_starts_again(
    saved, pretraining_flags, said, caplog, tmp_path, replacing
):
    """Nothing is lost by that: there is no older checkpoint. One of another program is not taken for such a one."""
    folder = tmp_path / "run"
    home = folder / ASIDE_NAME / "run" if replacing else folder
    shutil.copytree(saved / "checkpoint-2", home / "checkpoint-2")
    (home / "checkpoint-2" / MANIFEST_NAME).unlink()
    (home / "checkpoint-2/optimizer.pt").write_bytes(b"half")
    words = pretraining_flags(folder, *SEARCH, "--resume")
    if not replacing:
        assert "no complete checkpoint" in said(words)
        (folder / UNFINISHED_NAME).write_text("{}")
    else:
        (folder / "metrics.json").write_text("{}")
    assert main(words) == 0
    assert caplog.text.count("has no complete checkpoint to resume from: the run starts at the beginning") == 1
    assert (folder / "model.safetensors").read_bytes() == (saved / "model.safetensors").read_bytes()
    assert SparseMask.from_pretrained(folder) == SparseMask.from_pretrained(saved)


@pytest.mark.parametrize("damaged", [False, True], ids=["no checkpoint", "a damaged one"])
def test_a_run_that_started_over_without_a_checkpoint(saved, damaged):
    """The checkpoints of the first attempt are still there."""
    aside = saved / ASIDE_NAME / saved.name
    aside.mkdir(parents=True)
    if damaged:
        shutil.copytree(saved / "checkpoint-2", aside / "checkpoint-2")
        (aside / "checkpoint-2" / MANIFEST_NAME).unlink()
    newest = str(saved / "checkpoint-6")
    assert choose_folder(saved, False, True, False, True) == (saved, newest)
    with pytest.raises(FileExistsError, match="complete up to checkpoint-6: add --resume"):
        choose_folder(saved, False, None, False, True)
    assert choose_folder(saved, True, None, False, True) == (aside, None)


def test_several_runs_go_on(finetuning_flags, said, tmp_path):
    words = finetuning_flags(tmp_path, "--seeds", "2", "--save_strategy", "steps", "--save_steps", "1")
    assert main(words) == 0
    second = tmp_path / "seed-43"
    for path in (second / "metrics.json", tmp_path / "metrics.json"):
        path.unlink()
    before = (second / "checkpoint-1/model.safetensors").stat().st_mtime_ns
    assert f"{second} holds an unfinished run, complete up to checkpoint-2: add --resume" in said(words)
    (second / ASIDE_NAME / "seed-43").mkdir(parents=True)  # of a run that started over, killed before its checkpoint
    assert f"{second} holds an unfinished run, complete up to checkpoint-2: add --resume" in said(words)
    assert main([*words, "--resume"]) == 0
    assert not (second / ASIDE_NAME).exists()
    assert (second / "checkpoint-1/model.safetensors").stat().st_mtime_ns == before
    assert json.loads((second / "metrics.json").read_text())["steps"] == 2


# A full disk


def test_a_failed_save_keeps_what_the_limit_would_delete(pretraining_flags, tmp_path, said, monkeypatch):
    folder, write = tmp_path / "run", checkpoint_manifests._write_manifest

    def write_or_fail(path):
        if path.name == "checkpoint-4":
            raise OSError(28, "No space left on device")
        write(path)

    monkeypatch.setattr(checkpoint_manifests, "_write_manifest", write_or_fail)
    assert "No space left on device" in said(pretraining_flags(folder, *SEARCH, "--save_total_limit", "1"), code=1)
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-2"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device"), "No space left"),
        (SafetensorError("I/O error: No space left on device"), "No space left"),
        (RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0"), "is the disk full"),
        (RuntimeError("basic_ios::clear: iostream error"), "is the disk full"),
        (Exception("No space left on device (os error 28)"), "No space left"),  # of tokenizers
    ],
)
def test_what_libraries_say_of_a_full_disk(tmp_path, error, said):
    """Of a checkpoint, and of the files of a run."""
    with (
        pytest.raises(OSError, match=f"checkpoint-1 could not be saved.*{said}"),
        whole_checkpoint(tmp_path / "checkpoint-1"),
    ):
        (tmp_path / "checkpoint-1").mkdir()
        raise error
    assert not (tmp_path / "checkpoint-1").exists()
    with pytest.raises(OSError, match=said), locked_output(tmp_path), replacing(tmp_path, tmp_path, new=True):
        raise error


def test_a_checkpoint_that_fails_for_any_reason_is_removed(tmp_path):
    with pytest.raises(KeyError, match="weights"), whole_checkpoint(tmp_path / "checkpoint-1"):
        (tmp_path / "checkpoint-1").mkdir()
        raise KeyError("weights")
    assert not (tmp_path / "checkpoint-1").exists()


def test_a_run_that_fails_removes_only_what_it_has_half_written(tmp_path):
    files = {"rows.json": b'{"a": 1}\n{"b": 2}\n', "corpus.bin": b"\1\2"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(OSError, match="full"), run_folder(tmp_path, resume=True, unfinished=True) as (folder, _):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("full")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files


def test_metrics_file(tmp_path):
    metrics = write_metrics(tmp_path / "metrics.json", {"loss": 1.23456789, "steps": 3, "search": None})
    assert metrics == {"loss": 1.23457, "steps": 3, "search": None}
    assert json.loads((tmp_path / "metrics.json").read_text()) == metrics


def test_a_lock_of_another_user_is_named(tmp_path, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied", self.lock_file)

    monkeypatch.setattr(FileLock, "_acquire", refuse)
    for use in (lambda: take_lock(FileLock(tmp_path / LOCK_NAME)), locked_output(tmp_path).__enter__):
        with pytest.raises(
            PermissionError, match=re.escape(f"{tmp_path / LOCK_NAME}: this lock file cannot be opened")
        ):
            use()
