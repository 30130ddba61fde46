"""
Show what a frozen mask costs to run: its sparsity, its live tiles, and the backend that `sparse_auto` would choose.

Takes the folder or Hub id of a model, a run or a mask. Nothing is measured.
"""

from dataclasses import dataclass

import torch

from ..analysis.doctor import DTYPES
from ..analysis.plans import saved_plan
from ..checks import check_choice, check_range
from ..hub import HubArguments
from ..masks.mask_files import MAX_MASK_LENGTH
from ._command import Command, Results


@dataclass
class PlanArguments(HubArguments):
    """
    What to plan for.

    Args:
        source (`str`): Folder or Hub id of a model, run or mask.
        length (`int`, *optional*): Tokens of the input; by default the mask's own length.
        device (`str`): Device type, such as `cpu` or `cuda`.
        dtype (`str`): Type of query, key and value: `float32`, `bfloat16` or `float16`.
    """

    source: str
    length: int | None = None
    device: str = "cpu"
    dtype: str = "float32"


def command(words):
    examples = ("runs/demo/dam_s", "DIR_OR_HUB_ID --length 2048 --dtype bfloat16")
    return Command(run, {"plan": PlanArguments}, examples, "MODEL_OR_MASK")


def run(values):
    options = PlanArguments(**values["plan"])
    check_choice("dtype", options.dtype, DTYPES)
    if options.length is not None:
        check_range("length", options.length, 1, MAX_MASK_LENGTH)
    hub_arguments = options.hub_arguments(options.source)
    found = saved_plan(options.source, options.length, options.device, getattr(torch, options.dtype), **hub_arguments)
    return Results(found.as_json(), [found.table()])
