"""Refreshes: one function for each captured key, with all that it needs at hand.

A build leaves the processor's caches cold, so every step of Python after it counts double. What
can be decided when a key is registered is decided then, and what seldom happens is out of line.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from graphshare.entry import Entry
from graphshare.freshness import StateRecord
from graphshare.lease import Staleness, Why, Writer
from graphshare.owner import Phase, name_build
from graphshare.reach import Reach
from graphshare.refusals import Refusals
from graphshare.state import LayoutDifference
from graphshare.statistics import Tally
from graphshare.watch import Watch

__all__ = ["LiveStates", "differences", "prepare_refresh", "refuse_refresh"]


class LiveStates:
    """The states of one pool that were refreshed last, at most ``limit`` of them fresh (rule 3).

    Args:
        limit: The pool's ``live_keys``.

    Attributes:
        newest: The one refreshed last, unless it was released.
    """

    __slots__ = ("_limit", "_records", "newest")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._records: list[StateRecord] = []
        self.newest: StateRecord | None = None

    def supersede(self, record: StateRecord, by: Writer) -> None:
        """``record`` was refreshed: the oldest go, where there are too many."""
        fresh = [each for each in self._records if each is not record and each.why is None]
        while len(fresh) >= self._limit:
            fresh.pop(0).spoil(Why(Staleness.SUPERSEDED, by), first=True)
        fresh.append(record)
        self._records = fresh
        self.newest = record

    def drop_released(self) -> None:
        """Hold no state that was let go."""
        self._records = [record for record in self._records if not record.released]
        self.newest = self._records[-1] if self._records else None


def differences(
    refuse: Refusals, record: StateRecord, key: Hashable, state: Any, doing: str
) -> list[LayoutDifference]:
    """Return in what a rebuilt state differs from what its graphs bake in.

    Raises:
        AddressChangedError: It has a tensor without an address.
    """
    if record.checker is None:
        return []
    try:
        return record.checker.differences(state)
    except TypeError as error:
        raise refuse.without_address(key, error, doing) from error


def refuse_refresh(entry: Entry[Any], refuse: Refusals) -> Callable[[Any], None]:
    """Return the refresh of a borrowed key."""
    record, key = entry.record, entry.key

    def refused(_: Any) -> None:
        raise refuse.ownership(
            "refresh of a borrowed key",
            expected=f"a refresh by {record.pool_name}, which owns the state",
            got=f"one by {refuse.name}",
            key=key,
            remedy=f"Refresh {record.pool_name}; this pool follows",
        )

    return refused


def prepare_refresh(
    entry: Entry[Any],
    *,
    refuse: Refusals,
    tally: Tally,
    latest: LiveStates,
    device: torch.device,
) -> Callable[[Any], None]:
    """Return ``refresh(batch)`` for one key whose state its pool owns.

    It holds neither the pool nor the entry, so that dropping a pool frees it.

    Args:
        entry: With its lease.
        refuse: Makes the pool's errors.
        tally: The pool's counters.
        latest: The pool's states that were refreshed last.
        device: Of the pool.
    """
    record, key, lease, ledger = entry.record, entry.key, entry.lease, entry.record.ledger
    owner, serial = record.book.owner, record.serial
    by, replay = (refuse.name, key), Phase.REPLAY
    clock, limit = lease.clock, lease.limit
    reach, overwritten = Reach(), Why(Staleness.OVERWRITTEN, by)
    arrivals = -1
    watch = record.watches[key] = Watch()

    def refresh(batch: Any) -> None:
        nonlocal arrivals
        if record.order is not None:
            record.order.before_build()
        if ledger.arrivals != arrivals:
            reach.overwrite(record, key, overwritten)
            arrivals = ledger.arrivals
        try:
            state = owner.build(key, batch, replay)
        except BaseException as error:
            record.spoil(Why(Staleness.BUILD_FAILED, by))
            name_build(error, refuse.name, key, replay)
            raise
        if state is not watch.state or record.order is not None or not watch.unmoved():
            checker = record.checker
            if record.wants_check and checker is not None:
                if not checker.matches(state):
                    _look_closely(record, key, state, by, refuse, tally, device)
                if watch.chances:
                    watch.learn(state, checker)
            if record.order is not None:
                record.order.after_build()
        record.state = state
        if record.why is not None:
            record.revive()
        # As `Lease.grant`, without the call.
        if lease.left != limit:
            lease.granted += limit - lease.left
            lease.left = limit
        lease.why = None
        clock.latest = serial
        for borrower in record.borrowers:
            if borrower.left != borrower.limit or borrower.why is not None:
                borrower.grant(serial)
            else:
                borrower.clock.latest = serial
        tally.refreshes += 1
        if latest.newest is not record:
            latest.supersede(record, by)

    return refresh


def _look_closely(
    record: StateRecord,
    key: Hashable,
    state: Any,
    by: Writer,
    refuse: Refusals,
    tally: Tally,
    device: torch.device,
) -> None:
    """Refuse what a build returned, unless it is right after all."""
    # Before the look, which may raise: the owner has written.
    record.spoil(Why(Staleness.BUILD_FAILED, by))
    tally.refused += 1
    found = differences(refuse, record, key, state, "refresh")
    if found:
        record.strayed(state, by, device)
        raise refuse.layout(key, found, keys=record.keys)
    tally.refused -= 1
