"""What a verb of the command line is, and how verbs print."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from accelerate import PartialState

from ..analysis.tables import Table, print_tables


@dataclass
class Printing:
    """
    How results are printed.

    Args:
        json (`bool`): Print JSON instead of tables.
    """

    json: bool = False


@dataclass(frozen=True)
class Command:
    """
    A verb: `sparsebert VERB [WORDS] [--field value ...]`. The docstring of its module is its long help.

    Args:
        run (`Callable[[dict], None]`): Does the work with the values that were set, by section and field, and prints.
        sections (`dict[str, type]`): Dataclasses whose fields are the flags.
        examples (`tuple[str, ...]`): Command lines for the help, without the program's name.
        words (`str`): What stands before the first flag, for the help: `"[RECIPE]"`.
        positional (`str`, *optional*): `"section.field"` that these words set; by default they name a recipe.
        excluded (`dict[str, tuple]`): By section, fields that the verb sets itself.
    """

    run: Callable[[dict], None]
    sections: Mapping[str, type]
    examples: tuple
    words: str = "[RECIPE]"
    positional: str | None = None
    excluded: Mapping[str, tuple] = field(default_factory=dict)


def print_json(content: object) -> None:
    """Print results as JSON: numbers that JSON does not know, such as NaN, as `null`."""
    print(json.dumps(_finite(content), indent=2, default=str))


def _finite(content):
    if isinstance(content, dict):
        return {str(key): _finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def print_results(values: dict, content: object, *tables: Table) -> None:
    """Print tables, or with `--json` the content instead; of several processes the main one prints."""
    if not PartialState().is_main_process:
        return
    if values["print"].get("json"):
        print_json(content)
    else:
        print_tables(tables)


def print_note(values: dict, *words: object, sep: str = " ") -> None:
    """Print a line beside the tables; with `--json` nothing."""
    if PartialState().is_main_process and not values["print"].get("json"):
        print(*words, sep=sep)


def needed(values: dict, *names: str) -> None:
    """
    Args:
        values (`dict`): What was set, by section and field.
        names (`str`): `"section.field"` of what must be there.

    Raises:
        ValueError: If one of these fields was not given.
    """
    for name in names:
        section, field_name = name.split(".")
        if values[section].get(field_name) is None:
            raise ValueError(f"--{field_name} is needed")
