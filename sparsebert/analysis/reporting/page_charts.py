"""Charts of runs for a web page, as SVG: quality against sparsity and against training time."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from .reports import RECOVERED, other_masks, own_mask


WIDTH, HEIGHT = 480, 320
RIGHT, TOP, BOTTOM = 16, 24, 52
# Marks of one chart differ in shape and color, and each has its number beside it.
SHAPES = (
    "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0Z",
    "M-5 -5H5V5H-5Z",
    "M0 -6L6 5H-6Z",
    "M0 -7L6 0L0 7L-6 0Z",
    "M0 6L6 -5H-6Z",
    "M-6 -2H-2V-6H2V-2H6V2H2V6H-2V2H-6Z",
)
# What is measured of a pre-training, and of a translation, by its name in the metrics.
_NUMBERS = {
    "mlm_loss": "pre-training: loss on masked words (lower is better)",
    "lm_loss": "pre-training: loss on next words (lower is better)",
    "bleu": "translation: BLEU",
}
# Units of time, the shortest that keeps the numbers below its limit.
UNITS = (("seconds", 1, 180), ("minutes", 60, 180 * 60), ("hours", 3600, math.inf))


@dataclass(frozen=True)
class Score:
    """What one run reached: a score in the unit of its chart, and its sample deviation over seeds."""

    run: str
    value: float
    deviation: float | None
    sparsity: float
    seconds: float | None

    def text(self) -> str:
        """The score, with its deviation if there is one."""
        return f"{self.value:.4g}" + ("" if self.deviation is None else f" ± {self.deviation:.2g}")


def scores(runs: Mapping[str, dict[str, Any]]) -> dict[str, list[Score]]:
    """
    Scores of runs' metrics that can be compared, by what was measured and in which unit. Those that are not finite are
    left out. A dense model that several searches began with counts once.
    """
    found: dict[str, list[Score]] = {}
    for run, metrics in runs.items():
        try:
            for what, score in scores_of(run, metrics):
                again = score.run == "dense" and score in found.get(what, ())
                if math.isfinite(score.value) and math.isfinite(score.sparsity) and not again:
                    found.setdefault(what, []).append(score)
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"{run}: its metrics are damaged or incomplete ({error!r})") from error
    return found


def scores_of(run: str, metrics: dict[str, Any]) -> Iterator[tuple[str, Score]]:
    """
    What was measured in a run, and its score. A search has one for the dense model, one for each state of its own mask
    and one for the best other mask.
    """
    if "agreement" in metrics:
        own, model = own_mask(metrics.get("mask")), metrics["model"]
        recovered = RECOVERED.format(own)
        others = other_masks(metrics)
        best = [max(others, key=lambda name: others[name]["cosine"])] if others else []
        for name in ("dense", own, recovered, *best):
            if (numbers := metrics["agreement"].get(name)) is None:
                continue
            label = {"dense": "dense", own: run, recovered: f"{run}, recovered"}.get(name, f"{run}: {name}")
            removed = metrics["sparsity"].get(name, metrics["sparsity"][own])
            seconds = metrics["seconds"]["total"] if name in (own, recovered) else None
            yield f"{model}: cosine with the dense model", Score(label, numbers["cosine"], None, removed, seconds)
            if "score" in numbers:
                yield f"{model}: {metrics['task']}", Score(label, 100 * numbers["score"], None, removed, seconds)
    elif "glue" in metrics:
        if (average := metrics.get("average_9")) is not None and metrics["glue"]:
            removed = next(iter(metrics["glue"].values()))["sparsity"]
            yield f"GLUE: average of {metrics['num_columns_9']} columns in %", _percent(run, average, removed, None)
        for values in metrics["glue"].values():
            yield from scores_of(run, values)
    elif "task" in metrics:
        name = metrics["main_metric"]
        for split, values in metrics["splits"].items():
            if values.get(name) is not None:
                score = _percent(run, values[name], metrics["sparsity"], metrics["train_seconds"])
                yield f"{metrics['task']}, {split}: {name} in %", score
    else:
        seconds = metrics.get("train_seconds", metrics.get("seconds"))
        for name, what in _NUMBERS.items():
            if metrics.get(name) is not None:
                yield what, Score(run, metrics[name], None, metrics["sparsity"], seconds)


def _percent(run, value, sparsity, seconds):
    """A score from a share, or from the mean and deviation of shares over seeds."""
    value = value if isinstance(value, dict) else {"mean": value}
    deviation = None if value.get("std") is None else 100 * value["std"]
    return Score(run, 100 * value["mean"], deviation, sparsity, seconds)


def score_figures(what: str, found: list[Score]) -> str:
    """The charts of one kind of score and the list of its runs, in HTML."""
    label, removed = "sparsity: entries of the mask removed, in %", [100 * score.sparsity for score in found]
    charts = [_chart(what, label, dict(enumerate(removed)), found)]
    times = {
        index: score.seconds
        for index, score in enumerate(found)
        if score.seconds is not None and math.isfinite(score.seconds)
    }
    texts = [
        f"{score.run}: {score.text()}, {share:.1f} % removed" for score, share in zip(found, removed, strict=True)
    ]
    if len(times) > 1:
        unit, factor, _ = next(choice for choice in UNITS if max(times.values()) < choice[2])
        times = {index: seconds / factor for index, seconds in times.items()}
        charts.append(_chart(what, f"time of the training or search in {unit}", times, found))
        for index, time in times.items():
            texts[index] += f", {time:.3g} {unit}"
    items = [f"<li>{_key(index)} {escape(text)}</li>" for index, text in enumerate(texts)]
    bars = "<p>Bars: one sample deviation over seeds, up and down.</p>" if any(s.deviation for s in found) else ""
    return (
        f'<section class="scores"><h3>{escape(what)}</h3><div class="charts">{"".join(charts)}</div>'
        f'<ol class="runs">{"".join(items)}</ol>{bars}</section>'
    )


def _mark(index):
    return f'<path class="series-{index % len(SHAPES)}" d="{SHAPES[index % len(SHAPES)]}"/>'


def _key(index):
    return f'<svg class="key" viewBox="-8 -8 16 16" aria-hidden="true">{_mark(index)}</svg>'


def _chart(ylabel, xlabel, x, found):
    """A chart as SVG, of those scores that have a place `x`. Its marks are numbered as the list below it is."""
    ends = [(found[index].value, found[index].deviation or 0.0) for index in x]
    x_ticks = _ticks(min(x.values()), max(x.values()))
    y_ticks = _ticks(min(value - bar for value, bar in ends), max(value + bar for value, bar in ends))
    # Numbers along the axis, between it and its label.
    edge = 40 + 8 * max(len(f"{tick:g}") for tick in y_ticks)

    def across(value):
        return edge + (value - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]) * (WIDTH - edge - RIGHT)

    def up(value):
        return HEIGHT - BOTTOM - (value - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for tick in x_ticks:
        at = f"{across(tick):.1f}"
        parts.append(f'<path class="line" d="M{at} {TOP}V{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{at}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick:g}</text>')
    for tick in y_ticks:
        at = f"{up(tick):.1f}"
        parts.append(f'<path class="line" d="M{edge} {at}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{edge - 8}" y="{at}" dy=".35em" text-anchor="end">{tick:g}</text>')
    for (index, left), (value, deviation) in zip(x.items(), ends, strict=True):
        at, height = across(left), up(value)
        title = f"<title>{index + 1}: {escape(found[index].run)}, {found[index].text()}</title>"
        bar = ""
        if deviation:
            low, high = up(value - deviation), up(value + deviation)
            bar = f'<path class="bar" d="M{at:.1f} {low:.1f}V{high:.1f}m-5 0h10M{at - 5:.1f} {low:.1f}h10"/>'
        parts.append(f'<g>{title}{bar}<g transform="translate({at:.1f} {height:.1f})">{_mark(index)}</g>')
        # Marks close together have their numbers on different sides.
        is_left = at > WIDTH - RIGHT - 24 or (index // 2 % 2 and at > edge + 24)
        side, anchor = (-9, "end") if is_left else (9, "start")
        place = f'x="{at + side:.1f}" y="{height + (16 if index % 2 else -7):.1f}" text-anchor="{anchor}"'
        parts.append(f'<text class="number" {place}>{index + 1}</text></g>')
    middle = TOP + (HEIGHT - TOP - BOTTOM) / 2
    parts.append(
        f'<text x="{(edge + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(xlabel)}</text>'
        f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{escape(_short(ylabel))}</text>'
    )
    label = escape(f"{ylabel}, against {xlabel}. The values are in the list below.", quote=True)
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _short(label):
    """What is written along the vertical axis: the unit, and as much of the rest as fits."""
    label = label.rpartition(": ")[2]
    return label if len(label) <= 40 else label[:37] + "..."


def _ticks(low: float, high: float) -> list[float]:
    """
    Four to eight round numbers that enclose a range, which is widened to a tenth of the largest number: what differs
    little looks so. Shares stay below 1, percentages below 100.
    """
    least, most = max(abs(low), abs(high)) / 10 or 1.0, next((each for each in (1, 100) if high <= each), math.inf)
    if high - low < least:
        high = min((low + high + least) / 2, most)
        low = high - least
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    first, last = math.floor(round(low / step, 9)), math.ceil(round(high / step, 9))
    return [round(count * step, 12) for count in range(first, last + 1)]
