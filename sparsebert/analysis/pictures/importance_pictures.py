"""
Pictures of mask probabilities: which positions are kept. A path without a suffix gets two files, PNG and SVG.

Letters: S runs, L layers, H heads, n length, P the probability that a position is kept (0 or 1 for a mask).
"""

import math
import os
from collections.abc import Sequence

import torch

from ..importance import KEPT, SKETCH_LENGTH, as_runs, estimate, head_groups, offset_profile, sketch
from .figures import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    average_text,
    draw_table,
    new_figure,
    save_figure,
)


SKETCHED = f"{SKETCH_LENGTH} x {SKETCH_LENGTH}"
CELLS_NOTE = "k = 0 to 3 cells off the diagonal: offset |i - j| = k alone\nbeyond: the longer offsets, in equal parts"
_LEFT_OUT = {"none": "", "first": "first token left out", "first_last": "first and last token left out"}
# Markers tell the groups apart in print.
_GROUP_STYLES = {
    "diagonal": (BLACK, "o"),
    "offset_1": (ORANGE, "s"),
    "offset_2": (VERMILION, "D"),
    "offset_3": (PURPLE, "v"),
    "others": (SKY, "^"),
    "special_tokens": (GREEN, "P"),
}


def _panels(probs, width, height):
    """A figure, its axes and the part of P in each: one if the layers share P, else all layers and then each one."""
    num_layers = probs.shape[1]
    parts = [("", probs)]
    if num_layers > 1:
        parts = [("all layers", probs)] + [(f"layer {k}", probs[:, k : k + 1]) for k in range(num_layers)]
    num_columns = min(len(parts), 4)
    num_rows = math.ceil(len(parts) / num_columns)
    scale = 1 if num_layers == 1 else 0.62
    figure = new_figure(scale * width * num_columns, scale * height * num_rows + 0.5)
    axes = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
    for axis in axes[len(parts) :]:
        axis.set_axis_off()
    for axis, (title, _) in zip(axes, parts, strict=False):
        axis.set_title(title, fontsize=10)
    return figure, axes[: len(parts)], [part for _, part in parts]


def _label_panels(axes, x, y):
    """Label the left end of every row and the bottom of every column."""
    for axis in axes:
        place = axis.get_subplotspec()
        if place.is_first_col():
            axis.set_ylabel(y)
        if place.num2 + place.get_gridspec().ncols >= len(axes):
            axis.set_xlabel(x)


def _shown(quantity):
    """The subject of a title: P says what a search had learned, and not yet what its mask keeps."""
    return "P before freezing" if quantity == KEPT else "What is kept"


def _legend(figure, axis):
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3 if len(labels) > 4 else 2, fontsize=9)


def _draw_heat_maps(probs, path, title, quantity, ticks=None):
    """
    Draw the mean P of every panel on one color scale, from the lowest mean to the highest without the rows and columns
    of the first and last token: where these are always on, all else would have one color.
    """
    figure, axes, parts = _panels(probs, 5.8, 4.9)
    means = [part.mean((0, 1, 2)) for part in parts]
    inner = [mean[1:-1, 1:-1] if len(mean) > 2 else mean for mean in means]
    low, high = float(min(mean.min() for mean in inner)), float(max(mean.max() for mean in inner))
    # A constant, such as a dense mask, would get a scale from below to beyond it.
    low, high = (0, 1) if low == high else (low, high)
    for axis, mean in zip(axes, means, strict=True):
        image = draw_table(axis, mean, 4.3 if len(parts) == 1 else 2.4, cmap="cividis", vmin=low, vmax=high)
        if ticks is not None:
            axis.set_xticks(*ticks)
            axis.set_yticks(*ticks)
            axis.tick_params(labelsize=8)
    bar = figure.colorbar(image, ax=list(axes), label=f"mean over heads of\n{quantity}", fraction=0.06, extend="both")
    normalized = bar.ax.secondary_yaxis(
        "left", functions=(lambda value: (value - low) / (high - low), lambda value: low + value * (high - low))
    )
    normalized.set_ylabel("normalized: 0 lowest, 1 highest")
    figure.suptitle(title, fontsize=11)
    _label_panels(axes, "key position j", "query position i")
    save_figure(figure, path)


