"""What a verb of the command line is, and how its results are printed."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ..checks import printable
from ..files import process_state


if TYPE_CHECKING:
    from ..analysis.tables import Table


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
        run (`Callable[[dict], Results]`): Does the work with the values that were set, by section and field.
        sections (`dict[str, type]`): Dataclasses whose fields are the flags; those without a default are required.
        examples (`tuple[str, ...]`): Command lines for the help, without the program's name.
        words (`str`): What stands before the first flag, for the help. If this is not a recipe, it sets the first
            field of the first section.
        excluded (`dict[str, tuple]`): By section, fields that the verb sets itself.
        defaults (`dict[str, dict]`): By section, defaults that differ from those of the dataclass, for the help.
        choices (`dict[str, Iterable[str]]`): What fields accept, for the help; registries of the package are known.
        replaced (`dict[str, tuple]`): By the `"section.field"` or `"section.field=value"` of a flag, fields of the
            recipe that it drops.
    """

    run: "Callable[[dict], Results]"
    sections: Mapping[str, type]
    examples: tuple
    words: str = "[RECIPE]"
    excluded: Mapping[str, tuple] = field(default_factory=dict)
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    choices: Mapping[str, Iterable[str]] = field(default_factory=dict)
    replaced: Mapping[str, tuple] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sections", {**self.sections, "print": Printing})

    @property
    def positional(self) -> tuple[str, str] | None:
        """Section and field that the words before the first flag set; `None` if they name a recipe."""
        section, cls = next(iter(self.sections.items()))
        return (
            None
            if self.words == "[RECIPE]"
            else (section, next(item.name for item in fields(cls) if not item.kw_only))
        )


@dataclass(frozen=True)
class Results:
    """
    What a verb found: tables and lines for people, and the same as JSON.

    Args:
        content (`dict` or `list`): What `--json` prints.
        tables (`Sequence[Table]`): Printed without `--json`.
        notes (`Sequence[str]`): Lines below the tables.
        exit_code (`int`): That of the command: 1 if what was looked at is not as it should be.
    """

    content: object
    tables: "Sequence[Table]" = ()
    notes: Sequence[str] = ()
    exit_code: int = 0

    def show(self, as_json: bool) -> None:
        """Print them, in the main process alone. Numbers that JSON does not know become `null`."""
        from ..analysis.tables import print_tables

        if not process_state().is_main_process:
            return
        if as_json:
            print(json.dumps(_finite(self.content), indent=2, default=str))
            return
        print_tables(self.tables)
        for note in self.notes:
            print("\n".join(map(printable, note.split("\n"))))


def _finite(content):
    if isinstance(content, dict):
        return {str(key): _finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


@contextmanager
def advising(advice: str) -> Iterator[None]:
    """Say how a verb that is interrupted is continued, instead of what a training within it says of itself."""
    try:
        yield
    except KeyboardInterrupt as error:
        error.args = (f"{getattr(error, 'reason', str(error)) or 'interrupted'}: {advice}",)
        raise
