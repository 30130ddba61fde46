"""The data of a fine-tuning run: its splits, read, checked and tokenized."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers.utils import logging

from ...checks import no_effect
from ...data.tasks import TASKS, TEST_SPLITS, Task
from ...data.tasks.task_files import FORMATS
from ...hub import read_config, read_tokenizer
from .finetuning_arguments import FinetuningArguments


if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

    from ...data.tasks.task_metrics import TaskMetric

logger = logging.get_logger(__name__)


@dataclass
class TaskData:
    """The data of a task, ready for training."""

    task: Task
    options: FinetuningArguments
    tokenizer: "PreTrainedTokenizerBase"
    train_split: str
    evaluation_splits: list[str]
    examples: "dict[str, datasets.Dataset]"
    features: "dict[str, datasets.Dataset]"
    num_train_examples: int

    @cached_property
    def lengths(self) -> dict[str, np.ndarray]:
        """Number of tokens of every input, by split."""
        lengths = {}
        for split, features in self.features.items():
            rows = features["input_ids"][:]
            # Multiple choice has several inputs per example.
            nested = isinstance(rows[0][0], list)
            lengths[split] = np.array([len(ids) for row in rows for ids in (row if nested else [row])])
        return lengths

    @property
    def longest(self) -> int:
        """Number of tokens of the longest input."""
        return max(int(lengths.max()) for lengths in self.lengths.values())

    @cached_property
    def metric(self) -> "TaskMetric":
        """The metric of the task."""
        return self.task.load_metric()

    def references(self, split: str) -> dict[str, Any] | None:
        """The correct answers of a split by example id; `None` if it has no labels."""
        examples = self.examples[split]
        if self.task.reference not in examples.column_names:
            return None
        return dict(zip(examples["id"][:], examples[self.task.reference][:], strict=True))

    def evaluate(self, split: str, outputs: Any) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """Decode the model's outputs on a split into predictions and compute the metrics, if there are labels."""
        rows = self.task.decode(outputs, self.features[split], self.examples[split], self.options)
        references = self.references(split)
        if references is None:
            return rows, {}
        answers = list(references.values())
        predictions = [row["prediction"] for row in rows]
        values: dict[str, float] = self.metric.compute(predictions=predictions, references=answers) or {}
        if self.task.more_metrics is not None:
            values |= self.task.more_metrics(rows, answers)
        return rows, values


class MissingSplitError(ValueError):
    """The data lacks a split that every run of the task needs."""


def choose_splits(available: Sequence[str], options: FinetuningArguments) -> tuple[str, list[str], list[str]]:
    """Choose the splits to train on, to evaluate on, and to predict only."""
    parts = [name for name in available if name.startswith("train")]
    train = options.train_split or ("train" if "train" in parts else parts[0] if len(parts) == 1 else "train")
    evaluation = _as_list(options.validation_split) or [name for name in available if name.startswith("validation")]
    tests = _as_list(
        [name for name in available if name in TEST_SPLITS] if options.test_split is None else options.test_split
    )
    asked = {options.train_split, *_as_list(options.validation_split), *_as_list(options.test_split)}
    for split in (train, *(evaluation or ["validation"]), *tests):
        if split not in available:
            error = ValueError if split in asked else MissingSplitError
            raise error(
                f"task {options.task}: split {split!r} is missing in {options.data or 'the data set'}; available: "
                f"{', '.join(available) or 'none'}. See --data, --train_split and --validation_split"
                + (f"; files end in {', '.join(FORMATS)}" if options.data else "")
            )
    if train in evaluation:
        raise ValueError(f"task {options.task}: split {train!r} is both train_split and validation_split")
    if train != (options.train_split or "train"):
        logger.warning(f"task {options.task}: training on {train}, since {options.data} has no split 'train'.")
    return train, evaluation, [name for name in tests if name not in (train, *evaluation)]


def _as_list(names: str | list[str] | None) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())


def _load_arguments(task: Task, options: FinetuningArguments, train: str, splits: list[str]) -> dict[str, Any]:
    """The arguments of `task.load`."""
    accepted = inspect.signature(task.load).parameters.keys()
    arguments: dict[str, Any] = {"data": options.data, "splits": splits, "skip_bad": options.skip_bad}
    for name in ("text_column", "text_pair_column", "label_column"):
        if name in accepted:
            arguments[name] = getattr(options, name)
        elif getattr(options, name) is not None:
            raise no_effect(name, getattr(options, name), f"for task {task.name}, whose columns have their names")
    if "train_split" in accepted:
        arguments["train_split"] = train
    allowed = accepted - arguments.keys() - {"name", "documents"}
    if unknown := set(options.task_kwargs or ()) - allowed:
        raise ValueError(f"task_kwargs of {task.name} may be {', '.join(sorted(allowed)) or 'none'}, got {unknown}")
    return arguments | (options.task_kwargs or {})


def prepare(options: FinetuningArguments) -> TaskData:
    """Read, check and tokenize the data of a task."""
    import datasets

    task = TASKS[str(options.task)]
    options = replace(options, max_length=options.max_length or task.max_length)
    train, evaluation, tests = choose_splits(task.splits(options.data), options)
    splits = [train, *evaluation, *tests]
    examples = dict(task.load(**_load_arguments(task, options, train, splits)))
    for split in (train, *evaluation):
        if task.reference not in examples[split].column_names:
            raise ValueError(f"task {task.name}: split {split!r} has no labels")
    total = len(examples[train])
    label = examples[train].features.get("label")
    if isinstance(label, datasets.ClassLabel) and len(set(examples[train]["label"][:])) == 1:
        only = label.int2str(examples[train]["label"][0])
        logger.warning(f"task {task.name}: all {total} examples of {train} are of one class, {only!r}.")
    if options.max_train_examples is not None and options.max_train_examples < total:
        examples[train] = examples[train].shuffle(seed=0).select(range(options.max_train_examples))
    source, hub_arguments = str(options.model), options.hub_arguments(options.model)
    config = read_config(source, **hub_arguments)
    tokenizer = read_tokenizer(source, config, **hub_arguments)
    features = {split: task.encode(examples[split], tokenizer, options) for split in splits}
    types = features[train][0].get("token_type_ids", [0])
    most, known = np.hstack(types).max() + 1, getattr(config, "type_vocab_size", 0)
    if known and most > known:
        raise ValueError(
            f"task {task.name}: the tokenizer of {source} tells {most} parts of an input apart, the model {known} "
            "(type_vocab_size)"
        )
    return TaskData(task, options, tokenizer, train, evaluation, examples, features, total)
