"""Many fine-tuning runs: seeds, grids of settings, all of GLUE. What is finished is not run again."""

import hashlib
import itertools
import json
import math
import zipfile
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import yaml
from accelerate import PartialState
from transformers import TrainingArguments
from transformers.utils import logging

from ..analysis.statistics import paired_bootstrap, summarize
from ..checks import nearest
from ..data.tasks import TASKS
from ..data.tasks.glue import GLUE, GLUE_COLUMNS, SUBMISSIONS, averages
from ..files import check_output_dir, write_metrics
from .finetuning import (
    FinetuningArguments,
    MissingSplitError,
    check,
    prepare,
    read_predictions,
    train,
    training_arguments,
)
from .recipes import convert


logger = logging.get_logger(__name__)

# SparseBERT (arXiv 2102.12871), Table 5.
PAPER_GRID = {"learning_rate": [1e-5, 1.5e-5, 2e-5, 3e-5, 4e-5, 5e-5], "weight_decay": [0.1, 0.01]}

# Fields that say which runs there are, not what one of them computes.
_LAYOUT = ("all", "seeds", "sweep", "baseline", "overwrite")
_PER_RUN = ("output_dir", "seed", "resume_from_checkpoint")


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
    check(options, recipe["model"])
    _grid(options)
    output = Path(recipe["training"].get("output_dir") or f"runs/{'glue' if options.all else options.task}")
    training = training_arguments({}, recipe, output)
    seeds = _seeds(options, training)
    several = options.all or bool(options.sweep) or len(seeds) > 1
    if several and training.resume_from_checkpoint:
        raise ValueError("resume_from_checkpoint is for one run; several go on at the first that is not finished")
    _check_folder(output, options, several, training.resume_from_checkpoint)
    PartialState().wait_for_everyone()  # before one of the processes writes to the folder
    if not options.all:
        data = prepare(options)
        if options.baseline is not None:
            _check_baseline(options.baseline, data, seeds)
        _start(output, recipe, several)
        run_task(data, recipe, output, options.baseline)
        return output
    tasks, missing = _prepare_all(options, seeds)
    _start(output, recipe, several)
    results = {
        name: run_task(data, recipe, output / name, options.baseline and Path(options.baseline) / name)
        for name, data in tasks.items()
    }
    write_metrics(output / "metrics.json", {"glue": results, "missing": missing} | averages(glue_scores(results)))
    if PartialState().is_main_process:
        _write_submission(results, output)
    return output


def _grid(options):
    known = {field.name: field.type for field in fields(TrainingArguments) if field.name not in _PER_RUN}
    if not isinstance(options.sweep, (bool, dict)):
        raise ValueError(f"sweep must be true, or a dictionary of lists of values, got {options.sweep!r}")
    grid = {}
    for name, values in (PAPER_GRID if options.sweep is True else options.sweep or {}).items():
        if name not in known:
            raise nearest("field of training in sweep", name, list(known))
        if not isinstance(values, list) or not values:
            raise ValueError(f"sweep: {name} must be a list of values, got {values!r}")
        grid[name] = [convert(f"sweep: {name}", value, known[name]) for value in values]
    return grid


def _seeds(options, training):
    seeds = options.seeds if isinstance(options.seeds, list) else [options.seeds]
    if not seeds or any(isinstance(seed, bool) or not isinstance(seed, int) or seed < 0 for seed in seeds):
        raise ValueError(f"seeds must be a number of runs or a list of seeds, got {options.seeds!r}")
    if options.seeds == 0 or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be at least 1, or different, got {options.seeds!r}")
    return seeds if isinstance(options.seeds, list) else list(range(training.seed, training.seed + options.seeds))


def _check_folder(output, options, several, resume):
    """A folder may hold what this command can go on with: a run or an experiment of the same task."""
    path = output / ("experiment.yaml" if several else "recipe.yaml")
    check_output_dir(output, options.overwrite, resume or path.is_file())
    if path.is_file() and not options.overwrite:
        stored = yaml.safe_load(path.read_text())["data"]
        if stored.get("task") != options.task:
            raise ValueError(f"{output} holds runs of {stored.get('task') or 'all tasks'}: choose another output_dir")


def _start(output, recipe, several):
    if several and PartialState().is_main_process:
        output.mkdir(parents=True, exist_ok=True)
        (output / "experiment.yaml").write_text(yaml.safe_dump(recipe))


