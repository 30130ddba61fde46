"""
The words of a command line: a recipe or names, then `--field value`, `--field=value` or `--section.field value`.

Every flag is a field of a section: `--learning_rate 1e-3` sets the field of that name in the one section that has it.
A truth value may be left out, so that `--field` is `--field true`; a field that takes a list takes several values.
The last value of a flag that is given several times counts, with a warning.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import MISSING, fields

from transformers.utils import logging

from ..checks import nearest, printable, shortened
from ..recipe_files import FieldTypes, convert_words, field_types, load_recipe, unknown
from ._command import Command


logger = logging.get_logger(__name__)

_SHORT = {"-o": "--output"}


def read_words(words: Sequence[str], command: Command) -> dict[str, dict]:
    """The values that the words after the verb set, by section and field."""
    known = field_types(command.sections, command.excluded)
    names, flags = _split([_SHORT.get(word, word) for word in words])
    values: dict[str, dict] = {section: {} for section in command.sections}
    if command.positional is not None:
        section, field = command.positional
        if names:
            values[section][field] = convert_words(field, names, known[section][field])
    elif not names and not flags:
        raise ValueError("expected a recipe or --field value")
    elif names:
        values = load_recipe(names[0], command.sections, command.excluded)
        if len(names) > 1:
            raise ValueError(f"expected --field value, got {names[1]!r}")
    found = [(f"--{flag}", *_locate(flag, known), given) for flag, given in flags]
    for _, section, field, given in found:
        keys = (f"{section}.{field}", f"{section}.{field}={' '.join(given)}")
        for other in [each for key in keys for each in command.replaced.get(key, ())] if given != ["null"] else ():
            replaced_section, _, replaced_field = other.partition(".")
            values[replaced_section].pop(replaced_field, None)
    _warn_of_repeated(found)
    for flag, section, field, given in found:
        if names and (section, field) == command.positional:
            raise ValueError(f"{flag} is given twice: {', '.join(map(repr, names))} before the first flag sets it")
        values[section][field] = convert_words(flag, given, known[section][field])
    if command.positional is None and not any(values.values()):
        raise ValueError(f"recipe {names[0]} sets nothing: expected sections with fields")
    _check_required(values, command)
    return values


def _warn_of_repeated(found):
    last = {(section, field): (flag, given) for flag, section, field, given in found}
    counts = Counter((section, field) for _, section, field, _ in found)
    for place, (flag, given) in last.items():
        if counts[place] > 1:
            value = shortened(printable(" ".join(given) or "true"))
            logger.warning(f"{flag} is given {counts[place]} times: the last value counts, {value}")


def _check_required(values, command):
    for section, cls in command.sections.items():
        for item in fields(cls):
            required = item.init and item.default is MISSING and item.default_factory is MISSING
            if required and values[section].get(item.name) is None:
                raise ValueError(f"--{item.name} is needed")


def _split(words: Sequence[str]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The words before the first flag, and each flag with its values."""
    names: list[str] = []
    flags: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            flag, separator, value = word[2:].partition("=")
            flags.append((flag, [value] if separator else []))
        else:
            (flags[-1][1] if flags else names).append(word)
    return names, flags


def _locate(flag: str, known: FieldTypes) -> tuple[str, str]:
    """Section and field of a flag."""
    section, _, field = flag.rpartition(".")
    if section and section not in known:
        raise nearest("section", section, known)
    if section and field not in known[section]:
        raise unknown(f"field in section {section!r}", field, known[section], known)
    homes = [section] if section else [name for name in known if field in known[name]]
    if not homes:
        raise nearest("field", f"--{field}", [f"--{name}" for names in known.values() for name in names])
    if len(homes) > 1:
        raise ValueError(f"--{field} is a field of {' and '.join(homes)}: write --{homes[0]}.{field}")
    return homes[0], field
