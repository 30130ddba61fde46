"""
Recipes and flags: a YAML file of sections, one per dataclass, with overrides from the command line.

Every flag is a field of a section: `--learning_rate 1e-3` sets the field of that name in the one section that has it,
`--model.search soft` names the section as well. The recipes of the top-level folder `recipes/` ship with the package
and are found by their name.

Plain words are read as YAML 1.2 does: only `true` and `false` are truth values, so that `save_strategy: no` is a word,
and a date or a number with a leading zero is text. Fields that hold truth values still take yes, no, on and off.
"""

import os
import re
import types
import typing
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path

import torch
import yaml

from ..checks import nearest


def recipes_folder() -> Path:
    """The folder of the recipes that ship with the package: `sparsebert/recipes` once installed, else `recipes`."""
    package = Path(__file__).parents[1]
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def recipe_names(sections: Mapping[str, type] | None = None) -> list[str]:
    """Names of the recipes that ship with the package; with `sections`, of those whose fields all belong to these."""
    paths = sorted(recipes_folder().glob("*.yaml"))
    if sections is None:
        return [path.stem for path in paths]
    known = {section: _field_types(cls).keys() for section, cls in sections.items()}
    return [
        path.stem
        for path in paths
        if all(set(content or ()) <= known.get(section, set()) for section, content in read_recipe(path).items())
    ]


def find_recipe(name: str) -> Path:
    """
    The file of a recipe.

    Args:
        name (`str`): Path of a YAML file, or the name of a recipe that ships with the package.

    Raises:
        FileNotFoundError: If there is neither.
    """
    path = Path(name)
    if path.is_file():
        return path
    shipped = recipes_folder() / f"{name}.yaml"
    if path.name == name and shipped.is_file():
        return shipped
    if path.is_dir():
        raise FileNotFoundError(f"recipe {name!r} is a folder, expected a YAML file")
    if name.startswith("-"):
        raise FileNotFoundError(f"expected a recipe or --field value, got {name!r}: fields begin with two dashes")
    if path.name == name and not path.suffix:
        raise FileNotFoundError(str(nearest("recipe", name, recipe_names())))
    known = f"; the recipe that ships with the package is {path.stem!r}" if path.stem in recipe_names() else ""
    raise FileNotFoundError(f"recipe {name}: no such file{known}")


def load_recipe(
    arguments: Iterable[str],
    sections: Mapping[str, type],
    positional: str | None = None,
    excluded: Mapping[str, Iterable[str]] | None = None,
    replaced: Mapping[str, Iterable[str]] | None = None,
) -> dict[str, dict]:
    """
    Read a recipe and its overrides.

    Args:
        arguments (`list[str]`): A recipe (optional), as [`find_recipe`] takes it, then `--field value`,
            `--field=value` or `--section.field value`. A truth value may be left out: `--field` is `--field true`. A
            field that takes a list takes several values: `--field a b`.
        sections (`dict[str, type]`): Dataclass of each section.
        positional (`str`, *optional*): `"section.field"` that the words before the first flag set, instead of naming
            a recipe.
        excluded (`dict[str, list[str]]`, *optional*): By section, fields that cannot be set here.
        replaced (`dict[str, list[str]]`, *optional*): By the `"section.field"` of a flag, fields that describe what it
            replaces: what the recipe says of them is dropped.

    Returns:
        `dict[str, dict]`: Per section, the values that were set.
    Raises:
        FileNotFoundError: If there is no such recipe.
        ValueError: If a section or field is unknown (the message names the nearest), ambiguous, or a value does not
            parse.
    """
    arguments = list(arguments)
    if not arguments and positional is None:
        raise ValueError("expected a recipe or --field value")
    types_of = {
        section: {
            name: kind for name, kind in _field_types(cls).items() if name not in (excluded or {}).get(section, ())
        }
        for section, cls in sections.items()
    }
    values: dict[str, dict] = {section: {} for section in sections}
    words = [str(word) for word in _leading_words(arguments)]
    if positional is None:
        recipe = read_recipe(find_recipe(words.pop(0))) if words else {}
        if words:
            raise ValueError(f"expected --field value, got {words[0]!r}")
        for section, content in recipe.items():
            if section not in sections:
                raise _elsewhere("section", section, section, types_of) or nearest("section", section, list(sections))
            if not (content is None or isinstance(content, dict)):
                raise ValueError(f"recipe: section {section!r} must hold fields, got {content!r}")
            for name, value in (content or {}).items():
                if name not in types_of[section]:
                    raise _unknown(section, name, types_of)
                values[section][name] = convert(f"{section}.{name}", value, types_of[section][name])
    elif words:
        section, name = positional.split(".")
        values[section][name] = _value(name, words, types_of[section][name])
    flags = [(flag, *_locate(flag, types_of), texts) for flag, texts in _overrides(arguments)]
    for _, section, name, texts in flags:
        for other in (replaced or {}).get(f"{section}.{name}", ()) if texts != ["null"] else ():
            replaced_section, _, replaced_name = other.partition(".")
            values[replaced_section].pop(replaced_name, None)
    for flag, section, name, texts in flags:
        if words and f"{section}.{name}" == positional:
            raise ValueError(f"--{flag} is given twice: {', '.join(map(repr, words))} before the first flag sets it")
        values[section][name] = _value(f"--{flag}", texts, types_of[section][name])
    return values


def _leading_words(arguments: list) -> Iterator:
    while arguments and not str(arguments[0]).startswith("--"):
        yield arguments.pop(0)


