""""""

import argparse
from importlib.util import find_spec
from pathlib import Path

from transformers import TrainingArguments

from ..analysis.pictures import plot_scores
from ..analysis.runs import read_run
from ..files import write_metrics
from ..models.configuration_sparsebert import SparseBertConfig
from ..training.finetuning import FinetuningArguments, check
from ..training.recipes import load_recipe
from ..training.two_stage_pruning import _check_rows, curves, describe, finetune_masks, make_masks, write_masks


SPARSITIES = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
SECTIONS = {"data": FinetuningArguments, "model": SparseBertConfig, "training": TrainingArguments}
# Fields of the recipe that this command sets, or that mean several tasks.
OURS = ("mask", "pruning", "all")


def _print_table(masks, scores=None):
    lines = [["mask", "asked", "removed", "empty rows", *(["score"] if scores else [])]]
    for name, row in describe(masks).items():
        lines.append([name, f"{row['asked']:.3f}", f"{row['got']:.4f}", str(row["empty_rows"])])
        if scores:
            score = scores["masks"][name]
            deviation = "" if score["score_std"] is None else f" ± {score['score_std']:.4f}"
            lines[-1].append(f"{score['score']:.4f}{deviation}")
    if scores:
        lines.append(["dense", "", "0.0000", "0", f"{scores['dense']['score']:.4f}"])
    widths = [max(len(line[column]) for line in lines) + 2 for column in range(len(lines[0]))]
    print("\n".join("".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines))


def main(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m sparsebert.prune",
        description="Masks at several sparsities from the P of a search, random controls, fine-tuning through them.",
    )
    parser.add_argument("run", metavar="RUN", help="run folder of pretrain.py with its P, or a searching checkpoint")
    parser.add_argument("--sparsities", nargs="+", type=float, default=SPARSITIES, help="default: 0.1 0.2 ... 0.9")
    parser.add_argument("--output_dir", type=Path, required=True, metavar="DIR", help="created if missing")
    parser.add_argument("--random", action="store_true", help="as many entries removed at random, as a control")
    parser.add_argument("--seeds", type=int, metavar="N", help="number of random controls per sparsity; 1")
    parser.add_argument("--allow_empty_rows", action="store_true", help="accept masks in which a query keeps no key")
    parser.add_argument(
        "--finetune", nargs=argparse.REMAINDER, metavar="...", help="last: recipe and flags as of finetune.py"
    )
    options = parser.parse_args(arguments)
    if options.seeds is not None and (not options.random or options.seeds < 1):
        raise ValueError(f"--seeds is a number of at least 1 and goes with --random, got {options.seeds}")
    sparsities = sorted(set(options.sparsities))
    masks = make_masks(read_run(options.run), sparsities, range(options.seeds or 1) if options.random else ())
    if not options.allow_empty_rows:
        _check_rows(masks)
    recipe = None
    if options.finetune is not None:
        recipe = load_recipe(options.finetune, SECTIONS)
        if given := [name for name in OURS if recipe["data"].get(name)]:
            raise ValueError(f"{given[0]} has no meaning in --finetune, which runs one task through each mask")
        check(FinetuningArguments(**recipe["data"] | {"mask": "dense"}), recipe["model"])
    output = options.output_dir
    write_masks(masks, output)
    scores = None
    if recipe is not None:
        scores = finetune_masks(masks, recipe, output, options.allow_empty_rows)
        write_metrics(output / "scores.json", scores)
        if find_spec("matplotlib"):
            title = f"Pruning by P: {scores['task']}"
            points = curves(masks, scores["masks"])
            plot_scores(points, output / "scores", scores["metric"], title, scores["dense"]["score"])
    _print_table(masks, scores)
    print(f"written to {output}")
