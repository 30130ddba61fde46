"""
Which distances the heads of a mask keep, beside how alike the position embeddings at these distances are.

    python -m benchmarks.offsets --model DIR    # a model with a mask of offsets, as `sparsebert search` writes it

Writes `benchmarks/results/offsets.json`, and to `docs/` the pictures `offsets.png` and `heads.png`.
"""

import argparse
import json
from pathlib import Path
from statistics import fmean

import torch
from PIL import Image
from scipy.stats import spearmanr

import sparsebert
from sparsebert.analysis.pictures.figures import new_figure, save_figure
from sparsebert.analysis.pictures.mask_pictures import plot_heads
from sparsebert.analysis.tables import Table

from ._report import RESULTS, ROOT, commit, explained


# Distances from which on neighborhood plays no part.
FAR = 40
# Pixels of the picture of the heads.
WIDTH = 1500


def similarity(embeddings):
    """
    How alike position embeddings at a distance are.

    Args:
        embeddings (`torch.Tensor` of shape `(n, D)`): Position embeddings.

    Returns:
        `torch.Tensor` of shape `(n,)`: By distance, the mean cosine of two embeddings without their common mean.
    """
    centered = torch.nn.functional.normalize(embeddings - embeddings.mean(0), dim=-1)
    cosines = centered @ centered.T
    return torch.stack([cosines.diagonal(distance).mean() for distance in range(len(cosines))])


def measured(model):
    """
    The distances of a model with a mask of offsets.

    Returns:
        `dict`: By distance, the share of heads that `"kept"` it and the `"similarity"` of the position embeddings; and
        Spearman's `"correlation"` of both from `FAR` on.
    Raises:
        ValueError: If the mask has another form.
    """
    mask = model.sparse_attention.mask
    if mask.form != "offsets":
        raise ValueError(f"expected a mask of offsets, got one of the form {mask.form!r}")
    kept = mask.keep.float().mean((0, 1))
    embeddings = model.base_model.embeddings.position_embeddings.weight.detach()[: mask.length].float()
    alike = similarity(embeddings)[: len(kept)]
    correlation = spearmanr(kept[FAR:], alike[FAR:]).statistic
    return {"length": mask.length, "kept": kept.tolist(), "similarity": alike.tolist(), "correlation": correlation}


def table(report):
    """The ranges of distances from `FAR` on that most heads keep: those above twice the mean, and short gaps."""
    kept = torch.tensor(report["kept"])[FAR:]
    high = (kept > 2 * kept.mean()).tolist()
    stretches = []
    for distance, is_high in enumerate(high, start=FAR):
        if is_high and stretches and distance - stretches[-1][-1] <= 4:
            stretches[-1].append(distance)
        elif is_high:
            stretches.append([distance])
    rows = []
    for stretch in stretches:
        if len(stretch) > 1:
            values = [fmean(report[name][stretch[0] : stretch[-1] + 1]) for name in ("kept", "similarity")]
            rows.append([f"{stretch[0]} to {stretch[-1]}", f"{values[0]:.0%}", f"{values[1]:+.2f}"])
    alike = torch.tensor(report["similarity"])[FAR:]
    rows.append([f"all from {FAR} on", f"{kept.mean():.0%}", f"{alike.mean():+.2f}"])
    rows.append([f"rank correlation of both from {FAR} on", "", f"{report['correlation']:+.2f}"])
    header = ["distance", "heads that keep it, mean", "similarity of position embeddings, mean"]
    return Table("Distances that recur", header, rows)


def plot(report, path):
    """Both curves, one above the other."""
    figure = new_figure(8, 4.2, "constrained")
    axes = figure.subplots(2, 1, sharex=True)
    for axis, name, label in zip(
        axes, ("kept", "similarity"), ("heads that keep it", "similarity of\nposition embeddings"), strict=True
    ):
        axis.plot(report[name], lw=1.2, color="tab:blue" if name == "kept" else "tab:orange")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylim(0, 1)
    axes[1].set_xlabel("distance |i - j| between query and key, tokens")
    axes[1].set_xlim(0, report["length"])
    save_figure(figure, path)


def picture_of_heads(model, path):
    """The masks of all heads, small enough for a README."""
    plot_heads(model.sparse_attention.mask, path)
    with Image.open(path) as image:
        small = image.convert("L").resize((WIDTH, round(image.height * WIDTH / image.width)), Image.Resampling.LANCZOS)
    small.quantize(16).save(path, optimize=True)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offsets", description="Distances that a mask keeps.")
    parser.add_argument("--model", required=True, metavar="DIR", help="model with a mask of offsets")
    parser.add_argument("--output", type=Path, default=RESULTS / "offsets.json")
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs", metavar="DIR")
    options = parser.parse_args(arguments)
    with explained(parser, options.output):
        model = sparsebert.load(options.model)
        report = {"commit": commit()} | measured(model)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    plot(report, options.pictures / "offsets.png")
    picture_of_heads(model, options.pictures / "heads.png")
    print(table(report).markdown(), end="")


if __name__ == "__main__":
    main()
