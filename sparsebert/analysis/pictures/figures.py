"""What all pictures share: figures without a window, how they are saved, colors, and tables as images."""

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ...checks import check_choice
from ...file_kinds import drop_links
from ...files import make_folder


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage


DPI = 150
# Okabe and Ito's colors, which readers with any color vision can tell apart.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK = COLORS
# More rows than a panel has pixels.
_MOST_CELLS = 1024


def new_figure(width: float, height: float, layout: Literal["compressed", "constrained"] = "compressed") -> "Figure":
    """A figure (size in inches) that belongs to no window system and changes no global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout=layout, dpi=DPI)


def check_picture(path: str | os.PathLike, field: str) -> None:
    """
    Check that a picture can be written to the file that a field names, and make its folder, before what takes long.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    path = Path(path)
    if path.suffix:
        check_choice(f"suffix of {field}", path.suffix, [f".{kind}" for kind in FigureCanvasBase.filetypes])
    if path.is_dir():
        raise FileExistsError(f"{field} {path} is a folder: name a file in it")
    make_folder(path.parent, field)


def save_figure(figure: "Figure", path: str | os.PathLike) -> None:
    """Write a figure to a file; without a suffix, to both a PNG and an SVG file."""
    path = Path(path)
    make_folder(path.parent)
    for target in [path] if path.suffix else [path.with_name(f"{path.name}.{suffix}") for suffix in ("png", "svg")]:
        drop_links([target])
        figure.savefig(target)


def interpolation(length: int, inches: float) -> str:
    """
    How to draw a table of `length` rows: sharp entries where each has a pixel, else averaged ones, since leaving out
    rows would break thin lines.
    """
    return "nearest" if length <= 0.85 * inches * DPI else "antialiased"


def draw_table(axis: "Axes", table: torch.Tensor, inches: float, **style: Any) -> "AxesImage":
    """Draw a table `(n, n)` as an image, a large one averaged over small squares: a figure holds what it shows."""
    length = len(table)
    if (size := math.ceil(length / _MOST_CELLS)) > 1:
        table = torch.nn.functional.avg_pool2d(table.float()[None], size, ceil_mode=True)[0]
    extent = (-0.5, length - 0.5, length - 0.5, -0.5)
    return axis.imshow(table.float().numpy(), extent=extent, interpolation=interpolation(len(table), inches), **style)


def average_text(probs: torch.Tensor) -> str:
    """What P `(S, L, H, n, n)` was averaged over, for a title: "3 runs x 6 layers x 12 heads, 128 tokens"."""
    runs, layers, heads = (
        f"{count} {noun}{'s' * (count > 1)}"
        for count, noun in zip(probs.shape[:3], ("run", "layer", "head"), strict=True)
    )
    parts = [runs] * (probs.shape[0] > 1) + [layers] * (probs.shape[1] > 1) + [heads]
    return f"{' x '.join(parts)}, {probs.shape[-1]} tokens"
