"""One fine-tuning run: data, model, training, evaluation, predictions."""

import inspect
import itertools
import json
import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import transformers
from transformers import AutoTokenizer, TrainingArguments, set_seed
from transformers.utils import logging

from ..checks import nearest
from ..data.tasks import TASKS, TEST_SPLITS, Task
from ..data.tasks.glue import GLUE, SUBMISSIONS
from ..files import write_metrics
from ..models.token_mixers import fixed_length
from ..search.progressive_pruning import ProgressivePruning
from .task_models import check_model, load_model, mask_metrics
from .trainer import SparseBertTrainer


logger = logging.get_logger(__name__)

# Lower bounds of the section `data`.
_LOWEST = {
    "max_train_examples": 1,
    "max_length": 4,
    "doc_stride": 0,
    "max_question_length": 1,
    "n_best_size": 1,
    "max_answer_length": 1,
}
# What a run writes, apart from the tokenizer, checkpoints and logs.
_WRITTEN = (
    *("model*.safetensors*", "mask.safetensors", "mask_config.json", "metrics.json", "recipe.yaml", "results.md"),
    *("predictions_*.json*", "nbest_predictions_*.json", "null_odds_*.json"),
    *(f"{name}.tsv" for name in SUBMISSIONS.values()),
)


@dataclass
class FinetuningArguments:
    """
    Section `data` of a fine-tuning recipe.

    Args:
        task (`str`, *optional*): A name of `TASKS`.
        all (`bool`): Every task of GLUE for which there is data, and one table.
        model (`str`, *optional*): Folder or Hub id of a pre-trained model, with a mask or without one.
        mask (`str`, *optional*): Folder or Hub id of a [`SparseMask`], or a name of `PATTERNS`, to run through. By
            default a model keeps its frozen mask, and is dense if it has none.
        pruning (`dict`, *optional*): Arguments of [`ProgressivePruning`] with the score `"attention"`, for the mask
            `"dense"`: it is pruned within the training.
        data (`str`, *optional*): Folder with the task's files in their original formats; by default the Hub.
        train_split (`str`, *optional*): Split to train on; `"train"`, or the one part of it that there is.
        validation_split (`str` or `list`, *optional*): Splits to evaluate on; those named `"validation..."`.
        test_split (`str` or `list`, *optional*): Splits to predict; those named `"test..."`. `[]` for none.
        max_train_examples (`int`, *optional*): Train on so many examples, drawn with a fixed seed.
        task_kwargs (`dict`, *optional*): More arguments of the task's `load`, such as `{"train_size": 1000}`.
        skip_bad (`bool`): Leave rows out that are wrong, and count them, instead of stopping at the first.
        max_length (`int`, *optional*): Tokens per input, longer ones are cut (SQuAD: slide over); the task's.
        doc_stride (`int`): Tokens that neighbouring windows over a SQuAD context share.
        max_question_length (`int`): Tokens of a SQuAD question.
        n_best_size (`int`): Answers to keep per SQuAD question.
        max_answer_length (`int`): Tokens of a SQuAD answer.
        no_answer_threshold (`float`): SQuAD 2.0 answers "" where its score exceeds the best span's by more than this.
        seeds (`int` or `list`): Number of runs, or their seeds; a number counts from `training.seed`.
        sweep (`bool` or `dict`): Grid of fields of `training`, such as `{"learning_rate": [1e-5, 2e-5]}`; `true` is
            the paper's. The best cell on the first validation split, judged with the first seed, runs all seeds.
        baseline (`str`, *optional*): Output folder of a run to compare with, over the seeds that both have.
        simple_baseline (`bool`): Report the task's simple model as well, where it has one.
        attn_implementation (`str`, *optional*): Backend; `"sparse_auto"`, for a dense stock model the host's.
        overwrite (`bool`): Accept an output folder that is not empty, and run everything anew.
    """

    task: str | None = None
    all: bool = False
    model: str | None = None
    mask: str | None = None
    pruning: dict | None = None
    data: str | None = None
    train_split: str | None = None
    validation_split: str | list | None = None
    test_split: str | list | None = None
    max_train_examples: int | None = None
    task_kwargs: dict | None = None
    skip_bad: bool = False
    max_length: int | None = None
    doc_stride: int = 128
    max_question_length: int = 64
    n_best_size: int = 20
    max_answer_length: int = 30
    no_answer_threshold: float = 0.0
    seeds: int | list = 1
    sweep: bool | dict = False
    baseline: str | None = None
    simple_baseline: bool = True
    attn_implementation: str | None = None
    overwrite: bool = False


