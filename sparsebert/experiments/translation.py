"""[O] Figure 1b: BLEU of translation models against sparsity."""

import functools
import json
from dataclasses import dataclass, fields

from ..models.configuration_sparsebert import pattern_mask
from ..training.seq2seq import TranslationArguments, check_data, check_model, read_pairs, train_translation
from .pattern_levels import PatternLevels, pattern_cells
from .sections import check_training, model_section, training_section


@dataclass
class TranslationSettings:
    """
    Data, model and training.

    Args:
        train, test, max_length, max_train_pairs, max_test_pairs, num_beams: As of [`TranslationArguments`].
        vocab_size (`int`): Tokens of both languages.
        hidden_size, num_layers, num_heads, intermediate_size (`int`): Of encoder and decoder, each.
        dropout (`float`): Of states and attention.
        max_steps, batch_size, gradient_accumulation_steps, learning_rate, warmup_steps, label_smoothing_factor, optim,
            bf16, seed: As of `Seq2SeqTrainingArguments`, batch sizes per device.
    """

    train: str | list | None = None
    test: str | list | None = None
    max_length: int = 256
    max_train_pairs: int | None = None
    max_test_pairs: int | None = None
    num_beams: int = 4
    vocab_size: int = 32_000
    hidden_size: int = 256
    num_layers: int = 6
    num_heads: int = 8
    intermediate_size: int = 1024
    dropout: float = 0.1
    max_steps: int = 240_000
    batch_size: int = 128
    gradient_accumulation_steps: int = 1
    learning_rate: float = 1e-3
    warmup_steps: int = 10_000
    label_smoothing_factor: float = 0.0
    optim: str = "adafactor"
    bf16: bool = False
    seed: int = 0


@dataclass
class TranslationStudy(PatternLevels, TranslationSettings):
    """Levels of the patterns, then what all cells share."""


def cells(settings):
    """All that defines each cell, by its name."""
    own = {field.name: getattr(settings, field.name) for field in fields(TranslationSettings)}
    # Sentences are shorter than the mask, whose last token they would not have: the star's relay is the first.
    patterns = pattern_cells(settings.strides, settings.windows, settings.sparsities, star="star")
    return {name: own | pattern for name, pattern in patterns.items()}


def _recipe(cell, output_dir):
    data = {name: cell[name] for name in (field.name for field in fields(TranslationArguments)) if name in cell}
    pattern = {name: cell[name] for name in ("pattern", "pattern_kwargs", "head_configuration")}
    return {
        "data": data,
        "model": model_section(cell, pattern | {"mask_seed": cell["seed"]}),
        "training": training_section(cell, output_dir) | {"train_sampling_strategy": "group_by_length"},
    }


def check(cell):
    """
    Raises:
        ValueError, OSError: If the cell cannot run.
    """
    recipe = _recipe(cell, "unused")
    data = TranslationArguments(**recipe["data"])
    check_training(cell)
    check_data(data)
    for source in (data.train, data.test):
        _check_pairs(json.dumps(source))
    for config in check_model(recipe["model"], data.max_length):
        pattern_mask(config)


@functools.cache
def _check_pairs(source):
    """Once for all cells."""
    read_pairs(json.loads(source))


EXPERIMENT = {
    "title": "Translation ([O] Figure 1b)",
    "arguments": TranslationStudy,
    "scales": {
        "tiny": {
            "max_length": 32, "max_test_pairs": 200, "num_beams": 2, "vocab_size": 3000, "hidden_size": 128,
            "num_layers": 2, "num_heads": 4, "intermediate_size": 512, "dropout": 0.0, "max_steps": 650,
            "batch_size": 48, "learning_rate": 2e-3, "warmup_steps": 100, "optim": "adamw_torch_fused",
            "strides": [4], "windows": [1], "sparsities": [0.85],
        },
        # The sizes of Appendix G.3, with language modelling's of G.2; see there for the batch.
        "paper": {"bf16": True},
    },
    "cells": cells,
    "check": check,
    "run": lambda cell, folder: train_translation(_recipe(cell, folder)),
    "columns": {
        "sparsity": ("removed", "{:.1%}"),
        "bleu": ("BLEU", "{:.1f}"),
        "loss": ("loss", "{:.3f}"),
        "seconds": ("seconds", "{:.0f}"),
    },
    "plot": ("sparsity", "bleu", "series"),
    "notes": (
        "removed: of the encoder's mask; the decoder's is the same up to the diagonal; attention from decoder to "
        "encoder is dense",
        "The paper gives curves, no numbers: union is best, level with dense, and the least sensitive to sparsity; "
        "random and star are clearly worse. WMT18 en-cs, newstest2015",
    ),
}  # fmt: skip