def _value(what: str, texts: list[str], annotation):
    """The value of a field from the words given for it."""
    allowed = _types(annotation)
    if not texts or texts == [""]:
        if texts or bool not in allowed:
            raise ValueError(f"{what} needs a value")
        texts = ["true"]
    if len(texts) == 1:
        value = _parse(what, texts[0], annotation)
        if list in allowed and not allowed & {bool, dict, str} and type(value) not in (*allowed, types.NoneType):
            value = [texts[0]] if _item(annotation) is str else [value]
        return convert(what, value, annotation)
    if list not in allowed:
        raise ValueError(f"{what} takes one value, got {', '.join(map(repr, texts))}")
    item = _item(annotation)
    return convert(what, list(texts) if item is str else [_parse(what, text, item) for text in texts], annotation)


class _Loader(yaml.SafeLoader):
    """
    The safe loader, except that a key may not come twice, where YAML would let the last one win, and that plain words
    are what YAML 1.2 says they are.
    """

    yaml_implicit_resolvers: dict[str, list] = {}

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge":
                name = self.construct_object(key, deep=True)
                if isinstance(name, Hashable) and name in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {name!r} comes twice", key.start_mark
                    )
                if isinstance(name, Hashable):
                    seen.add(name)
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("merge", "<<", "<"),
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", "[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"({_pattern})$"), list(_first))


def read_recipe(path: Path) -> dict:
    """
    The sections of a recipe file, not checked against any dataclass.

    Raises:
        ValueError: If it is not YAML, or no mapping.
    """
    try:
        recipe = yaml.load(path.read_text(encoding="utf-8-sig"), _Loader) or {}
    except UnicodeDecodeError as error:
        raise ValueError(f"recipe {path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"recipe {path}: {error}") from error
    except RecursionError:
        raise ValueError(f"recipe {path}: nested too deeply") from None
    if not isinstance(recipe, dict):
        raise ValueError(f"recipe {path}: expected sections with fields, got {recipe!r}")
    return recipe


def _field_types(cls):
    try:
        known = typing.get_type_hints(cls, localns={"torch": torch})  # transformers names it without importing it
    except NameError:  # nor some other name: then types written as text stay unchecked
        known = {}
    return {field.name: known.get(field.name, field.type) for field in fields(cls) if field.init}


def _overrides(arguments: list) -> Iterator[tuple[str, list[str]]]:
    while arguments:
        flag, separator, text = str(arguments.pop(0))[2:].partition("=")
        yield flag, [text] if separator else [str(word) for word in _leading_words(arguments)]


def _elsewhere(what, given, name, types_of):
    """An error for a field in the wrong place, or `None` if there is no such field."""
    homes = [section for section, types_ in types_of.items() if name in types_]
    return ValueError(f"unknown {what} {given!r}: it is a field of section {homes[0]!r}") if homes else None


def _unknown(section, name, types_of):
    what = f"field in section {section!r}"
    return _elsewhere(what, name, name, types_of) or nearest(what, name, list(types_of[section]))


def _locate(flag, types_of):
    section, _, name = flag.rpartition(".")
    if section:
        if section not in types_of:
            raise nearest("section", section, list(types_of))
        if name not in types_of[section]:
            raise _unknown(section, name, types_of)
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


def _item(annotation):
    """What a list field holds: `float` for `list[float]`; text where the field takes a text as well."""
    members = typing.get_args(annotation) if typing.get_origin(annotation) is not list else (annotation,)
    for member in members:
        if typing.get_origin(member) is list:
            return typing.get_args(member)[0]
    return str if str in _types(annotation) else object


def _parse(what, text, annotation):
    """What was typed on the command line: YAML, but a field that takes text and no truth value gets it as it is."""
    allowed = _types(annotation)
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        if str in allowed and not text.startswith(("[", "{")):
            return text
        raise ValueError(f"{what} {text!r} is not YAML: {error}") from error
    return value if value is None or type(value) in allowed - {str} else text if str in allowed else value


# Words for the truth values in fields that hold one.
_TRUTH = dict.fromkeys(("yes", "on", "true"), True) | dict.fromkeys(("no", "off", "false"), False)


def convert(what: str, value, annotation):
    """
    The value in a field's type: 6e6 is a fraction in YAML, and "1e-3" in quotes is text. In text, `~/` at the
    beginning is the home folder.

    Raises:
        ValueError: If it is not of that type; `what` names the field.
    """
    allowed = _types(annotation)
    if allowed == {list} and not isinstance(value, list):
        raise ValueError(f"{what} must be a list, such as [1, 2], got {value!r}")
    if list in allowed and isinstance(value, list):
        return [convert(f"each of {what}", item, _item(annotation)) for item in value]
    if isinstance(value, str) and bool in allowed and str not in allowed:
        value = _TRUTH.get(value.lower(), value)
    if isinstance(value, str) and str in allowed:
        return os.path.expanduser(value) if value.startswith("~/") else value
    if value is None and not allowed & {types.NoneType, object} and allowed <= {bool, int, float, str, list, dict}:
        raise ValueError(f"{what} needs a value, got null: leave the field out for its default")
    if value is None or type(value) in allowed:
        return value
    if allowed <= {dict, types.NoneType}:
        raise ValueError(f"{what} must be fields such as {{name: value}}, got {value!r}")
    if str in allowed and isinstance(value, (bool, int)):
        return str(value).lower()
    if allowed <= {str, types.NoneType}:
        raise ValueError(f"{what} must be text, got {value!r}: put it in quotes")
    if str in allowed or not allowed & {bool, int, float}:
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
        kind += ", or fields such as {name: [1, 2]}" if dict in allowed else ""
        raise ValueError(f"{what} must be {kind}, got {value!r}") from None
