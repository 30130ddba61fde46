"""Parts of a task's data, and the experiment that fine-tunes on them: Table 2 of SparseBERT."""

import json
import shutil
from dataclasses import fields

import pytest

from sparsebert.data.tasks import TASKS
from studies.experiments import EXPERIMENTS
from studies.harness.reproduction import CellsFailed, ReproductionArguments, plan_cells, run_experiment
from studies.harness.seed_comparisons import paired_difference
from studies.shared.task_parts import find_splits, write_parts


@pytest.fixture
def folders(squad_folder, swag_folder):
    """`folders[task]`: a folder with files to train on and to evaluate on."""
    return {"squad": squad_folder, "squad_v2": squad_folder, "swag": swag_folder}


def rows(task, folder):
    """The rows of `train` and `validation` in a folder."""
    loaded = TASKS[task].load(data=str(folder), splits=["train", "validation"])
    return [loaded[split].to_list() for split in ("train", "validation")]


def without_id(row):
    return json.dumps({name: value for name, value in row.items() if name not in ("id", "title")}, sort_keys=True)


@pytest.mark.parametrize("task", ["squad", "squad_v2", "swag"])
def test_a_part_has_rows_of_the_whole(task, folders, tmp_path):
    assert write_parts(task, str(folders[task]), tmp_path / "a", 6, 5) == (6, 5)
    write_parts(task, str(folders[task]), tmp_path / "b", 6, 5)
    for part, again, whole, size in zip(
        rows(task, tmp_path / "a"), rows(task, tmp_path / "b"), rows(task, folders[task]), (6, 5), strict=True
    ):
        assert part == again and len({without_id(row) for row in part}) == size
        assert {without_id(row) for row in part} < {without_id(row) for row in whole}
    assert write_parts(task, str(folders[task]), tmp_path / "c", 10**9, 10**9) == tuple(
        len(split) for split in rows(task, folders[task])
    )


@pytest.mark.parametrize(
    "task, name", [("squad", "some-v1.json"), ("squad_v2", "dev-v2.0.json"), ("swag", "val.jsonl")]
)
def test_a_single_file_is_divided_by_contexts(task, name, folders, tmp_path):
    original = next(
        path
        for path in folders[task].iterdir()
        if path.name in ("train-v1.1.json" if task == "squad" else "dev-v2.0.json", "val.jsonl")
    )
    (tmp_path / "one").mkdir()
    if task == "swag":
        shutil.copy(original, tmp_path / "one" / name)
    else:  # a second question about each context
        content = json.loads(original.read_text())
        for paragraph in content["data"][0]["paragraphs"]:
            (question,) = paragraph["qas"]
            paragraph["qas"].append(question | {"id": f"{question['id']}-again", "question": "w1 w2"})
        (tmp_path / "one" / name).write_text(json.dumps(content))
    assert len(set(find_splits(task, str(tmp_path / "one")))) == 1
    sizes = write_parts(task, str(tmp_path / "one"), tmp_path / "part", 10**9, 10**9)
    train, validation = rows(task, tmp_path / "part")
    assert (len(train), len(validation)) == sizes and len(validation) < len(train)
    assert not {row["context"] for row in train} & {row["context"] for row in validation}


def test_folders_that_do_not_serve_are_refused(folders, tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        find_splits("squad", str(tmp_path / "absent"))
    with pytest.raises(ValueError, match="task swag: folder .* must hold one file, .* got none; files end in .*jsonl"):
        find_splits("swag", str(tmp_path))
    for name in ("one.jsonl", "two.jsonl"):
        shutil.copy(folders["swag"] / "val.jsonl", tmp_path / name)
    with pytest.raises(ValueError, match="task swag: folder .* must hold one file, .* got one, two"):
        find_splits("swag", str(tmp_path))


def test_a_file_with_one_context_is_too_small(folders, tmp_path):
    (tmp_path / "one").mkdir()
    row = (folders["swag"] / "val.jsonl").read_text().splitlines()[0]
    (tmp_path / "one/val.jsonl").write_text(row + "\n")
    with pytest.raises(ValueError, match="one context, too few to divide"):
        write_parts("swag", str(tmp_path / "one"), tmp_path / "part", 5, 5)


@pytest.fixture
def settings(folders, checkpoints, tmp_path):
    """Settings of the smallest cells."""
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(" ".join(f"w{(i * j) % 90}" for j in range(1, 30)) for i in range(1, 80)))
    return {
        "base_model": checkpoints["stock"], "text": str(text), "validation": str(text), "max_length": 32,
        "checkpoint_steps": 2, "max_steps": 2, "batch_size": 4, "max_validation_tokens": 200, "draws": 1,
        "seeds": [1], "squad": str(folders["squad"]), "swag": str(folders["swag"]), "max_train_examples": 8,
        "max_validation_examples": 4, "num_train_epochs": 1.0,
    }  # fmt: skip


