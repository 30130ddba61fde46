"""Processes of their own, forked from one that has imported everything, so that each costs little."""

import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from sparsebert.commands import main


SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [f"sparsebert.training.{name}" for name in ("pretraining.pretraining_run", "searching.search_run")]
    + ["sparsebert.training.finetuning.finetuning_runs", "sparsebert.commands.pretrain", "pytest"]
)


# Begin and end of what two ranks run.
_RANKS = """
import json, os, sys
from torch import distributed

child, folder = os.fork(), sys.argv[1]
rank, found = int(child == 0), {}
os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
distributed.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder}/store")
"""
_FOUND = """
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump(found, file)
if rank == 0:
    assert os.waitpid(child, 0)[1] == 0
"""


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


def run_fresh(code, *arguments, **environment):
    """What `python -c CODE ARGUMENTS` prints, and its error stream, where what is imported must be new."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=Path(__file__).parents[1],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def run_code(code, *arguments, folder, timeout=300):
    """What `python -c CODE ARGUMENTS` does, with its output in `folder`."""
    paths = [str(Path(folder, name)) for name in ("stdout", "stderr")]
    process = start(_code, code, list(map(str, arguments)), paths)
    process.join(timeout)
    assert process.exitcode is not None, f"not done after {timeout} seconds"
    return subprocess.CompletedProcess(code, process.exitcode, *(Path(path).read_text() for path in paths))


def run_ranks(code, folder):
    """What code leaves in the dictionary `found`, in each of two processes; it knows its `rank` and `folder`."""
    done = run_code(_RANKS + code + _FOUND, folder, folder=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)]


def die_at(number, folder):
    """Kill this process before its write of this number in a folder: of a file or of its name."""
    left = [number]

    def audit(event, arguments):
        writes = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")
        if event in writes and str(arguments[0]).startswith(folder):
            if event == "open" and not (isinstance(arguments[1], str) and set(arguments[1]) & set("wxa+")):
                return
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1

    sys.addaudithook(audit)


def _command(words, errors):
    # Tests in the background, or under nohup, inherit that these are ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    _to_files([os.devnull, errors])
    sys.exit(main(words))


def _code(code, arguments, paths):
    _to_files(paths)
    sys.argv = ["-c", *arguments]
    exec(compile(code, "-c", "exec"), {"__name__": "__main__"})


def _to_files(paths):
    gc.freeze()  # what has been imported, which each collection would look at again
    torch.set_num_threads(1)
    for descriptor, path in enumerate(paths, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
