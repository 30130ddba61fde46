"""What can run on this machine: versions, hardware, backends, and their self-checks."""

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ..attention.backends import BACKENDS, refusal
from ..attention.capabilities import Request
from ..attention.choosing.choice import GPU_BACKENDS, TILE_SIZE
from ..attention.choosing.self_check_process import TIMEOUT, keep_outcome, run_self_checks
from ..attention.choosing.self_check_results import FINISHED, TRUSTED, Outcome, Setting, driver, installed
from ..attention.kernels import cpu
from ..attention.kernels.compilation import CompilationError, find_compiler
from ..checks import check_choice, check_range
from ..masks.sparse_mask import SparseMask
from ..masks.tiles import mask_tile_shares
from ..version import __version__
from .tables import Table


DTYPES = ("float32", "bfloat16", "float16")
PACKAGES = ("torch", "transformers", "triton", "accelerate", "numpy", "sentence-transformers", "openvino", "nncf")
# The checks of each dtype and head size: inference, and training.
PHASES: tuple[dict[str, Any], ...] = (
    {},
    {"padded": True},
    {"padded": True, "gradients": True},
    {"padded": True, "dropout": True, "gradients": True},
)
# Tokens of the comparisons, and heads of the inputs that are timed if no mask is given. On a CPU one kernel
# serves all lengths.
LENGTHS = {"cpu": (7, 77), "cuda": (77, 333)}
NUM_HEADS = {"cpu": 4, "cuda": 12}
# What a CPU may have beyond the vector instructions that PyTorch names.
FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8", "neon", "asimd", "sve", "bf16")


@dataclass(frozen=True)
class Diagnosis:
    """What was found on a machine."""

    versions: dict[str, str | None]  # of Python and packages, `None` if one is not installed
    machine: dict[str, Any]  # CPU, compiler and GPUs
    device: str  # whose backends were checked
    backends: dict[str, str | None]  # why each backend cannot run on the device at all, `None` if it can
    outcomes: list[Outcome]
    problems: list[str]  # what is not as it should be

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    def tables(self) -> list[Table]:
        """Versions and machine, backends, and self-checks."""
        found = {**self.versions, **self.machine}
        gpus = found.pop("gpus")
        rows = [{"what": name, "found": _text(value)} for name, value in found.items()]
        rows += [{"what": f"cuda:{index}", "found": _text(gpu)} for index, gpu in enumerate(gpus)]
        backends = [{"backend": name, "runs": reason or "yes"} for name, reason in self.backends.items()]
        return [
            Table.of("This machine", rows),
            Table.of(f"Backends on {self.device}", backends),
            Table.of("Self-checks", [row for outcome in self.outcomes for row in _rows(outcome)]),
        ]


def _text(value):
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(item)}" for name, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else "none" if value is None else str(value)


def _rows(outcome):
    """A row per backend of a self-check, and one more if it did not finish."""
    setting = str(outcome.setting)
    for name, found in outcome.backends.items():
        # Errors as a share of what is allowed.
        shares = [each["error"] / each["allowed"] for each in found["errors"].values() if each["allowed"]]
        yield {
            "inputs": setting,
            "backend": name,
            "result": "right" if found["right"] else found["reason"] or "wrong",
            "error / allowed": f"{max(shares):.2f}" if shares else "",
            "ms": "" if found["milliseconds"] is None else f"{found['milliseconds']:.3f}",
        }
    if outcome.ended != FINISHED:
        yield {"inputs": setting, "backend": "", "result": outcome.ended}


