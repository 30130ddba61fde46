"""
Which mask search learns fastest and best on the first plateau of the loss: for each setting a search, and a fresh
model trained through the mask that it found; beside them dense, and every manual mask at the same sparsity.
"""

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsebert.analysis.pictures.figures import COLORS, new_figure, save_figure
from sparsebert.analysis.tables import Table
from sparsebert.checks import check_choice
from sparsebert.masks.matched import VARIED, matched_patterns
from sparsebert.training.pretraining.pretraining_run import pretrain

from ..harness.experiment import Cells, Experiment, common_settings
from .recipe_runs import SMALLEST, RecipeSettings, cell_recipe, check_recipe, file_name


RECIPE = "demo_dam_s"
SPARSITY = 0.92
LENGTH, HEADS = 128, 4
MANUAL = ("dense", *VARIED, "window without diagonal")
PAPER = {"initial_decay": 0, "mask_form": "additive", "hard": True, "noise_scale": 1, "temperature_end": 1}
TARGET = {
    "target_sparsity": SPARSITY,
    "initial_decay": 0,
    "initial_sparsity": 0.5,
    "sparsity_warmup": 0,
    "sparsity_ramp": 0.4,
}
ANNEALED = TARGET | {"mask_form": "log", "hard": False, "noise_scale": 0, "temperature_end": 0.1}
SOFT = ANNEALED | {"mask_form": "additive", "mask_constant": 10}
LOCAL = ANNEALED | {"initial_decay": 2, "initial_sparsity": SPARSITY}
EARLY = {"search_end": 0.4}
NO_DIAGONAL_30 = {"diagonal": "remove", "mask_logit_scale": 30}
# Name to fields of the recipe. Those without a target are frozen at the same sparsity.
SEARCHES: dict[str, dict[str, Any]] = {
    "penalty 1e-4 (paper)": PAPER | {"sparsity_weight": 1e-4},
    "no penalty": PAPER | {"sparsity_weight": 0},
    "hard samples, additive": PAPER | TARGET,
    "annealed": ANNEALED,
    "annealed, frozen at 40 %": ANNEALED | EARLY,
    "annealed, frozen at 20 %": ANNEALED | {"search_end": 0.2},
    "annealed, additive c = 10": SOFT,
    "annealed, additive c = 10, frozen at 40 %": SOFT | EARLY,
    "annealed, additive c = 10, frozen at 70 %": SOFT | {"search_end": 0.7},
    "annealed, constant temperature": ANNEALED | {"temperature_end": 1},
    "annealed, dense warm-up": ANNEALED | {"initial_sparsity": 0, "sparsity_warmup": 0.1},
    "annealed, sparse at once": ANNEALED | {"initial_sparsity": SPARSITY},
    "annealed, slow ramp": ANNEALED | {"sparsity_ramp": 0.8},
    "annealed, logit scale 3": ANNEALED | {"mask_logit_scale": 3},
    "annealed, logit scale 30": ANNEALED | {"mask_logit_scale": 30},
    "local start": LOCAL,
    "local start, frozen at 40 %": LOCAL | EARLY,
    "local start, frozen at 70 %": LOCAL | {"search_end": 0.7},
    "local start, decay 3, frozen at 40 %": LOCAL | EARLY | {"initial_decay": 3},
    "local start, decay 5, frozen at 40 %": LOCAL | EARLY | {"initial_decay": 5},
    "local start, decay 8, frozen at 40 %": LOCAL | EARLY | {"initial_decay": 8},
    "local start, no diagonal, frozen at 40 %": LOCAL | EARLY | {"diagonal": "remove"},
    "local start, logit scale 30, frozen at 40 %": LOCAL | EARLY | {"mask_logit_scale": 30},
    "local start, no diagonal, logit scale 30, frozen at 40 %": LOCAL | EARLY | NO_DIAGONAL_30,
    "local start, decay 1, no diagonal, logit scale 30, frozen at 40 %": LOCAL
    | EARLY
    | NO_DIAGONAL_30
    | {"initial_decay": 1},
    "local start, mask per layer, frozen at 40 %": LOCAL | EARLY | {"share_layers": False},
}


@dataclass
class SearchStudy(RecipeSettings):
    """
    Settings of the study, with those of [`RecipeSettings`] for the recipe `demo_dam_s`.

    Args:
        budgets (`list[int]`): Numbers of training steps.
        tokens (`int`): Tokens to read per step, so that none is seen twice.
        searches (`list[str]`): Keys of `SEARCHES`.
        manual (`list[str]`): `"dense"` and manual masks, of `MANUAL`.
        seeds (`list[int]`): Seeds of the weights, the order of the text, the masking and the search.
    """

    budgets: list[int] = field(default_factory=lambda: [300, 900])
    tokens: int = 2100
    searches: list[str] = field(default_factory=lambda: list(SEARCHES))
    manual: list[str] = field(default_factory=lambda: list(MANUAL))
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])


def _cells(settings):
    for name, allowed in (("searches", SEARCHES), ("manual", MANUAL)):
        for chosen in getattr(settings, name):
            check_choice(name, chosen, tuple(allowed))
    common = common_settings(settings, "budgets", "searches", "manual")
    return {
        f"{steps}_{kind}_{file_name(name)}_seed_{seed}": common
        | {"kind": kind, "system": name, "max_steps": steps, "seed": seed}
        for steps in settings.budgets
        for seed in settings.seeds
        for kind, names in (("search", settings.searches), ("manual", settings.manual))
        for name in names
    }


