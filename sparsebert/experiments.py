"""Many fine-tuning runs: seeds, grids of settings, all of GLUE. What is finished is not run again."""

import itertools
import json
import zipfile
from dataclasses import fields
from functools import partial
from pathlib import Path

import yaml
from accelerate import PartialState
from transformers import TrainingArguments
from transformers.utils import logging

from .comparison import paired_bootstrap, summarize
from .finetuning import (
    FinetuningArguments,
    MissingSplitError,
    prepare,
    read_predictions,
    train,
    training_arguments,
)
from .recipes import convert, nearest
from .tasks import TASKS
from .tasks.glue import GLUE, GLUE_COLUMNS, averages
from .training import check_output_dir, write_metrics


logger = logging.get_logger(__name__)

# SparseBERT (arXiv 2102.12871), Table 5.
PAPER_GRID = {"learning_rate": [1e-5, 1.5e-5, 2e-5, 3e-5, 4e-5, 5e-5], "weight_decay": [0.1, 0.01]}

# Fields that say which runs there are, not what one of them computes.
_LAYOUT = ("all", "seeds", "sweep", "baseline", "overwrite")


def run(recipe):
    """
    What a fine-tuning recipe asks for: a task or all of GLUE, with one seed or more, at given settings or the best of
    a grid, compared with a baseline or not.

    Args:
        recipe (`dict`): Sections `data`, `model`, `training` as [`load_recipe`] gives them.

    Returns:
        `Path`: The output folder; its `metrics.json` holds the results.
    Raises:
        ValueError, OSError: For what is wrong in the recipe or the data.
    """
    options = FinetuningArguments(**recipe["data"])
    _check(options)
    output = Path(recipe["training"].get("output_dir") or f"runs/{'glue' if options.all else options.task}")
    training = training_arguments({}, recipe, output)
    several = options.all or options.sweep or len(_seeds(options, recipe["training"])) > 1
    # Several runs go on where they were: each of them is checked.
    check_output_dir(output, options.overwrite, training.resume_from_checkpoint or (several and _started(output)))
    PartialState().wait_for_everyone()  # before one of the processes writes to the folder
    if several:
        output.mkdir(parents=True, exist_ok=True)
        (output / "experiment.yaml").write_text(yaml.safe_dump(recipe))
    if options.all:
        _run_all(recipe, output)
    else:
        run_task(prepare(options), recipe, output)
    return output


def _check(options):
    if options.all == (options.task is not None):
        raise ValueError("choose --task NAME or --all: " + ", ".join(TASKS))
    if options.task is not None and options.task not in TASKS:
        raise nearest("task", str(options.task), list(TASKS))
    if options.model is None:
        raise ValueError("--model must name the folder or Hub id of a pre-trained model")
    _grid(options)
    seeds = options.seeds if isinstance(options.seeds, list) else [options.seeds]
    if not seeds or any(isinstance(seed, bool) or not isinstance(seed, int) or seed < 0 for seed in seeds):
        raise ValueError(f"seeds must be a number of runs or a list of seeds, got {options.seeds!r}")
    if options.seeds == 0 or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be at least 1, or different, got {options.seeds!r}")
    if options.baseline is not None and not (Path(options.baseline) / "metrics.json").is_file():
        raise FileNotFoundError(f"baseline {options.baseline}: no metrics.json there; run it first")


def _grid(options):
    known = {field.name: field.type for field in fields(TrainingArguments)}
    grid = {}
    for name, values in (PAPER_GRID if options.sweep is True else options.sweep or {}).items():
        if name not in known:
            raise nearest("field of training in sweep", name, list(known))
        if not isinstance(values, list) or not values:
            raise ValueError(f"sweep: {name} must be a list of values, got {values!r}")
        grid[name] = [convert(f"sweep: {name}", value, known[name]) for value in values]
    return grid


def _seeds(options, training):
    first = training.get("seed", TrainingArguments.seed)
    return options.seeds if isinstance(options.seeds, list) else list(range(first, first + options.seeds))


def _started(folder):
    return (folder / "experiment.yaml").is_file()


