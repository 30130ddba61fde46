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


class TestMetrics:
    # tp = 3, fn = 1, fp = 2, tn = 2
    REFERENCES = [1, 1, 1, 1, 0, 0, 0, 0]
    PREDICTIONS = [1, 1, 1, 0, 1, 1, 0, 0]

    @pytest.fixture(autouse=True)
    def no_warnings(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield

    def test_accuracy(self):
        assert accuracy([2, 0, 1], [2, 1, 1]) == {"accuracy": pytest.approx(2 / 3)}

    def test_f1(self):
        scores = accuracy_and_f1(self.PREDICTIONS, self.REFERENCES)
        assert scores == {"accuracy": pytest.approx(5 / 8), "f1": pytest.approx(6 / 9)}
        assert accuracy_and_f1([0, 0], [0, 0]) == {"accuracy": 1.0, "f1": 0.0}
        assert accuracy_and_f1([0, 0], [0, 1]) == {"accuracy": 0.5, "f1": 0.0}

    def test_macro_f1(self):
        scores = accuracy_and_macro_f1([0, 1, 1, 2], [0, 1, 0, 2])
        assert scores == {"accuracy": pytest.approx(0.75), "macro_f1": pytest.approx((2 / 3 + 2 / 3 + 1) / 3)}

    def test_matthews(self):
        scores = matthews(self.PREDICTIONS, self.REFERENCES)
        assert scores["matthews"] == pytest.approx((3 * 2 - 2 * 1) / (5 * 4 * 4 * 3) ** 0.5)
        assert scores["accuracy"] == pytest.approx(5 / 8)
        flipped = [1 - prediction for prediction in self.PREDICTIONS]
        assert matthews(flipped, self.REFERENCES)["matthews"] == pytest.approx(-scores["matthews"])

    @pytest.mark.parametrize(("predictions", "references"), [([1, 1], [0, 1]), ([0, 1], [1, 1]), ([1, 1], [1, 1])])
    def test_matthews_of_one_class(self, predictions, references):
        assert matthews(predictions, references)["matthews"] == 0.0

    def test_correlations_with_ties(self):
        # Ranks 1, 2.5, 2.5, 4 and 1, 2, 3, 4; values less their means -3, 1, 1, 1 and -1.5, -0.5, 0.5, 1.5.
        scores = correlations([0.0, 2.0, 2.0, 9.0], [1.0, 2.0, 3.0, 4.0])
        assert scores["spearman"] == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
        scores = correlations([0.0, 4.0, 4.0, 4.0], [1.0, 2.0, 3.0, 4.0])
        assert scores["pearson"] == pytest.approx(6 / (12 * 5) ** 0.5)

    @pytest.mark.parametrize(
        ("predictions", "references"), [([3.0, 3.0], [1.0, 2.0]), ([1.0, 2.0], [0, 0]), ([1], [2])]
    )
    def test_constant_side(self, predictions, references):
        assert correlations(predictions, references) == {"spearman": 0.0, "pearson": 0.0}