def _prepare_all(options, seeds):
    """The data of each task of GLUE, and why there is none; everything that can go wrong in it does so here."""
    tasks, missing = {}, {}
    for name in GLUE:
        try:
            data = prepare(replace(options, task=name, all=False))
        except MissingSplitError as error:
            logger.warning(f"{error}; left out.")
            missing[name] = str(error)
            continue
        if options.baseline is not None:
            _check_baseline(Path(options.baseline) / name, data, seeds)
        tasks[name] = data
    if not tasks:
        raise ValueError(f"there is no task of GLUE in {options.data}: {'; '.join(missing.values())}")
    return tasks, missing


def _check_baseline(folder, data, seeds):
    path = Path(folder) / "metrics.json"
    if not path.is_file():
        raise FileNotFoundError(f"baseline {folder}: there is no finished run (metrics.json) of {data.task.name}")
    task = json.loads(path.read_text()).get("task")
    if task != data.task.name:
        raise ValueError(f"baseline {folder} is {f'of task {task!r}' if task else 'no fine-tuning run'}, not of "
                         f"{data.task.name!r}")  # fmt: skip
    runs = _run_folders(folder)
    if not set(seeds) & set(runs):
        raise ValueError(f"baseline {folder} has the seeds {sorted(runs)}, none of {seeds}")
    for split in data.evaluation_splits:
        stored = next(iter(runs.values())) / f"predictions_{split}.jsonl"
        if stored.is_file() and _references(read_predictions(stored.parent, split)) != data.references(split):
            raise ValueError(f"baseline {folder} was evaluated on other examples of {split}")


def run_task(data, recipe, output, baseline=None):
    """
    The runs of one task: seeds and sweep as `data.options` says, and the comparison with a baseline.

    Args:
        data ([`~sparsebert.training.finetuning.TaskData`]): From [`prepare`].
        recipe (`dict`): Sections `data`, `model`, `training`.
        output (`Path`): Where to write.
        baseline (`str` or `os.PathLike`, *optional*): Output folder of another run of the task.

    Returns:
        `dict`: The metrics; for several runs mean and deviation over the seeds, of the best cell if there is a sweep.
    """
    recipe = recipe | {"data": recipe["data"] | {"task": data.task.name}}
    seeds = _seeds(data.options, training_arguments({}, recipe, output))
    grid = _grid(data.options)
    if grid:
        metrics = _sweep(data, recipe, output, seeds, grid)
    elif len(seeds) == 1:
        metrics = _run_once(data, _with(recipe, seed=seeds[0]), output)
    else:
        folders = {seed: output / f"seed-{seed}" for seed in seeds}
        metrics = _aggregate(
            {folder.name: _run_once(data, _with(recipe, seed=seed), folder) for seed, folder in folders.items()}
        )
    metrics = write_metrics(output / "metrics.json", metrics)
    if baseline is not None:
        comparison = {"comparison": compare(output, baseline)}
        metrics = write_metrics(output / "metrics.json", metrics | comparison)
    return metrics


def _with(recipe, **training):
    return recipe | {"training": recipe["training"] | training}


def _run_once(data, recipe, folder, need_weights=False):
    """The metrics of a run: those in the folder, if it is finished and was of the same recipe, model and mask."""
    written = {section: dict(values) for section, values in recipe.items()}
    for section, names in (("data", _LAYOUT), ("training", ("output_dir", "resume_from_checkpoint"))):
        for name in names:
            written[section].pop(name, None)
    options = data.options
    written["inputs"] = {name: _digest(getattr(options, name)) for name in ("model", "mask")}
    written["inputs"] |= {f"{split} examples": len(examples) for split, examples in data.examples.items()}
    path = folder / "recipe.yaml"
    finished = (folder / "metrics.json").is_file() and path.is_file() and not options.overwrite
    if finished:
        stored = yaml.safe_load(path.read_text())
        for section, values in written.items():
            for name in sorted(values.keys() | stored[section].keys()):
                if stored[section].get(name) != values.get(name):
                    old, new = (repr(where.get(name, "unset")) for where in (stored[section], values))
                    raise ValueError(
                        f"{folder} holds a run with {section}.{name} {old}, not {new}: choose another output_dir, or "
                        "pass --overwrite"
                    )
        if not need_weights or any(folder.glob("model*.safetensors")):
            logger.warning(f"{folder} is finished and not run again.")
            metrics = json.loads((folder / "metrics.json").read_text())
            return {name: value for name, value in metrics.items() if name != "comparison"}
    logger.warning(f"{folder}: training with seed {recipe['training']['seed']}.")
    metrics = train(data, recipe, folder)
    if PartialState().is_main_process:
        path.write_text(yaml.safe_dump(written))
    return metrics


