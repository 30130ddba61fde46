"""Charts of an experiment's cells: lines beside the paper's, values by name, and the mean P of several seeds."""

import math
import os
import statistics
from collections.abc import Mapping, Sequence

import torch

from sparsebert.analysis.importance import KEPT, SKETCH_LENGTH, as_runs, sketch
from sparsebert.analysis.pictures.figures import COLORS, draw_table, new_figure, save_figure
from sparsebert.analysis.pictures.importance_pictures import CELLS_NOTE, SKETCHED, sketch_ticks


# One color more than there are markers, so that neighboring lines differ in both.
_COLORS = (*COLORS, "#7F7F7F")
_MARKERS = "osD^vPX"
# How far lines are apart that would hide each other, in units of the horizontal axis.
_DODGE = 0.04
# Most panels that are read side by side on a page.
_PER_ROW = 3


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

    The points `(x, y, published y or None)` of a line are in any order. The line `"dense"` is drawn across the panel,
    for comparison. Published points are joined only where the whole line was published. Where all x are whole numbers,
    lines that share points are drawn beside each other. The axes in `percent`, out of `"x"` and `"y"`, show fractions
    as percentages.
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

    A panel is called by the text of its axis. The mean of the name `reference` is drawn across its panels.
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


def plot_importance(probs: torch.Tensor, path: str | os.PathLike) -> None:
    """
    Draw the mean P over the heads of each seed, `(S, n, n)`, as a heat map and pooled onto 16 tokens, each on a color
    scale of its own. With fewer tokens there is only the heat map.

    Source: SparseBERT (arXiv 2102.12871), Figure 2.
    """
    if probs.dim() != 3:
        raise ValueError(f"probs must have shape (S, n, n), got {tuple(probs.shape)}")
    mean = as_runs(probs).mean((0, 1, 2))
    length = len(mean)
    panels = [(mean, f"{length} tokens", None)]
    if length >= SKETCH_LENGTH:
        panels.append((sketch(mean), f"pooled onto {SKETCHED}\n{CELLS_NOTE}", sketch_ticks("first_last")))
    figure = new_figure(5.6 * len(panels), 5.2)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (panel, title, ticks) in zip(axes, panels, strict=True):
        image = draw_table(axis, panel, 4.3, cmap="cividis")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("key position j")
        if ticks is not None:
            axis.set_xticks(*ticks)
            axis.set_yticks(*ticks)
        figure.colorbar(image, ax=axis, label=f"mean of {KEPT}", fraction=0.046)
    axes[0].set_ylabel("query position i")
    seeds = f" and {len(probs)} seeds" * (len(probs) > 1)
    scales = "; each panel has its own scale" * (len(panels) > 1)
    figure.suptitle(f"What is kept by position\n(mean over the heads{seeds}; yellow: kept most{scales})", fontsize=11)
    save_figure(figure, path)
