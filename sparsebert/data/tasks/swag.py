"""Multiple choice: choose the ending of a text among any number of endings, as in SWAG and HellaSwag."""

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .task_files import (
    STEMS,
    BadRow,
    HubSplit,
    Source,
    choose_sources,
    find_files,
    make_dataset,
    open_table,
    parse_rows,
    text_field,
)


if TYPE_CHECKING:
    import datasets
    import torch
    from transformers import DataCollatorForMultipleChoice, PreTrainedTokenizerBase

HUB = "allenai/swag"
_CANONICAL = ("train", "validation", "test")
_IDS = ("id", "ind", "fold-ind", "video-id")
_TWO_PARTS = (("sent1", "sent2"), ("ctx_a", "ctx_b"))
_ONE_PART = ("startphrase", "context", "ctx")
_ENDINGS = ("endings", "choices")
_ENDING = re.compile(r"ending\d+")
_LABEL = ("label", "answer")


def splits(data: str | None = None) -> list[str]:
    """Names of the splits in a folder, or on the Hub, which is not contacted: first the canonical ones."""
    return list(_sources(data))


def _sources(data: str | None) -> dict[str, Source]:
    if data is None:
        return {split: HubSplit(HUB, "regular", split) for split in _CANONICAL}
    return {**find_files(data, STEMS)}


def load(
    data: str | None = None, splits: Sequence[str] | None = None, skip_bad: bool = False
) -> "datasets.DatasetDict":
    """
    Load SWAG from the Hub, or a folder `data` with files in the format of SWAG or HellaSwag. By default all canonical
    splits that exist are read.

    Their columns are `id`, `context`, `start` (the beginning of the sentence to complete; `""` if it is part of the
    context), `endings` (a list, of the same length in the whole split) and, where there are labels, `label`.
    """
    import datasets

    expected = f"no file named {', '.join(STEMS)}"
    sources = choose_sources(_sources(data), splits, _CANONICAL, data or HUB, expected)
    return datasets.DatasetDict({split: _read(split, source, skip_bad) for split, source in sources.items()})


def _read(split: str, source: Source, skip_bad: bool) -> "datasets.Dataset":
    import datasets

    table = open_table(source)
    context, start = next((pair for pair in _TWO_PARTS if set(pair) <= set(table.header)), (None, None))
    accepted: dict[str, Sequence[str]] = {"context": _ONE_PART if context is None else (context,), "label": _LABEL}
    if not any(map(_ENDING.fullmatch, table.header)):
        accepted["endings"] = _ENDINGS
    columns = table.find_columns(accepted, split)
    num_endings: int | None = None

    def parse(row: dict[str, Any]) -> dict[str, Any]:
        nonlocal num_endings
        example: dict[str, Any] = {
            "id": tuple(row.get(column) for column in _IDS),
            "context": text_field(row, columns["context"]),
            "start": text_field(row, start).strip() if start and str(row.get(start) or "").strip() else "",
            "endings": _endings(row, columns.get("endings")),
        }
        count = len(example["endings"])
        num_endings = num_endings or count
        if count != num_endings:
            raise BadRow(columns.get("endings", "ending0"), f"{count} endings, but the first row has {num_endings}")
        if "label" in columns:
            value = row.get(columns["label"])
            if str(value).strip() not in map(str, range(count)):
                raise BadRow(columns["label"], f"{value!r} is not one of 0 to {count - 1}")
            example["label"] = int(str(value))
        return example

    text = datasets.Value("string")
    types = {"context": text, "start": text, "endings": datasets.List(text), "label": datasets.Value("int64")}
    examples, skipped = parse_rows(source, table.rows, parse, skip_bad)
    return make_dataset(examples, types, skipped)


def _endings(row: Mapping[str, Any], column: str | None) -> list[str]:
    if column is None:
        names = [f"ending{index}" for index in range(sum(1 for key in row if _ENDING.fullmatch(key)))]
        fields, column = row, "ending0"
    else:
        endings = row.get(column)
        if not isinstance(endings, list):
            raise BadRow(column, "is missing" if endings is None else f"{endings!r} is not a list of texts")
        names = [f"{column}[{index}]" for index in range(len(endings))]
        fields = dict(zip(names, endings, strict=True))
    if len(names) < 2:
        raise BadRow(column, f"at least 2 endings are needed, got {len(names)}")
    return [text_field(fields, name) for name in names]


def example() -> dict[str, str]:
    """Small files of the task."""
    rows = [
        {"startphrase": f"text {number}", "choices": ["a good end", "a bad end", "no end"], "answer": number % 3}
        for number in range(12)
    ]
    return {f"{stem}.jsonl": "".join(json.dumps(row) + "\n" for row in rows) for stem in ("train", "val")}


def encode(examples: "datasets.Dataset", tokenizer: "PreTrainedTokenizerBase", options: Any) -> "datasets.Dataset":
    """
    The inputs, without padding, a list with one item per ending: the pair of the context and the sentence with that
    ending. One of more than `options.max_length` tokens loses the end of its longer text.
    """

    def tokenize(batch):
        counts = [len(endings) for endings in batch["endings"]]
        contexts = [text for text, count in zip(batch["context"], counts, strict=True) for _ in range(count)]
        sentences = [
            f"{start} {ending}".strip()
            for start, endings in zip(batch["start"], batch["endings"], strict=True)
            for ending in endings
        ]
        flat = tokenizer(contexts, sentences, truncation="longest_first", max_length=options.max_length)
        features = {}
        for field, values in flat.items():
            values = iter(values)
            features[field] = [[next(values) for _ in range(count)] for count in counts]
        if "label" in batch:
            features["labels"] = batch["label"]
        return features

    return examples.map(tokenize, batched=True, remove_columns=examples.column_names, desc="Tokenizing")


def collator(
    tokenizer: "PreTrainedTokenizerBase", pad_to_multiple_of: int | None = None
) -> "Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]":
    """
    A collator that pads a batch to its longest input, or a multiple of a length, and returns tensors of shape
    `(batch_size, num_endings, length)`, and `labels` of shape `(batch_size,)` if the rows have them.
    """
    from transformers import DataCollatorForMultipleChoice

    collate = DataCollatorForMultipleChoice(tokenizer, pad_to_multiple_of=pad_to_multiple_of)
    return functools.partial(_collate, collate)


def _collate(collate: "DataCollatorForMultipleChoice", features: list[dict[str, Any]]) -> "dict[str, torch.Tensor]":
    if "labels" in features[0]:
        return collate(features)
    batch = collate([{**feature, "labels": 0} for feature in features])  # it needs labels
    del batch["labels"]
    return batch