def table_2(tmp_path, settings, only):
    options = ReproductionArguments(output=str(tmp_path / "out"), runs=str(tmp_path / "runs"), only=only)
    tables = run_experiment("sparsebert_table2", options, settings)
    return tables, json.loads((tmp_path / "out/sparsebert_table2_tiny.json").read_text())["cells"]


def test_tasks_share_the_model_that_went_on(settings, tmp_path):
    (table, _), cells = table_2(tmp_path, settings, "*_random_drop_0_seed_1")
    assert list(cells) == ["squad_random_drop_0_seed_1", "swag_random_drop_0_seed_1"]
    squad, swag = (cell["metrics"] for cell in cells.values())
    assert squad["shared_seconds"] > 10 * swag["shared_seconds"] and squad["mlm_loss"] == swag["mlm_loss"]
    assert len(list(tmp_path.glob("runs/sparsebert_table2_tiny/model_*/metrics.json"))) == 1
    assert squad["sparsity"] == swag["sparsity"] == pytest.approx(1 / 32)
    assert (squad["train_examples"], squad["validation_examples"]) == (8, 4)
    assert "exact_match" in squad and "exact_match" not in swag
    assert [(row["task"], row["score"]) for row in table.as_json()["rows"] if row["score"] == "not run"] == [
        ("SQuAD v2.0", "not run")
    ]


def test_the_answerable_questions_are_scored_alone(settings, folders, tmp_path):
    """The score of SQuAD v2.0 is high if no question is answered."""
    (table, _), cells = table_2(tmp_path, settings | {"squad2": str(folders["squad_v2"])}, "squad*_dense_seed_1")
    shown = {row["task"]: row["F1, answerable"] for row in table.as_json()["rows"] if row["system"] == "dense"}
    found = cells["squad_v2_dense_seed_1"]["metrics"]["has_answer_f1"]
    assert shown == {"SQuAD v1.1": "", "SQuAD v2.0": f"{100 * found:.1f}"}
    assert "has_answer_f1" not in cells["squad_dense_seed_1"]["metrics"]


