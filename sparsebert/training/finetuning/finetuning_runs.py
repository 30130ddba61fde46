"""
Fine-tuning: the runs that a recipe asks for, over seeds, a grid of settings or all of GLUE, and their summary.

Finished runs are read from their folders, not repeated, see [`run_or_read`].
"""

import io
import math
import zipfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import TrainingArguments
from transformers.utils import logging

from ...analysis.reporting.reports import read_metrics, report_tables
from ...analysis.statistics import summarize
from ...data.tasks import TASKS
from ...data.tasks.glue import GLUE, GLUE_COLUMNS, SUBMISSIONS, averages
from ...file_kinds import kind_of
from ...files import (
    EXPERIMENT_NAME,
    METRICS_NAME,
    SUBMISSION_NAME,
    TABLES_NAME,
    locked_output,
    replace_files,
    write_metrics,
)
from ...hub import without_secrets
from ...models.bert.configuration_sparsebert import SparseBertConfig
from ...output_folders import remove, remove_replaced, stored_metrics, weights_and_checkpoints
from ...recipe_files import write_recipe
from ..runs.run_cards import add_finetuning
from ..runs.run_folders import resume_from
from .comparison import check_baseline, compare
from .finetuning_arguments import UNLESS_SET, FinetuningArguments
from .finetuning_plan import Plan, cells_of, check_runs_folder, layout_of, read_plan
from .single_run import run_or_read
from .task_data import MissingSplitError, TaskData, prepare


logger = logging.get_logger(__name__)

SECTIONS = {"data": FinetuningArguments, "model": SparseBertConfig, "training": TrainingArguments}
# Defaults of the sections that differ from those of their classes; `None` is chosen by the task.
DEFAULTS = {"training": UNLESS_SET | {name: None for task in TASKS.values() for name in task.settings}}

_OF_ONE_RUN = ("seed", "mask_seed", "seconds")


def finetune(recipe: dict[str, dict[str, Any]]) -> Path:
    """
    Fine-tune as a recipe says: on one task or all of GLUE, with one or more seeds, with given settings or the best
    ones of a grid, optionally compared with a baseline.
    """
    plan = read_plan(recipe)
    # The token stays with the options: what is written of a recipe must not have it.
    recipe = recipe | {"data": without_secrets(recipe["data"])}
    resume = resume_from(plan.options.resume, plan.arguments.resume_from_checkpoint)
    layout = layout_of(plan.options.all, plan.grid, plan.seeds)
    if any(layout) and isinstance(resume, str):
        raise ValueError("resume_from_checkpoint is for a single run: resume several runs with --resume")
    with locked_output(plan.output) as unfinished:
        check_runs_folder(plan.output, plan.options, layout, resume, unfinished)
        PartialState().wait_for_everyone()  # before one of the processes writes to the folder
        output = _finetune(recipe, plan)
        if PartialState().is_main_process:
            tables = report_tables(read_metrics([output]))
            replace_files({output / TABLES_NAME: "\n".join(table.markdown() for table in tables).encode()})
        return output


def check_finetuning(recipe: dict[str, dict[str, Any]]) -> None:
    """Check a recipe and the data that it names, as [`finetune`] does before the first training."""
    _prepare_tasks(read_plan(recipe))


def _prepare_tasks(plan: Plan) -> tuple[dict[str, TaskData], dict[str, str], dict[str, Path]]:
    """The data of each task, the reason for each task of GLUE that has none, and the folders of the baselines."""
    options = plan.options
    with plan.arguments.main_process_first(desc="tokenization"):  # the first fills the caches, the others read them
        tasks, missing = _prepare_glue(options) if options.all else ({str(options.task): prepare(options)}, {})
    baselines = {}
    if options.baseline is not None:
        for name, data in tasks.items():
            baselines[name] = Path(options.baseline, name if options.all else "")
            check_baseline(baselines[name], data, plan.seeds)
    return tasks, missing, baselines


def _finetune(recipe: dict[str, dict[str, Any]], plan: Plan) -> Path:
    options, output, seeds, grid = plan.options, plan.output, plan.seeds, plan.grid
    whole, several = options.all, bool(grid) or len(seeds) > 1
    # Everything that can be wrong with the data of a task is found before the first task is trained on.
    tasks, missing, baselines = _prepare_tasks(plan)
    if (whole or several) and PartialState().is_main_process:
        output.mkdir(parents=True, exist_ok=True)
        write_recipe(output / EXPERIMENT_NAME, {section: recipe[section] for section in SECTIONS})
    older = {place: stored_metrics(place) for place in (output, *(output / name for name in tasks))}

    def make_way(place: Path, newer: dict[str, Any], other_layout: bool) -> None:
        """Before the new results are written, so that a command that is stopped here can be repeated."""
        # Without `overwrite`, another layout is only there if a command that was to replace it was stopped.
        if PartialState().is_main_process and (options.overwrite or other_layout):
            remove_replaced(place, older[place], newer)

    results = {}
    for name, data in tasks.items():
        folder = output / name if options.all else output
        metrics = _run_task(data, recipe, seeds, grid, folder)
        make_way(folder, metrics, several == ("seed" in older[folder]))
        write_metrics(folder / METRICS_NAME, metrics)
        if PartialState().is_main_process:
            for run in metrics.get("seeds", {}).values():
                add_finetuning(folder / run["folder"], metrics, data=options.data)
        if name in baselines:
            comparison = {"comparison": compare(folder, baselines[name])}
            metrics = write_metrics(folder / METRICS_NAME, metrics | comparison)
        results[name] = metrics
    if options.all:
        metrics = {"glue": results, "missing": missing} | averages(_glue_scores(results))
        make_way(output, metrics, "glue" not in older[output])
        if PartialState().is_main_process:
            _write_submission(results, output)
        write_metrics(output / METRICS_NAME, metrics)
    return output


