"""The metrics of the tasks as `evaluate` modules: the same numbers, offline, with what `evaluate` offers."""

import importlib
import multiprocessing

import datasets
import evaluate
import pytest
from transformers import BertConfig, BertForSequenceClassification, pipeline

from sparsebert.data.tasks import TASKS
from sparsebert.data.tasks.task_metrics import METRICS


CLASSES = ([0, 1, 1, 0, 1, 1], [0, 1, 0, 0, 1, 1])
NUMBERS = ([0.1, 2.3, 1.7, 3.3, 4.9], [0.0, 2.5, 1.25, 4.0, 3.9])
TEXTS = (
    ["the fox", "fox ran", "", "cat"],
    [[{"text": "fox", "answer_start": 3}], [{"text": "fox", "answer_start": 0}] * 3, [], []],
)
# Examples by type of prediction.
EXAMPLES = {"int64": CLASSES, "float64": NUMBERS, "string": TEXTS}


def examples(name):
    return EXAMPLES[METRICS[name].prediction.dtype]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache folder of `evaluate`."""
    for module in (evaluate, importlib.import_module("evaluate.module")):
        monkeypatch.setattr(module.config, "HF_METRICS_CACHE", str(tmp_path / "metrics"))
    return tmp_path / "metrics"


@pytest.mark.parametrize("name", METRICS)
def test_the_numbers_are_those_of_the_function(name, cache):
    predictions, references = examples(name)
    metric = METRICS[name]()
    expected = metric.score(predictions, references)
    assert expected.keys() <= set(metric.score_names)
    assert metric.compute(predictions=predictions, references=references) == expected
    # In two batches, and again.
    for _ in range(2):
        metric.add_batch(predictions=predictions[:2], references=references[:2])
        metric.add_batch(predictions=predictions[2:], references=references[2:])
        assert metric.compute() == expected
    assert metric.description and metric.name == name
    assert not cache.exists()


@pytest.mark.parametrize("name", TASKS)
def test_every_task_has_a_metric(name):
    predictions, references = examples(TASKS[name].metric)
    values = TASKS[name].load_metric().compute(predictions=predictions, references=references)
    assert TASKS[name].main_metric in values


@pytest.mark.parametrize("name", METRICS)
def test_wrong_types_are_refused(name):
    predictions, references = examples(name)
    with pytest.raises((ValueError, TypeError)):
        METRICS[name]().compute(predictions=[["a"]] * len(predictions), references=references)


def test_combine():
    predictions, references = CLASSES
    modules = [METRICS[name]() for name in ("accuracy", "matthews", "accuracy_and_f1")]
    values = evaluate.combine(modules).compute(predictions=predictions, references=references)
    assert values["f1"] == pytest.approx(6 / 7) and "matthews" in values
    assert values["accuracy_accuracy"] == values["matthews_accuracy"] == pytest.approx(5 / 6)


def test_evaluator(word_tokenizer):
    """With a model: `evaluate` 0.4.6 fails on the pipelines of Transformers 5."""
    config = BertConfig(vocab_size=100, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_labels=3)
    model = BertForSequenceClassification(config).eval()
    texts = [f"w{i} w{i + 1}" for i in range(9)]
    answers = pipeline("text-classification", model, tokenizer=word_tokenizer)(texts)
    labels = [int(answer["label"].removeprefix("LABEL_")) for answer in answers]
    labels[0] = (labels[0] + 1) % 3
    values = evaluate.evaluator("text-classification").compute(
        model_or_pipeline=model,
        tokenizer=word_tokenizer,
        data=datasets.Dataset.from_dict({"text": texts, "label": labels}),
        metric=METRICS["accuracy_and_macro_f1"](),
        label_mapping={f"LABEL_{index}": index for index in range(3)},
    )
    assert values["accuracy"] == pytest.approx(8 / 9) and 0 < values["macro_f1"] < 1


def _compute_often():
    for _ in range(50):
        metric = METRICS["accuracy"]()
        metric.add_batch(predictions=[0, 1], references=[0, 0])
        metric.add_batch(predictions=[1, 1], references=[1, 1])
        assert metric.compute() == {"accuracy": 0.75}


def test_processes_do_not_disturb_each_other(cache):
    """Two at once, where no cache folder can be created."""
    cache.touch()
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_compute_often) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
