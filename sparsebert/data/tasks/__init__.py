"""Fine-tuning tasks. To add one, add a row to [`TASKS`] and, if it is of a new kind, a module with its functions."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from . import builtin, classification, glue, own_texts, question_answering, squad, squad_metrics, swag


if TYPE_CHECKING:
    import datasets
    import numpy as np

    from .task_metrics import TaskMetric

# Splits without public labels. Splits with other names are used only when asked for.
TEST_SPLITS = ("test", "test_matched", "test_mismatched", "test_ax")


@dataclass(frozen=True)
class Task:
    """
    A fine-tuning task. The defaults are those of the classification or regression of texts.

    Attributes:
        name (`str`):
            Name of the task, its key in [`TASKS`].
        splits (`Callable[[str | None], list[str]]`):
            `splits(data)`: names of the splits in a folder, or on the Hub if `data` is `None`: `"train"`,
            `"validation"` and `"test"` (with a suffix for MNLI), and every other file under its own name.
        load (`Callable[..., datasets.DatasetDict]`):
            `load(data, splits, skip_bad)`: the named splits, checked. The column `"id"` identifies the examples;
            `info.description` says which rows were skipped.
        metric (`str`):
            Name of the metric, a key of [`~sparsebert.data.tasks.task_metrics.METRICS`].
        main_metric (`str`):
            The value of the metric by which models are compared.
        head (`str`, defaults to `"AutoModelForSequenceClassification"`):
            Name of the model's auto class.
        encode (`Callable[..., datasets.Dataset]`):
            `encode(examples, tokenizer, options)`: the model's inputs and labels, one or more rows per example.
        collator (`Callable`):
            `collator(tokenizer, pad_to_multiple_of=None)`: a function that makes batches of encoded rows.
        decode (`Callable[..., list[dict]]`):
            `decode(outputs, features, examples, options)`: one dictionary per example with its `"id"` and
            `"prediction"`.
        reference (`str`, defaults to `"label"`):
            Column with the correct answers. Splits without it are predicted but not evaluated.
        classifies (`bool`, defaults to `True`):
            Whether the labels are classes. Only those can be smoothed.
        max_length (`int`, defaults to 128):
            Number of tokens per input.
        settings (`dict`):
            Default fields of `TrainingArguments` for this task.
        paper_settings (`bool`, defaults to `False`):
            Whether `settings` are those of SparseBERT (arXiv 2102.12871), Table 5.
        scores (`Callable[[list, list], np.ndarray]`, *optional*):
            `scores(predictions, references)`: the main metric of each example, if it is a mean over the examples.
            Makes the bootstrap much faster.
        more_metrics (`Callable[[list[dict], list], dict[str, float]]`, *optional*):
            `more_metrics(rows, references)`: metrics that need everything `decode` returns, not just the predictions.
        baseline (`Callable[[datasets.DatasetDict], dict[str, float]]`, *optional*):
            Metrics of a simple model on the validation split, for comparison.
        write_submission (`Callable`, *optional*):
            `write_submission(split, rows, folder)`: writes the predictions in the format of the task's official
            server or script; for GLUE, those of test splits only.
        example (`Callable[[], dict[str, str]]`, *optional*):
            Small files in the task's format with splits to train and to evaluate on, by their path in the folder
            `data`: the tests use them. By default the task needs no files.
    """

    name: str
    splits: "Callable[[str | None], list[str]]"
    load: "Callable[..., datasets.DatasetDict]"
    metric: str
    main_metric: str
    head: str = "AutoModelForSequenceClassification"
    encode: "Callable[[datasets.Dataset, Any, Any], datasets.Dataset]" = classification.encode
    collator: Callable = classification.collator
    decode: "Callable[[Any, datasets.Dataset, datasets.Dataset, Any], list[dict]]" = classification.decode
    reference: str = "label"
    classifies: bool = True
    max_length: int = 128
    settings: dict = field(default_factory=dict)
    paper_settings: bool = False
    scores: "Callable[[list, list], np.ndarray] | None" = None
    more_metrics: "Callable[[list[dict], list], dict[str, float]] | None" = None
    baseline: "Callable[[datasets.DatasetDict], dict[str, float]] | None" = None
    write_submission: Callable | None = None
    example: "Callable[[], dict[str, str]] | None" = None

    def metric_names(self) -> tuple[str, ...]:
        """Names of the values that the task may be evaluated by."""
        from .task_metrics import METRICS

        return METRICS[self.metric].score_names

    def load_metric(self) -> "TaskMetric":
        """A new instance of the task's metric."""
        from .task_metrics import METRICS

        return METRICS[self.metric]()