def _prepare_glue(options: FinetuningArguments) -> tuple[dict[str, TaskData], dict[str, str]]:
    """The data of every task of GLUE, and the reason for each task without data."""
    tasks, missing = {}, {}
    for name in GLUE:
        try:
            tasks[name] = prepare(replace(options, task=name, all=False))
        except MissingSplitError as error:
            logger.warning(f"{error}; left out.")
            missing[name] = str(error)
    if not tasks:
        raise ValueError(f"there is no task of GLUE in {options.data}: {'; '.join(missing.values())}")
    return tasks, missing


def _run_task(
    data: TaskData, recipe: dict[str, dict[str, Any]], seeds: list[int], grid: dict[str, list], output: Path
) -> dict[str, Any]:
    """The metrics of a task; for several seeds their mean and deviation, for a grid those of the best cell."""
    if grid:
        return _run_grid(data, recipe, seeds, grid, output)
    if len(seeds) == 1:
        return run_or_read(data, recipe, {"seed": seeds[0]}, output)
    folders = {seed: output / f"seed-{seed}" for seed in seeds}
    return _aggregate(
        {folder.name: run_or_read(data, recipe, {"seed": seed}, folder) for seed, folder in folders.items()}
    )


def _run_grid(
    data: TaskData, recipe: dict[str, dict[str, Any]], seeds: list[int], grid: dict[str, list], output: Path
) -> dict[str, Any]:
    """Every cell with the first seed, the best cell with all seeds."""
    cells: list[dict[str, Any]] = []
    first_runs = {}
    for settings in cells_of(grid):
        folder = output / ",".join(f"{name}={value}" for name, value in settings.items())
        try:
            run = run_or_read(data, recipe, settings | {"seed": seeds[0]}, folder / f"seed-{seeds[0]}")
        except FloatingPointError as error:
            logger.warning(f"{folder}: {error}")
            run = {"score": math.nan}
        cells.append({"settings": settings, "folder": folder.name, "score": run["score"]})
        first_runs[folder.name] = run
        # Only the best cell keeps its weights and checkpoints: those of a whole grid would fill a disk.
        best = max(cells, key=_score)
        for cell in cells:
            if cell is not best and PartialState().is_main_process:
                for result in (output / cell["folder"]).glob(f"seed-*/{METRICS_NAME}"):
                    if "link" in (kind_of(result.parent), kind_of(result.parent.parent)):
                        continue  # a run that is kept elsewhere
                    for path in weights_and_checkpoints(result.parent):
                        remove(path)
        PartialState().wait_for_everyone()
    runs = {}
    for seed in seeds:
        folder = output / best["folder"] / f"seed-{seed}"
        if seed == seeds[0] and any(folder.glob("model*.safetensors")):
            metrics = first_runs[best["folder"]]
        else:
            metrics = run_or_read(data, recipe, best["settings"] | {"seed": seed}, folder, need_weights=True)
        runs[f"{best['folder']}/{folder.name}"] = metrics
    return _aggregate(runs) | {"sweep": {"best": best["settings"], "cells": cells}}


def _aggregate(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The metrics of several seeds as one, from those of the runs by folder."""
    first, *_ = runs.values()
    metrics = {name: value for name, value in first.items() if name not in (*_OF_ONE_RUN, "splits", "score")}
    metrics["seeds"] = {
        run["seed"]: {"folder": folder} | {name: run[name] for name in ("score", "mask_seed") if name in run}
        for folder, run in runs.items()
    }
    metrics["splits"] = {
        split: {name: _summary(run["splits"][split][name] for run in runs.values()) for name in values}
        for split, values in first["splits"].items()
    }
    score = _summary(run["score"] for run in runs.values())
    metrics |= {"score": score["mean"], "score_std": score.get("std")}
    for name in ("train_seconds", "seconds"):
        metrics[name] = _summary(run[name] for run in runs.values())["mean"]
    return metrics


def _summary(values: Iterable[float | None]) -> dict[str, Any]:
    """A summary of numbers from metrics files, where `None` stands for one that is not finite."""
    return summarize([math.nan if value is None else value for value in values])


def _score(run: dict[str, Any]) -> float:
    """The score to rank runs by; a run that diverged is the worst."""
    return -math.inf if run["score"] is None or math.isnan(run["score"]) else run["score"]


def _glue_scores(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The columns of the paper's table, from the metrics of the tasks."""
    scores = {}
    for title, task, split, metric in GLUE_COLUMNS:
        value = results.get(task, {}).get("splits", {}).get(split, {}).get(metric)
        if value is not None:
            scores[title] = value["mean"] if isinstance(value, dict) else value
    return scores


def _write_submission(results: dict[str, dict[str, Any]], output: Path) -> None:
    """One archive for GLUE's server, with the predictions of the best seed of each task on its development set."""
    files: dict[str, Path] = {}
    for task, metrics in results.items():
        runs = metrics.get("seeds", {metrics.get("seed"): {"folder": "", "score": metrics["score"]}})
        best = max(runs.values(), key=_score)
        files |= {path.name: path for path in sorted((output / task / best["folder"]).glob("*.tsv"))}
    if not files:
        (output / SUBMISSION_NAME).unlink(missing_ok=True)
        return
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in files.items():
            archive.write(path, name)
    replace_files({output / SUBMISSION_NAME: content.getvalue()})
    if absent := [f"{name}.tsv" for name in SUBMISSIONS.values() if f"{name}.tsv" not in files]:
        logger.warning(f"{output / SUBMISSION_NAME} lacks {', '.join(absent)}, which GLUE's server asks for.")
