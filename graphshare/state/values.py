"""When two host values are the same for a capture."""

from __future__ import annotations

import enum
import numbers
from collections.abc import Hashable
from typing import Any

import torch

__all__ = ["is_number", "same_value"]

_PLAIN = frozenset(
    (
        *(bool, int, str, bytes, bytearray, range, type(None)),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
    )
)


def is_number(value: Any) -> bool:
    """Whether ``at_most`` can bound ``value``: an int or a float, and no bool or enum."""
    return isinstance(value, (int, float)) and not isinstance(value, (bool, enum.Enum))


def same_value(expected: Any, got: Any) -> bool:
    """Whether a capture that froze ``expected`` holds for ``got``.

    Of one type and equal; a NaN is the same as a NaN. What Python cannot compare with a plain
    ``True`` (no ``__eq__``, one that raises, or one that returns an array) is the same only if it
    is one object.
    """
    if expected is got:
        return True
    cls = type(expected)
    if cls is not type(got):
        return False
    if cls in _PLAIN:
        return expected == got
    if cls is float:
        return expected == got or (expected != expected and got != got)
    if cls is complex:
        return same_value(expected.real, got.real) and same_value(expected.imag, got.imag)
    if cls is slice:
        mine, theirs = (
            (expected.start, expected.stop, expected.step),
            (got.start, got.stop, got.step),
        )
        return all(map(same_value, mine, theirs))
    if cls is set or cls is frozenset:
        # 1 and True are equal as members, but not to a capture.
        return _typed(expected) == _typed(got)
    return _equal_or_nan(cls, expected, got)


def _typed(values: Any) -> set[tuple[type, Hashable]]:
    return {(type(value), value) for value in values}


def _equal_or_nan(cls: type, expected: Any, got: Any) -> bool:
    if cls.__eq__ is object.__eq__:
        return False
    try:
        equal: Any = expected == got
        if type(equal) is bool and equal:
            return True
        # Scalars of NumPy and other number types: their results are not `bool`, and may be NaN.
        if issubclass(cls, numbers.Number):
            return bool(equal) or bool(expected != expected and got != got)
    except Exception:  # noqa: BLE001 - a foreign `__eq__` that raises says nothing of equality
        return False
    return False
