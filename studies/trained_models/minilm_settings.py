"""
Settings of the search and the recovery of a trained sentence encoder: each is changed alone, and compared with what
the settings of `minilm` give: those of the search before recovery, those of the recovery after it.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsebert.analysis.tables import Table
from sparsebert.checks import nearest

from ..harness.comparisons import Seeds, against, by_seed, draw_panels
from ..harness.experiment import Cells, Experiment, unseeded
from ..harness.seed_comparisons import COMPARED, mean_text
from . import minilm
from .minilm import SEARCHED_MASKS, MiniLMStudy


UNCHANGED = "unchanged"
# Settings of the search, by the name of the change.
SEARCH_CHANGES: dict[str, dict[str, Any]] = {
    "steps_20": {"steps": 20},
    "steps_200": {"steps": 200},
    "rate_0.02": {"learning_rate": 0.02},
    "rate_0.15": {"learning_rate": 0.15},
    "objective_layers": {"objective": "layers"},
    "objective_layers_pooled": {"objective": "layers_pooled"},
    "objective_last": {"objective": "last"},
    "objective_attention": {"objective": "attention"},
    "objective_relations": {"objective": "relations"},
    "budget_per_head": {"sparsity_scope": "head"},
    "budget_per_head_objective_layers": {"sparsity_scope": "head", "objective": "layers"},
    "soft": {"hard": False},
    "soft_budget_per_head": {"hard": False, "sparsity_scope": "head"},
    "whole_batches": {"shortest": None},
    "shared_by_layers": {"share_layers": True},
    "dam_u": {"mask": "dam_u"},
    "dam_b": {"mask": "dam_b"},
    "vertical_slash": {"mask": "vertical_slash"},
    "no_rest": {"rest": "none"},
    "signed": {"symmetric": False},
    "special_columns": {"special_rows": False},
    "signed_special_columns": {"symmetric": False, "special_rows": False},
}
# Settings of the recovery, and those of the search that are judged after it; `bf16` applies to both.
RECOVERY_CHANGES: dict[str, dict[str, Any]] = {
    "recover_layers": {"recover_objective": "layers"},
    "recover_layers_pooled": {"recover_objective": "layers_pooled"},
    "recover_last": {"recover_objective": "last"},
    "recover_attention": {"recover_objective": "attention"},
    "recover_relations": {"recover_objective": "relations"},
    "recover_from_0.5": {"recover_from": 0.5},
    "recover_rate_3e-5": {"recover_learning_rate": 3e-5},
    "recover_rate_3e-4": {"recover_learning_rate": 3e-4},
    "recover_rate_1e-3": {"recover_learning_rate": 1e-3},
    "recover_600": {"recover": 600},
    "recover_signed": {"symmetric": False},
    "bf16": {"bf16": True},
}
# What the mask is worth without a recovery is seen in a fraction of the time.
CHANGES: dict[str, dict[str, Any]] = (
    {UNCHANGED: {}} | {name: change | {"recover": 0} for name, change in SEARCH_CHANGES.items()} | RECOVERY_CHANGES
)
# Changes, and the metric they are judged by, with its heading.
PARTS = {
    "search": (SEARCH_CHANGES, "cosine_before", "cosine before recovery"),
    "recovery": (RECOVERY_CHANGES, "cosine", "cosine after recovery"),
}


@dataclass
class MiniLMSettings(MiniLMStudy):
    """
    Settings that are changed one at a time, from those of [`MiniLMStudy`] with one mask.

    Args:
        changes (`list[str]`): Keys of `CHANGES`.
    """

    masks: list[str] = field(default_factory=lambda: ["dam_s"])
    recover: int = 150
    changes: list[str] = field(default_factory=lambda: list(CHANGES))


def _cells(settings):
    for name in settings.changes:
        if name not in CHANGES:
            raise nearest("changes", name, list(CHANGES))
    if len(settings.masks) != 1 or settings.masks[0] not in SEARCHED_MASKS:
        raise ValueError(f"masks must hold one of {', '.join(SEARCHED_MASKS)}, got {settings.masks!r}")
    return {
        f"{unseeded(name)}_{change}_seed_{cell['seed']}": minilm.used_fields(
            cell | CHANGES[change] | {"change": change}
        )
        for name, cell in minilm.whole_cells(settings).items()
        for change in settings.changes
    }


def _of_part(finished, metric, names, length, sparsity):
    """A metric of the unchanged settings and of some changes, by change and seed."""
    found = by_seed(finished, metric, "length", "sparsity", "change")
    return {name: found[length, sparsity, name] for name in (UNCHANGED, *names) if (length, sparsity, name) in found}


def _parts(finished):
    """Length, sparsity and key of `PARTS` of every table that there are cells for."""
    groups = sorted({(cell["settings"]["length"], cell["settings"]["sparsity"]) for cell in finished.values()})
    for length, sparsity in groups:
        for part, (names, *_) in PARTS.items():
            if any(
                (cell["settings"]["length"], cell["settings"]["sparsity"]) == (length, sparsity)
                and cell["settings"]["change"] in names
                for cell in finished.values()
            ):
                yield length, sparsity, part


def _summary(finished: Cells) -> list[Table]:
    """Per length and sparsity, a table of the search and one of the recovery: each change against the unchanged."""
    return [_summary_table(finished, *part) for part in _parts(finished)]


def _summary_table(finished, length, sparsity, part):
    names, metric, heading = PARTS[part]
    values, removed, seconds = (
        _of_part(finished, name, names, length, sparsity) for name in (metric, "removed", "cpu_seconds")
    )
    compared = against(values, 4, lambda _: UNCHANGED)
    rows = []
    for name, numbers in values.items():
        row = {"change": name, "removed": f"{next(iter(removed[name].values())):.1%}"}
        row[heading] = mean_text(numbers.values(), 4)
        row["minus unchanged"], row["p (Holm)"] = compared.get(name, ("", ""))
        row["CPU s"] = mean_text(seconds[name].values(), 0)
        rows.append(row | {"seeds": str(len(numbers))})
    notes = (f"cosine and seeds: see the experiment minilm; CPU s: of the whole cell; {COMPARED}",)
    return Table.of(
        f"{length} tokens, {sparsity:.0%} to remove: one setting of the {part} changed at a time", rows, notes
    )


def _draw(finished: Cells, path: Path, title: str) -> None:
    """What every change does to the search, and to the recovery."""
    panels: dict[str, dict[str, Seeds]] = {}
    for cell in finished.values():
        settings, metrics = cell["settings"], cell["metrics"]
        for names, metric, heading in PARTS.values():
            if settings["change"] in (UNCHANGED, *names):
                label = f"{heading}\n{settings['length']} tokens, {settings['sparsity']:.0%} to remove"
                panels.setdefault(label, {}).setdefault(settings["change"], {})[settings["seed"]] = metrics[metric]
    compared = {label: values for label, values in panels.items() if len(values) > 1}
    draw_panels(compared or panels, path, title, UNCHANGED)


EXPERIMENT = Experiment(
    title="Settings for the mask of a trained MiniLM",
    arguments=MiniLMSettings,
    scales=minilm.EXPERIMENT.scales,
    cells=_cells,
    check=minilm.check,
    run=minilm.run,
    columns={name: column for name, column in minilm.EXPERIMENT.columns.items() if name != "speed_up"},
    plot=("cosine_before", "cosine", "change"),
    draw=_draw,
    summary=_summary,
    smallest=minilm.EXPERIMENT.smallest | {"masks": ["dam_s"], "sparsities": [0.6]},
)
