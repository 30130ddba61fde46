"""
Show which attention positions a search, a mask, or several seeds of one search keep.

Prints the mean P of the diagonal, neighbors, special tokens and others, with 95 % intervals over heads and over seeds,
and the distances that the mask cannot bridge within its layers.
Writes all numbers to `importance.json` in `output_dir`, and pictures (PNG and SVG) beside it.
"""

from dataclasses import dataclass

from ..analysis.importance_analysis import analyze, importance_table
from ..files import UNFINISHED_ALONE, check_output_dir, locked_output, runs_in
from ..hub import HubArguments
from ._command import Command, Results


@dataclass
class AnalysisArguments(HubArguments):
    """
    What to analyze.

    Args:
        runs (`list[str]`): Run folders of `pretrain` (also with several seeds) or `search`, searching checkpoints,
            folders or Hub ids of masks; several runs are taken as seeds of one search.
        output_dir (`str`): Folder to write, created if missing.
        special_tokens (`str`, *optional*): Which tokens count as special; by default `first_last`, or `first` if the
            search always keeps only the first token.
        overwrite (`bool`): Accept an output folder that is not empty.
    """

    runs: list[str]
    output_dir: str
    special_tokens: str | None = None
    overwrite: bool = False


def command(words):
    examples = ("runs/demo/dam_s --output_dir DIR", "RUN_SEED_0 RUN_SEED_1 RUN_SEED_2 --output_dir DIR")
    return Command(run, {"analysis": AnalysisArguments}, examples, "RUN_OR_MASK ...")


def run(values):
    options = AnalysisArguments(**values["analysis"])
    runs = runs_in(options.runs)
    hub_arguments = options.hub_arguments(*runs)
    with locked_output(options.output_dir) as left:
        check_output_dir(options.output_dir, options.overwrite or left == UNFINISHED_ALONE)
        numbers = analyze(runs, options.output_dir, options.special_tokens, **hub_arguments)
    lines = [f"{found['source']}: {found['bridges']}" for found in numbers["runs"]]
    return Results(numbers, [importance_table(numbers)], [*lines, f"written to {options.output_dir}"])
