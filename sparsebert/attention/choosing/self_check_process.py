"""The self-check of attention backends in a process of its own, once for all processes of a machine."""

import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

import torch
from filelock import FileLock, Timeout
from transformers.utils import logging

from ...masks.sparse_mask import SparseMask
from .self_check_results import FINISHED, Outcome, Setting, read_check, result_file, write_check


logger = logging.get_logger(__name__)

# Seconds that one check may take. The compilers take most of them.
TIMEOUT = 600.0
# The package is imported as this process found it, be it from a file (a kernel of the Hub), and the user's program is
# not run again.
_PROGRAM = """
import sys
sys.path.remove("") if "" in sys.path else None
import importlib.util, json
sys.path[:], (name, file), module = json.loads(sys.argv[1])
spec = importlib.util.spec_from_file_location(name, file)
sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[name])
importlib.import_module(module).main(sys.argv[2])
"""
# How the runtimes of CUDA say that memory has run out.
_MEMORY = re.compile("out ?of ?memory|ALLOC_FAILED", re.IGNORECASE)
# Signals by which others stop a process, which says nothing about a kernel.
_STOPPED = {"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP"}  # not all of which Windows has
_LOCK = threading.RLock()  # replicas of DataParallel ask at the same time
_KNOWN: dict[tuple[str, Setting], Outcome] = {}


def program() -> list[str]:
    """The command of the self-check, to which what is asked is added as JSON."""
    root = __package__.split(".")[0]
    path = [entry for entry in sys.path if isinstance(entry, str)]
    found = [path, (root, sys.modules[root].__file__), f"{__package__}.self_check"]
    return [sys.executable, "-c", _PROGRAM, json.dumps(found)]


def run_self_checks(
    device: str,
    asked: Sequence[tuple[Setting, Sequence[str]]],
    timeout: float = TIMEOUT,
    command: Sequence[str] | None = None,
    **options: Any,
) -> list[Outcome]:
    """
    Check backends in another process, each setting with some backends, for `timeout` seconds at most. If it ends
    before all is done, another one goes on with the next setting. `command` is [`program`] unless it is given;
    `options` are those of `self_check.check`: `mask`, `lengths` and `num_heads`.
    """
    outcomes: list[Outcome] = []
    while rest := asked[len(outcomes) :]:
        wanted = [(asdict(setting), list(names)) for setting, names in rest]
        text = json.dumps({"device": device, "asked": wanted} | options)
        outcomes += _one_process([setting for setting, _ in rest], timeout, command or program(), text)
    return outcomes


def _one_process(settings: Sequence[Setting], timeout: float, command: Sequence[str], text: str) -> list[Outcome]:
    """The outcomes of the settings that a process finishes, and of the one at which it ends."""
    outcomes: list[Outcome] = []
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        try:
            process = subprocess.Popen(
                [*command, text],
                stdin=subprocess.PIPE,  # ends with this process, and the program with it
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                errors="replace",
                start_new_session=True,  # so that the compilers that it starts can be ended with it
            )
        except (OSError, TypeError, ValueError) as error:
            return [Outcome(settings[0], {}, f"its process could not be started: {error}", lasting=False)]
        begun, end = None, time.monotonic() + timeout
        try:
            lines = _lines(process)
            while len(outcomes) < len(settings):
                try:
                    line = lines.get(timeout=max(0.0, end - time.monotonic()))
                except queue.Empty:
                    ended, lasting = f"it was not done after {timeout:g} s", True
                    break
                if line is None:
                    ended, lasting = _ending(process, max(0.0, end - time.monotonic()))
                    break
                with suppress(ValueError, KeyError, TypeError, AttributeError):  # what a library prints
                    begun = Outcome.from_json(json.loads(line))
                    if begun.ended == FINISHED:
                        memory = any(_MEMORY.search(found["reason"] or "") for found in begun.backends.values())
                        outcomes.append(replace(begun, lasting=not memory))
                        begun, end = None, time.monotonic() + timeout
        finally:
            _stop(process)
        if len(outcomes) < len(settings):
            where, said = f" (at: {begun.ended})" if begun else "", _last_line(log)
            ended = f"{ended}{where}{': ' if said else ''}{said}"
            found = begun.backends if begun else {}
            lasting = lasting and begun is not None and not _MEMORY.search(said)
            outcomes.append(Outcome(settings[len(outcomes)], found, ended, lasting))
    return outcomes


