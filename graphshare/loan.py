"""What a borrowing pool knows of its lender."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from graphshare.core import PoolCore
from graphshare.entry import Entry, View
from graphshare.errors import KeyMismatchError, SpecMismatchError
from graphshare.holdings import Source
from graphshare.owner import AttentionSpec
from graphshare.refusals import Refusals

__all__ = ["Loan", "lenders", "lends_anything"]


class Loan:
    """What a consumer knows of its lender. Held by the consumer, and holds the producer."""

    __slots__ = ("_key", "_view", "_when", "closed", "producer")

    def __init__(
        self,
        producer: PoolCore[Any],
        key: Callable[[Any], Hashable] | None,
        view: View | None,
        when: Callable[[Any], bool] | None,
    ) -> None:
        self.producer = producer
        self.closed = False
        self._key, self._view, self._when = key, view, when

    def lends(self, key: Hashable) -> bool:
        """Whether ``key`` is to be borrowed."""
        return self._when is None or bool(self._when(key))

    def source(self, key: Hashable, refuse: Refusals) -> Source | None:
        """Return where the lender's state for a consumer's key lies, ``None`` if there is none.

        Raises:
            ReleasedStateError: The lender was closed, or let that state go.
        """
        if self.producer.closed:
            raise refuse.closed("capture", key, pool=self.producer.name)
        entry = self.lender_entry(key)
        if entry is None:
            return None
        if entry.lease.ended:
            raise refuse.released(
                key, f"{self.producer.name} no longer has this state", doing="capture"
            )
        views = entry.views if self._view is None else (*entry.views, self._view)
        return Source(key, entry.owner_key, entry.record, views, borrowed=True)

    def lender_entry(self, key: Hashable) -> Entry[Any] | None:
        """Return the lender's own graph for a consumer's key, ``None`` if there is none."""
        return self.producer.holdings.find(key if self._key is None else self._key(key))

    def check_specs(self, spec: AttentionSpec | None, refuse: Refusals) -> bool:
        """Compare a borrower's spec with those of all its lenders; say whether any was stated.

        Raises:
            SpecMismatchError: They differ in a field that the kernel bakes in.
        """
        return _check_specs(self.producer, spec, refuse)

    def no_state(self, missing: Sequence[Hashable], refuse: Refusals) -> KeyMismatchError:
        """Return the error for consumer's keys that the lender has no state for."""
        producer = self.producer
        wanted = missing[0] if self._key is None else self._key(missing[0])
        nearest = producer.holdings.dispatcher.nearest(wanted) if len(producer) else ()
        remedy = (
            f"Capture them in {producer.name} first, map them with share_states(key=...), or leave "
            "them out with when=..."
        )
        if not lends_anything(producer):
            remedy = (
                f"{producer.name} has neither an owner nor a lender: were the pools given as "
                "share_states(producer, consumer), in this order? If so, declare its own loan, and "
                "capture there first"
            )
        return refuse.counted(
            KeyMismatchError(
                f"{refuse.name}: capture of keys that {producer.name} has no state for",
                expected="keys that are captured there (nearest: "
                + (", ".join(map(repr, nearest)) or "none, it has captured nothing")
                + ")",
                got=", ".join(map(repr, missing)),
                key=missing[0] if len(missing) == 1 else None,
                consequence="There is no state to borrow, and the graphs would run on nothing",
                remedy=remedy,
                missing=tuple(missing),
                nearest=tuple(nearest),
            )
        )

    def close(self) -> None:
        """Mark it ended."""
        self.closed = True


def lends_anything(pool: PoolCore[Any]) -> bool:
    """Whether a pool has states, or can come to have some as it stands."""
    return bool(len(pool)) or pool.owner is not None or pool.loan is not None


def lenders(pool: PoolCore[Any]) -> Iterator[PoolCore[Any]]:
    """Yield a pool, its lender, its lender's lender, and so on."""
    current: PoolCore[Any] | None = pool
    while current is not None:
        yield current
        current = current.loan.producer if current.loan is not None else None


def _check_specs(producer: PoolCore[Any], spec: AttentionSpec | None, refuse: Refusals) -> bool:
    mine = spec
    stated = [pool for pool in lenders(producer) if pool.spec is not None]
    if mine is None or not stated:
        return False
    for pool in stated:
        theirs = pool.spec
        differing = theirs.differing(mine) if theirs is not None else ()
        if differing:
            raise refuse.counted(
                SpecMismatchError(
                    f"{refuse.name}: cannot borrow from {pool.name}",
                    expected=", ".join(f"{name}={getattr(theirs, name)}" for name in differing),
                    got=", ".join(f"{name}={getattr(mine, name)}" for name in differing),
                    consequence="The kernel bakes in a plan for the lender's values and would "
                    "compute with them",
                    remedy="Let this pool's own owner build its states",
                    fields=differing,
                )
            )
    return True
