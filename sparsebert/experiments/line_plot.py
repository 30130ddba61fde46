"""The plot of an experiment: a line for each series, and the paper's."""

from ..analysis.pictures import DPI, save_figure


# Okabe and Ito's colours, which readers with any colour vision can tell apart; markers serve print.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
_MARKERS = "osD^vPX"  # another number than that of the colours, so that each line has a pair of its own


def plot_lines(lines, path, title, xlabel, ylabel, percent=""):
    """
    Draw an experiment, beside it what the paper found, where it gives figures. The paper's points are joined where it
    has all of a line's. What is dense is drawn across, to compare with.

    Args:
        lines (`dict[str, list]`): By name `(x, y, the paper's y or None)`, in any order.
        path (`str` or `os.PathLike`): Image to write, its folder is created.
        title, xlabel, ylabel (`str`): Texts.
        percent (`str`): Of `"x"` and `"y"`, which are fractions, to be shown in percent.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    published = any(paper is not None for points in lines.values() for _, _, paper in points)
    figure = Figure(figsize=(11 if published else 8, 4.8), layout="constrained", dpi=DPI)
    axes = figure.subplots(1, 2 if published else 1, sharey=True, squeeze=False)[0]
    lines = dict(sorted(lines.items()))
    for _, y, _ in lines.pop("dense", ()):
        axes[0].axhline(y, color="black", ls="--", lw=1.2, label="dense")
    for index, (name, points) in enumerate(lines.items()):
        points = sorted(points, key=lambda point: point[0])
        style = {"color": _COLOURS[index % len(_COLOURS)], "marker": _MARKERS[index % len(_MARKERS)], "ms": 5}
        axes[0].plot([x for x, _, _ in points], [y for _, y, _ in points], "-", lw=1.4, label=name, **style)
        papers = [(x, paper) for x, _, paper in points if paper is not None]
        if papers:
            line = "-" if len(papers) == len(points) else "none"
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
        if all(isinstance(x, int) for points in lines.values() for x, _, _ in points):
            axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    save_figure(figure, path)
