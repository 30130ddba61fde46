"""Charts of scores: against sparsity, and of the cells of an experiment."""

import math
import os
import statistics
from collections.abc import Mapping, Sequence

from .figures import BLUE, COLORS, VERMILION, new_figure, save_figure


# One color more than there are markers, so that neighboring lines differ in both.
_COLORS = (*COLORS, "#7F7F7F")
_MARKERS = "osD^vPX"
# How far lines are apart that would hide each other, in units of the horizontal axis.
_DODGE = 0.04
# Most panels that are read side by side on a page.
_PER_ROW = 3


def plot_scores(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float], Sequence[float | None]]],
    path: str | os.PathLike,
    metric: str,
    title: str,
    dense: float | None = None,
) -> None:
    """
    Plot a score against sparsity.

    Args:
        curves (`dict`): Up to two curves by name: `(sparsities, scores, deviations)`, three lists of equal length; a
            deviation may be `None`.
        path (`str` or `os.PathLike`): Image to write; its folder is created if missing.
        metric (`str`): What the score is, for the vertical axis.
        title (`str`): Title of the chart.
        dense (`float`, *optional*): Score without a mask, drawn as a horizontal line.
    Source: SparseBERT (arXiv 2102.12871), Figure 7.
    """
    figure = new_figure(6.6, 4.4)
    axis = figure.subplots()
    styles = ((BLUE, "o-"), (VERMILION, "s--"))
    for (name, (x, y, deviations)), (color, style) in zip(curves.items(), styles, strict=False):
        bars = [deviation or 0.0 for deviation in deviations] if any(deviations) else None
        axis.errorbar(x, y, bars, fmt=style, color=color, ms=5, capsize=3, label=name)
    if dense is not None:
        axis.axhline(dense, color="black", ls=":", label="dense")
    axis.set(title=title, xlabel="sparsity (fraction of attention entries removed)", ylabel=metric)
    axis.grid(alpha=0.3)
    axis.legend()
    save_figure(figure, path)


def plot_lines(
    lines: Mapping[str, Sequence[tuple[float, float, float | None]]],
    path: str | os.PathLike,
    title: str,
    xlabel: str,
    ylabel: str,
    percent: str = "",
) -> None:
    """
    Plot one line per series and, in a second panel, the values that the paper published.

    Args:
        lines (`dict[str, list]`): Points `(x, y, published y or None)` by the name of the line, in any order. The
            line `"dense"` is drawn across the panel, for comparison. Published points are joined only where the whole
            line was published. Where all x are whole numbers, lines that share points are drawn beside each other.
        path (`str` or `os.PathLike`): Image to write; its folder is created if missing.
        title, xlabel, ylabel (`str`): Texts of the figure.
        percent (`str`, *optional*): The axes, out of `"x"` and `"y"`, whose fractions are shown as percentages.
    """
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    published = any(paper is not None for points in lines.values() for _, _, paper in points)
    figure = new_figure(11 if published else 8, 4.8, "constrained")
    axes = figure.subplots(1, 2 if published else 1, sharey=True, squeeze=False)[0]
    lines = dict(sorted(lines.items()))
    for _, y, _ in lines.pop("dense", ()):
        axes[0].axhline(y, color="black", ls="--", lw=1.2, label="dense")
    counts = all(float(x).is_integer() for points in lines.values() for x, _, _ in points)
    drawn = [(x, y) for points in lines.values() for x, y, _ in points]
    dodge = _DODGE if counts and len(set(drawn)) < len(drawn) else 0.0
    for index, (name, points) in enumerate(lines.items()):
        shift = dodge * (index - (len(lines) - 1) / 2)
        points = sorted(((x + shift, y, paper) for x, y, paper in points), key=lambda point: point[0])
        style = {"color": _COLORS[index % len(_COLORS)], "marker": _MARKERS[index % len(_MARKERS)], "ms": 5}
        dashes = "-" if index < len(_COLORS) else ":"
        axes[0].plot([x for x, _, _ in points], [y for _, y, _ in points], dashes, lw=1.4, label=name, **style)
        papers = [(x, paper) for x, _, paper in points if paper is not None]
        if papers:
            line = dashes if len(papers) == len(points) else "none"
            axes[1].plot(*zip(*papers, strict=True), ls=line, lw=1.4, **style)
    figure.suptitle(title)
    axes[0].set_ylabel(ylabel)
    if published:
        axes[0].set_title("ours")
        axes[1].set(title="the paper's", xlim=axes[0].get_xlim())
    for axis in axes:
        axis.set_xlabel(xlabel)
        for name in percent:
            getattr(axis, f"{name}axis").set_major_formatter(PercentFormatter(1, decimals=0))
        if counts:
            axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axis.grid(alpha=0.3)
    figure.legend(loc="outside right center", fontsize=8)
    save_figure(figure, path)


def plot_values(
    panels: Mapping[str, Mapping[str, Sequence[float]]], path: str | os.PathLike, title: str, reference: str
) -> None:
    """
    Plot values by name, the greatest mean above: a dot for every value, a bar for the mean.

    Args:
        panels (`dict[str, dict]`): Values by name, for each panel by the text of its axis.
        path (`str` or `os.PathLike`): Image to write; its folder is created if missing.
        title (`str`): Title of the figure.
        reference (`str`): Name whose mean is drawn across its panels, for comparison.
    """
    tallest = max(len(values) for values in panels.values())
    rows = math.ceil(len(panels) / _PER_ROW)
    columns = math.ceil(len(panels) / rows)
    figure = new_figure(5.2 * columns, (0.26 * tallest + 1.1) * rows + 0.5, "constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis in axes[len(panels) :]:
        axis.remove()
    for axis, (label, values) in zip(axes, panels.items(), strict=False):
        names = sorted(values, key=lambda name: statistics.fmean(values[name]))
        for place, name in enumerate(names):
            color = _COLORS[1] if name == reference else _COLORS[0]
            axis.plot(values[name], [place] * len(values[name]), "o", ms=4, mfc="none", color=color)
            axis.plot(statistics.fmean(values[name]), place, "|", ms=11, mew=2, color=color)
        if reference in values:
            axis.axvline(statistics.fmean(values[reference]), color=_COLORS[1], ls="--", lw=1)
        axis.set_yticks(range(len(names)), labels=names)
        axis.set_ylim(-0.7, len(names) - 0.3)
        axis.set_xlabel(label)
        axis.locator_params(axis="x", nbins=5)
        axis.grid(alpha=0.3)
    figure.suptitle(title)
    save_figure(figure, path)
