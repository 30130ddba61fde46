"""Sections of the recipe that a cell runs, shared by all experiments that train from a recipe."""

import functools
import json
from pathlib import Path
from typing import Any

import torch

from sparsebert.checks import check_range, nearest
from sparsebert.data.documents import load_documents
from sparsebert.data.tasks import TASKS
from sparsebert.files import METRICS_NAME
from sparsebert.training.finetuning.finetuning_arguments import FinetuningArguments
from sparsebert.training.finetuning.finetuning_runs import finetune
from sparsebert.training.finetuning.task_data import choose_splits
from sparsebert.training.runs.sources import check_text_files


_TRAINING = (
    "max_steps",
    "gradient_accumulation_steps",
    "learning_rate",
    "warmup_steps",
    "weight_decay",
    "label_smoothing_factor",
    "optim",
    "seed",
)


def model_section(cell: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """
    Make the section `model` of a recipe.

    Args:
        cell (`dict`): Settings of the cell.
        model (`dict`): Further fields of [`SparseBertConfig`].

    Returns:
        `dict`: Fields of the section.
    """
    return {
        "vocab_size": cell["vocab_size"],
        "hidden_size": cell["hidden_size"],
        "num_hidden_layers": cell["num_layers"],
        "num_attention_heads": cell["num_heads"],
        "intermediate_size": cell["intermediate_size"],
        "max_position_embeddings": cell["max_length"],
        "mask_length": cell["max_length"],
        "hidden_dropout_prob": cell["dropout"],
        "attention_probs_dropout_prob": cell["dropout"],
        # A row of a random pattern may keep no key, or none within a short input.
        "allow_empty_rows": True,
        **model,
    }


def training_section(cell: dict[str, Any], folder: str | Path) -> dict[str, Any]:
    """
    Make the section `training` of a recipe.

    Args:
        cell (`dict`): Settings of the cell.
        folder (`str` or `Path`): Output folder of the run.

    Returns:
        `dict`: Fields of the section.
    """
    return (
        {name: cell[name] for name in _TRAINING if name in cell}
        | precision(cell["bf16"])
        | {
            "output_dir": str(folder),
            "per_device_train_batch_size": cell["batch_size"],
            "per_device_eval_batch_size": cell["batch_size"],
            "logging_steps": max(cell["max_steps"] // 20, 1),
            "save_strategy": "no",
            "dataloader_pin_memory": torch.cuda.is_available(),
            "disable_tqdm": True,
        }
    )


def precision(bf16: bool) -> dict[str, Any]:
    """
    The fields of `TrainingArguments` for a precision. Without a GPU they accept bfloat16 only with `use_cpu`.

    Args:
        bf16 (`bool`): Whether to train in bfloat16 (autocast).
    """
    return {"bf16": True, "use_cpu": not torch.cuda.is_available()} if bf16 else {}


def finetuned(
    data: dict[str, Any], training: dict[str, Any], output_dir: Path, bf16: bool, model: dict[str, Any] | None = None
) -> dict[str, Any]:
    """
    Fine-tune with what all cells have in common: scores on the validation split alone, no baseline, no checkpoints.

    Args:
        data (`dict`): Fields of the section `data` of the recipe.
        training (`dict`): Fields of the section `training`.
        output_dir (`Path`): Output folder of the run.
        bf16 (`bool`): Whether to train in bfloat16 (autocast).
        model (`dict`, *optional*): Fields of the section `model`.

    Returns:
        `dict`: Metrics of the fine-tuning.
    """
    data = data | {"test_split": [], "simple_baseline": False, "skip_bad": True}
    training = training | {"output_dir": str(output_dir), "save_strategy": "no", "report_to": "none"}
    training |= {"disable_tqdm": True, "dataloader_pin_memory": False} | precision(bf16)
    output = finetune({"data": data, "model": model or {}, "training": training})
    return json.loads((output / METRICS_NAME).read_text())


def check_steps(cell: dict[str, Any]) -> None:
    """
    Check the training of a cell.

    Args:
        cell (`dict`): Settings of the cell.

    Raises:
        ValueError: If the number of steps or a batch size is below 1.
    """
    for name in ("max_steps", "batch_size", "gradient_accumulation_steps"):
        check_range(name, cell[name], 1)


def check_texts(cell: dict[str, Any]) -> None:
    """
    Check that the text files of a cell exist, are of a known format and hold text; Hub datasets are not looked up.

    Args:
        cell (`dict`): Settings of the cell, with `"text"` and `"validation"`.

    Raises:
        ValueError: If a file has another suffix, or there is no text.
        FileNotFoundError: If a file does not exist.
    """
    for name in ("text", "validation"):
        check_text_files(name, cell[name])
        _check_not_empty(name, json.dumps(cell[name]))


@functools.cache  # all cells of an experiment have the same text
def _check_not_empty(name, source):
    source = json.loads(source)
    if source is None or str(source).startswith(("builtin", "hub:")):
        return
    try:
        next(iter(load_documents(source, "all")))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def check_task(cell: dict[str, Any]) -> None:
    """
    Check that there is the task of a cell, with data to train on and to evaluate on.

    Args:
        cell (`dict`): Settings of the cell, with `"task"` and `"data"`.

    Raises:
        ValueError: If the task is unknown, or a split is missing.
        OSError: If there is no such folder.
    """
    if cell["task"] not in TASKS:
        raise nearest("task", str(cell["task"]), list(TASKS))
    options = FinetuningArguments(task=cell["task"], data=cell["data"], test_split=[])
    choose_splits(TASKS[cell["task"]].splits(cell["data"]), options)
