"""
The command line: `sparsebert VERB [RECIPE or names ...] [--field value ...]`, one module per verb.

A verb's module has a function `command(words)` that gives its [`Command`]; every flag is a field of a dataclass.
"""

import importlib
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout

from huggingface_hub.errors import HTTPError, StrictDataclassError

from ..checks import nearest
from ..hub import explained
from ..version import __version__
from ._command import Command


VERBS = {
    "pretrain": "train a BERT and learn its attention mask",
    "finetune": "fine-tune and evaluate on GLUE, SQuAD, SWAG, through a mask or dense",
    "search": "learn the mask of a model that is trained already",
    "prune": "masks at several sparsities from a search, with random controls",
    "lengthen": "extend the position embeddings of a model for longer inputs",
    "analyze": "which positions a search, a mask or several seeds keep",
    "plan": "what a mask costs to run: live tiles, and which backend would be chosen",
    "theory": "which universality theorems apply to a pattern or mask",
    "draw": "pictures of patterns and masks",
    "report": "tables of finished runs",
    "masks": "the masks in a Hub repository or folder",
    "push": "a model or mask to the Hub",
    "pull": "a model or mask from the Hub",
    "reproduce": "the papers' tables and figures",
    "translate": "train a translation model with sparse attention",
}
# What ends in one line on the error stream instead of a traceback.
REFUSED = (ValueError, FileNotFoundError, FileExistsError, NotADirectoryError, StrictDataclassError)


def parse(arguments: Sequence[str]) -> tuple[Command, dict[str, dict]]:
    """
    Read a command line without running it.

    Args:
        arguments (`Sequence[str]`): What follows `sparsebert`.

    Returns:
        `tuple`: The [`Command`], and the values that were set, by section and field.
    Raises:
        ValueError, FileNotFoundError: If verb, recipe, field or value is wrong.
    """
    from ..training.recipes import load_recipe

    verb, *rest = arguments
    if verb not in VERBS:
        raise nearest("verb", verb, list(VERBS))
    command = _command_of(verb, rest)
    return command, load_recipe(rest, command.sections, command.positional, command.excluded)


def _command_of(verb, arguments):
    return importlib.import_module(f".{verb}", __package__).command(arguments)


# How the errors of strict dataclasses begin, and what a user needs of it.
_PREFIXES = {
    r"Class validation error for validator '\w+': \w+: ": "",
    r"Validation error for field '(\w+)': ValueError: ": r"\1 ",
    r"Validation error for field '\w+': \w+: ": "",
}


def _say(verb, error, code):
    text = " ".join(f"sparsebert {verb}: {error}".split())
    for prefix, needed in _PREFIXES.items():
        text = re.sub(prefix, needed, text)
    print(text, file=sys.stderr)
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """
    Run a command line.

    Args:
        arguments (`Sequence[str]`, *optional*): What follows the program's name; by default that of this process.

    Returns:
        `int`: 0, or 2 if what was asked for is wrong, or 1 if it failed on the way, or 143 or 130 if a signal stopped
        it.
    """
    arguments = list(map(str, sys.argv[1:] if arguments is None else arguments))
    verb = arguments[0] if arguments else ""
    try:
        if verb == "--version":
            print(__version__)
        elif verb in ("", "-h", "--help", "--help-all"):
            from ._help import overview

            print(overview(VERBS))
            return 0 if verb else 2
        elif verb in VERBS and {"-h", "--help", "--help-all"} & set(arguments):
            from ._help import long_help, short_help

            explain = long_help if "--help-all" in arguments else short_help
            print(explain(verb, _command_of(verb, arguments[1:])))
        else:
            command, values = parse(arguments)
            as_json = values.get("print", {}).get("json", False)
            # What a run logs on the way must not get between the lines of the JSON.
            with redirect_stdout(sys.stderr) if as_json else nullcontext():
                results = command.run(values)
            results.show(as_json)
    except REFUSED as error:
        return _say(verb, error, 2)
    except RecursionError:
        return _say(verb, "what was given is nested too deeply", 2)
    except HTTPError as error:
        return _say(verb, explained(error), 1)
    except (OSError, FloatingPointError) as error:
        return _say(verb, error, 1)
    except KeyboardInterrupt as error:
        return _say(verb, str(error) or "interrupted", getattr(error, "exit_code", 130))
    return 0
