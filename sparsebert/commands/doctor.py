"""
Show what can run on this machine: versions, hardware, which attention backends give right results, and how fast.

The output and gradients of every backend that `sparse_auto` may choose are compared with float64, in a separate
process: the error may be at most twice that of plain PyTorch in the same dtype. Then the backend is timed. On a GPU,
`sparse_auto` uses these results from then on. Please add the output of `sparsebert doctor --json` to bug reports.

Exit codes: 0 if all that can run on this device is right; 1 if something is wrong, crashes or hangs, or if a compiler
or a package is missing without which the kernels of this device do not run; 2 if there is no such device.
"""

from dataclasses import dataclass, field

from ..analysis.doctor import DTYPES, diagnose
from ..analysis.saved_runs import read_saved_mask
from ..attention.choosing.self_check_process import TIMEOUT
from ..hub import HubArguments
from ._command import Command, Results


@dataclass
class DoctorArguments(HubArguments):
    """
    What to check.

    Args:
        device (`str`, *optional*): `cpu`, `cuda` or `cuda:1`; by default the GPU, or the CPU if there is none.
        dtypes (`list[str]`): Dtypes to check: `float32`, `bfloat16`, `float16`.
        head_sizes (`list[int]`): Head sizes to check.
        length (`int`): Number of tokens of the inputs that are timed.
        mask (`str`, *optional*): Folder or Hub id of the mask or model that is timed; by default a mask of tiles near
            the diagonal.
        timeout (`float`): Seconds that one check may take.
    """

    device: str | None = None
    dtypes: list[str] = field(default_factory=lambda: list(DTYPES))
    head_sizes: list[int] = field(default_factory=lambda: [64])
    length: int = 512
    mask: str | None = None
    timeout: float = TIMEOUT


def command(words):
    examples = ("--json", "cuda:1 --dtypes bfloat16 --head_sizes 32 64")
    return Command(run, {"doctor": DoctorArguments}, examples, "[DEVICE]")


def run(values):
    options = DoctorArguments(**values["doctor"])
    hub_arguments = options.hub_arguments(options.mask)
    mask = None if options.mask is None else read_saved_mask(options.mask, **hub_arguments).mask
    found = diagnose(options.device, options.dtypes, options.head_sizes, options.length, mask, timeout=options.timeout)
    notes = [f"problem: {problem}" for problem in found.problems] or ["no problem found"]
    return Results(found.as_json(), found.tables(), notes, exit_code=int(bool(found.problems)))
