"""Arguments that are wrong in themselves, refused where they are given.

Without torch, as descriptors are, so that planning need not wait for it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable
from numbers import Real
from typing import Any

__all__ = [
    "check_call",
    "check_flag",
    "distinct_keys",
    "listed",
    "number",
    "shown",
    "whole_number",
    "wrong_type",
    "wrong_value",
]

_LONGEST = 80


def shown(value: object) -> str:
    """Describe a value for a message, shortly: no tensor is printed."""
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        text = repr(value)
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return f"a value of type {type(value).__qualname__}"


def wrong_type(what: str, expected: str, got: object, remedy: str = "") -> TypeError:
    """Make the error for an argument of another type.

    Args:
        what: Which argument, with the pool's or buffer's name.
        expected: What would have been right.
        got: The argument itself.
        remedy: What to do, a sentence.
    """
    return TypeError(f"{what}: expected {expected}, got {shown(got)}. {remedy}".rstrip())


def wrong_value(what: str, expected: str, got: str, remedy: str = "") -> ValueError:
    """Make the error for an argument of the right type that cannot be meant.

    Args:
        what: Which argument, with the pool's or buffer's name.
        expected: What would have been right.
        got: What it is, in words.
        remedy: What to do, a sentence.
    """
    return ValueError(f"{what}: expected {expected}, got {got}. {remedy}".rstrip())


def check_call(what: str, value: object, *, optional: bool = False, remedy: str = "") -> None:
    """Refuse what cannot be called.

    Raises:
        TypeError: It is no callable, nor ``None`` where that is allowed.
    """
    if callable(value) or (optional and value is None):
        return
    raise wrong_type(what, "a callable" + (" or None" if optional else ""), value, remedy)


def check_flag(what: str, value: object) -> None:
    """Refuse a switch that is neither on nor off: a list that is not empty would be on.

    Raises:
        TypeError: It is no bool.
    """
    if not isinstance(value, bool):
        raise wrong_type(what, "True or False", value)


def whole_number(what: str, value: Any, least: int, most: int | None = None) -> int:
    """Return a count as an ``int``; integers of other types, NumPy's, become one.

    Args:
        what: Which argument.
        value: The argument.
        least: The least that it may be.
        most: The most that it may be.

    Raises:
        TypeError: It is no integer.
        ValueError: It is out of range.
    """
    # bool is an int to Python, but a flag passed as a count is a mistake.
    if isinstance(value, bool):
        raise TypeError(f"{what}: expected an int, got {shown(value)}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what}: expected an int, got {shown(value)}") from None
    if number < least or (most is not None and number > most):
        limits = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{what}: expected {limits}, got {number}")
    return number


def number(what: str, value: Any) -> float:
    """Return a finite number, whole or not.

    Args:
        what: Which argument.
        value: The argument.

    Raises:
        TypeError: It is no real number.
        ValueError: It is infinite, or not a number.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{what}: expected a number, got {shown(value)}")
    found = float(value)
    if not math.isfinite(found):
        raise ValueError(f"{what}: expected a finite number, got {found}")
    return found


def listed(what: str, values: Any, each: str, remedy: str = "") -> list[Any]:
    """Return the items of an argument that takes several.

    Args:
        what: Which argument.
        values: The argument.
        each: What the items are, in the plural.
        remedy: What to do about a single item.

    Raises:
        TypeError: It is no iterable, or one by accident: a string, or a named tuple.
    """
    if isinstance(values, (str, bytes)) or hasattr(type(values), "_fields"):
        raise wrong_type(what, f"an iterable of {each}", values, remedy)
    try:
        return list(values)
    except TypeError:
        # Not every TypeError: a generator of the caller's may raise one of its own.
        if hasattr(type(values), "__iter__") or hasattr(type(values), "__getitem__"):
            raise
    raise wrong_type(what, f"an iterable of {each}", values, remedy)


def distinct_keys(what: str, keys: Any) -> list[Any]:
    """Return the keys of a capture, in the order given.

    Args:
        what: Which argument, with the pool's name.
        keys: An iterable of hashable keys; it may be empty.

    Raises:
        TypeError: It is no iterable, or an item can be no key.
        ValueError: A key is given twice, or the iterator was used up before.
    """
    if hasattr(type(keys), "__torch_function__"):  # iterable, but its rows are no keys
        raise wrong_type(what, "an iterable of keys", keys)
    remedy = "Put a single key into a list"
    if callable(keys):
        remedy = "The keys come first, the forward second"
    found = listed(what, keys, "keys", f"{remedy}.")
    if not found and _is_iterator(keys):
        raise wrong_value(
            what,
            "an iterable that can be gone through again",
            "an iterator with nothing left",
            "No key would be captured, and every batch would run eagerly. Make a list of the keys.",
        )
    seen: set[Hashable] = set()
    twice: dict[Hashable, None] = {}
    for key in found:
        if key is None:
            raise TypeError(
                f"{what}: expected keys, got None. That is what dispatch returns where no key "
                "covers a batch; leave it out."
            )
        try:
            known = key in seen
        except TypeError as error:
            raise wrong_type(what, "hashable keys", key, f"({error}).") from None
        if known:
            twice[key] = None
        seen.add(key)
    if twice:
        raise wrong_value(
            what,
            "each key once",
            f"{', '.join(map(repr, twice))} twice",
            "Leave out what is there already.",
        )
    return found


def _is_iterator(values: Any) -> bool:
    return iter(values) is values
