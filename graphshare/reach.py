"""What is remembered of whom a build writes over: most refreshes find the same states there."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from graphshare.lease import Why

if TYPE_CHECKING:
    from graphshare.freshness import StateRecord

__all__ = ["Reach"]


class Reach:
    """Which states a build for one key writes over, and which it leaves alone, as far as known.

    By the numbers of the states. Holds none of them: the ledger holds it.
    """

    __slots__ = ("_spared", "_struck", "_version")

    def __init__(self) -> None:
        self._spared: set[int] = set()
        self._struck: set[int] = set()
        self._version = -1

    def clear(self) -> None:
        """A build may write elsewhere, or a state lies elsewhere."""
        self._spared.clear()
        self._struck.clear()

    def overwrite(self, record: StateRecord, key: Hashable, why: Why) -> None:
        """A refresh is about to write: make stale, of other states, what it may write over.

        Args:
            record: Of the state that is refreshed.
            key: The owner's key.
            why: The cause of their staleness.
        """
        ledger, spared = record.ledger, self._spared
        live = ledger.live
        if spared.issuperset(live):
            return
        if not spared:
            spared.add(record.serial)
            ledger.remember(self)
        if self._version != record.book.version:  # a build may write less than it might
            self._version = record.book.version
            self._struck.clear()
        # A set of numbers first: what runs below may take states out of the dictionary.
        for serial in live.keys() - spared:
            ref = live.get(serial)
            other = None if ref is None else ref()
            if other is None:
                continue
            if serial not in self._struck:
                if not record.overwrites(other, key):
                    spared.add(serial)
                    continue
                self._struck.add(serial)
            other.spoil(why, first=True)
