"""Which pools replay on one another's states, and so move together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from graphshare.core import PoolCore
from graphshare.entry import Entry
from graphshare.holdings import Holdings

__all__ = ["Member", "family_of"]


class Member:
    """What one pool of a family holds.

    Attributes:
        name: The pool's name.
        holdings: Its keys.
    """

    __slots__ = ("holdings", "name")

    def __init__(self, holdings: Holdings[Any]) -> None:
        self.holdings = holdings
        self.name = holdings.refuse.name

    def entries(self) -> list[Entry[Any]]:
        """Return the keys that are held, those included whose state was released."""
        return list(self.holdings.entries.values())


def family_of(pools: Iterable[PoolCore[Any]]) -> list[Member]:
    """Return the pools, and all that lend to them or borrow from them, over any number of loans.

    What was captured on a loan counts, whether the loan is still open or not: those graphs are on
    the same memory.
    """
    found: dict[int, Member] = {}
    stack: list[Holdings[Any]] = [pool.holdings for pool in pools]
    while stack:
        holdings = stack.pop(0)
        if id(holdings) in found:
            continue
        found[id(holdings)] = Member(holdings)
        for record in holdings.records():
            for holder in (*(lease.holder for lease in record.leases), *record.former):
                other: Holdings[Any] | None = holder()
                # One that was on a loan may have captured its keys on other states since.
                if other is not None and other.reads(record):
                    stack.append(other)
    return list(found.values())
