"""Data files of the tasks: tab- or comma-separated tables and JSON, plain or compressed, and malformed rows."""

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.utils import logging

from ...checks import shortened
from ...files import COMPRESSIONS, is_unicode, open_text


if TYPE_CHECKING:
    import datasets

logger = logging.get_logger(__name__)

FORMATS = (".tsv", ".csv", ".json", ".jsonl")
# JSON files have no header, and the first object may lack an optional key: number of objects to look at.
_HEADER_ROWS = 100


class BadRow(ValueError):
    """
    A malformed row, for [`parse_rows`] to report or to skip.

    Args:
        field (`str`, *optional*): Name of the field that is wrong; `None` if it is the whole row.
        message (`str`): What is wrong: the value, and what is allowed.
    """

    def __init__(self, field: str | None, message: str):
        message = shortened(message)  # it may quote a value of any size
        super().__init__(message if field is None else f"field {field!r}: {message}")
        self.field = field
        self.message = message


def find_files(folder: str | Path, names: Mapping[str, str]) -> dict[str, Path]:
    """
    Find the data files in a folder, without opening them.

    Args:
        folder (`str` or `Path`): The folder. Its subfolders are not searched.
        names (`Mapping[str, str]`): Splits by the name of their file, without suffix. Every other data file is a split
            under its own name.

    Returns:
        `dict[str, Path]`: The file of each split; first the splits of `names`, in their order, then the others.

    Raises:
        FileNotFoundError: If the folder does not exist.
        ValueError: If two files are for the same split.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"data: there is no folder {str(folder)!r}")
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        stem, suffix = _split_name(path)
        if suffix not in FORMATS or stem.startswith(".") or not path.is_file():
            continue
        split = names.get(stem, stem)
        if split in found:
            raise ValueError(f"{folder}: {found[split].name} and {path.name} are both for the split {split!r}")
        found[split] = path
    order = [*dict.fromkeys(names.values()), *sorted(found)]
    return {split: found[split] for split in dict.fromkeys(order) if split in found}


def _split_name(path: Path) -> tuple[str, str]:
    name = Path(path.stem if path.suffix in COMPRESSIONS else path.name)
    return name.stem, name.suffix


def check_splits(splits: Iterable[str], available: Iterable[str], where: str | Path) -> None:
    """
    Check that the requested splits exist.

    Args:
        splits (`Iterable[str]`): Names of the requested splits.
        available (`Iterable[str]`): Names of the existing splits.
        where (`str` or `Path`): The folder or the dataset, for the message.

    Raises:
        ValueError: If a split is missing.
    """
    available = list(available)
    for split in splits:
        if split not in available:
            raise ValueError(f"split {split!r} is missing in {where}; available: {', '.join(available) or 'none'}")


def read_rows(path: str | Path, columns: Sequence[str] | None = None) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """
    Read the rows of a data file. Comma-separated files may quote fields; tab-separated files have no quoting.

    Args:
        path (`str` or `Path`): A `.tsv` or `.csv` file, a `.jsonl` file with one object per line, or a `.json` file
            with a list of objects. It may be compressed.
        columns (`Sequence[str]`, *optional*): Names of the columns, for a table without a header.

    Returns:
        `Iterator[tuple[int, dict]]`: For each row the number of its first line (in a `.json` file its place in the
        list), counted from 1, and its fields, or a [`BadRow`] if it is malformed.

    Raises:
        ValueError: If the file is malformed as a whole.
    """
    kind = _split_name(Path(path))[1]
    if kind in (".json", ".jsonl"):
        yield from _read_list(path) if kind == ".json" else _read_lines(path)
        return
    for number, fields in _read_table(path, kind):
        if columns is None:
            columns = fields
        elif len(fields) != len(columns):
            yield number, BadRow(None, f"{len(fields)} fields, expected {len(columns)}: {', '.join(columns)}")
        else:
            yield number, dict(zip(columns, fields, strict=True))


def _read_table(path: str | Path, kind: str) -> Iterator[tuple[int, list[str]]]:
    if kind == ".tsv":
        # The csv module would end a row at a carriage return inside a field.
        with open_text(path) as file:
            for number, line in enumerate(file, start=1):
                line = line.removesuffix("\n").removesuffix("\r")
                if line:
                    yield number, line.split("\t")
        return
    csv.field_size_limit(2**31 - 1)
    with open_text(path, newline="") as file:
        reader = csv.reader(file, strict=True)
        while True:
            number = reader.line_num + 1
            try:
                fields = next(reader, None)
            except csv.Error as error:
                raise ValueError(f"{path}: row {number}: {error}") from error
            if fields is None:
                return
            if fields:
                yield number, fields


def _read_lines(path: str | Path) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError as error:  # also a number with too many digits
                    row = BadRow(None, f"not valid JSON: {error}")
                except RecursionError:
                    row = BadRow(None, "nested too deeply")
                yield number, _object(row)


def _read_list(path: str | Path) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    with open_text(path) as file:
        try:
            rows = json.load(file)
        except ValueError as error:
            raise ValueError(
                f"{path}: not valid JSON: {error} (a file with one object per line must be named .jsonl)"
            ) from error
        except RecursionError:
            raise ValueError(f"{path}: nested too deeply") from None
    if not isinstance(rows, list):
        raise ValueError(f"{path}: expected a JSON list of objects, got {type(rows).__name__}")
    yield from ((number, _object(row)) for number, row in enumerate(rows, start=1))


def _object(row: Any) -> dict[str, Any] | BadRow:
    return row if isinstance(row, (dict, BadRow)) else BadRow(None, f"not a JSON object but {type(row).__name__}")


def read_header(path: str | Path) -> list[str]:
    """
    Read the names of the columns of a data file.

    Args:
        path (`str` or `Path`): A data file, see [`read_rows`].

    Returns:
        `list[str]`: The fields of the first line of a table, or the keys of the first 100 objects of a JSON file.

    Raises:
        ValueError: If the file is empty.
    """
    kind = _split_name(Path(path))[1]
    if kind in (".json", ".jsonl"):
        found = list(islice(read_rows(path), _HEADER_ROWS))
        rows = [row for _, row in found if not isinstance(row, BadRow)]
        header = list(dict.fromkeys(key for row in rows for key in row))
        if found and not rows:
            raise ValueError(f"{path}: row {found[0][0]}: {found[0][1]}")
    else:
        _, header = next(_read_table(path, kind), (0, []))
    if not header:
        raise ValueError(f"{path}: no rows")
    return header


def find_columns(
    path: str | Path, header: Sequence[str], accepted: Mapping[str, Sequence[str]], optional: Sequence[str] = ()
) -> dict[str, str]:
    """
    Find the columns of a data file by their names.

    Args:
        path (`str` or `Path`): The file, for the message.
        header (`Sequence[str]`): Names of its columns.
        accepted (`Mapping[str, Sequence[str]]`): For each field the possible names of its column, in order of
            preference.
        optional (`Sequence[str]`, *optional*): Fields that may be missing.

    Returns:
        `dict[str, str]`: The column of each field that was found.

    Raises:
        ValueError: If a field that is not optional has no column, or several of one name.
    """
    found = {field: name for field, names in accepted.items() for name in reversed(names) if name in header}
    for name in found.values():
        if header.count(name) > 1:
            raise ValueError(f"{path}: row 1: the column {name!r} comes {header.count(name)} times")
    missing = [" or ".join(names) for field, names in accepted.items() if field not in (*found, *optional)]
    if missing:
        raise ValueError(f"{path}: row 1: no column {' and no '.join(missing)}; available: {', '.join(header)}")
    return found


def text_field(row: Mapping[str, Any], column: str, may_be_empty: bool = False) -> str:
    """
    Get a text field of a row.

    Args:
        row (`Mapping[str, Any]`): The row.
        column (`str`): Name of the column.
        may_be_empty (`bool`, *optional*, defaults to `False`): Whether to accept an empty text.

    Returns:
        `str`: The text, as it is in the file.

    Raises:
        BadRow: If it is missing, empty or not a text.
    """
    value = row.get(column)
    if value is None:
        raise BadRow(column, "is missing")
    if not isinstance(value, str):
        raise BadRow(column, f"{value!r} is not a text")
    if not (may_be_empty or value.strip()):
        raise BadRow(column, "is empty")
    if not value.isascii() and not is_unicode(value):
        raise BadRow(column, "has half of a surrogate pair, which is no character")
    return value


def parse_rows(
    path: str | Path,
    rows: Iterable[tuple[int, Any]],
    parse: Callable[[Any], dict[str, Any]],
    skip_bad: bool = False,
) -> tuple[list[dict[str, Any]], str]:
    """
    Turn the rows of a file into examples.

    Args:
        path (`str` or `Path`): The file, for the messages.
        rows (`Iterable[tuple[int, Any]]`): Numbers and fields of the rows, e.g. from [`read_rows`].
        parse (`Callable[[Any], dict]`): Turns a row into an example, or raises [`BadRow`].
        skip_bad (`bool`, *optional*, defaults to `False`): Skip malformed rows, with one warning for all of them.

    Returns:
        `tuple[list[dict], str]`: The examples in the order of the rows, and a text that says how many rows were
        skipped and why; `""` if none.

    Raises:
        ValueError: At the first malformed row, or with `skip_bad` if all rows are malformed.
    """
    examples, bad = [], []
    for number, row in rows:
        try:
            if isinstance(row, BadRow):
                raise row
            examples.append(parse(row))
        except BadRow as error:
            field = "" if error.field is None else f", field {error.field!r}"
            reason = f"row {number}{field}: {error.message}"
            if not skip_bad:
                raise ValueError(f"{path}: {reason}") from None
            bad.append(reason)
    if not examples:
        raise ValueError(f"{path}: no usable rows" + (f", {len(bad)} bad ones, the first: {bad[0]}" if bad else ""))
    skipped = f"skipped {len(bad)} of {len(examples) + len(bad)} rows, the first: {bad[0]}" if bad else ""
    if bad:
        logger.warning(f"{path}: {skipped}")
    return examples, skipped


def make_dataset(
    examples: list[dict[str, Any]], features: "datasets.Features", skipped: str = ""
) -> "datasets.Dataset":
    """
    Turn examples into a dataset. Its column `"id"` is the first candidate that is different for all examples;
    without one, the examples are numbered from 0.

    Args:
        examples (`list[dict]`): The examples. Their `"id"` is a tuple of candidates, `None` for missing ones.
        features (`datasets.Features`): Types of the columns.
        skipped (`str`, *optional*): What [`parse_rows`] skipped; becomes the description of the dataset.

    Returns:
        `datasets.Dataset`: The dataset.
    """
    import datasets

    ids = [str(index) for index in range(len(examples))]
    for candidates in zip(*(example["id"] for example in examples), strict=True):
        texts = {str(value).strip() for value in candidates if value is not None}
        if len(texts - {""}) == len(examples) and all(map(is_unicode, texts)):
            ids = [str(value).strip() for value in candidates]
            break
    rows = [example | {"id": identifier} for example, identifier in zip(examples, ids, strict=True)]
    dataset = datasets.Dataset.from_list(rows, features=features)
    dataset.info.description = skipped
    return dataset


def load_hub(path: str, config: str | None, split: str) -> "datasets.Dataset":
    """
    Load a split of a dataset from the Hugging Face Hub.

    Args:
        path (`str`): Name of the dataset.
        config (`str`, *optional*): Name of the configuration.
        split (`str`): Name of the split.

    Returns:
        `datasets.Dataset`: The split, unchanged.

    Raises:
        OSError: If it cannot be loaded for any reason.
    """
    import datasets

    try:
        return datasets.load_dataset(path, config, split=split)
    except Exception as error:  # datasets, huggingface_hub and httpx share no base class of errors
        reason = str(error).strip().partition("\n")[0]
        raise OSError(
            f"cannot load split {split!r} of {path} from the Hub ({type(error).__name__}: {reason}); "
            "without a network, give a folder with its files: --data DIR"
        ) from error
