"""A chart of scores against sparsity."""

import os
from collections.abc import Mapping, Sequence

from .figures import BLUE, VERMILION, new_figure, save_figure


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
