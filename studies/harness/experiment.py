"""What an experiment is: a table or figure, as cells that are run one by one."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from sparsebert.analysis.tables import Table


# Settings or finished cells, by name of the cell.
Cells = Mapping[str, dict[str, Any]]


def seeded(cells: Cells, seeds: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Every cell with each of the seeds, which must be different; the name of the cell ends with its seed."""
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


def common_settings(settings: Any, *axes: str, of: type | None = None) -> dict[str, Any]:
    """The fields of a dataclass of settings, or of one that it is derived from, but for the seeds and `axes`."""
    names = [item.name for item in fields(of or type(settings)) if item.name not in ("seeds", *axes)]
    return {name: getattr(settings, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """
    A table or figure: of a paper, or of a question of our own.

    Attributes:
        title (`str`):
            Title of table and plot.
        arguments (`type`):
            Dataclass of the settings, each of which is a flag of the command.
        cells (`Callable[[arguments], dict[str, dict]]`):
            From the settings, makes the settings of each cell by its name, as JSON values. A finished cell is reused
            if they have not changed.
        run (`Callable[[dict, Path], dict]`):
            Runs a cell in an empty folder of its own and returns its metrics.
        columns (`dict[str, tuple[str, str]]`):
            Metrics in the table: heading and format, such as `("accuracy", "{:.1%}")`.
        plot (`tuple[str, str, str]`):
            Names, among a cell's settings and metrics, of the horizontal axis, the vertical axis and the line that a
            cell belongs to.
        scales (`dict[str, dict]`, *optional*):
            By name of the scale, the settings that differ from the defaults of the dataclass. There is one named
            `"tiny"`.
        check (`Callable[[dict], None]`, *optional*):
            Raises a `ValueError` or `OSError` for a cell that cannot run, without running it.
        draw (`Callable[[dict, Path, str], None]`, *optional*):
            Draws the plot of the finished cells to a path, with a title, where lines do not show them.
        published (`dict[str, dict]`, *optional*):
            The paper's metrics by cell, without its seed.
        layout (`tuple[str, str, str]`, *optional*):
            Names of rows, columns and entries of a second table, laid out like the paper's.
        baseline (`str`, *optional*):
            The cell, without its seed, that the others are compared with where there are several seeds.
        notes (`tuple[str, ...]`, *optional*):
            Lines below the table.
        summary (`Callable[[dict], list[Table]]`, *optional*):
            From the `"settings"` and `"metrics"` of the finished cells by name, makes tables that go before the one
            with a row per cell, such as means over seeds.
        keep (`Callable[[dict, Path], dict[str, bytes]]`, *optional*):
            From the settings of a finished cell and its folder, makes the small files that outlive the folder, by
            name, or none if they are no longer there. They lie in `EXPERIMENT_SCALE/CELL` beside the results.
        pictures (`dict[str, Callable[[dict, Path, Path], None]]`, *optional*):
            More pictures by name. Each function draws one from the finished cells and the folder `EXPERIMENT_SCALE`
            with what was kept of them, to the path of its file; it writes nothing if nothing was kept.
        smallest (`dict`, *optional*):
            Settings with which a cell of the scale `"tiny"` runs in seconds, for the tests.
    """

    title: str
    arguments: type
    cells: Callable[[Any], dict[str, dict[str, Any]]]
    run: Callable[[dict[str, Any], Path], dict[str, Any]]
    columns: dict[str, tuple[str, str]]
    plot: tuple[str, str, str]
    scales: dict[str, dict[str, Any]] = field(default_factory=lambda: {"tiny": {}})
    check: Callable[[dict[str, Any]], None] = lambda cell: None
    draw: Callable[[Cells, Path, str], None] | None = None
    published: dict[str, dict[str, float]] = field(default_factory=dict)
    layout: tuple[str, str, str] | None = None
    baseline: str | None = None
    notes: tuple[str, ...] = ()
    summary: Callable[[Cells], list[Table]] | None = None
    keep: Callable[[dict[str, Any], Path], dict[str, bytes]] | None = None
    pictures: dict[str, Callable[[Cells, Path, Path], None]] = field(default_factory=dict)
    smallest: dict[str, Any] = field(default_factory=dict)

    def paper(self, cell: str) -> dict[str, float]:
        """The paper's metrics of a cell."""
        return self.published.get(unseeded(cell), {})
