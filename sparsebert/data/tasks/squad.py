"""SQuAD v1.1 and v2.0: find the answer to a question in a paragraph, or tell that there is none."""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.utils import logging

from ...files import is_unicode
from .task_files import BadRow, HubSplit, Source, choose_sources, find_files, load_hub, parse_rows, read_json


if TYPE_CHECKING:
    import datasets

logger = logging.get_logger(__name__)

HUB = {"squad": "rajpurkar/squad", "squad_v2": "rajpurkar/squad_v2"}
CANONICAL = ("train", "validation", "test")

_VERSIONS = {"squad": "v1.1", "squad_v2": "v2.0"}
_STEMS = {"train": "train", "dev": "validation", "test": "test"}


def splits(name: str, data: str | None = None) -> list[str]:
    """Names of the splits of `"squad"` (v1.1) or `"squad_v2"` in a folder, or on the Hub: first the canonical ones."""
    return list(_sources(name, data))


def _sources(name: str, data: str | None) -> dict[str, Source]:
    if data is None:
        return {split: HubSplit(HUB[name], None, split) for split in ("train", "validation")}
    versions = {f"{stem}-{_VERSIONS[name]}": split for stem, split in _STEMS.items()}
    return {**find_files(data, _STEMS | versions)}


def load(
    name: str, data: str | None = None, splits: Sequence[str] | None = None, skip_bad: bool = False
) -> "datasets.DatasetDict":
    """
    Load `"squad"` (v1.1, every question has an answer) or `"squad_v2"`, from the Hub or from a folder `data` with
    files in the official format, e.g. `dev-v2.0.json.gz`. By default all canonical splits that exist are read.

    Their columns are `id`, `title`, `question`, `context` and `answers`: a list of `{"text", "answer_start"}` without
    surrounding whitespace, with `answer_start` in characters; empty if the question has no answer. Splits without
    answers, or with empty ones only, lack this column.
    """
    import datasets

    expected = f"none of {', '.join(CANONICAL)} is there"
    sources = choose_sources(_sources(name, data), splits, CANONICAL, data or HUB[name], expected)
    loaded = datasets.DatasetDict()
    for split, source in sources.items():
        questions = _hub_questions(source) if isinstance(source, HubSplit) else _questions(source)
        loaded[split] = _parse(name, source, list(questions), skip_bad)
    return loaded


def _hub_questions(source: HubSplit) -> Iterator[dict]:
    """Yield the questions of the Hub, where answers are a list of texts and a list of offsets."""
    for row in load_hub(source):
        texts, starts = row["answers"]["text"], row["answers"]["answer_start"]
        answers = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
        yield row | {"answers": answers}


def _questions(path: Path) -> Iterator[dict]:
    """Yield the questions of a file in the official format, each with its `title` and `context`."""

    def member(parent: Any, key: str, kind: type, place: str) -> Any:
        if not isinstance(parent, dict) or not isinstance(parent.get(key), kind):
            raise ValueError(f"{path}: not in the format of SQuAD: {place} has no {kind.__name__} {key!r}")
        return parent[key]

    for i, article in enumerate(member(read_json(path), "data", list, "the file")):
        for j, paragraph in enumerate(member(article, "paragraphs", list, f"data[{i}]")):
            place = f"data[{i}].paragraphs[{j}]"
            context = member(paragraph, "context", str, place)
            for k, question in enumerate(member(paragraph, "qas", list, place)):
                member(question, "id", str, f"{place}.qas[{k}]")
                member(question, "question", str, f"{place}.qas[{k}]")
                yield question | {"title": str(article.get("title") or ""), "context": context}


def _parse(name: str, source: Source, questions: list[dict], skip_bad: bool) -> "datasets.Dataset":
    """Check the questions and turn them into a dataset."""
    import datasets

    columns: dict[str, Any] = dict.fromkeys(("id", "title", "question", "context"), datasets.Value("string"))
    parse = partial(_parse_question, name, any(map(_has_answers, questions)))
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


def _parse_question(name: str, labeled: bool, row: dict) -> dict:
    """Check a question and return its columns."""
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


def example() -> dict[str, str]:
    """Small files of both tasks: every question has an answer."""
    paragraphs = []
    for number in range(12):
        context = f"text {number} has a long beginning and a short end"
        answers = [{"text": "short", "answer_start": context.index("short")}]
        questions = [{"id": str(number), "question": "which end", "answers": answers}]
        paragraphs.append({"context": context, "qas": questions})
    content = json.dumps({"data": [{"title": "texts", "paragraphs": paragraphs}]})
    return {f"{stem}.json": content for stem in ("train", "dev")}


def write_submission(name: str, split: str, rows: Sequence[dict], path: str | Path) -> Path:
    """
    Write `predictions_SPLIT.json`, which is returned, and `nbest_predictions_SPLIT.json` to a folder for the official
    script, and for v2.0 `null_odds_SPLIT.json` for its option `--na-prob-file`.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    columns = {"predictions": "prediction", "nbest_predictions": "nbest"}
    columns |= {"null_odds": "null_odds"} if name == "squad_v2" else {}
    for file, column in columns.items():
        content = json.dumps({row["id"]: row[column] for row in rows}, ensure_ascii=False)
        (folder / f"{file}_{split}.json").write_text(content + "\n", encoding="utf-8")
    return folder / f"predictions_{split}.json"
