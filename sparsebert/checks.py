"""Errors about what a user gave: each names the field, the value and what is allowed."""

import difflib
import importlib.util
from collections.abc import Collection, Iterable
from typing import Any


LARGEST_SEED = 2**32 - 1  # that numpy accepts


def nearest(what: str, name: object, allowed: Iterable[str]) -> ValueError:
    """
    An error for an unknown name, to be raised by the caller.

    Args:
        what (`str`): The kind of name, such as `"task"`.
        name (`object`): The unknown name.
        allowed (`Iterable[str]`): The known names.

    Returns:
        `ValueError`: Its message suggests the known name nearest to `name`, or lists them all if none is near.
    """
    name, allowed = str(name), sorted(allowed)
    match = difflib.get_close_matches(name, allowed, n=1)
    hint = f"did you mean {match[0]!r}?" if match else f"allowed: {', '.join(allowed) or 'none'}"
    return ValueError(f"unknown {what} {name!r}; {hint}")


def check_installed(what: str, *packages: str) -> None:
    """Check that packages of the extra `train` are there that something needs: an `ImportError` names the extra."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise ImportError(f'{what} needs {" and ".join(missing)}: pip install "sparsebert[train]"')


def shortened(text: str) -> str:
    """A text for a message, without its middle if it has more than 300 characters."""
    return text if len(text) <= 300 else f"{text[:200]} ... {text[-95:]}"


def check_choice(field: str, value: object, allowed: Collection[Any]) -> None:
    """
    Check that a value is one of the allowed ones.

    Raises:
        ValueError: If `value` is not one of `allowed`.
    """
    if value not in allowed:
        raise ValueError(f"{field} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def check_range(
    field: str,
    value: Any,
    low: float,
    high: float | None = None,
    kinds: type[int] | tuple[type[int | float], ...] = int,
) -> None:
    """
    Check that a number is within its bounds.

    Raises:
        ValueError: If `value` is not a number of one of the `kinds` from `low` to `high`, both included.
    """
    valid = isinstance(value, kinds) and not isinstance(value, bool) and low <= value
    if not valid or (high is not None and value > high):
        number = "an integer" if kinds is int else "a number"
        bound = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{field} must be {number} {bound}, got {value!r}")
