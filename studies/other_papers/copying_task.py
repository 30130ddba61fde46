"""
The model and the training of the copying task: in sequences 0 s 0 s, the second s can be predicted from the first by
attending to it.

The model is a small causal one: a Transformer block with several attention layers around
[`sparse_dot_product_attention`].

Letters: B batch, L attention layers, H heads, n length, d head size, D hidden size, V symbols, m length of s.

Source: O(n) Connections are Expressive Enough (arXiv 2006.04862), Section 5.2 and Appendix G.1.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import EvalPrediction, Trainer, TrainingArguments, set_seed

from sparsebert.attention.choosing.choice import check_backend
from sparsebert.attention.dot_product import sparse_dot_product_attention
from sparsebert.files import METRICS_NAME, write_metrics
from sparsebert.masks.patterns import build_pattern
from sparsebert.masks.sparse_mask import SparseMask
from sparsebert.training.runs.run_checks import warn_of_slow_bfloat16

from ..shared.recipe_sections import check_least, precision


@dataclass
class CopyingSizes:
    """
    Task, model and training; the defaults are the paper's.

    Args:
        source_length (`int`): Length of s, m. Sequences have n = 2 m + 2 tokens.
        num_symbols (`int`): Number of symbols, V, which are 0 to V - 1.
        hidden_size (`int`): Hidden size, D.
        num_heads (`int`): Number of heads, H.
        head_size (`int`): Head size, d; H d may differ from D.
        intermediate_size (`int`): Size of the feed-forward layer.
        train_size, test_size (`int`): Number of sequences.
        max_steps (`int`): Number of training steps.
        batch_size (`int`): Sequences per step and device.
        learning_rate (`float`): Learning rate of AdamW after the warm-up.
        warmup_steps (`int`): Steps of linear warm-up, before linear decay.
        weight_decay, adam_beta2 (`float`): Parameters of AdamW.
        predict_first_half (`bool`): Whether to train on the first half too, which is random except for its 0.
        bf16 (`bool`): Whether to train with bfloat16 autocast.
        attn_implementation (`str`): Attention backend.
    """

    source_length: int = 127
    num_symbols: int = 128
    hidden_size: int = 256
    num_heads: int = 4
    head_size: int = 64
    intermediate_size: int = 512
    train_size: int = 100_000
    test_size: int = 10_000
    max_steps: int = 500_000
    batch_size: int = 1024
    learning_rate: float = 1e-4
    warmup_steps: int = 3000
    weight_decay: float = 0.01
    adam_beta2: float = 0.999
    predict_first_half: bool = False
    bf16: bool = False
    attn_implementation: str = "sparse_auto"


@dataclass
class CopyingArguments(CopyingSizes):
    """
    One model on the copying task, with the sizes of [`CopyingSizes`].

    Args:
        pattern (`str`): Name of the pattern, a key of `PATTERNS`.
        pattern_kwargs (`dict`, *optional*): Parameters of the pattern.
        head_configuration (`str`, *optional*): How a cycle of patterns is distributed over heads and layers.
        depth (`int`): Number of attention layers of the block, L.
        seed (`int`): Seed of weights, data and random patterns.
    """

    pattern: str = "dense"
    pattern_kwargs: dict[str, Any] | None = None
    head_configuration: str | None = None
    depth: int = 1
    seed: int = 0

    @property
    def length(self) -> int:
        """Number of tokens of a sequence, n."""
        return 2 * self.source_length + 2

    def mask(self) -> SparseMask:
        """The mask of the attention layers, before future keys are removed."""
        names = ("source_length", "hidden_size", "head_size", "intermediate_size", "train_size", "test_size")
        check_least(vars(self), 1, *names, "max_steps", "batch_size", "depth")
        check_least(vars(self), 2, "num_symbols")
        check_backend(self.attn_implementation)
        return build_pattern(
            self.pattern,
            self.length,
            self.num_heads,
            num_layers=self.depth,
            seed=self.seed,
            head_configuration=self.head_configuration,
            **(self.pattern_kwargs or {}),
        )


def copying_sequences(count: int, source_length: int, num_symbols: int, seed: int) -> torch.Tensor:
    """Draw sequences 0 s 0 s with uniform symbols in s, 0 included."""
    generator = torch.Generator().manual_seed(seed)
    half = torch.randint(num_symbols, (count, source_length + 1), generator=generator)
    half[:, 0] = 0
    return half.repeat(1, 2)


def reachable(mask: SparseMask, depth: int, source_length: int) -> float:
    """
    Share of the symbols of the second s whose first occurrence is connected with the position that predicts them,
    through the kept entries of the layers without future keys, and through the residual stream.
    """
    tables = mask.to_table().any(1).tril()  # (L or 1, n, n)
    reached = torch.eye(mask.length)
    for layer in range(depth):
        # Row i of the product: the positions that can have reached position i after this layer.
        reached = ((tables[layer % len(tables)].float() + torch.eye(mask.length)) @ reached > 0).float()
    predicting = torch.arange(source_length + 1, 2 * source_length + 1)
    return reached[predicting, predicting - source_length].mean().item()


class CopyingAttention(nn.Module):
    """One attention layer: layer norm, H heads under one layer of the mask, and a residual connection."""

    def __init__(self, arguments: CopyingArguments, mask: SparseMask, layer: int):
        super().__init__()
        self.shape = (3, arguments.num_heads, arguments.head_size)
        size = arguments.num_heads * arguments.head_size
        self.norm = nn.LayerNorm(arguments.hidden_size)
        self.projections = nn.Linear(arguments.hidden_size, 3 * size)
        self.output = nn.Linear(size, arguments.hidden_size)
        self.mask = mask
        self.layer = layer if mask.num_layers > 1 else 0
        self.backend = arguments.attn_implementation

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Map hidden states `(B, n, D)` to hidden states `(B, n, D)`."""
        projected = self.projections(self.norm(states)).unflatten(-1, self.shape)  # (B, n, 3, H, d)
        query, key, value = projected.transpose(1, 3).unbind(2)  # (B, H, n, d) each
        attended = sparse_dot_product_attention(
            query, key, value, self.mask, layer=self.layer, is_causal=True, backend=self.backend
        )
        return states + self.output(attended.transpose(1, 2).flatten(2))


