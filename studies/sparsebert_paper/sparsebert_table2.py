"""
Questions and endings without the diagonal: Table 2 of [S], SparseBERT (arXiv 2102.12871), on parts of SQuAD and SWAG
and a model that has left the plateau.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path

from sparsebert.analysis.tables import Table
from sparsebert.checks import check_range
from sparsebert.files import METRICS_NAME
from sparsebert.training.runs.run_checks import check_training

from ..harness.comparisons import against, by_seed, draw_panels, mean, nested
from ..harness.experiment import Cells, Experiment, common_settings
from ..harness.kept_files import FINISHED_NAME
from ..harness.seed_comparisons import COMPARED, mean_text
from ..shared.continued_pretraining import PAPER, SMALLEST, ContinuedSettings, check_continued, continue_training
from ..shared.recipe_sections import check_least, finetuned, made_once
from ..shared.task_parts import find_splits, write_parts
from .sparsebert_table1 import without_positions


# Tasks by the setting that names their folder, with the names of the paper's columns.
FOLDERS = {"squad": "squad", "squad2": "squad_v2", "swag": "swag"}
NAMES = {"squad": "SQuAD v1.1", "squad_v2": "SQuAD v2.0", "swag": "SWAG"}
# The main metric of each task, and the exact match of the questions.
PUBLISHED: dict[str, dict[str, tuple[float, ...]]] = {
    "squad": {"dense": (0.871, 0.797), "random_drop": (0.870, 0.797), "no_diag": (0.879, 0.803)},
    "squad_v2": {"dense": (0.755, 0.729), "random_drop": (0.742, 0.715), "no_diag": (0.759, 0.732)},
    "swag": {"dense": (0.825,), "random_drop": (0.816,), "no_diag": (0.835,)},
}


@dataclass
class TasksStudy(ContinuedSettings):
    """
    Settings of the study: training without a mask, without the diagonal and without as many random entries, with the
    settings of [`ContinuedSettings`], and fine-tuning of these models. The tasks' inputs have `max_length` tokens too;
    longer contexts are split into windows that share a quarter of it.

    Args:
        squad (`str`, *optional*): Folder with SQuAD v1.1. If it has only one file, a quarter of its contexts are to
            evaluate on. Tasks without a folder are left out; if none has one, all of them come from the Hub.
        squad2 (`str`, *optional*): Folder with SQuAD v2.0, likewise.
        swag (`str`, *optional*): Folder with SWAG, likewise.
        draws (`int`): Number of random masks per seed.
        max_train_examples (`int`): Maximum number of examples to train on, always the same ones.
        max_validation_examples (`int`): Maximum number of examples to evaluate on, always the same ones.
        num_train_epochs (`float`, *optional*): Epochs of fine-tuning; by default the paper's for the task.
        task_learning_rate (`float`, *optional*): Learning rate of fine-tuning; by default 2e-5.
        task_batch_size (`int`, *optional*): Batch size of fine-tuning; by default the paper's for the task.
    """

    squad: str | None = None
    squad2: str | None = None
    swag: str | None = None
    draws: int = 3
    max_train_examples: int = 6000
    max_validation_examples: int = 500
    num_train_epochs: float | None = 1.0
    task_learning_rate: float | None = 1e-4
    task_batch_size: int | None = 8


# Metrics of questions. A model that never answers scores the share of questions without an answer in SQuAD v2.0; its
# `has_answer_f1` is 0.
_QUESTIONS = ("exact_match", "has_answer_f1")
# Settings of a cell by the field of `TrainingArguments` that they are.
_TRAINING = {
    "num_train_epochs": "num_train_epochs",
    "task_learning_rate": "learning_rate",
    "task_batch_size": "per_device_train_batch_size",
}


def _cells(settings):
    folders = {task: getattr(settings, name) for name, task in FOLDERS.items()}
    if any(folders.values()):
        folders = {task: data for task, data in folders.items() if data is not None}
    common = common_settings(settings, "draws", *FOLDERS)
    return {
        f"{task}_{name}_seed_{seed}": common | {"task": task, "data": data} | system | {"seed": seed}
        for seed in settings.seeds
        for task, data in folders.items()
        for name, system in without_positions(seed, settings.draws).items()
    }


def _check(cell):
    check_least(cell, 1, "max_train_examples", "max_validation_examples")
    if cell["task_batch_size"] is not None:
        check_range("task_batch_size", cell["task_batch_size"], 1)
    check_training({field: cell[name] for name, field in _TRAINING.items()})
    if cell["data"] is not None and not Path(cell["data"]).is_dir():
        field = next(name for name, task in FOLDERS.items() if task == cell["task"])
        raise FileNotFoundError(f"{field}: there is no folder {cell['data']!r}")
    find_splits(cell["task"], cell["data"])
    check_continued(cell)


def _run(cell, folder):
    """Continue the pre-training, unless that was done for another cell, then fine-tune and score."""
    _, num_validation = write_parts(
        cell["task"], cell["data"], folder / "data", cell["max_train_examples"], cell["max_validation_examples"]
    )
    start = time.perf_counter()
    model = _continued(cell, folder.parent)
    shared = time.perf_counter() - start
    quarter = cell["max_length"] // 4
    data = {"task": cell["task"], "data": str(folder / "data"), "model": str(model), "max_length": cell["max_length"]}
    data |= {"doc_stride": quarter, "max_question_length": quarter}
    training = {field: cell[name] for name, field in _TRAINING.items() if cell[name] is not None}
    training["seed"] = cell["seed"]
    found = finetuned(data, training, folder / "run", cell["bf16"])
    pretrained = json.loads((model / METRICS_NAME).read_text())
    metrics = {name: found[name] for name in ("score", "sparsity", "input_sparsity", "train_examples")}
    metrics |= {"validation_examples": num_validation, "mlm_loss": pretrained["mlm_loss"]}
    evaluated = found["splits"]["validation"]
    metrics |= {name: evaluated[name] for name in _QUESTIONS if name in evaluated}
    return metrics | {"train_seconds": found["train_seconds"], "shared_seconds": shared}


def _continued(cell, runs):
    """The model that went on from the checkpoint as the cell says, for all tasks, or that of Table 1."""
    names = common_settings(ContinuedSettings(), of=ContinuedSettings)
    own = {name: cell[name] for name in (*names, "model", "seed")}
    for made in sorted(runs.parent.glob(f"sparsebert_table1_*/*/{FINISHED_NAME}")):
        settings = json.loads(made.read_text())["settings"]
        if {name: settings.get(name) for name in own} == own and (made.parent / "model.safetensors").is_file():
            return made.parent
    with made_once(runs, "model", own) as (path, there):
        if not there:
            continue_training(own, path, {"overwrite": True}, cell["model"])
    return path


def _summary(finished: Cells) -> list[Table]:
    """Scores by task and system beside the paper's, and the paired difference of each system to dense."""
    exact, answerable = (by_seed(finished, metric, "task", "system", times=100) for metric in _QUESTIONS)
    examples, removed = (by_seed(finished, name, "task", "system") for name in ("train_examples", "input_sparsity"))
    scores = by_seed(finished, "score", "task", "system", times=100)
    compared = against(scores, 1, lambda key: (key[0], "dense"))
    rows = []
    for task, systems in PUBLISHED.items():
        if not any(key[0] == task for key in scores):
            rows.append({"task": NAMES[task], "system": "all", "score": "not run"})
        for system, published in systems.items():
            if (key := (task, system)) not in scores:
                continue
            row = {"task": NAMES[task], "system": system, "training examples": f"{mean(examples[key]):,.0f}"}
            row |= {"removed": f"{mean(removed[key]):.1%}", "score": mean_text(scores[key].values(), 1)}
            row["score, paper"] = f"{100 * published[0]:.1f}"
            if key in exact:
                row["exact match"] = mean_text(exact[key].values(), 1)
                row["exact match, paper"] = f"{100 * published[1]:.1f}"
            # Always there, so that the column is beside the others of questions. Older results lack the metric.
            whole = answerable.get(key, {}).keys() == scores[key].keys()
            row["F1, answerable"] = mean_text(answerable[key].values(), 1) if whole else ""
            row["minus dense"], row["p (Holm)"] = compared.get(key, ("", ""))
            rows.append(row | {"seeds": str(len(scores[key]))})
    notes = (
        "removed: of the attention on the inputs, which are shorter than the mask: a diagonal then removes more than "
        "as many random entries of the mask; "
        "score: F1 of SQuAD, accuracy of SWAG, on the validation part, times 100; F1, answerable: of the questions "
        "of SQuAD v2.0 that have an answer (0 for a model that never answers); random_drop: mean of the draws of a "
        "seed; minus dense: in the score; ±: deviation over seeds, which vary what Table 1 varies, the head and the "
        f"order of the examples, and not the checkpoint or the examples; {COMPARED}",
    )
    return [Table.of("Removing the diagonal or as many entries at random, on tasks (Table 2)", rows, notes)]


