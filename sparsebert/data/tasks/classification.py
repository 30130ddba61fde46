"""Classification and regression of single texts and pairs of texts: inputs, predictions and metrics."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np


if TYPE_CHECKING:
    import datasets
    from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase


def text_types(label: Any) -> dict[str, Any]:
    """Types of the columns of texts with labels of a type, as in `datasets.Features`."""
    import datasets

    return {"text": datasets.Value("string"), "text_pair": datasets.Value("string"), "label": label}


def encode(examples: "datasets.Dataset", tokenizer: "PreTrainedTokenizerBase", options: Any) -> "datasets.Dataset":
    """
    The inputs, without padding, of at most `options.max_length` tokens: a pair that is too long loses the end of its
    longer text. With `labels` if there are any.
    """

    def tokenize(batch):
        features = tokenizer(
            batch["text"], batch.get("text_pair"), truncation="longest_first", max_length=options.max_length
        )
        if "label" in batch:
            features["labels"] = batch["label"]
        return features

    return examples.map(tokenize, batched=True, remove_columns=examples.column_names, desc="Tokenizing")


def collator(tokenizer: "PreTrainedTokenizerBase", pad_to_multiple_of: int | None = None) -> "DataCollatorWithPadding":
    """A collator that pads a batch to its longest input, or a multiple of a length."""
    from transformers import DataCollatorWithPadding

    return DataCollatorWithPadding(tokenizer, pad_to_multiple_of=pad_to_multiple_of)


def decode(
    outputs: np.ndarray, features: "datasets.Dataset", examples: "datasets.Dataset", options: Any
) -> list[dict[str, Any]]:
    """
    For each example its `id` and `prediction`: of outputs `(num_examples, num_labels)` the class with the largest
    logit, or with a single label the number of a regression.
    """
    outputs = np.asarray(outputs)
    predictions = outputs[:, 0] if outputs.shape[1] == 1 else outputs.argmax(axis=1)
    return [
        {"id": identifier, "prediction": prediction}
        for identifier, prediction in zip(examples["id"][:], predictions.tolist(), strict=True)
    ]


def accuracy(predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
    """Share of correct predictions, between 0 and 1."""
    return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}


def accuracy_and_f1(predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
    """Accuracy, and the F1 of class 1 in a binary classification, which is 0 if the class never occurs."""
    from sklearn.metrics import f1_score

    return accuracy(predictions, references) | {"f1": float(f1_score(references, predictions, zero_division=0.0))}


def accuracy_and_macro_f1(predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
    """Accuracy, and the mean of the F1 of all classes."""
    from sklearn.metrics import f1_score

    return accuracy(predictions, references) | {"macro_f1": float(f1_score(references, predictions, average="macro"))}


def matthews(predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
    """Matthews correlation coefficient, between -1 and 1 (0 if either side has only one class), and accuracy."""
    coefficient = 0.0
    if len(set(predictions)) > 1 and len(set(references)) > 1:
        from sklearn.metrics import matthews_corrcoef

        coefficient = float(matthews_corrcoef(references, predictions))
    return {"matthews": coefficient} | accuracy(predictions, references)


def correlations(predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
    """Spearman and Pearson correlation of a regression with its labels, between -1 and 1; 0 if a side is constant."""
    if len(set(predictions)) < 2 or len(set(references)) < 2:
        return {"spearman": 0.0, "pearson": 0.0}
    from scipy.stats import pearsonr, spearmanr

    return {
        "spearman": float(spearmanr(predictions, references).statistic),
        "pearson": float(pearsonr(predictions, references).statistic),
    }
