"""
Recipes: YAML files of sections, one per dataclass, whose values are checked against the types of the fields.

Plain words are read as YAML 1.2 does: only `true` and `false` are truth values, so that `save_strategy: no` is a word,
and a date or a number with a leading zero is text. Fields that hold truth values still take yes, no, on and off.
"""

import json
import os
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from .checks import nearest
from .files import replace_files
from .hub import without_secrets


# For each section, the annotations of its fields.
FieldTypes = Mapping[str, Mapping[str, Any]]

# Recipes by the names that they had.
_FORMER_NAMES = {"search": "learned_mask"}
# What a field takes, by the types of its annotation.
_EXPECTED = {
    bool: "true or false",
    float: "a number",
    int: "a whole number",
    str: "text",
    list: "a list such as [1, 2]",
    dict: "fields such as {name: value}",
}
# Where a training keeps its recipe: the file of its state, and the callback there.
STATE_NAME, RECORD = "trainer_state.json", "RecipeRecord"
# Sections of the recipe of a training.
_RECORDED = {"data", "model", "training"}
_NULLS = ("~", "null", "Null", "NULL")
_TRUTH = dict.fromkeys(("yes", "on", "true"), True) | dict.fromkeys(("no", "off", "false"), False)


def recipes_folder() -> Path:
    """The folder of the recipes that ship with the package: `sparsebert/recipes` once installed, else `recipes`."""
    installed = Path(__file__).parent / "recipes"
    return installed if installed.is_dir() else Path(__file__).parents[1] / "recipes"


def recipe_names(sections: Mapping[str, type] | None = None) -> list[str]:
    """Names of the recipes that ship with the package; with `sections`, of those whose fields all belong to these."""
    paths = sorted(recipes_folder().glob("*.yaml"))
    if sections is None:
        return [path.stem for path in paths]
    known = field_types(sections)
    return [
        path.stem
        for path in paths
        if all(set(content or ()) <= known.get(section, {}).keys() for section, content in read_recipe(path).items())
    ]


def find_recipe(name: str) -> Path:
    """The file of a recipe: `name` is its path, or the name of one that ships with the package."""
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
    if name in _FORMER_NAMES:
        raise FileNotFoundError(f"unknown recipe {name!r}; did you mean {_FORMER_NAMES[name]!r}?")
    if path.name == name and not path.suffix:
        raise FileNotFoundError(str(nearest("recipe", name, recipe_names())))
    known = f"; the recipe that ships with the package is {path.stem!r}" if path.stem in recipe_names() else ""
    raise FileNotFoundError(f"recipe {name}: no such file{known}")


def stored_recipe(folder: str | os.PathLike) -> dict[str, dict[str, Any]] | None:
    """What defined the training whose state a folder holds, by section and field; `None` if that is not recorded."""
    path = Path(folder) / STATE_NAME
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8")).get("stateful_callbacks", {}).get(RECORD)
        stored = None if record is None else dict(record["args"]["recipe"])
        if stored is not None and not all(isinstance(fields, dict) for fields in stored.values()):
            raise TypeError("sections without fields")
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: not the state of a training ({error!r})") from error
    return stored


class _Loader(yaml.SafeLoader):
    """The safe loader, but plain words are what YAML 1.2 says they are, and a key may not come twice."""

    yaml_implicit_resolvers: dict[str, list] = {}

    def construct_mapping(self, node, deep=False):
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} comes twice", node.start_mark)
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("merge", "<<", "<"),
    ("null", "|".join(("", *map(re.escape, _NULLS))), ["~", "n", "N", ""]),
    ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", "[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"({_pattern})$"), list(_first))


def read_recipe(path: Path) -> dict[Any, Any]:
    """The sections of a recipe file, not checked against any dataclass."""
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


def load_recipe(
    name: str, sections: Mapping[str, type], excluded: Mapping[str, Iterable[str]] = {}
) -> dict[str, dict]:
    """
    The values that a recipe sets, by section and field: those of the dataclass of each section, but for the excluded.
    """
    known = field_types(sections, excluded)
    values: dict[str, dict] = {section: {} for section in sections}
    for section, content in read_recipe(find_recipe(name)).items():
        if section not in known:
            raise unknown("section", section, known, known)
        if not (content is None or isinstance(content, dict)):
            raise ValueError(f"recipe: section {section!r} must hold fields, got {content!r}")
        for field, value in (content or {}).items():
            if field not in known[section]:
                raise unknown(f"field in section {section!r}", field, known[section], known)
            values[section][field] = convert(f"{section}.{field}", value, known[section][field])
    return values


