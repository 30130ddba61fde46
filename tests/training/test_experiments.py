"""Seeds, grids and all of GLUE: what is run, what is not run again, what is compared."""

import json
import math
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparsebert.analysis.reporting.reports import read_metrics, report_tables
from sparsebert.training.finetuning.comparison import compare
from sparsebert.training.finetuning.finetuning_plan import PAPER_GRID
from sparsebert.training.finetuning.finetuning_runs import finetune


pytestmark = pytest.mark.usefixtures("without_matplotlib")


TRAINING = {"max_steps": 2, "use_cpu": True, "report_to": "none", "disable_tqdm": True}


@pytest.fixture
def recipe(checkpoints, glue_folder, tmp_path):
    """`recipe(training, **data)`: RTE with two steps of training into `tmp_path / "run"`."""

    def make(training=None, **data):
        return {
            "data": {"task": "rte", "model": checkpoints["window"], "data": str(glue_folder), "max_length": 32} | data,
            "model": {},
            "training": TRAINING | {"output_dir": str(tmp_path / "run")} | (training or {}),
        }

    return make


def metrics_of(folder):
    return json.loads((Path(folder) / "metrics.json").read_text())


# Seeds


def test_one_seed_is_one_run_in_the_output_folder(recipe, tmp_path):
    assert finetune(recipe()) == tmp_path / "run"
    assert metrics_of(tmp_path / "run")["seed"] == 42
    time = (weights := tmp_path / "run/model.safetensors").stat().st_mtime_ns
    finetune(recipe())  # finished
    assert weights.stat().st_mtime_ns == time
    with pytest.raises(ValueError, match="training.learning_rate 'unset', not 0.001"):
        finetune(recipe({"learning_rate": 1e-3}))
    with pytest.raises(ValueError, match="data.max_length 32, not 24"):
        finetune(recipe(max_length=24))
    finetune(recipe({"learning_rate": 1e-3}, overwrite=True))
    assert weights.stat().st_mtime_ns != time


def test_a_finished_run_of_other_examples_is_not_kept(recipe, tmp_path, glue_folder):
    shutil.copytree(glue_folder, tmp_path / "glue")
    finetune(recipe(data=str(tmp_path / "glue")))
    path = tmp_path / "glue/RTE/train.tsv"
    head, first, *rows = path.read_text().splitlines()
    path.write_text("\n".join([head, *rows, first]) + "\n")
    with pytest.raises(ValueError, match="inputs.checksum of the rows of train"):
        finetune(recipe(data=str(tmp_path / "glue")))


@pytest.mark.parametrize(
    ("values", "message"),
    [(["a/b", "c"], "values name folders, and cannot hold / or"), (["a", "a"], "sweep: run_name has 'a' twice")],
)
def test_cells_need_folders_of_their_own(recipe, tmp_path, values, message):
    with pytest.raises(ValueError, match=message):
        finetune(recipe(sweep={"run_name": values}))
    assert not (tmp_path / "run").exists()


def test_a_folder_of_another_task(recipe):
    folder = finetune(recipe({"seed": 7}, seeds=2))
    assert {path.name for path in folder.glob("seed-*")} == {"seed-7", "seed-8"}  # counted from the first
    with pytest.raises(ValueError, match="holds runs of rte"):
        finetune(recipe(seeds=2, task="cola"))


def test_one_checkpoint_is_not_resumed_by_several_runs(recipe):
    with pytest.raises(ValueError, match="resume_from_checkpoint is for a single run"):
        finetune(recipe({"resume_from_checkpoint": "somewhere"}, seeds=2))


def test_an_interrupted_run_can_be_resumed(recipe, tmp_path):
    saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    folder = finetune(recipe(saving))
    whole = load_file(folder / "model.safetensors")
    (folder / "metrics.json").unlink()
    saved_at = (folder / "checkpoint-2/model.safetensors").stat().st_mtime_ns
    finetune(recipe(saving | {"resume_from_checkpoint": str(folder / "checkpoint-2")}))
    for name, weight in load_file(folder / "model.safetensors").items():
        torch.testing.assert_close(weight, whole[name], msg=name)
    assert (folder / "checkpoint-2/model.safetensors").stat().st_mtime_ns == saved_at  # it did not start over
    finetune(recipe(saving))  # finished: the same recipe