@dataclass
class TaskData:
    """A task's splits as examples and as the model's inputs, by split name."""

    task: Task
    options: FinetuningArguments
    tokenizer: transformers.PreTrainedTokenizerBase
    train_split: str
    evaluation_splits: list[str]
    examples: dict
    features: dict
    num_train_examples: int

    @cached_property
    def lengths(self):
        """Tokens of every input, by split: arrays."""
        lengths = {}
        for split, features in self.features.items():
            rows = features["input_ids"][:]
            # Multiple choice has several inputs an example.
            nested = isinstance(rows[0][0], list)
            lengths[split] = np.array([len(ids) for row in rows for ids in (row if nested else [row])])
        return lengths

    def references(self, split):
        """What the predictions on a split are compared with, by the id of the example; `None` without labels."""
        examples = self.examples[split]
        if self.task.reference not in examples.column_names:
            return None
        return dict(zip(examples["id"][:], examples[self.task.reference][:], strict=True))


class MissingSplitError(ValueError):
    """The data lacks a split that every run of the task needs."""


def choose_splits(available, options):
    """
    The splits to train on, to evaluate, and to predict only.

    Args:
        available (`list[str]`): Names of the splits that there are.
        options ([`FinetuningArguments`]): Names those that were asked for.

    Returns:
        `tuple[str, list[str], list[str]]`
    Raises:
        MissingSplitError: If there is none to train on or to evaluate.
        ValueError: If there is none of a name that was asked for, or one is to be trained and evaluated on.
    """
    parts = [name for name in available if name.startswith("train")]
    train = options.train_split or ("train" if "train" in parts else parts[0] if len(parts) == 1 else "train")
    evaluation = _listed(options.validation_split) or [name for name in available if name.startswith("validation")]
    tests = _listed(
        [name for name in available if name in TEST_SPLITS] if options.test_split is None else options.test_split
    )
    asked = {options.train_split, *_listed(options.validation_split), *_listed(options.test_split)}
    for split in (train, *(evaluation or ["validation"]), *tests):
        if split not in available:
            error = ValueError if split in asked else MissingSplitError
            raise error(
                f"task {options.task}: split {split!r} is missing in {options.data or 'the data set'}; there are: "
                f"{', '.join(available) or 'none'}. See --data, --train_split and --validation_split"
            )
    if train in evaluation:
        raise ValueError(f"task {options.task}: split {train!r} is both train_split and validation_split")
    if train != (options.train_split or "train"):
        logger.warning(f"task {options.task}: training on {train}, as {options.data} has no split 'train'.")
    return train, evaluation, [name for name in tests if name not in (train, *evaluation)]


def _listed(names):
    return [names] if isinstance(names, str) else list(names or ())


def check(options, config):
    """
    Check what can be without reading data or weights.

    Args:
        options ([`FinetuningArguments`]): What was asked for.
        config (`dict`): Section `model` of the recipe.

    Raises:
        ValueError: If a field is missing, unknown, out of its range, or means nothing here.
        OSError: If there is no such model or mask.
    """
    if options.all == (options.task is not None):
        raise ValueError("choose --task NAME or --all; the tasks are " + ", ".join(TASKS))
    if options.task is not None and options.task not in TASKS:
        raise nearest("task", str(options.task), list(TASKS))
    for name, low in _LOWEST.items():
        value = getattr(options, name)
        if value is not None and value < low:
            raise ValueError(f"{name} must be at least {low}, got {value!r}")
    if options.model is None:
        raise ValueError("--model must name the folder or Hub id of a pre-trained model")
    for name in ("model", "mask"):
        value = getattr(options, name)
        if value is not None and value.startswith(("/", ".", "~")) and not Path(value).is_dir():
            raise FileNotFoundError(f"{name}: there is no folder {value!r}")
    tasks = GLUE if options.all else [options.task]
    pruning = ProgressivePruning.from_settings(options.pruning)
    if pruning is not None and (pruning.score != "attention" or options.mask != "dense"):
        raise ValueError(
            "pruning in fine-tuning needs score 'attention' and --mask dense, got score "
            f"{pruning.score!r} and mask {options.mask!r}"
        )
    check_model(options, config, options.max_length or max(TASKS[name].max_length for name in tasks))


def prepare(options):
    """
    Read, check and tokenize a task's data.

    Raises:
        ValueError: For a missing split, a bad row, or inputs that cannot be made so long.
        OSError: If a file or the tokenizer cannot be read.
    """
    task = TASKS[options.task]
    options = replace(options, max_length=options.max_length or task.max_length)
    train, evaluation, tests = choose_splits(task.splits(options.data), options)
    splits = [train, *evaluation, *tests]
    arguments = {"data": options.data, "splits": splits, "skip_bad": options.skip_bad}
    allowed = inspect.signature(task.load).parameters.keys() - arguments.keys() - {"name"}
    if unknown := set(options.task_kwargs or ()) - allowed:
        raise ValueError(f"task_kwargs of {task.name} may be {', '.join(sorted(allowed)) or 'none'}, got {unknown}")
    examples = dict(task.load(**arguments, **(options.task_kwargs or {})))
    for split in (train, *evaluation):
        if task.reference not in examples[split].column_names:
            raise ValueError(f"task {task.name}: split {split!r} has no labels")
    total = len(examples[train])
    if options.max_train_examples is not None and options.max_train_examples < total:
        examples[train] = examples[train].shuffle(seed=0).select(range(options.max_train_examples))
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    features = {split: task.encode(examples[split], tokenizer, options) for split in splits}
    return TaskData(task, options, tokenizer, train, evaluation, examples, features, total)


