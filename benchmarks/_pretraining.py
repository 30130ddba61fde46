"""Runs of `pretrain.py` in processes of their own, for benchmarks that compare many; what is finished stays."""

import json
import os
import subprocess
import sys
from pathlib import Path

from ._report import ROOT


def add_options(parser, recipe):
    """What such benchmarks have in common."""
    parser.add_argument("--text", default="builtin", help="training text, as of pretrain.py")
    parser.add_argument("--validation", help="held-out text")
    parser.add_argument("--recipe", type=Path, default=recipe)
    parser.add_argument("--threads", type=int, default=1, help="of a run")
    parser.add_argument("--output", type=Path, required=True, help="folder of all runs")


def folder_name(name):
    return "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in name)


def run(folder, flags, options):
    """
    The metrics of `pretrain.py RECIPE --field value ...`, run unless they are there.

    Args:
        folder (`Path`): Where the run is; its output is beside it as `.log`.
        flags (`dict`): Fields and values.

    Raises:
        RuntimeError: If it fails.
    """
    metrics = folder / "metrics.json"
    if not metrics.is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "pretrain.py", str(options.recipe), "--text", options.text]
        command += ["--output_dir", str(folder), "--overwrite", "true"]
        command += ["--validation", options.validation] if options.validation else []
        for name, value in flags.items():
            command += [f"--{name}", str(value)]
        output = Path(f"{folder}.log")
        with open(output, "w", encoding="utf-8") as log:
            environment = os.environ | {"OMP_NUM_THREADS": str(options.threads), "TOKENIZERS_PARALLELISM": "false"}
            status = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        if status.returncode:
            raise RuntimeError(f"a run failed, see {output}")
    return json.loads(metrics.read_text())
