"""Tables of finished runs, from the `metrics.json` of pre-training, fine-tuning, searches and translation."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from ...data.tasks.glue import GLUE_COLUMNS
from ...files import METRICS_NAME
from ..tables import Table


POSITIONS = {
    "diagonal": "P diag.",
    "offset_1": "P 1",
    "offsets_2_3": "P 2-3",
    "offsets_4_8": "P 4-8",
    "beyond_8": "P > 8",
}
# Masks in the metrics of a search in a trained model: the one that it learned or was given, and the same recovered.
LEARNED, GIVEN, RECOVERED = "learned", "given", "{}, recovered"
# What is in the metrics of GLUE, of fine-tuning, of pre-training, of a search in a trained model and of translation.
_KINDS = (
    {"glue", "missing"},
    {"task", "main_metric", "splits"},
    {"sparsity", "positions", "seconds"},
    {"agreement", "sparsity", "seconds"},
    {"bleu", "sparsity", "seconds"},
)
PRETRAINING, SEARCHES, FINETUNING = "Pre-training", "Masks for trained models", "Fine-tuning"
GLUE, TRANSLATION = "GLUE, development sets, %", "Translation"
# What the columns of each table mean, below it; those of searches are explained if they are there.
_NOTES = {
    PRETRAINING: "P: mean probability that a position is kept, by offset |i - j|, before freezing; 0 or 1 for a fixed "
    "mask",
    SEARCHES: "",
    FINETUNING: "removed: share of the mask's entries at its own length; on inputs: the same over the evaluated "
    "inputs. Scores in %; several seeds: mean ± sample deviation. train s: mean per seed",
    GLUE: "average of 9: MNLI-m and MNLI-mm count separately, without WNLI (SparseBERT, Table 3); of 8: their mean "
    "counts once. In brackets: the columns there are, if some are missing; not comparable with the whole",
    TRANSLATION: "BLEU: cased, from sacreBLEU; of references: of the references after tokenization, the highest "
    "possible",
}
_SEARCH_COLUMNS = {
    "cosine": "with the dense model's mean last hidden states, on held-out text",
    "score": "of the task, times 100",
    "speed-up": "time of the dense model over that through the mask, for a batch",
}


def own_mask(mask: str | None) -> str:
    """`LEARNED` or, if the metrics of the search name a `mask`, `GIVEN`."""
    return LEARNED if mask is None else GIVEN


def other_masks(metrics: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Of the metrics of a search, what was measured of the masks that it was compared with."""
    own = own_mask(metrics.get("mask"))
    return {
        name: numbers
        for name, numbers in metrics["agreement"].items()
        if name not in ("dense", own, RECOVERED.format(own))
    }


def read_metrics(folders: Iterable[str | os.PathLike]) -> dict[Path, dict[str, Any]]:
    """The metrics of the output folders of finished runs, checked."""
    metrics = {}
    for folder in map(Path, folders):
        path = folder / METRICS_NAME
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; expected the output folder of a finished run")
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: damaged or not JSON ({error})") from error
        if not isinstance(found, dict) or not any(names <= found.keys() for names in _KINDS):
            raise ValueError(
                f"{path}: not the metrics of a pre-training, a fine-tuning, a GLUE run, a search or a translation"
            )
        try:
            report_tables({folder: found})
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, StopIteration) as error:
            raise ValueError(f"{path}: damaged, its metrics are incomplete ({error!r})") from error
        metrics[folder] = found
    return metrics


def distinct_names(sources: Sequence[str | os.PathLike]) -> list[str]:
    """The last part of each path or Hub id, or the whole where several end alike."""
    short = [Path(source).name or Path(source).resolve().name for source in sources]  # "." has no name
    return [str(source) if short.count(name) > 1 else name for source, name in zip(sources, short, strict=True)]


