"""Multiple choice: choose the ending of a text among any number of endings, as in SWAG and HellaSwag."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .task_files import (
    BadRow,
    check_splits,
    find_columns,
    find_files,
    load_hub,
    make_dataset,
    parse_rows,
    read_header,
    read_rows,
    text_field,
)


if TYPE_CHECKING:
    import datasets
    import torch
    from transformers import DataCollatorForMultipleChoice, PreTrainedTokenizerBase

HUB = "allenai/swag"
_STEMS = {"train": "train", "val": "validation", "validation": "validation", "dev": "validation", "test": "test"}
_CANONICAL = ("train", "validation", "test")
_IDS = ("id", "ind", "fold-ind", "video-id")
_TWO_PARTS = (("sent1", "sent2"), ("ctx_a", "ctx_b"))
_ONE_PART = ("startphrase", "context", "ctx")
_ENDINGS = ("endings", "choices")
_ENDING = re.compile(r"ending\d+")
_LABEL = ("label", "answer")
_UNLABELED = ("", "-1", "None")


def splits(data: str | None = None) -> list[str]:
    """
    List the splits.

    Args:
        data (`str`, *optional*): Folder with the files. By default the splits on the Hub, which is not contacted.

    Returns:
        `list[str]`: Those of `train`, `validation` and `test` that exist, then the names of all other data files.

    Raises:
        FileNotFoundError: If the folder does not exist.
        ValueError: If two files are for the same split.
    """
    return list(_CANONICAL) if data is None else list(find_files(data, _STEMS))


def load(
    data: str | None = None, splits: Sequence[str] | None = None, skip_bad: bool = False
) -> "datasets.DatasetDict":
    """
    Load SWAG, or files in the format of SWAG or HellaSwag.

    Args:
        data (`str`, *optional*): Folder with the files. By default the Hub.
        splits (`Sequence[str]`, *optional*): Splits to read, by default all canonical ones that exist.
        skip_bad (`bool`, *optional*, defaults to `False`): Skip malformed rows with a warning.

    Returns:
        `datasets.DatasetDict`: Splits with the columns `id`, `context`, `start` (the beginning of the sentence to
        complete; `""` if it is part of the context), `endings` (a list, of the same length in the whole split) and
        `label`, the index of the correct ending. Splits without labels lack the last column.

    Raises:
        FileNotFoundError: If the folder does not exist.
        OSError: If the Hub cannot be reached.
        ValueError: If a split is missing or a row is malformed. The message says where.
    """
    import datasets

    files = None if data is None else find_files(data, _STEMS)
    available = list(_CANONICAL) if files is None else list(files)
    where = HUB if data is None else data
    if splits is None:
        splits = [split for split in _CANONICAL if split in available]
        if not splits:
            raise ValueError(
                f"{where}: no file named {', '.join(_STEMS)}; available splits: {', '.join(available) or 'none'}"
            )
    check_splits(splits, available, where)
    loaded = datasets.DatasetDict()
    for split in splits:
        if files is None:
            loaded[split] = normalize(load_hub(HUB, "regular", split), split, skip_bad)
        else:
            path = files[split]
            first = next((row for _, row in read_rows(path) if not isinstance(row, BadRow)), {})
            parse = _parser(path, split, read_header(path), first)
            loaded[split] = _dataset(*parse_rows(path, read_rows(path), parse, skip_bad))
    return loaded


def normalize(dataset: "datasets.Dataset", split: str, skip_bad: bool = False) -> "datasets.Dataset":
    """
    Convert a split of the Hub to the columns of [`load`].

    Args:
        dataset (`datasets.Dataset`): Split with the columns `sent1`, `sent2`, `ending0`, ... and `label` (-1 if there
            are no labels).
        split (`str`): Name of the split. If it begins with `test`, there may be no labels.
        skip_bad (`bool`, *optional*, defaults to `False`): Skip malformed rows with a warning.

    Returns:
        `datasets.Dataset`: The same rows with the columns of [`load`].

    Raises:
        ValueError: If a row is malformed.
    """
    where = f"{HUB} {split}"
    parse = _parser(where, split, dataset.column_names, dataset[0])
    return _dataset(*parse_rows(where, enumerate(dataset, start=1), parse, skip_bad))


def _dataset(examples: list[dict[str, Any]], skipped: str) -> "datasets.Dataset":
    import datasets

    types = {
        "id": datasets.Value("string"),
        "context": datasets.Value("string"),
        "start": datasets.Value("string"),
        "endings": datasets.List(datasets.Value("string")),
        "label": datasets.Value("int64"),
    }
    features = datasets.Features({field: types[field] for field in types if field in examples[0]})
    return make_dataset(examples, features, skipped)


def _parser(
    path: Any, split: str, header: Sequence[str], first: Mapping[str, Any]
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that makes an example of a row. The first row shows whether a test split has labels."""
    context, start = next((pair for pair in _TWO_PARTS if set(pair) <= set(header)), (None, None))
    accepted: dict[str, Sequence[str]] = {"context": _ONE_PART if context is None else (context,), "label": _LABEL}
    if not any(map(_ENDING.fullmatch, header)):
        accepted["endings"] = _ENDINGS
    optional = ("label",) if split.startswith("test") else ()
    columns = find_columns(path, header, accepted, optional)
    label = columns.get("label")
    if optional and str(first.get(label or "", "")).strip() in _UNLABELED:
        label = None
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
        if label is not None:
            value = row.get(label)
            index = str(value).strip()
            if index not in map(str, range(count)):
                raise BadRow(label, f"{value!r} is not one of 0 to {count - 1}")
            example["label"] = int(index)
        return example

    return parse


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


def encode(examples: "datasets.Dataset", tokenizer: "PreTrainedTokenizerBase", options: Any) -> "datasets.Dataset":
    """
    Tokenize, for each ending, the pair of the context and the sentence with that ending.

    Args:
        examples (`datasets.Dataset`): Columns `context`, `start` and `endings`; optionally `label`.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): The tokenizer.
        options (`Any`): `options.max_length` is the maximum number of tokens of a pair, special tokens included. A
            pair that is too long loses tokens at the end of its longer text.

    Returns:
        `datasets.Dataset`: The inputs without padding, each a list with one item per ending, and `labels` if the
        examples have a `label`.
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
    Make a collator that pads a batch to its longest input.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): The tokenizer.
        pad_to_multiple_of (`int`, *optional*): Pad to a multiple of this length.

    Returns:
        `Callable`: A function of a list of rows that returns tensors of shape `(batch_size, num_endings, length)`,
        and `labels` of shape `(batch_size,)` if the rows have them.
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
