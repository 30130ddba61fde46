"""
The metrics of the tasks as `evaluate.Metric` modules.

They need neither the network nor a cache folder, so several processes can use them at once. `evaluate.combine` and
`evaluate.evaluator` accept them like metrics from the Hub:

    evaluate.combine([METRICS["accuracy"](), METRICS["matthews"]()])

Importing this module imports `evaluate`, so [`Task.load_metric`] does it only when a metric is needed.
"""

import inspect
from typing import Any

import datasets
import evaluate

from . import classification, squad_metrics


_CLASS, _NUMBER, _TEXT = (datasets.Value(dtype) for dtype in ("int64", "float64", "string"))
_ANSWERS = [{"text": _TEXT, "answer_start": _CLASS}]


class TaskMetric(evaluate.Metric):
    """Base class of the metrics, which hold the predictions in memory instead of in a cache file."""

    # Types of a prediction and of a reference, as in `datasets.Features`.
    prediction: Any = _CLASS
    reference: Any = _CLASS
    # All values that `score`, and the `more_metrics` of a task, may return.
    score_names: tuple[str, ...] = ()

    def __init__(self, *args: Any, keep_in_memory: bool = True, **kwargs: Any):
        super().__init__(*args, keep_in_memory=keep_in_memory, **kwargs)

    @staticmethod
    def score(predictions: Any, references: Any) -> dict[str, float]:
        """The metrics of a list of predictions, without the type checks and copies of `compute`."""
        raise NotImplementedError

    def _build_data_dir(self) -> str:
        # The folder is created even if nothing is ever written to it.
        return "" if self.keep_in_memory else super()._build_data_dir()

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=inspect.getdoc(type(self)) or "",
            citation="",
            inputs_description=inspect.getdoc(self.score) or "",
            features=datasets.Features({"predictions": self.prediction, "references": self.reference}),
        )

    def _compute(self, predictions: list, references: list) -> dict[str, float]:
        return self.score(predictions, references)


class Accuracy(TaskMetric):
    """Share of correct predictions."""

    score_names = ("accuracy",)
    score = staticmethod(classification.accuracy)


class AccuracyAndF1(TaskMetric):
    """Accuracy, and F1 of class 1 in a binary classification."""

    score_names = ("accuracy", "f1")
    score = staticmethod(classification.accuracy_and_f1)


class AccuracyAndMacroF1(TaskMetric):
    """Accuracy, and F1 averaged over the classes."""

    score_names = ("accuracy", "macro_f1")
    score = staticmethod(classification.accuracy_and_macro_f1)


class Matthews(TaskMetric):
    """Matthews correlation coefficient, and accuracy."""

    score_names = ("matthews", "accuracy")
    score = staticmethod(classification.matthews)


class Correlations(TaskMetric):
    """Spearman and Pearson correlation of a regression with its labels."""

    prediction = _NUMBER
    reference = _NUMBER
    score_names = ("spearman", "pearson")
    score = staticmethod(classification.correlations)


class Squad(TaskMetric):
    """Exact match and F1 of SQuAD v1.1, as the official script computes them."""

    prediction = _TEXT
    reference = _ANSWERS
    score_names: tuple[str, ...] = ("exact_match", "f1")

    @staticmethod
    def score(predictions: Any, references: Any) -> dict[str, float]:
        return squad_metrics.metrics("squad", predictions, references)


class SquadV2(Squad):
    """Exact match and F1 of SQuAD v2.0, as the official script computes them."""

    score_names = (
        *(f"{group}{name}" for group in ("", "has_answer_", "no_answer_", "best_") for name in Squad.score_names),
        *("best_exact_match_threshold", "best_f1_threshold"),
    )

    @staticmethod
    def score(predictions: Any, references: Any) -> dict[str, float]:
        return squad_metrics.metrics("squad_v2", predictions, references)


METRICS: dict[str, type[TaskMetric]] = {
    "accuracy": Accuracy,
    "accuracy_and_f1": AccuracyAndF1,
    "accuracy_and_macro_f1": AccuracyAndMacroF1,
    "matthews": Matthews,
    "correlations": Correlations,
    "squad": Squad,
    "squad_v2": SquadV2,
}
