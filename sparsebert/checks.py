"""Errors about what a user gave: each names the field, the value and what is allowed."""

import difflib
import importlib.util
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from typing import Any


LARGEST_SEED = 2**32 - 1  # that numpy accepts
MAX_LAYERS = MAX_HEADS = 1024  # no real model has more
# What torch says if a CPU or a GPU has no memory left.
_NO_MEMORY = "out of memory|can't allocate memory|CUDNN_STATUS_NOT_SUPPORTED"


def nearest(what: str, name: object, allowed: Iterable[str]) -> ValueError:
    """
    An error for an unknown name, to be raised: it suggests the known name nearest to it, or lists them all if none is.
    """
    name, allowed = str(name), sorted(allowed)
    match = difflib.get_close_matches(name, allowed, n=1)
    hint = f"did you mean {match[0]!r}?" if match else f"allowed: {', '.join(allowed) or 'none'}"
    return ValueError(f"unknown {what} {name!r}; {hint}")


def check_installed(what: str, *packages: str) -> None:
    """Check that packages of the extra `train` are there that something needs: an `ImportError` names the extra."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise ImportError(f'{what} needs {" and ".join(missing)}: pip install "sparsebert[train]"')


def shortened(text: str, most: int = 300) -> str:
    """A text for a message, without its middle if it has more than `most` characters."""
    head = 2 * most // 3
    return text if len(text) <= most else f"{text[:head]} ... {text[head + 5 - most :]}"


def printable(text: str) -> str:
    """A text without control characters, which a terminal would obey: names and values may come from anywhere."""
    return "".join("\N{REPLACEMENT CHARACTER}" if unicodedata.category(each) == "Cc" else each for each in text)


def in_short(error: Exception) -> str:
    """Type and text of an error, for a message: `repr` may hold all that could not be decoded."""
    return f"{type(error).__name__}: {shortened(str(error))}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a CPU or a GPU has no memory left."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and re.search(_NO_MEMORY, str(error)) is not None
    )


def check_choice(field: str, value: object, allowed: Collection[Any]) -> None:
    """Check that a value is one of the allowed ones."""
    if value not in allowed:
        raise ValueError(f"{field} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def check_range(
    field: str,
    value: Any,
    low: float,
    high: float | None = None,
    kinds: type[int | float] | tuple[type[int | float], ...] = int,
) -> None:
    """Check that a value is a number of one of the `kinds`, from `low` to `high`, both included."""
    valid = isinstance(value, kinds) and not isinstance(value, bool) and low <= value
    if not valid or (high is not None and value > high):
        number = "an integer" if kinds is int else "a number"
        bound = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{field} must be {number} {bound}, got {value!r}")


def number(
    low: float, high: float | None = None, kinds: type[int | float] | tuple[type[int | float], ...] = int
) -> Callable[[Any], None]:
    """A validator for `validated_field`, see [`CheckedFields`]: that of [`check_range`]."""
    return lambda value: check_range("", value, low, high, kinds)


def one_of(allowed: Collection[Any]) -> Callable[[Any], None]:
    """A validator for `validated_field`: `None` or one of the allowed values."""

    def in_allowed(value: Any) -> None:
        if value is not None and value not in allowed:
            raise ValueError(f"must be one of {', '.join(map(repr, allowed))}, got {value!r}")

    return in_allowed


def interval(low: float, high: float, low_open: bool = False, high_open: bool = False) -> Callable[[Any], None]:
    """A validator for `validated_field`: `None` or a number between two others."""

    def in_interval(value: Any) -> None:
        if value is None:
            return
        above = value > low if low_open else value >= low
        below = value < high if high_open else value <= high
        if not (above and below):  # NaN is neither
            shown = f"{'(' if low_open else '['}{low}, {high}{')' if high_open else ']'}"
            raise ValueError(f"must be in {shown}, got {value!r}")

    return in_interval


class CheckedFields:
    """
    A dataclass of a recipe, whose fields are checked as they are declared, with `validated_field` of huggingface_hub.
    A field that is `None` is left out. Unlike a `strict` dataclass it takes a whole number for a fraction, and a wrong
    value is a `ValueError`.
    """

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            for validate in item.metadata.get("validator", ()) if value is not None else ():
                try:
                    validate(value)
                except ValueError as error:
                    raise ValueError(f"{item.name} {str(error).strip()}") from None


def no_effect(name: str, value: object, why: str) -> ValueError:
    """The error for a field that has no effect under a setting, to be raised by the caller."""
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    return ValueError(f"{name} {shown} has no meaning {why}")


# Names of fields, and why they have no effect, or nothing if they have one: a function of what is checked.
Effects = Iterable[tuple[tuple[str, ...], Callable[..., str | bool | None]]]


def check_effects(table: Effects, options: Any, *context: Any) -> None:
    """Refuse the fields of a dataclass that were set and have no effect, by a table; `context` is what decides too."""
    for names, reason in table:
        for name in names:
            value = getattr(options, name)
            if value != getattr(type(options), name) and (why := reason(options, *context)):
                raise no_effect(name, value, str(why))


def check_allowed(section: str, given: Mapping[str, Any], allowed: Collection[str], why: str) -> None:
    """Refuse the first field of a section of a recipe that is not one of those that have an effect."""
    if refused := sorted(given.keys() - set(allowed)):
        raise no_effect(f"{section}.{refused[0]}", given[refused[0]], why)
