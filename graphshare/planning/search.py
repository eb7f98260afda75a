"""The best set of keys under a limit, exactly.

What the keys take of the limit is given a price, which turns the limit into a cost and the plan
into a shortest path. At any price the cheapest path is a bound from below: no set of keys within
the limit does less work than its price less that of the limit. The best price is found between two
sets, one within the limit and one beyond, as where the line through them is met. Mostly the bound
is met then. Where it is not, all sets of keys whose price is within a little of the bound are
listed by dynamic programming over (what is taken, work). The little grows until one of them is
within the limit and does work within that little of the bound: it is the best there is, since
every better one would be on the list.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

from graphshare.planning.chain import NOTHING, Choice, Room, both, combined

__all__ = ["Part", "TooTightError", "corners", "search"]

_ASIDE = 1.1
"""How far the other prices lie from the best one; found by trial, and of no effect on results."""

_EXACT = 1e-11
"""Relative error that sums and products of floating point numbers may have here."""


class Part(Protocol):
    """Batches and candidate keys that have nothing to do with those of other parts."""

    def best(self, price: float) -> Choice:
        """The cheapest set of keys at that price of what they take."""
        ...

    def front(self, rooms: Sequence[Room]) -> list[Choice]:
        """Every set of keys within all rooms that none equals or beats."""
        ...


class TooTightError(ValueError):
    """No set of keys serves all batches within the limit.

    Attributes:
        least: What the smallest set takes.
    """

    least: float

    def __init__(self, least: float) -> None:
        self.least = least
        super().__init__(f"all batches need at least {least:g}")


def search(parts: Sequence[Part], limit: float) -> Choice:
    """The least work of all sets of keys that take at most ``limit`` together.

    Raises:
        TooTightError: There is no such set.
    """
    limit += _EXACT * abs(limit)
    beyond = _best(parts, 0.0)
    if beyond.taken <= limit:
        return beyond
    within = _best(parts, _overwhelming(beyond))
    if within.taken > limit:
        raise TooTightError(within.taken)
    while True:
        price = (within.work - beyond.work) / (beyond.taken - within.taken)
        met = _best(parts, price)
        value = met.work + price * met.taken
        slackest = within.work + price * within.taken
        if value >= slackest - _EXACT * abs(slackest):
            break
        if met.taken <= limit:
            within = met
        else:
            beyond = met
    return _closed(parts, limit, price, value - price * limit, within)


def corners(parts: Sequence[Part], most: int) -> list[Choice]:
    """Sets of keys on the lower hull of work over what is taken, by what they take.

    Args:
        parts: Batches and candidates.
        most: How many sets, at most; spread out over the logarithm of what they take.
    """
    last = _best(parts, 0.0)
    if not last.taken:
        return [last]
    found = [_best(parts, _overwhelming(last)), last]
    closed: set[tuple[float, float]] = set()
    while len(found) < most:
        gaps = [
            (b.taken / a.taken, a, b)
            for a, b in itertools.pairwise(found)
            if b.taken > a.taken and (a.taken, b.taken) not in closed
        ]
        if not gaps:
            break
        _, a, b = max(gaps, key=lambda gap: gap[0])
        met = _best(parts, (a.work - b.work) / (b.taken - a.taken))
        if a.taken < met.taken < b.taken:
            found.insert(found.index(b), met)
        else:
            closed.add((a.taken, b.taken))
    return found if found[0].taken < found[-1].taken else found[:1]


def _best(parts: Sequence[Part], price: float) -> Choice:
    total = NOTHING
    for part in parts:
        total = both(total, part.best(price))
    return total


def _overwhelming(beyond: Choice) -> float:
    """A price at which taking less counts before all work."""
    return 1e10 * (1 + abs(beyond.work)) / beyond.taken


def _closed(
    parts: Sequence[Part], limit: float, price: float, bound: float, within: Choice
) -> Choice:
    """Close the gap between a bound from below and the best set that is known."""
    error = _EXACT * (abs(bound) + abs(price * limit))
    slack = (within.work - bound) / (1 << 16)
    # Other prices rule out beginnings that took too much, or too little for their work.
    bounds = [(price, bound)]
    if within.work - bound > error:
        for other in (price * _ASIDE, price / _ASIDE):
            least = _best(parts, other)
            bounds.append((other, least.work + other * (least.taken - limit)))
    while within.work - bound > error:
        slack = min(slack, within.work - bound)
        rooms = [Room(at, bound + slack - lower + error) for at, lower in bounds]
        for choice in combined([part.front(rooms) for part in parts], rooms):
            if choice.taken <= limit and choice.work < within.work:
                within = choice
        if within.work <= bound + slack:
            break
        slack *= 2
    return within
