"""
The tables and figures of the papers as experiments that `python -m sparsebert.reproduce NAME` runs. A new one is a row
of [`EXPERIMENTS`] and a module with what it names.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from . import copying, language_modelling, mixers, translation


@dataclass(frozen=True)
class Experiment:
    """
    A table or figure: cells that are run one by one, and what the paper found.

    Attributes:
        title (`str`):
            Of table and plot.
        arguments (`type`):
            Dataclass of the settings, each of them a flag of the command.
        scales (`dict[str, dict]`):
            By name of the scale, the settings that differ from the defaults of the dataclass.
        cells (`Callable[[object], dict[str, dict]]`):
            From the settings, all that defines each cell, by its name, as JSON values. A finished cell is taken over
            where these are equal.
        check (`Callable[[dict], None]`):
            Raises a `ValueError` for a cell that cannot run, without running it.
        run (`Callable[[dict, Path], dict]`):
            Runs a cell in a folder of its own, emptied before, and returns its metrics.
        columns (`dict[str, tuple[str, str]]`):
            Metrics of the table: heading and format, such as `("accuracy", "{:.1%}")`.
        plot (`tuple[str, str, str]`):
            Names, among a cell's metrics and settings, of horizontal axis, vertical axis and the line that a cell
            belongs to.
        published (`dict[str, dict]`):
            The paper's metrics by cell.
        layout (`tuple[str, str, str]`, *optional*):
            Names of what makes the rows, the columns and the entries of a second table, laid out as the paper's.
        notes (`tuple[str, ...]`):
            Lines below the table.
    """

    title: str
    arguments: type
    scales: dict
    cells: "Callable[[object], dict[str, dict]]"
    check: "Callable[[dict], None]"
    run: Callable
    columns: dict
    plot: tuple
    published: dict = field(default_factory=dict)
    layout: tuple | None = None
    notes: tuple = ()


EXPERIMENTS = {
    "copying": Experiment(**copying.EXPERIMENT),
    "language_modelling": Experiment(**language_modelling.EXPERIMENT),
    "translation": Experiment(**translation.EXPERIMENT),
    "mixers": Experiment(**mixers.EXPERIMENT),
}
