"""Processes of their own, forked from one that has imported everything, so that each costs little."""

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from subprocess import CompletedProcess

import torch

from sparsebert.commands import main


SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["sparsebert.training.pretraining", "sparsebert.commands.pretrain", "pytest"])


def start(function, *arguments):
    process = SERVER.Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


def wait_for(process, condition, seconds=120):
    """Wait for a condition, or for the end of the process without which it cannot come."""
    end = time.monotonic() + seconds
    while process.is_alive() and not condition():
        assert time.monotonic() < end
        process.join(0.02)


def start_command(words, errors):
    """A command as a process, its error stream in a file."""
    Path(errors).touch()
    return start(_command, list(map(str, words)), errors)


def run_code(code, *arguments, folder, timeout=300):
    """What `python -c CODE ARGUMENTS` does, with its output in `folder`."""
    paths = [str(Path(folder, name)) for name in ("stdout", "stderr")]
    process = start(_code, code, list(map(str, arguments)), paths)
    process.join(timeout)
    assert process.exitcode is not None, f"not done after {timeout} seconds"
    return CompletedProcess(code, process.exitcode, *(Path(path).read_text() for path in paths))


def run_ranks(code, folder):
    """What code that forks into two ranks has written, each to `RANK.json` in the folder that is its argument."""
    done = run_code(code, folder, folder=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)]


def _command(words, errors):
    _to_files([os.devnull, errors])
    sys.exit(main(words))


def _code(code, arguments, paths):
    _to_files(paths)
    sys.argv = ["-c", *arguments]
    exec(compile(code, "-c", "exec"), {"__name__": "__main__"})


def _to_files(paths):
    torch.set_num_threads(1)
    for descriptor, path in enumerate(paths, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
