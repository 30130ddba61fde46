"""Draws `mask.png`, the picture of the front page, from a learned mask of `benchmarks/masks/`: run it in the root."""

from io import BytesIO
from pathlib import Path

import torch
from matplotlib.colors import ListedColormap
from PIL import Image

from sparsebert import SparseMask
from sparsebert.analysis.pictures import BLUE, new_figure


ROOT = Path(__file__).parents[1]
CORNER = 64

mask = SparseMask.from_pretrained(ROOT / "benchmarks" / "masks" / "dam_s_512")
table = mask.to_table()[0, 0]
panels = {
    "Dense: every token attends\nto every token": torch.ones_like(table),
    f"Learned: one head,\n{1 - table.float().mean():.0%} of the pairs removed": table,
    f"The same, first {CORNER} tokens": table[:CORNER, :CORNER],
}

figure = new_figure(8.8, 3.3)
for axis, (title, panel) in zip(figure.subplots(1, 3), panels.items(), strict=True):
    axis.imshow(panel, cmap=ListedColormap(["white", BLUE]), vmin=0, vmax=1, interpolation="antialiased")
    axis.set_title(title, fontsize=10)
    axis.set_xticks([0, len(panel) - 1])
    axis.set_yticks([0, len(panel) - 1])
    axis.set_xlabel("token attended to", fontsize=9)
    axis.tick_params(labelsize=8)
figure.axes[0].set_ylabel("token that attends", fontsize=9)
drawn = BytesIO()
figure.savefig(drawn, dpi=120)
# 16 colours are enough, and a quarter of the size.
Image.open(drawn).convert("RGB").quantize(16).save(ROOT / "docs" / "mask.png", optimize=True)
