"""Cells that pre-train on text from the start: their settings, one tokenizer for all of them, and their runs."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsebert.checks import check_range
from sparsebert.data.documents import load_documents
from sparsebert.data.tokenization import train_tokenizer
from sparsebert.learning.mask_description import pattern_mask
from sparsebert.masks.sparse_mask import SparseMask
from sparsebert.models.bert.configuration_sparsebert import SparseBertConfig
from sparsebert.training.pretraining.pretraining_run import pretrain

from .recipe_sections import SHARED, check_least, check_texts, made_once, model_section, training_section


TOKENIZER_CHARACTERS = 5_000_000
# Settings of a model that is trained in seconds, for tests.
SMALLEST = {
    "vocab_size": 150, "max_length": 16, "max_validation_tokens": 1000, "hidden_size": 16, "num_layers": 2,
    "num_heads": 4, "intermediate_size": 16, "max_steps": 2, "batch_size": 4,
}  # fmt: skip


@dataclass
class TextSettings:
    """
    Text, model and training.

    Args:
        text (`str` or `list[str]`): Training text, see [`PretrainingArguments`].
        validation (`str` or `list[str]`, *optional*): Held-out text; by default 1 document in 100 of the text.
        tokenizer (`str`, *optional*): Folder or Hub id of a tokenizer; by default one WordPiece tokenizer with
            `vocab_size` tokens is trained for all cells.
        vocab_size (`int`): Vocabulary size.
        max_length (`int`): Length of a sequence in tokens, n.
        max_validation_tokens (`int`): Number of tokens of the held-out text to evaluate on.
        hidden_size, num_layers, num_heads, intermediate_size (`int`): Sizes of the model.
        dropout (`float`): Dropout of hidden states and attention.
        max_steps (`int`): Number of training steps; only the text that they need is read, once.
        batch_size (`int`): Sequences per device and batch.
        gradient_accumulation_steps (`int`): Batches per step.
        learning_rate, warmup_steps, weight_decay, optim, bf16: See `TrainingArguments`.
        seeds (`list[int]`): Seeds of the weights, the order of the text, the masking and random masks.
    """

    text: str | list[str] = "builtin"
    validation: str | list[str] | None = None
    tokenizer: str | None = None
    vocab_size: int = 30522
    max_length: int = 512
    max_validation_tokens: int = 200_000
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    intermediate_size: int = 3072
    dropout: float = 0.1
    max_steps: int = 1000
    batch_size: int = 32
    gradient_accumulation_steps: int = 1
    learning_rate: float = 1e-4
    warmup_steps: int = 100
    weight_decay: float = 0.01
    optim: str = "adamw_torch_fused"
    bf16: bool = False
    seeds: list[int] = field(default_factory=lambda: [0])


def fixed_mask(cell: dict[str, Any], model: dict[str, Any]) -> SparseMask:
    """The mask of a cell; `model` has the pattern, among further fields of [`SparseBertConfig`]."""
    config = SparseBertConfig(**model_section(cell, model))
    if config.hidden_size % config.num_attention_heads:
        raise ValueError(f"hidden_size must be a multiple of num_heads {cell['num_heads']}, got {cell['hidden_size']}")
    return pattern_mask(config, config.carrier)


def check_text(cell: dict[str, Any], model: dict[str, Any]) -> None:
    """Check that a cell can be pre-trained; `model` has the pattern."""
    check_least(cell, 1, "max_steps", "batch_size", "gradient_accumulation_steps")
    check_range("max_validation_tokens", cell["max_validation_tokens"], 1)
    fixed_mask(cell, model)
    check_texts(cell)


def run_text(cell: dict[str, Any], folder: Path, model: dict[str, Any], nsp: bool = False) -> dict[str, Any]:
    """The metrics of the pre-training of a cell, and those of `SHARED`. A trained tokenizer is saved beside it."""
    start, cpu = time.perf_counter(), time.process_time()
    tokenizer = cell["tokenizer"]
    if tokenizer is None:
        shared = {name: cell[name] for name in ("text", "validation", "vocab_size")}
        with made_once(folder.parent, "tokenizer", shared, "tokenizer.json") as (tokenizer, there):
            if not there:
                documents = load_documents(cell["text"], "train" if cell["validation"] is None else "all")
                trained = train_tokenizer(documents, cell["vocab_size"], max_characters=TOKENIZER_CHARACTERS)
                trained.save_pretrained(tokenizer)
    waited = dict(zip(SHARED, (time.perf_counter() - start, time.process_time() - cpu), strict=True))
    sequences = cell["max_steps"] * cell["batch_size"] * cell["gradient_accumulation_steps"]
    data = {name: cell[name] for name in ("text", "validation", "max_length", "max_validation_tokens")}
    data |= {"tokenizer": str(tokenizer), "nsp": nsp, "max_tokens": sequences * cell["max_length"], "pictures": False}
    recipe = {"data": data, "model": model_section(cell, model), "training": training_section(cell, folder)}
    return pretrain(recipe) | waited
