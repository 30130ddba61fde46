"""
The command line: `sparsebert VERB [RECIPE or names ...] [--field value ...]`, one module per verb.

A verb's module has a function `command(words)` that gives its [`Command`]; every flag is a field of a dataclass.
"""

import errno
import importlib
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HTTPError, StrictDataclassError
from safetensors import SafetensorError

from .. import plugin
from ..checks import is_out_of_memory, nearest, printable, shortened
from ..files import is_unicode
from ..signals import ending_signals, next_one_ends
from ..version import __version__
from ._command import Command


VERBS = {
    "pretrain": "train a BERT and learn its attention mask",
    "finetune": "fine-tune and evaluate on GLUE, SQuAD, SWAG or your own texts, with a mask or dense",
    "search": "learn a mask for a trained model",
    "prune": "make masks of several sparsities from a search, with random controls",
    "compile": "compile a model for inference in OpenVINO, with its mask or without",
    "compare": "compare a dense encoder with a sparse one on your texts, and say whether to deploy it",
    "lengthen": "extend the position embeddings of a model for longer inputs",
    "analyze": "show which positions a search, a mask or several seeds keep",
    "plan": "show what a mask costs to run: live tiles, and which backend would be chosen",
    "doctor": "show what runs on this machine and whether it is right; for bug reports",
    "theory": "check which universality theorems apply to a pattern or mask",
    "draw": "draw patterns and masks",
    "report": "print tables of finished runs, and write a web page that shows their masks",
    "masks": "list the masks in a Hub repository or folder",
    "push": "push a model or mask to the Hub",
    "pull": "pull a model or mask from the Hub",
    "reproduce": "repeat the papers' tables and figures",
    "translate": "train a translation model with sparse attention",
}
# What says that the command line, a recipe or an input is wrong, or that a field asks for what is not installed.
REFUSED = (ValueError, FileNotFoundError, FileExistsError, NotADirectoryError, StrictDataclassError, ImportError)


def parse(arguments: Sequence[str]) -> tuple[Command, dict[str, dict]]:
    """The [`Command`] of a command line, and the values that it sets, by section and field; nothing is run."""
    for word in arguments:
        if not is_unicode(word):  # recipes, cards and weights could not be written with it
            raise ValueError(
                f"{word!r} is not text in the encoding of this locale ({sys.getfilesystemencoding()}): set "
                "PYTHONUTF8=1, or rename the file"
            )
    verb, *rest = arguments
    if verb not in VERBS:
        raise nearest("verb", verb, list(VERBS))
    from ._words import read_words

    command = _command_of(verb, rest)
    return command, read_words(rest, command)


def written_help(verb: str) -> Path:
    """
    The file with the help of a verb, which `docs/generated.py` writes: what its fields and their defaults are is known
    to modules that take seconds to import. Verbs that only a checkout has are without.
    """
    return Path(__file__).with_name("help") / f"{verb if verb in VERBS else ''}.txt"


def _command_of(verb, arguments):
    return importlib.import_module(f".{verb}", __package__).command(arguments)


# How the errors of strict dataclasses begin, and what a user needs of it.
_PREFIXES = {
    r"Class validation error for validator '\w+': \w+: ": "",
    r"Validation error for field '(\w+)': ValueError: ": r"\1 ",
    r"Validation error for field '\w+': \w+: ": "",
}


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP. Like SIGINT, it ends a command with what it does in the end: locks and partial files go."""

    # Codecs reword exceptions that come while they work, but for those with an `__init__` of their own.
    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number
        super().__init__(f"stopped by {signal.Signals(number).name}")


@contextmanager
def _termination() -> Iterator[None]:
    def stop(number: int, frame: Any) -> None:
        next_one_ends(previous, number)
        raise Terminated(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.getsignal(number) for number in ending_signals()}
    for number in previous:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def main(arguments: Sequence[str] | None = None) -> int:
    """
    Run a command line.

    Args:
        arguments (`Sequence[str]`, *optional*): What follows the program's name; by default that of this process.

    Returns:
        `int`: 0 if it succeeded, 1 if it failed while running, 2 if the command line, recipe or input is wrong, 129,
        130 or 143 if a signal stopped it.
    """
    arguments = list(map(str, sys.argv[1:] if arguments is None else arguments))
    if isinstance(sys.stdout, io.TextIOWrapper):  # what stands for the output stream need not be a file
        # A terminal that lacks a character must not cost the results of a run.
        sys.stdout.reconfigure(errors="replace")
    try:
        return _run(arguments)
    except BrokenPipeError:  # the reader of the output has what it wanted, as in `... | head`
        return _close_output()
    except (Exception, KeyboardInterrupt) as error:
        text, code = _outcome(error)
        if text is None:
            raise
        text = printable(" ".join(f"{' '.join(['sparsebert', *arguments[:1]])}: {text}".split()))
        for prefix, needed in _PREFIXES.items():
            text = re.sub(prefix, needed, text)
        print(text, file=sys.stderr)
        return code


def _outcome(error):
    """The line and the exit code that an error ends with; no line for one that needs a traceback."""
    if isinstance(error, KeyboardInterrupt):
        return str(error) or "interrupted", getattr(error, "exit_code", 130)
    if isinstance(error, RecursionError):
        return "what was given is nested too deeply", 2
    if isinstance(error, REFUSED):
        return error, 2
    # Imported here, since these bring in PyTorch.
    from ..hub import explained
    from ..learning.rank_agreement import MaskMismatchError

    if isinstance(error, HTTPError):
        return explained(error), 1
    if isinstance(error, SafetensorError):
        return f"a file of weights is damaged or truncated: {error}", 1
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"too long for the name of a file or folder: {shortened(repr(error.filename))}", 2
    if isinstance(error, (OSError, FloatingPointError, MaskMismatchError)):
        return error, 1
    if is_out_of_memory(error):
        return f"there is not enough memory for these sizes: {error}", 1
    return None, 1


def _close_output():
    """Throw away what Python would still write when it ends."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _run(arguments):
    """The exit code of a command line that does not fail."""
    verb, exit_code = (arguments or [""])[0], 0
    if verb == "--version":
        print(__version__)
    elif verb in ("", "-h", "--help", "--help-all"):
        from ._help import overview

        print(overview(VERBS))
    elif len(arguments) == 2 and arguments[1] in ("-h", "--help") and written_help(verb).is_file():
        print(written_help(verb).read_text(encoding="utf-8"), end="")
    elif verb in VERBS and {"-h", "--help", "--help-all"} & set(arguments):
        from ._help import verb_help

        print(verb_help(verb, _command_of(verb, arguments[1:]), "--help-all" in arguments))
    else:
        command, values = parse(arguments)
        plugin.enable()  # whatever the environment says of an import
        as_json = values["print"].get("json", False)
        # What a run logs on the way must not get between the lines of the JSON.
        with _termination(), redirect_stdout(sys.stderr) if as_json else nullcontext():
            results = command.run(values)
        results.show(as_json)
        exit_code = results.exit_code
    with suppress(AttributeError):  # there may be no output stream
        sys.stdout.flush()
    return exit_code if verb else 2