def test_another_model_at_the_same_place_is_noticed(recipe, checkpoints, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(checkpoints["window"], model)
    finetune(recipe(seeds=1, model=str(model)))
    config = (model / "config.json").read_text()
    (model / "config.json").write_text(json.dumps(json.loads(config) | {"hidden_dropout_prob": 0.3}))
    with pytest.raises(ValueError, match="holds a run with inputs.model"):
        finetune(recipe(seeds=1, model=str(model)))
    (model / "config.json").write_text(config)
    weights = load_file(model / "model.safetensors")
    weights["bert.embeddings.LayerNorm.weight"] += 1
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="holds a run with inputs.model"):
        finetune(recipe(seeds=1, model=str(model)))


def test_seeds_are_averaged(recipe, tmp_path):
    folder = finetune(recipe(seeds=[3, 5]))
    runs = [metrics_of(folder / f"seed-{seed}") for seed in (3, 5)]
    assert [single["seed"] for single in runs] == [3, 5]
    assert (folder / "seed-3/model.safetensors").read_bytes() != (folder / "seed-5/model.safetensors").read_bytes()
    metrics = metrics_of(folder)
    losses = [single["splits"]["validation"]["loss"] for single in runs]
    loss = metrics["splits"]["validation"]["loss"]
    assert loss["mean"] == pytest.approx(sum(losses) / 2, abs=1e-5)
    assert loss["std"] == pytest.approx(abs(losses[0] - losses[1]) / 2**0.5, abs=1e-4)
    assert metrics["score"] == pytest.approx(sum(single["score"] for single in runs) / 2, abs=1e-5)
    assert set(metrics["seeds"]) == {"3", "5"}


def test_a_metric_that_is_not_finite_does_not_stop_the_summary(recipe, tmp_path):
    """In a file it is null."""
    folder = finetune(recipe(seeds=2))
    metrics = metrics_of(folder / "seed-43")
    metrics["splits"]["validation"]["loss"] = None
    (folder / "seed-43/metrics.json").write_text(json.dumps(metrics))
    finetune(recipe(seeds=2))
    splits = metrics_of(folder)["splits"]["validation"]
    assert splits["loss"]["mean"] is None and splits["accuracy"]["mean"] is not None


def test_a_baseline_is_not_the_output_folder(recipe):
    folder = finetune(recipe())
    with pytest.raises(ValueError, match="is the folder of baseline, which would be replaced"):
        finetune(recipe(baseline=str(folder), overwrite=True))
    assert metrics_of(folder)


def test_a_seed_gives_the_same_run_alone_or_among_others(recipe, tmp_path):
    finetune(recipe(seeds=[1, 2]))
    alone = finetune(recipe({"output_dir": str(tmp_path / "alone")}, seeds=[2]))
    weights = [load_file(folder / "model.safetensors") for folder in (tmp_path / "run/seed-2", alone)]
    torch.testing.assert_close(*weights)


def test_finished_runs_are_not_run_again(recipe, tmp_path):
    finetune(recipe(seeds=2))
    first = tmp_path / "run/seed-42"
    (tmp_path / "run/seed-43/metrics.json").unlink()  # as if it had been interrupted
    # Its card gets the results of all seeds.
    times = {path: path.stat().st_mtime_ns for path in first.iterdir() if path.name != "README.md"}
    finetune(recipe(seeds=3))
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert set(times) | {first / "README.md"} == set(first.iterdir())
    assert len(metrics_of(tmp_path / "run")["seeds"]) == 3


# Grids


