"""Parts of the data of a task, written as files of their own: some rows to train on and some to evaluate on."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sparsebert.data.tasks import TASKS
from sparsebert.data.tasks.task_files import FORMATS
from sparsebert.training.finetuning.finetuning_arguments import FinetuningArguments
from sparsebert.training.finetuning.task_data import MissingSplitError, choose_splits


# Share of the contexts to evaluate on, if there is only one file.
HELD_OUT = 0.25


def find_splits(task: str, data: str | None) -> tuple[str, str]:
    """Choose the splits to train on and to evaluate on. If the folder has only one file, this is divided."""
    available = TASKS[task].splits(data)
    if len(available) == 1:
        return available[0], available[0]
    try:
        train, evaluation, _ = choose_splits(available, FinetuningArguments(task=task, data=data, test_split=[]))
    except MissingSplitError as error:  # its advice is for other commands
        raise ValueError(
            f"task {task}: folder {str(data)!r} must hold one file, or one to train on (train...) and one to evaluate "
            f"on (val... or dev...), got {', '.join(available) or 'none'}; files end in {', '.join(FORMATS)}"
        ) from error
    return train, evaluation[0]


def write_parts(task: str, data: str | None, folder: Path, num_train: int, num_validation: int) -> tuple[int, int]:
    """Write some rows of a task, always the same ones, in its original format."""
    train, validation = find_splits(task, data)
    loaded = TASKS[task].load(data=data, splits=list(dict.fromkeys((train, validation))), skip_bad=True)
    for split in loaded:
        if TASKS[task].reference not in loaded[split].column_names:
            raise ValueError(f"task {task}: split {split!r} in {data} has no labels")
    shuffled = {split: rows.shuffle(seed=0) for split, rows in loaded.items()}
    if train == validation:
        train_set, validation_set = _divide(shuffled[train], f"task {task}: split {train!r} in {data}")
    else:
        train_set, validation_set = shuffled[train], shuffled[validation]
    folder.mkdir(parents=True, exist_ok=True)
    suffix, write = _FORMATS[task]
    counts = []
    for stem, rows, most in (("train", train_set, num_train), ("dev", validation_set, num_validation)):
        part = rows.select(range(min(most, len(rows)))).to_list()
        (folder / f"{stem}{suffix}").write_text(write(part), encoding="utf-8")
        counts.append(len(part))
    return counts[0], counts[1]


def _divide(rows, name):
    """Rows to train on and to evaluate on, without a context in both."""
    contexts = list(dict.fromkeys(rows["context"][:]))
    if len(contexts) < 2:
        raise ValueError(f"{name} has one context, too few to divide")
    held = set(contexts[: max(int(HELD_OUT * len(contexts)), 1)])
    evaluated = [context in held for context in rows["context"][:]]
    return tuple(rows.select([i for i, held in enumerate(evaluated) if held == part]) for part in (False, True))


def _as_squad(rows):
    """Every question with a context of its own."""
    paragraphs = [
        {"context": row["context"], "qas": [{name: row[name] for name in ("id", "question", "answers")}]}
        for row in rows
    ]
    return json.dumps({"data": [{"title": "", "paragraphs": paragraphs}]})


def _as_swag(rows):
    names = {"context": "sent1", "start": "sent2", "endings": "endings", "label": "label"}
    return "".join(json.dumps({ours: row[name] for name, ours in names.items()}) + "\n" for row in rows)


_FORMATS: dict[str, tuple[str, Callable[[Sequence[dict[str, Any]]], str]]] = {
    "squad": (".json", _as_squad),
    "squad_v2": (".json", _as_squad),
    "swag": (".jsonl", _as_swag),
}
