"""One fine-tuning run: splits, models and masks, what is written, what is refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import (
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    DistilBertModel,
    pipeline,
)

from sparsebert import SparseBertForSequenceClassification, SparseMask
from sparsebert.data.tasks import TASKS
from sparsebert.masks.patterns import build_pattern
from sparsebert.training.finetuning.finetuning_arguments import FinetuningArguments
from sparsebert.training.finetuning.finetuning_plan import check_arguments
from sparsebert.training.finetuning.single_run import read_predictions, run_once
from sparsebert.training.finetuning.task_data import MissingSplitError, choose_splits, prepare
from sparsebert.training.finetuning.task_models import load_model, mask_metrics


pytestmark = pytest.mark.usefixtures("without_matplotlib")


TRAINING = {"max_steps": 2, "use_cpu": True, "report_to": "none", "disable_tqdm": True}


@pytest.fixture
def options(checkpoints, glue_folder):
    """`options(**fields)`: RTE from local files with the model that has a mask."""

    def make(**fields):
        defaults = {"task": "rte", "model": checkpoints["window"], "data": str(glue_folder), "max_length": 32}
        return FinetuningArguments(**defaults | fields)

    return make


# Splits


@pytest.mark.parametrize(
    "available, fields, expected",
    [
        (["train", "validation", "test"], {}, ("train", ["validation"], ["test"])),
        (["train_part7", "validation"], {}, ("train_part7", ["validation"], [])),
        (["a", "b", "c"], {"train_split": "a", "validation_split": "b"}, ("a", ["b"], [])),
        (["train", "test"], {"validation_split": "test"}, ("train", ["test"], [])),
        (["train", "validation", "test"], {"test_split": []}, ("train", ["validation"], [])),
        (
            ["train", "validation_matched", "validation_mismatched", "test_matched", "snli_dev"],
            {"test_split": ["snli_dev"]},
            ("train", ["validation_matched", "validation_mismatched"], ["snli_dev"]),
        ),
    ],
)
def test_which_splits_are_used(options, available, fields, expected):
    assert choose_splits(available, options(**fields)) == expected


def test_missing_splits(options):
    for available, message in (
        (["train"], "'validation' is missing"),
        (["validation"], "'train' is missing"),
        (["train_a", "train_b", "validation"], "'train' is missing.*train_a, train_b"),
    ):
        with pytest.raises(MissingSplitError, match=message):
            choose_splits(available, options())
    for fields in ({"train_split": "x"}, {"validation_split": ["x"]}, {"test_split": "x"}):  # no lack of data
        with pytest.raises(ValueError, match="'x' is missing.*available: train, validation") as caught:
            choose_splits(["train", "validation"], options(**fields))
        assert caught.type is ValueError


def test_no_evaluation_on_the_training_split(options):
    with pytest.raises(ValueError, match="both train_split and validation_split"):
        choose_splits(["train"], options(validation_split="train"))


def test_training_on_a_sample(options):
    data = prepare(options(max_train_examples=10))
    assert len(data.features["train"]) == 10 and data.num_train_examples == 48
    again = prepare(options(max_train_examples=10))
    assert data.examples["train"]["id"][:] == again.examples["train"]["id"][:] != [str(i) for i in range(10)]


# Models and masks


def test_a_sparse_model_keeps_its_mask_and_names_its_classes(options):
    model = load_model(prepare(options()), {})
    assert isinstance(model, SparseBertForSequenceClassification)
    assert model.sparse_attention.mask.metadata["pattern"] == "window"
    assert model.config.id2label == {0: "entailment", 1: "not_entailment"}


def test_a_stock_model_is_dense_by_default(options, checkpoints):
    data = prepare(options(model=checkpoints["stock"]))
    model = load_model(data, {})
    assert type(model) is BertForSequenceClassification
    assert mask_metrics(model, data) == {"mask": "dense", "sparsity": 0.0, "input_sparsity": 0.0}


@pytest.mark.parametrize("model_name", ["stock", "window", "searching"])
@pytest.mark.parametrize("kind", ["file", "pattern"])
def test_any_model_with_a_mask(options, checkpoints, tmp_path, model_name, kind):
    build_pattern("bigbird", 32, 4, seed=5).save_pretrained(tmp_path)
    mask = str(tmp_path) if kind == "file" else "bigbird"
    data = prepare(options(model=checkpoints[model_name], mask=mask))
    model = load_model(data, {"mask_seed": 5} if kind == "pattern" else {})
    assert model.sparse_attention.mask == SparseMask.from_pretrained(tmp_path)
    stored = load_file(f"{checkpoints[model_name]}/model.safetensors")
    for name, weight in model.bert.encoder.state_dict().items():
        assert torch.equal(weight, stored[f"bert.encoder.{name}"]), name


@pytest.fixture(scope="module")
def distilbert(word_tokenizer, tmp_path_factory):
    """Folder of a model whose configuration has no field for dropout of hidden states."""
    folder = tmp_path_factory.mktemp("distilbert")
    config = DistilBertConfig(vocab_size=100, dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=40)
    DistilBertModel(config).save_pretrained(folder)
    word_tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("mask", ["bigbird", "window"])
def test_any_encoder_keeps_stock_files_and_its_mask(options, distilbert, tmp_path, mask):
    arguments = options(model=distilbert, mask=mask)
    check_arguments(arguments, {"mask_seed": 5} if mask == "bigbird" else {})
    metrics = run_once(prepare(arguments), {}, TRAINING, tmp_path / "run")
    assert metrics["mask"] == mask and metrics["sparsity"] > 0.5
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model_type"] == "distilbert"
    loaded = DistilBertForSequenceClassification.from_pretrained(tmp_path / "run")
    assert loaded.base_model.sparse_attention.mask == SparseMask.from_pretrained(tmp_path / "run")
    # The next run goes on through the same mask, with the head of its own task, or through another.
    again = options(model=str(tmp_path / "run"), task="stsb")
    check_arguments(again, {"diagonal": "remove"})
    model = load_model(prepare(again), {"diagonal": "remove"})
    expected = build_pattern(mask, 32, 4, seed=42).replace(diagonal=False)  # the seed of the run
    assert model.sparse_attention.mask == expected and model.num_labels == 1
    other = options(model=str(tmp_path / "run"), mask="star")
    assert load_model(prepare(other), {}).sparse_attention.mask == build_pattern("star", 32, 4)


def test_stock_model_with_a_full_mask_gives_the_stock_outputs(options, checkpoints):
    data = prepare(options(model=checkpoints["stock"], mask="dense"))
    torch.manual_seed(1)
    masked = load_model(data, {}).eval()
    data.options.mask = None
    torch.manual_seed(1)
    stock = load_model(data, {}).eval()
    stock.load_state_dict(masked.state_dict())
    ids = torch.randint(5, 99, (2, 20))
    torch.testing.assert_close(masked(ids).logits, stock(ids).logits, atol=1e-6, rtol=1e-5)


def test_sparsity_on_the_inputs_is_that_of_their_lengths(options):
    data = prepare(options())
    model = load_model(data, {})
    mask = model.sparse_attention.mask
    tables = [mask.to_table(len(ids)).float() for ids in data.features["validation"]["input_ids"]]
    kept, entries = sum(table.sum().item() for table in tables), sum(table.numel() for table in tables)
    metrics = mask_metrics(model, data)
    assert metrics["input_sparsity"] == pytest.approx(1 - kept / entries)
    assert metrics["input_sparsity"] < metrics["sparsity"] == mask.sparsity


def test_a_mask_in_a_subfolder_is_called_by_it(options, tmp_path):
    build_pattern("window", 32, 4).save_pretrained(tmp_path / "near")
    data = prepare(options(mask=str(tmp_path), mask_subfolder="near"))
    assert mask_metrics(load_model(data, {}), data)["mask"] == "near"


def test_a_field_that_the_model_lacks(options, distilbert):
    arguments = options(model=distilbert)
    with pytest.raises(ValueError, match="model.hidden_dropout_prob .* of type 'distilbert' has no such field"):
        check_arguments(arguments, {"hidden_dropout_prob": 0.2})
    check_arguments(arguments, {"num_hidden_layers": 1})


def test_how_a_mask_is_used_can_be_changed(options, tmp_path):
    build_pattern("bigbird", 32, 4).save_pretrained(tmp_path)
    changes = {"diagonal": "remove", "length_policy": "dense", "last_token": "position"}
    for mask in (str(tmp_path), "bigbird", None):
        arguments = options(mask=mask)
        check_arguments(arguments, changes)
        used = load_model(prepare(arguments), changes).sparse_attention.mask
        assert (used.diagonal, used.length_policy, used.last_token) == (False, "dense", "position")


@pytest.mark.parametrize(
    "fields, config, message",
    [
        ({"model": "stock", "attn_implementation": "sparse_sdpa"}, {}, "applies a mask.*--mask"),
        ({"model": "stock"}, {"diagonal": "remove"}, "model.diagonal .*has no meaning here: there is no mask"),
        ({}, {"mask_length": 16}, "model.mask_length .*has no meaning here: only .*length_policy.* of a frozen mask"),
        ({"mask": "FOLDER"}, {"mask_seed": 1}, "model.mask_seed .*has no meaning here"),
        ({"mask": "bigbird"}, {"pattern": "star"}, "model.pattern .*has no meaning here.*--mask"),
        ({"mask": "bigbird"}, {"search": "soft"}, "model.search .*has no meaning here"),
        ({"attn_implementation": "flash_attention_2"}, {}, "would ignore the mask"),
        ({"mask": "owner/nothing"}, {}, "mask 'owner/nothing' cannot be read"),
        ({"max_length": None}, {}, "max_length 128 is more than the 40 positions"),
        ({"max_length": 2}, {}, "max_length must be .* at least 4, got 2"),
        ({"max_train_examples": 0}, {}, "max_train_examples must be .* at least 1, got 0"),
    ],
)
def test_what_is_refused_before_any_data_is_read(options, checkpoints, tmp_path, fields, config, message):
    build_pattern("window", 32, 4).save_pretrained(tmp_path)
    fields = {name: str(tmp_path) if value == "FOLDER" else value for name, value in fields.items()}
    if "model" in fields:
        fields["model"] = checkpoints.get(fields["model"], fields["model"])
    with pytest.raises((ValueError, OSError), match=message):
        check_arguments(options(**fields), config)


def test_models_and_masks_that_do_not_fit(options, checkpoints):
    for fields, config, message in (
        ({"model": checkpoints["searching"]}, {}, "still being searched"),
        ({"mask": "bigbird"}, {"mask_length": 8, "length_policy": "error"}, "longer than the mask"),
    ):
        check_arguments(options(**fields), config)
        with pytest.raises(ValueError, match=message):
            load_model(prepare(options(**fields)), config)


@pytest.mark.parametrize(
    "heads, layers, message",
    [(3, 1, "3 heads.*4 heads"), (4, 5, r"5 layer\(s\).*2 layers")],
    ids=["heads", "layers"],
)
@pytest.mark.parametrize("model", ["window", "stock"])
def test_masks_of_other_models_are_refused_before_the_data_is_read(
    options, checkpoints, tmp_path, model, heads, layers, message
):
    mask = build_pattern("window", 32, heads)
    mask.replace(keep=mask.keep.expand(layers, -1, -1)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"mask {tmp_path} does not fit .*{message}"):
        check_arguments(options(model=checkpoints[model], mask=str(tmp_path)), {})


def test_a_mask_for_the_layers_that_are_left(options, checkpoints, tmp_path):
    mask, arguments = build_pattern("window", 32, 4), {}
    for layers in (1, 2):
        mask.replace(keep=mask.keep.expand(layers, -1, -1)).save_pretrained(tmp_path / str(layers))
        arguments[layers] = options(model=checkpoints["stock"], mask=str(tmp_path / str(layers)))
    check_arguments(arguments[1], {"num_hidden_layers": 1})
    with pytest.raises(ValueError, match=r"for 2 layer\(s\) and 4 heads .* the model has 1 layers"):
        check_arguments(arguments[2], {"num_hidden_layers": 1})


@pytest.mark.parametrize("fields", [{}, {"mask": "bigbird"}, {"model": "stock"}], ids=["own", "pattern", "dense"])
def test_weights_of_other_sizes_than_the_configuration_says(options, checkpoints, tmp_path, fields):
    folder = shutil.copytree(checkpoints[fields.get("model", "window")], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 120}))
    message = r"model .*model: its weights do not fit .*bert.embeddings.word_embeddings.weight has shape \(100, 32\)"
    with pytest.raises(ValueError, match=message):
        load_model(prepare(options(**fields | {"model": str(folder)})), {})


def test_unknown_task_arguments(options):
    with pytest.raises(ValueError, match="task_kwargs of rte may be none, got {'train_size'}"):
        prepare(options(task_kwargs={"train_size": 3}))


# Runs


# Of GLUE, those that differ in more than their data.
LIKE_RTE = ("mrpc", "qnli", "qqp", "sst2", "wnli")


@pytest.mark.parametrize("task", [pytest.param(t, marks=[pytest.mark.slow] * (t in LIKE_RTE)) for t in TASKS])
def test_a_run_of_each_task(options, task_data, request, tmp_path, task):
    fields = {"data": task_data(task)}
    if task == "builtin":
        fields |= {"task_kwargs": request.getfixturevalue("small_corpus")}
    if "squad" in task:
        fields |= {"max_length": 24, "doc_stride": 6, "max_question_length": 6}
    data = prepare(options(task=task, **fields))
    metrics = run_once(data, {}, TRAINING, tmp_path)
    assert metrics == json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["steps"] == 2 and metrics["mask"] == "window" and 0 < metrics["sparsity"] < 1
    for split in data.evaluation_splits:
        values = metrics["splits"][split]
        assert values["loss"] > 0 and -1 <= values[metrics["main_metric"]] <= 1
        assert values.keys() <= {"loss", "seconds", *data.task.metric_names()}
        # The predictions that were saved have the metrics that were reported.
        rows = read_predictions(tmp_path, split)
        assert list(rows) == data.examples[split]["id"][:]
        predictions, references = zip(*rows.values(), strict=True)
        again = data.metric.compute(predictions=predictions, references=references)
        assert again[metrics["main_metric"]] == pytest.approx(values[metrics["main_metric"]], abs=1e-5)
    assert metrics["score"] == metrics["splits"][data.evaluation_splits[0]][metrics["main_metric"]]
    files = {path.name for path in tmp_path.iterdir()}
    assert {"model.safetensors", "mask.safetensors", "tokenizer.json"} <= files
    if task == "squad_v2":
        assert {"predictions_validation.json", "nbest_predictions_validation.json"} <= files
        assert {"null_odds_validation.json", "predictions_validation.jsonl"} <= files
        assert "best_f1" in metrics["splits"]["validation"] and "has_answer_f1" in metrics["splits"]["validation"]


def test_accumulation_changes_nothing(options, checkpoints, tmp_path):
    """Stock models are trained as sparse ones: with SGD the weights show any factor in the gradient."""
    data, weights = prepare(options(model=checkpoints["stock"])), []
    for batch, accumulation in ((8, 1), (2, 4)):
        training = TRAINING | {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
        training |= {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "warmup_steps": 0}
        run_once(data, {}, training, tmp_path / str(batch))
        weights.append(load_file(tmp_path / str(batch) / "model.safetensors"))
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("mask", [None, "window"])
def test_every_example_is_predicted_from_the_logits_alone(options, checkpoints, tmp_path, mask):
    """Whatever the training leaves out, and whatever else the configuration says that the model returns."""
    folder = shutil.copytree(checkpoints["stock"], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"output_hidden_states": True, "output_attentions": True}))
    data = prepare(options(model=str(folder), mask=mask))
    training = TRAINING | {"dataloader_drop_last": True, "per_device_eval_batch_size": 3}
    run_once(data, {}, training, tmp_path / "run")
    assert list(read_predictions(tmp_path / "run", "validation")) == data.examples["validation"]["id"][:]


def test_skipped_rows_are_counted(options, tmp_path):
    rows = ["w1\tw2\tentailment", "w1\tw2\tneutral", "w3\tw4\tnot_entailment"]
    for split in ("train", "dev"):
        (tmp_path / f"{split}.tsv").write_text("\n".join(["sentence1\tsentence2\tlabel", *rows]) + "\n")
    data = prepare(options(data=str(tmp_path), skip_bad=True))
    metrics = run_once(data, {}, TRAINING, tmp_path / "run")
    assert metrics["skipped"]["train"].startswith("skipped 1 of 3 rows, the first: row 3, field 'label'")


def test_trackers_get_the_development_results(options, tmp_path):
    run_once(prepare(options()), {}, TRAINING | {"report_to": "tensorboard"}, tmp_path)
    events = EventAccumulator(str(next(tmp_path.rglob("events.out.tfevents*")).parent))
    events.Reload()
    assert {"eval/validation_accuracy", "eval/validation_loss"} <= set(events.Tags()["scalars"])


def test_heads_of_other_tasks(options, tmp_path):
    """Of a regression after classes and the other way round, as is usual for RTE and STS-B after MNLI."""
    run_once(prepare(options(task="mnli")), {}, TRAINING | {"max_steps": 1}, tmp_path / "mnli")
    regression = prepare(options(task="stsb", model=str(tmp_path / "mnli")))
    model = load_model(regression, {})
    assert model.classifier.out_features == 1 and model.config.problem_type == "regression"
    run_once(regression, {}, TRAINING | {"max_steps": 1}, tmp_path / "stsb")
    model = load_model(prepare(options(model=str(tmp_path / "stsb"))), {})
    ids, labels = torch.randint(5, 99, (1, 8)), torch.tensor([1])
    output = model.eval()(ids, labels=labels)
    torch.testing.assert_close(output.loss, torch.nn.functional.cross_entropy(output.logits, labels))


def test_training_learns_the_task_and_the_pipeline_names_the_classes(options, checkpoints, tmp_path):
    arguments = TRAINING | {"max_steps": 200, "learning_rate": 2e-3, "per_device_train_batch_size": 16}
    metrics = run_once(prepare(options()), {}, arguments, tmp_path)
    assert metrics["score"] >= 0.9
    classify = pipeline("text-classification", str(tmp_path))
    for text, answer in (("w1 w2 w3 w7 w9 w0 yes", "entailment"), ("w1 w2 w3 w7 w9 w0", "not_entailment")):
        assert classify({"text": text, "text_pair": "w4 w5 w6 w7 w8 w9"})["label"] == answer


def test_predictions_keep_the_order_of_the_examples_when_grouped_by_length(options, squad_folder, tmp_path):
    """The host would evaluate the longest first."""
    data = prepare(options(task="squad", data=str(squad_folder), max_length=24, doc_stride=6, max_question_length=6))
    predictions = []
    for strategy in ("random", "group_by_length"):
        training = TRAINING | {"max_steps": 1, "learning_rate": 0.0, "train_sampling_strategy": strategy}
        training |= {"per_device_eval_batch_size": 4}
        run_once(data, {}, training, tmp_path / strategy)
        predictions.append(read_predictions(tmp_path / strategy, "validation"))
    assert predictions[0] == predictions[1]


def test_best_checkpoint_by_the_metric_of_the_task(options, tmp_path):
    training = TRAINING | {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps"}
    training |= {"save_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "accuracy"}
    metrics = run_once(prepare(options()), {}, training, tmp_path)
    state = json.loads((tmp_path / "checkpoint-4/trainer_state.json").read_text())
    evaluated = [entry["eval_accuracy"] for entry in state["log_history"] if "eval_accuracy" in entry]
    assert metrics["score"] == pytest.approx(max(evaluated), abs=1e-5)
    assert evaluated[0] >= evaluated[1]  # the first is the best, not the last
    folders = (tmp_path, tmp_path / "checkpoint-2", tmp_path / "checkpoint-4")
    saved, best, last = (load_file(folder / "model.safetensors") for folder in folders)
    assert all(torch.equal(saved[name], weight) for name, weight in best.items())
    assert not all(torch.equal(saved[name], weight) for name, weight in last.items())