def test_grid(recipe, tmp_path):
    grid = {"learning_rate": [0.0, 5e-3], "weight_decay": [0.1, 0.01]}
    folder = finetune(recipe({"max_steps": 12, "save_strategy": "steps", "save_steps": 12}, sweep=grid, seeds=2))
    metrics = metrics_of(folder)
    cells = metrics["sweep"]["cells"]
    assert [cell["settings"] for cell in cells] == [
        {"learning_rate": rate, "weight_decay": decay} for rate in (0.0, 5e-3) for decay in (0.1, 0.01)
    ]
    best = max(cells, key=lambda cell: cell["score"])
    assert metrics["sweep"]["best"] == best["settings"]
    assert [Path(single["folder"]).parent.name for single in metrics["seeds"].values()] == [best["folder"]] * 2
    assert metrics["seeds"]["42"]["score"] == best["score"]
    # Weights and checkpoints of the best cell only, the metrics and predictions of all.
    for name in ("model.safetensors", "checkpoint-12"):
        assert {path.parents[1].name for path in folder.rglob(f"seed-*/{name}")} == {best["folder"]}
    assert len(list(folder.rglob("predictions_validation.jsonl"))) == 5
    table = next(table for table in report_tables(read_metrics([folder])) if table.title.startswith("Grid"))
    assert len(table.rows) == 4 and sum("best" in row for row in table.rows) == 1


