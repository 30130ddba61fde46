"""The official scores of SQuAD v1.1 and v2.0."""

import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """
    Normalize an answer for comparison, as the official script does.

    Args:
        text (`str`): The answer.

    Returns:
        `str`: The answer in lower case, without ASCII punctuation and English articles, its words separated by single
        spaces.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """
    Whether the normalized prediction is one of the normalized answers.

    Args:
        prediction (`str`): The predicted answer, `""` for none.
        answers (`Sequence[str]`): The correct answers, empty if the question has no answer.

    Returns:
        `float`: 1 or 0.
    """
    return float(normalize_answer(prediction) in map(normalize_answer, answers or [""]))


def f1(prediction: str, answers: Sequence[str]) -> float:
    """
    Highest word F1 of the prediction with any of the answers.

    Args:
        prediction (`str`): The predicted answer, `""` for none.
        answers (`Sequence[str]`): The correct answers, empty if the question has no answer.

    Returns:
        `float`: F1 between 0 and 1. If the prediction or the answer has no words after normalization, it is 1 if
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
    F1 of each prediction. Their mean is the main metric.

    Args:
        predictions (`Sequence[str]`): The predicted answers, `""` for none.
        references (`Sequence[list[dict]]`): The column `answers`.
        name (`str`, *optional*, defaults to `"squad_v2"`):
            `"squad"` or `"squad_v2"`. They differ only if all answers are articles or punctuation: v1.1 then scores
            every prediction 0, v2.0 treats the question as one without an answer.

    Returns:
        `np.ndarray` of shape `(num_examples,)`: Scores between 0 and 1.
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
    The scores of the official script.

    Args:
        name (`str`): `"squad"` or `"squad_v2"`.
        predictions (`Sequence[str]`): The predicted answers, `""` for none.
        references (`Sequence[list[dict]]`): The column `answers`.

    Returns:
        `dict[str, float]`: `exact_match` and `f1`, between 0 and 1. For v2.0 also over the questions with and without
        an answer separately, e.g. `has_answer_f1` and `no_answer_f1`, if there are any.
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
    The values of `no_answer_threshold` with the highest scores.

    They are chosen by looking at the answers, so the scores are upper bounds, not results of the model.

    Args:
        rows (`Sequence[dict]`): Output of [`decode`] for v2.0, of which `null_odds` and `best_non_null` are used.
        references (`Sequence[list[dict]]`): The column `answers`.

    Returns:
        `dict[str, float]`: `best_exact_match` and `best_f1`, between 0 and 1, and the thresholds
        `best_exact_match_threshold` and `best_f1_threshold` that give them.
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
