"""
Convolutions in the first layers of a trained encoder: Figure 1 of [U], Are Transformers Universal Approximators (arXiv
1912.10077), on a model that has left the plateau.
"""

import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sparsebert.checks import check_range
from sparsebert.hub import read_config
from sparsebert.models.bert.modeling_sparsebert import SparseBertForMaskedLM

from ..harness.experiment import Experiment, common_settings, seeded
from ..shared.base_models import located
from ..shared.continued_pretraining import (
    SMALLEST,
    ContinuedSettings,
    check_continued,
    continue_training,
    shared_checkpoint,
)
from ..shared.recipe_sections import check_least, check_task, finetuned


@dataclass
class MiniLMMixers(ContinuedSettings):
    """
    Settings of the study: how many of the first layers get convolutions, or as a control attention that has learned
    nothing, with the settings of [`ContinuedSettings`].

    Args:
        replaced (`list[int]`): Numbers of layers whose attention is replaced by a `sepconv` or by new attention; by
            default from none to the six of a MiniLM.
        task (`str`, *optional*): Task to fine-tune on, a key of `TASKS`.
        data (`str`, *optional*): Folder of the task's files; by default they come from the Hub.
        task_learning_rate (`float`): Learning rate of the fine-tuning.
        task_epochs (`float`): Its number of epochs.
        max_train_examples (`int`): Maximum number of examples to fine-tune on.
    """

    max_steps: int = 1000
    replaced: list[int] = field(default_factory=lambda: [0, 1, 2, 3, 4, 5, 6])
    task: str | None = None
    data: str | None = None
    task_learning_rate: float = 5e-5
    task_epochs: float = 3.0
    max_train_examples: int = 10_000


def _cells(settings):
    common = common_settings(settings, "replaced")
    layers = {
        f"{series}_{count}": common | {"series": series, "replaced_layers": count}
        for count in settings.replaced
        for series in (("sepconv", "attention") if count else ("attention",))
    }
    return seeded(layers, settings.seeds)


def _check(cell):
    check_continued(cell)
    check_range("replaced", cell["replaced_layers"], 0, read_config(located(cell["base_model"])).num_hidden_layers)
    check_least(cell, 1, "max_train_examples")
    check_task(cell)


def save_with_new_attention(cell: dict[str, Any], checkpoint: Path, path: str | Path) -> None:
    """Save a model whose attention has learned nothing in the first layers, as new convolutions have not."""
    model = SparseBertForMaskedLM.from_pretrained(checkpoint)
    torch.manual_seed(cell["seed"])
    for layer in model.base_model.encoder.layer[: cell["replaced_layers"]]:
        for linear in (layer.attention.self.query, layer.attention.self.key, layer.attention.self.value):
            linear.weight.data.normal_(std=model.config.initializer_range)
            linear.bias.data.zero_()
    model.save_pretrained(path)


def _run(cell, folder):
    """
    Go on from the shared checkpoint with convolutions or new attention in its first layers and, if there is a task,
    fine-tune.
    """
    num_layers, replaced = read_config(located(cell["base_model"])).num_hidden_layers, cell["replaced_layers"]
    mixers = [cell["series"]] * replaced + ["attention"] * (num_layers - replaced)
    model = {"pattern": "dense", "token_mixers": mixers}
    with tempfile.TemporaryDirectory() as start:
        own, begin = {}, time.perf_counter()
        checkpoint = shared_checkpoint(cell, folder.parents[1])
        shared = time.perf_counter() - begin
        if cell["series"] == "attention" and replaced:
            save_with_new_attention(cell, checkpoint, start)
            own["base_model"] = start
        metrics = continue_training(cell, folder, own, model)
    metrics["shared_seconds"] += shared
    if cell["task"] is not None:
        data = {name: cell[name] for name in ("task", "data", "max_train_examples", "max_length")}
        data["model"] = str(folder)
        training = {"learning_rate": cell["task_learning_rate"], "num_train_epochs": cell["task_epochs"]}
        training["seed"] = cell["seed"]
        metrics["task_score"] = finetuned(data, training, folder / "task", cell["bf16"])["score"]
    return metrics


EXPERIMENT = Experiment(
    title="Convolutions in the first layers of a trained MiniLM ([U] Figure 1)",
    arguments=MiniLMMixers,
    scales={"tiny": {}, "paper": {"max_steps": 250_000, "batch_size": 1024, "max_length": 512}},
    cells=_cells,
    check=_check,
    run=_run,
    columns={
        "mlm_loss": ("MLM loss", "{:.3f}"),
        "mlm_accuracy": ("MLM accuracy", "{:.1%}"),
        "task_score": ("task", "{:.1%}"),
        "train_seconds": ("training, s by the clock", "{:.0f}"),
    },
    plot=("replaced_layers", "mlm_loss", "series"),
    baseline="attention_0",
    notes=(
        "sepconv_k: convolutions instead of attention in the first k layers; attention_k: queries, keys and values of "
        "these layers start anew, as the convolutions do. The paper has curves, no numbers, of 12 "
        "layers trained from scratch: with 1 or 2 convolutions better than with attention alone, with more worse",
    ),
    smallest=SMALLEST | {"replaced": [0, 1, 2]},
)