def training_arguments(settings, recipe, output_dir):
    """The `TrainingArguments` of a recipe over a task's settings."""
    return TrainingArguments(
        **{"save_strategy": "no"} | settings | recipe["training"] | {"output_dir": str(output_dir)}
    )


def train(data, recipe, output_dir):
    """
    One run: fine-tune, evaluate, predict.

    Writes to `output_dir` the model with its mask, the tokenizer, `predictions_SPLIT.jsonl` with one example a line,
    for SQuAD and the test splits of GLUE the files that the official scripts take, and `metrics.json`, last.

    Args:
        data ([`TaskData`]): From [`prepare`].
        recipe (`dict`): Sections `model` and `training`; the latter over the task's settings.
        output_dir (`str` or `os.PathLike`): Where to write; a run that is there is replaced.

    Returns:
        `dict`: The metrics.
    Raises:
        ValueError: As [`load_model`], and for fields of `training` that are wrong; nothing was written then.
    """
    start = time.perf_counter()
    task, options, output = data.task, data.options, Path(output_dir)
    training = training_arguments(task.settings, recipe, output)
    set_seed(training.seed)
    model = load_model(data, recipe["model"])
    first = data.evaluation_splits[0]

    def evaluate(split, outputs):
        rows = task.decode(outputs, data.features[split], data.examples[split], options)
        references = data.references(split)
        if references is None:
            return rows, {}
        references = list(references.values())
        values = task.metrics([row["prediction"] for row in rows], references)
        return rows, values | ({} if task.more_metrics is None else task.more_metrics(rows, references))

    pruning = ProgressivePruning.from_settings(options.pruning)
    trainer = SparseBertTrainer(
        model,
        training,
        train_dataset=data.features[data.train_split],
        eval_dataset=data.features[first],
        data_collator=task.collator(data.tokenizer, fixed_length(model.config)),
        processing_class=data.tokenizer,
        compute_metrics=lambda prediction: evaluate(first, prediction.predictions)[1],
        callbacks=None if pruning is None else [pruning],
    )
    main_process = trainer.is_world_process_zero()
    if main_process:
        for path in itertools.chain.from_iterable(map(output.glob, _WRITTEN)):
            path.unlink()
    trained = trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()
    trainer.compute_metrics = None  # it knows one split only
    train_examples = len(data.examples[data.train_split])
    metrics = {"task": task.name, "model": options.model} | mask_metrics(model, data)
    metrics |= {
        "seed": training.seed,
        "train_split": data.train_split,
        "train_examples": train_examples,
        "is_part": data.train_split != "train" or train_examples < data.num_train_examples,
        "skipped": {split: text for split in data.examples if (text := data.examples[split].info.description)},
        "steps": trained.global_step,
        "main_metric": task.main_metric,
        "splits": {},
    }
    for split in data.features:
        if split == data.train_split:
            continue
        prediction = trainer.predict(data.features[split])
        rows, values = evaluate(split, prediction.predictions)
        if values and "test_loss" in prediction.metrics:
            values["loss"] = prediction.metrics["test_loss"]
        trainer.log({f"eval_{split}_{name}": value for name, value in values.items()})
        metrics["splits"][split] = values | {"seconds": prediction.metrics["test_runtime"]}
        if main_process:
            write_predictions(output, split, rows, data.references(split))
            if task.write_submission is not None:
                task.write_submission(split, rows, output)
    metrics["score"] = metrics["splits"][first][task.main_metric]
    if options.simple_baseline and task.baseline is not None:
        metrics["simple_baseline"] = task.baseline(data.examples)
    metrics |= {"train_seconds": trained.metrics["train_runtime"], "seconds": time.perf_counter() - start}
    return write_metrics(output / "metrics.json", metrics)


def write_predictions(folder, split, rows, references=None):
    """Write `predictions_SPLIT.jsonl`: id, prediction and reference (if any) of one example a line."""
    with open(Path(folder) / f"predictions_{split}.jsonl", "w", encoding="utf-8") as file:
        for row in rows:
            line = {"id": row["id"], "prediction": row["prediction"]}
            if references is not None:
                line["reference"] = references[row["id"]]
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def read_predictions(folder, split):
    """
    What [`write_predictions`] wrote.

    Returns:
        `dict[str, tuple]`: Prediction and reference by id.
    """
    with open(Path(folder) / f"predictions_{split}.jsonl", encoding="utf-8") as file:
        rows = map(json.loads, file)
        return {row["id"]: (row["prediction"], row.get("reference")) for row in rows}
