"""
Sentence embeddings of an encoder without fine-tuning, and their score on the pairs of sentences of a GLUE task.

Letters: N sentences, D hidden size.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from scipy.stats import spearmanr

from sparsebert.attention.model_masks import sparse_attention_of
from sparsebert.data.tasks import glue
from sparsebert.models.inference.text_encoders import TextEncoder
from sparsebert.training.finetuning.task_models import input_sparsity


if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase


def check_pairs(field: str, folder: str, task: str = "stsb") -> None:
    """Check that the folder that a field names, of GLUE or of the task, has the validation split of a task."""
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"{field}: there is no folder {folder!r}")
    if "validation" not in glue.splits(task, folder):
        raise ValueError(f"{field} {folder} lacks the file of the validation split of {task}")


def read_pairs(data: str, task: str = "stsb") -> "datasets.Dataset":
    """The validation split: `text`, `text_pair` and `label`."""
    return glue.load(task, data, ["validation"])["validation"]


def embed(
    model: Any, tokenizer: "PreTrainedTokenizerBase", sentences: list[str], max_length: int = 128, batch_size: int = 64
) -> torch.Tensor:
    """Embed sentences, cut at `max_length` tokens, as vectors of length 1: `(N, D)`, float32 on the CPU."""
    encoder = TextEncoder(model, tokenizer, max_length, normalized=True)
    return torch.from_numpy(encoder.encode(sentences, batch_size))


def embed_pairs(model: Any, tokenizer: "PreTrainedTokenizerBase", pairs: "datasets.Dataset") -> torch.Tensor:
    """[`embed`] of both sentences of every pair: first all first ones."""
    return embed(model, tokenizer, [*pairs["text"], *pairs["text_pair"]])


def pair_cosines(embeddings: torch.Tensor) -> torch.Tensor:
    """The cosine of both sentences of every pair: `(N,)`, of what [`embed_pairs`] returns."""
    return torch.mul(*embeddings.chunk(2)).sum(-1)


def similarity(
    model: Any, tokenizer: "PreTrainedTokenizerBase", pairs: "datasets.Dataset", dense: torch.Tensor | None = None
) -> dict[str, float]:
    """
    How well the cosines of a model's embeddings rank pairs of sentences: Spearman's correlation with the labels
    (`"spearman"`); the fraction that the model's mask removes at its own length (`"sparsity"`) and on these sentences
    (`"input_sparsity"`); the `"cosine"` of the embeddings with the `dense` ones and its 5 % quantile (`"cosine_5"`).
    """
    embeddings = embed_pairs(model, tokenizer, pairs)
    encoded = tokenizer([*pairs["text"], *pairs["text_pair"]], truncation=True, max_length=128)
    cosines = pair_cosines(embeddings)
    mask = getattr(sparse_attention_of(model), "mask", None)
    agreement = torch.ones(len(embeddings)) if dense is None else (embeddings * dense).sum(-1)
    return {
        "sparsity": 0.0 if mask is None else mask.sparsity,
        "input_sparsity": 0.0 if mask is None else input_sparsity(mask, list(map(len, encoded["input_ids"]))),
        "cosine": agreement.mean().item(),
        "cosine_5": agreement.quantile(0.05).item(),
        "spearman": float(spearmanr(cosines, pairs["label"]).statistic),
    }
