"""One's own texts, or pairs of texts, each with a label or a number: in files or in a dataset of the Hub."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.utils import logging

from ...checks import LARGEST_SEED, check_range, nearest, no_effect
from ..documents import hub_source
from .classification import text_types
from .task_files import (
    EMPTY,
    FORMATS,
    STEMS,
    UNLABELED,
    BadRow,
    Source,
    Table,
    choose_sources,
    find_files,
    hub_splits,
    make_dataset,
    number_field,
    open_table,
    parse_rows,
    split_name,
    text_field,
)


if TYPE_CHECKING:
    import datasets

logger = logging.get_logger(__name__)

_STEMS = STEMS | {"valid": "validation", "eval": "validation"}
_CANONICAL = ("train", "validation", "test")
_IDS = ("id", "idx", "index")
# With more rows than this, labels that are all different are taken for a mistake.
_FEW_ROWS = 20
_LARGEST = 3e38  # of a label in float32


def splits(data: str | None = None) -> list[str]:
    """Names of the splits; with `"validation"`, which [`load`] makes of the training split if there is none."""
    found = list(_sources(data))
    if any(split.startswith("validation") for split in found) or all(split.startswith("test") for split in found):
        return found
    return [*found, "validation"]


def _sources(data: str | None) -> dict[str, Source]:
    if data is None:
        raise ValueError("the task needs your texts: --data FILE, FOLDER or hub:owner/name")
    if data.startswith("hub:"):
        name, config = hub_source(data)
        found = hub_splits(name, next(iter(config), None))
        return {_STEMS.get(source.split, source.split): source for source in found}
    path = Path(data)
    if path.is_file():
        if split_name(path)[1] not in FORMATS:
            raise ValueError(f"data: {data!r} is no data file; its name must end in {', '.join(FORMATS)}")
        return {"train": path}
    if not path.is_dir():
        raise FileNotFoundError(f"data: no file or folder {data!r}; a dataset of the Hub is written hub:owner/name")
    files = find_files(path, _STEMS)
    if len(files) == 1 and not files.keys() & set(_CANONICAL):  # then there is no doubt what it is for
        return {"train": next(iter(files.values()))}
    return {**files}


def load(
    name: str,
    data: str | None = None,
    splits: Sequence[str] | None = None,
    skip_bad: bool = False,
    train_split: str = "train",
    text_column: str | None = None,
    text_pair_column: str | None = None,
    label_column: str | None = None,
    validation_share: float | None = None,
    split_seed: int | None = None,
) -> "datasets.DatasetDict":
    """
    Load texts with labels (`"text_classification"`) or numbers (`"text_regression"`).

    The classes are those of the training split: sorted, as numbers if all are integers, or in the order of a dataset
    that names them. Without a split `validation`, a share of the training split is held out (by default a tenth, drawn
    with seed 0), of each class if it has enough examples.

    `data` is a file, a folder with files named by their splits, `"hub:owner/name"` or `"hub:owner/name:config"`. The
    columns are `id`, `text`, `text_pair` (for pairs) and `label`, a `ClassLabel` or a number, which test splits may
    lack; in the files they have the names that are given, by default these.
    """
    import datasets

    sources = _sources(data)
    for field, value in (("validation_share", validation_share), ("split_seed", split_seed)):
        if value is not None and "validation" in sources:
            raise no_effect(field, value, f"for {data}, which has a split 'validation'")
    validation_share, split_seed = 0.1 if validation_share is None else validation_share, split_seed or 0
    check_range("validation_share", validation_share, 0.001, 0.999, float)
    check_range("split_seed", split_seed, 0, LARGEST_SEED)
    if splits is None:
        splits = [split for split in _CANONICAL if split in sources or split == "validation"]
    makes_validation = "validation" in splits and "validation" not in sources
    others = [split for split in splits if split != train_split and not (makes_validation and split == "validation")]
    chosen = choose_sources(sources, [train_split, *others], _CANONICAL, str(data), "no data")

    table = open_table(chosen.pop(train_split))
    accepted = {"text": (text_column or "text",), "label": (label_column or "label",)}
    if text_pair_column or "text_pair" in table.header:
        accepted["text_pair"] = (text_pair_column or "text_pair",)
    kind = None if name == "text_classification" else datasets.Value("float32")
    loaded = {train_split: _read(table, "train", accepted, kind, skip_bad)}
    kind = loaded[train_split].features["label"]
    for split, source in chosen.items():
        loaded[split] = _read(open_table(source), split, accepted, kind, skip_bad)
    if makes_validation:
        total = len(loaded[train_split])
        loaded[train_split], loaded["validation"] = _held_out(loaded[train_split], validation_share, split_seed)
        logger.warning(
            f"{data} has no split 'validation': {len(loaded['validation'])} of {total} examples of {train_split!r}, "
            f"drawn with seed {split_seed}, are held out for it."
        )
    return datasets.DatasetDict({split: loaded[split] for split in splits})


def _read(
    table: Table, split: str, accepted: Mapping[str, Sequence[str]], kind: Any, skip_bad: bool
) -> "datasets.Dataset":
    """Read a split whose labels are of a kind, by default the classes that are found in it."""
    import datasets

    known = getattr(kind, "names", None)
    try:
        columns = table.find_columns(accepted, split, EMPTY if known is None or "-1" in known else UNLABELED)
    except ValueError as error:
        raise ValueError(f"{error}; see --text_column, --text_pair_column and --label_column") from None
    texts, label = [name for name in columns if name != "label"], columns.get("label")
    classes = table.classes.get(label or "", [])
    numbers = {text: number for number, text in enumerate(known or ())}

    def parse(row: dict[str, Any]) -> dict[str, Any]:
        example: dict[str, Any] = {"id": tuple(row.get(column) for column in _IDS)}
        example |= {name: text_field(row, columns[name]) for name in texts}
        if label is None:
            return example
        if kind is not None and known is None:
            return example | {"label": number_field(row, label, -_LARGEST, _LARGEST, "a finite number")}
        text = _class_field(row, label, classes)
        if known is not None and text not in numbers:
            raise BadRow(
                label, f"{nearest('label', text, known)} (those of the training split); leave it out with --skip_bad"
            )
        return example | {"label": numbers.get(text, text)}

    examples, skipped = parse_rows(table.source, table.rows, parse, skip_bad)
    if kind is None:
        place = f"{table.source}: the column {label!r}"
        kind = datasets.ClassLabel(names=classes or _found_classes([example["label"] for example in examples], place))
        examples = [example | {"label": kind.str2int(example["label"])} for example in examples]
    return make_dataset(examples, text_types(kind), skipped)


def _class_field(row: Mapping[str, Any], column: str, classes: Sequence[str]) -> str:
    """The name of a row's class; if the column has numbers, of one of these."""
    value = row.get(column)
    if value is None or not str(value).strip():
        raise BadRow(column, "is missing" if value is None else "is empty")
    if isinstance(value, (list, dict)):
        raise BadRow(column, f"{value!r} is not a label")
    if not classes:
        return str(value).strip()
    if value not in range(len(classes)):
        raise BadRow(column, f"{value!r} is not one of 0 to {len(classes) - 1}")
    return classes[value]


