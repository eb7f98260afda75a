"""Descriptors that vLLM finds a graph by sooner."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import lru_cache, partial
from operator import index
from typing import Any

__all__ = ["Twins", "knowing_its_hash"]


class Twins:
    """Descriptors that know their hash, one for each of vLLM's; see :func:`knowing_its_hash`."""

    __slots__ = ("_made",)

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}

    def of(self, desc: Any) -> Any:
        """Return the one that equals ``desc``, always the same."""
        twin = self._made.get(desc)
        if twin is None:
            twin = self._made[desc] = knowing_its_hash(desc)
        return twin

    def among(self, candidates: Any, captured: Iterable[Any]) -> Any:
        """Return what a manager's ``dispatch`` picks from, with the twins of what was captured.

        Args:
            candidates: vLLM's table: lists of descriptors, by number of tokens or, from 0.25.1
                on, by that and a number of adapters.
            captured: The descriptors of its full graphs; all else stays.

        Returns:
            ``None`` for a table of another kind.
        """
        twins = {desc: self.of(desc) for desc in captured}
        changed: dict[int, list[Any]] = {}  # many places hold one list

        def within(descs: list[Any]) -> list[Any]:
            if id(descs) not in changed:
                changed[id(descs)] = [twins.get(desc, desc) for desc in descs]
            return changed[id(descs)]

        try:
            if type(candidates) is dict:
                return {place: within(descs) for place, descs in candidates.items()}
            if type(candidates) is list:
                return [within(descs) for descs in candidates]
        except TypeError:  # they are no lists of descriptors
            pass
        return None


def knowing_its_hash(desc: Any) -> Any:
    """Return a descriptor that equals this one, and is hashed without running Python.

    vLLM looks twice for a graph at each launch, and its descriptors are frozen dataclasses, which
    hash all of their fields in Python each time: 3 us with cold caches.

    Args:
        desc: vLLM's ``BatchExecutionDescriptor``.
    """
    if "__hash__" in getattr(type(desc), "__slots__", ()):
        return desc
    twin = object.__new__(_twins_of(type(desc)))
    for name in _names_of(type(desc)):
        object.__setattr__(twin, name, getattr(desc, name))  # it is frozen
    # The number itself, since an int's own hash is another one beyond 61 bits.
    object.__setattr__(twin, "__hash__", partial(index, hash(desc)))
    return twin


def _names_of(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


# One class for all of a kind: the interpreter reads attributes of several classes by turns slowly.
@lru_cache(maxsize=16)
def _twins_of(kind: type) -> type:
    names = _names_of(kind)

    def equals(self: Any, other: object) -> bool:
        if not isinstance(other, kind):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def new(_: type, *args: Any, **kwargs: Any) -> Any:
        # Whatever is made of one, such as by `dataclasses.replace`, is one of vLLM's own.
        return kind(*args, **kwargs)

    return type(
        kind.__name__,
        (kind,),
        {
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            # Each has a hash of its own in a slot, where `hash` finds something to call.
            "__slots__": ("__hash__",),
            "__eq__": equals,
            "__new__": new,
            "__reduce__": lambda self: (kind, tuple(getattr(self, name) for name in names)),
        },
    )
