"""Question answering: windows over long contexts, and answers from the logits of their first and last tokens."""

from typing import TYPE_CHECKING, Any

import numpy as np


if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerFast

# Score of an example without any valid span: finite, so that it can be written as JSON.
_LOWEST = float(np.finfo(np.float32).min)


def encode(examples: "datasets.Dataset", tokenizer: "PreTrainedTokenizerFast", options: Any) -> "datasets.Dataset":
    """
    Tokenize questions and contexts into windows.

    A context that is too long for one window is spread over several windows of `options.max_length` tokens, each
    starting with the whole question, of at most `options.max_question_length` tokens. As in the fast tokenizers,
    `options.doc_stride` is the number of tokens shared by consecutive windows.

    Each window has the inputs, `(num_tokens,)`; `start_positions` and `end_positions`, the first and last token of the
    first answer, or 0 (the CLS token) if it does not contain all of it; `example_index`, the row of `examples`; and
    `offset_mapping`, `(num_tokens, 2)`: the first character of each token in the context and the one after its last,
    -1 for tokens outside the context.
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

    labeled = "answers" in examples.column_names
    tokens = {"input_ids": "int32", "token_type_ids": "int8", "attention_mask": "int8"}
    numbers = ["example_index"] + labeled * ["start_positions", "end_positions"]
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
            if labeled:
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

    `outputs` are the logits of the first and of the last token, `(num_windows, num_tokens)` each, whose padding at the
    end is ignored. No answer is predicted if its score exceeds that of the best span, of at most
    `options.max_answer_length` tokens, by more than `options.no_answer_threshold`.

    For each example: its `id`, its `prediction` (a part of the context, `""` for no answer) and `nbest`, dictionaries
    with `text`, `probability`, `start_logit` and `end_logit`, best first. For v2.0 also `null_odds`, the score of no
    answer minus that of the best span, and `best_non_null`, the text of that span.
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