def diagnose(
    device: str | None = None,
    dtypes: Sequence[str] = DTYPES,
    head_sizes: Sequence[int] = (64,),
    length: int = 512,
    mask: SparseMask | None = None,
    timeout: float = TIMEOUT,
) -> Diagnosis:
    """
    Find out what can run on a device: by default the current GPU, or the CPU if there is none. Times are taken at
    `length` tokens with `mask`, by default tiles near the diagonal; one check may take `timeout` seconds. On a GPU,
    `sparse_auto` uses what the self-checks find from then on.
    """
    where = _checked_device(device)
    for name, values in (("dtypes", dtypes), ("head_sizes", head_sizes)):
        if not values:
            raise ValueError(f"{name} must name at least one, got []")
    for dtype in dtypes:
        check_choice("dtypes", dtype, DTYPES)
    for size in head_sizes:
        check_range("head_sizes", size, 1, 1024)
    longest = mask.length if mask is not None and mask.length_policy == "error" else None
    check_range("length", length, 1, longest or 2**14)
    check_range("timeout", timeout, 1, None, (int, float))
    asked, candidates = [], GPU_BACKENDS if where.type == "cuda" else ("sparse_cpu",)
    general = Request(where.type, getattr(torch, dtypes[0]), 1, 1, length, length, head_sizes[0], index=where.index)
    for dtype, size, flags in product(dtypes, head_sizes, PHASES):
        request = replace(general, dtype=getattr(torch, dtype), head_size=size, **flags)
        if mask is None:
            setting = Setting(dtype, size, **flags, length=length)
        else:
            setting = replace(Setting.of(request, longest, *mask_tile_shares(mask, length, TILE_SIZE)), length=length)
        able = [name for name in candidates if refusal(name, request) is None]
        asked.append((setting, (*able, TRUSTED)))
    reasons = {name: refusal(name, general) for name in BACKENDS}
    with TemporaryDirectory() as folder:
        options: dict[str, Any] = {"lengths": LENGTHS[where.type], "num_heads": NUM_HEADS[where.type]}
        if mask is not None:
            mask.save_pretrained(folder)
            options["mask"] = folder
        outcomes = run_self_checks(str(where), asked, timeout, **options)
    problems = _missing(where, reasons)
    for outcome in outcomes:
        problems += [f"{outcome.setting}: {problem}" for problem in outcome.problems()]
        if where.type == "cuda":
            keep_outcome(str(where), outcome)
    return Diagnosis(_versions(), _machine(), str(where), reasons, outcomes, problems)


def _checked_device(device):
    if device is None:
        device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be a device of torch, such as cpu or cuda:0, got {device!r}") from error
    check_choice("device", where.type, ("cpu", "cuda"))
    if where.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = where.index or 0
    if index >= count:
        raise ValueError(f"device must be one of this machine's {count} CUDA devices or cpu, got {device!r}")
    return torch.device("cuda", index)


def _missing(where, reasons):
    """What can be installed, without which the kernels of the device do not run."""
    if where.type == "cpu":
        reason = cpu.unavailable()
        return [] if reason is None else [f"sparse_cpu: {reason}"]
    return [] if find_spec("triton") else [f"sparse_triton: {reasons['sparse_triton']}"]


def _versions():
    versions = {"sparsebert": __version__, "python": platform.python_version()}
    packages = {name: installed(name) for name in PACKAGES}
    # The version of the package may leave out the build.
    return versions | packages | {"torch": torch.__version__, "cuda": torch.version.cuda}


def _of_cpu(field):
    """A field of the first processor in `/proc/cpuinfo`, which only Linux has."""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        if found := re.search(rf"^(?:{field})\s*: (.*)$", text, re.M):
            return found[1]
    return ""


def cpu_name() -> str:
    """The processor of this machine, on Linux with its family and model: a name may stand for several generations."""
    name, family, model = map(_of_cpu, ("model name", "cpu family", "model"))
    if name and family and model:
        return f"{name}, family {family}, model {model}"
    return name or platform.processor() or platform.machine()


def _machine():
    words = set(_of_cpu("flags|Features").split())
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [
        {
            "name": found.name,
            "capability": f"{found.major}.{found.minor}",
            "memory_bytes": found.total_memory,
            "driver": driver(),
        }
        for found in map(torch.cuda.get_device_properties, range(count))
    ]
    return {
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "cpu features": [name for name in FEATURES if name in words],
        "compiler": _compiler(),
        "rocm": torch.version.hip,
        "gpus": gpus,
    }


def _compiler():
    """The first line that the C++ compiler says about itself, `None` if there is none."""
    with suppress(CompilationError, OSError, subprocess.SubprocessError, IndexError):
        found = subprocess.run([*find_compiler(), "--version"], capture_output=True, text=True, timeout=20)
        return found.stdout.splitlines()[0]
    return None
