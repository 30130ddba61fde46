"""One fine-tuning run: training, evaluation and prediction, unless its folder holds it already."""

import hashlib
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ...file_kinds import check_own
from ...files import METRICS_NAME, RECIPE_NAME
from ...hub import SECRETS
from ...learning.mask_description import allowed_fields
from ...learning.progressive_pruning import ProgressivePruning
from ...masks.patterns import PATTERNS
from ...models.bert.token_mixers import fixed_length
from ...output_folders import finish_move
from ...recipe_files import read_stored_recipe, write_recipe
from ..runs.resuming import rows_record
from ..runs.run_cards import add_finetuning, draw_heads
from ..runs.run_checks import check_served
from ..runs.run_life import TrainingRun, training_run
from ..trainer import SparseBertTrainer
from .finetuning_arguments import training_fields
from .task_data import TaskData
from .task_models import load_model, mask_metrics


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
    inner = len(folder.parts) - len(Path(recipe["training"]["output_dir"]).parts)
    for place in (folder, *folder.parents)[:inner]:
        check_own(place, "folder")
    logger.warning(f"{folder}: training with seed {training['seed']}.")
    return run_once(data, recipe["model"], training, folder, written)


def _describe(data: TaskData, recipe: dict[str, dict[str, Any]], training: dict[str, Any]) -> dict[str, dict]:
    """Everything that the result of a run depends on."""
    options = data.options
    inputs: dict[str, Any] = {
        "model": _digest(options.model, options.subfolder),
        "mask": _digest(options.mask, options.mask_subfolder),
    }
    for split, features in data.features.items():
        inputs |= {f"{name} of {split}": value for name, value in rows_record(features).items()}
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


def run_once(
    data: TaskData,
    model: dict[str, Any],
    training: dict[str, Any],
    output_dir: str | os.PathLike,
    recipe: dict[str, dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """
    Fine-tune a model, evaluate it and predict the test splits, by sections `model` and `training` of a checked recipe.

    Writes to `output_dir` the model with its mask, the tokenizer, `predictions_SPLIT.jsonl` with one example per line,
    the files that the official servers and scripts of the task read, `recipe.yaml` with what the result depends on,
    and finally `metrics.json`, which is returned. A run that is already there is replaced at the end. A random pattern
    is drawn with the run's seed unless `mask_seed` is given.
    """
    fields = training_fields(training, output_dir, data.task)
    with training_run(fields, data.options, one_of_several=True) as run:
        return _run(run, data, model, recipe)


def _run(run: TrainingRun, data: TaskData, model: dict[str, Any], recipe: Any) -> dict[str, Any]:
    task, options, arguments = data.task, data.options, run.training
    if options.mask in PATTERNS and "mask_seed" in allowed_fields(options.mask):
        model = {"mask_seed": arguments.seed} | model
    network = load_model(data, model)
    check_served(network, arguments, data.longest)
    first = data.evaluation_splits[0]
    run.define(options, network.config, **rows_record(data.features[data.train_split]))
    pruning = ProgressivePruning.from_settings(options.pruning)
    fixed, multiple = fixed_length(network.config), options.pad_to_multiple_of
    if fixed is not None and multiple not in (None, fixed):
        raise ValueError(f"pad_to_multiple_of must be {fixed}, which the token mixer 'bproj' needs, got {multiple}")
    trainer = SparseBertTrainer(
        network,
        arguments,
        train_dataset=data.features[data.train_split],
        eval_dataset=data.features[first],
        data_collator=task.collator(data.tokenizer, fixed or multiple),
        processing_class=data.tokenizer,
        compute_metrics=lambda prediction: data.evaluate(first, prediction.predictions)[1],
        callbacks=[] if pruning is None else [pruning],
    )
    trained = run.train(trainer)
    trainer.save_model()
    trainer.compute_metrics = None  # it is for the first split only
    train_examples = len(data.examples[data.train_split])
    metrics: dict[str, Any] = {"task": task.name, "model": options.model} | mask_metrics(network, data)
    if "mask_seed" in model:
        metrics["mask_seed"] = model["mask_seed"]
    metrics |= {
        "seed": arguments.seed,
        "train_split": data.train_split,
        "train_examples": train_examples,
        "is_part": data.train_split != "train" or train_examples < data.num_train_examples,
        "skipped": {split: text for split in data.examples if (text := data.examples[split].info.description)},
        "steps": trained.global_step,
        "main_metric": task.main_metric,
        "splits": _evaluate(run.folder, data, trainer),
    }
    metrics["score"] = metrics["splits"][first][task.main_metric]
    if options.simple_baseline and task.baseline is not None:
        metrics["simple_baseline"] = task.baseline(data.examples)

    def complete(metrics: dict[str, Any]) -> None:
        draw_heads(run.folder, network)
        add_finetuning(run.folder, metrics, network, options.data)
        if recipe is not None:
            write_recipe(run.folder / RECIPE_NAME, recipe)

    return run.finish(trainer, metrics, complete)


def _evaluate(folder: Path, data: TaskData, trainer: SparseBertTrainer) -> dict[str, dict[str, float]]:
    """The metrics of every split but that for training; writes the predictions."""
    splits = {}
    for split in (split for split in data.features if split != data.train_split):
        prediction = trainer.predict(data.features[split])
        rows, values = data.evaluate(split, prediction.predictions)
        timings = prediction.metrics or {}
        if values and "test_loss" in timings:
            values["loss"] = timings["test_loss"]
        trainer.log({f"eval_{split}_{name}": value for name, value in values.items()})
        splits[split] = values | {"seconds": timings["test_runtime"]}
        if trainer.is_world_process_zero():
            write_predictions(folder, split, rows, data.references(split))
            if data.task.write_submission is not None:
                data.task.write_submission(split, rows, folder)
    return splits


def write_predictions(
    folder: str | os.PathLike, split: str, rows: list[dict[str, Any]], references: dict[str, Any] | None = None
) -> None:
    """Write `predictions_SPLIT.jsonl`: id, prediction and reference (if there are any), one example per line."""
    with open(Path(folder) / f"predictions_{split}.jsonl", "w", encoding="utf-8") as file:
        for row in rows:
            line = {"id": row["id"], "prediction": row["prediction"]}
            if references is not None:
                line["reference"] = references[row["id"]]
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def read_predictions(folder: str | os.PathLike, split: str) -> dict[str, tuple[Any, Any]]:
    """Prediction and reference by example id, from a file of [`write_predictions`]."""
    with open(Path(folder) / f"predictions_{split}.jsonl", encoding="utf-8") as file:
        rows = map(json.loads, file)
        return {row["id"]: (row["prediction"], row.get("reference")) for row in rows}
