"""
List the masks in a Hub repository or a folder: their names, forms, sparsities and scores.

The name of a mask is its subfolder, which other verbs take as `--subfolder`. Weights are not read.
"""

from dataclasses import dataclass

from ..analysis.tables import Table
from ..hub import HubArguments
from ..masks.listing import list_masks
from ._command import Command, Results


@dataclass
class ListingArguments(HubArguments):
    """
    Where to look.

    Args:
        source (`str`): Hub id or folder.
    """

    source: str


def command(words):
    examples = ("user/masks", "runs/pruned --json")
    return Command(run, {"listing": ListingArguments}, examples, "HUB_ID_OR_DIR")


def run(values):
    options = ListingArguments(**values["listing"])
    masks = list_masks(options.source, **options.hub_arguments(options.source))
    rows = []
    for mask in masks:
        row = {"name": mask["name"] or ".", "made by": mask["made_by"] or "", "form": mask["form"]}
        row |= {"removed": "" if mask["sparsity"] is None else f"{mask['sparsity']:.1%}"}
        row |= {"tokens": str(mask["length"]), "layers x heads": f"{mask['num_layers']} x {mask['num_heads']}"}
        scores = ", ".join(f"{name} {value}" for name, value in mask["scores"].items())
        rows.append(row | {"base model": mask["base_model"] or "", "scores": scores})
    return Results(masks, [Table.of(f"Masks in {options.source}", rows)] if rows else (), ["no masks"] * (not rows))
