"""
Two-stage pruning: make one mask per sparsity from the P that a search found, with random controls.

The entries with the lowest P are removed, the same share in every head, or after a search with one budget for all
heads in the shares that it found. With `--random_controls N`, N controls per sparsity remove the same number of
learned entries at random. With `--finetune RECIPE` and the fields of `finetune`, a model is fine-tuned through each
mask. Writes a folder per mask, `pruning.json`, and with `--finetune` the runs, `scores.json` and a picture. If the
same command is run again, it continues where it stopped.
"""

from ..files import locked_output
from ..learning.mask_description import STATE_FIELDS
from ..recipe_files import load_recipe
from ..training.finetuning.finetuning_runs import DEFAULTS, SECTIONS
from ..training.pruning.pruning_run import PruningArguments, prune_run, pruning_table
from ._command import Command, Results, advising


# What this verb sets for each mask, what means several tasks, and what is about the run here.
_EXCLUDED = (
    *("all", "mask", "mask_revision", "mask_subfolder", "overwrite", "pruning", "resume"),
    *("revision", "subfolder", "token"),
)


def command(words):
    examples = (
        "RUN --sparsities 0.5 0.8 0.9 --random_controls 3 --output_dir DIR",
        "RUN --output_dir DIR --finetune finetune_small --task rte --model DIR2",
    )
    excluded = {"data": _EXCLUDED, "model": (*STATE_FIELDS, "allow_empty_rows"), "training": ("output_dir",)}
    sections = {"pruning": PruningArguments, **SECTIONS}
    return Command(run, sections, examples, "RUN", excluded=excluded, defaults=DEFAULTS)


def run(values):
    options, recipe = PruningArguments(**values["pruning"]), None
    given = next((f"--{name}" for section in SECTIONS for name in values[section]), None)
    if options.finetune is not None:
        recipe = load_recipe(options.finetune, SECTIONS)
        recipe = {section: recipe[section] | values[section] for section in SECTIONS}
        recipe["data"] |= {"token": options.token} if options.token is not None else {}
    elif given:
        raise ValueError(f"{given} is a field of fine-tuning: it needs --finetune RECIPE")
    again = "starts the fine-tuning over" if options.overwrite else "continues"
    with locked_output(str(options.output_dir)), advising(f"the same command {again}"):
        result = prune_run(options, recipe)
    return Results(result, [pruning_table(result)], [f"written to {options.output_dir}"])
