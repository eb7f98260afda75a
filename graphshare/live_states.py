"""Which of a pool's states were refreshed last, and so may be fresh together."""

from __future__ import annotations

from graphshare.freshness import StateRecord
from graphshare.lease import Staleness, Why, Writer

__all__ = ["LiveStates"]


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
