"""What all pictures share: figures without a window, how they are saved, and colors."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..files import make_folder


if TYPE_CHECKING:
    from matplotlib.figure import Figure


DPI = 150
# Okabe and Ito's colors, which readers with any color vision can tell apart.
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK = COLORS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)


def new_figure(width: float, height: float, layout: Literal["compressed", "constrained"] = "compressed") -> "Figure":
    """
    A figure that belongs to no window system and changes no global state.

    Args:
        width, height (`float`): Size in inches.
        layout (`str`, *optional*, defaults to `"compressed"`): Layout engine of Matplotlib.

    Returns:
        `matplotlib.figure.Figure`
    """
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout=layout, dpi=DPI)


def save_figure(figure: "Figure", path: str | os.PathLike) -> None:
    """
    Write a figure.

    Args:
        figure (`matplotlib.figure.Figure`): The figure.
        path (`str` or `os.PathLike`): File to write; without a suffix, both a PNG and an SVG file. Its folder is
            created if missing.
    """
    path = Path(path)
    make_folder(path.parent)
    for target in [path] if path.suffix else [path.with_name(f"{path.name}.{suffix}") for suffix in ("png", "svg")]:
        figure.savefig(target)
