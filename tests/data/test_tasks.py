import re

import pytest
import transformers
from transformers import TrainingArguments

from sparsebert.data.builtin_corpus import Document, builtin_documents
from sparsebert.data.tasks import TASKS
from sparsebert.data.tasks.builtin import bag_of_words_baseline, load, majority_share, splits


LABELS = ("asyncio", "email", "unittest")


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARSEBERT_CACHE", str(tmp_path_factory.mktemp("cache")))
        return builtin_documents((*LABELS, "json"))


@pytest.fixture(scope="module")
def loaded(documents):
    return load(labels=LABELS, documents=documents)


@pytest.mark.slow
def test_the_installed_packages_have_enough_text():
    splits = load()
    assert [len(splits[name]) for name in ("train", "validation")] == [5994, 999]


def test_registry_rows_can_be_used(task_data):
    for name, task in TASKS.items():
        assert task.name == name
        assert hasattr(transformers, task.head)
        assert {"train", "validation"} <= {split.split("_")[0] for split in task.splits(task_data(name))}
        assert TrainingArguments(**task.settings, report_to="none").learning_rate > 0


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.paper_settings])
def test_settings_of_the_paper(name):
    """SparseBERT, Table 5."""
    batch_size, epochs = {"swag": (16, 3), "squad_v2": (48, 2)}.get(name, (32, 3))
    settings = TASKS[name].settings
    assert (settings["per_device_train_batch_size"], settings["num_train_epochs"]) == (batch_size, epochs)
    assert settings["learning_rate"] == 2e-5 and settings["weight_decay"] == 0.01
    assert settings["warmup_steps"] == 0.1 and settings["lr_scheduler_type"] == "linear"


def test_the_builtin_task_has_no_files():
    assert splits() == ["train", "validation"]
    with pytest.raises(ValueError, match="no --data"):
        splits("folder")


def test_splits(loaded):
    assert set(loaded) == {"train", "validation"}
    for split in loaded.values():
        assert {"id", "text"} <= set(split.column_names) and len(set(split["id"][:])) == len(split)
        assert split.features["label"].names == list(LABELS)
        assert set(split["label"][:]) == {0, 1, 2}
        assert all(60 <= len(text.split()) <= 200 for text in split["text"][:])
        assert all(
            module.split(".")[0] == LABELS[label]
            for module, label in zip(split["module"][:], split["label"][:], strict=True)
        )
    assert not set(loaded["train"]["module"][:]) & set(loaded["validation"]["module"][:])


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


def test_the_seed_draws_the_modules_that_are_held_out_and_the_examples_to_train_on():
    labels, paragraphs = ("email", "asyncio"), [" ".join(["word"] * 60)] * 5
    documents = [Document(label, f"{label}.{index}", paragraphs) for label in labels for index in range(20)]
    first, other = (load(labels=labels, documents=documents, train_size=20, seed=seed) for seed in (0, 1))
    assert set(first["validation"]["module"][:]) != set(other["validation"]["module"][:])
    assert len(set(first["train"]["module"][:])) > 8  # not all five of each of a few


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"labels": 5}, "labels must be at least two"),
        ({"labels": ("email", "email")}, "labels must be at least two"),
        ({"train_size": 2}, "train_size must be an integer of at least 3, got 2"),
        ({"validation_size": "x"}, "validation_size must be an integer of at least 3, got 'x'"),
        ({"seed": -1}, "seed must be an integer from 0 to 4294967295, got -1"),
        ({"labels": ("email", "nothing")}, "package 'nothing' has 0 modules"),
    ],
)
def test_bad_arguments(documents, arguments, message):
    with pytest.raises(ValueError, match=message):
        load(**({"labels": LABELS, "documents": documents} | arguments))


def test_baseline_learns_but_is_not_perfect(loaded):
    scores = bag_of_words_baseline(loaded)
    assert scores["majority_share"] < scores["accuracy"] <= 1
    assert TASKS["builtin"].main_metric in scores