def _digest(name):
    """What is in a model's or a mask's folder, so that another one at the same place is noticed."""
    if name is None or not Path(name).is_dir():
        return None
    digest = hashlib.sha256()
    for path in sorted(Path(name).glob("*")):
        if path.suffix in (".safetensors", ".bin") or path.name in ("config.json", "mask_config.json"):
            with open(path, "rb") as file:
                for block in iter(partial(file.read, 2**20), b""):
                    digest.update(block)
    return digest.hexdigest()


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


def _sweep(data, recipe, output, seeds, grid):
    cells, first_runs = [], {}
    for values in itertools.product(*grid.values()):
        settings = dict(zip(grid, values, strict=True))
        folder = output / ",".join(f"{name}={value}" for name, value in settings.items())
        run = _run_once(data, _with(recipe, **settings, seed=seeds[0]), folder / f"seed-{seeds[0]}")
        cells.append({"settings": settings, "folder": folder.name, "score": run["score"]})
        first_runs[folder.name] = run
        # Only the best keeps its weights: a grid of them would fill a disk.
        best = max(cells, key=_by_score)
        for cell in cells:
            if cell is not best and PartialState().is_main_process:
                for path in (output / cell["folder"]).glob("seed-*/model*.safetensors"):
                    path.unlink()
        PartialState().wait_for_everyone()
    runs = {}
    for seed in seeds:
        folder = output / best["folder"] / f"seed-{seed}"
        if seed == seeds[0] and any(folder.glob("model*.safetensors")):
            metrics = first_runs[best["folder"]]
        else:
            metrics = _run_once(data, _with(recipe, **best["settings"], seed=seed), folder, need_weights=True)
        runs[f"{best['folder']}/{folder.name}"] = metrics
    return _aggregate(runs) | {"sweep": {"best": best["settings"], "cells": cells}}


def _by_score(run):
    """A run that diverged is the worst."""
    return -math.inf if math.isnan(run["score"]) else run["score"]


def _run_folders(folder):
    """Folders of the single runs by seed."""
    metrics = json.loads((Path(folder) / "metrics.json").read_text())
    if "seeds" in metrics:
        return {int(seed): Path(folder) / run["folder"] for seed, run in metrics["seeds"].items()}
    return {metrics["seed"]: Path(folder)}


def _references(predictions):
    return {name: reference for name, (_, reference) in predictions.items()}


def compare(folder, baseline, resamples=1000):
    """
    The difference in the main metric between two finished runs of a task, on every split that both have references
    for, over the seeds that both have.

    Args:
        folder, baseline (`str` or `os.PathLike`): Output folders.
        resamples (`int`, *optional*, defaults to 1000): As [`paired_bootstrap`].

    Returns:
        `dict`: `"baseline"`, `"seeds"`, and by split what [`paired_bootstrap`] returns.
    Raises:
        ValueError: If they have no seed in common, or their examples differ.
    """
    ours, theirs = _run_folders(folder), _run_folders(baseline)
    seeds = sorted(set(ours) & set(theirs))
    if not seeds:
        raise ValueError(f"{folder} and {baseline} have no seed in common")
    run = json.loads((ours[seeds[0]] / "metrics.json").read_text())
    task = TASKS[run["task"]]
    result = {"baseline": str(baseline), "seeds": seeds}
    for split, values in run["splits"].items():
        if task.main_metric not in values or not (theirs[seeds[0]] / f"predictions_{split}.jsonl").is_file():
            continue
        systems = [[read_predictions(runs[seed], split) for seed in seeds] for runs in (ours, theirs)]
        references = _references(systems[0][0])
        if any(_references(predictions) != references for predictions in itertools.chain(*systems)):
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


def glue_scores(results):
    """The columns of the paper's table from the metrics of the tasks."""
    scores = {}
    for title, task, split, metric in GLUE_COLUMNS:
        value = results.get(task, {}).get("splits", {}).get(split, {}).get(metric)
        if value is not None:
            scores[title] = value["mean"] if isinstance(value, dict) else value
    return scores


def _write_submission(results, output):
    """One archive for GLUE's server: of each task the predictions of the seed that is best on the development set."""
    files = {}
    for task, metrics in results.items():
        runs = metrics.get("seeds", {metrics.get("seed"): {"folder": "", "score": metrics["score"]}})
        best = max(runs.values(), key=_by_score)
        files |= {path.name: path for path in sorted((output / task / best["folder"]).glob("*.tsv"))}
    if not files:
        return
    with zipfile.ZipFile(output / "submission.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in files.items():
            archive.write(path, name)
    if absent := [f"{name}.tsv" for name in SUBMISSIONS.values() if f"{name}.tsv" not in files]:
        logger.warning(f"{output / 'submission.zip'} lacks {', '.join(absent)}, which GLUE's server asks for.")