class CopyingModel(nn.Module):
    """Embeddings, L attention layers and one feed-forward layer that predict the next symbol."""

    def __init__(self, arguments: CopyingArguments):
        super().__init__()
        mask, size = arguments.mask(), arguments.hidden_size
        # Predictions start at the second 0.
        self.first = 0 if arguments.predict_first_half else arguments.source_length + 1
        self.symbols = nn.Embedding(arguments.num_symbols, size)
        self.positions = nn.Embedding(arguments.length, size)
        self.attention = nn.ModuleList(CopyingAttention(arguments, mask, layer) for layer in range(arguments.depth))
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(size),
            nn.Linear(size, arguments.intermediate_size),
            nn.ReLU(),
            nn.Linear(arguments.intermediate_size, size),
        )
        self.head = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, arguments.num_symbols))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Predict the next symbol at every position."""
        states = self.symbols(input_ids) + self.positions.weight[: input_ids.shape[1]]
        for layer in self.attention:
            states = layer(states)
        logits = self.head(states + self.feed_forward(states))
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(
            logits[:, self.first : -1].flatten(0, 1), labels[:, self.first + 1 :].flatten()
        )
        return {"loss": loss, "logits": logits}


class _Sequences(torch.utils.data.Dataset):
    def __init__(self, sequences):
        self.sequences = sequences

    def __len__(self):
        return len(self.sequences)

    def __getitem__(self, index):
        return {"input_ids": self.sequences[index], "labels": self.sequences[index]}


def copying_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """
    Compute the metrics of predicted symbols `(N, n)`: accuracy over all tokens but the first, and over the second s,
    the only one that can reach 1.
    """
    correct = np.asarray(prediction.predictions)[:, :-1] == np.asarray(prediction.label_ids)[:, 1:]
    source_length = correct.shape[1] // 2
    return {"accuracy": float(correct.mean()), "second_half_accuracy": float(correct[:, -source_length:].mean())}


def run_copying(arguments: CopyingArguments, output_dir: str | os.PathLike) -> dict[str, Any]:
    """Train and test a model on the copying task."""
    start = time.perf_counter()
    mask = arguments.mask()
    set_seed(arguments.seed)
    train, test = (
        _Sequences(copying_sequences(count, arguments.source_length, arguments.num_symbols, 2 * arguments.seed + part))
        for part, count in enumerate((arguments.train_size, arguments.test_size))
    )
    training = TrainingArguments(
        output_dir=str(output_dir),
        max_steps=arguments.max_steps,
        per_device_train_batch_size=arguments.batch_size,
        per_device_eval_batch_size=arguments.batch_size,
        learning_rate=arguments.learning_rate,
        warmup_steps=arguments.warmup_steps,
        weight_decay=arguments.weight_decay,
        adam_beta2=arguments.adam_beta2,
        seed=arguments.seed,
        logging_steps=max(arguments.max_steps // 20, 1),
        save_strategy="no",
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=True,
        **precision(arguments.bf16),
    )
    warn_of_slow_bfloat16(training.bf16, training.device.type)
    trainer = Trainer(
        CopyingModel(arguments),
        training,
        train_dataset=train,
        eval_dataset=test,
        compute_metrics=copying_metrics,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )
    trainer.train()
    evaluation = trainer.evaluate()
    metrics = {name: evaluation[f"eval_{name}"] for name in ("accuracy", "second_half_accuracy", "loss")}
    metrics["reachable"] = reachable(mask, arguments.depth, arguments.source_length)
    metrics |= {"sparsity": mask.sparsity, "steps": arguments.max_steps, "seconds": time.perf_counter() - start}
    output = Path(output_dir)
    output.mkdir(parents=True, exist_ok=True)
    return write_metrics(output / METRICS_NAME, metrics)
