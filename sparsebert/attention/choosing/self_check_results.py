"""What a self-check of attention backends is about, what it found, and the file that keeps it."""

import functools
import hashlib
import json
import math
import subprocess
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import cached_assets_path

from ...files import replace_files
from ...version import __version__
from ..capabilities import Request


FINISHED = "finished"
# PyTorch's own attention, which runs where nothing else is known to be right.
TRUSTED = "sparse_sdpa"
# Up to so many tokens a kernel has little to skip but padding.
FEW_TILES = 256


@dataclass(frozen=True)
class Setting:
    """
    The properties of a forward that a self-check is about, as in [`Request`], whether there is a bias per distance
    (`distances`) and a `rest`, and the properties of the mask with which times are taken: its number of tokens
    `length`, the tenths of its tiles, rounded up, that hold an entry (`live`), and the tenths of these in which not
    all entries are on (`partial`), for which a kernel takes longer.
    """

    dtype: str
    head_size: int
    padded: bool = False
    dropout: bool = False
    gradients: bool = False
    causal: bool = False
    length: int = 512
    live: int = 2
    partial: int = 0
    distances: bool = False
    rest: bool = False

    def __str__(self) -> str:
        flags = ("padded", "dropout", "gradients", "causal", "distances", "rest")
        return ", ".join([self.dtype, f"heads of {self.head_size}", *(name for name in flags if getattr(self, name))])

    @classmethod
    def of(cls, request: Request, longest: int | None, live: float, full: float) -> "Setting":
        """
        The setting whose check covers a request; lengths share the times of the next power of two, from `FEW_TILES` up
        to the `longest` that the mask takes. `live` and `full` are the shares of tiles that hold an entry, and that
        hold nothing else.
        """
        length = max(FEW_TILES, 1 << (request.num_keys - 1).bit_length())
        return cls(
            str(request.dtype).removeprefix("torch."),
            request.head_size,
            request.padded,
            request.dropout,
            request.gradients,
            request.causal,
            length if longest is None else min(length, longest),
            math.ceil(10 * live),
            math.ceil(10 * (live - full) / live) if live else 0,
            "distance_bias" in request.needs,
            "rest" in request.needs,
        )

    def request(self, device: str, length: int, batch: int, num_heads: int) -> Request:
        """The [`Request`] of a call in this setting."""
        where, shape = torch.device(device), (batch, num_heads, length, length, self.head_size)
        flags = (self.dropout, self.gradients, self.padded, self.causal)
        has = {"distance_bias": self.distances, "rest": self.rest}
        needs = frozenset(need for need in has if has[need])
        return Request(where.type, getattr(torch, self.dtype), *shape, *flags, needs, index=where.index)


@dataclass(frozen=True)
class Outcome:
    """
    What a self-check found. As JSON it is a line of what the checking process writes, the content of the file that
    keeps it, and a part of the report of `sparsebert doctor`.

    Args:
        setting ([`Setting`]): What was checked.
        backends (`dict`): What was found about each backend, by name: `right` (bool), `reason` (why it is not),
            `errors` (by what was compared, the worst comparison: `tokens`, `error` and `allowed`) and `milliseconds`
            (median time of a layer, `None` if it was not timed).
        ended (`str`): `FINISHED`, or how the process ended before that; while it runs, what it does.
        lasting (`bool`): Whether another check would find the same: not if it was stopped from outside, could not
            start or found too little memory.
    """

    setting: Setting
    backends: dict[str, dict[str, Any]] = field(default_factory=dict)
    ended: str = FINISHED
    lasting: bool = True

    def problems(self) -> list[str]:
        """What went wrong, a line each."""
        found = [f"{name}: {finding['reason']}" for name, finding in self.backends.items() if not finding["right"]]
        return found if self.ended == FINISHED else [*found, self.ended]

    def passed(self) -> dict[str, float]:
        """Milliseconds of the backends that may run, by name; none if the check did not finish."""
        times = {name: found["milliseconds"] for name, found in self.backends.items() if found["right"]}
        return {name: ms for name, ms in times.items() if ms is not None and self.ended == FINISHED}

    def fastest(self, among: Collection[str] | None = None) -> tuple[str, str]:
        """The fastest backend that is right (and one of `among`), and why; `TRUSTED` if the check did not finish."""
        if self.ended != FINISHED:
            return TRUSTED, f"the self-check failed ({self.ended})"
        times = {name: ms for name, ms in self.passed().items() if among is None or name in among}
        if not times:
            return TRUSTED, "no backend passed the self-check"
        listed = ", ".join(f"{name} {times[name]:.3f} ms" for name in sorted(times, key=times.__getitem__))
        tiles = f"{10 * self.setting.live} % of the tiles live, {10 * self.setting.partial} % of these partial"
        at = f"at {self.setting.length} tokens, {tiles}"
        return min(times, key=times.__getitem__), f"the fastest right one of a self-check here ({listed}, {at})"

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Outcome":
        """The inverse of `as_json`; a `KeyError`, `TypeError` or `ValueError` if that did not write it."""
        backends = {str(name): finding_of(**found) for name, found in content["backends"].items()}
        outcome = cls(Setting(**content["setting"]), backends, content["ended"], content["lasting"])
        if type(outcome.ended) is not str or type(outcome.lasting) is not bool:
            raise TypeError(f"ended and lasting must be text and a truth value, got {outcome}")
        return outcome


