"""Numbers of finished cells by system and seed, and how systems are compared: what the tables of experiments share."""

import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from sparsebert.analysis.tables import Table

from .experiment import Cells
from .result_charts import plot_values
from .seed_comparisons import COMPARED, compare_seeds, holm, mean_text, paired_difference


# A number by seed.
Seeds = dict[int, float]


def by_seed(finished: Cells, metric: str, *names: str, times: float = 1) -> dict[Any, Seeds]:
    """
    A metric, `times` a factor, by the settings of these names and then by seed, of the cells that have it. With one
    name the key is its value, with several a tuple. The random masks of a seed ("random_drop, draw 1") are one system.
    """
    drawn: dict[Any, dict[int, list[float]]] = {}
    for cell in finished.values():
        settings, metrics = cell["settings"], cell["metrics"]
        if metric in metrics:
            key = tuple(_system(settings[name]) for name in names)
            drawn.setdefault(key if len(key) > 1 else key[0], {}).setdefault(settings["seed"], []).append(
                metrics[metric]
            )
    return {
        key: {seed: times * statistics.fmean(values) for seed, values in found.items()} for key, found in drawn.items()
    }


def _system(value):
    return value.partition(", draw ")[0] if isinstance(value, str) else value


def of_system(finished: Cells, metric: str, **settings: Any) -> Seeds:
    """A metric by seed, of the cells that have it and these settings."""
    return {
        cell["settings"]["seed"]: cell["metrics"][metric]
        for cell in finished.values()
        if metric in cell["metrics"] and all(cell["settings"].get(name) == value for name, value in settings.items())
    }


def mean(numbers: Seeds) -> float:
    """Mean over seeds."""
    return statistics.fmean(numbers.values())


def against(values: Mapping[Any, Seeds], digits: int, baseline: Callable[[Any], Any]) -> dict[Any, tuple[str, str]]:
    """Every system compared with its baseline, see [`compare_seeds`]; `baseline` maps the key of one to the other."""
    return compare_seeds(
        {key: (own, values.get(baseline(key), {})) for key, own in values.items() if key != baseline(key)}, digits
    )


def with_task_mean(scores: Mapping[str, Mapping[str, Seeds]]) -> dict[str, Mapping[str, Seeds]]:
    """
    Scores by task and system, with the task `"mean"` over all of them, for the seeds that have all. Tasks with a
    single seed, which would leave one seed of the others, are left out of it if at least two tasks have several.
    """
    several = {task: systems for task, systems in scores.items() if all(len(seeds) > 1 for seeds in systems.values())}
    tasks = list((several if len(several) > 1 else scores).values())
    means = {}
    for system, values in tasks[0].items():
        seeds = [seed for seed in values if all(seed in of_task.get(system, {}) for of_task in tasks)]
        if seeds:
            means[system] = {seed: statistics.fmean(of_task[system][seed] for of_task in tasks) for seed in seeds}
    return {**scores, "mean": means} if means and len(tasks) > 1 else dict(scores)


def nested(values: Mapping[tuple[Any, Any], Seeds]) -> dict[Any, dict[Any, Seeds]]:
    """Numbers by two keys, one inside the other."""
    result: dict[Any, dict[Any, Seeds]] = {}
    for (outer, inner), numbers in values.items():
        result.setdefault(outer, {})[inner] = numbers
    return result


def draw_panels(values: Mapping[Any, Mapping[str, Seeds]], path: Path, title: str, reference: str) -> None:
    """Plot numbers by name, a panel per label."""
    panels = {label: {name: list(own.values()) for name, own in found.items()} for label, found in values.items()}
    plot_values(panels, path, title, reference)


def loss_table(finished: Cells, title: str, baseline: str) -> Table:
    """Held-out loss of masked tokens by system, the lowest first, and the paired difference to a baseline."""
    losses, removed = by_seed(finished, "mlm_loss", "system"), by_seed(finished, "sparsity", "system")
    compared = against(losses, 3, lambda _: baseline)
    rows = []
    for system, ours in sorted(losses.items(), key=lambda item: mean(item[1])):
        row = {"system": system, "removed": f"{mean(removed[system]):.1%}", "MLM loss": mean_text(ours.values(), 3)}
        if system in compared:
            row[f"minus {baseline}"], row["p (Holm)"] = compared[system]
        rows.append(row | {"seeds": str(len(ours))})
    notes = (
        "MLM loss: on held-out text, through the frozen mask; ±: deviation over seeds, which vary the order of the "
        f"text, the masking, random masks and searches, and not the checkpoint or the held-out text; {COMPARED}",
    )
    return Table.of(title, rows, notes)


def compared_texts(scores: Mapping[Any, tuple[Iterable[float], Iterable[float]]]) -> dict[Any, tuple[str, str]]:
    """
    Pairs of systems compared over the texts that both were scored on: the difference with its interval, and P
    corrected for all of them.
    """
    tests = {key: paired_difference(list(ours), list(theirs)) for key, (ours, theirs) in scores.items()}
    corrected = holm([test["p"] for test in tests.values()])
    return {
        key: ("{difference:+.3f} [{low:+.3f}, {high:+.3f}]".format(**test), f"{p:.2g}")
        for (key, test), p in zip(tests.items(), corrected, strict=True)
    }
