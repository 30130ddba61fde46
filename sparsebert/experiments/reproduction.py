"""
A table or figure of a paper: `python -m sparsebert.reproduce EXPERIMENT [--scale tiny|paper] [--field value ...]`.

Runs the experiment's cells one by one; those that are finished are not run again, one that was interrupted begins
anew. Writes after each cell
EXPERIMENT_SCALE.json (results), .md (a table with the paper's figures) and, with the extra `viz`, .png (a plot) to
`output`. Every setting of the experiment is a flag too; `--help` lists them.
"""

import fnmatch
import json
import os
import platform
import shutil
import time
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers.utils import logging

from ..analysis.tables import Table
from ..checks import nearest
from ..version import __version__
from . import EXPERIMENTS
from .line_plot import plot_lines


logger = logging.get_logger(__name__)

FINISHED_NAME = "cell.json"


@dataclass
class ReproductionArguments:
    """
    What to run of an experiment.

    Args:
        scale (`str`): `"tiny"`, for two CPU cores, or `"paper"`, at the paper's size.
        output (`str`): Folder of results, table and plot.
        runs (`str`): Folder of what the cells write, such as weights.
        only (`str` or `list`, *optional*): Names of cells, `*` stands for anything: run these only.
        list_cells (`bool`): Print the names of the cells, and run none.
        overwrite (`bool`): Run cells anew that are there, were made with other settings, or whose folder in `runs`
            belongs to other results.
    """

    scale: str = "tiny"
    output: str = "results"
    runs: str = "runs/reproduce"
    only: str | list | None = None
    list_cells: bool = False
    overwrite: bool = False


def plan_cells(experiment, options, settings):
    """
    What is to be run.

    Args:
        experiment ([`Experiment`]): Row of `EXPERIMENTS`.
        options ([`ReproductionArguments`]): Says which cells.
        settings (`dict`): Fields of the experiment's arguments over those of the scale.

    Returns:
        `dict[str, dict]`: What defines each cell, by its name.
    Raises:
        ValueError: For an unknown scale, a cell that there is none of, and one that cannot run.
    """
    if options.scale not in experiment.scales:
        raise nearest("scale", str(options.scale), list(experiment.scales))
    cells = experiment.cells(experiment.arguments(**experiment.scales[options.scale] | settings))
    # As a reader of the file gets them.
    cells = json.loads(json.dumps(cells))
    asked = options.only if isinstance(options.only, list | None) else [options.only]
    for pattern in asked or ():
        if not fnmatch.filter(cells, str(pattern)):
            raise nearest("cell in --only", str(pattern), list(cells))
    if asked:
        cells = {name: cell for name, cell in cells.items() if any(fnmatch.fnmatch(name, str(p)) for p in asked)}
    for cell in cells.values():
        experiment.check(cell)
    return cells