def plot_mean_probs(probs: torch.Tensor, path: str | os.PathLike, quantity: str = KEPT) -> None:
    """
    Draw P averaged over heads as a heat map, also for each layer if the layers differ.

    Source: SparseBERT (arXiv 2102.12871), Figure 2a; "after normalization" is read as from lowest to highest.
    """
    probs = as_runs(probs)
    _draw_heat_maps(probs, path, f"{_shown(quantity)} by position\n({average_text(probs)}; yellow: highest)", quantity)


def plot_sketch(
    probs: torch.Tensor, path: str | os.PathLike, special_tokens: str = "first_last", quantity: str = KEPT
) -> None:
    """
    Draw P averaged over heads and pooled onto 16 tokens by [`sketch`], also for each layer if the layers differ.

    Source: SparseBERT (arXiv 2102.12871), Figure 2b.
    """
    probs = as_runs(probs)
    # Pooling is linear: the mean of the sketches is the sketch of the mean, one per layer.
    pooled = sketch(probs.mean((0, 2)), special_tokens)[None, :, None]
    title = f"{_shown(quantity)} by position, pooled onto {SKETCHED}\n({average_text(probs)}; yellow: highest)"
    title += f"\n{CELLS_NOTE}"
    _draw_heat_maps(pooled, path, title, quantity, sketch_ticks(special_tokens))


def sketch_ticks(special_tokens):
    """Places and names of the tokens of a sketch, of which only the special ones have a name."""
    names = [""] * SKETCH_LENGTH
    if special_tokens != "none":
        names[0] = "first"
    if special_tokens == "first_last":
        names[-1] = "last"
    return range(SKETCH_LENGTH), names


def plot_groups(
    probs: torch.Tensor,
    path: str | os.PathLike,
    special_tokens: str = "first_last",
    fixed: Sequence[str] = (),
    quantity: str = KEPT,
) -> None:
    """
    Plot the mean P of the diagonal, the neighbors, the special tokens and the others with 95 % intervals: heads as
    points, or lines over the layers if the layers differ. Groups in `fixed`, which were not learned, are marked.

    Source: SparseBERT (arXiv 2102.12871), Section 3.1.2.
    """
    probs = as_runs(probs)
    num_layers = probs.shape[1]
    groups = head_groups(probs, special_tokens)
    names = {name: name.replace("_", " ") + (" (fixed)" if name in fixed else "") for name in groups}
    figure = new_figure(7.4, 5.2)
    axis = figure.subplots()
    if num_layers == 1:
        _draw_heads(axis, groups, names)
    else:
        _draw_layers(axis, groups, names)
    _legend(figure, axis)
    axis.set_title(f"{_shown(quantity)} by group of positions\n({average_text(probs)})", fontsize=11)
    axis.set_ylabel(f"mean of\n{quantity}")
    axis.set_ylim(-0.03, 1.03)
    axis.grid(axis="y", alpha=0.3)
    save_figure(figure, path)


def _draw_heads(axis, groups, names):
    """Points of the heads, and their mean with intervals, side by side for each group."""
    for place, values in enumerate(groups.values()):
        # Only the first group goes into the legend.
        prefix = "_" if place else ""
        across = torch.linspace(-0.3, -0.1, values.size).numpy()
        axis.plot(place + across, values.ravel(), "o", color="0.6", ms=4, label=f"{prefix}one head")
        number = estimate(values.reshape(len(values), -1))
        for kind, shift, color in (("over_heads", 0.05, BLUE), ("over_seeds", 0.2, VERMILION)):
            if kind in number:
                error = abs(number[kind] - number["mean"])[:, None]
                label = f"{prefix}95 % interval of the mean {kind.replace('_', ' ')}"
                axis.errorbar(
                    place + shift, number["mean"], error, fmt="none", color=color, capsize=5, lw=2, label=label
                )
        axis.plot(place + 0.05, number["mean"], "D", color="black", ms=6, zorder=3, label=f"{prefix}mean")
    axis.set_xticks(range(len(groups)), labels=[name.replace(" (", "\n(") for name in names.values()])
    axis.set_xlabel("group of positions (query i, key j); offset is |i - j|")