def test_models_of_table_1_serve(settings, checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr("studies.sparsebert_paper.sparsebert_table2.continue_training", lambda *_: 1 / 0)
    experiment = EXPERIMENTS["sparsebert_table1"]
    names = {item.name for item in fields(experiment.arguments)}
    own = experiment.cells(experiment.arguments(**{name: settings[name] for name in settings.keys() & names}))
    model = tmp_path / "runs/sparsebert_table1_tiny/no_diag_seed_1"
    shutil.copytree(checkpoints["window"], model)
    (model / "cell.json").write_text(json.dumps({"settings": own["no_diag_seed_1"]}))
    (model / "metrics.json").write_text(json.dumps({"mlm_loss": 1.25}))
    _, cells = table_2(tmp_path, settings, "swag_no_diag_seed_1")
    assert cells["swag_no_diag_seed_1"]["metrics"]["mlm_loss"] == 1.25
    with pytest.raises(CellsFailed, match="ZeroDivisionError"):  # another model
        table_2(tmp_path, settings, "squad_dense_seed_1")
    with pytest.raises(CellsFailed, match="ZeroDivisionError"):  # after more steps it would be another
        table_2(tmp_path, settings | {"max_steps": 3}, "squad_no_diag_seed_1")
    with pytest.raises(CellsFailed, match="ZeroDivisionError"):  # with another seed, too
        table_2(tmp_path, settings | {"seeds": [2]}, "squad_no_diag_seed_2")


def test_the_papers_settings_are_those_of_the_tasks(settings, monkeypatch, tmp_path):
    recipes = []

    def finetune(recipe):
        recipes.append(recipe)
        raise KeyboardInterrupt

    monkeypatch.setattr("studies.shared.recipe_sections.finetune", finetune)
    monkeypatch.setattr("studies.sparsebert_paper.sparsebert_table2._continued", lambda *_: tmp_path)
    experiment = EXPERIMENTS["sparsebert_table2"]
    cell = experiment.cells(experiment.arguments(**experiment.scales["paper"], swag=settings["swag"]))
    with pytest.raises(KeyboardInterrupt):
        experiment.run(cell["swag_dense_seed_1"], tmp_path / "cell")
    (recipe,) = recipes
    assert not {"learning_rate", "num_train_epochs", "per_device_train_batch_size"} & recipe["training"].keys()
    assert [len(split) for split in rows("swag", tmp_path / "cell/data")] == [24, 12]


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"squad2": "absent"}, "squad2: there is no folder 'absent'"),
        ({"seeds": []}, "the settings make no cells"),
        ({"draws": -1}, "draws must be an integer of at least 0, got -1"),
        ({"max_train_examples": 0}, "max_train_examples must be an integer of at least 1, got 0"),
        ({"max_validation_examples": 0}, "max_validation_examples must be an integer of at least 1, got 0"),
        ({"num_train_epochs": 0.0}, "num_train_epochs must be more than 0, got 0.0"),
        ({"task_learning_rate": -1.0}, "task_learning_rate must be a number of at least 0, got -1.0"),
        ({"task_batch_size": 0}, "task_batch_size must be an integer of at least 1, got 0"),
        ({"max_length": 4}, "max_length must be an integer of at least 8, got 4"),
    ],
)
def test_bad_settings_are_refused_first(settings, changed, message):
    with pytest.raises((ValueError, OSError), match=message):
        plan_cells(EXPERIMENTS["sparsebert_table2"], ReproductionArguments(), settings | changed)


def test_tasks_without_a_folder_are_left_out_unless_none_has_one(settings):
    cells = plan_cells(EXPERIMENTS["sparsebert_table2"], ReproductionArguments(), settings)
    assert {(cell["task"], cell["data"]) for cell in cells.values()} == {
        ("squad", settings["squad"]), ("swag", settings["swag"]),
    }  # fmt: skip
    cells = plan_cells(
        EXPERIMENTS["sparsebert_table2"], ReproductionArguments(), settings | {"squad": None, "swag": None}
    )
    assert {(cell["task"], cell["data"]) for cell in cells.values()} == {
        ("squad", None), ("squad_v2", None), ("swag", None),
    }  # fmt: skip


def test_draws_are_averaged_and_stand_beside_the_papers():
    scores = {
        "dense": [0.5, 0.6, 0.55],
        "random_drop, draw 0": [0.4, 0.4, 0.5],
        "random_drop, draw 1": [0.5, 0.6, 0.5],
    }
    finished = {
        f"squad_{system}_{seed}": {
            "settings": {"task": "squad", "system": system, "seed": seed},
            "metrics": {"score": value, "exact_match": value / 2, "train_examples": 100, "input_sparsity": 0.01},
        }
        for system, values in scores.items()
        for seed, value in enumerate(values)
    }
    (table,) = EXPERIMENTS["sparsebert_table2"].summary(finished)
    dense, drawn, *rest = table.as_json()["rows"]
    assert (dense["score"], dense["score, paper"], dense["exact match, paper"]) == ("55.0 ± 5.0", "87.1", "79.7")
    assert drawn["system"] == "random_drop" and drawn["score"] == "48.3 ± 2.9" and drawn["seeds"] == "3"
    assert drawn["removed"] == "1.0%"
    test = paired_difference([45.0, 50.0, 50.0], [50.0, 60.0, 55.0])
    assert drawn["minus dense"].startswith(f"{test['difference']:+.1f} [") and drawn["p (Holm)"] == f"{test['p']:.3g}"
    assert [(row["task"], row["score"]) for row in rest] == [("SQuAD v2.0", "not run"), ("SWAG", "not run")]
