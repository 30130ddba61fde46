"""What experiments read, by the names of their settings: small texts, tasks, reviews and models."""

import json
from dataclasses import fields


def write_inputs(root, checkpoints, glue, squad, swag):
    """Write the inputs of experiments to a folder; values by the name of a setting."""
    # In the words of the tokenizer of `checkpoints`; the documents are long enough to be split.
    documents = [" ".join(f"w{(i * i + d) % 90}" for i in range(400)) for d in range(30)]
    (root / "text.txt").write_text("\n\n".join(documents))
    (root / "pairs.tsv").write_text(
        "".join(f"The house is red {i}.\tDům je červený {i}.\n" for i in range(40)), encoding="utf-8"
    )
    (root / "reviews").mkdir()
    for split, words in {"train": ("w1", "w2"), "test": ("w3", "w4")}.items():
        rows = [{"text": " ".join([words[i % 2]] * (16 + 3 * i)), "label": i % 2} for i in range(24)]
        (root / f"reviews/{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "cells/stock").mkdir(parents=True)
    (root / "cells/stock/model").symlink_to(checkpoints["stock"])
    places = {"text": "text.txt", "validation": "text.txt", "train": "pairs.tsv", "test": "pairs.tsv"}
    places |= {"reviews": "reviews", "models": "cells"}
    values = {name: str(root / place) for name, place in places.items()}
    values |= {"data": str(glue), "stsb": str(glue), "squad": str(squad), "squad2": str(squad), "swag": str(swag)}
    values |= {"tasks": ["rte"], "systems": ["stock"], "masked": [checkpoints["window"]]}
    return values | {
        "model": checkpoints["stock"],
        "original": checkpoints["stock"],
        "base_model": checkpoints["long"],
    }


def known(experiment, values):
    """Those of the values that are settings of the experiment."""
    return {item.name: values[item.name] for item in fields(experiment.arguments) if item.name in values}


def finished(*cells):
    """Finished cells, from pairs of settings and metrics."""
    return {str(i): {"settings": settings, "metrics": metrics} for i, (settings, metrics) in enumerate(cells)}


def rows_by(table, *names):
    """The rows of a table by their entries in these columns."""
    rows = table.as_json()["rows"]
    return {row[names[0]] if len(names) == 1 else tuple(row[name] for name in names): row for row in rows}
