"""
What all benchmarks share besides measuring: command line, hardware, JSON and tables.

    python -m benchmarks.shared.report    # the hardware as JSON
"""

import argparse
import datetime
import functools
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import torch

from sparsebert.analysis.doctor import DTYPES, cpu_name
from sparsebert.analysis.tables import Table
from sparsebert.attention.choosing.self_check_results import installed
from sparsebert.files import replace_files


ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
# Options that change what is measured, whatever the cell.
_SETTINGS = (
    *("device", "dtype", "threads", "cpu_time", "tokens", "dropout", "seconds", "rounds", "seed"),
    *("quick", "batches"),
)
FORWARD, TRAINING, DROPOUT = PHASES = ("forward", "training", "training with dropout")


def argument_parser(name, description, phases=PHASES):
    """Make a parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=description)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="default: float32 on CPUs, bfloat16 on GPUs")
    parser.add_argument("--lengths", type=int, nargs="+", help="n, tokens of a sequence")
    parser.add_argument("--tokens", type=int, help="tokens of a batch")
    parser.add_argument("--phases", choices=phases, nargs="+", default=phases)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seconds", type=float, default=6.0, help="seconds for the rounds of one cell")
    parser.add_argument("--rounds", type=int, default=5, help="least number of rounds of a cell")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of PyTorch on CPUs")
    parser.add_argument("--seed", type=int, default=0, help="seed of inputs and random masks")
    parser.add_argument("--output", type=Path, help="path of the results, without suffix")
    parser.add_argument("--quick", action="store_true", help="smoke run at tiny sizes; its times mean nothing")
    return parser


def prepare(parser, arguments):
    """Parse the command line, and set threads and seed."""
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("device 'cuda' needs a GPU, PyTorch finds none")
    options.dtype = getattr(torch, options.dtype or ("bfloat16" if options.device == "cuda" else "float32"))
    if options.quick:
        options.seconds, options.rounds = 0.0, 2
    if options.output is None:
        tail = "_quick" if options.quick else ""
        options.output = RESULTS / f"{parser.prog.rpartition('.')[2]}_{options.device}{tail}"
    words = parser.prog.split()[1:] + list(sys.argv[1:] if arguments is None else arguments)
    # Where a file is on one machine means nothing on others.
    words = [Path(word).name if Path(word).is_absolute() else word for word in words]
    options.command = shlex.join(["python", *words])
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    return options


@contextmanager
def explained(parser):
    """Inside the block, what is wrong with the inputs ends the program with one line instead of a traceback."""
    try:
        yield
    except (OSError, ValueError) as error:
        parser.error(" ".join(str(error).split()))


def _output(*command, **environment):
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=os.environ | environment, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return run.stdout.strip()


def _mkl():
    """The instructions that MKL says it uses, or `None` without MKL."""
    multiply = "import torch; torch.ones(2, 2) @ torch.ones(2, 2)"
    found = re.search(
        r"MKL_VERBOSE.*64 architecture (.*?),? Lnx", _output(sys.executable, "-c", multiply, MKL_VERBOSE="1")
    )
    return found[1] if found else None


@functools.cache
def hardware():
    """Describe the machine."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "mkl": _mkl(),
        "mkl_enable_instructions": os.environ.get("MKL_ENABLE_INSTRUCTIONS"),
        "gpu": gpu,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpu else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": installed("transformers"),
        "triton": installed("triton"),
    }


def hardware_line(machine):
    """`hardware()` in one line, for titles and READMEs."""
    mkl = re.search(r"AVX-?\d*|SSE[\d.]*", machine["mkl"] or "")
    mkl = f", MKL {mkl[0]}" if mkl else ""
    if machine["mkl_enable_instructions"]:
        mkl += f" (MKL_ENABLE_INSTRUCTIONS={machine['mkl_enable_instructions']})"
    parts = [f"{machine['cpu']}, {machine['threads']} of {machine['cores']} cores, {machine['capability']}{mkl}"]
    if machine["gpu"]:
        parts = [f"{machine['gpu']}, driver {machine['driver']}, triton {machine['triton']}"]
    return "; ".join([*parts, f"torch {machine['torch']}"])


@functools.cache
def commit():
    """The git commit, with "+" where files of the package or of the benchmarks differ from it; `None` outside git."""
    name = _output("git", "rev-parse", "--short=12", "HEAD")
    return (name + "+" * bool(_output("git", "status", "--porcelain", "sparsebert", "benchmarks/*.py"))) or None


def _settings(options):
    return {name: str(getattr(options, name)) for name in _SETTINGS if hasattr(options, name)}


def earlier_cells(parser, options, keys=()):
    """
    The cells of an earlier run to go on with, each with the command, commit and date that it was measured with. If
    that run was on other hardware or had other settings, except those in `keys`, which every cell names, the program
    ends with one line.
    """
    path = options.output.with_name(options.output.name + ".json")
    if not path.is_file():
        return []
    report = json.loads(path.read_text())
    for now, before in ((hardware(), report["hardware"]), (_settings(options), report.get("settings", {}))):
        for name in (now.keys() & before.keys()) - set(keys):
            if now[name] != before[name]:
                how = f"{name} {before[name]}, not {now[name]}"
                parser.error(f"{path} was measured with {how}: choose another --output")
    made = {name: report[name] for name in ("command", "commit", "date")}
    return [made | cell for cell in report["cells"]]


def write_json(options, cells, **fields):
    """
    Write `options.output` + `.json`: the results of one run, with all that is needed to repeat it. Cells of earlier
    runs, see [`earlier_cells`], say so themselves.
    """
    report = {
        "command": options.command,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "settings": _settings(options),
        "quick": options.quick,
        **fields,
        "cells": cells,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    path = options.output.with_name(options.output.name + ".json")
    replace_files({path: (json.dumps(report, indent=1) + "\n").encode()})  # a long run may be stopped while it writes
    return report


def make_table(title, header, rows):
    """A [`Table`] of any values."""
    return Table(title, list(header), [list(map(str, row)) for row in rows])


def print_table(title, header, rows):
    """Print a table in Markdown."""
    print(f"\n{make_table(title, header, rows).markdown()}", end="")


def ratio_text(entry):
    """A [`speed_up`] as text, marked if it is slower beyond the interval."""
    slower = " slower" if entry["high"] < 1 else ""
    return f"{entry['ratio']:.2f} [{entry['low']:.2f}, {entry['high']:.2f}]{slower}"


if __name__ == "__main__":
    print(json.dumps(hardware() | {"commit": commit()}, indent=1))