def field_types(sections: Mapping[str, type], excluded: Mapping[str, Iterable[str]] = {}) -> FieldTypes:
    """The annotations of the fields of each section, without those that are excluded."""
    import torch

    found = {}
    for section, cls in sections.items():
        try:
            hints = typing.get_type_hints(cls, localns={"torch": torch})  # transformers does not import this name
        except NameError:  # nor some other one: then types written as text stay unchecked
            hints = {}
        names = [field for field in fields(cls) if field.init and field.name not in excluded.get(section, ())]
        found[section] = {field.name: hints.get(field.name, field.type) for field in names}
    return found


def unknown(what: str, name: object, allowed: Iterable[str], known: FieldTypes) -> ValueError:
    """An error for the name of a section or field, to be raised: where the field is, or which name is nearest."""
    homes = [section for section in known if name in known[section]]
    if homes:
        return ValueError(f"unknown {what} {name!r}: it is a field of section {homes[0]!r}")
    return nearest(what, name, allowed)


def _kinds(annotation) -> dict[type, Any]:
    """The plain types that an annotation such as `int | list[str] | None` allows, with what it says of each."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = typing.get_args(annotation) if union else (annotation,)
    return {typing.get_origin(member) or member: member for member in members}


def _item(kinds):
    """What a list holds: `float` for `list[float]`; if that is not said, text where the field takes a text as well."""
    return next(iter(typing.get_args(kinds[list])), str if str in kinds else object)


def convert(what: str, value: Any, annotation: Any) -> Any:
    """
    What YAML read in the type of its field, which `what` names in an error: 6e6 is a fraction in YAML, and "1e-3" in
    quotes is text. In text, `~/` at the beginning is the home folder.
    """
    kinds = _kinds(annotation)
    if isinstance(value, list) and list in kinds:
        return [convert(f"each of {what}", item, _item(kinds)) for item in value]
    if isinstance(value, str) and str in kinds:
        return os.path.expanduser(value) if value.startswith("~/") else value
    if isinstance(value, str) and bool in kinds:
        value = _TRUTH.get(value.lower(), value)
    if str in kinds and isinstance(value, (bool, int)) and type(value) not in kinds:
        return str(value).lower()
    if type(value) in kinds or not kinds.keys() <= {*_EXPECTED, types.NoneType}:
        return value
    if value is None:
        raise ValueError(f"{what} needs a value, got null: leave the field out for its default")
    if isinstance(value, (str, int, float)) and not isinstance(value, bool) and bool not in kinds:
        number = _number(value)
        if float in kinds and number is not None:
            return number
        if int in kinds and number is not None and number.is_integer():
            return int(number)
    expected = [text for kind, text in _EXPECTED.items() if kind in kinds and not (kind is int and float in kinds)]
    quotes = ": put it in quotes" if str in kinds and isinstance(value, float) else ""
    raise ValueError(f"{what} must be {', or '.join(expected)}, got {value!r}{quotes}")


def _number(value):
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def convert_words(what: str, words: list[str], annotation: Any) -> Any:
    """The value of a field in its type, from the words that are given for it on a command line."""
    kinds = _kinds(annotation)
    if words in ([], [""]):
        if words or bool not in kinds:
            raise ValueError(f"{what} needs a value")
        return True
    read = [_read_word(what, word, kinds) for word in words]
    only_list = list in kinds and not kinds.keys() & {bool, dict, str}
    if len(words) == 1 and not (only_list and type(read[0]) not in kinds):
        return convert(what, read[0], annotation)
    if list not in kinds:
        raise ValueError(f"{what} takes one value, got {', '.join(map(repr, words))}")
    item = _kinds(_item(kinds))
    return convert(what, [_read_word(what, word, item) for word in words], annotation)


def _read_word(what, word, kinds):
    """A word as YAML, but text stays as it was typed where the field takes text."""
    try:
        value = yaml.load(word, _Loader)
    except yaml.YAMLError as error:
        if str in kinds and not (word.startswith(("[", "{")) and kinds.keys() & {list, dict}):
            return word
        raise ValueError(f"{what} {word!r} is not YAML: {error}") from error
    kept = value is not None or word in _NULLS  # what else reads as null is a comment or an anchor, such as &amp
    return value if kept and (str not in kinds or type(value) in kinds.keys() - {str}) else word


def write_recipe(path: Path, recipe: dict[str, dict[str, Any]]) -> None:
    """Write a recipe for [`read_stored_recipe`], without tokens for the Hub."""
    written = {section: without_secrets(fields) for section, fields in recipe.items()}
    replace_files({path: yaml.safe_dump(written).encode()})


def read_stored_recipe(path: Path) -> dict[str, dict[str, Any]] | None:
    """What [`write_recipe`] wrote; `None` if there is no file, or it is not such a one."""
    try:
        text = path.read_text(encoding="utf-8")
        recipe = yaml.safe_load(text)
        return recipe if _RECORDED <= recipe.keys() and yaml.safe_dump(recipe) == text else None
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return None