def finding_of(
    right: bool, reason: str | None = None, errors: dict[str, Any] | None = None, milliseconds: float | None = None
) -> dict[str, Any]:
    """What was found about one backend, see [`Outcome`]; a `ValueError` if it cannot be read."""
    if type(right) is not bool or not (milliseconds is None or milliseconds > 0):
        raise ValueError(
            f"right and milliseconds must be a truth value and a time, got {right!r} and {milliseconds!r}"
        )
    return {"right": right, "reason": reason, "errors": errors or {}, "milliseconds": milliseconds}


def installed(package: str) -> str | None:
    """Version of an installed package, `None` if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@functools.cache
def driver() -> str | None:
    """Version of the NVIDIA driver, `None` if it cannot be found out."""
    with suppress(OSError, IndexError):
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0].split()
        return [word for word in words if word[0].isdigit() and "." in word][0]
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError, IndexError):
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    return None


@functools.cache
def _sources():
    """A hash of the sources of the kernels and of what they read, which in a checkout change without a version."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[2]
    for path in sorted(path for part in ("attention", "masks") for path in (package / part).rglob("*.*")):
        if path.suffix in (".py", ".cpp", ".h"):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def surroundings(device: str) -> dict[str, str | None]:
    """All that the outcome of a self-check depends on besides its setting; the device is such as `"cuda:0"`."""
    gpu = torch.device(device).type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if gpu else torch.device(device).type,
        "driver": driver() if gpu else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": installed("triton"),
        "sparsebert": __version__,
        "sources": _sources(),
    }


def result_file(device: str, setting: Setting) -> Path | None:
    """The file of an outcome in the assets folder of `huggingface_hub`, `None` if that cannot be made."""
    key = json.dumps([surroundings(device), asdict(setting)], sort_keys=True)
    with suppress(OSError, ValueError):
        folder = cached_assets_path("sparsebert", namespace="self_check", subfolder="1")
        return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    return None


def read_check(device: str, setting: Setting) -> Outcome | None:
    """The outcome of an earlier self-check, or `None` if there is none or its file cannot be used."""
    path = result_file(device, setting)
    if path is None:
        return None
    with suppress(OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        content = json.loads(path.read_text(encoding="utf-8"))
        outcome = Outcome.from_json(content["outcome"])
        if content["surroundings"] == surroundings(device) and outcome.setting == setting:
            return outcome
    return None


def write_check(device: str, outcome: Outcome) -> None:
    """Keep the outcome of a self-check for other processes, if that is possible and it is a lasting one."""
    path = result_file(device, outcome.setting)
    if path is not None and outcome.lasting:
        content = {"surroundings": surroundings(device), "outcome": outcome.as_json()}
        with suppress(OSError):
            replace_files({path: (json.dumps(content, indent=2) + "\n").encode()})
