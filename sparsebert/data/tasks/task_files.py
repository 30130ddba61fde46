"""The rows of tasks: tables, JSON and Parquet files, plain or compressed, datasets of the Hub, and malformed rows."""

import csv
import difflib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from transformers.utils import logging

from ...checks import shortened
from ...files import COMPRESSIONS, is_unicode, open_text


if TYPE_CHECKING:
    import datasets

logger = logging.get_logger(__name__)

FORMATS = (".tsv", ".csv", ".json", ".jsonl", ".parquet")
# Splits by the names of their files.
STEMS = {"train": "train", "dev": "validation", "val": "validation", "validation": "validation", "test": "test"}
# JSON files have no header, and the first object may lack an optional key: number of objects to look at.
_HEADER_ROWS = 100
# What stands in place of a label that is not public: nothing, or a number that may be a label elsewhere.
EMPTY = ("", "None")
UNLABELED = (*EMPTY, "-1", "-1.0")


class BadRow(ValueError):
    """A malformed row, for [`parse_rows`] to report or to skip; without a field, it is the whole row that is wrong."""

    def __init__(self, field: str | None, message: str):
        message = shortened(message)  # it may quote a value of any size
        super().__init__(message if field is None else f"field {field!r}: {message}")
        self.field = field
        self.message = message


class HubSplit(NamedTuple):
    """A split of a dataset of the Hub."""

    dataset: str
    config: str | None
    split: str

    def __str__(self) -> str:
        return " ".join(filter(None, self))


Source = Path | HubSplit
Place = TypeVar("Place")


@dataclass
class Table:
    """The rows of a split, to be read once."""

    source: Source
    header: list[str]  # names of the columns; those of a JSON file are the keys of its first objects
    rows: Iterator[tuple[int, Any]]  # number (of the first line, counted from 1), and fields or the `BadRow`
    classes: dict[str, list[str]] = field(default_factory=dict)  # names, for the columns with numbers of classes

    def first(self) -> dict[str, Any]:
        """The first row that is not malformed, which stays among the rows; empty if there is none."""
        seen: list[tuple[int, Any]] = []
        for item in self.rows:
            seen.append(item)
            if not isinstance(item[1], BadRow):
                break
        self.rows = chain(seen, self.rows)
        return next((row for _, row in seen[-1:] if not isinstance(row, BadRow)), {})

    def find_columns(
        self, accepted: Mapping[str, Sequence[str]], split: str, unlabeled: Sequence[str] = UNLABELED
    ) -> dict[str, str]:
        """
        The column of each field, of which `accepted` has the possible names in order of preference. The labels of a
        test split are left out if their column is missing, or has one of `unlabeled` in the first row.
        """
        found = {
            name: column for name, columns in accepted.items() for column in columns[::-1] if column in self.header
        }
        for column in found.values():
            if (count := self.header.count(column)) > 1:
                raise ValueError(f"{self.source}: row 1: the column {column!r} comes {count} times")
        is_test = split.startswith("test")
        missing = [name for name in accepted if name not in found and not (is_test and name == "label")]
        if missing:
            wanted = [column for name in missing for column in accepted[name]]
            lowered = {column.lower(): column for column in self.header}
            near = [match for name in wanted for match in difflib.get_close_matches(name.lower(), lowered, n=1)]
            hint = f"did you mean {lowered[near[0]]!r}? " if near else ""
            if len(self.header) == 1 and (others := [each for each in "\t;" if each in self.header[0]]):
                hint = f"columns are separated by tabs in a .tsv and by commas in a .csv, here by {others[0]!r}; "
            raise ValueError(
                f"{self.source}: row 1: no column {' and no '.join(' or '.join(accepted[name]) for name in missing)}; "
                f"{hint}available: {', '.join(self.header)}"
            )
        if is_test and "label" in found and str(self.first().get(found["label"], "")).strip() in unlabeled:
            del found["label"]
        return found


