"""How a field of a key is compared with the same field of a shape, and how a type declares it."""

from __future__ import annotations

import dataclasses
import enum
import keyword
from typing import Any, NamedTuple, TypeVar

__all__ = ["MATCH", "Field", "Match", "anything", "bound", "exact", "fields_of"]

_T = TypeVar("_T")

MATCH = "graphshare.match"
"""Name of the entry in a dataclass field's metadata that says how it matches."""


class Match(enum.Enum):
    """How a field of a key is compared with the same field of a shape."""

    EXACT = "exact"
    """The two are equal."""
    BOUND = "bound"
    """The key's value is at least the shape's."""
    ANY = "any"
    """Never compared, part of the key's identity only."""


def exact(default: _T) -> _T:
    """Declare a field that a key covers only where it is equal.

    Args:
        default: The value of a descriptor that does not name the field; hashable. Type checkers
            see it only if it is passed by name.

    Example:
        >>> from graphshare import BatchDescriptor
        >>> class BeamDescriptor(BatchDescriptor):
        ...     beam_width: int | None = exact(default=1)
        >>> BeamDescriptor(8, beam_width=2).covers(BeamDescriptor(8))
        False
    """
    return dataclasses.field(default=default, metadata={MATCH: Match.EXACT})


def bound(default: _T) -> _T:
    """Declare an integer field of which a key covers every value up to its own.

    Args:
        default: The value of a descriptor that does not name the field: an int from 0, or ``None``.
    """
    return dataclasses.field(default=default, metadata={MATCH: Match.BOUND})


def anything(default: _T) -> _T:
    """Declare a field that tells keys apart but is never compared with a shape.

    Args:
        default: The value of a descriptor that does not name the field; hashable.
    """
    return dataclasses.field(default=default, metadata={MATCH: Match.ANY})


class Field(NamedTuple):
    """One field of a descriptor type, as dispatch reads it.

    Attributes:
        name: The field's name.
        match: How it is compared.
        default: Its default, ``dataclasses.MISSING`` for ``num_tokens``.
        least: The smallest integer it may hold, or ``None`` if it may hold anything hashable.
    """

    name: str
    match: Match
    default: Any
    least: int | None


_LEAST = {
    "num_tokens": 1,
    "num_reqs": 1,
    "uniform_query_len": 1,
    "max_query_len": 1,
    "num_active_loras": 0,
    "num_ubatches": 1,
}


_TAKEN = frozenset({"cost", "covers", "matching"})


def fields_of(cls: type) -> tuple[Field, ...]:
    """Return the fields of a descriptor type, its bases' first.

    Raises:
        TypeError: A field does not say how it matches, or its name is taken.
    """
    fields: list[Field] = []
    for field in dataclasses.fields(cls):
        name, match = field.name, field.metadata.get(MATCH)
        if match is None:
            raise TypeError(
                f"{cls.__name__}.{name}: expected exact(...), bound(...) or anything(...), got "
                f"{'no value' if field.default is dataclasses.MISSING else repr(field.default)}. "
                "How a field of a key matches must be said."
            )
        if name.startswith("_") or keyword.iskeyword(name) or name in _TAKEN:
            raise TypeError(f"{cls.__name__}.{name}: this name is taken")
        least = _LEAST.get(name, 0 if match is Match.BOUND else None)
        fields.append(Field(name, match, field.default, least))
    return tuple(fields)