def report_tables(runs: Mapping[Path, dict[str, Any]]) -> list[Table]:
    """
    The tables of runs from [`read_metrics`]: pre-training, masks for trained models, fine-tuning, grids of settings,
    GLUE and translation. Empty ones are left out.
    """
    rows: dict[str, list] = {title: [] for title in _NOTES}
    notes: dict[str, list] = {title: [note] for title, note in _NOTES.items()}
    grids = []
    for run, metrics in zip(distinct_names([*runs]), runs.values(), strict=True):
        tasks = {}
        if "agreement" in metrics:
            rows[SEARCHES].append(_search_row(run, metrics))
        elif "bleu" in metrics:
            rows[TRANSLATION].append(_translation_row(run, metrics))
        elif "glue" in metrics:
            tasks = {f"{run}/{task}": values for task, values in metrics["glue"].items()}
            row, remarks = _glue_row(run, metrics)
            rows[GLUE].append(row)
            notes[GLUE] += remarks
        elif "task" in metrics:
            tasks = {run: metrics}
        else:
            rows[PRETRAINING].append(_pretraining_row(run, metrics))
        for name, values in tasks.items():
            rows[FINETUNING] += _finetuning_rows(name, values)
            notes[FINETUNING] += _finetuning_notes(name, values)
            if "sweep" in values:
                grids.append(_sweep_table(name, values))
    filled = {column.split(",")[0] for row in rows[SEARCHES] for column, text in row.items() if text}
    notes[SEARCHES] = ["; ".join(f"{name}: {text}" for name, text in _SEARCH_COLUMNS.items() if name in filled)]
    tables = []
    for title in _NOTES:
        tables += [Table.of(title, rows[title], notes[title])] if rows[title] else []
        tables += grids if title == FINETUNING else []
    return tables


def _pretraining_row(name, metrics):
    row = {"run": name, "map": metrics.get("probability_map", "softmax").replace("softmax", "")}
    mixers = [(mixer, len(list(layers))) for mixer, layers in groupby(metrics.get("token_mixers") or ())]
    row["mixers"] = ", ".join(f"{count} {mixer}" for mixer, count in mixers)
    row["removed"] = _percent(metrics["sparsity"])
    row |= {title: _number(metrics["positions"].get(group), 2) for group, title in POSITIONS.items()}
    return row | {
        "P special": _number(metrics["positions"].get("special_tokens"), 2),
        "MLM loss": _number(metrics.get("mlm_loss"), 3),
        "MLM acc.": _percent(metrics.get("mlm_accuracy")),
        "perplexity": _number(metrics.get("perplexity"), 2),
        "NSP acc.": _percent(metrics.get("nsp_accuracy")),
        "seconds": _number(metrics["seconds"], 0),
    }


def _search_row(name, metrics):
    own = own_mask(metrics.get("mask"))
    steps = {"dense": "dense", "": own, "recovered": RECOVERED.format(own)}
    row = {"run": name, "mask": str(metrics.get("mask") or metrics["search"]), "task": metrics.get("task") or ""}
    row["removed"] = _percent(metrics["sparsity"][own])
    row["on inputs"] = _percent(metrics["agreement"][own].get("input_sparsity"))
    row["cosine"] = _number(metrics["agreement"][own]["cosine"], 3)
    row["cosine, recovered"] = _number(metrics["agreement"].get(steps["recovered"], {}).get("cosine"), 3)
    for step, mask in steps.items():
        score = metrics["agreement"].get(mask, {}).get("score")
        row[f"score, {step}".removesuffix(", ")] = "" if score is None else _score(score)
    times = metrics.get("inference_seconds") or {}
    row["speed-up"] = _number(times["dense"] / times["masked"] if times.get("masked") else None, 2)
    return row | {"seconds": _number(metrics["seconds"]["total"], 0)}


def _translation_row(name, metrics):
    return {
        "run": name,
        "mask": str(metrics["pattern"] or ""),
        "removed": _percent(metrics["sparsity"]),
        "BLEU": _number(metrics["bleu"], 2),
        "of references": _number(metrics["bleu_of_references"], 1),
        "loss": _number(metrics["loss"], 3),
        "training pairs": str(metrics["train_pairs"]),
        "test pairs": str(metrics["test_pairs"]),
        "steps": str(metrics["steps"]),
        "train s": _number(metrics["train_seconds"], 0),
    }