def test_settings_need_only_fit_in_the_cells(recipe):
    fields = {"max_steps": 1, "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}
    kinds = ["cosine_with_min_lr", "cosine_warmup_with_min_lr"]
    cells = metrics_of(finetune(recipe(fields, sweep={"lr_scheduler_type": kinds})))["sweep"]["cells"]
    assert [cell["settings"]["lr_scheduler_type"] for cell in cells] == kinds


def test_grid_goes_on_cell_by_cell(recipe, tmp_path):
    finetune(recipe(sweep={"learning_rate": ["1e-4", 1e-3]}))  # YAML takes 1e-4 for a text
    done = tmp_path / "run/learning_rate=0.001/seed-42/metrics.json"
    time = done.stat().st_mtime_ns
    folder = finetune(recipe(sweep={"learning_rate": [1e-4, 1e-3, 1e-2]}))
    assert done.stat().st_mtime_ns == time and len(metrics_of(folder)["sweep"]["cells"]) == 3


@pytest.mark.slow
def test_a_grid_that_shrinks_trains_the_best_cell_again_for_its_weights(recipe):
    first = {"max_steps": 12}
    folder = finetune(recipe(first, sweep={"learning_rate": [5e-3, 0.0]}))
    best = metrics_of(folder)["sweep"]["best"]["learning_rate"]
    other = ({5e-3, 0.0} - {best}).pop()
    assert not (folder / f"learning_rate={other}/seed-42/model.safetensors").exists()
    finetune(recipe(first, sweep={"learning_rate": [other]}))
    assert (folder / f"learning_rate={other}/seed-42/model.safetensors").exists()


def test_a_cell_that_diverged_is_not_the_best(recipe):
    arguments = recipe({"max_steps": 3, "max_grad_norm": 0.0}, task="stsb", sweep={"learning_rate": [1e30, 1e-3]})
    metrics = metrics_of(finetune(arguments))
    assert metrics["sweep"]["cells"][0]["score"] is None  # JSON has no NaN
    assert metrics["sweep"]["best"] == {"learning_rate": 1e-3} and not math.isnan(metrics["score"])


@pytest.mark.slow
def test_every_cell_of_the_papers_grid(recipe):
    """SparseBERT, Table 5."""
    assert PAPER_GRID == {"learning_rate": [1e-5, 1.5e-5, 2e-5, 3e-5, 4e-5, 5e-5], "weight_decay": [0.1, 0.01]}
    folder = finetune(recipe({"max_steps": 1}, sweep=True, max_train_examples=4))
    cells = [cell["settings"] for cell in metrics_of(folder)["sweep"]["cells"]]
    assert cells == [{"learning_rate": r, "weight_decay": d} for r in PAPER_GRID["learning_rate"] for d in (0.1, 0.01)]


# Comparison


def test_comparison_with_a_baseline(recipe, tmp_path):
    baseline = finetune(recipe({"output_dir": str(tmp_path / "baseline"), "learning_rate": 0.0}, seeds=3))
    folder = finetune(recipe({"max_steps": 30, "learning_rate": 5e-3}, seeds=2, baseline=str(baseline)))
    comparison = metrics_of(folder)["comparison"]
    ours, theirs = ([metrics_of(path / f"seed-{seed}")["score"] for seed in (42, 43)] for path in (folder, baseline))
    result = comparison["validation"]
    assert comparison["baseline"] == str(baseline) and result["num_seeds"] == 2
    assert result["difference"] == pytest.approx(sum(ours) / 2 - sum(theirs) / 2, abs=1e-4)
    low, high = result["interval"]
    assert low <= result["difference"] <= high and low < high
    assert compare(folder, folder)["validation"]["interval"] == [0, 0]
    low, high = compare(folder, baseline, resamples=1)["validation"]["interval"]
    assert low == high


def test_a_finished_run_forgets_its_baseline(recipe, tmp_path):
    baseline = finetune(recipe({"output_dir": str(tmp_path / "baseline")}))
    assert "comparison" in metrics_of(finetune(recipe(baseline=str(baseline))))
    assert "comparison" not in metrics_of(finetune(recipe()))


def test_comparison_of_answers(recipe, squad_folder, tmp_path):
    data = {"task": "squad", "data": str(squad_folder), "max_length": 32, "doc_stride": 8, "max_question_length": 8}
    first, second = (finetune(recipe({"output_dir": str(tmp_path / str(s)), "seed": s}, **data)) for s in (1, 2))
    with pytest.raises(ValueError, match="no seed in common"):
        compare(first, second)
    assert compare(first, first)["validation"]["difference"] == 0


def test_baselines_that_cannot_be_compared_stop_before_training(recipe, tmp_path):
    baseline = str(finetune(recipe({"output_dir": str(tmp_path / "baseline")})))
    (tmp_path / "damaged").mkdir()

    def refused(message, training=None, **data):
        with pytest.raises((ValueError, OSError), match=message):
            finetune(recipe(training, **{"baseline": baseline} | data))
        assert not (tmp_path / "run/model.safetensors").exists()

    refused("of task 'rte', expected one of 'cola'", task="cola")
    refused(r"seeds \[42\], none of \[9\]", {"seed": 9})
    refused("nowhere: there is no finished run", baseline="nowhere")
    for content in ("[]", "{", '{"task": "rte"}', '{"task": "rte", "main_metric": "accuracy", "splits": {}}'):
        (tmp_path / "damaged/metrics.json").write_text(content)
        refused("^baseline: .*damaged", baseline=str(tmp_path / "damaged"))


def test_no_file_holds_the_token(recipe):
    """Another token is no other run."""
    folder = finetune(recipe({"hub_token": "hf_first"}, token="hf_second", seeds=2))
    stored = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert not [path for path, content in stored.items() if b"hf_first" in content or b"hf_second" in content]
    finetune(recipe({"hub_token": "hf_other"}, seeds=2))
    assert all(path.read_bytes() == content for path, content in stored.items() if path.suffix == ".safetensors")


def test_a_baseline_on_other_examples(recipe, glue_folder, tmp_path):
    baseline = finetune(recipe({"output_dir": str(tmp_path / "baseline")}))
    shutil.copytree(glue_folder / "RTE", tmp_path / "RTE")
    text = (tmp_path / "RTE/dev.tsv").read_text().splitlines()
    (tmp_path / "RTE/dev.tsv").write_text("\n".join(text[:-1]) + "\n")
    with pytest.raises(ValueError, match="other examples of validation"):
        finetune(recipe(data=str(tmp_path / "RTE"), baseline=str(baseline)))
    (baseline / "predictions_validation.jsonl").unlink()
    with pytest.raises(ValueError, match="baseline .* has no predictions of validation to compare with"):
        finetune(recipe(baseline=str(baseline)))


# GLUE


def test_all_of_glue(recipe, tmp_path):
    arguments = recipe(all=True, task=None)
    folder = finetune(arguments)
    metrics = metrics_of(folder)
    assert set(metrics["glue"]) == {"cola", "stsb", "mnli", "qnli", "rte"}
    assert set(metrics["missing"]) == {"sst2", "mrpc", "qqp", "wnli"}
    assert metrics["num_columns_9"] == 6 and metrics["num_columns_8"] == 5
    scores = [metrics["glue"][task]["score"] for task in ("cola", "stsb", "qnli", "rte")]
    mnli = metrics["glue"]["mnli"]["splits"]
    matched, mismatched = (mnli[f"validation_{split}"]["accuracy"] for split in ("matched", "mismatched"))
    assert metrics["average_9"] == pytest.approx((sum(scores) + matched + mismatched) / 6, abs=1e-4)
    assert metrics["average_8"] == pytest.approx((sum(scores) + (matched + mismatched) / 2) / 5, abs=1e-4)
    table = next(table for table in report_tables(read_metrics([folder])) if table.title.startswith("GLUE"))
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert row["QNLI"].endswith("*") and row["QQP"] == "-" and not row["RTE"].endswith("*")
    assert row["average of 9"].endswith("(6 of 9)")
    notes = " ".join(table.notes)
    assert "QNLI (train_part40, 40 examples)" in notes
    assert "no training or development set for sst2, mrpc, qqp, wnli" in notes
    with zipfile.ZipFile(folder / "submission.zip") as archive:
        assert archive.namelist() == ["MNLI-m.tsv", "RTE.tsv"]  # the others have no test set
        assert archive.read("RTE.tsv") == (folder / "rte/RTE.tsv").read_bytes()
    # A second call finds everything done.
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("model.safetensors")}
    finetune(arguments)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("model.safetensors")} == times


