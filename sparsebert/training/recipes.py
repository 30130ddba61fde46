"""
Recipes: a YAML file of sections, one per dataclass, with overrides from the command line.

There is no flag that is not a field: `--learning_rate 1e-3` sets the field of that name in the one section that has
it, `--model.search soft` names the section as well.
"""

import inspect
import sys
import types
import typing
from dataclasses import fields
from pathlib import Path

import yaml

from ..checks import nearest


def load_recipe(arguments, sections):
    """
    Read a recipe and its overrides.

    Args:
        arguments (`list[str]`): Path of a YAML file (may be left out), then `--field value`, `--field=value` or
            `--section.field value`; a truth value may be left out: `--field` is `--field true`.
        sections (`dict[str, type]`): Dataclass of each section.

    Returns:
        `dict[str, dict]`: Per section, the values that were set.
    Raises:
        FileNotFoundError: If there is no such recipe.
        SystemExit: After printing help, if `--help` is among the arguments.
        ValueError: If a section or field is unknown (names the nearest), ambiguous, or a value does not parse.
    """
    if {"-h", "--help"} & set(arguments):
        print(_help(sections))
        sys.exit()
    if not arguments:
        raise ValueError("expected the path of a recipe or --field value")
    arguments = list(arguments)
    recipe = {} if arguments[0].startswith("--") else _read(Path(arguments.pop(0)))
    types_of = {section: _field_types(cls) for section, cls in sections.items()}
    values = {section: {} for section in sections}
    for section, content in recipe.items():
        if section not in sections:
            raise nearest("section", section, list(sections))
        if not (content is None or isinstance(content, dict)):
            raise ValueError(f"recipe: section {section!r} must hold fields, got {content!r}")
        for name, value in (content or {}).items():
            if name not in types_of[section]:
                raise nearest(f"field in section {section!r}", name, list(types_of[section]))
            values[section][name] = convert(f"{section}.{name}", value, types_of[section][name])
    for flag, text in _overrides(arguments):
        section, name = _locate(flag, types_of)
        annotation = types_of[section][name]
        if text is None:
            if bool not in _types(annotation):
                raise ValueError(f"--{flag} needs a value")
            text = "true"
        values[section][name] = convert(f"--{flag}", _parse(f"--{flag}", text, annotation), annotation)
    return values


def _help(sections):
    """What the script does, and every field: those of our own sections explained, those of the host's by name."""
    texts = [inspect.getdoc(sys.modules["__main__"]) or ""]
    for section, cls in sections.items():
        if cls.__module__.startswith(__package__):
            texts.append(f"{section}: {inspect.getdoc(cls)}")
        else:
            texts.append(f"{section}: the fields of {cls.__name__}: {', '.join(_field_types(cls))}")
    return "\n\n".join(texts)


def _read(path):
    if not path.is_file():
        raise FileNotFoundError(f"recipe {path}: no such file")
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"recipe {path}: {error}") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"recipe {path}: expected sections with fields, got {recipe!r}")
    return recipe


def _field_types(cls):
    return {field.name: field.type for field in fields(cls) if field.init}


def _overrides(arguments):
    while arguments:
        flag = arguments.pop(0)
        if not flag.startswith("--"):
            raise ValueError(f"expected --field value, got {flag!r}")
        flag, separator, text = flag[2:].partition("=")
        if not separator:
            text = arguments.pop(0) if arguments and not arguments[0].startswith("--") else None
        yield flag, text


def _locate(flag, types_of):
    section, _, name = flag.rpartition(".")
    if section:
        if section not in types_of:
            raise nearest("section", section, list(types_of))
        if name not in types_of[section]:
            raise nearest(f"field in section {section!r}", name, list(types_of[section]))
        return section, name
    homes = [section for section, types_ in types_of.items() if name in types_]
    if not homes:
        raise nearest("field", f"--{name}", [f"--{known}" for types_ in types_of.values() for known in types_])
    if len(homes) > 1:
        raise ValueError(f"--{name} is a field of {' and '.join(homes)}: write --{homes[0]}.{name}")
    return homes[0], name


def _types(annotation):
    """The plain types that an annotation such as `int | list[str] | None` allows."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = typing.get_args(annotation) if union else (annotation,)
    return {typing.get_origin(member) or member for member in members}


def _parse(what, text, annotation):
    """What was typed on the command line: YAML, but a field that takes text and no truth value gets it as it is."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{what} {text!r} is not YAML: {error}") from error
    allowed = _types(annotation)
    return text if value is not None and str in allowed and not allowed & {bool, list, dict} else value


def convert(what, value, annotation):
    """
    The value in a field's type: YAML reads 1e-3 as text, and 6e6 as a fraction.

    Raises:
        ValueError: If it is not of that type; `what` names the field.
    """
    allowed = _types(annotation)
    if allowed == {list} and not isinstance(value, list):
        raise ValueError(f"{what} must be a list, such as [1, 2], got {value!r}")
    if value is None or type(value) in allowed or str in allowed or not allowed & {bool, int, float}:
        return value
    try:
        if bool in allowed or isinstance(value, bool):
            raise ValueError
        number = float(value)
        if float in allowed:
            return number
        if number != int(number):
            raise ValueError
        return int(number)
    except (TypeError, ValueError, OverflowError):
        kind = "true or false" if bool in allowed else "a number" if float in allowed else "a whole number"
        raise ValueError(f"{what} must be {kind}, got {value!r}") from None
