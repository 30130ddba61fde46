"""
How well a model under a mask agrees with the dense model, and how long both take.

Letters: N rows of text, n length.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cosine_similarity, cross_entropy
from tqdm.auto import tqdm
from transformers import DataCollatorForLanguageModeling

from ...attention.choosing.timing import measure
from ...models.sparse_attention import get_sparse_attention
from .matching import carrier, running_through
from .objectives import Batch, hidden_states, inputs_of, squared_errors, token_logits


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ...masks.sparse_mask import SparseMask

# Rows per batch of token ids.
_BATCH_SIZE = 16
# Tokens of the batch whose inference is timed, and rounds.
TIMED_TOKENS, _ROUNDS = 4096, 5


def agreement(
    model: "PreTrainedModel",
    masks: "Mapping[str, SparseMask | None]",
    rows: torch.Tensor | Sequence[Batch],
    teacher: "PreTrainedModel | None" = None,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    seed: int = 0,
) -> dict[str, dict[str, Any]]:
    """Compare a model under several masks with the dense model."""
    carriers = {
        name: get_sparse_attention(model) if mask is None else carrier(model, mask) for name, mask in masks.items()
    }
    dense = carrier(model)
    batches = rows.split(_BATCH_SIZE) if isinstance(rows, torch.Tensor) else rows
    cosines, errors, losses = ({name: list[torch.Tensor]() for name in masks} for _ in range(3))
    collator = None if tokenizer is None else DataCollatorForLanguageModeling(tokenizer, seed=seed)
    if collator is not None:
        collator.generator = torch.Generator().manual_seed(seed)  # its own is refused in a process of multiprocessing
    model.eval()
    with torch.no_grad():
        for batch in tqdm(batches, "Comparing masks", disable=None):
            ids = inputs_of(batch)["input_ids"]
            with running_through(model, dense):
                targets = hidden_states(teacher or model, batch)
            if collator is not None:
                hidden = collator([{"input_ids": row} for row in ids.cpu()])
                masked, labels = hidden["input_ids"].to(ids.device), hidden["labels"].to(ids.device)
            for name, sparse_attention in carriers.items():
                with running_through(model, sparse_attention):
                    states = hidden_states(model, batch)
                    if collator is not None:
                        logits = token_logits(model, masked).flatten(0, 1).float()
                        losses[name].append(
                            cross_entropy(logits, labels.flatten(), reduction="none")[labels.flatten() != -100]
                        )
                cosines[name].append(cosine_similarity(states[-1].float().mean(1), targets[-1].float().mean(1)))
                errors[name].append(squared_errors(states, targets) * len(ids))
    report: dict[str, dict[str, Any]] = {}
    for name in masks:
        cosine = torch.cat(cosines[name])
        report[name] = {
            "cosine": cosine.mean().item(),
            "cosine_5": cosine.quantile(0.05).item(),
            "layer_error": (torch.stack(errors[name]).sum(0) / len(cosine)).sqrt().tolist(),
        }
        if len(masked_losses := torch.cat(losses[name] or [cosine[:0]])):  # few tokens may have none that is masked
            report[name]["mlm_loss"] = masked_losses.mean().item()
    return report


def inference_seconds(models: "Mapping[str, PreTrainedModel]", batch: Batch) -> dict[str, float]:
    """Time the base models of several models on the same inputs, in turns."""
    inputs = inputs_of(batch)
    count = max(1, TIMED_TOKENS // inputs["input_ids"].shape[1])
    inputs = {name: values[:count] for name, values in inputs.items()}
    encoders = {name: model.base_model.eval() for name, model in models.items()}
    with torch.no_grad():
        functions = {name: lambda encoder=encoder: encoder(**inputs) for name, encoder in encoders.items()}
        return measure(functions, inputs["input_ids"].device.type, _ROUNDS)
