"""
Pictures of masks. A path without a suffix gets two files, PNG and SVG.

Letters: L layers, H heads, n length.
"""

import math
import os
from typing import Any

import torch

from ...masks.patterns import CYCLES, PATTERNS, build_pattern
from ...masks.sparse_mask import SparseMask
from .figures import average_text, draw_table, interpolation, new_figure, save_figure


_WHITE_ATTENDS = "white: may attend, black: removed"
# Tokens of the patterns in the gallery.
_GALLERY_LENGTH = 16
# The cycles' defaults are made for 256 tokens; at the gallery's length they would be nearly dense.
_GALLERY_PARAMETERS: dict[str, dict[str, Any]] = {
    "strided_cycle": {"stride": 4},
    "fixed_cycle": {"stride": 4},
    "star_cycle": {"window_size": 1},
}


def _draw_mask(axis, table, inches):
    """Draw one mask `(n, n)`, white where a query may attend."""
    draw_table(axis, table, inches, cmap="gray", vmin=0, vmax=1)
    axis.set_xticks([])
    axis.set_yticks([])


def plot_heads(mask_or_table: SparseMask | torch.Tensor, path: str | os.PathLike, name: str | None = None) -> None:
    """
    Draw a mask, or a bool table `(H, n, n)` or `(L, H, n, n)`, head by head, one row of panels per layer if the layers
    differ.
    """
    table = mask_or_table.to_table() if isinstance(mask_or_table, SparseMask) else mask_or_table
    table = torch.as_tensor(table).detach().cpu()
    table = table[None] if table.dim() == 3 else table
    if table.dim() != 4 or table.shape[2] != table.shape[3] or 0 in table.shape:
        raise ValueError(f"mask_or_table must have shape (H, n, n) or (L, H, n, n), got {tuple(table.shape)}")
    num_layers, num_heads, length, _ = table.shape
    num_columns = num_heads if num_layers > 1 else min(num_heads, 4 if num_heads <= 12 else 6)
    num_rows = num_layers if num_layers > 1 else math.ceil(num_heads / num_columns)
    # Small enough for a dozen layers; never narrower than the title.
    panel, title = (1.3, 0.2) if num_layers > 1 else (1.9, 0.35)
    figure = new_figure(max(panel * num_columns + 0.5, 4.6), max((panel + title) * num_rows + 1.1, 3.2))
    axes = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
    for axis in axes[num_layers * num_heads :]:
        axis.set_axis_off()
    for index, (axis, head) in enumerate(zip(axes, table.flatten(0, 1), strict=False)):
        _draw_mask(axis, head, panel)
        layer, which = divmod(index, num_heads)
        removed = f"{1 - head.count_nonzero() / head.numel():.1%}"
        if num_layers == 1:
            axis.set_title(f"head {which}\n{removed} removed", fontsize=8)
            continue
        axis.set_title(removed if layer else f"head {which}\n{removed}", fontsize=7)
        if which == 0:
            axis.set_ylabel(f"layer {layer}", fontsize=7)
    partly = "" if interpolation(length, panel) == "nearest" else ", gray: a pixel with both"
    each = " in all, and in each head as written above it" if num_layers > 1 else ""
    figure.suptitle(
        f"Attention masks{f' of {name}' if name else ''}\n{average_text(table[None])}, "
        f"{1 - table.count_nonzero() / table.numel():.1%} removed{each}\n"
        f"({_WHITE_ATTENDS}{partly})",
        fontsize=10,
    )
    figure.supxlabel("key position j", fontsize=9)
    figure.supylabel("query position i", fontsize=9)
    save_figure(figure, path)


def plot_gallery(path: str | os.PathLike) -> None:
    """
    Draw one head of every pattern with its default parameters (shorter strides for cycles). A cycle is drawn as the
    union of its patterns.

    Source: SparseBERT (arXiv 2102.12871), Figure 1.
    """
    num_columns = 5
    num_rows = math.ceil(len(PATTERNS) / num_columns)
    figure = new_figure(2.1 * num_columns + 0.5, 2.85 * num_rows + 0.6)
    axes = figure.subplots(num_rows, num_columns).ravel()
    for axis in axes[len(PATTERNS) :]:
        axis.set_axis_off()
    for axis, name in zip(axes, PATTERNS, strict=False):
        layout = "union" if name in CYCLES else None
        mask = build_pattern(name, _GALLERY_LENGTH, 1, head_configuration=layout, **_GALLERY_PARAMETERS.get(name, {}))
        _draw_mask(axis, mask.to_table()[0, 0], 2.1)
        parameters = [f"{key}={value}" for key, value in mask.metadata["pattern_parameters"].items()]
        axis.set_title(f"{name}{' (union)' if layout else ''}\n{mask.sparsity:.1%} removed", fontsize=10)
        axis.set_xlabel("\n".join(parameters), fontsize=7)
    figure.suptitle(f"Attention patterns at {_GALLERY_LENGTH} tokens ({_WHITE_ATTENDS})", fontsize=12)
    figure.supxlabel("key position j", fontsize=9)
    figure.supylabel("query position i", fontsize=9)
    save_figure(figure, path)
