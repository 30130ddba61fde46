"""Batches of rows in which several documents lie one after the other, each beginning with its own `[CLS]`."""

from collections.abc import Callable
from typing import Any

import torch


class PackedCollator:
    """
    A collator whose batches say where the documents of their rows begin, by `position_ids` that restart. A model with
    a mask then attends within documents only. The collator that it wraps makes `input_ids` and `labels`.
    """

    def __init__(self, collator: Callable[[list[Any]], dict[str, Any]], cls_token_id: int) -> None:
        self.collator = collator
        self.cls_token_id = cls_token_id

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        batch = self.collator(rows)
        ids, labels = batch["input_ids"], batch["labels"]
        # A token that was replaced at random may have become a [CLS].
        begins = torch.where(labels == -100, ids, labels) == self.cls_token_id
        column = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        positions = column - torch.where(begins, column, 0).cummax(-1).values
        # Nothing before a document predicts its first token.
        return {**batch, "position_ids": positions, "labels": labels.masked_fill(positions == 0, -100)}

    def set_epoch(self, epoch: int) -> None:
        """Tell the collator of [`ReproducibleCollator`] the epoch."""
        if hasattr(self.collator, "set_epoch"):
            self.collator.set_epoch(epoch)

    def for_epoch(self, epoch: int) -> "PackedCollator":
        """The same around a collator of one epoch."""
        make = getattr(self.collator, "for_epoch", None)
        return self if make is None else PackedCollator(make(epoch), self.cls_token_id)

    def for_evaluation(self) -> "PackedCollator":
        """The same around a collator that masks an example the same way in all epochs."""
        return self.for_epoch(-1)
