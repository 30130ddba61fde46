"""How long the cells of an experiment will take, judged by those that are finished."""

import statistics
from collections.abc import Mapping
from typing import Any

from .experiment import Cells


# Settings that count steps. The time of a cell grows with their sum.
_STEPS = ("max_steps", "steps", "recover")


def estimate_seconds(cells: Cells, finished: Cells, line: str) -> float | None:
    """
    How many seconds cells will take, for each of them the median of the finished ones that are most like it: the
    setting `line`, the third name of [`Experiment`]'s `plot`, counts most, then the number of other settings that
    differ, but for the seed. Without what cells share, such as a checkpoint; `None` if no cell is finished.
    """
    known = [
        (cell["settings"], cell["metrics"]["seconds"] - cell["metrics"].get("shared_seconds", 0.0))
        for cell in finished.values()
        if "seconds" in cell["metrics"]
    ]
    if not known:
        return None
    total = 0.0
    for cell in cells.values():
        unlike = [_difference(cell, settings, line) for settings, _ in known]
        nearest = min(unlike)
        total += statistics.median(
            seconds * _num_steps(cell) / _num_steps(settings)
            for (settings, seconds), difference in zip(known, unlike, strict=True)
            if difference == nearest
        )
    return total


def _difference(cell, other, line):
    names = (cell.keys() | other.keys()) - {"seed"}
    return cell.get(line) != other.get(line), sum(cell.get(name) != other.get(name) for name in names)


def _num_steps(cell):
    return sum(cell.get(name, 0) for name in _STEPS) or 1


def describe_plan(name: str, cells: Cells, todo: Mapping[str, Any], finished: Cells, line: str) -> str:
    """What is done, what is to do, and how long that will take: a line to show before any work."""
    text = f"{name}: {len(cells) - len(todo)} of {len(cells)} cells are done, {len(todo)} to do"
    if not todo:
        return text
    seconds = estimate_seconds({cell: cells[cell] for cell in todo}, finished, line)
    if seconds is None:
        return f"{text}; no cell is finished yet to judge the time by, so the estimate follows after the first"
    return f"{text}, about {duration(seconds)}, judged by {len(finished)} finished"


def duration(seconds: float) -> str:
    """A time in words, such as `"45 min"`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
