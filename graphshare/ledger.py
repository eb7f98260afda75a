"""The states of one device: which of them hold what their owner last built, by owner."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from graphshare.memory import MemoryRanges

if TYPE_CHECKING:
    from graphshare.freshness import StateRecord
    from graphshare.reach import Reach

__all__ = ["Ledger", "OwnerBook", "ledger_for"]

_EMPTY = MemoryRanges.of(())


class OwnerBook:
    """All states of one owner on one device; by default a build may write any of them."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.version = 0
        self._records: dict[int, weakref.ref[StateRecord]] = {}
        self._union = _EMPTY
        self._union_version = 0

    def add(self, record: StateRecord) -> None:
        """Count one more state of the owner, for as long as it lives."""
        serial = record.serial
        book: weakref.ref[OwnerBook] = weakref.ref(self)

        def forget(_: object) -> None:
            this = book()
            if this is not None:
                this._records.pop(serial, None)
                this.version += 1

        self._records[serial] = weakref.ref(record, forget)
        self.version += 1

    def grew(self, leaves: MemoryRanges) -> None:
        """One of the states has leaves that it had not."""
        # Captured largest first, most states lie in the memory of the first: then what is
        # remembered of the footprint stays right, and a capture takes no time square in its keys.
        if self._union_version != self.version or not self._union.contains(leaves):
            self.version += 1

    def records(self) -> list[StateRecord]:
        """The states that are alive, oldest first."""
        found = (ref() for ref in list(self._records.values()))
        return [record for record in found if record is not None]

    def footprint(self) -> MemoryRanges:
        """Every leaf of every key of this owner."""
        if self._union_version != self.version:
            version, union = self.version, _EMPTY
            for record in self.records():
                if not record.released:
                    union = union.union(record.leaves)
            self._union, self._union_version = union, version
        return self._union


class Ledger:
    """The states of one device whose memory holds what their owner last built.

    A record leaves when it is spoilt or collected, so a dropped pool leaves no trace.

    Attributes:
        live: By number, weakly.
        epoch: Goes up with all that a refresh has to look at: a state that becomes fresh or stale,
            lies elsewhere or is read by another pool, a build that may write more, a lease that is
            stopped, a pool that was granted another state since.
        captures_under_way: Names of the pools of the device that are capturing.
    """

    def __init__(self) -> None:
        self.live: dict[int, weakref.ref[StateRecord]] = {}
        self.epoch = 0
        self.captures_under_way: list[str] = []
        self._books: weakref.WeakValueDictionary[int, OwnerBook] = weakref.WeakValueDictionary()
        self._remembered: list[Reach] = []

    def remember(self, reach: Reach) -> None:
        """Clear it when any build may write more, or any state lies elsewhere than now."""
        self._remembered.append(reach)

    def forget(self) -> None:
        """A build may write more, or a state lies elsewhere than it did."""
        for reach in self._remembered:
            reach.clear()
        self._remembered.clear()
        self.epoch += 1

    def others(self, record: StateRecord) -> list[StateRecord]:
        """The records that are in ``live``, without ``record``."""
        live = self.live
        if not live or (len(live) == 1 and record.serial in live):
            return []
        # Not tuple(): its allocation may collect garbage, and that may take records out, after
        # the iteration over the dictionary has begun.
        found = (ref() for ref in list(live.values()))
        return [each for each in found if each is not None and each is not record]

    def records(self) -> list[StateRecord]:
        """Return every state of every owner on the device that is alive."""
        books = list(self._books.values())
        return [record for book in books for record in book.records()]

    def book(self, owner: Any) -> OwnerBook:
        """Return the book of an owner; the same one while any pool or state uses it."""
        # By identity: owners need be neither hashable nor weakly referable. The book holds its
        # owner, so the number cannot be taken by another object while the book is alive.
        book = self._books.get(id(owner))
        if book is None:
            book = self._books[id(owner)] = OwnerBook(owner)
        return book


_ledgers: dict[torch.device, Ledger] = {}


def ledger_for(device: torch.device) -> Ledger:
    """Return the one ledger of a device."""
    return _ledgers.setdefault(device, Ledger())
