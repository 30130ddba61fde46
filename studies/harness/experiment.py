"""What an experiment is: one table or figure of a paper, as cells that are run one by one."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsebert.analysis.tables import Table


def seeded(cells: Mapping[str, dict[str, Any]], seeds: Sequence[int]) -> dict[str, dict[str, Any]]:
    """
    Every cell with each of the seeds, which its name ends with.

    Raises:
        ValueError: If a seed comes twice.
    """
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be different, got {list(seeds)}")
    return {f"{name}_seed_{seed}": cell | {"seed": seed} for seed in seeds for name, cell in cells.items()}


def unseeded(name: str) -> str:
    """The name of a cell without its seed."""
    return re.sub(r"(^|_)seed_\d+$", "", name)


def shared_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that all seeds of a cell have in common: those without its seed and what is derived from it."""
    kept = {name: value for name, value in settings.items() if name not in ("seed", "mask_seed")}
    return {name: shared_settings(value) if isinstance(value, Mapping) else value for name, value in kept.items()}


@dataclass(frozen=True)
class Experiment:
    """
    A table or figure of a paper.

    Attributes:
        title (`str`):
            Title of table and plot.
        arguments (`type`):
            Dataclass of the settings, each of which is a flag of the command.
        scales (`dict[str, dict]`):
            By name of the scale, the settings that differ from the defaults of the dataclass.
        cells (`Callable[[arguments], dict[str, dict]]`):
            From the settings, makes the settings of each cell by its name, as JSON values. A finished cell is reused
            if they have not changed.
        check (`Callable[[dict], None]`):
            Raises a `ValueError` or `OSError` for a cell that cannot run, without running it.
        run (`Callable[[dict, Path], dict]`):
            Runs a cell in an empty folder of its own and returns its metrics.
        columns (`dict[str, tuple[str, str]]`):
            Metrics in the table: heading and format, such as `("accuracy", "{:.1%}")`.
        plot (`tuple[str, str, str]`):
            Names, among a cell's settings and metrics, of the horizontal axis, the vertical axis and the line that a
            cell belongs to.
        draw (`Callable[[dict, Path, str], None]`, *optional*):
            Draws the plot of the finished cells to a path, with a title, where lines do not show them.
        published (`dict[str, dict]`):
            The paper's metrics by cell, without its seed.
        layout (`tuple[str, str, str]`, *optional*):
            Names of rows, columns and entries of a second table, laid out like the paper's.
        baseline (`str`, *optional*):
            The cell, without its seed, that the others are compared with where there are several seeds.
        notes (`tuple[str, ...]`):
            Lines below the table.
        summary (`Callable[[dict], list[Table]]`, *optional*):
            From the `"settings"` and `"metrics"` of the finished cells by name, makes tables that go before the one
            with a row per cell, such as means over seeds.
        keep (`Callable[[dict, Path], dict[str, bytes]]`, *optional*):
            From the settings of a finished cell and its folder, makes the small files that outlive the folder, by
            name, or none if they are no longer there. They lie in `EXPERIMENT_SCALE/CELL` beside the results.
        pictures (`dict[str, Callable[[dict, Path, Path], None]]`):
            More pictures by name. Each function draws one from the finished cells and the folder `EXPERIMENT_SCALE`
            with what was kept of them, to the path of its file; it writes nothing if nothing was kept.
    """

    title: str
    arguments: type
    scales: dict[str, dict[str, Any]]
    cells: Callable[[Any], dict[str, dict[str, Any]]]
    check: Callable[[dict[str, Any]], None]
    run: Callable[[dict[str, Any], Path], dict[str, Any]]
    columns: dict[str, tuple[str, str]]
    plot: tuple[str, str, str]
    draw: Callable[[Mapping[str, dict[str, Any]], Path, str], None] | None = None
    published: dict[str, dict[str, float]] = field(default_factory=dict)
    layout: tuple[str, str, str] | None = None
    baseline: str | None = None
    notes: tuple[str, ...] = ()
    summary: Callable[[Mapping[str, dict[str, Any]]], list[Table]] | None = None
    keep: Callable[[dict[str, Any], Path], dict[str, bytes]] | None = None
    pictures: dict[str, Callable[[Mapping[str, dict[str, Any]], Path, Path], None]] = field(default_factory=dict)

    def paper(self, cell: str) -> dict[str, float]:
        """The paper's metrics of a cell."""
        return self.published.get(unseeded(cell), {})
