"""Tables of runs that differ in their seed alone, or in the weight of the penalty alone."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...checks import check_installed
from ...recipe_files import stored_recipe
from ..statistics import CONFIDENCE, summarize
from ..tables import Table
from .reports import RECOVERED, distinct_names, own_mask


# What a seed decides, and the weight of the penalty.
_SEEDS = {"model": ("mask_seed",), "training": ("seed", "data_seed")}
_PENALTY = "sparsity_weight"
# What the metrics of a run without a recorded recipe say of it.
_SETTINGS = ("model", "task", "mask", "search", "share_layers", "steps", "recover", "objectives", "bf16", "pattern")


def seeds_table(runs: Mapping[Path, dict[str, Any]]) -> Table:
    """
    Mean, deviation and 95 % interval (Student's t) of the numbers of runs from [`read_metrics`] that differ in nothing
    but their seed.
    """
    check_intervals()
    found = [_numbers(metrics) for metrics in runs.values()]
    if len(found) < 2 or len({frozenset(numbers) for numbers in found}) > 1 or not found[0]:
        raise ValueError(
            "--seeds needs two or more pre-trainings, searches or translations of one recipe, got "
            f"{', '.join(map(str, runs)) or 'none'}"
        )
    check_one_recipe(runs)
    from scipy import stats

    rows = []
    for name in found[0]:
        values = [numbers[name] for numbers in found]
        mean, std = summarize(values)["mean"], summarize(values)["std"]
        half = stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * std / len(values) ** 0.5
        interval = f"[{mean - half:.4g}, {mean + half:.4g}]"
        rows.append({"number": name, "mean": f"{mean:.4g}", "deviation": f"{std:.2g}", "95 % interval": interval})
    return Table.of(f"Mean of {len(found)} runs", rows, [", ".join(distinct_names([*runs]))])


def check_intervals() -> None:
    """Check that intervals can be computed here."""
    check_installed("an interval", "scipy")


def check_one_recipe(runs: Mapping[Path, dict[str, Any]]) -> None:
    """Check that runs are of one recipe with different seeds, as far as their folders and metrics say."""
    first: tuple[Path, dict[str, Any]] | None = None
    seeds: dict[Any, Path] = {}
    for folder, metrics in runs.items():
        recipe = stored_recipe(folder)
        if (seed := (recipe or {}).get("training", {}).get("seed")) is not None:
            if seed in seeds:
                raise ValueError(f"{folder}: seed {seed} is also that of {seeds[seed]}: no second seed of one recipe")
            seeds[seed] = folder
        settings = {name: metrics[name] for name in _SETTINGS if name in metrics} if recipe is None else _flat(recipe)
        first = first or (folder, settings)
        for name in sorted(settings.keys() & first[1].keys()):
            if settings[name] != first[1][name]:
                raise ValueError(
                    f"{folder}: {name} is {settings[name]!r}, but {first[1][name]!r} in {first[0]}; runs that are "
                    "averaged must differ in nothing but the seed"
                )


def _flat(recipe):
    """The fields of a recipe that a seed does not decide; the rows that it draws are among its inputs."""
    return {
        f"{section}.{name}": value
        for section, fields in recipe.items()
        for name, value in fields.items()
        if section != "inputs" and name not in _SEEDS.get(section, ())
    }


def penalty_tables(runs: Mapping[Path, dict[str, Any]]) -> list[Table]:
    """
    For pre-trainings from [`read_metrics`] that differ in lambda, the weight of the penalty, and maybe their seed:
    what each lambda removed, and the loss. There is a table for each recipe with several of them.
    """
    groups: dict[str, dict[float, dict[Path, dict[str, Any]]]] = {}
    for folder, metrics in runs.items():
        settings = _flat(stored_recipe(folder) or {}) if "positions" in metrics else {}
        penalty, has_target = (
            settings.pop(f"model.{_PENALTY}", None),
            settings.get("model.target_sparsity") is not None,
        )
        if penalty is None or settings.get("model.search") is None or has_target:
            continue
        cells = groups.setdefault(json.dumps(settings, sort_keys=True), {})
        cells.setdefault(penalty, {})[folder] = metrics
    return [_penalty_table(cells) for cells in groups.values() if len(cells) > 1]


def _penalty_table(cells):
    rows = []
    for penalty in sorted(cells):
        found = [_numbers(metrics) for metrics in cells[penalty].values()]
        row = {"lambda": f"{penalty:g}", "runs": str(len(found))}
        for name in found[0].keys() & set.intersection(*map(set, found)):
            row[name] = _mean(name, [numbers[name] for numbers in found])
        rows.append({name: row[name] for name in ("lambda", "runs", *found[0]) if name in row})
    names = ", ".join(distinct_names([folder for cell in cells.values() for folder in cell]))
    note = f"{names}; several seeds: mean ± deviation"
    return Table.of("What lambda, the weight of the penalty, removes", rows, [note])


def _mean(name, values):
    scale, unit, summary = (100, " %", summarize(values)) if name == "sparsity" else (1, "", summarize(values))
    deviation = f" ± {scale * summary['std']:.2g}" if "std" in summary else ""
    return f"{scale * summary['mean']:.4g}{deviation}{unit}"


def _numbers(metrics):
    """What is averaged over seeds; a fine-tuning averages its own."""
    if "agreement" in metrics:
        own = own_mask(metrics.get("mask"))
        named = {"sparsity": metrics["sparsity"][own]} | {
            f"{name} ({key})": metrics["agreement"][name].get(key)
            for name in (own, RECOVERED.format(own))
            for key in ("cosine", "mlm_loss", "score")
            if name in metrics["agreement"]
        }
    else:
        keys = ("sparsity", "mlm_loss", "mlm_accuracy", "perplexity", "nsp_accuracy", "bleu", "loss")
        named = {} if "task" in metrics or "glue" in metrics else {key: metrics.get(key) for key in keys}
    return {name: value for name, value in named.items() if value is not None}
