import re

import numpy as np
import pytest
import transformers

from sparsebert.corpus import Document, builtin_documents
from sparsebert.tasks import TASKS
from sparsebert.tasks.builtin import bag_of_words_baseline, load, majority_share, metrics


LABELS = ("asyncio", "email", "unittest")


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARSEBERT_CACHE", str(tmp_path_factory.mktemp("cache")))
        return builtin_documents((*LABELS, "json"))


@pytest.fixture(scope="module")
def splits(documents):
    return load(labels=LABELS, documents=documents)


def test_registry_rows_can_be_used():
    for name, task in TASKS.items():
        assert task.name == name
        assert hasattr(transformers, task.head)
        assert callable(task.load) and callable(task.metrics)


def test_splits(splits):
    assert set(splits) == {"train", "validation"}
    for split in splits.values():
        assert set(TASKS["builtin"].text_columns) <= set(split.column_names)
        assert split.features["label"].names == list(LABELS)
        assert set(split["label"][:]) == {0, 1, 2}
        assert all(60 <= len(text.split()) <= 200 for text in split["text"][:])
        assert all(
            module.split(".")[0] == LABELS[label]
            for module, label in zip(split["module"][:], split["label"][:], strict=True)
        )
    assert not set(splits["train"]["module"][:]) & set(splits["validation"]["module"][:])


def test_names_and_import_paths_are_masked():
    text = (
        "NumPy and np arrays, `torch.nn.Linear`, F.relu, PyTorchModel, is_torch_available, Scikit-Learn, hugging face "
        "Transformers, TFTransformerBlock, os.path.join or python; e.g. the input, 3.5 spaces, torn, spin. "
    )
    documents = [
        Document(label, f"{label}.{index}", [text * 3, f"The closing words number {index}."])
        for label in ("numpy", "torch", "transformers", "sklearn", "stdlib", "scipy")
        for index in range(4)
    ]
    labels = ("numpy", "torch", "transformers", "sklearn", "stdlib", "scipy")
    for split in load(labels=labels, documents=documents).values():
        for masked in split["text"][:]:
            assert not re.search(r"numpy|\bnp\b|torch|relu|scikit|learn|hugging|transformer|path|python", masked, re.I)
            assert "e.g. the input, 3.5 spaces, torn, spin." in masked


def test_seed_and_caps(documents):
    sizes = {"train_size": 30, "validation_size": 9}
    first, same, other = (load(labels=LABELS, documents=documents, seed=seed, **sizes) for seed in (0, 0, 1))
    assert first["train"][:] == same["train"][:] != other["train"][:]
    assert (len(first["train"]), len(first["validation"])) == (30, 9)
    assert majority_share(first["train"]) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"labels": ("email",)}, "labels must be at least two"),
        ({"labels": ("email", "email")}, "labels must be at least two"),
        ({"train_size": 2}, "train_size must be at least the number of labels, 3, got 2"),
        ({"validation_size": 0}, "validation_size must be at least"),
        ({"labels": ("email", "nothing")}, "package 'nothing' has 0 modules"),
    ],
)
def test_bad_arguments(documents, arguments, message):
    with pytest.raises(ValueError, match=message):
        load(**({"labels": LABELS, "documents": documents} | arguments))


def test_metrics():
    logits = np.array([[2.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 3.0, 1.0], [0.0, 0.0, 1.0]])
    scores = metrics(logits, np.array([0, 1, 0, 2]))
    assert scores == {"accuracy": pytest.approx(0.75), "macro_f1": pytest.approx((2 / 3 + 2 / 3 + 1) / 3)}


def test_baseline_learns_but_is_not_perfect(splits):
    scores = bag_of_words_baseline(splits)
    assert scores["majority_share"] < scores["accuracy"] <= 1
    assert TASKS["builtin"].main_metric in scores
