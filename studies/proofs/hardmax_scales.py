"""
Assumption 2 of O(n) Connections are Expressive Enough (arXiv 2006.04862): a probability map comes arbitrarily close to
the hardmax if the scores are scaled up. Here is the scale for every map that has a known one, and a check of it.

Letters: m keys of a row, t scale, zeta margin, eta error.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from sparsebert.analysis.tables import Table
from sparsebert.attention.probability_maps import LEARNED, PROBABILITY_MAPS, check_probability_map


# Relative to the margin; where any scale would do, as for rows of one key.
_LEAST_SCALE = 1e-3
# Rounding of a probability in float64, entmax's bisection included.
_TOLERANCE = 1e-9
_NUM_DRAWS = 64


def _exponential(error: float, rivals: int) -> float:
    """Where probabilities are proportional to `exp(score)` and `rivals` other keys may have one."""
    return math.log(rivals * (1 - error) / error) if rivals and error < 1 else 0.0


def _entmax(error: float, length: int, alpha: float) -> float:
    return _exponential(error, length - 1) if alpha == 1 else 1 / (alpha - 1)


# Name of a map to its t zeta, given eta, m and the map's parameters.
SCALE_FORMULAS: dict[str, Callable[..., float]] = {
    "softmax": lambda error, length: _exponential(error, length - 1),
    "topk": lambda error, length, k: _exponential(error, k - 1),
    "sparsegen_lin": lambda error, length, lam: (1 - error) * max(1.0, 1 - lam),
    "sparsemax": lambda error, length: 1 - error,
    "entmax15": lambda error, length: _entmax(error, length, 1.5),
    "entmax": _entmax,
}
# Of [`standard_scales`]: margin, error and number of keys.
_STANDARD = (1.0, 0.1, 128)
# Parameters that are shown for the maps that have some.
_EXAMPLES: dict[str, tuple[dict[str, Any], ...]] = {
    "topk": ({"k": 2},),
    "sparsegen_lin": ({"lam": 0.5}, {"lam": -1.0}),
    "entmax": ({"alpha": 1.25}, {"alpha": 2.0}),
}


def hardmax_scale(name: str, margin: float, error: float, length: int, **parameters: Any) -> float:
    """
    A scale t that makes a probability map nearly the hardmax: wherever the largest score of a row is at least `margin`
    above all others, `map(t * scores)` gives it at least `1 - error`.

    Source: arXiv 2006.04862, Assumption 2 and Section B. There lambda is at least 0; for a negative one, t is larger
    by the factor 1 - lambda.
    """
    _check_number("margin", margin, math.inf)
    _check_number("error", error, 1)
    check_probability_map(name, parameters, length)
    if LEARNED in parameters.values():
        raise ValueError(f"parameters of {name} must be numbers here, got {LEARNED!r}")
    if name not in SCALE_FORMULAS:
        raise ValueError(f"no scale is known for the probability map {name!r}; known: {', '.join(SCALE_FORMULAS)}")
    return max(SCALE_FORMULAS[name](error, length, **parameters), _LEAST_SCALE) / margin


def _check_number(name: str, value: float, high: float) -> None:
    valid = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= high and value < math.inf
    if not valid:
        allowed = "more than 0" if high == math.inf else f"in (0, {high}]"
        raise ValueError(f"{name} must be {allowed}, got {value!r}")


def least_probability(
    name: str, scale: float, margin: float, length: int, parameters: Mapping[str, Any] | None = None
) -> float:
    """
    The smallest probability that a scaled map gives to a largest score that is `margin` above all others.

    Tried are rows of float64 scores whose others are all equal, the worst case for every known map, and random ones.
    """
    generator = torch.Generator().manual_seed(0)
    spread = torch.cat([torch.zeros(1), torch.logspace(-2, 2, _NUM_DRAWS)])[:, None]
    others = -margin * spread * torch.rand(len(spread), length - 1, generator=generator, dtype=torch.float64)
    if length > 1:
        others = others - others.amax(-1, keepdim=True)
    scores = torch.cat([torch.full((len(spread), 1), margin, dtype=torch.float64), others], dim=-1)
    return PROBABILITY_MAPS[name](scale * scores, **(parameters or {}))[:, 0].min().item()


@dataclass(frozen=True)
class Scale:
    """
    The scale t of one map, and the smallest probability that was found for the largest score; `None` if there is no
    formula, or it was not checked, for a `reason`. Margin zeta, error eta, and m keys are those of the check.
    """

    name: str
    margin: float
    error: float
    length: int
    parameters: dict[str, Any] = field(default_factory=dict)
    scale: float | None = None
    probability: float | None = None
    reason: str = ""

    @property
    def verdict(self) -> str:
        """`"holds"`, `"fails"` or `"unknown"`."""
        if self.probability is None:
            return "unknown"
        return "holds" if self.probability >= 1 - self.error - _TOLERANCE else "fails"

    def as_json(self) -> dict[str, Any]:
        """All fields and the verdict."""
        return asdict(self) | {"verdict": self.verdict}


def check_scale(name: str, margin: float, error: float, length: int, **parameters: Any) -> Scale:
    """Compute the scale of a map and check it numerically."""
    result = Scale(name, margin, error, length, parameters)
    if name in PROBABILITY_MAPS and name not in SCALE_FORMULAS:
        return replace(result, reason="no scale is known for this map")
    scale = hardmax_scale(name, margin, error, length, **parameters)
    try:
        probability = least_probability(name, scale, margin, length, parameters)
    except ValueError as missing:
        return replace(result, scale=scale, reason=str(missing))
    return replace(result, scale=scale, probability=probability)


def standard_scales() -> list[Scale]:
    """
    Check every map of `PROBABILITY_MAPS`, those with parameters at example values, for a margin of 1, an error of 0.1
    and 128 keys.
    """
    cases = ((name, parameters) for name in PROBABILITY_MAPS for parameters in _EXAMPLES.get(name, ({},)))
    return [check_scale(name, *_STANDARD, **parameters) for name, parameters in cases]


def scales_table(scales: list[Scale]) -> Table:
    """Scales as a table."""
    rows, notes = [], []
    for case in scales:
        rows.append(
            {
                "map": case.name,
                "parameters": ", ".join(f"{key}={value:g}" for key, value in case.parameters.items()),
                "keys": str(case.length),
                "margin": f"{case.margin:g}",
                "error": f"{case.error:g}",
                "scale t": "unknown" if case.scale is None else f"{case.scale:.4g}",
                "least probability": "" if case.probability is None else f"{case.probability:.4g}",
                "Assumption 2": case.verdict,
            }
        )
        if case.reason:
            notes.append(f"{case.name}: {case.reason}")
    note = (
        "map(t * scores) gives at least 1 - error to a largest score that is margin above all others (O(n) "
        "Connections are Expressive Enough, Assumption 2); least probability: the smallest one found"
    )
    return Table.of("Scales that bring the maps close to the hardmax", rows, [note, *dict.fromkeys(notes)])
