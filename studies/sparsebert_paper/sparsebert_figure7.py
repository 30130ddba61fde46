"""
Two stages or one: Figures 3 and 7 of [S], SparseBERT (arXiv 2102.12871), on a model that has left the plateau. Masks
of every sparsity from the P of one soft search, as many entries removed at random, and searches for that sparsity.
"""

import json
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from sparsebert.analysis.saved_runs import read_run
from sparsebert.analysis.tables import Table
from sparsebert.checks import check_choice, check_range
from sparsebert.files import METRICS_NAME
from sparsebert.training.pruning.pruned_masks import prune_by_probs, random_control

from ..harness.experiment import Experiment
from ..shared.continued_pretraining import (
    SEARCH_VARIANTS,
    ContinuedSettings,
    check_continued,
    continue_training,
    continued_fields,
    loss_table,
)


STAGES = ("two_stage", "random", "one_stage")


@dataclass
class StagesStudy(ContinuedSettings):
    """
    Settings of the study, with those of [`ContinuedSettings`].

    Args:
        sparsities (`list[float]`): Fractions of the entries to remove.
        search_end (`float`): Fraction of the steps after which the mask of the one stage freezes.
        mask_logit_scale (`float`): How much faster the logits of the soft search move than the weights.
        target_logit_scale (`float`): The same of the search of the one stage, whose logits do not get far from their
            start in 150 steps if this is 10.
        start_from_attention (`bool`): Start this search from what the checkpoint attends to.
        initial_decay, initial_sparsity (`float`, *optional*): Where it starts, see [`SparseBertConfig`]; the decay
            only without `start_from_attention`.
        variant (`str`): How this search learns, a key of `SEARCH_VARIANTS`.
    """

    sparsities: list[float] = field(default_factory=lambda: [0.1, 0.3, 0.5, 0.7, 0.8, 0.9])
    search_end: float = 0.5
    mask_logit_scale: float = 50.0
    target_logit_scale: float = 200.0
    start_from_attention: bool = True
    initial_decay: float | None = None
    initial_sparsity: float | None = None
    variant: str = "mask"


# The settings of the search of the one stage, and all those that the soft search of a seed does not depend on.
_OF_ONE_STAGE = (
    *("search_end", "target_logit_scale", "start_from_attention"),
    *("initial_decay", "initial_sparsity", "variant"),
)
_OF_STAGES = ("stage", "target", "system", *_OF_ONE_STAGE)


def cells(settings: StagesStudy) -> dict[str, dict[str, Any]]:
    """The settings of each cell, by its name."""
    common = continued_fields(settings)
    common |= {name: getattr(settings, name) for name in ("mask_logit_scale", *_OF_ONE_STAGE)}
    return {
        f"{stage}_{sparsity:g}_seed_{seed}": common
        | {"stage": stage, "target": sparsity, "system": f"{stage} {sparsity:g}", "seed": seed}
        for seed in settings.seeds
        for sparsity in settings.sparsities
        for stage in STAGES
    }


def check(cell: dict[str, Any]) -> None:
    """
    Check that a cell can run.

    Args:
        cell (`dict`): Settings of the cell.

    Raises:
        ValueError: If a setting is out of its range.
        OSError: If there is no such model or text.
    """
    check_range("sparsities", cell["target"], 0, 1, (int, float))
    check_choice("variant", cell["variant"], tuple(SEARCH_VARIANTS))
    check_continued(cell | ({"model": _one_stage(cell)} if cell["stage"] == "one_stage" else {}))


def _one_stage(cell):
    """The fields of the search of the one stage."""
    start = {name: cell[name] for name in ("initial_decay", "initial_sparsity") if cell[name] is not None}
    model = {"search": "dam_u", "target_sparsity": cell["target"], "mask_logit_scale": cell["target_logit_scale"]}
    return model | start | SEARCH_VARIANTS[cell["variant"]]


def run(cell: dict[str, Any], folder: Path) -> dict[str, Any]:
    """
    Make the mask of a cell and continue the pre-training through it, or search for it.

    Args:
        cell (`dict`): Settings of the cell.
        folder (`Path`): Output folder of the run; the soft search that the masks come from is beside it.

    Returns:
        `dict`: Metrics.
    """
    if cell["stage"] == "one_stage":
        data = {name: cell[name] for name in ("search_end", "start_from_attention")}
        return continue_training(cell, folder, data, _one_stage(cell))
    start = time.perf_counter()
    searched = _soft_search(cell, folder.parent)
    shared = time.perf_counter() - start
    mask = prune_by_probs(read_run(searched), cell["target"])
    if cell["stage"] == "random":
        mask = random_control(mask, cell["seed"])
    given = folder.with_name(f"mask_of_{folder.name}")
    mask.save_pretrained(given)
    metrics = continue_training(cell, folder, {"mask": str(given)})
    return metrics | {"shared_seconds": metrics["shared_seconds"] + shared}


def _soft_search(cell, runs):
    """The soft search of a seed, which all its masks come from; one of another process is waited for."""
    own = {name: value for name, value in cell.items() if name not in _OF_STAGES}
    path = runs / f"soft_{zlib.crc32(json.dumps(own, sort_keys=True).encode()):08x}"
    with FileLock(f"{path}.lock"):
        if not (path / METRICS_NAME).is_file():
            model = {"search": "soft", "mask_logit_scale": cell["mask_logit_scale"], "sparsity_weight": 0.0}
            continue_training(cell, path, {"freeze_threshold": 0.5, "overwrite": True}, model)
    return path


def summary(finished: Mapping[str, dict[str, Any]]) -> list[Table]:
    """
    The losses at each sparsity, with the paired difference to random masks.

    Args:
        finished (`dict[str, dict]`): `"settings"` and `"metrics"` by cell.

    Returns:
        `list[Table]`: One table per sparsity.
    """
    targets = sorted({cell["settings"]["target"] for cell in finished.values()})
    return [
        loss_table(
            {name: cell for name, cell in finished.items() if cell["settings"]["target"] == target},
            f"{target:.0%} to remove", f"random {target:g}",
        )
        for target in targets
    ]  # fmt: skip


EXPERIMENT = Experiment(
    title="Two stages or one ([S] Figures 3 and 7)",
    arguments=StagesStudy,
    scales={
        "tiny": {},
        "paper": {
            **{"checkpoint_steps": 100_000, "max_steps": 10_000, "batch_size": 256, "learning_rate": 1e-4},
            "target_logit_scale": 10.0,
        },
    },
    cells=cells,
    check=check,
    run=run,
    columns={
        "sparsity": ("removed", "{:.1%}"),
        "mlm_loss": ("MLM loss", "{:.3f}"),
        "train_seconds": ("training, s by the clock", "{:.0f}"),
    },
    plot=("sparsity", "mlm_loss", "stage"),
    notes=(
        "two_stage: the entries of lowest P of a soft search are removed in every head, and training goes on from the "
        "checkpoint through the mask; random: as many entries at random; one_stage: dam_u with this sparsity as its "
        "target, whose steps count, and which by default starts from what the checkpoint attends to. The soft search "
        "of two_stage has as many steps again, which are not counted: its weights are not used",
    ),
    summary=summary,
)