def read_results(path, cells, overwrite=False):
    """
    The cells that are finished.

    Args:
        path (`Path`): JSON file of results, which need not be there.
        cells (`dict[str, dict]`): From [`plan_cells`].
        overwrite (`bool`): Leave out those of `cells`, and those made with other settings.

    Returns:
        `dict[str, dict]`: `"settings"` and `"metrics"` by cell.
    Raises:
        ValueError: If one of `cells` was made with other settings, unless told to overwrite.
    """
    if not path.is_file():
        return {}
    try:
        finished = json.loads(path.read_text(encoding="utf-8"))["cells"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no results of this command: choose another --output") from error
    for name in cells.keys() & finished.keys():
        then, now = finished[name]["settings"], cells[name]
        for key in sorted(then.keys() | now.keys()):
            if not overwrite and then.get(key) != now.get(key):
                raise ValueError(
                    f"{path} holds the cell {name} made with {key} {then.get(key)!r}, not {now.get(key)!r}: choose "
                    "another --output, or pass --overwrite to make it anew"
                )
    return {name: cell for name, cell in finished.items() if not (overwrite and name in cells)}


def run_experiment(name, options, settings):
    """
    Run an experiment's cells that are not finished, and write results, table and plot after each.

    Args:
        name (`str`): Key of `EXPERIMENTS`.
        options ([`ReproductionArguments`]): Which cells, and where to write.
        settings (`dict`): Fields of the experiment's arguments.

    Returns:
        `list[Table]`: The tables of all cells that there are.
    Raises:
        ValueError: As [`plan_cells`] and [`read_results`], before anything is run or written.
        FileExistsError: If the folder of a cell holds one that is finished, of other results.
    """
    experiment = EXPERIMENTS[name]
    cells = plan_cells(experiment, options, settings)
    path = Path(options.output) / f"{name}_{options.scale}.json"
    finished = read_results(path, cells, options.overwrite)
    todo = {cell: Path(options.runs) / path.stem / cell for cell in cells if cell not in finished}
    for folder in todo.values():
        if (folder / FINISHED_NAME).is_file() and not options.overwrite:
            raise FileExistsError(
                f"{folder} holds a finished cell that {path} does not: choose another --runs, or pass --overwrite"
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    for number, (cell, folder) in enumerate(todo.items(), start=1):
        logger.warning(f"{name}: {cell} ({number} of {len(todo)})")
        shutil.rmtree(folder, ignore_errors=True)  # of a cell that was interrupted
        start, cpu = time.perf_counter(), time.process_time()
        metrics = experiment.run(cells[cell], folder)
        metrics |= {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
        made = {"settings": cells[cell], "metrics": metrics, "made_with": _versions()}
        # Another process may have added cells.
        finished = read_results(path, {}) | {cell: made}
        content = {"experiment": name, "scale": options.scale, "cells": finished}
        _write(path, json.dumps(content, indent=1) + "\n")
        _write(folder / FINISHED_NAME, json.dumps(made, indent=1) + "\n")
        _write_report(experiment, options.scale, finished, path)
    return _write_report(experiment, options.scale, finished, path)


def _versions():
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {
        "sparsebert": __version__,
        "torch": torch.__version__,
        "device": device,
        "threads": torch.get_num_threads(),
    }


def tables(experiment, scale, finished):
    """
    Tables of finished cells beside the paper's figures.

    Args:
        experiment ([`Experiment`])
        scale (`str`): For the title.
        finished (`dict[str, dict]`): `"settings"` and `"metrics"` by cell.

    Returns:
        `list[Table]`: One laid out as the paper's, if it has a table, and one with a row for each cell.
    """
    title = f"{experiment.title}, scale {scale}"
    rows = []
    for name, cell in finished.items():
        row = {"cell": name}
        for metric, (heading, form) in experiment.columns.items():
            row[heading] = _text(form, cell["metrics"].get(metric))
            if any(metric in values for values in experiment.published.values()):
                row[f"{heading}, paper"] = _text(form, experiment.published.get(name, {}).get(metric))
        rows.append(row)
    result = [Table.of(title, rows, (*_differences(experiment, finished), *experiment.notes))]
    if experiment.layout is not None:
        result.insert(0, _pivot(experiment, title, finished))
    return result


def _differences(experiment, finished):
    """Settings of the experiment that its cells were not all made with."""
    for field in fields(experiment.arguments):
        cells = {}
        for name, cell in finished.items():
            if field.name in cell["settings"]:
                cells.setdefault(json.dumps(cell["settings"][field.name]), []).append(name)
        if len(cells) > 1:
            yield f"{field.name}: " + "; ".join(f"{value} in {', '.join(names)}" for value, names in cells.items())


def _pivot(experiment, title, finished):
    row_key, column_key, metric = experiment.layout
    heading, form = experiment.columns[metric]
    values = [cell["settings"] | cell["metrics"] for cell in finished.values()]
    columns = sorted({value[column_key] for value in values})
    rows = {value[row_key]: {row_key: value[row_key]} for value in values}
    for name, value in zip(finished, values, strict=True):
        paper = _text(form, experiment.published.get(name, {}).get(metric))
        rows[value[row_key]][f"{column_key} {value[column_key]}"] = f"{_text(form, value[metric])} / {paper}"
    names = [row_key, *(f"{column_key} {column}" for column in columns)]
    body = [[row.get(name, "") for name in names] for row in rows.values()]
    return Table(f"{title}: {heading}, ours / the paper's", names, body)


def _text(form, value):
    return "" if value is None else form.format(value)


def _write(path, text):
    """Whole or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _write_report(experiment, scale, finished, path):
    found = tables(experiment, scale, finished)
    _write(path.with_suffix(".md"), "\n".join(table.markdown() for table in found))
    if find_spec("matplotlib"):
        x, y, line = experiment.plot
        lines = {}
        for name, cell in finished.items():
            values = cell["settings"] | cell["metrics"]
            paper = experiment.published.get(name, {}).get(y)
            lines.setdefault(values[line], []).append((values[x], values[y], paper))
        labels, percent = [], ""
        for axis, value in (("x", x), ("y", y)):
            heading, form = experiment.columns.get(value, (value.replace("_", " "), ""))
            labels.append(heading)
            percent += axis * ("%" in form)
        plot_lines(lines, path.with_suffix(".png"), f"{experiment.title}, scale {scale}", *labels, percent)
    return found
