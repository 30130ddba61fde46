"""Batches of a stream for a Trainer, and the place in the stream that a checkpoint stores."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import TrainingArguments
from transformers.utils import logging

from ..data.streams import RowStream


logger = logging.get_logger(__name__)

# In a checkpoint, for each process.
_NAME = "stream_state_{}.json"


class StreamLoader:
    """
    The loader of a [`RowStream`]. It is complete on every process: accelerate would deal out the batches of one
    process, or read all text on each, and the Trainer would resume by skipping batches.

    The place in the stream comes with every batch, also from other processes of the loader. torchdata's
    StatefulDataLoader asks them for it instead; it is one requirement more, and keeps the state of `datasets`, which
    does not have what is in a shuffle buffer.
    """

    def __init__(self, stream: RowStream, args: TrainingArguments, generator: torch.Generator) -> None:
        self.dataset = stream
        self._workers = max(args.dataloader_num_workers, 1)
        self._world_size, self._rank = stream.world_size, stream.rank
        self._places: dict[int, dict[str, Any]] = {}
        self._given = 0
        self._loader = DataLoader(
            stream,
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and args.device.type != "cpu",
            prefetch_factor=args.dataloader_prefetch_factor if args.dataloader_num_workers else None,
            multiprocessing_context=args.dataloader_multiprocessing_context if args.dataloader_num_workers else None,
            generator=generator,
        )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.dataset.start_from(self._given, self._places)
        for worker, place, batch in self._loader:
            self._places[worker] = place
            self._given += 1
            yield batch

    def save(self, folder: str | Path) -> None:
        """Write the place after the last batch that was given."""
        state = {
            "batches": self._given,
            "dataloader_num_workers": self._workers,
            "processes": self._world_size,
            "places": self._places,
        }
        (Path(folder) / self._name()).write_text(json.dumps(state), encoding="utf-8")

    def load(self, folder: str | Path) -> None:
        """Go on from the place that a checkpoint has."""
        path, first = Path(folder) / self._name(), Path(folder) / _NAME.format(0)
        path = path if path.is_file() else first  # which says by how many processes it was written
        if not path.is_file():  # a partial checkpoint, which is refused before unless the user allows it
            logger.warning(f"{path} is missing: the stream starts again at its first document.")
            return
        state = json.loads(path.read_text(encoding="utf-8"))
        for name, here in (("dataloader_num_workers", self._workers), ("processes", self._world_size)):
            if (then := state[name]) != here:
                raise ValueError(
                    f"{folder}: cannot resume a stream with {name} {here} that was read with {name} {then}: each has "
                    f"its own place in the text. Resume with {then}"
                )
        self._given = state["batches"]
        self._places = {int(worker): place for worker, place in state["places"].items()}

    def _name(self) -> str:
        return _NAME.format(self._rank)


def _unchanged(batch: Any) -> Any:
    return batch