def run_task(data, recipe, output):
    """
    The runs of one task: seeds, sweep and baseline as `data.options` says.

    Returns:
        `dict`: The metrics; for several runs mean and deviation over the seeds, of the best cell if there is a sweep.
    """
    options = data.options
    seeds = _seeds(options, recipe["training"])
    if options.baseline is not None:
        _common_seeds(options, seeds)
    if options.sweep:
        metrics = _sweep(data, recipe, output, seeds)
    else:
        metrics = _run_seeds(data, recipe, output, seeds)
    metrics = write_metrics(output / "metrics.json", metrics)
    if options.baseline is not None:
        comparison = {"comparison": compare(output, options.baseline)}
        metrics = write_metrics(output / "metrics.json", metrics | comparison)
    return metrics


def _common_seeds(options, seeds):
    baseline = json.loads((Path(options.baseline) / "metrics.json").read_text())
    if baseline.get("task") != options.task:
        raise ValueError(f"baseline {options.baseline} is of task {baseline.get('task')!r}, not {options.task!r}")
    if not set(seeds) & set(_run_folders(options.baseline)):
        raise ValueError(f"baseline {options.baseline} has none of the seeds {seeds}")


def _run_seeds(data, recipe, output, seeds):
    if len(seeds) == 1:
        return _run_once(data, _with(recipe, seed=seeds[0]), output)
    runs = {}
    for seed in seeds:
        folder = output / f"seed-{seed}"
        runs[folder.name] = _run_once(data, _with(recipe, seed=seed), folder)
    return _aggregate(runs)


def _with(recipe, **training):
    return recipe | {"training": recipe["training"] | training}


def _run_once(data, recipe, folder):
    """The metrics of a run: those in the folder, if it is finished and of the same recipe."""
    written = {section: dict(values) for section, values in recipe.items()}
    written["data"]["task"] = data.task.name
    for name in _LAYOUT:
        written["data"].pop(name, None)
    written["training"].pop("output_dir", None)
    path = folder / "recipe.yaml"
    if (folder / "metrics.json").is_file() and path.is_file() and not data.options.overwrite:
        stored = yaml.safe_load(path.read_text())
        for section, values in written.items():
            for name in sorted(values.keys() | stored[section].keys()):
                old, new = stored[section].get(name), values.get(name)
                if old != new:
                    raise ValueError(
                        f"{folder} holds a run with {section}.{name} {old!r}, not {new!r}: choose another output_dir, "
                        "or pass --overwrite"
                    )
        logger.warning(f"{folder} is finished and not run again.")
        return json.loads((folder / "metrics.json").read_text())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.json").unlink(missing_ok=True)
    path.write_text(yaml.safe_dump(written))
    return train(data, recipe, folder)


def _aggregate(runs):
    """One set of metrics from those of several seeds, by folder."""
    first, *_ = runs.values()
    metrics = {name: value for name, value in first.items() if name not in ("seed", "splits", "score", "seconds")}
    metrics["seeds"] = {run["seed"]: {"folder": folder, "score": run["score"]} for folder, run in runs.items()}
    metrics["splits"] = {
        split: {name: summarize([run["splits"][split][name] for run in runs.values()]) for name in values}
        for split, values in first["splits"].items()
    }
    score = summarize([run["score"] for run in runs.values()])
    metrics |= {"score": score["mean"], "score_std": score.get("std")}
    for name in ("train_seconds", "seconds"):
        metrics[name] = summarize([run[name] for run in runs.values()])["mean"]
    return metrics


def _sweep(data, recipe, output, seeds):
    grid = _grid(data.options)
    cells = []
    for values in itertools.product(*grid.values()):
        settings = dict(zip(grid, values, strict=True))
        folder = output / ",".join(f"{name}={value}" for name, value in settings.items())
        run = _run_once(data, _with(recipe, **settings, seed=seeds[0]), folder / f"seed-{seeds[0]}")
        cells.append({"settings": settings, "folder": folder.name, "score": run["score"]})
        # Only the best keeps its weights: a grid of them would fill a disk.
        best = max(cells, key=lambda cell: cell["score"])
        for cell in cells:
            if cell is not best:
                (output / cell["folder"] / f"seed-{seeds[0]}" / "model.safetensors").unlink(missing_ok=True)
    runs = {}
    for seed in seeds:
        folder = output / best["folder"] / f"seed-{seed}"
        runs[f"{best['folder']}/{folder.name}"] = _run_once(data, _with(recipe, **best["settings"], seed=seed), folder)
    return _aggregate(runs) | {"sweep": {"best": best["settings"], "cells": cells}}


