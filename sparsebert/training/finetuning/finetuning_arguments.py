"""The arguments of fine-tuning: the fields about task, model, mask and runs, and those of the Trainer for a task."""

import math
import os
from dataclasses import dataclass
from typing import Any

from huggingface_hub.dataclasses import validated_field
from transformers import TrainingArguments

from ...checks import CheckedFields, nearest, no_effect, number
from ...data.tasks import Task
from ...hub import HubArguments
from ..runs.run_checks import check_seeds, read_training


def _finite(value: float) -> None:
    if not math.isfinite(value):
        raise ValueError(f"must be finite, got {value!r}")


def _grid(value: Any) -> None:
    if not isinstance(value, (bool, dict)):
        raise ValueError(f"must be true or a dictionary of lists of values, got {value!r}")


@dataclass
class FinetuningArguments(CheckedFields, HubArguments):
    """
    Section `data` of a fine-tuning recipe. `revision` and `subfolder` are those of `model`.

    Args:
        task (`str`, *optional*): Name of the task, a key of `TASKS`.
        all (`bool`): Fine-tune on every task of GLUE for which there is data, and report the averages.
        model (`str`, *optional*): Folder or Hub id of a pre-trained model, with or without a mask.
        mask (`str`, *optional*): Folder or Hub id of a [`SparseMask`], or a name of `PATTERNS`. By default the model
            keeps its own frozen mask, and is dense if it has none.
        mask_revision (`str`, *optional*): Branch, tag or commit of the mask, if it is a Hub id.
        mask_subfolder (`str`, *optional*): Folder of the mask within its repository or folder.
        pruning (`dict`, *optional*): Arguments of [`ProgressivePruning`] with the score `"attention"`, to prune the
            mask `"dense"` during training.
        data (`str`, *optional*): Folder of a task's original files, or your own texts: a file, a folder, or
            `"hub:owner/name"` or `"hub:owner/name:config"`. Your files, for the tasks `text_classification` and
            `text_regression`, are csv, tsv, jsonl, json or parquet, in a folder named `train.csv`, `dev.csv` and
            `test.csv`. By default a task is read from the Hub.
        text_column (`str`, *optional*): Column of your own texts, by default `"text"`.
        text_pair_column (`str`, *optional*): Column of the second text of pairs, by default `"text_pair"` if there is
            one.
        label_column (`str`, *optional*): Column of their labels, by default `"label"`.
        train_split (`str`, *optional*): Split to train on; by default `"train"`, or the only one whose name starts
            with it.
        validation_split (`str` or `list`, *optional*): Splits to evaluate on; by default all named `"validation..."`.
        test_split (`str` or `list`, *optional*): Splits to predict; by default the task's test splits, `[]` for none.
        max_train_examples (`int`, *optional*): Train on this many examples, sampled with a fixed seed.
        task_kwargs (`dict`, *optional*): More arguments for loading the task, such as `{"train_size": 1000}`.
        skip_bad (`bool`): Skip and count malformed rows instead of stopping at the first one.
        max_length (`int`, *optional*): Maximum number of tokens per input; by default the task's. Longer inputs are
            truncated, or for SQuAD split into windows.
        pad_to_multiple_of (`int`, *optional*): Pad batches to a multiple of this length, so that there are at most
            `max_length / pad_to_multiple_of` lengths, for each of which a compiled model makes a graph; by default to
            their longest input.
        doc_stride (`int`): Tokens shared by neighboring windows of a SQuAD context.
        max_question_length (`int`): Maximum number of tokens of a SQuAD question.
        n_best_size (`int`): Number of candidate answers kept per SQuAD question.
        max_answer_length (`int`): Maximum number of tokens of a SQuAD answer.
        no_answer_threshold (`float`): SQuAD 2.0 predicts no answer if its score exceeds that of the best span by more
            than this.
        seeds (`int` or `list`): Number of runs, counted up from `training.seed`, or a list of seeds.
        sweep (`bool` or `dict`): Grid over fields of `training`, such as `{"learning_rate": [1e-5, 2e-5]}`; `true` is
            the grid of the paper. Every cell runs with the first seed; the cell with the best score on the first
            validation split runs with all seeds.
        baseline (`str`, *optional*): Output folder of another run to compare with, over the seeds they share.
        simple_baseline (`bool`): Also report the task's simple baseline, if it has one.
        attn_implementation (`str`, *optional*): Attention backend; by default `"sparse_auto"`, or the stock default
            for a dense stock model.
        resume (`bool`): Continue from the newest complete checkpoint of each run that is not finished, if it has one.
        allow_partial_resume (`bool`): Resume also from a checkpoint that lacks parts, such as the optimizer's state.
        overwrite (`bool`): Repeat finished runs, and replace what is in the output folder once the new ones finish.
    """

    task: str | None = None
    all: bool = False
    model: str | None = None
    mask: str | None = None
    mask_revision: str | None = None
    mask_subfolder: str | None = None
    pruning: dict | None = None
    data: str | None = None
    text_column: str | None = None
    text_pair_column: str | None = None
    label_column: str | None = None
    train_split: str | None = None
    validation_split: str | list | None = None
    test_split: str | list | None = None
    max_train_examples: int | None = validated_field(number(1), default=None)
    task_kwargs: dict | None = None
    skip_bad: bool = False
    max_length: int | None = validated_field(number(4), default=None)
    pad_to_multiple_of: int | None = validated_field(number(1), default=None)
    doc_stride: int = validated_field(number(0), default=128)
    max_question_length: int = validated_field(number(1), default=64)
    n_best_size: int = validated_field(number(1), default=20)
    max_answer_length: int = validated_field(number(1), default=30)
    no_answer_threshold: float = validated_field(_finite, default=0.0)
    seeds: int | list = validated_field(check_seeds, default=1)
    sweep: bool | dict = validated_field(_grid, default=False)
    baseline: str | None = None
    simple_baseline: bool = True
    attn_implementation: str | None = None
    resume: bool = False
    allow_partial_resume: bool = False
    overwrite: bool = False


# Fields of section `training` unless they or the task say otherwise.
UNLESS_SET = {"save_strategy": "no"}


def training_fields(fields: dict[str, Any], output_dir: str | os.PathLike, task: Task) -> dict[str, Any]:
    """The section `training` of a run on a task, with the task's settings for fields that are not set."""
    return UNLESS_SET | task.settings | fields | {"output_dir": os.fspath(output_dir)}


def training_arguments(fields: dict[str, Any], output_dir: str | os.PathLike, task: Task) -> TrainingArguments:
    """The `TrainingArguments` of a run on a task, checked."""
    for name in ("save_steps", "save_total_limit"):
        if fields.get(name) is not None and "save_strategy" not in fields:
            raise no_effect(name, fields[name], "without --save_strategy steps or epoch")
    arguments = read_training(training_fields(fields, output_dir, task))
    if arguments.label_smoothing_factor and not task.classifies:
        raise ValueError(
            f"label_smoothing_factor must be 0 for task {task.name}, whose labels are not classes, got "
            f"{arguments.label_smoothing_factor}"
        )
    if arguments.load_best_model_at_end and arguments.eval_strategy == "no":
        raise no_effect(
            "load_best_model_at_end", True, "with eval_strategy 'no': set --eval_strategy and --save_strategy epoch"
        )
    best = arguments.metric_for_best_model
    if best is not None and best.removeprefix("eval_") not in (known := ("loss", *task.metric_names())):
        raise nearest(f"metric_for_best_model of task {task.name}", best, known)
    return arguments
