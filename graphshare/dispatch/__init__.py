"""From captured keys to the key for a batch, in constant time.

Keys of one descriptor type are laid out in :mod:`.tables`; all others are searched
(:mod:`.search`).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

from graphshare.descriptor import BatchDescriptor
from graphshare.dispatch.leaf import Leaf
from graphshare.dispatch.search import Search
from graphshare.dispatch.tables import tabulate

__all__ = ["Dispatcher"]

K = TypeVar("K", bound=Hashable)


class Dispatcher(Generic[K]):
    """Finds the captured key with least padding for a batch.

    Keys of one descriptor type go into tables. Keys of any other type, descriptors whose type
    overrides ``covers`` or ``cost``, and keys with a ``covers`` or ``cost`` given here are searched
    in order of cost, and the answer remembered for shapes that are hashable by value.

    Args:
        keys: The captured keys; duplicates count once. Their order does not matter.
        covers: ``covers(key, shape) -> bool``. Default: the key's own method.
        cost: ``cost(key)``, anything that sorts. Default: the key's own method; without one, the
            number of captured keys that a key covers. Equal costs are ordered by ``repr``.
        carry: An earlier dispatcher of the same pool, whose counts go on.

    Attributes:
        dispatch: ``dispatch(*, num_tokens, num_reqs=None, ...)``, every field by name with the
            descriptor's own defaults, or ``dispatch(shape)``. Returns the captured key object or
            ``None``. Foreign keys take a shape only. Raises ``TypeError`` for a count that is no
            integer, an unknown field, or a shape of another type, ``ValueError`` for a shape that
            no batch has; these are not counted.

    Raises:
        TypeError: Descriptors of several types, or descriptors and other keys, in one pool: they
            do not say of each other's shapes whether they cover them.
    """

    dispatch: Callable[..., K | None]

    def __init__(
        self,
        keys: Iterable[K],
        *,
        covers: Callable[[K, Any], bool] | None = None,
        cost: Callable[[K], Any] | None = None,
        carry: Dispatcher[K] | None = None,
    ) -> None:
        held = list(dict.fromkeys(keys))
        types = {type(key) for key in held}
        described = [kind for kind in types if issubclass(kind, BatchDescriptor)]
        if described and len(types) > 1 and covers is None:
            names = ", ".join(sorted(kind.__qualname__ for kind in types))
            raise TypeError(f"keys: expected keys of one type, got {names}")
        self._past_hits: dict[K, int] = dict(carry.hits) if carry else {}
        self._past_misses: dict[str, int] = dict(carry.misses) if carry else {}
        kind = described[0] if len(types) == 1 and described else None
        if not held:
            self._leaves = [Leaf(None, "no_keys", 0)]
            self.dispatch = _nothing(self._leaves[0])
            self._ordered: Callable[[], Sequence[K]] = lambda: ()
        elif kind is not None and covers is None and cost is None and _as_declared(kind):
            ordered: list[Any] = sorted(held, key=kind.cost)
            self.dispatch, self._leaves = tabulate(kind, ordered)
            self._ordered = lambda: ordered
        else:
            search = Search(held, covers, cost, kind)
            self._leaves = search.leaves
            self.dispatch = search.described if kind is not None else search.foreign
            self._ordered = search.ordered

    @property
    def hits(self) -> Mapping[K, int]:
        """Dispatches that returned each key; keys that are gone keep their count."""
        counts = dict(self._past_hits)
        for leaf in self._leaves:
            if leaf.key is not None:
                counts[leaf.key] = counts.get(leaf.key, 0) + leaf.count
        return counts

    @property
    def misses(self) -> Mapping[str, int]:
        """Dispatches that returned ``None``, by reason.

        The reason is the first field, in order of declaration, with which no captured key is left;
        ``"not_covered"`` where keys are searched; ``"no_keys"`` where there are none.
        """
        counts = dict(self._past_misses)
        for leaf in self._leaves:
            if leaf.key is None and leaf.count:
                counts[leaf.reason] = counts.get(leaf.reason, 0) + leaf.count
        return counts

    def nearest(self, key: Hashable, n: int = 3) -> tuple[K, ...]:
        """The captured keys that come closest to a missing one, closest first.

        Descriptors: fewest fields that differ, then the nearest token count. Other keys: those
        that print alike.
        """
        held = self._ordered()

        def distance(other: K) -> tuple[float, float]:
            if isinstance(key, BatchDescriptor) and type(other) is type(key):
                like = cast("BatchDescriptor", other)
                differing = sum(map(_differ, key._values, like._values))
                return differing, abs(key.num_tokens - like.num_tokens)
            return 1 - difflib.SequenceMatcher(None, repr(key), repr(other)).ratio(), 0

        return tuple(sorted(held, key=distance)[:n])


def _differ(one: Any, other: Any) -> bool:
    return bool(one != other)


def _as_declared(kind: type[BatchDescriptor]) -> bool:
    return kind.covers is BatchDescriptor.covers and kind.cost is BatchDescriptor.cost


def _nothing(leaf: Leaf) -> Callable[..., None]:
    # What the fields will be is not known yet, so none is refused.
    def dispatch(*_shape: Any, **_fields: Any) -> None:
        leaf.count += 1

    return dispatch
