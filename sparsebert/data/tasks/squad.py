"""SQuAD v1.1 and v2.0: find the answer to a question in a paragraph, or tell that there is none."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers.utils import logging

from ...files import is_unicode, open_text
from .task_files import BadRow, check_splits, find_files, load_hub, parse_rows


if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerFast

logger = logging.get_logger(__name__)

HUB = {"squad": "rajpurkar/squad", "squad_v2": "rajpurkar/squad_v2"}
HUB_SPLITS = ("train", "validation")
CANONICAL = ("train", "validation", "test")

_VERSIONS = {"squad": "v1.1", "squad_v2": "v2.0"}
# Score of an example without any valid span: finite, so that it can be written as JSON.
_LOWEST = float(np.finfo(np.float32).min)


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
    parse = _parser(name, labelled=any(map(_has_answers, questions)))
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


def _parser(name: str, labelled: bool) -> Callable[[dict], dict]:
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
        if labelled:
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


def encode(examples: "datasets.Dataset", tokenizer: "PreTrainedTokenizerFast", options: Any) -> "datasets.Dataset":
    """
    Tokenize questions and contexts into windows.

    A context that is too long for one window is spread over several windows, each starting with the whole question.
    As in the fast tokenizers, `options.doc_stride` is the number of tokens shared by consecutive windows.

    Args:
        examples (`datasets.Dataset`): A split of [`load`].
        tokenizer (`PreTrainedTokenizerFast`): A tokenizer that begins with its CLS token and pads on the right.
        options (`Any`):
            Object with the attributes `max_length`, `max_question_length` (longer questions are truncated) and
            `doc_stride`, in tokens.

    Returns:
        `datasets.Dataset`: One row per window, with

        - `input_ids`, `token_type_ids` and `attention_mask` of shape `(num_tokens,)`;
        - `start_positions` and `end_positions`, the first and last token of the first answer, or 0 (the CLS token) if
          the window does not contain all of it; only if `examples` has answers;
        - `example_index`, the row of `examples`;
        - `offset_mapping` of shape `(num_tokens, 2)`, for each token its first character in the context and the one
          after its last, -1 for tokens outside the context.

    Raises:
        ValueError: If the tokenizer is not a fast one, does not begin with its CLS token or pads on the left, or if
            `max_length` leaves no room for the context.
    """
    import datasets

    kind = type(tokenizer).__name__
    if not tokenizer.is_fast:
        raise ValueError(f"tokenizer must be a fast one, which knows the offsets of its tokens, got {kind}")
    if tokenizer.cls_token_id is None or tokenizer("a")["input_ids"][0] != tokenizer.cls_token_id:
        raise ValueError(f"tokenizer must begin its texts with a CLS token, which stands for no answer, got {kind}")
    if tokenizer.padding_side != "right":
        raise ValueError(f"padding_side of the tokenizer must be 'right', got {tokenizer.padding_side!r}")
    special = tokenizer.num_special_tokens_to_add(pair=True)
    if options.max_question_length + special + options.doc_stride >= options.max_length:
        raise ValueError(
            f"max_length must be greater than max_question_length + {special} special tokens + doc_stride, got "
            f"{options.max_length} <= {options.max_question_length} + {special} + {options.doc_stride}"
        )

    labelled = "answers" in examples.column_names
    tokens = {"input_ids": "int32", "token_type_ids": "int8", "attention_mask": "int8"}
    numbers = ["example_index"] + labelled * ["start_positions", "end_positions"]
    features = datasets.Features(
        {name: [datasets.Value(dtype)] for name, dtype in tokens.items()}
        | {name: datasets.Value("int64") for name in numbers}
        | {"offset_mapping": [[datasets.Value("int32")]]}
    )

    def cut_questions(questions: list[str]) -> list[str]:
        questions = [question.strip() for question in questions]
        encoded = tokenizer(questions, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return [
            question[: offsets[options.max_question_length - 1][1]]
            if len(offsets) > options.max_question_length
            else question
            for question, offsets in zip(questions, encoded["offset_mapping"], strict=True)
        ]

    def windows(batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        encoded = tokenizer(
            cut_questions(batch["question"]),
            batch["context"],
            truncation="only_second",
            max_length=options.max_length,
            stride=options.doc_stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            return_token_type_ids=True,
        )
        columns = {name: encoded[name] for name in tokens} | {name: [] for name in (*numbers, "offset_mapping")}
        for window, row in enumerate(encoded["overflow_to_sample_mapping"]):
            offsets = np.array(encoded["offset_mapping"][window])
            offsets[[sequence != 1 for sequence in encoded.sequence_ids(window)]] = -1
            columns["example_index"].append(indices[row])
            columns["offset_mapping"].append(offsets)
            if labelled:
                start, end = _positions(offsets, batch["answers"][row])
                columns["start_positions"].append(start)
                columns["end_positions"].append(end)
        return columns

    return examples.map(
        windows,
        batched=True,
        with_indices=True,
        remove_columns=examples.column_names,
        features=features,
        desc="Tokenizing",
    )


def _positions(offsets: np.ndarray, answers: list[dict]) -> tuple[int, int]:
    """First and last token of the first answer, or 0 (the CLS token) if the window does not contain all of it."""
    context = np.flatnonzero(offsets[:, 0] >= 0)
    if not answers or not len(context):
        return 0, 0
    start = answers[0]["answer_start"]
    end = start + len(answers[0]["text"])
    if offsets[context[0], 0] > start or offsets[context[-1], 1] < end:
        return 0, 0
    inside = context[(offsets[context, 1] > start) & (offsets[context, 0] < end)]
    return (int(inside[0]), int(inside[-1])) if len(inside) else (0, 0)


def decode(
    name: str,
    outputs: tuple[np.ndarray, np.ndarray],
    features: "datasets.Dataset",
    examples: "datasets.Dataset",
    options: Any,
) -> list[dict]:
    """
    Turn the outputs of a model into answers.

    In each window the `options.n_best_size` best starts and ends in the context are combined into spans, and the best
    spans of all windows of a question compete. In v2.0 they compete with no answer, whose score is the lowest score of
    the CLS token in any window, because a window without the answer says nothing about the others.

    Args:
        name (`str`): `"squad"` or `"squad_v2"`.
        outputs (`tuple[np.ndarray, np.ndarray]` of shape `(num_windows, num_tokens)`):
            Logits of the first and the last token. Padding at the end is ignored.
        features (`datasets.Dataset`): The windows, from [`encode`].
        examples (`datasets.Dataset`): The split given to [`encode`].
        options (`Any`):
            Object with the attributes `n_best_size`, `max_answer_length` (in tokens) and, for v2.0,
            `no_answer_threshold`: no answer is predicted if its score exceeds that of the best span by more than this.

    Returns:
        `list[dict]`: For each example its `id`, its `prediction` (a part of the context, `""` for no answer) and
        `nbest`, dictionaries with `text`, `probability`, `start_logit` and `end_logit`, best first. For v2.0 also
        `null_odds`, the score of no answer minus that of the best span, and `best_non_null`, the text of that span.

    Raises:
        ValueError: If there are more or fewer outputs than windows, or a question has no window.
    """
    start_logits, end_logits = outputs
    if not len(start_logits) == len(end_logits) == len(features):
        raise ValueError(f"outputs has {len(start_logits)} and {len(end_logits)} rows for {len(features)} windows")

    spans: list[dict[tuple[int, int], tuple[float, float]]] = [{} for _ in range(len(examples))]
    nulls: list[list[tuple[float, float]]] = [[] for _ in range(len(examples))]
    windows = features.select_columns(["example_index", "offset_mapping"])
    for window, start, end in zip(windows, start_logits, end_logits, strict=True):
        offsets = np.array(window["offset_mapping"])
        start, end = (logits[: len(offsets)].astype(np.float64) for logits in (start, end))
        nulls[window["example_index"]].append((float(start[0]), float(end[0])))
        found = spans[window["example_index"]]
        for place, logits in _best_spans(start, end, offsets, options):
            found[place] = max(found.get(place, logits), logits, key=sum)

    rows = []
    for example, found, null in zip(examples.select_columns(["id", "context"]), spans, nulls, strict=True):
        if not null:
            raise ValueError(f"features has no window of question {example['id']!r}")
        texts = [(example["context"][slice(*place)], logits) for place, logits in found.items()]
        nbest = sorted((entry for entry in texts if entry[0].strip()), key=lambda entry: -sum(entry[1]))
        nbest = nbest[: options.n_best_size]
        best, score = (nbest[0][0], sum(nbest[0][1])) if nbest else ("", _LOWEST)
        row = {"id": example["id"], "prediction": best}
        if name == "squad_v2":
            logits = min(null, key=sum)
            row |= {"null_odds": sum(logits) - score, "best_non_null": best}
            if row["null_odds"] > options.no_answer_threshold:
                row["prediction"] = ""
            nbest = sorted([*nbest, ("", logits)], key=lambda entry: -sum(entry[1]))
        weights = np.exp([sum(logits) - sum(nbest[0][1]) for _, logits in nbest])
        row["nbest"] = [
            {"text": text, "probability": float(weight / weights.sum()), "start_logit": start, "end_logit": end}
            for (text, (start, end)), weight in zip(nbest, weights, strict=True)
        ]
        rows.append(row)
    return rows


def _best_spans(
    start: np.ndarray, end: np.ndarray, offsets: np.ndarray, options: Any
) -> list[tuple[tuple[int, int], tuple[float, float]]]:
    """The best spans of a window: for each its first character, the one after its last, and its two logits."""
    context = np.flatnonzero(offsets[:, 0] >= 0)
    first = context[np.argsort(-start[context], kind="stable")[: options.n_best_size]]
    last = context[np.argsort(-end[context], kind="stable")[: options.n_best_size]]
    length = last - first[:, None] + 1
    i, j = np.nonzero((length >= 1) & (length <= options.max_answer_length))
    first, last = first[i], last[j]
    best = np.argsort(-(start[first] + end[last]), kind="stable")[: options.n_best_size]
    first, last = first[best], last[best]
    places = zip(offsets[first, 0].tolist(), offsets[last, 1].tolist(), strict=True)
    return list(zip(places, zip(start[first].tolist(), end[last].tolist(), strict=True), strict=True))


def write_submission(name: str, split: str, rows: Sequence[dict], path: str | Path) -> Path:
    """
    Write the predictions in the format of the official evaluation script.

    Args:
        name (`str`): `"squad"` or `"squad_v2"`.
        split (`str`): Name of the split.
        rows (`Sequence[dict]`): The predictions of [`decode`].
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
