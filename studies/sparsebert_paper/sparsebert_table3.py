"""
Manual and learned masks: Tables 3 and 4 and Figure 4 of [S], SparseBERT (arXiv 2102.12871), on a model that has left
the plateau.
"""

import tempfile
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from sparsebert.analysis.pictures.mask_pictures import plot_heads
from sparsebert.analysis.tables import Table
from sparsebert.checks import check_choice
from sparsebert.masks.mask_files import MASK_CONFIG_NAME, MASK_WEIGHTS_NAME
from sparsebert.masks.matched import matched_pattern
from sparsebert.masks.sparse_mask import SparseMask

from ..harness.comparisons import Seeds, by_seed, loss_table, of_system
from ..harness.experiment import Cells, Experiment, common_settings
from ..harness.seed_comparisons import COMPARED, compare_seeds, mean_text
from ..shared.continued_pretraining import (
    PAPER,
    SEARCH_VARIANTS,
    SMALLEST,
    ContinuedSettings,
    SearchSettings,
    check_continued,
    continue_training,
    target_search,
)


# The manual masks of the paper, with the parameters that give its sparsities at 128 tokens.
MANUAL: dict[str, dict[str, Any]] = {
    "strided": {"stride": 4},
    "fixed": {"stride": 4},
    "longformer": {"window_size": 3, "num_global_tokens": 4},
    "logsparse": {},
    "bigbird": {"window_size": 1, "num_global_tokens": 2, "num_random_keys": 2},
    "star": {},
}
# The targets at which Table 4 has dam_s with and without its diagonal.
DIAGONAL_TARGETS = (0.912, 0.935)
# The searches whose masks the paper shows, and the targets at its sparsities.
SHOWN = {"figure5": ("dam_u", 0.86), "figure6": ("dam_s", 0.935)}


@dataclass
class MasksStudy(SearchSettings):
    """
    Settings of the study: manual masks with and without their diagonal, searches with a penalty and with a target,
    dense attention, and at the targets random masks and windows with the special tokens of `dam_s`, with the settings
    of [`SearchSettings`]. The targets are the sparsities of the paper's learned masks, and that of logsparse, near
    which is also that of longformer.

    Args:
        searches (`list[str]`): Searches to run, keys of `SEARCHES`.
        penalties (`list[float]`): Weights lambda of the penalty, for each search.
        targets (`list[float]`): Sparsities of the searches with a target, the random masks and the windows.
        variants (`list[str]`): How searches with a target learn, keys of `SEARCH_VARIANTS`.
    """

    searches: list[str] = field(default_factory=lambda: ["dam_s", "dam_u"])
    penalties: list[float] = field(default_factory=lambda: [1e-6, 1e-5, 1e-4, 1e-3])
    targets: list[float] = field(default_factory=lambda: [0.8, 0.86, 0.898, 0.912, 0.935])
    variants: list[str] = field(default_factory=lambda: ["mask", "layers", "probs"])


def _cells(settings):
    systems: dict[str, tuple[str, dict[str, Any]]] = {"dense": ("dense", {"pattern": "dense"})}
    for pattern, parameters in MANUAL.items():
        for diagonal, suffix in (("keep", ""), ("remove", "_no_diag")):
            model = {"pattern": pattern, "pattern_kwargs": parameters, "diagonal": diagonal}
            systems[f"{pattern}{suffix}"] = (pattern, model)
    for variant in settings.variants:
        check_choice("variants", variant, tuple(SEARCH_VARIANTS))
    for search in settings.searches:
        common = {"search": search, "mask_logit_scale": settings.mask_logit_scale}
        for penalty in settings.penalties:
            systems[f"{search}_lambda_{penalty:g}"] = (search, common | {"sparsity_weight": penalty})
        for target, variant in product(settings.targets, settings.variants):
            fields = target_search(vars(settings), search, target, variant)
            name, series = (search, search) if variant == "mask" else (f"{search}_{variant}", f"{search}, {variant}")
            systems[f"{name}_target_{target:g}"] = (f"{series}, target", fields)
            if name == "dam_s" and target in DIAGONAL_TARGETS:
                for diagonal, value in (("keep_diag", "keep"), ("no_diag", "remove")):
                    kind = (f"{series}, target, {diagonal}", fields | {"diagonal": value})
                    systems[f"{name}_{diagonal}_target_{target:g}"] = kind
    for target in settings.targets:
        systems[f"random_{target:g}"] = ("random", {"pattern": "random", "pattern_kwargs": {"sparsity": target}})
        window = matched_pattern("window", target, settings.max_length, 1).metadata["pattern_parameters"]
        systems[f"window_{target:g}"] = ("window", {"pattern": "window", "pattern_kwargs": window})
    common = common_settings(settings, of=ContinuedSettings)
    common |= {name: getattr(settings, name) for name in ("search_end", "start_from_attention")}
    result = {}
    for seed in settings.seeds:
        for system, (series, model) in systems.items():
            own = model | ({"mask_seed": seed} if model.get("pattern") in ("longformer", "bigbird", "random") else {})
            result[f"{system}_seed_{seed}"] = common | {"system": system, "series": series, "model": own, "seed": seed}
    return result