def _paper_settings(batch_size: int, epochs: int) -> dict:
    return {
        "per_device_train_batch_size": batch_size,
        "num_train_epochs": epochs,
        "learning_rate": 2e-5,
        "weight_decay": 0.01,
        "warmup_steps": 0.1,
        "lr_scheduler_type": "linear",
    }


def _glue(name: str, metric: str, main_metric: str) -> Task:
    return Task(
        name=name,
        splits=partial(glue.splits, name),
        load=partial(glue.load, name),
        metric=metric,
        main_metric=main_metric,
        classifies=bool(glue.GLUE[name].names),
        settings=_paper_settings(32, 3),
        paper_settings=True,
        write_submission=partial(glue.write_submission, name),
        example=partial(glue.example, name),
    )


def _own_texts(name: str, metric: str, main_metric: str) -> Task:
    return Task(
        name=name,
        splits=own_texts.splits,
        load=partial(own_texts.load, name),
        metric=metric,
        main_metric=main_metric,
        classifies=name == "text_classification",
        settings=_paper_settings(32, 3),
        example=partial(own_texts.example, name),
    )


def _squad(name: str, batch_size: int, epochs: int) -> Task:
    return Task(
        name=name,
        head="AutoModelForQuestionAnswering",
        splits=partial(squad.splits, name),
        load=partial(squad.load, name),
        encode=question_answering.encode,
        decode=partial(question_answering.decode, name),
        metric=name,
        main_metric="f1",
        reference="answers",
        classifies=False,
        max_length=384,
        settings=_paper_settings(batch_size, epochs),
        paper_settings=True,
        scores=partial(squad_metrics.scores, name=name),
        more_metrics=squad_metrics.best_threshold if name == "squad_v2" else None,
        write_submission=partial(squad.write_submission, name),
        example=squad.example,
    )


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="builtin",
            splits=builtin.splits,
            load=builtin.load,
            metric="accuracy_and_macro_f1",
            main_metric="accuracy",
            baseline=builtin.bag_of_words_baseline,
        ),
        _glue("cola", "matthews", "matthews"),
        _glue("sst2", "accuracy", "accuracy"),
        _glue("mrpc", "accuracy_and_f1", "f1"),
        _glue("stsb", "correlations", "spearman"),
        _glue("qqp", "accuracy_and_f1", "f1"),
        _glue("mnli", "accuracy", "accuracy"),
        _glue("qnli", "accuracy", "accuracy"),
        _glue("rte", "accuracy", "accuracy"),
        _glue("wnli", "accuracy", "accuracy"),
        _squad("squad", 32, 3),
        _squad("squad_v2", 48, 2),
        Task(
            name="swag",
            head="AutoModelForMultipleChoice",
            splits=swag.splits,
            load=swag.load,
            encode=swag.encode,
            collator=swag.collator,
            metric="accuracy",
            main_metric="accuracy",
            settings=_paper_settings(16, 3),
            paper_settings=True,
            example=swag.example,
        ),
        _own_texts("text_classification", "accuracy_and_macro_f1", "accuracy"),
        _own_texts("text_regression", "correlations", "spearman"),
    )
}
