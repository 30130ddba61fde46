"""What a finished run adds to the card of its model: results, data, costs and a picture."""

from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult

from ...analysis.doctor import cpu_name
from ...analysis.importance import analyzed_special_tokens
from ...analysis.pictures.importance_pictures import plot_mean_probs, plot_offset_profile
from ...analysis.pictures.mask_pictures import plot_heads
from ...analysis.plans import plan
from ...analysis.reporting.reports import RECOVERED, own_mask, report_tables
from ...analysis.tables import Table
from ...attention.model_masks import sparse_attention_of
from ...data.documents import hub_source
from ...data.tasks import TASKS, Task, glue, squad, swag
from ...files import PICTURE_NAME, PROBS_PICTURES
from ...masks.mask_cards import CARD_NAME, card_sections, make_card, own_card, save_card
from ...masks.sparse_mask import SparseMask
from ...models.model_cards import PIPELINE_TAGS
from ...models.sparse_attention import get_sparse_attention


# Where the data of tasks is on the Hub, and under which configuration.
_DATA = {name: (glue.HUB, name) for name in glue.GLUE} | {name: (hub, None) for name, hub in squad.HUB.items()}
_DATA |= {"swag": (swag.HUB, None)}
# A plan and a picture make the tables of all heads: none of masks with more entries.
MOST_ENTRIES = 2**27
_PRETRAINING_METRICS = {
    "mlm_accuracy": ("accuracy", "Accuracy of masked tokens"),
    "mlm_loss": ("loss", "Loss of masked tokens"),
    "nsp_accuracy": ("accuracy", "Accuracy of next sentences"),
    "lm_loss": ("loss", "Loss of the next token"),
    "perplexity": ("perplexity", "Perplexity"),
}


