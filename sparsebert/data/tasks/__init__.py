"""Fine-tuning tasks. A new one is a row of [`TASKS`] and, for a new kind, a module with the functions it names."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from . import builtin, classification, glue, squad, squad_metrics, swag


if TYPE_CHECKING:
    import datasets
    import numpy as np
    from transformers import PreTrainedTokenizerBase

CLASSIFICATION = "AutoModelForSequenceClassification"
# Splits without public labels; whatever is called otherwise is evaluated when it is asked for by name only.
TEST_SPLITS = ("test", "test_matched", "test_mismatched", "test_ax")


@dataclass(frozen=True)
class Task:
    """
    A fine-tuning task.

    Attributes:
        name (`str`):
            Name of the task, its key in [`TASKS`].
        head (`str`):
            Name of the auto class of the model, e.g. `"AutoModelForSequenceClassification"`.
        splits (`Callable[[str | None], list[str]]`):
            Names of the splits in a folder, or on the Hub (`None`): `"train"`, `"validation"`, `"test"` (with a suffix
            for MNLI), and any other file under its own name.
        load (`Callable[..., datasets.DatasetDict]`):
            `load(data, splits, skip_bad)`: the named splits, checked. A column `"id"` names the examples; what was
            skipped is in `info.description`.
        encode (`Callable[..., datasets.Dataset]`):
            `encode(examples, tokenizer, options)`: inputs and labels of the model, one row or more per example.
        collator (`Callable`):
            `collator(tokenizer, pad_to_multiple_of=None)`: makes batches of the encoded rows.
        decode (`Callable[..., list[dict]]`):
            `decode(outputs, features, examples, options)`: one dict per example with its `"id"` and `"prediction"`.
        metrics (`Callable[[list, list], dict[str, float]]`):
            `metrics(predictions, references)`.
        main_metric (`str`):
            The entry of the metrics by which models are compared.
        reference (`str`, defaults to `"label"`):
            Column of what the predictions are compared with; splits without it are predicted only.
        max_length (`int`, defaults to 128):
            Tokens per input.
        settings (`dict`):
            Fields of `TrainingArguments` in the paper: SparseBERT (arXiv 2102.12871), Table 5.
        scores (`Callable[[list, list], np.ndarray]`, *optional*):
            The main metric per example, where it is a mean over examples; makes its bootstrap fast.
        more_metrics (`Callable[[list[dict], list], dict[str, float]]`, *optional*):
            Metrics that need all that `decode` gives, of its rows and the references.
        baseline (`Callable[[datasets.DatasetDict], dict[str, float]]`, *optional*):
            Metrics, on the validation split, of a simple model to compare with.
        write_submission (`Callable`, *optional*):
            `write_submission(split, rows, folder)`: the predictions as the task's server or official script reads
            them; for GLUE those of test splits only.
    """

    name: str
    head: str
    splits: "Callable[[str | None], list[str]]"
    load: "Callable[..., datasets.DatasetDict]"
    encode: "Callable[[datasets.Dataset, PreTrainedTokenizerBase, object], datasets.Dataset]"
    collator: Callable
    decode: "Callable[[np.ndarray, datasets.Dataset, datasets.Dataset, object], list[dict]]"
    metrics: "Callable[[list, list], dict[str, float]]"
    main_metric: str
    reference: str = "label"
    max_length: int = 128
    settings: dict = field(default_factory=dict)
    scores: "Callable[[list, list], np.ndarray] | None" = None
    more_metrics: "Callable[[list[dict], list], dict[str, float]] | None" = None
    baseline: "Callable[[datasets.DatasetDict], dict[str, float]] | None" = None
    write_submission: Callable | None = None


def _settings(batch_size, epochs):
    return {
        "per_device_train_batch_size": batch_size,
        "num_train_epochs": epochs,
        "learning_rate": 2e-5,
        "weight_decay": 0.01,
        "warmup_steps": 0.1,
        "lr_scheduler_type": "linear",
    }


def _glue(name, metrics, main_metric):
    return Task(
        name=name,
        head=CLASSIFICATION,
        splits=partial(glue.splits, name),
        load=partial(glue.load, name),
        encode=classification.encode,
        collator=classification.collator,
        decode=classification.decode,
        metrics=metrics,
        main_metric=main_metric,
        settings=_settings(32, 3),
        write_submission=partial(glue.write_submission, name),
    )


def _squad(name, batch_size, epochs):
    return Task(
        name=name,
        head="AutoModelForQuestionAnswering",
        splits=partial(squad.splits, name),
        load=partial(squad.load, name),
        encode=squad.encode,
        collator=classification.collator,
        decode=partial(squad.decode, name),
        metrics=partial(squad_metrics.metrics, name),
        main_metric="f1",
        reference="answers",
        max_length=384,
        settings=_settings(batch_size, epochs),
        scores=partial(squad_metrics.scores, name=name),
        more_metrics=squad_metrics.best_threshold if name == "squad_v2" else None,
        write_submission=partial(squad.write_submission, name),
    )


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="builtin",
            head=CLASSIFICATION,
            splits=builtin.splits,
            load=builtin.load,
            encode=classification.encode,
            collator=classification.collator,
            decode=classification.decode,
            metrics=builtin.metrics,
            main_metric="accuracy",
            baseline=builtin.bag_of_words_baseline,
        ),
        _glue("cola", classification.matthews, "matthews"),
        _glue("sst2", classification.accuracy, "accuracy"),
        _glue("mrpc", classification.accuracy_and_f1, "f1"),
        _glue("stsb", classification.correlations, "spearman"),
        _glue("qqp", classification.accuracy_and_f1, "f1"),
        _glue("mnli", classification.accuracy, "accuracy"),
        _glue("qnli", classification.accuracy, "accuracy"),
        _glue("rte", classification.accuracy, "accuracy"),
        _glue("wnli", classification.accuracy, "accuracy"),
        _squad("squad", 32, 3),
        _squad("squad_v2", 48, 2),
        Task(
            name="swag",
            head="AutoModelForMultipleChoice",
            splits=swag.splits,
            load=swag.load,
            encode=swag.encode,
            collator=swag.collator,
            decode=classification.decode,
            metrics=classification.accuracy,
            main_metric="accuracy",
            settings=_settings(16, 3),
        ),
    )
}
