"""One fine-tuning run: training, evaluation and prediction."""

import json
import os
import time
from pathlib import Path
from typing import Any

from transformers import TrainingArguments, set_seed
from transformers.utils import logging

from ...data.tasks import Task
from ...files import METRICS_NAME, RECIPE_NAME, write_metrics
from ...learning.mask_description import allowed_fields
from ...learning.progressive_pruning import ProgressivePruning
from ...masks.patterns import PATTERNS
from ...models.bert.token_mixers import fixed_length
from ..engines import check_engine, warn_of_ignored_engine
from ..runs.resuming import RecipeRecord, check_recipe, recipe_record, rows_record
from ..runs.run_cards import add_finetuning, draw_heads, hardware
from ..runs.run_checks import check_evaluation, check_schedule, check_served, check_training, check_training_of_task
from ..runs.run_folders import check_unfinished, resume_from, run_folder
from ..runs.stopping import STOPPING_FIELDS, StopOnSignal
from ..trainer import SparseBertTrainer
from .several_runs import write_recipe
from .task_data import TaskData
from .task_models import load_model, mask_metrics


logger = logging.get_logger(__name__)


def training_arguments(fields: dict[str, Any], output_dir: str | os.PathLike, task: Task) -> TrainingArguments:
    """
    The `TrainingArguments` of a run.

    Args:
        fields (`dict`): Section `training` of the recipe.
        output_dir (`str` or `os.PathLike`): Output folder; takes precedence over that of `fields`.
        task ([`Task`]): The task to train on, with its settings for fields that are not set.

    Raises:
        ValueError: If a field is wrong, or has no meaning for the task.
    """
    check_training(fields)
    given = {"save_strategy": "no"} | task.settings | fields
    arguments = TrainingArguments(**given | {"output_dir": os.fspath(output_dir), **STOPPING_FIELDS})
    check_schedule(arguments)
    check_evaluation(arguments)
    check_training_of_task(task, arguments)
    return arguments


def run_once(
    data: TaskData,
    model: dict[str, Any],
    training: dict[str, Any],
    output_dir: str | os.PathLike,
    recipe: dict[str, dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """
    Fine-tune a model, evaluate it and predict the test splits.

    Writes to `output_dir` the model with its mask, the tokenizer, `predictions_SPLIT.jsonl` with one example per line,
    the files that the official servers and scripts of the task read, and finally `metrics.json`. A run that is
    already there is replaced at the end. A random pattern is drawn with the run's seed unless `mask_seed` is given.

    Args:
        data ([`TaskData`]): The data, from [`prepare`].
        model (`dict`): Section `model` of the recipe.
        training (`dict`): Fields of `TrainingArguments`; they take precedence over the task's settings.
        output_dir (`str` or `os.PathLike`): Output folder.
        recipe (`dict[str, dict]`, *optional*): What the result depends on, written to `recipe.yaml`.

    Returns:
        `dict`: The metrics.
    Raises:
        ValueError: If model, mask and data do not fit together (see [`load_model`]), a field of `training` is wrong,
            or the checkpoint to resume from has another recipe. Nothing has been written by then.
        FileExistsError: If the folder holds a run that can be resumed, and neither this nor `overwrite` is asked for.
    """
    options, output = data.options, Path(output_dir)
    resume = resume_from(options.resume, training.get("resume_from_checkpoint"))
    if not (resume or options.overwrite):
        check_unfinished(output)
    overwrite = options.overwrite or not resume or (output / METRICS_NAME).is_file()
    with run_folder(output, overwrite, resume, options.allow_partial_resume, True) as (folder, checkpoint):
        return _run(data, model, training | {"resume_from_checkpoint": checkpoint}, folder, recipe)


def _run(data, model, training, output, recipe):
    start = time.perf_counter()
    task, options = data.task, data.options
    arguments = training_arguments(training, output, task)
    warn_of_ignored_engine(arguments)
    if arguments.resume_from_checkpoint:
        check_engine(arguments.resume_from_checkpoint, arguments)
    set_seed(arguments.seed)
    if options.mask in PATTERNS and "mask_seed" in allowed_fields(options.mask):
        model = {"mask_seed": arguments.seed} | model
    network = load_model(data, model)
    check_served(network, arguments, max(int(lengths.max()) for lengths in data.lengths.values()))
    first = data.evaluation_splits[0]
    record = recipe_record(options, network.config, arguments)
    record["inputs"] |= rows_record(data.features[data.train_split])
    if arguments.resume_from_checkpoint:
        check_recipe(arguments.resume_from_checkpoint, record)
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
        callbacks=[RecipeRecord(record), *([] if pruning is None else [pruning])],
    )
    main_process = trainer.is_world_process_zero()
    with StopOnSignal(trainer):
        trained = trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
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
        "splits": {},
    }
    for split in data.features:
        if split == data.train_split:
            continue
        prediction = trainer.predict(data.features[split])
        rows, values = data.evaluate(split, prediction.predictions)
        timings = prediction.metrics or {}
        if values and "test_loss" in timings:
            values["loss"] = timings["test_loss"]
        trainer.log({f"eval_{split}_{name}": value for name, value in values.items()})
        metrics["splits"][split] = values | {"seconds": timings["test_runtime"]}
        if main_process:
            write_predictions(output, split, rows, data.references(split))
            if task.write_submission is not None:
                task.write_submission(split, rows, output)
    metrics["score"] = metrics["splits"][first][task.main_metric]
    if options.simple_baseline and task.baseline is not None:
        metrics["simple_baseline"] = task.baseline(data.examples)
    metrics |= {"train_seconds": trainer.train_seconds, "seconds": time.perf_counter() - start}
    metrics["hardware"] = hardware()
    if main_process:
        draw_heads(output, network)
        add_finetuning(output, metrics, network, options.data)
        if recipe is not None:
            write_recipe(output / RECIPE_NAME, recipe)
    metrics = write_metrics(output / METRICS_NAME, metrics)
    trainer.push_results()
    return metrics


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
    """
    Read a file of [`write_predictions`].

    Returns:
        `dict[str, tuple]`: Prediction and reference by example id.
    """
    with open(Path(folder) / f"predictions_{split}.jsonl", encoding="utf-8") as file:
        rows = map(json.loads, file)
        return {row["id"]: (row["prediction"], row.get("reference")) for row in rows}