def _finetuning_rows(name, metrics):
    main = metrics["main_metric"]
    for split, values in metrics["splits"].items():
        if main not in values:
            continue
        other = [
            f"{key} {_score(value, 1 if key.endswith('_threshold') else 100)}"
            for key, value in values.items()
            if key not in (main, "loss", "seconds")
        ]
        difference = metrics.get("comparison", {}).get(split)
        simple = metrics.get("simple_baseline", {}).get(main)
        yield {
            "run": name,
            "task": metrics["task"] + ("*" if metrics["is_part"] else ""),
            "split": split,
            "mask": str(metrics["mask"]),
            "removed": _percent(metrics["sparsity"]),
            "on inputs": _percent(metrics["input_sparsity"]),
            "metric": main,
            "score": _score(values[main]),
            "others": ", ".join(other),
            "difference [95 %]": "" if difference is None else _difference(difference),
            "bag of words": _percent(simple),
            "seeds": str(len(metrics.get("seeds", [metrics.get("seed")]))),
            "train s": _number(metrics["train_seconds"], 1 if metrics["train_seconds"] < 10 else 0),
        }


def _finetuning_notes(name, metrics):
    if metrics["is_part"]:
        yield f"* {name}: trained on a part, {metrics['train_examples']} examples of {metrics['train_split']}"
    for split, skipped in metrics.get("skipped", {}).items():
        yield f"{name}, {split}: {skipped}"
    if "comparison" in metrics:
        seeds = ", ".join(map(str, metrics["comparison"]["seeds"]))
        yield f"{name}: difference from {metrics['comparison']['baseline']}, paired by example and seed ({seeds})"


def _sweep_table(name, metrics):
    sweep = metrics["sweep"]
    rows = [
        {key: f"{value:g}" if isinstance(value, float) else str(value) for key, value in cell["settings"].items()}
        | {metrics["main_metric"]: _score(cell["score"]), "": "best" if cell["settings"] == sweep["best"] else ""}
        for cell in sweep["cells"]
    ]
    note = (
        f"Each cell was run with the first seed ({next(iter(metrics['seeds']))}). The best one, chosen on the split "
        "that it is reported on, was run with all seeds: see the table above"
    )
    return Table.of(f"Grid of {name}", rows, [note])


def _glue_row(name, metrics):
    results, row, parts = metrics["glue"], {"run": name}, []
    for title, task, split, metric in (*GLUE_COLUMNS, ("WNLI", "wnli", "validation", "accuracy")):
        value = results.get(task, {}).get("splits", {}).get(split, {}).get(metric)
        part = value is not None and results[task]["is_part"]
        row[title] = "-" if value is None else _score(value) + ("*" if part else "")
        if part:
            parts.append(f"{title} ({results[task]['train_split']}, {results[task]['train_examples']} examples)")
    for size in (9, 8):
        count = metrics[f"num_columns_{size}"]
        row[f"average of {size}"] = _score(metrics[f"average_{size}"]) + (
            "" if count == size else f" ({count} of {size})"
        )
    notes = []
    if parts:
        notes.append(f"* {name}: trained on a part: {', '.join(parts)}")
    if metrics["missing"]:
        notes.append(f"- {name}: no training or development set for {', '.join(metrics['missing'])}")
    return row, notes


def _difference(comparison):
    low, high = comparison["interval"]
    return f"{100 * comparison['difference']:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


def _score(value, scale=100):
    if value is None:
        return "-"
    if not isinstance(value, dict):
        return f"{scale * value:.1f}"
    return f"{scale * value['mean']:.1f}" + (f" ± {scale * value['std']:.1f}" if "std" in value else "")


def _number(value, digits):
    return "" if value is None else f"{value:.{digits}f}"


def _percent(value):
    return "" if value is None else f"{100 * value:.1f} %"
