"""The plot of an experiment: a line for each series, the paper's dashed."""

from pathlib import Path

from ..visualization import DPI


# Okabe and Ito's colours, which readers with any colour vision can tell apart; markers and dashes serve print.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX*"


def plot_lines(lines, path, title, xlabel, ylabel, percent=False):
    """
    Draw an experiment. The paper's points are joined where it has all of a line's.

    Args:
        lines (`dict[str, list]`): By name `(x, y, the paper's y or None)`, in any order.
        path (`str` or `os.PathLike`): Image to write, its folder is created.
        title, xlabel, ylabel (`str`): Texts.
        percent (`bool`): Whether y are fractions, to be shown in percent.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(8, 4.8), layout="constrained", dpi=DPI)
    axis = figure.subplots()
    for index, (name, points) in enumerate(sorted(lines.items())):
        points = sorted(points, key=lambda point: point[0])
        style = {"color": _COLOURS[index % len(_COLOURS)], "marker": _MARKERS[index % len(_MARKERS)], "ms": 5}
        axis.plot([x for x, _, _ in points], [y for _, y, _ in points], "-", lw=1.4, label=name, **style)
        published = [(x, paper) for x, _, paper in points if paper is not None]
        if published:
            style |= {"ls": ":" if len(published) == len(points) else "none", "lw": 1.2, "mfc": "white"}
            axis.plot(*zip(*published, strict=True), label=f"{name}, paper", **style)
    axis.set(title=title, xlabel=xlabel, ylabel=ylabel)
    if all(isinstance(x, int) for points in lines.values() for x, _, _ in points):
        axis.xaxis.get_major_locator().set_params(integer=True)
    if percent:
        axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axis.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
