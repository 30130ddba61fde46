"""The official scores of SQuAD: cases worked out by hand, and brute force."""

import numpy as np
import pytest

from sparsebert.data.tasks.squad_metrics import best_threshold, exact_match, f1, metrics, normalize_answer, scores


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("The  Red\tFox.", "red fox"),
        ("an apple a day, the end", "apple day end"),
        ("theater and banana", "theater and banana"),
        ("U.S.A.", "usa"),
        ("well-known", "wellknown"),
        ("$3,000", "3000"),
        ("A", ""),
        ("a-b", "ab"),
        ("\u2018the\u2019 caf\u00e9", "\u2018 \u2019 caf\u00e9"),
    ],
)
def test_normalization(text, normalized):
    assert normalize_answer(text) == normalized


@pytest.mark.parametrize(
    ("prediction", "answers", "exact", "overlap"),
    [
        ("the Red fox!", ["red fox"], 1, 1),
        ("fox", ["red fox"], 0, 2 / 3),
        ("red fox ran", ["old dog", "fox ran far"], 0, 2 / 3),
        ("dog", ["red fox", "the dog"], 1, 1),
        ("dog", ["red fox"], 0, 0),
        ("fox fox", ["fox"], 0, 2 / 3),
        ("fox fox", ["fox fox red fox"], 0, 2 * 1 * 0.5 / 1.5),
        ("", ["fox"], 0, 0),
        ("fox", [], 0, 0),
        ("", [], 1, 1),
        ("the.", [], 1, 1),
        ("", ["", "fox"], 1, 1),
    ],
)
def test_exact_match_and_f1(prediction, answers, exact, overlap):
    assert exact_match(prediction, answers) == exact
    assert f1(prediction, answers) == pytest.approx(overlap)


def gold(*texts):
    return [{"text": text, "answer_start": 0} for text in texts]


def test_metrics():
    predictions = ["the fox", "fox ran", "", "cat"]
    references = [gold("fox"), gold("fox"), gold(), gold()]
    with_answer = pytest.approx((1 + 2 / 3) / 2)
    assert metrics("squad", predictions[:2], references[:2]) == {"exact_match": 0.5, "f1": with_answer}
    found = metrics("squad_v2", predictions, references)
    assert [found.pop(name) for name in ("f1", "has_answer_f1")] == [pytest.approx((1 + 2 / 3 + 1) / 4), with_answer]
    others = ("exact_match", "has_answer_exact_match", "no_answer_exact_match", "no_answer_f1")
    assert found == dict.fromkeys(others, 0.5)
    without = set(metrics("squad_v2", predictions[2:], references[2:]))
    assert without == {"exact_match", "f1", "no_answer_exact_match", "no_answer_f1"}
    assert scores(predictions, references) == pytest.approx([1, 2 / 3, 1, 0])


def test_answers_of_articles_only_count_as_in_the_script_of_each_version():
    predictions, references = ["A", "A", ""], [gold("a"), gold("A", "letter"), gold("a")]
    assert metrics("squad", predictions, references) == {"exact_match": 1.0, "f1": 0.0}
    assert scores(predictions, references, name="squad").tolist() == [0, 0, 0]
    # v2 takes the first and the last question for ones without an answer, and drops "A" from the second.
    values = metrics("squad_v2", predictions, references)
    assert (values["exact_match"], values["f1"]) == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert values["has_answer_f1"] == values["f1"] and "no_answer_f1" not in values
    assert scores(predictions, references).tolist() == [1, 0, 1]


@pytest.mark.parametrize("seed", range(20))
def test_best_threshold_agrees_with_trying_all(seed):
    generator = np.random.default_rng(seed)
    texts = ["red fox", "fox", "old dog", "dog", ""]
    draw = generator.integers
    rows = [{"null_odds": float(draw(-4, 5)), "best_non_null": texts[draw(5)]} for _ in range(12)]
    references = [gold(*[texts[generator.integers(4)]] * int(generator.integers(2))) for _ in rows]

    def values(threshold):
        predictions = ["" if row["null_odds"] > threshold else row["best_non_null"] for row in rows]
        return metrics("squad_v2", predictions, references)

    tried = [values(threshold) for threshold in np.arange(-6, 7)]
    found = best_threshold(rows, references)
    for key in ("exact_match", "f1"):
        assert found[f"best_{key}"] == pytest.approx(max(value[key] for value in tried))
        assert values(found[f"best_{key}_threshold"])[key] == pytest.approx(found[f"best_{key}"])


def test_a_rounded_best_threshold_has_the_same_score():
    rows = [{"null_odds": odds, "best_non_null": "fox"} for odds in (1.00000049, 3.14159265)]
    references = [gold("fox"), gold("fox")]
    assert best_threshold(rows, references)["best_f1_threshold"] == pytest.approx(3.64159265)
    references = [gold("fox"), gold()]
    threshold = float(f"{best_threshold(rows, references)['best_f1_threshold']:.6g}")
    assert [row["null_odds"] > threshold for row in rows] == [False, True]


def test_best_threshold_where_no_answer_is_best():
    rows = [{"null_odds": odds, "best_non_null": "fox"} for odds in (1.0, 2.0)]
    found = {"": 0.5, "_threshold": 0.0}
    expected = {f"best_{name}{suffix}": value for name in ("exact_match", "f1") for suffix, value in found.items()}
    assert best_threshold(rows, [gold(), gold("dog")]) == expected
