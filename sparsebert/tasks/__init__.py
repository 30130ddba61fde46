"""Fine-tuning tasks. A new one is a module with its `load` and `metrics` functions, and a row of [`TASKS`]."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import builtin


if TYPE_CHECKING:
    import datasets
    import numpy as np


@dataclass(frozen=True)
class Task:
    """
    A fine-tuning task.

    Attributes:
        name (`str`):
            Name of the task, its key in [`TASKS`].
        head (`str`):
            Name of the auto class of the model, e.g. `"AutoModelForSequenceClassification"`.
        load (`Callable[..., datasets.DatasetDict]`):
            Returns the splits `"train"` and `"validation"`. Every argument has a default. In a classification task
            the column `"label"` is a `ClassLabel`, which names the classes.
        text_columns (`tuple[str, ...]`):
            The columns to tokenize: one, or two for pairs of texts.
        metrics (`Callable[[np.ndarray, np.ndarray], dict[str, float]]`):
            Takes the predictions of the model (for classification, logits of shape `(num_examples, num_labels)`) and
            the labels.
        main_metric (`str`):
            The entry of the metrics by which models are compared.
        baseline (`Callable[[datasets.DatasetDict], dict[str, float]]`, *optional*):
            Metrics, on the validation split, of a simple model to compare with.
    """

    name: str
    head: str
    load: "Callable[..., datasets.DatasetDict]"
    text_columns: tuple[str, ...]
    metrics: "Callable[[np.ndarray, np.ndarray], dict[str, float]]"
    main_metric: str
    baseline: "Callable[[datasets.DatasetDict], dict[str, float]] | None" = None


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="builtin",
            head="AutoModelForSequenceClassification",
            load=builtin.load,
            text_columns=("text",),
            metrics=builtin.metrics,
            main_metric="accuracy",
            baseline=builtin.bag_of_words_baseline,
        ),
    )
}
