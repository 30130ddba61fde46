"""
Run an experiment: its cells one by one, and after each cell the results, a table and a plot.

A finished cell is not run again; one that was interrupted starts over, one that fails does not stop the others, and
one that another process runs is left to it. Results go to EXPERIMENT_SCALE.json, the table beside the paper's figures
to .md and, with the extra `viz`, the plot to .png. What some experiments keep of their cells for further pictures goes
to the folder EXPERIMENT_SCALE, and the pictures to EXPERIMENT_SCALE_NAME.png.
"""

import fnmatch
import json
import shutil
import time
import traceback
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from tqdm.auto import tqdm
from transformers.utils import logging

from sparsebert.analysis.tables import Table
from sparsebert.checks import check_range, nearest
from sparsebert.files import check_makeable, make_folder, replace_files
from sparsebert.training.runs.run_cards import hardware
from sparsebert.training.runs.run_checks import check_training
from sparsebert.version import __version__

from ..experiments import EXPERIMENTS
from .experiment import Cells, Experiment, shared_settings, unseeded
from .kept_files import FINISHED_NAME, keep_files, kept_folder, picture_path
from .result_tables import experiment_tables, plot_cells
from .time_estimates import describe_plan, duration, estimate_seconds


logger = logging.get_logger(__name__)


class CellsFailed(RuntimeError):
    """Some cells failed, after which the others were run; `tables` are those of all finished cells."""

    def __init__(self, message: str, tables: list[Table]) -> None:
        super().__init__(message)
        self.tables = tables


@dataclass
class ReproductionArguments:
    """
    Which cells of an experiment to run, and where to write.

    Args:
        experiment (`str`): Name of the experiment, a key of `EXPERIMENTS`.
        scale (`str`): `"tiny"` for two CPU cores, or `"paper"` for the paper's size.
        output (`str`): Folder for results, table and plot.
        runs (`str`): Folder for what the cells write, such as weights.
        only (`str` or `list[str]`, *optional*): Run only the cells with these names; `*` stands for any text.
        list_cells (`bool`): Print the names of the cells without running any.
        overwrite (`bool`): Run cells again that are finished, were made with other settings, or whose folder in
            `runs` belongs to other results.
        redraw (`bool`): Run no cells; only write the table and the pictures of the finished cells again.
    """

    experiment: str | None = None
    scale: str = "tiny"
    output: str = "results"
    runs: str = "runs/reproduce"
    only: str | list[str] | None = None
    list_cells: bool = False
    overwrite: bool = False
    redraw: bool = False