def hardware() -> str:
    """What this process computes on, as `metrics.json` names it."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"{cpu_name()} ({torch.backends.cpu.get_cpu_capability()}), {threads} thread{'s' * (threads > 1)}"


def _add(folder, results, datasets, tables, metrics, network=None):
    """Add what a run found to the card that its model was saved with; a README.md of the user stays as it is."""
    card = own_card(folder / CARD_NAME)
    if card is None:
        return
    sections, data = card_sections(card), card.data
    if results:
        data.eval_results = list(results)
        data.model_name = folder.resolve().name
        data.metrics = list(dict.fromkeys(result.metric_type for result in results))
    data.datasets = list(datasets) or data.datasets
    sections["Results"] = "\n".join(table.markdown() for table in tables)
    sections["Cost"] = _cost(metrics)
    if network is not None and _is_small(get_sparse_attention(network).mask):
        sections["Plan"] = plan(network, device="cpu", dtype=torch.float32).table().markdown()
    if (folder / PICTURE_NAME).is_file() and PICTURE_NAME not in sections["Mask"]:
        caption = "The masks of the heads: white is kept, black is removed"
        sections["Mask"] += f"\n\n![{caption}]({PICTURE_NAME})"
    save_card(folder, make_card(data, sections))


def _is_small(mask):
    return mask.num_layers * mask.num_heads * mask.length**2 <= MOST_ENTRIES


def _cost(metrics):
    """The times that a run measured, as a table; none without what they were measured on."""
    if "hardware" not in metrics:
        return ""
    rows = [("measured on", metrics["hardware"])]
    seconds = metrics["seconds"] if isinstance(metrics["seconds"], dict) else {"whole run": metrics["seconds"]}
    if "train_seconds" in metrics:
        seconds = {"training": metrics["train_seconds"]} | seconds
    rows += [(f"{name}, seconds", f"{value:.4g}") for name, value in seconds.items()]
    if "tokens_per_second" in metrics:
        rows.append(("tokens per second of training", f"{metrics['tokens_per_second']:.4g}"))
    if "seeds" in metrics:
        rows.append(("means over", f"{len(metrics['seeds'])} seeds"))
    return Table("Times of this run", ["what", "value"], [list(row) for row in rows]).markdown()


def _evaluation(task_type: str, dataset: tuple, split: str, metric: tuple[str, str], value: Any) -> EvalResult:
    """One result in the form that the Hub knows, with the deviation if it is the mean of several seeds."""
    dataset_type, dataset_name, config = dataset
    if isinstance(value, Mapping):
        value = f"{value['mean']:.4g} ± {value['std']:.2g}" if "std" in value else float(f"{value['mean']:.4g}")
    else:
        value = float(f"{value:.4g}")
    return EvalResult(
        task_type=task_type,
        dataset_type=dataset_type,
        dataset_name=dataset_name,
        dataset_config=config,
        dataset_split=split,
        metric_type=metric[0],
        metric_name=metric[1],
        metric_value=value,
    )


def _hub_datasets(sources: Iterable[Any]) -> list[tuple[str, str | None]]:
    """Id and configuration of those of the sources of text that are data sets of the Hub."""
    found = [hub_source(source) for source in sources if isinstance(source, str) and source.startswith("hub:")]
    return [(name, "".join(config) or None) for name, config in found]


def _of_text(text: str | list | None) -> tuple[list[str], tuple]:
    """Data sets, and the data set of a result, as the Hub names them."""
    named = _hub_datasets(text if isinstance(text, list) else [text])
    datasets = list(dict.fromkeys(name for name, _ in named))
    return datasets, (named[0][0], *named[0]) if named else ("text", "held-out text", None)


def add_pretraining(folder: Path, metrics: dict[str, Any], network: Any, text: str | list) -> None:
    """Add the results of a pre-training to its card."""
    datasets, dataset = _of_text(text)
    task = "text-generation" if metrics.get("perplexity") is not None else "fill-mask"
    results = [
        _evaluation(task, dataset, "validation", metric, metrics[name])
        for name, metric in _PRETRAINING_METRICS.items()
        if metrics.get(name) is not None
    ]
    _add(folder, results, datasets, report_tables({folder: metrics}), metrics, network)


def add_search(
    folder: Path, metrics: dict[str, Any], network: Any, data: str | list | None, tables: Sequence[Table]
) -> None:
    """Add the results of a post-hoc search to its card."""
    results = []
    own = own_mask(metrics["mask"])
    found = metrics["agreement"].get(RECOVERED.format(own)) or metrics["agreement"][own]
    names = {"cosine": ("cosine_similarity", "Cosine to the dense model's mean hidden states")}
    names |= {"mlm_loss": ("loss", "Loss of masked tokens")}
    if metrics["task"] is None:
        datasets, dataset = _of_text(data)
    else:
        task = TASKS[metrics["task"]]
        datasets, dataset, task_type = _of_task(task, data)
        name = task.main_metric
        results.append(_evaluation(task_type, dataset, "validation", (name, name), found["score"]))
    results += [
        _evaluation("feature-extraction", dataset, "validation", metric, found[name])
        for name, metric in names.items()
        if name in found
    ]
    _add(folder, results, datasets, tables, metrics, network)


def _of_task(task: Task, data: Any) -> tuple[list[str], tuple, str]:
    """Data sets, the data set of a result, and the type of task, as the Hub names them."""
    hub, config = _DATA.get(task.name, (None, None)) if data is None else (None, None)
    if named := _hub_datasets([data]):
        hub, config = named[0]
    task_type = next((tag for end, tag in PIPELINE_TAGS.items() if task.head.endswith(end)), "other")
    return [hub] if hub else [], (hub or task.name, task.name, config), task_type


def add_finetuning(folder: Path, metrics: dict[str, Any], network: Any = None, data: str | None = None) -> None:
    """Add the results of a fine-tuning to its card; again with those of several seeds, once they are known."""
    task = TASKS[metrics["task"]]
    datasets, dataset, task_type = _of_task(task, data)
    results = [
        _evaluation(task_type, dataset, split, (name, name), value)
        for split, values in metrics["splits"].items()
        for name, value in values.items()
        if name not in ("seconds", "loss") and value is not None
    ]
    _add(folder, results, datasets, report_tables({folder: metrics}), metrics, network)


def draw_run(folder: Path, mask: SparseMask, probs: torch.Tensor | None = None) -> None:
    """Draw the mask of a run and, if it was searched, P."""
    plot_heads(mask, folder / PICTURE_NAME)
    if probs is not None:
        mean_probs, offset_profile = (folder / name for name in PROBS_PICTURES)
        plot_mean_probs(probs, mean_probs)
        plot_offset_profile(probs, offset_profile, analyzed_special_tokens(mask), signed=not mask.symmetric)


def draw_heads(folder: Path, network: Any) -> None:
    """
    Draw the masks of a model's heads into a folder, unless they remove nothing, the picture exists already or
    matplotlib is missing.
    """
    mask: SparseMask | None = getattr(sparse_attention_of(network), "mask", None)
    if mask is None or not mask.sparsity or not _is_small(mask):
        return
    if not (folder / PICTURE_NAME).exists() and find_spec("matplotlib"):
        draw_run(folder, mask)
