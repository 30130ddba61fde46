"""Which fine-tuning runs a recipe asks for, and what the folder that they share may hold."""

import itertools
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from transformers import TrainingArguments

from ...checks import LARGEST_SEED, nearest
from ...files import EXPERIMENT_NAME, METRICS_NAME, RECIPE_NAME, check_output_dir, replace_files
from ...hub import without_secrets
from ...recipe_files import convert
from ..runs.run_folders import choose_folder
from .finetuning_arguments import FinetuningArguments


# SparseBERT (arXiv 2102.12871), Table 5.
PAPER_GRID = {"learning_rate": [1e-5, 1.5e-5, 2e-5, 3e-5, 4e-5, 5e-5], "weight_decay": [0.1, 0.01]}

_SECTIONS = {"data", "model", "training"}
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


def write_recipe(path: Path, recipe: dict[str, dict[str, Any]]) -> None:
    """Write a recipe for [`read_stored_recipe`], without tokens for the Hub."""
    written = {section: without_secrets(fields) for section, fields in recipe.items()}
    replace_files({path: yaml.safe_dump(written).encode()})


def read_stored_recipe(path: Path) -> dict[str, dict[str, Any]] | None:
    """What [`write_recipe`] wrote; `None` if there is no file, or it is not such a one."""
    try:
        text = path.read_text(encoding="utf-8")
        recipe = yaml.safe_load(text)
        return recipe if _SECTIONS <= recipe.keys() and yaml.safe_dump(recipe) == text else None
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return None


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
