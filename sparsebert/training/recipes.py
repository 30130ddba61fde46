"""
Recipes and flags: a YAML file of sections, one per dataclass, with overrides from the command line.

Every flag is a field of a section: `--learning_rate 1e-3` sets the field of that name in the one section that has it,
`--model.search soft` names the section as well. The recipes of the top-level folder `recipes/` ship with the package
and are found by their name.
"""

import types
import typing
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path

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
    if path.name == name and not path.suffix:
        raise FileNotFoundError(str(nearest("recipe", name, recipe_names())))
    raise FileNotFoundError(f"recipe {name}: no such file")


def load_recipe(
    arguments: Iterable[str],
    sections: Mapping[str, type],
    positional: str | None = None,
    excluded: Mapping[str, Iterable[str]] | None = None,
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
                raise nearest("section", section, list(sections))
            if not (content is None or isinstance(content, dict)):
                raise ValueError(f"recipe: section {section!r} must hold fields, got {content!r}")
            for name, value in (content or {}).items():
                if name not in types_of[section]:
                    raise nearest(f"field in section {section!r}", name, list(types_of[section]))
                values[section][name] = convert(f"{section}.{name}", value, types_of[section][name])
    elif words:
        section, name = positional.split(".")
        values[section][name] = _value(name, words, types_of[section][name])
    for flag, texts in _overrides(arguments):
        section, name = _locate(flag, types_of)
        values[section][name] = _value(f"--{flag}", texts, types_of[section][name])
    return values


def _leading_words(arguments: list) -> Iterator:
    while arguments and not str(arguments[0]).startswith("--"):
        yield arguments.pop(0)


def _value(what: str, texts: list[str], annotation):
    """The value of a field from the words given for it."""
    allowed = _types(annotation)
    if not texts:
        if bool not in allowed:
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


class _UniqueKeys(yaml.SafeLoader):
    """The safe loader, except that a key may not come twice, where YAML would let the last one win."""

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


def read_recipe(path: Path) -> dict:
    """
    The sections of a recipe file, not checked against any dataclass.

    Raises:
        ValueError: If it is not YAML, or no mapping.
    """
    try:
        recipe = yaml.load(path.read_text(encoding="utf-8-sig"), _UniqueKeys) or {}
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
    return {field.name: field.type for field in fields(cls) if field.init}


def _overrides(arguments: list) -> Iterator[tuple[str, list[str]]]:
    while arguments:
        flag, separator, text = str(arguments.pop(0))[2:].partition("=")
        yield flag, [text] if separator else [str(word) for word in _leading_words(arguments)]


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


def _item(annotation):
    """What a list field holds: `float` for `list[float]`; text where the field takes a text as well."""
    members = typing.get_args(annotation) if typing.get_origin(annotation) is not list else (annotation,)
    for member in members:
        if typing.get_origin(member) is list:
            return typing.get_args(member)[0]
    return str if str in _types(annotation) else object


def _parse(what, text, annotation):
    """What was typed on the command line: YAML, but a field that takes text and no truth value gets it as it is."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{what} {text!r} is not YAML: {error}") from error
    allowed = _types(annotation)
    return text if value is not None and str in allowed and not allowed & {bool, list, dict} else value


def convert(what: str, value, annotation):
    """
    The value in a field's type: YAML reads 1e-3 as text, and 6e6 as a fraction.

    Raises:
        ValueError: If it is not of that type; `what` names the field.
    """
    allowed = _types(annotation)
    if allowed == {list} and not isinstance(value, list):
        raise ValueError(f"{what} must be a list, such as [1, 2], got {value!r}")
    if list in allowed and isinstance(value, list):
        return [convert(what, item, _item(annotation)) for item in value]
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