def _fields(cell):
    """Fields of the search of a cell; without a target it is frozen at the same sparsity."""
    fields = {"search": "dam_s", "target_sparsity": None, "search_end": 1} | SEARCHES[cell["system"]]
    fields["freeze_sparsity"] = SPARSITY if fields["target_sparsity"] is None else None
    return _budget(cell) | fields


def _budget(cell):
    return {"max_steps": cell["max_steps"], "max_tokens": cell["tokens"] * cell["max_steps"]}


def _check(cell):
    check_recipe(cell, RECIPE, _fields(cell) if cell["kind"] == "search" else _budget(cell))


def _run(cell, folder):
    """A search, if there is one, and training from scratch through its mask or a manual one."""
    metrics: dict[str, Any] = {}
    mask: dict[str, Any] = {"pattern": "dense"}
    logs = folder / "through_mask"
    if cell["kind"] == "search":
        logs = folder / "search"
        found = pretrain(cell_recipe(cell, RECIPE, logs, _fields(cell)))
        metrics |= {"search_loss": found["mlm_loss"], "sparsity": found["sparsity"]}
        metrics["undecided"] = found["search_outcome"]["undecided"]
        mask = {"mask": str(logs)}
    elif cell["system"] != "dense":
        masks = matched_patterns(SPARSITY, LENGTH, HEADS)
        masks["window without diagonal"] = masks["window"].without_diagonal()
        masks[cell["system"]].save_pretrained(folder / "mask")
        mask = {"mask": str(folder / "mask")}
    nothing_learned = {"search": None, "target_sparsity": None, "search_end": 1, "freeze_sparsity": None}
    found = pretrain(cell_recipe(cell, RECIPE, folder / "through_mask", _budget(cell) | nothing_learned | mask))
    metrics = {"mask_loss": found["mlm_loss"], "sparsity": found["sparsity"]} | metrics
    history = json.loads((logs / "trainer_state.json").read_text())["log_history"]
    return metrics | {"losses": [[entry["step"], entry["loss"]] for entry in history if "loss" in entry]}


def _budgets(finished: Cells) -> dict[int, dict[tuple[str, str], list[dict[str, Any]]]]:
    """The metrics of all seeds, by steps and then by kind and system."""
    found: dict[int, dict[tuple[str, str], list[dict[str, Any]]]] = {}
    for cell in finished.values():
        settings = cell["settings"]
        key = settings["kind"], settings["system"]
        found.setdefault(settings["max_steps"], {}).setdefault(key, []).append(cell["metrics"])
    return found


def _summary(finished: Cells) -> list[Table]:
    """A table for each budget, the lowest loss first."""
    tables = []
    for steps, systems in _budgets(finished).items():
        rows = []
        for (_, name), runs in systems.items():
            losses = [[run[metric] for run in runs if metric in run] for metric in ("search_loss", "mask_loss")]
            row = {
                "mask": name,
                "removed": f"{100 * statistics.mean(run['sparsity'] for run in runs):.1f} %",
                "search, then through its mask": _mean_text(losses[0]),
                "from scratch through the mask": _mean_text(losses[1]),
            }
            if losses[0]:
                row["undecided"] = f"{100 * statistics.mean(run['undecided'] for run in runs):.1f} %"
            rows.append((min(statistics.mean(values) for values in losses if values), row))
        notes = ("Deviation and number of seeds where there are several.",)
        title = f"{steps} steps: held-out MLM loss, best first"
        tables.append(Table.of(title, [row for _, row in sorted(rows, key=lambda item: item[0])], notes))
    return tables


def _mean_text(values):
    if not values:
        return ""
    text = f"{statistics.mean(values):.3f}"
    return text if len(values) < 2 else f"{text} ± {statistics.stdev(values):.3f} ({len(values)})"


def _draw(finished: Cells, path: Path, title: str) -> None:
    """Training loss along the searches at the longest budget, first seed of each."""
    steps, systems = max(_budgets(finished).items())
    figure = new_figure(10, 5, "constrained")
    axis = figure.subplots()
    shown = [("manual", name) for name in ("dense", "window", "bigbird", "longformer")]
    # A loss with a penalty in it is no loss to compare.
    shown += [key for key in systems if key[0] == "search" and "target_sparsity" in SEARCHES[key[1]]]
    lines = {name: systems[kind, name][0]["losses"] for kind, name in shown if (kind, name) in systems}
    for index, (name, losses) in enumerate(lines.items()):
        style = "--" if index >= len(COLORS) else "-"
        axis.plot(*zip(*losses, strict=True), style, color=COLORS[index % len(COLORS)], lw=1.2, label=name)
    if lines:  # after the first tenth all are alike
        first = next(iter(lines.values()))
        axis.set_ylim(top=next((loss for step, loss in first if step >= steps / 10), None))
    axis.set_title(f"{title}: MLM loss while the mask is learned ({SPARSITY:.0%} removed in the end, {steps} steps)")
    axis.set_xlabel("step")
    axis.set_ylabel("training loss (nats per masked token)")
    axis.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    save_figure(figure, path)


EXPERIMENT = Experiment(
    title="Searches on the first plateau",
    arguments=SearchStudy,
    cells=_cells,
    check=_check,
    run=_run,
    columns={
        "search_loss": ("loss of the search", "{:.3f}"),
        "mask_loss": ("from scratch through the mask", "{:.3f}"),
        "sparsity": ("removed", "{:.1%}"),
        "undecided": ("undecided", "{:.1%}"),
    },
    plot=("max_steps", "mask_loss", "system"),
    draw=_draw,
    summary=_summary,
    smallest={
        "budgets": [4], "tokens": 300, "searches": ["annealed, frozen at 40 %"], "manual": ["window"],
        "fields": SMALLEST | {"logging_steps": 1},
    },
)  # fmt: skip
