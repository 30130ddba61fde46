"""Pre-training: a search that starts from what the weights attend to already."""

from typing import TYPE_CHECKING, Any

import torch

from ..searching.matching import START_BATCHES, carrier, random_batches, start_from_attention


if TYPE_CHECKING:
    import datasets
    from transformers import TrainingArguments

# How many rows a batch has at most: the attention probabilities of a layer are in memory at once.
START_ROWS = 16


def check_rows_fill_mask(max_length: int, mask_length: int) -> None:
    """Check that rows can be as long as the mask of a search that starts from attention."""
    if max_length < mask_length:
        raise ValueError(
            f"start_from_attention needs rows as long as the mask: max_length must be at least {mask_length}, the "
            f"mask_length, got {max_length}"
        )


def start_search(model: Any, rows: "datasets.Dataset", training: "TrainingArguments") -> None:
    """Initialize the mask logits with what the dense model attends to, see [`start_from_attention`]."""
    length, size = model.sparse_attention.search.length, min(training.per_device_train_batch_size, START_ROWS)
    ids = rows.shuffle(seed=training.seed).select(range(min(len(rows), 4 * START_BATCHES * size)))["input_ids"][:]
    long = [row for row in ids if len(row) == length]
    if not long:
        raise ValueError(
            f"start_from_attention: none of {len(ids)} rows of the text has {length} tokens, the length of the mask"
        )
    whole = torch.tensor(long, device=model.device)
    model.eval()
    start_from_attention(model, carrier(model), random_batches(whole, size, START_BATCHES, training.seed))