def _found_classes(labels: Sequence[str], place: str) -> list[str]:
    names = sorted(set(labels))
    if len(names) < 2:
        raise ValueError(f"{place} has only the label {names[0]!r}: two or more are needed")
    if len(names) == len(labels) > _FEW_ROWS:
        raise ValueError(
            f"{place} has {len(names)} different labels in {len(labels)} rows: name another with --label_column, or "
            "take --task text_regression if they are numbers"
        )
    try:
        return sorted(names, key=int)
    except ValueError:
        return names


def _held_out(train: "datasets.Dataset", share: float, seed: int) -> "tuple[datasets.Dataset, datasets.Dataset]":
    """A split into the examples to train on and a share of them that is held out, by classes if there are enough."""
    if len(train) < 2:
        raise ValueError("one example is too few to train on some and to evaluate on others")
    try:
        parts = train.train_test_split(share, seed=seed, stratify_by_column="label")
    except ValueError:  # it is a regression, or a class has too few examples
        parts = train.train_test_split(share, seed=seed)
    return parts["train"], parts["test"]


def example(name: str) -> dict[str, str]:
    """Small files of the task."""
    values = ("good", "bad") if name == "text_classification" else ("0.5", "4.25")
    rows = [f'"a {values[number % 2]} text, number {number}",{values[number % 2]}\n' for number in range(12)]
    return {f"{stem}.csv": "text,label\n" + "".join(rows) for stem in ("train", "dev")}
