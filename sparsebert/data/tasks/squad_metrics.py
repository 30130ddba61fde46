"""The official scores of SQuAD v1.1 and v2.0."""

import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """An answer in lower case, without ASCII punctuation and English articles, with single spaces between words."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1 if the normalized prediction (`""` for no answer) is one of the normalized answers (empty for none), or 0."""
    return float(normalize_answer(prediction) in map(normalize_answer, answers or [""]))


def f1(prediction: str, answers: Sequence[str]) -> float:
    """
    Highest word F1 of the prediction with any of the answers. If either has no words after normalization, it is 1 if
    neither has any, and 0 otherwise.
    """
    predicted = normalize_answer(prediction).split()
    return max(_word_f1(predicted, normalize_answer(answer).split()) for answer in answers or [""])


def _word_f1(predicted: list[str], correct: list[str]) -> float:
    if not predicted or not correct:
        return float(predicted == correct)
    common = sum((Counter(predicted) & Counter(correct)).values())
    return 2 * common / (len(predicted) + len(correct))


def _worded(reference: list[dict]) -> list[str]:
    """Texts of the answers that have words after normalization; the others look like no answer."""
    return [answer["text"] for answer in reference if normalize_answer(answer["text"])]


def scores(predictions: Sequence[str], references: Sequence[list[dict]], name: str = "squad_v2") -> np.ndarray:
    """
    F1 of each prediction (`""` for no answer) with the column `answers`; their mean is the main metric. The versions
    differ only if all answers are articles or punctuation: v1.1 then scores every prediction 0, v2.0 treats the
    question as one without an answer.
    """
    golds = map(_worded, references)
    return np.array(
        [
            0.0 if name == "squad" and not answers else f1(prediction, answers)
            for prediction, answers in zip(predictions, golds, strict=True)
        ]
    )


def _exact_matches(predictions: Sequence[str], references: Sequence[list[dict]], name: str) -> np.ndarray:
    golds = ([answer["text"] for answer in ref] if name == "squad" else _worded(ref) for ref in references)
    return np.array([exact_match(*pair) for pair in zip(predictions, golds, strict=True)])


def metrics(name: str, predictions: Sequence[str], references: Sequence[list[dict]]) -> dict[str, float]:
    """
    The scores of the official script: `exact_match` and `f1`, between 0 and 1; for v2.0 also over the questions with
    and without an answer separately, e.g. `has_answer_f1` and `no_answer_f1`, if there are any.
    """
    values = {
        "exact_match": _exact_matches(predictions, references, name),
        "f1": scores(predictions, references, name),
    }
    results = {key: float(value.mean()) for key, value in values.items()}
    if name == "squad_v2":
        has_answer = np.array([bool(reference) for reference in references])
        for prefix, group in (("has_answer", has_answer), ("no_answer", ~has_answer)):
            if group.any():
                results |= {f"{prefix}_{key}": float(value[group].mean()) for key, value in values.items()}
    return results


def best_threshold(rows: Sequence[dict], references: Sequence[list[dict]]) -> dict[str, float]:
    """
    The highest scores for any `no_answer_threshold`, `best_exact_match` and `best_f1`, and the thresholds that give
    them (`best_exact_match_threshold`, ...), from the output of [`decode`] for v2.0. They are chosen by looking at the
    answers, so the scores are upper bounds, not results of the model.
    """
    predictions = [row["best_non_null"] for row in rows]
    odds = np.array([row["null_odds"] for row in rows])
    has_answer = np.array([bool(reference) for reference in references])
    answered = np.array([bool(prediction) for prediction in predictions])
    order = np.argsort(odds, kind="stable")
    # Questions with equal odds are either all answered or none of them.
    group_ends = np.flatnonzero(np.append(np.diff(odds[order]) > 0, True))

    results: dict[str, float] = {}
    for key, values in (
        ("exact_match", _exact_matches(predictions, references, "squad_v2")),
        ("f1", scores(predictions, references)),
    ):
        gains = np.where(has_answer, values, -1.0 * answered)
        totals = np.sum(~has_answer) + np.cumsum(gains[order])[group_ends]
        best = int(np.argmax(totals))
        # Between the last odds that are answered and the next ones, so that a rounded threshold answers the same.
        last = odds[order][group_ends[best]]
        following = odds[order][group_ends[best + 1]] if best + 1 < len(group_ends) else last + 1
        total, threshold = totals[best], (last + following) / 2
        if total <= np.sum(~has_answer):  # best not to answer any question
            total, threshold = np.sum(~has_answer), min(0.0, odds.min() - 1.0)
        results |= {f"best_{key}": float(total / len(rows)), f"best_{key}_threshold": float(threshold)}
    return results
