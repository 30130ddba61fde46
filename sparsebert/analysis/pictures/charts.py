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
    Plot up to two curves `(sparsities, scores, deviations or None)` of a score against sparsity, and the score without
    a mask as a horizontal line.

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
