"""Run `pretrain.py` in separate processes, for benchmarks that compare many runs; finished runs are kept."""

import json
import os
import subprocess
import sys
from pathlib import Path

from ._report import ROOT


def add_options(parser, recipe):
    """Add the options that such benchmarks share."""
    parser.add_argument("--text", default="builtin", help="training text, as for pretrain.py")
    parser.add_argument("--validation", help="held-out text")
    parser.add_argument("--recipe", type=Path, default=recipe)
    parser.add_argument("--threads", type=int, default=1, help="threads of a run")
    parser.add_argument("--output", type=Path, required=True, help="folder for all runs")
    parser.add_argument("--finished", action="store_true", help="run nothing, show the finished runs")


def folder_name(name):
    return "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in name)


def run(folder, flags, options):
    """
    The metrics of `pretrain.py RECIPE --field value ...`, which is run if they are missing. The command line is kept
    beside the run.

    Args:
        folder (`Path`): Output folder of the run; what it prints goes to a `.log` file beside it.
        flags (`dict`): Values by field.
        options: Options of the command line, see [`add_options`].

    Returns:
        `dict`: Metrics, or `None` if they are missing and `--finished` forbids to run it.
    Raises:
        RuntimeError: If the run fails.
        ValueError: If the folder holds a run of another command line.
    """
    metrics, kept = folder / "metrics.json", Path(f"{folder}.flags.json")
    given = {"text": options.text, "output_dir": folder, "overwrite": "true"}
    given |= {"validation": options.validation} if options.validation else {}
    given = {name: str(value) for name, value in (given | flags).items()}
    flags = given | {"recipe": str(options.recipe), "threads": str(options.threads)}
    if folder.is_dir() and kept.is_file() and (found := json.loads(kept.read_text())) != flags:
        name = next(name for name in found | flags if found.get(name) != flags.get(name))
        raise ValueError(f"{folder} holds a run with {name} {found.get(name)}, not {flags.get(name)}: choose another")
    if not metrics.is_file():
        if options.finished:
            return None
        folder.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(flags, indent=1) + "\n")  # first: the run goes on if this process is killed
        command = [sys.executable, "pretrain.py", str(options.recipe)]
        for name, value in given.items():
            command += [f"--{name}", value]
        output = Path(f"{folder}.log")
        with open(output, "w", encoding="utf-8") as log:
            environment = os.environ | {"OMP_NUM_THREADS": str(options.threads), "TOKENIZERS_PARALLELISM": "false"}
            status = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        if status.returncode:
            raise RuntimeError(f"a run failed, see {output}")
    return json.loads(metrics.read_text())
