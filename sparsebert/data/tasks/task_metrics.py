"""
The metrics of the tasks as `evaluate.Metric` modules.

They need neither the network nor a cache folder, so several processes can use them at once. `evaluate.combine` and
`evaluate.evaluator` accept them like metrics from the Hub:

    evaluate.combine([METRICS["accuracy"](), METRICS["matthews"]()])

Importing this module imports `evaluate`, so [`Task.load_metric`] does it only when a metric is needed.
"""

import inspect
from collections.abc import Callable
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
            description=inspect.getdoc(self.score) or "",
            citation="",
            inputs_description="",
            features=datasets.Features({"predictions": self.prediction, "references": self.reference}),
        )

    def _compute(self, predictions: list, references: list) -> dict[str, float]:
        return self.score(predictions, references)


def _squad(name):
    def score(predictions: Any, references: Any) -> dict[str, float]:
        """Exact match and F1 as the official script of SQuAD computes them."""
        return squad_metrics.metrics(name, predictions, references)

    return score


_SQUAD = ("exact_match", "f1")
_SQUAD_V2 = (
    *(f"{group}{name}" for group in ("", "has_answer_", "no_answer_", "best_") for name in _SQUAD),
    *("best_exact_match_threshold", "best_f1_threshold"),
)
# By name: the function, the values that it returns, and the types of a prediction and of a reference.
_SCORES: dict[str, tuple[Callable[..., dict[str, float]], tuple[str, ...], Any, Any]] = {
    "accuracy": (classification.accuracy, ("accuracy",), _CLASS, _CLASS),
    "accuracy_and_f1": (classification.accuracy_and_f1, ("accuracy", "f1"), _CLASS, _CLASS),
    "accuracy_and_macro_f1": (classification.accuracy_and_macro_f1, ("accuracy", "macro_f1"), _CLASS, _CLASS),
    "matthews": (classification.matthews, ("matthews", "accuracy"), _CLASS, _CLASS),
    "correlations": (classification.correlations, ("spearman", "pearson"), _NUMBER, _NUMBER),
    "squad": (_squad("squad"), _SQUAD, _TEXT, _ANSWERS),
    "squad_v2": (_squad("squad_v2"), _SQUAD_V2, _TEXT, _ANSWERS),
}


def _metric(name: str) -> type[TaskMetric]:
    """The class of a metric, from whose name `evaluate` derives that of the metric."""
    score, score_names, prediction, reference = _SCORES[name]
    own = {"score": staticmethod(score), "score_names": score_names, "prediction": prediction, "reference": reference}
    return type(name.title().replace("_", ""), (TaskMetric,), own | {"__module__": __name__})


METRICS: dict[str, type[TaskMetric]] = {name: _metric(name) for name in _SCORES}
