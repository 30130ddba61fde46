"""
Token mixers instead of attention: Table 1 and Figure 1 of [U], Are Transformers Universal Approximators (arXiv
1912.10077).
"""

from dataclasses import dataclass

from sparsebert.data.tasks import TASKS

from ..harness.experiment import Experiment, common_settings, seeded
from ..shared.recipe_sections import SHARED, check_task, finetuned
from ..shared.text_pretraining import SMALLEST, TextSettings, check_text, run_text


@dataclass
class MixersStudy(TextSettings):
    """
    Settings of the experiment: models with one mixer in all layers, and hybrids whose first layers are convolutions,
    with the text, model and training of [`TextSettings`].

    Args:
        table_max_steps, table_batch_size, table_gradient_accumulation_steps (`int`, *optional*): Training of the
            models with one mixer. By default they train like the hybrids, and are the two ends of their range.
        nsp (`bool`): Whether to pre-train on next-sentence pairs too.
        task (`str`, *optional*): Task to fine-tune on, a key of `TASKS`.
        data (`str`, *optional*): Folder of the task's files; by default they come from the Hub.
    """

    table_max_steps: int | None = None
    table_batch_size: int | None = None
    table_gradient_accumulation_steps: int | None = None
    nsp: bool = False
    task: str | None = None
    data: str | None = None


# Settings that the models with one mixer may have for themselves.
_TABLE = ("max_steps", "batch_size", "gradient_accumulation_steps")


def _cells(settings):
    base = common_settings(settings, *(f"table_{name}" for name in _TABLE))
    own = {name: getattr(settings, f"table_{name}") for name in _TABLE}
    table = base | {name: value for name, value in own.items() if value is not None}
    num_layers = settings.num_layers

    def cell(sizes, series, num_replaced, mixer):
        mixers = [mixer] * num_replaced + ["attention"] * (num_layers - num_replaced)
        return sizes | {"series": series, "replaced_layers": num_replaced, "token_mixers": mixers}

    one_budget = table == base
    ends = "hybrid" if one_budget else "one mixer"
    result = {
        "attention": cell(table, ends, 0, "sepconv"),
        "sepconv": cell(table, ends, num_layers, "sepconv"),
        "bproj": cell(table, "bproj", num_layers, "bproj"),
        "average": cell(table, "average", num_layers, "average"),
    }
    for replaced in range(1, num_layers) if one_budget else range(num_layers + 1):
        result[f"hybrid_{replaced}"] = cell(base, "hybrid", replaced, "sepconv")
    return seeded(result, settings.seeds)


def _model(cell):
    return {"pattern": "dense", "token_mixers": cell["token_mixers"]}


def _check(cell):
    check_text(cell, _model(cell))
    check_task(cell)


def _run(cell, folder):
    """Pre-train a model and, if there is a task, fine-tune it."""
    metrics = run_text(cell, folder, _model(cell), cell["nsp"])
    names = ("mlm_accuracy", "mlm_loss", "num_parameters", "steps", "train_seconds", *SHARED)
    metrics = {name: metrics[name] for name in names}
    if cell["task"] is not None:
        data = {"task": cell["task"], "data": cell["data"], "model": str(folder)}
        data["max_length"] = min(TASKS[cell["task"]].max_length, cell["max_length"])
        metrics["task_score"] = finetuned(data, {"seed": cell["seed"]}, folder / "finetuned", cell["bf16"])["score"]
    return metrics


EXPERIMENT = Experiment(
    title="Token mixers ([U] Table 1, Figure 1)",
    arguments=MixersStudy,
    scales={
        "tiny": {
            "vocab_size": 1024, "max_length": 64, "max_validation_tokens": 40_000, "hidden_size": 64,
            "num_layers": 4, "num_heads": 4, "intermediate_size": 256, "dropout": 0.0, "max_steps": 1400,
            "batch_size": 32, "learning_rate": 3e-3, "warmup_steps": 50,
        },
        "paper": {
            "dropout": 0.01, "nsp": True, "max_steps": 250_000, "batch_size": 64, "gradient_accumulation_steps": 16,
            "warmup_steps": 10_000, "table_max_steps": 60_000, "table_gradient_accumulation_steps": 128,
            "bf16": True, "task": "mnli",
        },
    },
    cells=_cells,
    check=_check,
    run=_run,
    columns={
        "num_parameters": ("parameters", "{:,.0f}"),
        "mlm_accuracy": ("MLM accuracy", "{:.1%}"),
        "mlm_loss": ("MLM loss", "{:.3f}"),
        "task_score": ("task", "{:.1%}"),
        "cpu_seconds": ("CPU seconds", "{:.0f}"),
    },
    plot=("replaced_layers", "mlm_accuracy", "series"),
    baseline="attention",
    published={
        "average": {"num_parameters": 88.3e6, "mlm_accuracy": 0.28, "task_score": 0.66},
        "bproj": {"num_parameters": 90e6, "mlm_accuracy": 0.59, "task_score": 0.723},
        "sepconv": {"num_parameters": 102.5e6, "mlm_accuracy": 0.60, "task_score": 0.73},
        "attention": {"num_parameters": 110e6, "mlm_accuracy": 0.63, "task_score": 0.782},
    },
    notes=(
        "hybrid_k: convolutions in the first k layers, attention in the others; in the paper the hybrids with 1 or 2 "
        "of 12 are better than attention alone, those with more are worse",
        "The paper's models have 12 layers; its figures for one mixer are plotted at our last layer",
        "The paper's task is MNLI, with BERT-base pre-trained on Wikipedia and BooksCorpus",
    ),
    smallest=SMALLEST,
)  # fmt: skip
