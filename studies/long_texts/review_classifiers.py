"""Classifiers of long reviews: the texts they are trained and judged on, their training, and their scores."""

import json
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from sparsebert.data.tasks import glue

from ..shared.base_models import located
from ..shared.recipe_sections import finetuned


# Tokens of a batch of inference, padding included.
BATCH_TOKENS = 8192
# The task of GLUE whose files are of texts with a label, 0 or 1.
TASK = "sst2"


def check_reviews(reviews: str | None) -> None:
    """Check that there are texts."""
    if reviews is None:
        raise ValueError("--reviews is needed: a folder of texts")
    if not Path(reviews).is_dir():
        raise FileNotFoundError(f"reviews: there is no folder {reviews!r}")
    if missing := {"train", "test"} - set(glue.splits(TASK, reviews)):
        raise ValueError(f"reviews {reviews} lacks the files of {', '.join(sorted(missing))}")


def write_rows(cell: dict[str, Any], folder: Path, further: int = 0) -> dict[str, list[dict[str, Any]]]:
    """
    Draw the long texts of a cell and write those to train on and to classify to the folder `data`, in the format of
    `TASK`.
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
    cell: dict[str, Any], folder: Path, model_folder: str, model: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Fine-tune a model on the texts of a cell, in the folder `run`."""
    data = {"task": TASK, "data": str(folder / "data"), "model": model_folder, "max_length": cell["max_length"]}
    training = {name: cell[name] for name in ("learning_rate", "num_train_epochs", "warmup_steps", "seed")}
    training |= {"per_device_train_batch_size": cell["batch_size"], "train_sampling_strategy": "group_by_length"}
    return finetuned(data, training, folder / "run", cell["bf16"], model)


def classifier(folder: Path, bf16: bool) -> Any:
    """A classifier, with its mask if it has one, in evaluation mode."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    return model.to(torch.bfloat16) if bf16 else model


def score(
    model: Any, tokenizer: Any, rows: list[dict[str, Any]], max_length: int, split: bool = False
) -> dict[str, float]:
    """Classify texts and take the time."""
    start = time.process_time()
    predicted = classify(model, tokenizer, [row["sentence"] for row in rows], max_length, split)
    seconds = (time.process_time() - start) / len(rows)
    right = sum(int(label == row["label"]) for label, row in zip(predicted, rows, strict=True)) / len(rows)
    return {"accuracy": right, "ms_per_text": 1000 * seconds}


def long_rows(
    reviews: str, tokenizer: Any, longer_than: int, numbers: Mapping[str, int]
) -> dict[str, list[dict[str, Any]]]:
    """Draw long texts with a fixed seed."""
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
    """The label of each text."""
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
