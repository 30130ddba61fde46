"""
Two stages or one: Figures 3 and 7 of [S], SparseBERT (arXiv 2102.12871), on a model that has left the plateau. Masks
of every sparsity from the P of one soft search, as many entries removed at random, and searches for that sparsity.
"""

import time
from dataclasses import dataclass, field

from sparsebert.analysis.saved_runs import read_run
from sparsebert.analysis.tables import Table
from sparsebert.checks import check_choice, check_range
from sparsebert.training.pruning.pruned_masks import prune_by_probs, random_control

from ..harness.comparisons import loss_table
from ..harness.experiment import Cells, Experiment, common_settings, seeded
from ..shared.continued_pretraining import (
    PAPER,
    SEARCH_VARIANTS,
    SMALLEST,
    SearchSettings,
    check_continued,
    continue_training,
    target_search,
)
from ..shared.recipe_sections import made_once


STAGES = ("two_stage", "random", "one_stage")


@dataclass
class StagesStudy(SearchSettings):
    """
    Settings of the study, with those of [`SearchSettings`].

    Args:
        sparsities (`list[float]`): Fractions of the entries to remove.
        variant (`str`): How the search of the one stage learns, a key of `SEARCH_VARIANTS`.
    """

    sparsities: list[float] = field(default_factory=lambda: [0.1, 0.3, 0.5, 0.7, 0.8, 0.9])
    variant: str = "mask"


# The settings that the soft search of a seed does not depend on.
_OF_STAGES = (
    *("stage", "target", "system", "search_end", "target_logit_scale", "start_from_attention"),
    *("initial_decay", "initial_sparsity", "variant"),
)


def _cells(settings):
    common = common_settings(settings, "sparsities")
    stages = {
        f"{stage}_{sparsity:g}": common | {"stage": stage, "target": sparsity, "system": f"{stage} {sparsity:g}"}
        for sparsity in settings.sparsities
        for stage in STAGES
    }
    return seeded(stages, settings.seeds)


def _check(cell):
    check_range("sparsities", cell["target"], 0, 1, (int, float))
    check_choice("variant", cell["variant"], tuple(SEARCH_VARIANTS))
    check_continued(cell, _one_stage(cell) if cell["stage"] == "one_stage" else {})


def _one_stage(cell):
    return target_search(cell, "dam_u", cell["target"], cell["variant"])


def _run(cell, folder):
    """Make the mask of a cell and continue the pre-training through it, or search for it."""
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
    """The soft search of a seed, which all its masks come from."""
    own = {name: value for name, value in cell.items() if name not in _OF_STAGES}
    with made_once(runs, "soft", own) as (path, there):
        if not there:
            model = {"search": "soft", "mask_logit_scale": cell["mask_logit_scale"], "sparsity_weight": 0.0}
            continue_training(cell, path, {"freeze_threshold": 0.5, "overwrite": True}, model)
    return path


def _summary(finished: Cells) -> list[Table]:
    """The losses at each sparsity, with the paired difference to random masks."""
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
    scales={"tiny": {}, "paper": PAPER | {"target_logit_scale": 10.0}},
    cells=_cells,
    check=_check,
    run=_run,
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
    summary=_summary,
    smallest=SMALLEST | {"sparsities": [0.5]},
)
