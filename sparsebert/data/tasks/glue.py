"""The tasks of GLUE: their files, their datasets on the Hub, submissions and averages."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
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


@dataclass(frozen=True)
class GlueTask:
    """
    The data format of a task. Its key in [`GLUE`] is the name of its configuration on the Hub.

    Attributes:
        folder (`str`): Name of its folder in GLUE's download, and of its submission.
        texts (`tuple[tuple[str, ...], ...]`): For the text, and for the second text of a pair, the possible names of
            the column, in order of preference.
        label (`tuple[str, ...]`): The possible names of the label's column.
        names (`tuple[str, ...]`): Names of the classes in the order of the labels; empty for a regression.
        named (`bool`, *optional*, defaults to `False`): Whether files have the names of the classes, not the numbers.
        may_be_empty (`bool`, *optional*, defaults to `False`): Whether one text of a pair may be empty.
    """

    folder: str
    texts: tuple[tuple[str, ...], ...]
    label: tuple[str, ...]
    names: tuple[str, ...]
    named: bool = False
    may_be_empty: bool = False


_SINGLE = (("sentence", "text"),)
_PAIR = (("sentence1",), ("sentence2",))
_ENTAILMENT = ("entailment", "not_entailment")

GLUE: dict[str, GlueTask] = {
    "cola": GlueTask("CoLA", _SINGLE, ("label",), ("unacceptable", "acceptable")),
    "sst2": GlueTask("SST-2", _SINGLE, ("label",), ("negative", "positive")),
    "mrpc": GlueTask(
        "MRPC",
        (("#1 String", "sentence1"), ("#2 String", "sentence2")),
        ("Quality", "label"),
        ("not_equivalent", "equivalent"),
    ),
    "stsb": GlueTask("STS-B", _PAIR, ("score", "label"), ()),
    "qqp": GlueTask(
        "QQP",
        (("question1", "sentence1"), ("question2", "sentence2")),
        ("is_duplicate", "label"),
        ("not_duplicate", "duplicate"),
        may_be_empty=True,  # a few questions are
    ),
    "mnli": GlueTask(
        "MNLI",
        (("sentence1", "premise"), ("sentence2", "hypothesis")),
        ("gold_label", "label"),
        ("entailment", "neutral", "contradiction"),
        named=True,
    ),
    "qnli": GlueTask(
        "QNLI", (("question", "sentence1"), ("sentence", "sentence2")), ("label",), _ENTAILMENT, named=True
    ),
    "rte": GlueTask("RTE", _PAIR, ("label",), _ENTAILMENT, named=True),
    "wnli": GlueTask("WNLI", _PAIR, ("label",), ("not_entailment", "entailment")),
}

# Columns of Table 3 of SparseBERT (arXiv 2102.12871): title, task, split, metric.
GLUE_COLUMNS: tuple[tuple[str, str, str, str], ...] = (
    ("MNLI-m", "mnli", "validation_matched", "accuracy"),
    ("MNLI-mm", "mnli", "validation_mismatched", "accuracy"),
    ("QQP", "qqp", "validation", "f1"),
    ("QNLI", "qnli", "validation", "accuracy"),
    ("SST-2", "sst2", "validation", "accuracy"),
    ("CoLA", "cola", "validation", "matthews"),
    ("STS-B", "stsb", "validation", "spearman"),
    ("MRPC", "mrpc", "validation", "f1"),
    ("RTE", "rte", "validation", "accuracy"),
)

# Names of the files that GLUE's server reads, without suffix.
SUBMISSIONS: dict[tuple[str, str], str] = {
    ("mnli", "test_matched"): "MNLI-m",
    ("mnli", "test_mismatched"): "MNLI-mm",
    ("mnli", "test_ax"): "AX",
} | {(name, "test"): task.folder for name, task in GLUE.items() if name != "mnli"}

HUB = "nyu-mll/glue"
_STEMS = {"train": "train", "dev": "validation", "val": "validation", "validation": "validation", "test": "test"}
_MNLI_STEMS = {
    "train": "train",
    "dev_matched": "validation_matched",
    "validation_matched": "validation_matched",
    "dev_mismatched": "validation_mismatched",
    "validation_mismatched": "validation_mismatched",
    "test_matched": "test_matched",
    "test_mismatched": "test_mismatched",
    "test_ax": "test_ax",
}
_COLA_COLUMNS = ("source", "label", "mark", "sentence")
_IDS = ("index", "idx", "id", "pairID")
_UNLABELED = ("", "-1", "None")


def splits(name: str, data: str | None = None) -> list[str]:
    """
    List the splits of a task.

    Args:
        name (`str`): Name of the task, a key of [`GLUE`].
        data (`str`, *optional*): Folder of GLUE or of the task. By default the splits on the Hub, which is not
            contacted.

    Returns:
        `list[str]`: Those of `train`, `validation` and `test` (for MNLI `validation_matched` etc.) that exist, then
        the names of all other data files.

    Raises:
        FileNotFoundError: If the folder does not exist.
        ValueError: If two files are for the same split.
    """
    return _canonical(name) if data is None else list(_find(name, data))


def _canonical(name: str) -> list[str]:
    return list(dict.fromkeys(_stems(name).values()))


def _stems(name: str) -> dict[str, str]:
    return _MNLI_STEMS if name == "mnli" else _STEMS


def _find(name: str, data: str) -> dict[str, Path]:
    root = folder = Path(data)
    if root.is_dir():
        accepted = (GLUE[name].folder.lower(), name)
        folders = (path for path in sorted(root.iterdir()) if path.name.lower() in accepted and path.is_dir())
        folder = next(folders, root)
    files = find_files(folder, _stems(name))
    if name == "mnli":
        for diagnostic in filter(Path.is_dir, (root / "diagnostic", root / "AX")):
            found = find_files(diagnostic, {"diagnostic": "test_ax", "AX": "test_ax"})
            for path in islice(found.values(), 1):
                files.setdefault("test_ax", path)
    return files


def load(
    name: str, data: str | None = None, splits: Sequence[str] | None = None, skip_bad: bool = False
) -> "datasets.DatasetDict":
    """
    Load a task of GLUE.

    Args:
        name (`str`): Name of the task, a key of [`GLUE`].
        data (`str`, *optional*): Folder with the files: GLUE's, with a folder for each task, or that of the task. By
            default the Hub.
        splits (`Sequence[str]`, *optional*): Splits to read, by default all canonical ones that exist.
        skip_bad (`bool`, *optional*, defaults to `False`): Skip malformed rows with a warning. Rows of test sets are
            never skipped.

    Returns:
        `datasets.DatasetDict`: Splits with the columns `id`, `text`, `text_pair` (for pairs) and `label`: a
        `ClassLabel`, or for STS-B a number from 0 to 5. Splits without labels lack this column.

    Raises:
        FileNotFoundError: If the folder does not exist.
        OSError: If the Hub cannot be reached.
        ValueError: If a split is missing or a row is malformed. The message says where.
    """
    import datasets

    canonical = _canonical(name)
    files = None if data is None else _find(name, data)
    available = canonical if files is None else list(files)
    where = HUB if data is None else data
    if splits is None:
        splits = [split for split in canonical if split in available]
        if not splits:
            raise ValueError(
                f"{where}: no files of {name}, here or in a folder {GLUE[name].folder}; expected names: "
                f"{', '.join(_stems(name))}; available splits: {', '.join(available) or 'none'}"
            )
    check_splits(splits, available, where)
    loaded = datasets.DatasetDict()
    for split in splits:
        if files is not None:
            loaded[split] = _read(name, split, files[split], skip_bad)
        else:
            config, hub_split = ("ax", "test") if split == "test_ax" else (name, split)
            loaded[split] = normalize(name, load_hub(HUB, config, hub_split), skip_bad)
    return loaded


def _accepted(task: GlueTask) -> dict[str, tuple[str, ...]]:
    return dict(zip(("text", "text_pair"), task.texts, strict=False)) | {"label": task.label}


def _features(task: GlueTask, fields: Iterable[str]) -> "datasets.Features":
    import datasets

    label = datasets.ClassLabel(names=list(task.names)) if task.names else datasets.Value("float32")
    types = {"id": datasets.Value("string"), "text": datasets.Value("string"), "text_pair": datasets.Value("string")}
    types["label"] = label
    return datasets.Features({field: types[field] for field in ("id", *fields)})


def _read(name: str, split: str, path: Path, skip_bad: bool) -> "datasets.Dataset":
    task = GLUE[name]
    header, names = read_header(path), None
    if name == "cola" and not set(header) & set(task.texts[0]):
        header = names = list(_COLA_COLUMNS)
    may_lack_label = split.startswith("test")
    columns = find_columns(path, header, _accepted(task), optional=("label",) if may_lack_label else ())
    if may_lack_label and "label" in columns:
        first = next((row for _, row in read_rows(path, names) if not isinstance(row, BadRow)), {})
        if str(first.get(columns["label"], "")).strip() in _UNLABELED:
            del columns["label"]
    # The server expects a line for every row of a test set.
    skip_bad = skip_bad and (name, split) not in SUBMISSIONS
    examples, skipped = parse_rows(path, read_rows(path, names), _parser(task, columns, task.named), skip_bad)
    return make_dataset(examples, _features(task, columns), skipped)


def _parser(task: GlueTask, columns: Mapping[str, str], named: bool) -> Callable[[dict[str, Any]], dict[str, Any]]:
    numbers = {(label if named else str(index)): index for index, label in enumerate(task.names)}

    def parse(row: dict[str, Any]) -> dict[str, Any]:
        example: dict[str, Any] = {"id": tuple(row.get(column) for column in _IDS)}
        for field, column in columns.items():
            if field != "label":
                other = row.get(columns["text"] if field == "text_pair" else columns.get("text_pair", ""))
                may_be_empty = task.may_be_empty and bool(str(other or "").strip())
                example[field] = text_field(row, column, may_be_empty)
                continue
            value = row.get(column)
            text = str(value).strip()
            if task.names and text not in numbers:
                raise BadRow(column, f"{value!r} is not one of {', '.join(numbers)}")
            example[field] = numbers[text] if task.names else _score(column, text)
        return example

    return parse


def _score(column: str, text: str) -> float:
    try:
        score = float(text)
    except ValueError:
        score = float("nan")
    if not 0 <= score <= 5:
        raise BadRow(column, f"{text!r} is not a number from 0 to 5")
    return score


def normalize(name: str, dataset: "datasets.Dataset", skip_bad: bool = False) -> "datasets.Dataset":
    """
    Convert a split of the Hub to the columns of [`load`].

    Args:
        name (`str`): Name of the task, a key of [`GLUE`].
        dataset (`datasets.Dataset`): Split with the columns `idx`, the texts, and `label` (-1 if there are no labels).
        skip_bad (`bool`, *optional*, defaults to `False`): Skip malformed rows with a warning.

    Returns:
        `datasets.Dataset`: The same rows with the columns of [`load`].

    Raises:
        ValueError: If a row is malformed.
    """
    task = GLUE[name]
    columns = find_columns(HUB, dataset.column_names, _accepted(task), optional=("label",))
    if "label" in columns and set(dataset[columns["label"]][:]) <= {-1}:
        del columns["label"]
        skip_bad = False
    rows = enumerate(dataset, start=1)
    examples, skipped = parse_rows(f"{HUB} {name}", rows, _parser(task, columns, named=False), skip_bad)
    return make_dataset(examples, _features(task, columns), skipped)


def write_submission(name: str, split: str, rows: Sequence[Mapping[str, Any]], path: str | Path) -> Path | None:
    """
    Write the predictions of a test split in the format of GLUE's server. Nothing is written for other splits.

    Args:
        name (`str`): Name of the task, a key of [`GLUE`].
        split (`str`): Name of the split. The server accepts `test`, and `test_matched`, `test_mismatched` and
            `test_ax` of MNLI.
        rows (`Sequence[Mapping]`): The predictions of [`decode`] for all examples, in the order of the file.
        path (`str` or `Path`): Folder to write to, created if missing.

    Returns:
        `Path`: The file, e.g. `MNLI-m.tsv`, or `None` if nothing was written.
    """
    if (name, split) not in SUBMISSIONS:
        return None
    task = GLUE[name]
    lines = ["index\tprediction"]
    for index, row in enumerate(rows):
        value = row["prediction"]
        if not task.names:
            value = f"{min(max(value, 0.0), 5.0):.3f}"
        elif task.named:
            value = task.names[value]
        lines.append(f"{index}\t{value}")
    file = Path(path) / f"{SUBMISSIONS[name, split]}.tsv"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
    return file


def averages(scores: Mapping[str, float | None]) -> dict[str, float | int | None]:
    """
    Average the scores over the columns of [`GLUE_COLUMNS`].

    Args:
        scores (`Mapping[str, float | None]`): Scores by the title of their column; columns may be missing or `None`.

    Returns:
        `dict[str, float | int | None]`: `average_9`, the mean of the columns that are there, and `average_8`, where
        the two of MNLI are first averaged into one (and left out if one is missing); `None` without any column.
        `num_columns_9` and `num_columns_8` are the numbers of columns averaged.
    """
    values = {title: score for title, *_ in GLUE_COLUMNS if (score := scores.get(title)) is not None}
    mnli = [value for title, value in values.items() if title.startswith("MNLI")]
    merged = [value for title, value in values.items() if not title.startswith("MNLI")]
    merged += [sum(mnli) / 2] if len(mnli) == 2 else []
    return {
        "average_9": sum(values.values()) / len(values) if values else None,
        "average_8": sum(merged) / len(merged) if merged else None,
        "num_columns_9": len(values),
        "num_columns_8": len(merged),
    }
