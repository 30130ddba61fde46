"""
How sparse the raw penalty makes a mask, over many sizes of its weight lambda, and why: the size of the two gradients
that meet in the logits during a search without penalty, that of the task and that of the penalty at lambda 1.
"""

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainingArguments, set_seed

from sparsebert import SparseBertConfig, SparseBertForMaskedLM
from sparsebert.analysis.pictures.figures import COLORS, new_figure, save_figure
from sparsebert.analysis.tables import Table
from sparsebert.checks import check_range
from sparsebert.data.documents import load_documents
from sparsebert.data.examples import pretraining_collator, pretraining_dataset
from sparsebert.data.tokenization import train_tokenizer
from sparsebert.training.pretraining.pretraining_arguments import PretrainingArguments
from sparsebert.training.pretraining.pretraining_run import pretrain
from sparsebert.training.trainer import SparseBertTrainer

from ..harness.comparisons import by_seed, mean
from ..harness.experiment import Cells, Experiment, common_settings, seeded
from .recipe_runs import SMALLEST, RecipeSettings, cell_recipe, check_recipe, file_name


RECIPE = "demo_dam_s"
_RAW = {"target_sparsity": None, "search_end": 1, "freeze_sparsity": None, "allow_empty_rows": True}
FORMS: dict[str, dict[str, Any]] = {
    "additive, c = 10000": _RAW | {"mask_form": "additive", "mask_constant": 1e4},
    "additive, c = 10": _RAW | {"mask_form": "additive", "mask_constant": 10},
    "log": _RAW | {"mask_form": "log"},
}


@dataclass
class PenaltyStudy(RecipeSettings):
    """
    Settings of the study, with those of [`RecipeSettings`] for the recipe `demo_dam_s`: each form of the mask at each
    lambda, and a search without penalty whose gradients are measured.

    Args:
        max_steps (`int`): Training steps of a search.
        penalties (`list[float]`): Values of lambda.
        seeds (`list[int]`): Seeds of the weights, the order of the text, the masking and the search.
    """

    max_steps: int = 300
    penalties: list[float] = field(default_factory=lambda: [0, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2])
    seeds: list[int] = field(default_factory=lambda: [42])


def _cells(settings):
    common = common_settings(settings, "penalties")
    cells = {}
    for form in FORMS:
        for penalty in settings.penalties:
            check_range("penalties", penalty, 0, None, (int, float))
            cells[f"{file_name(form)}_{penalty:g}"] = common | {"form": form, "penalty": penalty}
        cells[f"{file_name(form)}_gradients"] = common | {"form": form, "penalty": None}
    return seeded(cells, settings.seeds)


def _fields(cell):
    return FORMS[cell["form"]] | {"max_steps": cell["max_steps"], "sparsity_weight": cell["penalty"] or 0}


def _run(cell, folder):
    if cell["penalty"] is None:
        return gradients(cell_recipe(cell, RECIPE, folder, _fields(cell) | {"max_grad_norm": 0}))
    found = pretrain(cell_recipe(cell, RECIPE, folder, _fields(cell)))
    return {name: found[name] for name in ("sparsity", "mlm_loss")}


class Gradients(TrainerCallback):
    """Root mean square over the logits of the task's gradient and of the penalty's at lambda 1, every step."""

    def __init__(self):
        self.task, self.penalty = [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        learned = model.sparse_attention.learned
        probs = torch.sigmoid(learned.alpha())
        (penalty,) = torch.autograd.grad((probs * learned.search.counts).sum(), learned.logits)
        for values, gradient in ((self.task, learned.logits.grad), (self.penalty, penalty)):
            values.append(gradient.square().mean().sqrt().item())


def gradients(recipe: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Medians of both gradients along the search, and `"balance"`, lambda at which they are alike."""
    data, training = PretrainingArguments(**recipe["data"]), TrainingArguments(**recipe["training"])
    set_seed(training.seed)
    model = SparseBertForMaskedLM(SparseBertConfig(**recipe["model"]))
    tokenizer = train_tokenizer(load_documents(data.text, "train"), model.config.vocab_size)
    documents = load_documents(data.text, "train")
    rows = pretraining_dataset(documents, tokenizer, data.max_length, data.nsp, training.seed, data.max_tokens)
    recorded = Gradients()
    SparseBertTrainer(
        model, training, train_dataset=rows, callbacks=[recorded],
        data_collator=pretraining_collator(tokenizer, data.mlm_probability, pad_to_multiple_of=data.max_length),
    ).train()  # fmt: skip
    task, penalty = statistics.median(recorded.task), statistics.median(recorded.penalty)
    return {"task": task, "penalty_gradient": penalty, "balance": task / penalty}


def _summary(finished: Cells) -> list[Table]:
    """A row per form and lambda."""
    removed, losses = (by_seed(finished, metric, "form", "penalty") for metric in ("sparsity", "mlm_loss"))
    balance = by_seed(finished, "balance", "form")
    rows = [
        {
            "form": form,
            "lambda": f"{penalty:g}",
            "removed": f"{mean(removed[form, penalty]):.1%}",
            "MLM loss": f"{mean(losses[form, penalty]):.3f}",
            "gradients alike at lambda": f"{mean(balance[form]):.1g}" if form in balance else "",
        }
        for form, penalty in removed
    ]
    return [Table.of("Sparsity against the weight of the penalty", rows)] if rows else []


def _draw(finished: Cells, path: Path, title: str) -> None:
    """Sparsity against lambda, and where the penalty's gradient is as large as the task's."""
    removed, balance = by_seed(finished, "sparsity", "form", "penalty"), by_seed(finished, "balance", "form")
    figure = new_figure(7, 4.5, "constrained")
    axis = figure.subplots()
    for form, color, marker in zip(FORMS, COLORS, "osD", strict=False):
        points = sorted((penalty, mean(own)) for (own_form, penalty), own in removed.items() if own_form == form)
        points = [point for point in points if point[0] > 0]  # 0 has no place on this axis
        axis.plot(*zip(*points, strict=True) if points else ([], []), color=color, marker=marker, label=form)
        if form in balance:
            axis.axvline(mean(balance[form]), color=color, ls=":", lw=1)
    axis.set_xscale("log")
    axis.set_ylim(-0.02, 1.02)
    axis.set_xlabel("lambda, weight of the penalty (dotted: its gradient is as large as the task's)")
    axis.set_ylabel("fraction of entries removed (P > 1/2 kept)")
    axis.set_title(title)
    axis.grid(alpha=0.3)
    axis.legend()
    save_figure(figure, path)


EXPERIMENT = Experiment(
    title="Sparsity against the weight of the penalty",
    arguments=PenaltyStudy,
    cells=_cells,
    check=lambda cell: check_recipe(cell, RECIPE, _fields(cell)),
    run=_run,
    columns={
        "sparsity": ("removed", "{:.1%}"),
        "mlm_loss": ("MLM loss", "{:.3f}"),
        "task": ("gradient of the task", "{:.2g}"),
        "penalty_gradient": ("of the penalty at lambda 1", "{:.2g}"),
        "balance": ("alike at lambda", "{:.2g}"),
    },
    plot=("penalty", "sparsity", "form"),
    draw=_draw,
    summary=_summary,
    smallest={"max_steps": 2, "penalties": [0.01], "fields": SMALLEST | {"max_tokens": 3000}},
)
