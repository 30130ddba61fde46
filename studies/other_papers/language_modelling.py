"""
Perplexity of causal language models against sparsity: Figure 1a of [O], O(n) Connections are Expressive Enough (arXiv
2006.04862).
"""

from dataclasses import dataclass

from sparsebert.masks.sparse_mask import SparseMask

from ..harness.experiment import Experiment, common_settings, seeded
from ..shared.pattern_levels import PatternLevels, pattern_cells
from ..shared.recipe_sections import SHARED
from ..shared.text_pretraining import SMALLEST, TextSettings, check_text, fixed_mask, run_text


@dataclass
class LanguageModelingStudy(PatternLevels, TextSettings):
    """Settings of the experiment: the levels of the patterns, and what all cells share."""


def _cells(settings):
    # In a causal model no other token sees the paper's relay, the last token; half of them see one in the middle.
    relay = settings.max_length // 2
    patterns = pattern_cells(settings.strides, settings.windows, settings.sparsities, relay=relay)
    common = common_settings(settings, of=TextSettings)
    return seeded({name: common | pattern for name, pattern in patterns.items()}, settings.seeds)


def _model(cell):
    fields = ("pattern", "pattern_kwargs", "head_configuration")
    return {name: cell[name] for name in fields} | {"is_decoder": True, "mask_seed": cell["seed"]}


def causal_sparsity(mask: SparseMask) -> float:
    """Fraction of the entries on and below the diagonal that a mask removes."""
    kept = mask.to_table().tril().float().sum((-1, -2)).mean().item()
    return 1 - kept / (mask.length * (mask.length + 1) / 2)


def _run(cell, folder):
    """Train a language model and measure its perplexity on the held-out text."""
    metrics = run_text(cell, folder, _model(cell))
    mask = fixed_mask(cell, _model(cell))
    names = ("perplexity", "lm_loss", "sparsity", "steps", "num_parameters", "train_seconds", *SHARED)
    return {name: metrics[name] for name in names} | {"causal_sparsity": causal_sparsity(mask)}


EXPERIMENT = Experiment(
    title="Language modeling ([O] Figure 1a)",
    arguments=LanguageModelingStudy,
    scales={
        "tiny": {
            "vocab_size": 1024, "max_length": 64, "max_validation_tokens": 40_000, "hidden_size": 64,
            "num_layers": 2, "num_heads": 4, "intermediate_size": 256, "dropout": 0.0, "max_steps": 500,
            "batch_size": 32, "learning_rate": 5e-3, "warmup_steps": 50,
            "strides": [4, 8, 32], "windows": [2, 4, 8], "sparsities": [0.7, 0.75, 0.85, 0.9],
        },
        # Appendix G.2. Tensor2Tensor counts a batch in tokens per core: 4096 on each of 8 are 128 sequences.
        "paper": {
            "vocab_size": 32_000, "max_length": 256, "hidden_size": 256, "num_layers": 12, "num_heads": 8,
            "intermediate_size": 1024, "max_steps": 240_000, "batch_size": 128, "optim": "adafactor",
            "learning_rate": 1e-3, "warmup_steps": 10_000, "bf16": True,
        },
    },
    cells=_cells,
    check=lambda cell: check_text(cell, _model(cell)),
    run=_run,
    columns={
        "sparsity": ("removed", "{:.1%}"),
        "causal_sparsity": ("removed up to the diagonal", "{:.1%}"),
        "perplexity": ("perplexity", "{:.2f}"),
        "cpu_seconds": ("CPU seconds", "{:.0f}"),
    },
    plot=("sparsity", "perplexity", "series"),
    baseline="dense",
    notes=(
        "perplexity: per token of our WordPiece vocabulary; not comparable across vocabularies or texts",
        "The paper gives curves, no numbers: strided and star are best at every level, union is the best of the head "
        "configurations, random is clearly worst",
        "star: the relay is the last token, as in the paper, so that no other token sees it; star_relay: it is in the "
        "middle, and the tokens after it see it",
        "The head size is the hidden size over the number of heads, 32 at the paper's scale; the paper's is 64",
    ),
    smallest=SMALLEST | {"strides": [4], "windows": [2], "sparsities": [0.5]},
)  # fmt: skip