def find_files(folder: str | Path, names: Mapping[str, str]) -> dict[str, Path]:
    """
    The data file of each split in a folder, not opened: first those of `names`, which has splits by the name of their
    file without suffix, in its order; then the others, under their own names. Subfolders are not searched.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"data: there is no folder {str(folder)!r}")
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        stem, suffix = split_name(path)
        if suffix not in FORMATS or stem.startswith(".") or not path.is_file():
            continue
        split = names.get(stem, stem)
        if split in found:
            raise ValueError(f"{folder}: {found[split].name} and {path.name} are both for the split {split!r}")
        found[split] = path
    order = [*dict.fromkeys(names.values()), *sorted(found)]
    return {split: found[split] for split in dict.fromkeys(order) if split in found}


def split_name(path: Path) -> tuple[str, str]:
    """Name and format of a data file, without the suffix of its compression."""
    name = Path(path.stem if path.suffix in COMPRESSIONS else path.name)
    return name.stem, name.suffix


def choose_sources(
    sources: Mapping[str, Place], splits: Sequence[str] | None, canonical: Iterable[str], where: str, expected: str
) -> dict[str, Place]:
    """
    The sources of the requested splits, by default of all canonical ones that exist; `where` they are and what files
    are `expected` is for the messages.
    """
    available = ", ".join(sources) or "none"
    if splits is None:
        splits = [split for split in dict.fromkeys(canonical) if split in sources]
        if not splits:
            raise ValueError(f"{where}: {expected}; available splits: {available}")
    for split in splits:
        if split not in sources:
            raise ValueError(f"split {split!r} is missing in {where}; available: {available}")
    return {split: sources[split] for split in splits}


def open_table(source: Source, header: Sequence[str] | None = None) -> Table:
    """
    Open a split of the Hub, or a file of `FORMATS`, maybe compressed: fields may be quoted in a `.csv`, not in a
    `.tsv`; `.json` is a list of objects. `header` is for a table whose first row is not its header.
    """
    if isinstance(source, HubSplit):
        dataset = load_hub(source)
        classes = {name: list(kind.names) for name, kind in dataset.features.items() if hasattr(kind, "names")}
        return Table(source, dataset.column_names, enumerate(dataset, start=1), classes)
    kind = split_name(source)[1]
    rows: Iterator[tuple[int, Any]]
    if kind in (".tsv", ".csv"):
        lines = _tab_separated(source) if kind == ".tsv" else _comma_separated(source)
        columns = list(next(lines, (0, []))[1] if header is None else header)
        rows = ((number, _fields(columns, values)) for number, values in lines)
    else:
        rows = {".json": _json_list, ".jsonl": _json_lines, ".parquet": _parquet_rows}[kind](source)
        found = list(islice(rows, _HEADER_ROWS))
        columns = list(dict.fromkeys(key for _, row in found if not isinstance(row, BadRow) for key in row))
        if found and all(isinstance(row, BadRow) for _, row in found):
            raise ValueError(f"{source}: row {found[0][0]}: {found[0][1]}")
        rows = chain(found, rows)
    if not columns:
        raise ValueError(f"{source}: no rows, it is empty")
    return Table(source, columns, rows)


def _fields(columns: list[str], values: list[str]) -> dict[str, str] | BadRow:
    if len(values) != len(columns):
        return BadRow(None, f"{len(values)} fields, expected {len(columns)}: {', '.join(columns)}")
    return dict(zip(columns, values, strict=True))


def _tab_separated(path: Path) -> Iterator[tuple[int, list[str]]]:
    # The csv module would end a row at a carriage return inside a field.
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            line = line.removesuffix("\n").removesuffix("\r")
            if line:
                yield number, line.split("\t")


def _comma_separated(path: Path) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(2**31 - 1)
    with open_text(path, newline="") as file:
        reader = csv.reader(file, strict=True)
        while True:
            number = reader.line_num + 1
            try:
                values = next(reader, None)
            except csv.Error as error:
                raise ValueError(f"{path}: row {number}: {error}") from error
            if values is None:
                return
            if values:
                yield number, values


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield number, _object(json.loads(line))
                except ValueError as error:  # also a number with too many digits
                    yield number, BadRow(None, f"not valid JSON: {error}")
                except RecursionError:
                    yield number, BadRow(None, "nested too deeply")


def _json_list(path: Path) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    rows = read_json(path, " (a file with one object per line must be named .jsonl)")
    if not isinstance(rows, list):
        raise ValueError(f"{path}: expected a JSON list of objects, got {type(rows).__name__}")
    yield from ((number, _object(row)) for number, row in enumerate(rows, start=1))


def read_json(path: Path, advice: str = "") -> Any:
    """The content of a JSON file."""
    with open_text(path) as file:
        try:
            return json.load(file)
        except ValueError as error:  # also a number with too many digits
            raise ValueError(f"{path}: not valid JSON: {error}{advice}") from error
        except RecursionError:
            raise ValueError(f"{path}: not valid JSON: nested too deeply") from None


def _object(row: Any) -> dict[str, Any] | BadRow:
    return row if isinstance(row, dict) else BadRow(None, f"not a JSON object but {type(row).__name__}")


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            batches = file.iter_batches()
            yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: not a Parquet file: {error}") from error


def text_field(row: Mapping[str, Any], column: str, may_be_empty: bool = False) -> str:
    """A text of a row, as it is in the file; raises a [`BadRow`] if it is missing, empty or not a text."""
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


def number_field(row: Mapping[str, Any], column: str, low: float, high: float, allowed: str) -> float:
    """A number of a row; raises a [`BadRow`] that says what is `allowed` if it is none, or out of its range."""
    text = str(row.get(column)).strip()
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not low <= number <= high:
        raise BadRow(column, f"{text!r} is not {allowed}")
    return number


def parse_rows(
    source: Any, rows: Iterable[tuple[int, Any]], parse: Callable[[Any], dict[str, Any]], skip_bad: bool = False
) -> tuple[list[dict[str, Any]], str]:
    """
    The examples that `parse` makes of the numbered rows of a [`Table`], and a text that says how many were skipped and
    why, `""` if none: a malformed row, for which `parse` raises a [`BadRow`], is refused unless `skip_bad` is set.
    """
    examples, bad = [], []
    for number, row in rows:
        try:
            if isinstance(row, BadRow):
                raise row
            examples.append(parse(row))
        except BadRow as error:
            where = "" if error.field is None else f", field {error.field!r}"
            reason = f"row {number}{where}: {error.message}"
            if not skip_bad:
                raise ValueError(f"{source}: {reason}") from None
            bad.append(reason)
    if not examples:
        raise ValueError(f"{source}: no usable rows" + (f", {len(bad)} bad ones, the first: {bad[0]}" if bad else ""))
    skipped = f"skipped {len(bad)} of {len(examples) + len(bad)} rows, the first: {bad[0]}" if bad else ""
    if bad:
        logger.warning(f"{source}: {skipped}")
    return examples, skipped


def make_dataset(examples: list[dict[str, Any]], types: Mapping[str, Any], skipped: str = "") -> "datasets.Dataset":
    """
    A dataset of the columns that examples have, of these types; what was `skipped` is its description. Their `"id"` is
    a tuple of candidates: the first that differs in all examples is taken, and else they are numbered from 0.
    """
    import datasets

    ids = [str(index) for index in range(len(examples))]
    for candidates in zip(*(example["id"] for example in examples), strict=True):
        texts = {str(value).strip() for value in candidates if value is not None}
        if len(texts - {""}) == len(examples) and all(map(is_unicode, texts)):
            ids = [str(value).strip() for value in candidates]
            break
    rows = [example | {"id": identifier} for example, identifier in zip(examples, ids, strict=True)]
    types = {"id": datasets.Value("string")} | {name: types[name] for name in types if name in examples[0]}
    dataset = datasets.Dataset.from_list(rows, features=datasets.Features(types))
    dataset.info.description = skipped
    return dataset


@contextmanager
def _reaching_the_hub(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # datasets, huggingface_hub and httpx share no base class of errors
        reason = str(error).strip().partition("\n")[0]
        raise OSError(
            f"cannot load {what} from the Hub ({type(error).__name__}: {reason}); without a network, give a folder "
            "with its files: --data DIR"
        ) from error


def load_hub(source: HubSplit) -> "datasets.Dataset":
    """A split of the Hub, unchanged; raises an `OSError` if it cannot be loaded for any reason."""
    import datasets

    with _reaching_the_hub(f"split {source.split!r} of {source.dataset}"):
        return datasets.load_dataset(source.dataset, source.config, split=source.split)


def hub_splits(dataset: str, config: str | None) -> list[HubSplit]:
    """The splits of a dataset of the Hub; raises an `OSError` if it cannot be reached."""
    import datasets

    with _reaching_the_hub(f"the names of the splits of {dataset}"):
        return [HubSplit(dataset, config, split) for split in datasets.get_dataset_split_names(dataset, config)]