def _lines(process: "subprocess.Popen[str]") -> "queue.Queue[str | None]":
    """A queue of the lines that a process writes, and `None` after the last."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        with suppress(ValueError, OSError):  # closed while it waits
            for line in process.stdout or ():
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _ending(process, patience):
    """How a process ended that writes no more, and whether another one would end so too."""
    try:
        code = process.wait(patience)
    except subprocess.TimeoutExpired:
        return "it does not end", True
    if code >= 0:
        return f"it ended with exit code {code}", True
    with suppress(ValueError):
        name = signal.Signals(-code).name
        return f"it was ended by {name}", name not in _STOPPED
    return f"it was ended by signal {-code}", True


def _stop(process):
    """End a process and all that it started."""
    with suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        pipe.close()


def _last_line(log):
    log.seek(0)
    lines = [line.strip() for line in log if line.strip()]
    return lines[-1][:300] if lines else ""


def known_outcome(device: str, setting: Setting) -> Outcome | None:
    """What this process or an earlier one found, `None` if nothing is known."""
    if (device, setting) not in _KNOWN and (found := read_check(device, setting)) is not None:
        _remember(device, found)
    return _KNOWN.get((device, setting))


def _remember(device, outcome):
    _KNOWN[device, outcome.setting] = outcome
    for problem in outcome.problems():
        logger.warning_once(
            f"the self-check of backends failed on {device} ({outcome.setting}): {problem}. sparse_sdpa or another "
            "backend runs instead. `sparsebert doctor` repeats the check; please report what it prints."
        )


def keep_outcome(device: str, outcome: Outcome) -> None:
    """Use the outcome of a check in this process and, if it is a lasting one, in later ones."""
    write_check(device, outcome)
    _remember(device, outcome)


@contextmanager
def _turn(device: str, setting: Setting, timeout: float) -> Iterator[None]:
    """Let one of several processes do a check while the others wait for it."""
    path = result_file(device, setting)
    lock = None if path is None else FileLock(path.with_suffix(".lock"))
    if lock is not None:
        with suppress(OSError, NotImplementedError, Timeout):  # each does it then
            lock.acquire(timeout=timeout)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def outcome_of(
    device: str,
    setting: Setting,
    backends: Sequence[str],
    mask: SparseMask | None = None,
    may_run: bool = True,
    timeout: float = TIMEOUT,
    command: Sequence[str] | None = None,
) -> Outcome | None:
    """
    The outcome of a check, from this process, from disk, or from a new process if nothing is known and one `may_run`.
    Times are taken with `mask`. `None` if nothing is known, or the device is a GPU and there is none here.
    """
    if device != "cpu" and not torch.cuda.is_available():
        return None
    if (device, setting) in _KNOWN or not may_run:
        return known_outcome(device, setting)
    with _LOCK:
        found = known_outcome(device, setting)
        if found is None:
            with _turn(device, setting, 2 * timeout):
                found = known_outcome(device, setting)
                if found is None:
                    names = " and ".join(backends)
                    logger.warning_once(f"checking {names} on {device} ({setting}), once; this takes about a minute.")
                    found = _with_mask(device, setting, backends, mask, timeout, command)
                    keep_outcome(device, found)
        return found


def _with_mask(device, setting, backends, mask, timeout, command):
    try:
        with tempfile.TemporaryDirectory(prefix="sparsebert-") as folder:
            if mask is not None:
                mask.save_pretrained(folder)
            options = {"mask": None if mask is None else folder}
            return run_self_checks(device, [(setting, backends)], timeout, command, **options)[0]
    except OSError as error:  # a full disk
        return Outcome(setting, {}, f"it could not be started: {error}", lasting=False)