def _run(cell, folder):
    """Continue the pre-training through the mask of a cell, which is given or found on the way."""
    data: dict[str, Any] = {"search_end": cell["search_end"]} if "search" in cell["model"] else {}
    if "target_sparsity" in cell["model"]:
        data["start_from_attention"] = cell["start_from_attention"]
    return continue_training(cell, folder, data, cell["model"])


def _is_shown(cell, search, target):
    return cell["system"] == f"{search}_target_{target:g}"


def _keep(cell, folder):
    """The mask of a cell that a figure shows."""
    if not any(_is_shown(cell, *shown) for shown in SHOWN.values()) or not (folder / MASK_CONFIG_NAME).is_file():
        return {}
    mask = SparseMask.from_pretrained(folder)
    with tempfile.TemporaryDirectory() as place:
        # Alone, without the path of the model that it was learned with.
        mask.replace(metadata={"search": cell["model"]["search"]}).save_pretrained(place)
        return {name: Path(place, name).read_bytes() for name in (MASK_CONFIG_NAME, MASK_WEIGHTS_NAME)}


def _draw(finished: Cells, kept: Path, path: Path, *, search: str, target: float) -> None:
    """The mask that a search with a target found, of the first seed of which it was kept."""
    shown = {name: cell["settings"] for name, cell in finished.items() if _is_shown(cell["settings"], search, target)}
    found = {cell["seed"]: kept / name for name, cell in shown.items() if (kept / name / MASK_CONFIG_NAME).is_file()}
    if found:
        seed = min(found)
        plot_heads(SparseMask.from_pretrained(found[seed]), path, f"{search}, target {target:.1%}, seed {seed}")


def _summary(finished: Cells) -> list[Table]:
    """
    The losses of all systems, what masks lose without their diagonal, and what searches with a target lose less than
    windows that are as sparse.
    """
    losses = by_seed(finished, "mlm_loss", "system")
    searches = {name: own for name, own in losses.items() if "_target_" in name}
    compared = compare_seeds({name: (own, window_losses(finished, name)) for name, own in searches.items()}, 3)
    rows = [
        {"system": name, "loss minus that of a window as sparse": difference, "p (Holm)": p}
        for name, (difference, p) in sorted(compared.items())
    ]
    note = (
        "a window as sparse: windows do not come in every sparsity; their loss is taken from the straight line "
        "through the two that are nearest, seed by seed"
    )
    return [
        loss_table(finished, "Manual and learned masks (Tables 3 and 4)", "dense"),
        *_diagonals(losses),
        *([Table.of("Learned masks compared with windows", rows, (note, COMPARED))] if rows else []),
    ]


def _diagonals(losses):
    """Table 4 of the paper, as far as both masks of a pair were run with the same seed."""
    pairs = {name: (name, f"{name}_no_diag") for name in MANUAL}
    for target in DIAGONAL_TARGETS:
        pairs[f"dam_s, target {target:g}"] = (f"dam_s_keep_diag_target_{target:g}", f"dam_s_no_diag_target_{target:g}")
    found = {name: tuple(losses.get(system, {}) for system in pair) for name, pair in pairs.items()}
    compared = compare_seeds({name: (without, kept) for name, (kept, without) in found.items()}, 3)
    rows, published = [], _TABLE3 | _TABLE4
    for name, numbers in found.items():
        seeds = sorted(numbers[0].keys() & numbers[1].keys())
        if not seeds:
            continue
        kept, without = ([own[seed] for seed in seeds] for own in numbers)
        row = {"mask": name, "MLM loss": mean_text(kept, 3), "without the diagonal": mean_text(without, 3)}
        row["difference"], row["p (Holm)"] = compared.get(name, (f"{without[0] - kept[0]:+.3f}", ""))
        row |= {"seeds": str(len(seeds)), "GLUE, paper": f"{published[pairs[name][0]]:.1f}"}
        rows.append(row | {"without, paper": f"{published[pairs[name][1]]:.1f}"})
    return [Table.of("Masks without their diagonal (Table 4)", rows, (COMPARED,))] if rows else []