def plan_cells(
    experiment: Experiment, options: ReproductionArguments, settings: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Choose the cells to run and check that each of them can."""
    if options.scale not in experiment.scales:
        raise nearest("scale", str(options.scale), list(experiment.scales))
    cells = experiment.cells(experiment.arguments(**{**experiment.scales[options.scale], **settings}))
    if not cells:
        raise ValueError("the settings make no cells: lists such as seeds must not be empty")
    # As they will be read from the results, to be compared with these.
    cells = json.loads(json.dumps(cells))
    asked = options.only if isinstance(options.only, list | None) else [options.only]
    for pattern in asked or ():
        if not fnmatch.filter(cells, str(pattern)):
            raise nearest("cell in --only", str(pattern), list(cells))
    if asked:
        cells = {name: cell for name, cell in cells.items() if any(fnmatch.fnmatch(name, str(p)) for p in asked)}
    for cell in tqdm(cells.values(), desc="checking cells", leave=False, disable=None):
        check_training(cell)  # the settings that are fields of a training, too
        for setting, value in cell.items():
            if setting.endswith("_learning_rate") and value is not None:
                check_range(setting, value, 0, None, (int, float))
        experiment.check(cell)
    return cells


def read_results(path: Path, cells: Cells, overwrite: bool = False) -> dict[str, dict[str, Any]]:
    """Read the finished cells."""
    if not path.is_file():
        return {}
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
        finished = contents["cells"]
        if f"{contents['experiment']}_{contents['scale']}" != path.stem:
            raise ValueError("another experiment or scale")
        for name, cell in finished.items():
            if Path(name).name != name or not all(isinstance(cell[part], dict) for part in ("settings", "metrics")):
                raise TypeError(f"{name} is no cell")
            # The file may have been edited: what times are judged by must be numbers.
            duration(estimate_seconds({name: cell["settings"]}, {name: cell}, "") or 0)
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{path} holds no results of this experiment: choose another --output") from error
    others: dict[str, list[str]] = {}
    for name in finished:
        others.setdefault(unseeded(name), []).append(name)
    for name, settings in cells.items():
        if name in finished and not overwrite:
            if difference := _difference(finished[name]["settings"], settings):
                raise ValueError(
                    f"{path} holds the cell {name} made with {difference}: choose another --output, or pass "
                    "--overwrite to run it again"
                )
        for other in others.get(unseeded(name), ()):
            then, now = shared_settings(finished[other]["settings"]), shared_settings(settings)
            if other not in cells and (difference := _difference(then, now)):
                raise ValueError(
                    f"{path} holds the cell {other} made with {difference} as for {name}, which differs from it in "
                    "more than the seed: choose another --output"
                )
    return {name: cell for name, cell in finished.items() if not (overwrite and name in cells)}


def _difference(then, now):
    """The first setting in which two cells differ, with both values; empty if there is none."""
    for key in sorted(then.keys() | now.keys()):
        if then.get(key) != now.get(key):
            return f"{key} {then.get(key)!r}, not {now.get(key)!r}"
    return ""


def results_path(name: str, options: ReproductionArguments) -> Path:
    """The JSON file of results; table and plot lie beside it."""
    return Path(options.output) / f"{name}_{options.scale}.json"


def result_files(name: str, options: ReproductionArguments) -> list[Path]:
    """
    The files that there are of an experiment at one scale: results, table, plot, more pictures, and what was kept.
    """
    path = results_path(name, options)
    files = [path.with_suffix(suffix) for suffix in (".json", ".md", ".png")]
    files += [picture_path(path, picture) for picture in EXPERIMENTS[name].pictures]
    return [file for file in (*files, *sorted(kept_folder(path).glob("*/*"))) if file.is_file()]


def plan_text(name: str, options: ReproductionArguments, cells: Cells) -> str:
    """How many cells are done and to do, and about how long these will take."""
    finished = read_results(results_path(name, options), {})
    todo = {
        cell: settings
        for cell, settings in cells.items()
        if options.overwrite or cell not in finished or finished[cell]["settings"] != settings
    }
    return describe_plan(name, cells, todo, finished, EXPERIMENTS[name].plot[2])


def run_experiment(name: str, options: ReproductionArguments, settings: Mapping[str, Any]) -> list[Table]:
    """
    Run the cells of an experiment that are not finished, and write results, table and plot after each. Several
    processes may run the same experiment: each takes cells that no other runs.
    """
    if name not in EXPERIMENTS:
        raise nearest("experiment", name, list(EXPERIMENTS))
    experiment = EXPERIMENTS[name]
    path = results_path(name, options)
    if options.redraw:
        return _redraw(experiment, options, settings, path)
    cells = plan_cells(experiment, options, settings)
    before = read_results(path, {})  # first: what another process finishes in between is not run again
    finished = read_results(path, cells, options.overwrite)
    _check_tables(experiment, options, finished, path)
    check_makeable(path.parent, "output")
    todo = {cell: Path(options.runs) / path.stem / cell for cell in cells if cell not in finished}
    for folder in todo.values():
        if reason := _of_others(folder, path, options):
            raise FileExistsError(reason)
    make_folder(path.parent, "output")
    make_folder(Path(options.runs) / path.stem, "runs")
    logger.warning(plan_text(name, options, cells))
    failed = []
    bar = tqdm(todo.items(), desc=name, unit="cell", disable=None)
    for number, (cell, folder) in enumerate(bar, start=1):
        left = {other: cells[other] for other in list(todo)[number - 1 :]}
        seconds = estimate_seconds(left, read_results(path, {}), experiment.plot[2])
        time_left = "" if seconds is None else f", about {duration(seconds)} left"
        if bar.disable:
            logger.warning(f"{name}: {cell} ({number} of {len(todo)}{time_left})")
        else:
            bar.set_postfix_str(cell + time_left)
        try:
            with FileLock(folder.with_name(f"{cell}.lock")).acquire(timeout=0):
                # Another process may have finished it meanwhile.
                if (made := read_results(path, {}).get(cell)) is None or made == before.get(cell):
                    reason = _of_others(folder, path, options)
                    if reason := reason or _run_cell(experiment, name, options, cells[cell], folder, path):
                        failed.append(f"{cell} ({reason})")
        except Timeout:
            logger.warning(
                f"{name}: {cell} is being run by another process, and left to it; if that process has another "
                "--output, this cell needs another --runs"
            )
    with _locked(path, options):
        finished = read_results(path, {})
        tables = _write_report(experiment, options, finished, path) if finished else []
    if failed:
        again = "run them again with --only" if options.overwrite else "the same command runs them again"
        raise CellsFailed(f"{name}: {len(failed)} of {len(todo)} cells failed, {again}: {', '.join(failed)}", tables)
    return tables


def _of_others(folder, path, options):
    """Why a cell cannot run in its folder: it holds one that is in other results."""
    if options.overwrite or not (folder / FINISHED_NAME).is_file():
        return None
    if folder.name in read_results(path, {}):  # since another process has just finished it
        return None
    return f"{folder} holds a finished cell that {path} does not: choose another --runs, or pass --overwrite"


def _redraw(experiment, options, settings, path):
    """Write table and pictures of the finished cells again."""
    given = [name for name in ("only", "list_cells", "overwrite") if getattr(options, name)]
    if given := [*given, *settings]:
        raise ValueError(f"--redraw runs no cells: leave out {', '.join(f'--{name}' for name in given)}")
    if options.scale not in experiment.scales:
        raise nearest("scale", str(options.scale), list(experiment.scales))
    if find_spec("matplotlib") is None:
        raise ValueError("--redraw needs matplotlib: pip install 'sparsebert[viz]'")
    if not read_results(path, {}):
        raise ValueError(f"{path} has no finished cells to draw: choose another --output or --scale")
    make_folder(Path(options.runs), "runs")
    with _locked(path, options):
        finished = read_results(path, {})
        _check_tables(experiment, options, finished, path)
        return _write_report(experiment, options, finished, path)


def _check_tables(experiment, options, finished, path):
    """Check that each finished cell has what the tables show: the file may have been edited."""
    for name, cell in finished.items():
        try:
            experiment_tables(experiment, options.scale, {name: cell})
        except Exception as error:
            raise ValueError(
                f"{path}: there is no table of the cell {name} ({error!r}): mend or remove it, or choose another "
                "--output"
            ) from error


@contextmanager
def _locked(path, options):
    """Keep other processes from adding cells to these results, and from keeping files of these runs."""
    with FileLock(f"{Path(options.runs) / path.stem}.lock"), FileLock(path.with_name(f".{path.stem}.lock")):
        yield


def _run_cell(experiment, name, options, settings, folder, path):
    """Run a cell in its folder, and add it to the results; if it fails, log and return why."""
    with _locked(path, options):  # other processes keep files of finished cells
        shutil.rmtree(folder, ignore_errors=True)  # left by a cell that was interrupted
    folder.mkdir(parents=True)
    start, cpu = time.perf_counter(), time.process_time()
    try:
        metrics = experiment.run(settings, folder)
    except Exception as error:  # it must not cost the hours of the cells that come after it
        # As text: the error itself would keep the model and the optimizer of this cell in memory.
        logger.error(f"{name}: {folder.name} failed\n{traceback.format_exc()}")
        return f"{type(error).__name__}: {error}"
    own = time.process_time() - cpu - metrics.get("shared_cpu_seconds", 0.0)
    metrics |= {"seconds": time.perf_counter() - start, "cpu_seconds": own}
    made = {"settings": settings, "metrics": metrics, "made_with": _versions()}
    with _locked(path, options):  # other processes add cells too
        try:
            finished = read_results(path, {}) | {folder.name: made}
            contents = {
                path: {"experiment": name, "scale": options.scale, "cells": finished},
                folder / FINISHED_NAME: made,
            }
            replace_files(
                {file: (json.dumps(content, indent=1) + "\n").encode() for file, content in contents.items()}
            )
        except (OSError, ValueError) as error:  # a full disk, a damaged file: what was found is printed at least
            logger.error(f"{name}: {folder.name} is finished, but cannot be written: {error}\n{json.dumps(made)}")
            return f"{type(error).__name__}: {error}"
        try:
            _write_report(experiment, options, finished, path)
        except Exception:  # nor must a table or a picture, which is made again after the last cell
            logger.error(f"{name}: the report with {folder.name} failed\n{traceback.format_exc()}")
    return None


def _versions():
    versions = {"sparsebert": __version__, "torch": torch.__version__}
    return versions | {"device": hardware(), "threads": torch.get_num_threads()}


def _write_report(experiment, options, finished, path):
    """Write table and pictures, with the lock of the results."""
    scale = options.scale
    found = experiment_tables(experiment, scale, finished)
    replace_files({path.with_suffix(".md"): "\n".join(table.markdown() for table in found).encode()})
    if experiment.keep is not None:
        keep_files(experiment.keep, finished, Path(options.runs) / path.stem, path)
    if find_spec("matplotlib"):
        for name, draw in experiment.pictures.items():
            draw(finished, kept_folder(path), picture_path(path, name))
        plot_cells(experiment, scale, finished, path.with_suffix(".png"))
    return found
