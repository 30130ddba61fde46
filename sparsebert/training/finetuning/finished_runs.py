"""Single runs of a fine-tuning, of which finished ones are read from their folders."""

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ...files import METRICS_NAME, RECIPE_NAME
from ...hub import SECRETS
from ..runs.run_folders import finish_move
from .several_runs import read_stored_recipe
from .single_run import run_once
from .task_data import TaskData


logger = logging.get_logger(__name__)

# Fields that say which runs there are, not what one of them computes.
_LAYOUT = ("all", "seeds", "sweep", "baseline", "resume", "allow_partial_resume", "overwrite")
_NOT_OF_RESULT = ("output_dir", "resume_from_checkpoint", *SECRETS)


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
