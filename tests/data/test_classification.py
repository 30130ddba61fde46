import warnings
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from conftest import tokenizer_of

from sparsebert.data.tasks.classification import (
    accuracy,
    accuracy_and_f1,
    accuracy_and_macro_f1,
    collator,
    correlations,
    decode,
    encode,
    matthews,
)


OPTIONS = SimpleNamespace(max_length=7)
CLS, SEP = 2, 3
A, B, C, D = range(5, 9)


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of("[PAD] [UNK] [CLS] [SEP] [MASK] a b c d".split())


def table(**columns):
    size = len(next(iter(columns.values())))
    return datasets.Dataset.from_dict({"id": [f"row{index}" for index in range(size)], **columns})


class TestEncode:
    def test_texts(self, tokenizer):
        features = encode(table(text=["a b", "a b c d a b c"], label=[1, 0]), tokenizer, OPTIONS)
        assert set(features.column_names) == {"input_ids", "token_type_ids", "attention_mask", "labels"}
        assert features["input_ids"][:] == [[CLS, A, B, SEP], [CLS, A, B, C, D, A, SEP]]
        assert features["labels"][:] == [1, 0]

    def test_pairs_lose_the_end_of_the_longer_text(self, tokenizer):
        features = encode(table(text=["a b", "a"], text_pair=["c d a b", "b"]), tokenizer, OPTIONS)
        assert features["input_ids"][:] == [[CLS, A, B, SEP, C, D, SEP], [CLS, A, SEP, B, SEP]]
        assert features["token_type_ids"][0] == [0, 0, 0, 0, 1, 1, 1]
        assert "labels" not in features.column_names

    def test_batch(self, tokenizer):
        features = encode(table(text=["a", "a b"], label=[0, 1]), tokenizer, OPTIONS)
        batch = collator(tokenizer)(list(features))
        assert batch["input_ids"].tolist() == [[CLS, A, SEP, 0], [CLS, A, B, SEP]]
        assert batch["labels"].dtype == torch.int64

    def test_batch_of_a_regression(self, tokenizer):
        examples = table(text=["a", "b"], label=[0.0, 2.5]).cast_column("label", datasets.Value("float32"))
        batch = collator(tokenizer)(list(encode(examples, tokenizer, OPTIONS)))
        assert batch["labels"].dtype == torch.float32 and batch["labels"].tolist() == [0.0, 2.5]


@pytest.mark.parametrize(
    ("outputs", "predictions", "kind"),
    [([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]], [1, 0], int), ([[0.25], [4.0]], [0.25, 4.0], float)],
)
def test_decode(outputs, predictions, kind):
    rows = decode(np.array(outputs, dtype=np.float32), None, table(text=["a", "b"]), OPTIONS)
    assert rows == [{"id": f"row{index}", "prediction": value} for index, value in enumerate(predictions)]
    assert all(type(row["prediction"]) is kind for row in rows)


# 3 true positives, 1 false negative, 2 false positives and 2 true negatives.
REFERENCES, PREDICTIONS = [1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("metric", "predictions", "references", "expected"),
    [
        (accuracy, [2, 0, 1], [2, 1, 1], (2 / 3,)),
        (accuracy_and_f1, PREDICTIONS, REFERENCES, (5 / 8, 6 / 9)),
        (accuracy_and_f1, [0, 0], [0, 0], (1, 0)),
        (accuracy_and_f1, [0, 0], [0, 1], (0.5, 0)),
        (accuracy_and_macro_f1, [0, 1, 1, 2], [0, 1, 0, 2], (0.75, (2 / 3 + 2 / 3 + 1) / 3)),
        (matthews, PREDICTIONS, REFERENCES, ((3 * 2 - 2 * 1) / (5 * 4 * 4 * 3) ** 0.5, 5 / 8)),
        *((matthews, [1, 1], [label, 1], (0, (label + 1) / 2)) for label in (0, 1)),
        (matthews, [0, 1], [1, 1], (0, 0.5)),
        # Ranks 1, 3, 3, 3 and 1, 2, 3, 4; values less their means -3, 1, 1, 1 and -1.5, -0.5, 0.5, 1.5.
        (correlations, [0.0, 4.0, 4.0, 4.0], [1.0, 2.0, 3.0, 4.0], (3 / (3 * 5) ** 0.5, 6 / (12 * 5) ** 0.5)),
        *((correlations, *sides, (0, 0)) for sides in (([3.0, 3.0], [1.0, 2.0]), ([1.0, 2.0], [0, 0]), ([1], [2]))),
    ],
)
def test_metrics(metric, predictions, references, expected):
    """In the order of their names, and without warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuple(metric(predictions, references).values()) == pytest.approx(expected)
