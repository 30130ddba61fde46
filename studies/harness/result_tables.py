"""The tables and the plot of the finished cells of an experiment."""

import json
import statistics
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from sparsebert.analysis.statistics import summarize
from sparsebert.analysis.tables import Table

from .experiment import Cells, Experiment, unseeded
from .result_charts import plot_lines
from .seed_comparisons import COMPARED, compare_seeds


def experiment_tables(experiment: Experiment, scale: str, finished: Cells) -> list[Table]:
    """Make the tables of finished cells, beside the paper's figures."""
    title = f"{experiment.title}, scale {scale}"
    rows = []
    for name, cell in finished.items():
        row = {"cell": name}
        for metric, (heading, form) in experiment.columns.items():
            row[heading] = _text(form, cell["metrics"].get(metric))
            if any(metric in values for values in experiment.published.values()):
                row[f"{heading}, paper"] = _text(form, experiment.paper(name).get(metric))
        rows.append(row)
    result = [Table.of(title, rows, (*_differences(experiment, finished), *experiment.notes))]
    if experiment.summary is not None:
        result = [*experiment.summary(finished), *result]
    elif len({unseeded(name) for name in finished}) < len(finished):
        result.insert(0, _means(experiment, title, finished))
    if experiment.layout is not None:
        result.insert(0, _pivot(experiment, title, finished))
    return result


def _by_seed(finished, metric):
    """Values of a metric by cell and seed."""
    values: dict[str, dict[int, float]] = {}
    for name, cell in finished.items():
        if metric in cell["metrics"]:
            values.setdefault(unseeded(name), {})[cell["settings"].get("seed", 0)] = cell["metrics"][metric]
    return values


def _means(experiment, title, finished):
    """Means over seeds; the metric of the plot is compared with that of the baseline, if there is one."""
    judged = _by_seed(finished, experiment.plot[1])
    baseline = judged.get(experiment.baseline or "", {})
    compared = compare_seeds(
        {name: (values, baseline) for name, values in judged.items() if name != experiment.baseline}, 3
    )
    rows: dict[str, dict[str, str]] = {name: {"cell": name} for name in map(unseeded, finished)}
    for metric, (heading, form) in experiment.columns.items():
        for name, values in _by_seed(finished, metric).items():
            rows[name][heading] = _mean_text(form, values)
            rows[name][f"{heading}, paper"] = _text(form, experiment.paper(name).get(metric))
    for name, row in rows.items():
        row[f"minus {experiment.baseline}"], row["p (Holm)"] = compared.get(name, ("", ""))
        row["seeds"] = str(len(judged.get(name, {})))
    note = "±: deviation over seeds, if they differ"
    if compared:
        note += f"; minus {experiment.baseline}: in {experiment.columns[experiment.plot[1]][0]}, {COMPARED}"
    return Table.of(f"{title}: means over seeds", list(rows.values()), (note,))


def _differences(experiment: Experiment, finished: Cells) -> Iterator[str]:
    """Notes on the settings that differ between cells, and on their machines."""
    settings = [("settings", item.name) for item in fields(experiment.arguments)]
    for source, field in (*settings, ("made_with", "device")):
        cells: dict[str, list[str]] = {}
        for name, cell in finished.items():
            if field in cell.get(source, {}):
                cells.setdefault(json.dumps(cell[source][field]), []).append(name)
        if len(cells) > 1:
            usual, *others = sorted(cells, key=lambda value: -len(cells[value]))
            parts = (f"in {_joined(cells[value], finished)}: {value}" for value in others)
            yield f"{field}: " + "; ".join([usual, *parts])


def _joined(names, finished):
    """The names of cells, without a seed if all seeds of a cell are among them."""
    partial = {unseeded(name) for name in finished.keys() - set(names)}
    return ", ".join(dict.fromkeys(name if unseeded(name) in partial else unseeded(name) for name in names))


def _pivot(experiment, title, finished):
    row_key, column_key, metric = experiment.layout
    heading, form = experiment.columns[metric]
    values = [cell["settings"] | cell["metrics"] for cell in finished.values()]
    columns = sorted({value[column_key] for value in values})
    rows = {value[row_key]: {row_key: value[row_key]} for value in values}
    found = _by_seed(finished, metric)
    for name, value in zip(finished, values, strict=True):
        paper = _text(form, experiment.paper(name).get(metric))
        ours = _mean_text(form, found[unseeded(name)])
        rows[value[row_key]][f"{column_key} {value[column_key]}"] = f"{ours} / {paper}"
    names = [row_key, *(f"{column_key} {column}" for column in columns)]
    body = [[row.get(name, "") for name in names] for row in rows.values()]
    return Table(f"{title}: {heading}, ours / the paper's", names, body)


def _mean_text(form, values):
    """Mean over seeds and, if they differ, deviation."""
    summary = summarize(list(values.values()))
    shown = summary.values() if len(set(values.values())) > 1 else [summary["mean"]]
    return " ± ".join(form.format(value) for value in shown)


def _text(form, value):
    return "" if value is None else form.format(value)


def plot_cells(experiment: Experiment, scale: str, finished: Cells, path: Path) -> None:
    """
    Plot finished cells, as the experiment draws them or as a point for each, means over seeds, and a line per series.
    """
    title = f"{experiment.title}, scale {scale}"
    if experiment.draw is not None:
        experiment.draw(finished, path, title)
        return
    x, y, line = experiment.plot
    lines: dict[str, list[tuple[float, float, float | None]]] = {}
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, cell in finished.items():
        groups.setdefault(unseeded(name), []).append(cell["settings"] | cell["metrics"])
    for name, seeds in groups.items():
        point = [statistics.fmean(values[axis] for values in seeds) for axis in (x, y)]
        lines.setdefault(seeds[0][line], []).append((point[0], point[1], experiment.paper(name).get(y)))
    labels, percent = [], ""
    for axis, value in (("x", x), ("y", y)):
        heading, form = experiment.columns.get(value, (value.replace("_", " "), ""))
        labels.append(heading)
        percent += axis * ("%" in form)
    plot_lines(lines, path, title, labels[0], labels[1], percent)
