"""
Tables of runs: `python -m sparsebert.report RUN_DIR ...`.

Reads the `metrics.json` of pre-training and fine-tuning runs.
"""

import json
import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import rich.table
from rich.console import Console

from ..data.tasks.glue import GLUE_COLUMNS


POSITIONS = {
    "diagonal": "P diag.",
    "offset_1": "P 1",
    "offsets_2_3": "P 2-3",
    "offsets_4_8": "P 4-8",
    "beyond_8": "P > 8",
}


@dataclass
class Table:
    """Texts in rows and columns, as `(title, columns, rows)` and notes below."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: tuple = ()

    @classmethod
    def of(cls, title, rows, notes=()):
        """From one dict a row; columns that no row fills are left out."""
        columns = [name for name in dict.fromkeys(name for row in rows for name in row) if any(map(_get(name), rows))]
        return cls(title, columns, [[row.get(name, "") for name in columns] for row in rows], tuple(notes))

    def rich(self):
        table = rich.table.Table(title=self.title, caption="\n".join(self.notes) or None, caption_justify="left")
        for index, column in enumerate(self.columns):
            # Words to the left, numbers to the right.
            numeric = any(row[index][:1].isdigit() or row[index][:1] == "-" for row in self.rows)
            table.add_column(column, justify="right" if numeric else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self):
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n\n".join([f"**{self.title}**", body, *self.notes]) + "\n"


def _get(name):
    return lambda row: row.get(name)


def read_runs(folders):
    """
    Metrics of runs.

    Args:
        folders (`list` of `str` or `os.PathLike`): Output folders of `pretrain.py` and `finetune.py`.

    Returns:
        `dict[Path, dict]`: Metrics by folder.
    Raises:
        FileNotFoundError: If a folder has no `metrics.json`.
    """
    runs = {}
    for folder in map(Path, folders):
        path = folder / "metrics.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; run pretrain.py or finetune.py first")
        runs[folder] = json.loads(path.read_text())
    return runs


def tables(runs):
    """
    Runs as tables: pre-training, fine-tuning, grids, GLUE; those that are not empty.

    Args:
        runs (`dict[Path, dict]`): Metrics by folder.

    Returns:
        `list[Table]`
    """
    pretraining, finetuning, glue, grids, notes, glue_notes = [], [], [], [], [], []
    for folder, metrics in runs.items():
        if "glue" in metrics:
            tasks = {f"{folder.name}/{task}": values for task, values in metrics["glue"].items()}
            row, remarks = _glue_row(folder.name, metrics)
            glue.append(row)
            glue_notes.extend(remarks)
        elif "task" in metrics:
            tasks = {folder.name: metrics}
        else:
            pretraining.append(_pretraining_row(folder.name, metrics))
            continue
        for name, values in tasks.items():
            finetuning.extend(_finetuning_rows(name, values))
            notes.extend(_finetuning_notes(name, values))
            if "sweep" in values:
                grids.append(_sweep_table(name, values))
    result = []
    if pretraining:
        note = "P: mean keep probability by offset |i - j| before freezing; a fixed mask has 0 or 1"
        result.append(Table.of("Pre-training", pretraining, [note]))
    if finetuning:
        note = (
            "removed: entries of the mask at its own length; on inputs: of those evaluated. Scores in %, with several "
            "seeds mean ± sample deviation; train s: mean per seed"
        )
        result.append(Table.of("Fine-tuning", finetuning, [note, *notes]))
    result.extend(grids)
    if glue:
        note = (
            "average of 9: MNLI-m and -mm apart, no WNLI (SparseBERT, Table 3); of 8: MNLI's mean as one. In "
            "brackets: of so many columns only, not comparable with the whole"
        )
        result.append(Table.of("GLUE, development sets, %", glue, [note, *glue_notes]))
    return result


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
            "mask": metrics["mask"],
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
        yield f"{name}: difference to {metrics['comparison']['baseline']}, paired by example and seed ({seeds})"


def _sweep_table(name, metrics):
    sweep = metrics["sweep"]
    rows = [
        {key: f"{value:g}" if isinstance(value, float) else str(value) for key, value in cell["settings"].items()}
        | {metrics["main_metric"]: _score(cell["score"]), "": "best" if cell["settings"] == sweep["best"] else ""}
        for cell in sweep["cells"]
    ]
    note = (
        f"The first seed ({next(iter(metrics['seeds']))}) of each cell; the best cell, chosen on the split that it is "
        "reported on, has all seeds in the table above"
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
        notes.append(f"- {name}: no training or no development set of {', '.join(metrics['missing'])}")
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


def print_tables(runs):
    """Print the tables of runs, as [`tables`]."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    for table in tables(runs):
        console.print(table.rich())
