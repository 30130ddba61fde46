"""
One table of runs: `python -m sparsebert.report RUN_DIR ...`.

Reads the `metrics.json` of pre-training and fine-tuning runs; a fine-tuning run is shown in the row of the model that
it started from.
"""

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .recipes import run_script


POSITIONS = {
    "diagonal": "P diag.",
    "offset_1": "P 1",
    "offsets_2_3": "P 2-3",
    "offsets_4_8": "P 4-8",
    "beyond_8": "P > 8",
}


def read_runs(folders):
    """
    Metrics of runs.

    Args:
        folders (`list` of `str` or `os.PathLike`): Output folders of `pretrain.py` and `finetune.py`.

    Returns:
        `dict[Path, dict]`: Per pre-trained model, its metrics, with those of its fine-tuning run as `"finetuned"`.
    Raises:
        FileNotFoundError: If a folder has no `metrics.json`.
        ValueError: If the model that a run was fine-tuned from is not among the folders.
    """
    metrics = {}
    for folder in map(Path, folders):
        path = folder / "metrics.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; run pretrain.py or finetune.py first")
        metrics[folder] = json.loads(path.read_text())
    runs = {folder: values for folder, values in metrics.items() if "task" not in values}
    for folder, values in metrics.items():
        if "task" in values:
            if Path(values["model"]) not in runs:
                raise ValueError(f"{folder} was fine-tuned from {values['model']}, which is not in the list")
            runs[Path(values["model"])]["finetuned"] = values
    return runs


def table(runs):
    """The runs as a [`rich.table.Table`]; columns that no run fills are left out."""
    rows = []
    for folder, values in runs.items():
        finetuned = values.get("finetuned", {})
        baseline = finetuned.get("baseline", {})
        row = {"run": folder.name, "sparsity": _percent(values["sparsity"])}
        row |= {title: _number(values["positions"].get(name), 2) for name, title in POSITIONS.items()}
        row |= {
            "P special": _number(values["positions"].get("special_tokens"), 2),
            "MLM loss": _number(values["mlm_loss"], 3),
            "MLM acc.": _percent(values["mlm_accuracy"]),
            "NSP acc.": _percent(values.get("nsp_accuracy")),
            "task acc.": _percent(finetuned.get("accuracy")),
            "bag of words": _percent(baseline.get("accuracy")),
            "pre-train s": _number(values["seconds"], 0),
            "fine-tune s": _number(finetuned.get("seconds"), 0),
        }
        rows.append(row)
    result = Table(caption="P: mean keep probability by offset |i - j| before freezing; a fixed mask has 0 or 1")
    titles = [title for title in rows[0] if any(row[title] for row in rows)]
    for title in titles:
        result.add_column(title, justify="left" if title == "run" else "right")
    for row in rows:
        result.add_row(*(row[title] for title in titles))
    return result


def _number(value, digits):
    return "" if value is None else f"{value:.{digits}f}"


def _percent(value):
    return "" if value is None else f"{100 * value:.1f} %"


def main(folders):
    runs = read_runs(folders)
    if not runs:
        raise ValueError("expected the output folders of pretrain.py, and of finetune.py if any")
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table(runs))
    for folder in runs:
        for picture in sorted(folder.glob("*.png")):
            console.print(f"picture: {picture}", highlight=False)


if __name__ == "__main__":
    run_script(main)