@pytest.mark.slow
def test_all_of_glue_with_a_grid_shows_the_grids(recipe, glue_folder, tmp_path):
    for task in ("RTE", "CoLA"):
        shutil.copytree(glue_folder / task, tmp_path / "data" / task)
    grid = {"learning_rate": [1e-4, 1e-3]}
    folder = finetune(recipe(all=True, task=None, data=str(tmp_path / "data"), sweep=grid, seeds=2))
    titles = [table.title for table in report_tables(read_metrics([folder]))]
    assert titles == ["Fine-tuning", "Grid of run/cola", "Grid of run/rte", "GLUE, development sets, %"]


def test_what_is_wrong_with_one_task_stops_all_before_training(recipe, glue_folder, tmp_path):
    for task in ("RTE", "CoLA"):
        shutil.copytree(glue_folder / task, tmp_path / "data" / task)
    arguments = {"all": True, "task": None, "data": str(tmp_path / "data")}
    baseline = finetune(recipe({"output_dir": str(tmp_path / "baseline")}, **arguments))
    shutil.rmtree(baseline / "rte")
    with pytest.raises(FileNotFoundError, match="no finished run .* of rte"):
        finetune(recipe(baseline=str(baseline), **arguments))
    with open(tmp_path / "data/RTE/dev.tsv", "a") as file:
        file.write("99\tw1\tw2\tmaybe\n")
    with pytest.raises(ValueError, match="RTE/dev.tsv: row 22, field 'label': 'maybe'"):
        finetune(recipe(**arguments))
    assert not (tmp_path / "run").exists()


def test_glue_without_any_data(recipe, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no task of GLUE"):
        finetune(recipe(all=True, task=None, data=str(tmp_path / "empty")))


# Bad input


@pytest.mark.parametrize(
    "data, message",
    [
        ({"task": None}, "--task NAME or --all"),
        ({"all": True}, "--task NAME or --all"),
        ({"model": None}, "--model"),
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"seeds": [1, 1]}, "seeds must be .* different"),
        ({"sweep": {"learning_rat": [1]}}, "did you mean 'learning_rate'"),
        ({"sweep": {"learning_rate": 1e-3}}, "learning_rate must be a list of values"),
        ({"sweep": {"learning_rate": ["fast"]}}, "sweep: learning_rate must be a number, got 'fast'"),
        ({"sweep": {"seed": [1, 2]}}, "unknown field of training in sweep 'seed'"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_options(recipe, tmp_path, data, message):
    with pytest.raises((ValueError, OSError), match=message):
        finetune(recipe(**data))
    assert not list(tmp_path.glob("run/*")), "something was written before the error"


def test_a_swept_field_that_is_also_given(recipe):
    with pytest.raises(ValueError, match="learning_rate 0.001 would not be used: the sweep tries"):
        finetune(recipe({"learning_rate": 1e-3}, sweep=True))
