"""Which positions a search, a mask or several seeds keep."""

import argparse
from pathlib import Path

from ..analysis.runs import MASK_ONLY, analyze
from ..files import check_output_dir
from ..masks.sparse_mask import SPECIAL_TOKENS


def main(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m sparsebert.analyze",
        description="Which attention positions a search kept: importance.json, and pictures as PNG and SVG.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN_OR_MASK",
        help="run folder of pretrain.py, searching checkpoint, mask folder or Hub id; several: seeds of one search",
    )
    parser.add_argument("--output_dir", type=Path, required=True, metavar="DIR", help="created if missing")
    parser.add_argument(
        "--special_tokens", choices=SPECIAL_TOKENS, help="what counts as special; first_last for most masks"
    )
    parser.add_argument(
        "--overwrite", nargs="?", const="true", default="false", choices=("true", "false"), help="accept a full DIR"
    )
    options = parser.parse_args(arguments)
    check_output_dir(options.output_dir, options.overwrite == "true")
    numbers = analyze(options.runs, options.output_dir, options.special_tokens)
    print(_table(numbers))
    print("written:", *sorted(str(path) for path in options.output_dir.iterdir()), sep="\n  ")


def _table(numbers):
    """The groups of all layers as text: mean and intervals."""
    groups = numbers["all_layers"]["groups"]
    kinds = [kind for kind in ("over_heads", "over_seeds") if kind in next(iter(groups.values()))]
    lines = [["mean of M" if numbers["quantity"] == MASK_ONLY else "mean P", "", *(f"95 % {kind}" for kind in kinds)]]
    for name, group in groups.items():
        intervals = ["[{:.3f}, {:.3f}]".format(*group[kind]) for kind in kinds]
        lines.append([name, f"{group['mean']:.3f}", *intervals])
    return "\n".join(f"{line[0]:16}" + "".join(f"{cell:18}" for cell in line[1:]) for line in lines)