def window_losses(finished: Cells, system: str) -> Seeds:
    """
    The loss of a window that is as sparse as the mask of a system, by seed: on the straight line through the two
    windows of this seed that are nearest in sparsity, or that of the only one.
    """
    points: dict[int, dict[float, float]] = {}  # near targets may have the same window
    for cell in finished.values():
        settings, metrics = cell["settings"], cell["metrics"]
        if settings["system"].startswith("window_"):
            points.setdefault(settings["seed"], {})[metrics["sparsity"]] = metrics["mlm_loss"]
    losses = {}
    for seed, sparsity in of_system(finished, "sparsity", system=system).items():
        if line := sorted(points.get(seed, {}).items(), key=lambda point: abs(point[0] - sparsity))[:2]:
            x, y = np.transpose(line)
            losses[seed] = float(np.polyval(np.polyfit(x, y, len(line) - 1), sparsity))
    return losses


# GLUE dev averages.
_TABLE3 = {
    "strided": 79.5, "fixed": 79.7, "longformer": 80.1, "logsparse": 77.9, "bigbird": 79.4, "star": 78.9,
    "dam_u_target_0.8": 81.3, "dam_u_target_0.86": 80.8, "dam_s_target_0.912": 80.9, "dam_s_target_0.935": 79.6,
}  # fmt: skip
_TABLE4 = {
    "strided_no_diag": 80.2, "fixed_no_diag": 79.6, "longformer_no_diag": 80.1, "logsparse_no_diag": 77.8,
    "bigbird_no_diag": 79.5, "star_no_diag": 78.6, "dam_s_keep_diag_target_0.912": 80.5,
    "dam_s_keep_diag_target_0.935": 79.3, "dam_s_no_diag_target_0.912": 80.9, "dam_s_no_diag_target_0.935": 79.6,
}  # fmt: skip

EXPERIMENT = Experiment(
    title="Manual and learned masks ([S] Tables 3 and 4, Figure 4)",
    arguments=MasksStudy,
    scales={"tiny": {}, "paper": PAPER | {"target_logit_scale": 10.0}},
    cells=_cells,
    check=check_continued,
    run=_run,
    columns={
        "sparsity": ("removed", "{:.1%}"),
        "mlm_loss": ("MLM loss", "{:.3f}"),
        "mlm_accuracy": ("MLM accuracy", "{:.1%}"),
        "glue": ("GLUE dev average", "{:.1f}"),
        "train_seconds": ("training, s by the clock", "{:.0f}"),
    },
    plot=("sparsity", "mlm_loss", "series"),
    published={system: {"glue": value} for system, value in (_TABLE3 | _TABLE4).items()},
    notes=(
        "The paper's figures are GLUE dev averages after full fine-tuning; ours are held-out losses",
        "The paper's learned masks have lambda from 1e-4 to 1e-1; its figures stand at the target of that sparsity. "
        "Its dam_s with the diagonal are the same masks and the diagonal, 90.4 and 92.7 % removed; ours are searched "
        "with the diagonal kept or removed, for the same target. In dam_s_target the search decides on it",
        "With lambda a search is the paper's: samples, and a start at which all positions are alike. With a target it "
        "is this library's, and trains the mask that freezing would give (probs: P itself), by default from what the "
        "checkpoint attends to. Masks are symmetric and the same in all layers (layers: neither). The steps of a "
        "search count: manual masks have all of theirs for training",
        "Always global: the first and last token in dam_s, bigbird and window, the first in star, none in the other "
        "systems but for four random tokens in longformer. The paper has no window",
    ),
    summary=_summary,
    keep=_keep,
    pictures={name: partial(_draw, search=search, target=target) for name, (search, target) in SHOWN.items()},
    smallest=SMALLEST | {"targets": [0.5]},
)
