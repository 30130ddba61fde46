"""
Which positions can go: Figure 2 and Table 1 of [S], SparseBERT (arXiv 2102.12871), on a model that has left the
plateau.
"""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save

from sparsebert.analysis.importance import OFFSET_GROUPS, estimate, head_groups
from sparsebert.analysis.tables import Table
from sparsebert.checks import check_range
from sparsebert.masks.mask_files import MASK_PROBS_NAME

from ..harness.comparisons import by_seed, loss_table
from ..harness.experiment import Cells, Experiment, common_settings
from ..harness.result_charts import plot_importance, plot_values
from ..shared.continued_pretraining import PAPER, SMALLEST, ContinuedSettings, check_continued, continue_training


# P averaged over heads and layers, `(n, n)` float16 under the key "probs", which is kept of a search.
MEAN_PROBS_NAME = "mean_probs.safetensors"


@dataclass
class ImportanceStudy(ContinuedSettings):
    """
    Settings of the study: a soft search that starts with all positions alike, and training without a mask, without the
    diagonal and without as many random entries, with the settings of [`ContinuedSettings`].

    Args:
        mask_logit_scale (`float`): How much faster the logits move than the weights.
        search_steps (`int`): Steps of the search; the other systems have `max_steps`.
        draws (`int`): Number of random masks per seed.
    """

    mask_logit_scale: float = 50.0
    search_steps: int = 500
    draws: int = 3


def _cells(settings):
    check_range("search_steps", settings.search_steps, 1)
    common = common_settings(settings, "search_steps", "draws")
    soft = {"soft": {"system": "soft", "model": {"search": "soft"}, "max_steps": settings.search_steps}}
    return {
        f"{name}_seed_{seed}": common | system | {"seed": seed}
        for seed in settings.seeds
        for name, system in (soft | without_positions(seed, settings.draws)).items()
    }


def without_positions(seed: int, draws: int) -> dict[str, dict[str, Any]]:
    """
    What is compared: all positions, all but the diagonal, and all but as many random ones, `draws` times. `"system"`
    and `"model"`, by the name of the cell without its seed.
    """
    check_range("draws", draws, 0)
    systems: dict[str, dict[str, Any]] = {
        name: {"system": name, "model": {"pattern": name}} for name in ("dense", "no_diag")
    }
    for draw in range(draws):
        model = {"pattern": "random_drop", "mask_seed": 1000 * seed + draw}
        systems[f"random_drop_{draw}"] = {"system": f"random_drop, draw {draw}", "model": model}
    return systems


def _model(cell):
    """The fields of the mask: in a search P as it is, without a penalty, what attention wants to look at."""
    soft = {"mask_logit_scale": cell["mask_logit_scale"], "sparsity_weight": 0.0}
    return cell["model"] | (soft if cell["system"] == "soft" else {})


def _run(cell, folder):
    if cell["system"] != "soft":
        return continue_training(cell, folder, model=_model(cell))
    metrics = continue_training(cell, folder, {"freeze_threshold": 0.5}, _model(cell))
    probs = load_file(folder / MASK_PROBS_NAME)["probs"]  # (H, n, n)
    for name, values in head_groups(probs, "first_last", OFFSET_GROUPS).items():
        low, high = estimate(values.reshape(1, -1))["over_heads"]
        metrics |= {f"p_{name}_low": float(low), f"p_{name}_high": float(high)}
    return metrics


def _keep(cell, folder):
    """P of a search, averaged over heads and layers."""
    path = folder / MASK_PROBS_NAME
    if cell["system"] != "soft" or not path.is_file():
        return {}
    return {MEAN_PROBS_NAME: save({"probs": load_file(path)["probs"].mean(0).half()})}


def _draw_probs(finished: Cells, kept: Path, path: Path) -> None:
    """P averaged over the heads and the seeds."""
    files = [kept / name / MEAN_PROBS_NAME for name, cell in finished.items() if cell["settings"]["system"] == "soft"]
    probs = [load_file(file)["probs"].float() for file in files if file.is_file()]
    if probs:
        # Seeds that were searched again at another length are not averaged with the first.
        plot_importance(torch.stack([seed for seed in probs if seed.shape == probs[0].shape]), path)


def _others(finished):
    """The cells without a search."""
    return {name: cell for name, cell in finished.items() if cell["settings"]["system"] != "soft"}


def _draw_losses(finished: Cells, path: Path, title: str) -> None:
    """How much more the masked tokens cost than with dense attention and the same batches."""
    losses = by_seed(_others(finished), "mlm_loss", "system")
    if dense := losses.get("dense"):
        panel = {
            system: [found[seed] - dense[seed] for seed in found.keys() & dense.keys()]
            for system, found in losses.items()
            if found.keys() & dense.keys()
        }
        plot_values({"MLM loss minus that of dense attention": panel}, path, title, "dense")


def _summary(finished: Cells) -> list[Table]:
    """P by group of positions, and the losses."""
    searches = [cell for cell in finished.values() if cell["settings"]["system"] == "soft"]
    rows = [{"seed": str(cell["settings"]["seed"])} for cell in searches]
    over_seeds = {"seed": "all"}
    for name in (*OFFSET_GROUPS, "special_tokens"):
        heading = name.replace("_", " ")
        means: list[float] = []
        for row, metrics in zip(rows, (cell["metrics"] for cell in searches), strict=True):
            if f"p_{name}_low" in metrics:
                means.append(metrics[f"p_{name}"])
                row[heading] = f"{means[-1]:.3f} [{metrics[f'p_{name}_low']:.3f}, {metrics[f'p_{name}_high']:.3f}]"
        if len(means) > 1:
            low, high = estimate(np.array(means)[:, None])["over_seeds"]
            over_seeds[heading] = f"{statistics.fmean(means):.3f} [{low:.3f}, {high:.3f}]"
    rows += [over_seeds] if len(rows) > 1 else []
    note = "mean P over the heads; 95 % interval: over the heads of a seed, and in the last row over the seeds; all "
    note += "positions start at 0.5"
    tables = [Table.of("P by group of positions (Figure 2)", rows, (note,))] if rows else []
    title = "Removing the diagonal or as much at random, mean of the draws of a seed (Table 1)"
    return [*tables, loss_table(_others(finished), title, "dense")]


EXPERIMENT = Experiment(
    title="Which positions can go ([S] Table 1, Figure 2)",
    arguments=ImportanceStudy,
    scales={"tiny": {}, "paper": PAPER | {"search_steps": 10_000}},
    cells=_cells,
    check=lambda cell: check_continued(cell, _model(cell)),
    run=_run,
    columns={
        "mlm_loss": ("MLM loss", "{:.3f}"),
        "p_diagonal": ("P diagonal", "{:.3f}"),
        "p_offset_1": ("P offset 1", "{:.3f}"),
        "p_special_tokens": ("P special", "{:.3f}"),
        "p_beyond_8": ("P beyond 8", "{:.3f}"),
        "sparsity": ("removed", "{:.1%}"),
        "glue": ("GLUE dev average", "{:.1f}"),
        "train_seconds": ("training, s by the clock", "{:.0f}"),
    },
    plot=("seed", "mlm_loss", "system"),
    draw=_draw_losses,
    published={"dense": {"glue": 83.8}, "no_diag": {"glue": 83.9}, "random_drop_0": {"glue": 83.4}},
    notes=("The paper's figures are GLUE dev averages after full fine-tuning; ours are held-out losses",),
    summary=_summary,
    keep=_keep,
    pictures={"figure2": _draw_probs},
    smallest=SMALLEST | {"search_steps": 2},
)
