"""Claims as comparisons by seed, and whether numbers confirm or refute them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .comparisons import Seeds
from .seed_comparisons import holm, paired_difference


LEVEL = 0.05


@dataclass(frozen=True)
class Comparison:
    """Numbers by seed, of which the first are greater if the claim holds."""

    label: str
    greater: Seeds
    smaller: Seeds

    def seeds(self) -> list[int]:
        return sorted(self.greater.keys() & self.smaller.keys())

    def test(self) -> dict[str, float]:
        """A [`paired_difference`]; for one seed the difference alone."""
        ours, theirs = ([numbers[seed] for seed in self.seeds()] for numbers in (self.greater, self.smaller))
        return paired_difference(ours, theirs) if len(ours) > 1 else {"difference": ours[0] - theirs[0]}


@dataclass(frozen=True)
class Claim:
    """
    A claim of a paper.

    Attributes:
        source (`str`): Paper and table or figure.
        text (`str`): The claim.
        experiment (`str`): Experiment that tests it, a key of `EXPERIMENTS`.
        compare (`Callable[[dict], list[Comparison]]`): Makes the comparisons from the finished cells.
        digits (`int`): Digits of the differences.
        folders (`tuple` of `str`): Folders of the experiment's results, in that of all. What is compared with each
            other comes from one of them.
    """

    source: str
    text: str
    experiment: str
    compare: Callable[[dict], list[Comparison]]
    digits: int = 3
    folders: tuple[str, ...] = ("",)

    @property
    def paths(self) -> list[Path]:
        """The files of the results, in the folder of all."""
        return [Path(folder, f"{self.experiment}_tiny.json") for folder in self.folders]


def _tests(comparisons):
    """
    The test of each comparison that has a seed, with the P value and the corrected one, `"holm"`, if it has several.
    Those that are still to be tested count in the correction.
    """
    tests = [comparison.test() if comparison.seeds() else {} for comparison in comparisons]
    corrected = holm([test.get("p", 1.0) for test in tests])
    return [test | ({"holm": p} if "p" in test else {}) for test, p in zip(tests, corrected, strict=True)]


def status(comparisons: list[Comparison]) -> str:
    """`"confirmed"`, `"refuted"` or `"open"`."""
    signs = [
        (test["difference"] > 0) - (test["difference"] < 0) if test.get("holm", 1.0) < LEVEL else 0
        for test in _tests(comparisons)
    ]
    return "refuted" if -1 in signs else "confirmed" if signs and all(signs) else "open"


def weakest(comparisons: list[Comparison], digits: int) -> str:
    """
    The comparison that speaks most against the claim, or least for it, with its interval and corrected P value. Those
    with one seed are only shown if no other has more.
    """
    tests = {
        comparison.label: test
        for comparison, test in zip(comparisons, _tests(comparisons), strict=True)
        if comparison.seeds()
    }
    if not tests:
        return "no cells that can be compared"

    def support(label):
        difference, p = tests[label]["difference"], tests[label].get("p")
        return p is None, difference if p is None else 1 - p if difference > 0 else p - 1

    label = min(tests, key=support)
    test, remarks, interval = tests[label], [], ""
    if len(tests) > 1:
        remarks.append(f"weakest of {len(tests)}")
    if single := sum("p" not in other for other in tests.values()) if "p" in test else 0:
        remarks.append(f"{single} with one seed")
    if len(tests) < len(comparisons):
        remarks.append(f"{len(comparisons) - len(tests)} not run")
    if "p" in test:
        interval = f" [{test['low']:+.{digits}f}, {test['high']:+.{digits}f}], p = {test['holm']:.2g}"
    remark = f" ({', '.join(remarks)})" if remarks else ""
    return f"{label} = {test['difference']:+.{digits}f}{interval}{remark}"
