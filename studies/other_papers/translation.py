"""
BLEU of translation models against sparsity: Figure 1b of [O], O(n) Connections are Expressive Enough (arXiv
2006.04862).
"""

import functools
import json
from dataclasses import dataclass, field, fields

from sparsebert.learning.mask_description import pattern_mask

from ..harness.experiment import Experiment, common_settings, seeded
from ..shared.pattern_levels import PatternLevels, pattern_cells
from ..shared.recipe_sections import check_least, model_section, training_section
from .translating import TranslationArguments, check_data, check_model, read_pairs, train_translation


@dataclass
class TranslationSettings:
    """
    Data, model and training.

    Args:
        train, test (`str` or `list[str]`): Sentence pairs, see [`TranslationArguments`].
        max_length (`int`): Longest sentence in tokens, n.
        max_train_pairs, max_test_pairs (`int`, *optional*): Read at most this many pairs.
        num_beams (`int`): Number of beams of the search for translations.
        vocab_size (`int`): Vocabulary size, shared by both languages.
        hidden_size, num_layers, num_heads, intermediate_size (`int`): Sizes of encoder and decoder, each.
        dropout (`float`): Dropout of hidden states and attention.
        max_steps (`int`): Number of training steps.
        batch_size (`int`): Sentence pairs per device and batch.
        gradient_accumulation_steps (`int`): Batches per step.
        learning_rate, warmup_steps, label_smoothing_factor, optim, bf16: See `Seq2SeqTrainingArguments`.
        seeds (`list[int]`): Seeds of the weights, the order of the pairs and random masks.
    """

    train: str | list[str] | None = None
    test: str | list[str] | None = None
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
    seeds: list[int] = field(default_factory=lambda: [0])


@dataclass
class TranslationStudy(PatternLevels, TranslationSettings):
    """Settings of the experiment: the levels of the patterns, and what all cells share."""


def _cells(settings):
    # Sentences are shorter than the mask and lack its last token, so the star's relay is the first token.
    patterns = pattern_cells(settings.strides, settings.windows, settings.sparsities, star="star")
    own = common_settings(settings, of=TranslationSettings)
    return seeded({name: own | pattern for name, pattern in patterns.items()}, settings.seeds)


def _recipe(cell, output_dir):
    data = {name: cell[name] for name in (item.name for item in fields(TranslationArguments)) if name in cell}
    pattern = {name: cell[name] for name in ("pattern", "pattern_kwargs", "head_configuration")}
    return {
        "data": data,
        "model": model_section(cell, pattern | {"mask_seed": cell["seed"]}),
        "training": training_section(cell, output_dir, train_sampling_strategy="group_by_length"),
    }


def _check(cell):
    recipe = _recipe(cell, "unused")
    data = TranslationArguments(**recipe["data"])
    check_least(cell, 1, "max_steps", "batch_size", "gradient_accumulation_steps")
    check_data(data)
    for source in (data.train, data.test):
        _check_pairs(json.dumps(source))
    for config in check_model(recipe["model"], data.max_length):
        pattern_mask(config, config.carrier)


@functools.cache
def _check_pairs(source):
    """Check the pairs once for all cells."""
    read_pairs(json.loads(source))


EXPERIMENT = Experiment(
    title="Translation ([O] Figure 1b)",
    arguments=TranslationStudy,
    scales={
        "tiny": {
            "max_length": 32, "num_beams": 2, "vocab_size": 3000, "hidden_size": 128,
            "num_layers": 2, "num_heads": 4, "intermediate_size": 512, "dropout": 0.0, "max_steps": 650,
            "batch_size": 48, "learning_rate": 2e-3, "warmup_steps": 100, "optim": "adamw_torch_fused",
            "strides": [2, 4, 8], "windows": [1, 4, 5], "sparsities": [0.65, 0.75, 0.85],
        },
        # The sizes of Appendix G.3; the batch is that of language modeling.
        "paper": {"bf16": True},
    },
    cells=_cells,
    check=_check,
    run=lambda cell, folder: train_translation(_recipe(cell, folder)),
    columns={
        "sparsity": ("removed", "{:.1%}"),
        "bleu": ("BLEU", "{:.1f}"),
        "loss": ("loss", "{:.3f}"),
        "cpu_seconds": ("CPU seconds", "{:.0f}"),
    },
    plot=("sparsity", "bleu", "series"),
    baseline="dense",
    notes=(
        "removed: from the encoder's mask. The decoder has the same mask without future keys; attention from decoder "
        "to encoder is dense",
        "The paper gives curves, no numbers, for WMT18 en-cs and newstest2015: union is best, on a par with dense, "
        "and the least sensitive to sparsity; random and star are clearly worse",
    ),
    smallest={
        "max_length": 16, "max_test_pairs": 4, "num_beams": 1, "vocab_size": 150, "hidden_size": 16, "num_layers": 2,
        "intermediate_size": 16, "max_steps": 2, "batch_size": 8, "strides": [4], "windows": [2], "sparsities": [0.5],
    },
)  # fmt: skip