def _draw_layers(axis, groups, names):
    """A line over the layers for each group."""
    num_runs, num_layers, _ = next(iter(groups.values())).shape
    kind = "over_seeds" if num_runs > 1 else "over_heads"
    for place, (name, values) in enumerate(groups.items()):
        color, marker = _GROUP_STYLES[name]
        # Side by side, so that they do not hide each other.
        layers = torch.arange(num_layers).numpy() + 0.06 * (place - 2.5)
        number = estimate(values.swapaxes(1, 2))
        error = abs(number[kind] - number["mean"]) if kind in number else None
        axis.errorbar(
            layers, number["mean"], error,
            color=color, marker=marker, ms=5, lw=1.2, capsize=2, label=names[name],
        )  # fmt: skip
    axis.set_xticks(range(num_layers))
    axis.set_xlabel(
        "layer" + (f" (bars: 95 % interval of the mean {kind.replace('_', ' ')})" if kind in number else "")
    )


def plot_offset_profile(
    probs: torch.Tensor,
    path: str | os.PathLike,
    special_tokens: str = "first_last",
    quantity: str = KEPT,
    signed: bool = False,
) -> None:
    """
    Plot P against the offset `abs(i - j)`, or if `signed` `i - j`: mean over heads with 95 % intervals, also for each
    layer if the layers differ.
    """
    probs = as_runs(probs)
    offsets, _ = offset_profile(probs[:1, :1, :1], special_tokens, signed)
    figure, axes, parts = _panels(probs, 6.6, 4.2)
    for axis, part in zip(axes, parts, strict=True):
        _, profile = offset_profile(part, special_tokens, signed)  # (S, L, H, K)
        numbers = estimate(profile.reshape(len(profile), -1, len(offsets)))
        if "over_heads" in numbers:
            low, high = numbers["over_heads"]
            label = "95 % interval of the mean over heads"
            axis.fill_between(offsets, low, high, color=SKY, alpha=0.4, lw=0, label=label)
        if "over_seeds" in numbers:
            low, high = numbers["over_seeds"]
            label = "95 % interval of the mean over seeds"
            axis.plot(offsets, low, color=VERMILION, ls="--", lw=1, label=label)
            axis.plot(offsets, high, color=VERMILION, ls="--", lw=1)
        marker = "o" if len(offsets) <= 160 else None
        axis.plot(offsets, numbers["mean"], color=BLUE, lw=1.5, marker=marker, ms=2.5, label="mean over heads")
        # Logarithmic, because what matters is near the diagonal; linear up to 1, to show offset 0.
        if offsets[-1] > 16:
            ticks = [0] + [2**k for k in range(int(offsets[-1]).bit_length())][:: 2 if signed else 1]
            ticks = [-tick for tick in reversed(ticks[1:])] * signed + ticks
            axis.set_xscale("symlog", base=2, linthresh=1)
            axis.set_xticks(ticks, labels=map(str, ticks), fontsize=10 if len(parts) == 1 else 7)
            axis.set_xticks([], minor=True)
        axis.set_ylim(-0.03, 1.03)
        axis.grid(alpha=0.3)
    title = ", ".join(filter(None, [average_text(probs), _LEFT_OUT[special_tokens]]))
    y = f"mean at each offset of\n{quantity}"
    if len(parts) > 1:  # too long for small panels
        title += f"; mean at each offset of {quantity}"
        y = "mean"
    figure.suptitle(f"{_shown(quantity)} by distance\n({title})", fontsize=11)
    offset, note = ("i - j", "negative: the key comes later") if signed else ("|i - j|", "0 is the diagonal")
    _label_panels(axes, f"offset {offset} between query and key\n({note})", y)
    _legend(figure, axes[0])
    save_figure(figure, path)
