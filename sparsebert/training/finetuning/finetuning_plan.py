"""Which runs a fine-tuning recipe asks for, in which folders: its checks before any data or weights are read."""

import itertools
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from ...checks import nearest, no_effect
from ...data.tasks import TASKS
from ...data.tasks.glue import GLUE
from ...files import EXPERIMENT_NAME, METRICS_NAME, RECIPE_NAME, check_other_folder, check_output_dir
from ...recipe_files import convert, read_stored_recipe
from ..runs.run_checks import read_seeds
from ..runs.run_folders import choose_folder
from ..runs.sources import check_kept
from .finetuning_arguments import FinetuningArguments, training_arguments
from .task_models import check_model


# SparseBERT (arXiv 2102.12871), Table 5.
PAPER_GRID = {"learning_rate": [1e-5, 1.5e-5, 2e-5, 3e-5, 4e-5, 5e-5], "weight_decay": [0.1, 0.01]}

_PER_RUN = ("output_dir", "seed", "resume_from_checkpoint")


@dataclass(frozen=True)
class Plan:
    """The runs of a recipe: its options, the arguments of the first run, the output folder, the seeds and the grid."""

    options: FinetuningArguments
    arguments: TrainingArguments
    output: Path
    seeds: list[int]
    grid: dict[str, list]


def read_plan(recipe: dict[str, dict[str, Any]]) -> Plan:
    """Check a recipe, all that can be checked without reading data or weights, and say which runs it asks for."""
    options = FinetuningArguments(**recipe["data"])
    check_arguments(options, recipe["model"])
    grid = read_grid(options.sweep)
    for name, values in grid.items():
        if name in recipe["training"]:
            raise ValueError(
                f"{name} {recipe['training'][name]!r} would not be used: the sweep tries {values}; leave it out, or "
                "pass --sweep false"
            )
    if "num_train_epochs" in grid and recipe["training"].get("max_steps", -1) > 0:
        raise no_effect("sweep: num_train_epochs", grid["num_train_epochs"], "with max_steps, which ends every run")
    output = Path(recipe["training"].get("output_dir") or f"runs/{'glue' if options.all else options.task}")
    check_kept(output, "model", options)
    check_other_folder(output, baseline=options.baseline)
    arguments, *_ = [
        training_arguments(recipe["training"] | settings, output, TASKS[name])
        for name in (GLUE if options.all else [str(options.task)])
        for settings in cells_of(grid)
    ]
    seeds = read_seeds(options.seeds, arguments.seed, recipe["training"].get("seed"))
    return Plan(options, arguments, output, seeds, grid)


def check_arguments(options: FinetuningArguments, model: dict[str, Any]) -> None:
    """Check whatever can be checked without reading data or weights."""
    if options.all == (options.task is not None):
        raise ValueError("choose --task NAME or --all; the tasks are " + ", ".join(TASKS))
    if options.task is not None and options.task not in TASKS:
        raise nearest("task", str(options.task), list(TASKS))
    if options.validation_split == []:
        raise ValueError("validation_split must name a split, got []")
    tasks = list(GLUE) if options.task is None else [options.task]
    for length in sorted({options.max_length or TASKS[name].max_length for name in tasks}):
        if options.pad_to_multiple_of is not None and length % options.pad_to_multiple_of:
            raise ValueError(f"pad_to_multiple_of must divide max_length {length}, got {options.pad_to_multiple_of}")
    if options.model is None:
        raise ValueError("--model must be the folder or Hub id of a pre-trained model")
    check_model(options, model, options.max_length or max(TASKS[name].max_length for name in tasks))


def read_grid(sweep: bool | dict) -> dict[str, list]:
    """Values by field of `training`; empty if there is no grid."""
    known = {field.name: field.type for field in fields(TrainingArguments) if field.name not in _PER_RUN}
    grid = {}
    for name, values in (PAPER_GRID if sweep is True else sweep or {}).items():
        if name not in known:
            raise nearest("field of training in sweep", name, list(known))
        if not isinstance(values, list) or not values:
            raise ValueError(f"sweep: {name} must be a list of values, got {values!r}")
        grid[name] = [convert(f"sweep: {name}", value, known[name]) for value in values]
        for number, value in enumerate(grid[name]):
            if {"/", "\\"} & {*str(value)}:
                raise ValueError(f"sweep: {name}: values name folders, and cannot hold / or \\, got {value!r}")
            if value in grid[name][:number]:
                raise ValueError(f"sweep: {name} has {value!r} twice")
    return grid


def cells_of(grid: dict[str, list]) -> list[dict[str, Any]]:
    """The settings of every cell; without a grid there is one, which changes nothing."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def layout_of(whole: bool, grid: dict[str, list], seeds: list[int]) -> tuple[bool, bool, bool]:
    """Whether there are folders for tasks, for settings (with their seeds in them) and for seeds."""
    return whole, bool(grid), not grid and len(seeds) > 1


def check_runs_folder(
    output: Path,
    options: FinetuningArguments,
    layout: tuple[bool, bool, bool],
    resume: bool | str | None,
    unfinished: str | None,
) -> None:
    """A folder may hold what this command can continue: a run or several of the same task."""
    path = output / (EXPERIMENT_NAME if any(layout) else RECIPE_NAME)
    stored = read_stored_recipe(path)
    if any(layout):
        if path.is_file() and stored is None:
            raise FileExistsError(f"{path} is not of a fine-tuning, or was changed: choose another output_dir")
        check_output_dir(output, options.overwrite, stored is not None)
    elif isinstance(resume, str) or not (path.is_file() and (output / METRICS_NAME).is_file()):
        choose_folder(output, options.overwrite, resume, options.allow_partial_resume, unfinished)
    if stored is None or options.overwrite:
        return
    held = stored["data"]
    if held.get("task") != options.task:
        raise ValueError(f"{output} holds runs of {held.get('task') or 'all tasks'}: choose another output_dir")
    sweep, seeds = held.get("sweep", False), held.get("seeds", 1)
    if any(layout) and layout[1:] != layout_of(True, read_grid(sweep), read_seeds(seeds, 0))[1:]:
        raise FileExistsError(
            f"{output} holds runs with sweep {sweep!r} and seeds {seeds!r}, whose folders are others: choose another "
            "output_dir, or pass --overwrite"
        )
