"""Dispatch by asking key after key, for types whose fields are not known."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from graphshare.descriptor import BatchDescriptor
from graphshare.dispatch.leaf import Leaf

__all__ = ["Search"]

K = TypeVar("K", bound=Hashable)

MAX_REMEMBERED = 4096
"""Shapes whose key is remembered."""


class Search(Generic[K]):
    """The captured keys in order of cost, asked one after the other.

    Args:
        keys: The keys, no two equal, at least one.
        covers: As in :class:`graphshare.dispatch.Dispatcher`.
        cost: Likewise.
        kind: The keys' type if all are descriptors of one type, which can be made from fields.

    Attributes:
        leaves: One for each key, and one for misses.
    """

    def __init__(
        self,
        keys: list[K],
        covers: Callable[[K, Any], bool] | None,
        cost: Callable[[K], Any] | None,
        kind: type[BatchDescriptor] | None,
    ) -> None:
        self._keys = keys
        self._covers = covers
        self._cost = cost
        self._kind = kind
        self._sorted: list[Leaf] | None = None
        self._remembered: dict[tuple[type, Hashable], Leaf] = {}
        self._miss = Leaf(None, "not_covered", 0)
        self.leaves = [Leaf(key, "", 1) for key in keys]
        self.leaves.append(self._miss)

    def ordered(self) -> list[K]:
        """The keys, in the order in which they were given."""
        return self._keys

    def described(self, shape: Any = None, /, **fields: Any) -> K | None:
        """Dispatch for descriptors: a shape, or its fields by name."""
        if shape is None and self._kind is not None:
            return self.foreign(self._kind(**fields))
        return self.foreign(shape, **fields)

    def foreign(self, shape: Any = None, /, **fields: Any) -> K | None:
        """Dispatch for keys of any type: a shape."""
        if shape is None or fields:
            kinds = ", ".join(sorted({type(key).__qualname__ for key in self._keys}))
            raise TypeError(f"dispatch: expected one shape (keys are of type {kinds}), got fields")
        # A shape that is equal only to itself may be changed and passed again: never remembered.
        if type(shape).__eq__ is object.__eq__:
            leaf = self._find(shape)
        else:
            try:
                leaf = self._remembered.get((type(shape), shape))
            except TypeError:  # not hashable
                leaf = self._find(shape)
            else:
                if leaf is None:
                    leaf = self._find(shape)
                    if len(self._remembered) >= MAX_REMEMBERED:
                        self._remembered.clear()
                    self._remembered[type(shape), shape] = leaf
        leaf.count += 1
        return leaf.key

    def _find(self, shape: Any) -> Leaf:
        if self._sorted is None:
            self._sorted = sorted(self.leaves[:-1], key=self._order)
        for leaf in self._sorted:
            if self._ask(leaf.key, shape):
                return leaf
        return self._miss

    # Sorted at the first dispatch: a pool whose keys say nothing may still be used by key.
    def _order(self, leaf: Leaf) -> tuple[Any, str]:
        key = leaf.key
        if self._cost is not None:
            return self._cost(key), repr(key)
        if callable(own := getattr(key, "cost", None)):
            return own(), repr(key)
        return sum(bool(self._ask(key, other)) for other in self._keys), repr(key)

    def _ask(self, key: Any, shape: Any) -> bool:
        if self._covers is not None:
            return bool(self._covers(key, shape))
        if callable(own := getattr(key, "covers", None)):
            return bool(own(shape))
        raise TypeError(
            f"dispatch: expected keys with a covers method, got {type(key).__qualname__}. "
            "Pass covers=."
        )
