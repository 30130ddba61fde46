"""Charts of runs for a web page, as SVG: quality against sparsity and against training time."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from .reports import RECOVERED, own_mask


WIDTH, HEIGHT = 480, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 16, 52
# Marks of one chart differ in shape and color, and each has its number beside it.
SHAPES = (
    "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0Z",
    "M-5 -5H5V5H-5Z",
    "M0 -6L6 5H-6Z",
    "M0 -7L6 0L0 7L-6 0Z",
    "M0 6L6 -5H-6Z",
    "M-6 -2H-2V-6H2V-2H6V2H2V6H-2V2H-6Z",
)
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


def scores(runs: Mapping[str, dict[str, Any]]) -> dict[str, list[Score]]:
    """
    Scores of runs' metrics that can be compared, by what was measured and in which unit. Those that are not finite are
    left out.
    """
    found: dict[str, list[Score]] = {}
    for run, metrics in runs.items():
        try:
            for what, score in _scores_of(run, metrics):
                if math.isfinite(score.value) and math.isfinite(score.sparsity):
                    found.setdefault(what, []).append(score)
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"{run}: its metrics are damaged or incomplete ({error!r})") from error
    return found


def _scores_of(run: str, metrics: dict[str, Any]) -> Iterator[tuple[str, Score]]:
    if "agreement" in metrics:
        own = own_mask(metrics.get("mask"))
        numbers = metrics["agreement"].get(RECOVERED.format(own), metrics["agreement"][own])
        removed, seconds = metrics["sparsity"][own], metrics["seconds"]["total"]
        model = str(metrics["model"])
        yield f"cosine with {model}, dense", Score(run, numbers["cosine"], None, removed, seconds)
        if "score" in numbers:
            yield f"{metrics['task']}, masks of {model}", Score(run, 100 * numbers["score"], None, removed, seconds)
    elif "glue" in metrics:
        for values in metrics["glue"].values():
            yield from _scores_of(run, values)
    elif "task" in metrics:
        name, seconds = metrics["main_metric"], metrics["train_seconds"]
        for split, values in metrics["splits"].items():
            if values.get(name) is None:
                continue
            value = values[name] if isinstance(values[name], dict) else {"mean": values[name]}
            deviation = None if value.get("std") is None else 100 * value["std"]
            yield (
                f"{metrics['task']}, {split}: {name} in %",
                Score(run, 100 * value["mean"], deviation, metrics["sparsity"], seconds),
            )
    elif metrics.get("mlm_loss") is not None:
        seconds = metrics.get("train_seconds", metrics.get("seconds"))
        yield (
            "pre-training: loss on masked words (lower is better)",
            Score(run, metrics["mlm_loss"], None, metrics["sparsity"], seconds),
        )


def score_figures(what: str, found: list[Score]) -> str:
    """The charts of one kind of score and the list of its runs, in HTML."""
    charts = [
        _chart(what, "sparsity: entries of the mask removed, in %", [100 * score.sparsity for score in found], found)
    ]
    times = [score.seconds for score in found if score.seconds is not None and math.isfinite(score.seconds)]
    texts = [f"{score.run}: {_with_deviation(score)}, {100 * score.sparsity:.1f} % removed" for score in found]
    if len(times) == len(found):
        unit, factor, _ = next(choice for choice in UNITS if max(times) < choice[2])
        charts.append(_chart(what, f"training time in {unit}", [seconds / factor for seconds in times], found))
        texts = [
            f"{text}, {seconds / factor:.3g} {unit} of training" for text, seconds in zip(texts, times, strict=True)
        ]
    items = [f"<li>{_key(index)} {escape(text)}</li>" for index, text in enumerate(texts)]
    bars = "<p>Bars: one sample deviation over seeds, up and down.</p>" if any(s.deviation for s in found) else ""
    return (
        f'<section class="scores"><h3>{escape(what)}</h3><div class="charts">{"".join(charts)}</div>'
        f'<ol class="runs">{"".join(items)}</ol>{bars}</section>'
    )


def _with_deviation(score):
    return f"{score.value:.4g}" + ("" if score.deviation is None else f" ± {score.deviation:.2g}")


def _mark(index):
    return f'<path class="series-{index % len(SHAPES)}" d="{SHAPES[index % len(SHAPES)]}"/>'


def _key(index):
    return f'<svg class="key" viewBox="-8 -8 16 16" aria-hidden="true">{_mark(index)}</svg>'


def _chart(ylabel, xlabel, x, found):
    """A chart as SVG. Its marks are numbered as the list below it is."""
    y = [score.value for score in found]
    deviations = [score.deviation or 0.0 for score in found]
    x_ticks = _ticks(min(x), max(x))
    y_ticks = _ticks(
        min(value - deviation for value, deviation in zip(y, deviations, strict=True)),
        max(value + deviation for value, deviation in zip(y, deviations, strict=True)),
    )

    def across(value):
        return LEFT + (value - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]) * (WIDTH - LEFT - RIGHT)

    def up(value):
        return HEIGHT - BOTTOM - (value - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for tick in x_ticks:
        at = f"{across(tick):.1f}"
        parts.append(f'<path class="line" d="M{at} {TOP}V{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{at}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick:g}</text>')
    for tick in y_ticks:
        at = f"{up(tick):.1f}"
        parts.append(f'<path class="line" d="M{LEFT} {at}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at}" dy=".35em" text-anchor="end">{tick:g}</text>')
    for index, (left, value, deviation) in enumerate(zip(x, y, deviations, strict=True)):
        at, height = across(left), up(value)
        title = f"<title>{index + 1}: {escape(found[index].run)}, {_with_deviation(found[index])}</title>"
        bar = ""
        if deviation:
            low, high = up(value - deviation), up(value + deviation)
            bar = f'<path class="bar" d="M{at:.1f} {low:.1f}V{high:.1f}m-5 0h10M{at - 5:.1f} {low:.1f}h10"/>'
        parts.append(f'<g>{title}{bar}<g transform="translate({at:.1f} {height:.1f})">{_mark(index)}</g>')
        side, anchor = (-9, "end") if at > WIDTH - RIGHT - 24 else (9, "start")
        place = f'x="{at + side:.1f}" y="{height - 7:.1f}" text-anchor="{anchor}"'
        parts.append(f'<text class="number" {place}>{index + 1}</text></g>')
    middle = TOP + (HEIGHT - TOP - BOTTOM) / 2
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(xlabel)}</text>'
        f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{escape(_short(ylabel))}</text>'
    )
    label = escape(f"{ylabel}, against {xlabel}. The values are in the list below.", quote=True)
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _short(label):
    """What is written along the vertical axis: the unit, and as much of the rest as fits."""
    label = label.rpartition(": ")[2]
    return label if len(label) <= 40 else label[:37] + "..."


def _ticks(low: float, high: float) -> list[float]:
    """Four to eight round numbers that enclose a range."""
    if high - low < 1e-9 * max(abs(low), abs(high), 1e-3):
        margin = abs(low) / 10 or 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(count * step, 12) for count in range(first, last + 1)]
