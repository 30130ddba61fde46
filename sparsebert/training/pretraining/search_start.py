"""Pre-training: a search that starts from what the weights attend to already."""

from typing import TYPE_CHECKING, Any

import torch
from transformers.integrations import is_deepspeed_zero3_enabled

from ..searching.matching import carrier, random_batches, start_from_attention


if TYPE_CHECKING:
    import datasets
    from transformers import TrainingArguments

    from .pretraining_arguments import PretrainingArguments

# Number of batches over which the attention probabilities are averaged, and how many rows they have at most: those of
# a layer are in memory at once.
START_BATCHES, START_ROWS = 8, 16


def check_search_start(data: "PretrainingArguments", model: dict[str, Any]) -> None:
    """
    Check that the search of a recipe can start as it says.

    Args:
        data ([`PretrainingArguments`]): Section `data`.
        model (`dict`): Section `model`.

    Raises:
        ValueError: If there is nothing to start from, or nothing to search for, or the weights are partitioned, or
            fields exclude each other.
    """
    if not data.start_from_attention:
        return
    if model.get("search") is None:
        raise ValueError("start_from_attention needs model.search, the mask that is learned")
    if data.base_model is None:
        raise ValueError("start_from_attention needs base_model, weights whose attention means something")
    if is_deepspeed_zero3_enabled():
        raise ValueError("start_from_attention needs whole weights, which no process of ZeRO-3 has: use ZeRO-2")
    if data.streaming:
        raise ValueError("start_from_attention needs the text before the training: set streaming to false")
    check_no_decay(model)


def check_no_decay(model: dict[str, Any]) -> None:
    """
    Check that a search that starts from attention is not told to start elsewhere.

    Args:
        model (`dict`): Section `model`.

    Raises:
        ValueError: If there is an `initial_decay`.
    """
    if (decay := model.get("initial_decay")) is not None:
        raise ValueError(f"initial_decay {decay} excludes start_from_attention, which says where the search starts")


def check_rows_fill_mask(max_length: int, mask_length: int) -> None:
    """
    Check that rows can be as long as the mask of a search that starts from attention.

    Args:
        max_length (`int`): Maximum length of a row.
        mask_length (`int`): Length of the mask, given or that of the base model.

    Raises:
        ValueError: If they are shorter.
    """
    if max_length < mask_length:
        raise ValueError(
            f"start_from_attention needs rows as long as the mask: max_length must be at least {mask_length}, the "
            f"mask_length, got {max_length}"
        )


def start_search(model: Any, rows: "datasets.Dataset", training: "TrainingArguments") -> None:
    """
    Initialize the mask logits with what the dense model attends to, see [`start_from_attention`].

    Args:
        model (`SparseBertPreTrainedModel`): A model whose mask is being searched, before any engine wraps it.
        rows (`datasets.Dataset`): The rows to train on. Those that are shorter than the mask are not used.
        training ([`~transformers.TrainingArguments`]): Section `training`.

    Raises:
        ValueError: If no row is as long as the mask.
    """
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
