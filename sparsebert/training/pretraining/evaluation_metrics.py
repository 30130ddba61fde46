"""What the evaluation of pre-training measures, and the logits that it keeps for that."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch


if TYPE_CHECKING:
    from transformers import EvalPrediction

# Beyond it, the perplexity overflows a float64.
_LARGEST_LOSS = 700.0


def reduce_logits(
    logits: torch.Tensor | tuple[torch.Tensor, ...], labels: torch.Tensor | tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """Reduce the logits of pre-training to what [`pretraining_metrics`] needs, for `preprocess_logits_for_metrics`."""
    logits = logits if isinstance(logits, tuple) else (logits,)
    labels = labels if isinstance(labels, tuple) else (labels,)
    losses = torch.nn.functional.cross_entropy(logits[0].flatten(0, 1).float(), labels[0].flatten(), reduction="none")
    reduced = (logits[0].argmax(-1), losses.view(labels[0].shape))
    return (*reduced, logits[1].argmax(-1)) if len(labels) > 1 else reduced


def pretraining_metrics(prediction: "EvalPrediction") -> dict[str, float]:
    """Loss and accuracy of the masked tokens and, with next-sentence pairs, their accuracy, for `compute_metrics`."""
    labels: Any = prediction.label_ids if isinstance(prediction.label_ids, tuple) else (prediction.label_ids,)
    predictions: Any = prediction.predictions
    guesses, losses, *pairs = predictions
    masked = labels[0] != -100
    metrics = {
        "mlm_loss": float(losses[masked].mean()),
        "mlm_accuracy": float((guesses == labels[0])[masked].mean()),
    }
    if pairs:
        metrics["nsp_accuracy"] = float((pairs[0] == labels[1].reshape(-1)).mean())
    return metrics


def reduce_causal_logits(logits: torch.Tensor | tuple[torch.Tensor, ...], labels: torch.Tensor) -> torch.Tensor:
    """[`reduce_logits`] for a causal model: the negative log-likelihoods `(B, n - 1)` of tokens 1 to n - 1."""
    logits = logits[0] if isinstance(logits, tuple) else logits
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="none"
    )
    return losses.view(labels.shape[0], -1)


def causal_metrics(prediction: "EvalPrediction") -> dict[str, float]:
    """Loss (nats per token) and perplexity of a causal model, for `compute_metrics`."""
    losses, labels = np.asarray(prediction.predictions), np.asarray(prediction.label_ids)
    loss = float(losses[labels[:, 1:] != -100].mean())
    return {"lm_loss": loss, "perplexity": math.exp(loss) if loss < _LARGEST_LOSS else math.inf}
