"""Checks of a task's settings; each error names the field `task.<setting>`, what was expected and what was found."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from magic_pipeline.errors import InputError


def check_choice(name: str, value: Any, choices: Iterable[str]) -> str:
    """The value, if it is one of the choices."""
    known = list(choices)
    if value not in known:
        raise InputError(f"expected one of {', '.join(known)}, found {value!r}", field=f"task.{name}")
    return str(value)


def check_count(name: str, value: Any, *, at_least: int = 1, at_most: int | None = None) -> int:
    """The value, if it is a whole number in the range."""
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= at_least
    if not fits or (at_most is not None and value > at_most):
        upper = "" if at_most is None else f" to {at_most}"
        raise InputError(f"expected a whole number from {at_least}{upper}, found {value!r}", field=f"task.{name}")
    return int(value)


def check_fraction(name: str, value: Any) -> float:
    """The value, if it is a number from 0 to below 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise InputError(f"expected a number from 0 to below 1, found {value!r}", field=f"task.{name}")
    return float(value)


def check_flag(name: str, value: Any) -> bool:
    """The value, if it is true or false."""
    if not isinstance(value, bool):
        raise InputError(f"expected true or false, found {value!r}", field=f"task.{name}")
    return value


def check_texts(name: str, value: Any) -> list[str]:
    """The value as a list, if it is a list of at least one string."""
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(item, str) for item in value):
        raise InputError(f"expected a list of texts, found {value!r}", field=f"task.{name}")
    return list(value)
