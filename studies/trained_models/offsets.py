"""Which distances the heads of a mask keep, beside how alike the position embeddings at these distances are."""

import tempfile
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from statistics import fmean

import torch
from PIL import Image
from scipy.stats import spearmanr

import sparsebert
from sparsebert import SparseMask
from sparsebert.analysis.pictures.figures import new_figure, save_figure
from sparsebert.analysis.pictures.mask_pictures import plot_heads
from sparsebert.analysis.tables import Table
from sparsebert.masks.expansion import signed_parameters
from sparsebert.masks.mask_files import MASK_CONFIG_NAME, MASK_WEIGHTS_NAME
from sparsebert.models.loading import carries_mask

from ..harness.experiment import Cells, Experiment
from ..shared.base_models import named_models


# Distances from which on neighborhood plays no part.
FAR = 40
# Pixels of the picture of the heads.
WIDTH = 1500


@dataclass
class OffsetStudy:
    """
    Settings of the study.

    Args:
        masked (`list[str]`): Folders of models with a mask of offsets, as `sparsebert search` writes them.
    """

    masked: list[str] = field(default_factory=lambda: ["runs/demo/minilm"])


def _cells(settings):
    models = named_models("masked", settings.masked)
    return {name: {"system": name, "model": model} for name, model in models.items()}


def _check(cell):
    if not carries_mask(cell["model"]):
        raise ValueError(f"masked: {cell['model']} has no mask")


def similarity_by_distance(embeddings: torch.Tensor) -> torch.Tensor:
    """By distance `(n,)`, the mean cosine of two position embeddings `(n, D)` without their common mean."""
    centered = torch.nn.functional.normalize(embeddings - embeddings.mean(0), dim=-1)
    cosines = centered @ centered.T
    return torch.stack([cosines.diagonal(distance).mean() for distance in range(len(cosines))])


def _run(cell, folder):
    """
    By distance, the share of heads that `"kept"` it and the `"similarity"` of the position embeddings, and Spearman's
    `"correlation"` of both from `FAR` on.
    """
    model = sparsebert.load(cell["model"])
    mask = model.sparse_attention.mask
    if mask.form != "offsets":
        raise ValueError(f"expected a mask of offsets, got one of the form {mask.form!r}")
    mask.replace(metadata={}).save_pretrained(folder)
    kept = signed_parameters(mask.keep, mask.symmetric).float().mean((0, 1))
    kept = (kept + kept.flip(0))[len(kept) // 2 :] / 2  # by distance, whatever its sign
    embeddings = model.base_model.embeddings.position_embeddings.weight.detach()[: mask.length].float()
    alike = similarity_by_distance(embeddings)[: len(kept)]
    far = slice(FAR, None) if len(kept) > FAR + 2 else slice(None)
    correlation = float(spearmanr(kept[far], alike[far]).statistic)
    return {"length": mask.length, "kept": kept.tolist(), "similarity": alike.tolist(), "correlation": correlation}


def _summary(finished: Cells) -> list[Table]:
    """For each mask, the ranges of distances from `FAR` on that most heads keep: above twice the mean, with gaps."""
    return [recurring(cell["metrics"], cell["settings"]["system"]) for cell in finished.values()]


def recurring(metrics, name):
    """The table of one mask."""
    kept = torch.tensor(metrics["kept"])[FAR:]
    high = (kept > 2 * kept.mean()).tolist()
    stretches: list[list[int]] = []
    for distance, is_high in enumerate(high, start=FAR):
        if is_high and stretches and distance - stretches[-1][-1] <= 4:
            stretches[-1].append(distance)
        elif is_high:
            stretches.append([distance])
    rows = []
    for stretch in stretches:
        if len(stretch) > 1:
            values = [fmean(metrics[part][stretch[0] : stretch[-1] + 1]) for part in ("kept", "similarity")]
            rows.append([f"{stretch[0]} to {stretch[-1]}", f"{values[0]:.0%}", f"{values[1]:+.2f}"])
    alike = torch.tensor(metrics["similarity"])[FAR:]
    rows.append([f"all from {FAR} on", f"{kept.mean():.0%}", f"{alike.mean():+.2f}"])
    rows.append([f"rank correlation of both from {FAR} on", "", f"{metrics['correlation']:+.2f}"])
    header = ["distance", "heads that keep it, mean", "similarity of position embeddings, mean"]
    return Table(f"Distances that recur, {name}", header, rows)


def _draw(finished: Cells, path: Path, title: str) -> None:
    """What the masks keep, above the similarity of the position embeddings, that of the first mask's model."""
    figure = new_figure(8, 4.2, "constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for cell, color in zip(finished.values(), cycle(["tab:blue", "tab:red", "tab:green", "tab:purple"])):
        above.plot(cell["metrics"]["kept"], lw=1.2, color=color, label=cell["settings"]["system"].replace("_", " "))
    metrics = next(iter(finished.values()))["metrics"]
    below.plot(metrics["similarity"], lw=1.2, color="tab:orange")
    above.set_ylabel("heads that keep it")
    below.set_ylabel("similarity of\nposition embeddings")
    if len(finished) > 1:
        above.legend()
    for axis in (above, below):
        axis.grid(alpha=0.3)
    above.set_ylim(0, 1)
    below.set_xlabel("distance |i - j| between query and key, tokens")
    below.set_xlim(0, metrics["length"])
    save_figure(figure, path)


def _keep(cell, folder):
    """The mask, for the picture of its heads."""
    files = [folder / name for name in (MASK_CONFIG_NAME, MASK_WEIGHTS_NAME)]
    return {file.name: file.read_bytes() for file in files} if files[0].is_file() else {}


def _draw_heads(finished: Cells, kept: Path, path: Path) -> None:
    """All heads of the first mask that was kept, small enough for a README."""
    for name in finished:
        if (kept / name / MASK_CONFIG_NAME).is_file():
            with tempfile.TemporaryDirectory() as place:
                large = Path(place, "heads.png")
                plot_heads(SparseMask.from_pretrained(kept / name), large)
                with Image.open(large) as image:
                    size = WIDTH, round(image.height * WIDTH / image.width)
                    image.convert("L").resize(size, Image.Resampling.LANCZOS).quantize(16).save(path, optimize=True)
            return


EXPERIMENT = Experiment(
    title="Distances that recur",
    arguments=OffsetStudy,
    cells=_cells,
    check=_check,
    run=_run,
    columns={"correlation": ("rank correlation", "{:+.2f}")},
    plot=("length", "correlation", "system"),
    draw=_draw,
    summary=_summary,
    keep=_keep,
    pictures={"heads": _draw_heads},
)
