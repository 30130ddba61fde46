"""Which fine-tuning runs a recipe asks for: their folders, and those that are finished, which are not run again."""

import hashlib
import itertools
import json
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainingArguments
from transformers.utils import logging

from ...checks import LARGEST_SEED, nearest
from ...files import EXPERIMENT_NAME, METRICS_NAME, RECIPE_NAME, check_output_dir
from ...hub import SECRETS
from ...output_folders import finish_move
from ...recipe_files import convert, read_stored_recipe
from ..runs.run_folders import choose_folder
from .finetuning_arguments import FinetuningArguments
from .single_run import run_once
from .task_data import TaskData


logger = logging.get_logger(__name__)


# SparseBERT (arXiv 2102.12871), Table 5.
PAPER_GRID = {"learning_rate": [1e-5, 1.5e-5, 2e-5, 3e-5, 4e-5, 5e-5], "weight_decay": [0.1, 0.01]}

# Fields that say which runs there are, not what one of them computes.
_LAYOUT = ("all", "seeds", "sweep", "baseline", "resume", "allow_partial_resume", "overwrite")
_NOT_OF_RESULT = ("output_dir", "resume_from_checkpoint", *SECRETS)
_PER_RUN = ("output_dir", "seed", "resume_from_checkpoint")


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
    return grid


def cells_of(grid: dict[str, list]) -> list[dict[str, Any]]:
    """The settings of every cell; without a grid there is one, which changes nothing."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def read_seeds(seeds: int | list, first: int) -> list[int]:
    """The seeds of the runs; a number of runs counts up from `first`."""
    found = seeds if isinstance(seeds, list) else list(range(first, first + seeds))
    if max(found) > LARGEST_SEED:
        raise ValueError(f"seeds must be at most {LARGEST_SEED}, got {max(found)}")
    return found


def layout_of(whole: bool, grid: dict[str, list], seeds: list[int]) -> tuple[bool, bool, bool]:
    """Whether there are folders for tasks, for settings (with their seeds in them) and for seeds."""
    return whole, bool(grid), not grid and len(seeds) > 1


def check_runs_folder(
    output: Path,
    options: FinetuningArguments,
    layout: tuple[bool, bool, bool],
    resume: bool | str | None,
    unfinished: bool,
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


def run_or_read(
    data: TaskData,
    recipe: dict[str, dict[str, Any]],
    settings: dict[str, Any],
    folder: Path,
    need_weights: bool = False,
) -> dict[str, Any]:
    """The metrics of a run: those in its folder if it holds a finished run of the same recipe, model and mask."""
    training = recipe["training"] | settings
    written = _describe(data, recipe, training)
    path = folder / RECIPE_NAME
    finish_move(folder)
    if (folder / METRICS_NAME).is_file() and path.is_file() and not data.options.overwrite:
        stored = read_stored_recipe(path)
        if stored is None:
            raise ValueError(f"{path} was changed or is damaged: choose another output_dir, or pass --overwrite")
        _check_same(folder, stored, written)
        if not need_weights or any(folder.glob("model*.safetensors")):
            logger.warning(f"{folder} is finished and is not run again.")
            metrics = json.loads((folder / METRICS_NAME).read_text())
            return {name: value for name, value in metrics.items() if name != "comparison"}
    logger.warning(f"{folder}: training with seed {training['seed']}.")
    return run_once(data, recipe["model"], training, folder, written)


def _describe(data: TaskData, recipe: dict[str, dict[str, Any]], training: dict[str, Any]) -> dict[str, dict]:
    """Everything that the result of a run depends on."""
    options = data.options
    inputs: dict[str, Any] = {
        "model": _digest(options.model, options.subfolder),
        "mask": _digest(options.mask, options.mask_subfolder),
    }
    inputs |= {f"{split} examples": len(examples) for split, examples in data.examples.items()}
    section = recipe["data"] | {"task": data.task.name}
    return {
        "data": {name: value for name, value in section.items() if name not in _LAYOUT},
        "model": dict(recipe["model"]),
        "training": {name: value for name, value in training.items() if name not in _NOT_OF_RESULT},
        "inputs": inputs,
    }


def _check_same(folder: Path, stored: dict[str, dict], written: dict[str, dict]) -> None:
    for section, values in written.items():
        for name in sorted(values.keys() | stored[section].keys()):
            if stored[section].get(name) != values.get(name):
                old, new = (repr(where.get(name, "unset")) for where in (stored[section], values))
                raise ValueError(
                    f"{folder} holds a run with {section}.{name} {old}, not {new}: choose another output_dir, or "
                    "pass --overwrite"
                )


def _digest(name: str | None, subfolder: str | None) -> str | None:
    """Hash of the contents of a model's or mask's folder, to notice when they were replaced."""
    if name is None or not Path(name).is_dir():
        return None
    digest = hashlib.sha256()
    for path in sorted(Path(name, subfolder or "").glob("*")):
        if path.suffix in (".safetensors", ".bin") or path.name in ("config.json", "mask_config.json"):
            with open(path, "rb") as file:
                for block in iter(partial(file.read, 2**20), b""):
                    digest.update(block)
    return digest.hexdigest()
