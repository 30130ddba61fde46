"""SQuAD v1.1 and v2.0: find the answer to a question in a paragraph, or tell that there is none."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.utils import logging

from ...files import is_unicode, open_text
from .task_files import BadRow, check_splits, find_files, load_hub, parse_rows


if TYPE_CHECKING:
    import datasets

logger = logging.get_logger(__name__)

HUB = {"squad": "rajpurkar/squad", "squad_v2": "rajpurkar/squad_v2"}
HUB_SPLITS = ("train", "validation")
CANONICAL = ("train", "validation", "test")

_VERSIONS = {"squad": "v1.1", "squad_v2": "v2.0"}


def splits(name: str, data: str | None = None) -> list[str]:
    """
    List the splits.

    Args:
        name (`str`): `"squad"` (v1.1) or `"squad_v2"`.
        data (`str`, *optional*): Folder with SQuAD files; by default the splits on the Hub.

    Returns:
        `list[str]`: Those of `train`, `validation` and `test` that exist, then the names of all other files.
    """
    return list(HUB_SPLITS if data is None else _files(name, data))


def load(
    name: str, data: str | None = None, splits: Sequence[str] | None = None, skip_bad: bool = False
) -> "datasets.DatasetDict":
    """
    Load SQuAD, from a folder or from the Hub.

    Args:
        name (`str`): `"squad"` (v1.1, every question has an answer) or `"squad_v2"`.
        data (`str`, *optional*):
            Folder with files in the official format, e.g. `train-v1.1.json` or `dev-v2.0.json.gz`; by default the
            Hub.
        splits (`Sequence[str]`, *optional*): Splits to load, by default all canonical ones that exist.
        skip_bad (`bool`, *optional*, defaults to `False`): Skip malformed questions with a warning.

    Returns:
        `datasets.DatasetDict`: Splits with the columns `id`, `title`, `question`, `context` and `answers`: a list of
        `{"text", "answer_start"}` without surrounding whitespace, with `answer_start` in characters; empty if the
        question has no answer. Splits without answers, or with empty ones only, lack this column.

    Raises:
        ValueError: If a split is unknown, a file is not in the format of SQuAD, or a question is malformed: a
            text is not Unicode, the question, context or an answer is empty, an answer is not at its place in the
            context, `is_impossible` contradicts the answers, or a question of v1.1 has no answer.
        FileNotFoundError: If the folder does not exist.
        OSError: If the Hub cannot be reached.
    """
    import datasets

    files = {} if data is None else _files(name, data)
    available = HUB_SPLITS if data is None else tuple(files)
    where = HUB[name] if data is None else data
    if splits is None:
        splits = [split for split in CANONICAL if split in available]
        if not splits:
            raise ValueError(
                f"none of {', '.join(CANONICAL)} is in {where}; available: {', '.join(available) or 'none'}"
            )
    check_splits(splits, available, where)
    loaded = datasets.DatasetDict()
    for split in splits:
        if data is None:
            loaded[split] = from_hub(name, load_hub(HUB[name], None, split), skip_bad)
        else:
            loaded[split] = _parse(name, files[split], list(_questions(files[split])), skip_bad)
    return loaded


def from_hub(name: str, dataset: "datasets.Dataset", skip_bad: bool = False) -> "datasets.Dataset":
    """
    Convert a split of the Hub, where answers are a list of texts and a list of offsets, to the columns of [`load`].

    Args:
        name (`str`): `"squad"` or `"squad_v2"`.
        dataset (`datasets.Dataset`): Split with the columns `id`, `title`, `question`, `context` and `answers`.
        skip_bad (`bool`, *optional*, defaults to `False`): Skip malformed questions with a warning.

    Returns:
        `datasets.Dataset`: The split with the columns of [`load`].

    Raises:
        ValueError: If a question is malformed, see [`load`].
    """
    questions = []
    for row in dataset:
        texts, starts = row["answers"]["text"], row["answers"]["answer_start"]
        answers = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
        questions.append(row | {"answers": answers})
    return _parse(name, HUB[name], questions, skip_bad)


def _files(name: str, data: str) -> dict[str, Path]:
    """The file of each split."""
    stems = {"train": "train", "dev": "validation", "test": "test"}
    return find_files(data, stems | {f"{stem}-{_VERSIONS[name]}": split for stem, split in stems.items()})


def _questions(path: Path) -> Iterator[dict]:
    """Yield the questions of a file in the official format, each with its `title` and `context`."""

    def member(parent: Any, key: str, kind: type, place: str) -> Any:
        if not isinstance(parent, dict) or not isinstance(parent.get(key), kind):
            raise ValueError(f"{path}: not in the format of SQuAD: {place} has no {kind.__name__} {key!r}")
        return parent[key]

    with open_text(path) as file:
        try:
            content = json.load(file)
        except (ValueError, RecursionError) as error:  # a number may have too many digits
            raise ValueError(f"{path}: not valid JSON: {error}") from error
    for i, article in enumerate(member(content, "data", list, "the file")):
        for j, paragraph in enumerate(member(article, "paragraphs", list, f"data[{i}]")):
            place = f"data[{i}].paragraphs[{j}]"
            context = member(paragraph, "context", str, place)
            for k, question in enumerate(member(paragraph, "qas", list, place)):
                member(question, "id", str, f"{place}.qas[{k}]")
                member(question, "question", str, f"{place}.qas[{k}]")
                yield question | {"title": str(article.get("title") or ""), "context": context}


def _parse(name: str, source: "Path | str", questions: list[dict], skip_bad: bool) -> "datasets.Dataset":
    """Check the questions and turn them into a dataset."""
    import datasets

    columns: dict[str, Any] = dict.fromkeys(("id", "title", "question", "context"), datasets.Value("string"))
    parse = _parser(name, labeled=any(map(_has_answers, questions)))
    examples, skipped = parse_rows(source, enumerate(questions, start=1), parse, skip_bad)
    if len({example["id"] for example in examples}) < len(examples):
        logger.warning(f"{source}: some ids occur more than once; the questions are numbered from 0 instead.")
        examples = [example | {"id": str(index)} for index, example in enumerate(examples)]
    if "answers" in examples[0]:
        columns["answers"] = [{"text": datasets.Value("string"), "answer_start": datasets.Value("int32")}]
    dataset = datasets.Dataset.from_list(examples, features=datasets.Features(columns))
    dataset.info.description = skipped
    return dataset


def _has_answers(question: dict) -> bool:
    """Whether a question says what its answers are, or that it has none. Empty texts stand for hidden answers."""
    answers = question.get("answers")
    if not isinstance(answers, list):
        return "answers" in question
    return not (answers and all(isinstance(answer, dict) and answer.get("text") == "" for answer in answers))


def _parser(name: str, labeled: bool) -> Callable[[dict], dict]:
    """Return a function that checks a question and returns its columns."""

    def parse(row: dict) -> dict:
        example = {field: row[field] for field in ("id", "title", "question", "context")}
        question = f"question {row['id']!r}"
        for field, text in example.items():
            if not text.isascii() and not is_unicode(text):
                raise BadRow(field, f"{question} has half of a surrogate pair, which is no character")
        for field in ("question", "context"):
            if not row[field].strip():
                raise BadRow(field, f"{question} has an empty {field}")
        if labeled:
            answers = row.get("answers")
            if not isinstance(answers, list):
                raise BadRow("answers", f"{question} has no list of answers, unlike others in the file")
            if not answers and name == "squad":
                raise BadRow("answers", f"{question} has no answer, which only squad_v2 allows")
            if "is_impossible" in row and bool(row["is_impossible"]) == bool(answers):
                raise BadRow("is_impossible", f"{question} has {len(answers)} answers, but {row['is_impossible']!r}")
            example["answers"] = [_check_answer(question, answer, row["context"]) for answer in answers]
        return example

    return parse


def _check_answer(question: str, answer: dict, context: str) -> dict:
    """Return the answer without surrounding whitespace; raise a `BadRow` if it is not in the context at its place."""
    text, start = (answer.get("text"), answer.get("answer_start")) if isinstance(answer, dict) else (None, None)
    if not isinstance(text, str) or not isinstance(start, int):
        raise BadRow("answers", f"{question} has {answer!r}, expected a 'text' and an integer 'answer_start'")
    if not text.strip():
        raise BadRow("answers", f"{question} has an empty answer")
    if not 0 <= start < len(context):
        raise BadRow("answers", f"{question} has answer_start {start}, expected 0 to {len(context) - 1}")
    found = context[start : start + len(text)]
    if found.strip() != text.strip():
        raise BadRow("answers", f"{question} has {text.strip()!r} at {start}, but its context has {found.strip()!r}")
    return {"text": found.strip(), "answer_start": start + len(found) - len(found.lstrip())}


def write_submission(name: str, split: str, rows: Sequence[dict], path: str | Path) -> Path:
    """
    Write the predictions in the format of the official evaluation script.

    Args:
        name (`str`): `"squad"` or `"squad_v2"`.
        split (`str`): Name of the split.
        rows (`Sequence[dict]`): The predictions of [`~sparsebert.data.tasks.question_answering.decode`].
        path (`str` or `Path`): Folder to write to, created if missing.

    Returns:
        `Path`: The file, e.g. `predictions_validation.json`. Next to it are `nbest_predictions_validation.json` and,
        for v2.0, `null_odds_validation.json` for the option `--na-prob-file` of the script.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    columns = {"predictions": "prediction", "nbest_predictions": "nbest"}
    columns |= {"null_odds": "null_odds"} if name == "squad_v2" else {}
    for file, column in columns.items():
        content = json.dumps({row["id"]: row[column] for row in rows}, ensure_ascii=False)
        (folder / f"{file}_{split}.json").write_text(content + "\n", encoding="utf-8")
    return folder / f"predictions_{split}.json"
