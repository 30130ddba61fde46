"""Errors about what a user gave: each names the field, the value and what is allowed."""

import difflib


def nearest(what, name, allowed):
    """A `ValueError` for an unknown name that suggests the nearest allowed one."""
    match = difflib.get_close_matches(name, allowed, n=1)
    hint = f"did you mean {match[0]!r}?" if match else f"allowed: {', '.join(sorted(allowed))}"
    return ValueError(f"unknown {what} {name!r}; {hint}")


def check_choice(field, value, allowed):
    """Raise a `ValueError` naming field, value and choices unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{field} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def check_range(field, value, low, high=None, kinds=int):
    """Raise a `ValueError` naming field, value and range unless `value` is a number from `low` to `high`."""
    valid = isinstance(value, kinds) and not isinstance(value, bool) and low <= value
    if not valid or (high is not None and value > high):
        number = "an integer" if kinds is int else "a number"
        bound = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{field} must be {number} {bound}, got {value!r}")
