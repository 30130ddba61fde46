"""Comparison of finished fine-tuning runs, from the files in their output folders."""

import itertools
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...analysis.reporting.reports import read_metrics
from ...analysis.statistics import paired_bootstrap
from ...data.tasks import TASKS
from ...files import METRICS_NAME
from .single_run import read_predictions
from .task_data import TaskData


def seed_folders(folder: str | os.PathLike) -> dict[int, Path]:
    """Folders of the single runs in an output folder."""
    metrics = read_metrics([folder])[Path(folder)]
    try:
        if "seeds" in metrics:
            return {int(seed): Path(folder) / run["folder"] for seed, run in metrics["seeds"].items()}
        return {int(metrics["seed"]): Path(folder)}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{folder}: its metrics.json does not say which seeds there are ({error!r})") from error


def check_baseline(folder: str | os.PathLike, data: TaskData, seeds: Sequence[int]) -> None:
    """Check, before training, that a finished run can serve as a baseline."""
    path = Path(folder) / METRICS_NAME
    if not path.is_file():
        raise FileNotFoundError(f"baseline {folder}: there is no finished run (metrics.json) of {data.task.name}")
    try:
        task, runs = read_metrics([folder])[Path(folder)].get("task"), {}
        if task == data.task.name:
            runs = seed_folders(folder)
    except ValueError as error:
        raise ValueError(f"baseline: {error}") from error
    if task != data.task.name:
        found = f"a run of task {task!r}" if task else "no fine-tuning run"
        raise ValueError(f"baseline {folder} is {found}, expected one of {data.task.name!r}")
    if not set(seeds) & set(runs):
        raise ValueError(f"baseline {folder} has the seeds {sorted(runs)}, none of {list(seeds)}")
    run = next(iter(runs.values()))
    if not any((run / f"predictions_{split}.jsonl").is_file() for split in data.evaluation_splits):
        raise ValueError(
            f"baseline {folder} has no predictions of {', '.join(data.evaluation_splits)} to compare with"
        )
    for split in data.evaluation_splits:
        stored = run / f"predictions_{split}.jsonl"
        if stored.is_file() and _references(read_predictions(stored.parent, split)) != data.references(split):
            raise ValueError(f"baseline {folder} was evaluated on other examples of {split}")


def compare(folder: str | os.PathLike, baseline: str | os.PathLike, resamples: int = 1000) -> dict[str, Any]:
    """
    Difference in the main metric between two finished fine-tuning runs of a task, on every split for which both have
    references, over the seeds they share.
    """
    ours, theirs = seed_folders(folder), seed_folders(baseline)
    seeds = sorted(set(ours) & set(theirs))
    if not seeds:
        raise ValueError(f"{folder} and {baseline} have no seed in common")
    run = json.loads((ours[seeds[0]] / METRICS_NAME).read_text(encoding="utf-8"))
    task = TASKS[run["task"]]
    result: dict[str, Any] = {"baseline": str(baseline), "seeds": seeds}
    for split, values in run["splits"].items():
        if task.main_metric not in values or not (theirs[seeds[0]] / f"predictions_{split}.jsonl").is_file():
            continue
        stored = [[read_predictions(runs[seed], split) for seed in seeds] for runs in (ours, theirs)]
        references = _references(stored[0][0])
        if any(_references(predictions) != references for predictions in itertools.chain(*stored)):
            raise ValueError(f"{baseline} was evaluated on other examples of {split} than {folder}")
        gold = list(references.values())
        systems: list[list] = [[[run[name][0] for name in references] for run in system] for system in stored]
        if task.scores is None:
            # The function alone: the module's checks would take most of the time of the resamples.
            metric: Callable = partial(_main_metric, task.load_metric().score, task.main_metric)
        else:
            metric = _mean
            systems = [[task.scores(predictions, gold) for predictions in system] for system in systems]
        result[split] = paired_bootstrap(metric, systems[0], systems[1], gold, resamples)
    return result


def _references(predictions: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    return {name: reference for name, (_, reference) in predictions.items()}


def _main_metric(score: Callable, name: str, predictions: Sequence, references: Sequence) -> float:
    return score(predictions, references)[name]


def _mean(scores: np.ndarray, _: Any) -> float:
    return float(scores.mean())
