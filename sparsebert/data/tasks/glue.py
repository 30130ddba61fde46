"""The tasks of GLUE: their files, their datasets on the Hub, submissions and averages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .classification import text_types
from .task_files import (
    STEMS,
    BadRow,
    HubSplit,
    Source,
    choose_sources,
    find_files,
    make_dataset,
    number_field,
    open_table,
    parse_rows,
    text_field,
)


if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True)
class GlueTask:
    """The data format of a task. Its key in [`GLUE`] is the name of its configuration on the Hub."""

    folder: str  # in GLUE's download, and the name of the submission
    texts: tuple[tuple[str, ...], ...]  # for each text the possible names of its column, in order of preference
    label: tuple[str, ...]  # the possible names of the label's column
    names: tuple[str, ...]  # of the classes in the order of the labels; empty for a regression
    named: bool = False  # whether files have the names of the classes, not the numbers
    may_be_empty: bool = False  # whether one text of a pair may be empty


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
_MNLI_STEMS = {
    "train": "train",
    **{f"{stem}_{kind}": f"validation_{kind}" for kind in ("matched", "mismatched") for stem in ("dev", "validation")},
    **{split: split for split in ("test_matched", "test_mismatched", "test_ax")},
}
_COLA_COLUMNS = ("source", "label", "mark", "sentence")
_IDS = ("index", "idx", "id", "pairID")


def splits(name: str, data: str | None = None) -> list[str]:
    """Names of the splits of a task in a folder, or on the Hub, which is not contacted: first the canonical ones."""
    return list(_sources(name, data))


def _stems(name: str) -> dict[str, str]:
    return _MNLI_STEMS if name == "mnli" else STEMS


def _sources(name: str, data: str | None) -> dict[str, Source]:
    if data is None:
        splits = dict.fromkeys(_stems(name).values())
        return {
            split: HubSplit(HUB, "ax", "test") if split == "test_ax" else HubSplit(HUB, name, split)
            for split in splits
        }
    root, accepted = Path(data), (GLUE[name].folder.lower(), name)
    inside = sorted(root.iterdir()) if root.is_dir() else []
    folder = next((path for path in inside if path.name.lower() in accepted and path.is_dir()), root)
    files = find_files(folder, _stems(name))
    if name == "mnli":
        for diagnostic in filter(Path.is_dir, (root / "diagnostic", root / "AX")):
            found = find_files(diagnostic, {"diagnostic": "test_ax", "AX": "test_ax"})
            for path in islice(found.values(), 1):
                files.setdefault("test_ax", path)
    return {**files}


def load(
    name: str, data: str | None = None, splits: Sequence[str] | None = None, skip_bad: bool = False
) -> "datasets.DatasetDict":
    """
    Load a task, a key of [`GLUE`], from the Hub or from a folder `data`: GLUE's, with a folder for each task, or that
    of the task. By default all canonical splits that exist are read.

    Their columns are `id`, `text`, `text_pair` (for pairs) and, where there are labels, `label`: a `ClassLabel`, or
    for STS-B a number from 0 to 5. Malformed rows of test sets are refused even with `skip_bad`.
    """
    import datasets

    expected = (
        f"no files of {name}, here or in a folder {GLUE[name].folder}; expected names: {', '.join(_stems(name))}"
    )
    sources = choose_sources(_sources(name, data), splits, _stems(name).values(), data or HUB, expected)
    return datasets.DatasetDict({split: _read(name, split, source, skip_bad) for split, source in sources.items()})


def _read(name: str, split: str, source: Source, skip_bad: bool) -> "datasets.Dataset":
    import datasets

    task = GLUE[name]
    table = open_table(source)
    if name == "cola" and not set(table.header) & set(task.texts[0]):
        table = open_table(source, _COLA_COLUMNS)
    accepted = dict(zip(("text", "text_pair"), task.texts, strict=False)) | {"label": task.label}
    columns = table.find_columns(accepted, split)
    named = task.named and isinstance(source, Path)
    numbers = {(label if named else str(index)): index for index, label in enumerate(task.names)}

    def parse(row: dict[str, Any]) -> dict[str, Any]:
        example: dict[str, Any] = {"id": tuple(row.get(column) for column in _IDS)}
        for field, column in columns.items():
            if field != "label":
                other = row.get(columns["text"] if field == "text_pair" else columns.get("text_pair", ""))
                example[field] = text_field(row, column, task.may_be_empty and bool(str(other or "").strip()))
            elif task.names:
                if str(row.get(column)).strip() not in numbers:
                    raise BadRow(column, f"{row.get(column)!r} is not one of {', '.join(numbers)}")
                example[field] = numbers[str(row[column]).strip()]
            else:
                example[field] = number_field(row, column, 0, 5, "a number from 0 to 5")
        return example

    # The server expects a line for every row of a test set.
    skip_bad = skip_bad and (name, split) not in SUBMISSIONS
    examples, skipped = parse_rows(source, table.rows, parse, skip_bad)
    label = datasets.ClassLabel(names=list(task.names)) if task.names else datasets.Value("float32")
    return make_dataset(examples, text_types(label), skipped)


def example(name: str) -> dict[str, str]:
    """Small files of the task."""
    task = GLUE[name]
    labels = task.names if task.named else range(len(task.names)) if task.names else ("0.5", "4.25")
    columns = ["index", *(columns[0] for columns in task.texts), task.label[0]]
    rows = [
        [str(number), *(f"text {number} of {column}" for column in columns[1:-1]), str(labels[number % len(labels)])]
        for number in range(12)
    ]
    content = "".join("\t".join(row) + "\n" for row in (columns, *rows))
    development = [stem for stem in _stems(name) if stem.startswith("dev")]
    return {f"{task.folder}/{stem}.tsv": content for stem in ("train", *development)}


def write_submission(name: str, split: str, rows: Sequence[Mapping[str, Any]], path: str | Path) -> Path | None:
    """
    Write the predictions of a test split, in the order of the file, in the format of GLUE's server: e.g. `MNLI-m.tsv`
    in the folder `path`, which is created if missing. Nothing is written for other splits.
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
    Averages of scores by the title of their column in [`GLUE_COLUMNS`], of which some may be missing or `None`:
    `average_9` is the mean of all, `average_8` that with the two of MNLI averaged into one (and left out if one is
    missing); `num_columns_9` and `num_columns_8` are the numbers of columns averaged.
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
