"""Batches of one kind, and which of their sizes to capture: a shortest path.

A *position* ``p`` of a chain says that its first ``p`` sizes are dealt with. A step from position
``p`` to ``r`` is a key of size ``sizes[r - 1]``, on which the batches of the sizes between run. So
a set of keys is a path from 0 to the end, its work the sum over its steps. What a key takes of the
limit is priced (``price``), which leaves a plain shortest path; a step's work is a number of
batches times what one costs, so that the best predecessor is found on the lower envelope of
lines, and the whole takes linear time.

``front`` then lists every path that is within a given distance of the cheapest, at each of several
prices, and that no other beats both in work and in what it takes. All nodes and steps that no such
path can use are left out first, and so are beginnings that it cannot have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

from graphshare.descriptor import BatchDescriptor

__all__ = ["NOTHING", "Chain", "Choice", "Room", "both", "cheapest", "combined", "flat", "within"]


class Choice(NamedTuple):
    """A set of keys.

    Attributes:
        taken: What they take of the limit.
        work: What all steps cost on them.
        keys: The keys, as a nest of pairs; see :func:`flat`.
    """

    taken: float
    work: float
    keys: Any


NOTHING = Choice(0, 0, None)


def flat(keys: Any) -> list[BatchDescriptor]:
    """The keys of a nest of pairs."""
    found: list[BatchDescriptor] = []
    left = [keys]
    while left:
        one = left.pop()
        if isinstance(one, BatchDescriptor):
            found.append(one)
        elif one is not None:
            left += one
    return found


def cheapest(choices: Iterable[Choice]) -> list[Choice]:
    """Those that no other equals or beats in work and in what it takes, by what they take."""
    kept: list[Choice] = []
    for choice in sorted(choices, key=_order):
        if not kept or choice.work < kept[-1].work:
            kept.append(choice)
    return kept


def _order(choice: Choice) -> tuple[float, float]:
    return choice.taken, choice.work


class Room(NamedTuple):
    """How far a set of keys may be from the cheapest one, at one price of what keys take.

    Attributes:
        price: Of what the keys take.
        slack: In units of work.
    """

    price: float
    slack: float


def combined(fronts: Sequence[Sequence[Choice]], rooms: Sequence[Room]) -> list[Choice]:
    """One of each front, together: those within each room."""
    totals = [NOTHING]
    for front in fronts:
        if not front:
            return []
    rests = [
        [min(c.work + price * c.taken for c in front) for front in fronts] for price, _ in rooms
    ]
    for at, front in enumerate(fronts):
        ends = [
            (price, sum(rest) + slack - sum(rest[at + 1 :]))
            for (price, slack), rest in zip(rooms, rests, strict=True)
        ]
        totals = cheapest(joint for a in totals for b in front if within(joint := both(a, b), ends))
    return totals


def both(one: Choice, other: Choice) -> Choice:
    """Two sets of keys together."""
    return Choice(one.taken + other.taken, one.work + other.work, (one.keys, other.keys))


def within(choice: Choice, ends: Iterable[tuple[float, float]]) -> bool:
    """Whether at each price the choice costs at most so much."""
    taken, work, _ = choice
    for price, end in ends:  # noqa: SIM110 - all() takes twice the time, and this is what counts
        if work + price * taken > end:
            return False
    return True


class Envelope:
    """Least value of lines, added by falling slope and asked at rising places."""

    __slots__ = ("_at", "heights", "marks", "slopes")

    def __init__(self) -> None:
        self.slopes: list[float] = []
        self.heights: list[float] = []
        self.marks: list[int] = []
        self._at = 0

    def add(self, slope: float, height: float, mark: int) -> None:
        """Add ``slope * x + height``; ``slope`` is at most that of the last line."""
        slopes, heights, marks = self.slopes, self.heights, self.marks
        if slopes and slopes[-1] == slope:
            if heights[-1] <= height:
                return
            slopes.pop()
            heights.pop()
            marks.pop()
        while len(slopes) > 1:
            m1, b1, m2, b2 = slopes[-2], heights[-2], slopes[-1], heights[-1]
            # The last line is nowhere below both its neighbours.
            if (height - b1) * (m1 - m2) > (b2 - b1) * (m1 - slope):
                break
            slopes.pop()
            heights.pop()
            marks.pop()
        slopes.append(slope)
        heights.append(height)
        marks.append(mark)

    def least(self, x: float) -> tuple[float, int]:
        """The least value at ``x``, and the mark of a line that has it."""
        slopes, heights = self.slopes, self.heights
        last = len(slopes) - 1
        at = min(self._at, last)
        value = slopes[at] * x + heights[at]
        while at < last:
            other = slopes[at + 1] * x + heights[at + 1]
            if other > value:
                break
            at += 1
            value = other
        self._at = at
        return value, self.marks[at]


class Chain:
    """Batches that run on the next larger key of a row of keys.

    Args:
        counts: Batches by size in tokens, at least one of each size.
        cost: What one batch costs on a key of a size; grows with the size.
        takes: What a key of a size takes of the limit.
        key: The key of a size.

    Attributes:
        sizes: The sizes of batches, ascending: no other need be captured, since a key between two
            of them may shrink to the smaller one, on which the same batches cost less.
        batches: Number of batches of the first ``p`` sizes, for each position ``p``.
        costs: What a batch costs on each size.
        takes: What a key of each size takes.
    """

    def __init__(
        self,
        counts: dict[int, int],
        cost: Callable[[int], float],
        takes: Callable[[int], float],
        key: Callable[[int], BatchDescriptor],
    ) -> None:
        self.sizes = sorted(counts)
        self.batches = [0]
        for size in self.sizes:
            self.batches.append(self.batches[-1] + counts[size])
        self.costs = [cost(size) for size in self.sizes]
        self.takes = [takes(size) for size in self.sizes]
        self._key = cache(key)

    def best(
        self, price: float, lo: int = 0, hi: int | None = None, fallback: float | None = None
    ) -> Choice:
        """The cheapest set of keys for the batches from position ``lo`` to ``hi``.

        Args:
            price: Of what the keys take.
            lo: Position before the first size.
            hi: Position after the last; by default all.
            fallback: What a batch costs that is larger than all keys; by default there must be
                a key for it.
        """
        end = len(self.sizes) if hi is None else hi
        _, following = self._to_end(price, lo, end, fallback)
        choice, p = NOTHING, lo
        while p < end:
            r = following[p - lo]
            if r < 0:
                work = (self.batches[end] - self.batches[p]) * (fallback or 0)
                return Choice(choice.taken, choice.work + work, choice.keys)
            choice = self._step(choice, p, r)
            p = r
        return choice

    def front(
        self,
        rooms: Sequence[Room],
        lo: int = 0,
        hi: int | None = None,
        fallback: float | None = None,
    ) -> list[Choice]:
        """Every set of keys within all rooms that none equals or beats.

        Args:
            rooms: How far from the cheapest, at one price or several.
            lo: As in :meth:`best`.
            hi: As in :meth:`best`.
            fallback: As in :meth:`best`.
        """
        end = len(self.sizes) if hi is None else hi
        if lo == end:
            return [NOTHING]
        batches = self.batches
        bounds: list[tuple[float, list[float], list[float], float]] = []
        for price, slack in rooms:
            to_end = self._to_end(price, lo, end, fallback)[0]
            bounds.append((price, self._from_start(price, lo, end), to_end, to_end[0] + slack))
        nodes = [
            p
            for p in range(lo, end + 1)
            if all(start[p - lo] + rest[p - lo] <= most for _, start, rest, most in bounds)
        ]
        reached: dict[int, list[Choice]] = {p: [] for p in nodes}
        found: list[Choice] = []
        for at, p in enumerate(nodes):
            choices = [NOTHING] if p == lo else cheapest(reached.pop(p))
            if p == end:
                found += choices
                break
            if fallback is not None:
                work = (batches[end] - batches[p]) * fallback
                ends = [(price, most - work) for price, _, _, most in bounds]
                found += [
                    Choice(c.taken, c.work + work, c.keys) for c in choices if within(c, ends)
                ]
            for r in nodes[at + 1 :] if choices else ():
                work = (batches[r] - batches[p]) * self.costs[r - 1]
                takes = self.takes[r - 1]
                ends: list[tuple[float, float]] = []
                for price, start, rest, most in bounds:
                    left = most - work - price * takes - rest[r - lo]
                    if start[p - lo] > left:
                        break
                    ends.append((price, left))
                else:
                    reached[r] += [self._step(c, p, r) for c in choices if within(c, ends)]
        return cheapest(found)

    def _step(self, choice: Choice, p: int, r: int) -> Choice:
        return Choice(
            choice.taken + self.takes[r - 1],
            choice.work + (self.batches[r] - self.batches[p]) * self.costs[r - 1],
            (choice.keys, self._key(self.sizes[r - 1])),
        )

    def _to_end(
        self, price: float, lo: int, end: int, fallback: float | None
    ) -> tuple[list[float], list[int]]:
        """For each position from ``lo`` the price of the best rest, and the next position.

        The next position is negative where the fallback takes the rest.
        """
        batches, costs, takes = self.batches, self.costs, self.takes
        lines = Envelope()
        if fallback is not None:
            lines.add(fallback, batches[end] * fallback, -1)
        values = [0.0] * (end - lo + 1)
        following = [-1] * (end - lo + 1)
        for p in range(end - 1, lo - 1, -1):
            r = p + 1
            lines.add(costs[p], batches[r] * costs[p] + price * takes[p] + values[r - lo], r)
            values[p - lo], following[p - lo] = lines.least(-batches[p])
        return values, following

    def _from_start(self, price: float, lo: int, end: int) -> list[float]:
        """For each position from ``lo`` the price of the best keys up to it, the last one there."""
        batches, costs, takes = self.batches, self.costs, self.takes
        lines = Envelope()
        values = [0.0]
        lines.add(-batches[lo], 0.0, lo)
        for p in range(lo + 1, end + 1):
            cost = costs[p - 1]
            value = lines.least(cost)[0] + batches[p] * cost + price * takes[p - 1]
            values.append(value)
            lines.add(-batches[p], value, p)
        return values

    def rows(self, price: float, caps: Sequence[tuple[int, float]]) -> list[list[float]]:
        """The price of the best keys from each position to each cap.

        Args:
            price: Of what the keys take.
            caps: By rising size: a position, and what a batch costs that is larger than all keys
                below it. Infinite: there must be a key for it.

        Returns:
            ``rows[lo][j]`` for position ``lo`` and cap ``j``; 0 where there is nothing between.
        """
        return [self._row(price, lo, caps) for lo in range(len(self.sizes) + 1)]

    def _row(self, price: float, lo: int, caps: Sequence[tuple[int, float]]) -> list[float]:
        batches, costs, takes = self.batches, self.costs, self.takes
        keys, others = Envelope(), Envelope()
        keys.add(-batches[lo], 0.0, lo)
        # The same lines, asked at other places, each rising.
        others.slopes, others.heights, others.marks = keys.slopes, keys.heights, keys.marks
        row: list[float] = []
        p, last = lo, 0.0
        for hi, cost in caps:
            if hi <= lo:
                row.append(0.0)
                continue
            while p < hi:
                own = costs[p]
                p += 1
                last = keys.least(own)[0] + batches[p] * own + price * takes[p - 1]
                keys.add(-batches[p], last, p)
            if cost == float("inf"):
                row.append(last)
            else:
                row.append(others.least(cost)[0] + batches[p] * cost)
        return row