def _run_folders(folder):
    """Folders of the single runs by seed."""
    metrics = json.loads((Path(folder) / "metrics.json").read_text())
    if "seeds" in metrics:
        return {int(seed): Path(folder) / run["folder"] for seed, run in metrics["seeds"].items()}
    return {metrics["seed"]: Path(folder)}


def compare(folder, baseline, resamples=1000):
    """
    The difference in the main metric between two finished runs of a task, on every split with references.

    Args:
        folder, baseline (`str` or `os.PathLike`): Output folders.
        resamples (`int`, *optional*, defaults to 1000): As [`paired_bootstrap`].

    Returns:
        `dict`: By split, what [`paired_bootstrap`] returns.
    Raises:
        ValueError: If they have no seed in common, or their examples differ.
    """
    ours, theirs = _run_folders(folder), _run_folders(baseline)
    seeds = sorted(set(ours) & set(theirs))
    if not seeds:
        raise ValueError(f"{folder} and {baseline} have no seed in common")
    run = json.loads((ours[seeds[0]] / "metrics.json").read_text())
    task = TASKS[run["task"]]
    result = {"baseline": str(baseline)}
    for split, values in run["splits"].items():
        if task.main_metric not in values:
            continue
        systems = [[read_predictions(runs[seed], split) for seed in seeds] for runs in (ours, theirs)]
        references = {name: reference for name, (_, reference) in systems[0][0].items()}
        for predictions in itertools.chain(*systems):
            if {name: reference for name, (_, reference) in predictions.items()} != references:
                raise ValueError(f"{baseline} was evaluated on other examples of {split} than {folder}")
        gold = list(references.values())
        systems = [[[run[name][0] for name in references] for run in system] for system in systems]
        if task.scores is None:
            metric = partial(_main_metric, task)
        else:
            metric = _mean
            systems = [[task.scores(predictions, gold) for predictions in system] for system in systems]
        result[split] = paired_bootstrap(metric, *systems, gold, resamples)
    return result


def _main_metric(task, predictions, references):
    return task.metrics(predictions, references)[task.main_metric]


def _mean(scores, _):
    return float(scores.mean())


def _run_all(recipe, output):
    options = FinetuningArguments(**recipe["data"])
    results, missing = {}, {}
    for name in GLUE:
        baseline = None if options.baseline is None else str(Path(options.baseline) / name)
        task_options = FinetuningArguments(**recipe["data"] | {"task": name, "all": False, "baseline": baseline})
        try:
            data = prepare(task_options)
        except MissingSplitError as error:
            logger.warning(f"{error}; left out.")
            missing[name] = str(error)
            continue
        results[name] = run_task(data, recipe, output / name)
    if not results:
        raise ValueError(f"there is no task of GLUE in {options.data}: {'; '.join(missing.values())}")
    write_metrics(output / "metrics.json", {"glue": results, "missing": missing} | averages(glue_scores(results)))
    if PartialState().is_main_process:
        _write_submission(results, output)


def _write_submission(results, output):
    """One archive for GLUE's server: of each task the predictions of the seed that is best on the development set."""
    with zipfile.ZipFile(output / "submission.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for task, metrics in results.items():
            runs = metrics.get("seeds", {metrics.get("seed"): {"folder": "", "score": metrics["score"]}})
            best = max(runs.values(), key=lambda run: run["score"])
            for path in sorted((output / task / best["folder"]).glob("*.tsv")):
                archive.write(path, path.name)


def glue_scores(results):
    """The columns of the paper's table from the metrics of the tasks."""
    scores = {}
    for title, task, split, metric in GLUE_COLUMNS:
        value = results.get(task, {}).get("splits", {}).get(split, {}).get(metric)
        if value is not None:
            scores[title] = value["mean"] if isinstance(value, dict) else value
    return scores
