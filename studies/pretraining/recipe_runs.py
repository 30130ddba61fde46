"""Runs of a recipe with other fields, for studies that compare many of them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsebert.commands import parse
from sparsebert.models.bert.configuration_sparsebert import SparseBertConfig

from ..shared.recipe_sections import check_texts


# Sizes of a model that is trained in seconds, for tests.
SMALLEST = {
    "vocab_size": 150, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16,
    "per_device_train_batch_size": 2, "max_validation_tokens": 300,
}  # fmt: skip


@dataclass
class RecipeSettings:
    """
    Text and recipe.

    Args:
        text (`str` or `list[str]`): Training text, see [`PretrainingArguments`].
        validation (`str` or `list[str]`, *optional*): Held-out text; by default 1 document in 100 of the text.
        fields (`dict`, *optional*): Fields of the recipe that differ, such as sizes of the model.
    """

    text: str | list[str] = "builtin"
    validation: str | list[str] | None = None
    fields: dict | None = None


def cell_recipe(cell: dict[str, Any], recipe: str, folder: Path, fields: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A recipe with the text and the fields of a cell, and further fields; those that are `None` are set to null."""
    words = ["pretrain", recipe]
    own = {"text": cell["text"], "validation": cell["validation"], "output_dir": str(folder), "seed": cell["seed"]}
    own |= {"pictures": False, "report_to": "none", "disable_tqdm": True, **(cell["fields"] or {}), **fields}
    for name, value in own.items():
        words += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    _, values = parse(words)
    return {section: values[section] for section in ("data", "model", "training")}


def check_recipe(cell: dict[str, Any], recipe: str, fields: dict[str, Any]) -> None:
    """Check that a cell can run: its text, and the names and values of its fields."""
    check_texts(cell)
    SparseBertConfig(**cell_recipe(cell, recipe, Path("unused"), fields)["model"])


def file_name(name: str) -> str:
    """A name as that of a cell."""
    return "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in name)