def _draw(finished: Cells, path: Path, title: str) -> None:
    scores = nested(by_seed(finished, "score", "task", "system", times=100))
    draw_panels({f"{NAMES[task]}, score": systems for task, systems in scores.items()}, path, title, "dense")


EXPERIMENT = Experiment(
    title="Questions and endings without the diagonal ([S] Table 2)",
    arguments=TasksStudy,
    scales={
        "tiny": {},
        "paper": PAPER | {"max_train_examples": 10**9, "max_validation_examples": 10**9} | dict.fromkeys(_TRAINING),
    },
    cells=_cells,
    check=_check,
    run=_run,
    columns={
        "score": ("score", "{:.1%}"),
        "exact_match": ("exact match", "{:.1%}"),
        "has_answer_f1": ("F1 of answerable questions", "{:.1%}"),
        "mlm_loss": ("our MLM loss before", "{:.3f}"),
        "sparsity": ("removed", "{:.1%}"),
        "input_sparsity": ("removed on inputs", "{:.1%}"),
        "train_examples": ("training examples", "{:,.0f}"),
        "validation_examples": ("validation examples", "{:,.0f}"),
        "train_seconds": ("training, s by the clock", "{:.0f}"),
    },
    plot=("seed", "score", "task"),
    draw=_draw,
    published={
        f"{task}_{'random_drop_0' if system == 'random_drop' else system}": dict(
            zip(("score", "exact_match"), values, strict=False)
        )
        for task, systems in PUBLISHED.items()
        for system, values in systems.items()
    },
    notes=(
        "The paper fine-tunes on all examples with the best of 12 settings; ours has one, and the examples shown here",
        "SQuAD contexts are read in windows of the mask's length, which the paper does not describe",
    ),
    summary=_summary,
    smallest=SMALLEST | {"max_length": 32, "max_train_examples": 8, "max_validation_examples": 4},
)
