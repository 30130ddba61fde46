"""Recipes of cells: their sections, checks of what they name, and folders that one cell makes for several."""

import functools
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

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
# How long the first cell waits for what later cells use too.
SHARED = ("shared_seconds", "shared_cpu_seconds")


def model_section(cell: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """The section `model` of a recipe that trains from the start, with further fields."""
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


def training_section(cell: dict[str, Any], folder: str | Path, **own: Any) -> dict[str, Any]:
    """The section `training` of a recipe for a cell with `max_steps`, `batch_size` and `bf16`."""
    fields = {name: cell[name] for name in _TRAINING if name in cell} | own
    fields |= {f"per_device_{part}_batch_size": cell["batch_size"] for part in ("train", "eval")}
    return (
        fields
        | precision(cell["bf16"])
        | {
            "output_dir": str(folder),
            "logging_steps": max(fields["max_steps"] // 20, 1),
            "save_strategy": "no",
            "report_to": "none",
            "dataloader_pin_memory": torch.cuda.is_available(),
            "disable_tqdm": True,
        }
    )


def precision(bf16: bool) -> dict[str, Any]:
    """The fields of `TrainingArguments` for bfloat16 (autocast), which they accept without a GPU only on the CPU."""
    return {"bf16": True, "use_cpu": not torch.cuda.is_available()} if bf16 else {}


def finetuned(
    data: dict[str, Any], training: dict[str, Any], output_dir: Path, bf16: bool, model: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The metrics of a fine-tuning: scores on the validation split alone, no baseline, no checkpoints."""
    data = data | {"test_split": [], "simple_baseline": False, "skip_bad": True}
    training = training | {"output_dir": str(output_dir), "save_strategy": "no", "report_to": "none"}
    training |= {"disable_tqdm": True, "dataloader_pin_memory": False} | precision(bf16)
    output = finetune({"data": data, "model": model or {}, "training": training})
    return json.loads((output / METRICS_NAME).read_text())


@contextmanager
def made_once(
    folder: Path, name: str, settings: dict[str, Any], last: str = METRICS_NAME
) -> Iterator[tuple[Path, bool]]:
    """
    The folder `name_KEY` of what cells with these settings share, and whether it is there already, with the file that
    is written `last`. What another process makes is waited for.
    """
    path = folder / f"{name}_{zlib.crc32(json.dumps(settings, sort_keys=True).encode()):08x}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        yield path, (path / last).is_file()


def check_least(cell: dict[str, Any], least: int, *names: str) -> None:
    """Check that these settings are whole numbers of at least `least`."""
    for name in names:
        check_range(name, cell[name], least)


def check_texts(cell: dict[str, Any], *names: str) -> None:
    """Check that text files exist, are of a known format and hold text; Hub datasets are not looked up."""
    for name in names or ("text", "validation"):
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
    """Check that there is the task of a cell, if it has one, with data to train on and to evaluate on."""
    if cell["task"] is None:
        return
    if cell["task"] not in TASKS:
        raise nearest("task", str(cell["task"]), list(TASKS))
    options = FinetuningArguments(task=cell["task"], data=cell["data"], test_split=[])
    choose_splits(TASKS[cell["task"]].splits(cell["data"]), options)
