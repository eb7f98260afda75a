"""Mixed keys and uniform keys together.

A uniform batch runs on the key with fewest tokens, so on the next larger mixed key unless a uniform
key of its length comes first. Between two neighbouring mixed keys, then, the uniform lengths have
nothing to do with each other, nor with what lies outside: a batch below a mixed key never runs on
a key above it. So the plan is a path over the sizes of mixed keys, and a step of it costs what its
mixed batches cost, plus for each uniform length the best keys between the two sizes, with the
upper mixed key for what is larger than those: a path of its own (:mod:`.chain`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache

from graphshare.descriptor import BatchDescriptor
from graphshare.planning.chain import NOTHING, Chain, Choice, Room, both, cheapest, combined, within

__all__ = ["Coupled"]

_MAX_PRICED = 4  # tables of all steps, that are large


class Coupled:
    """The batches of one number of LoRA adapters, where uniform keys are worth having.

    Args:
        mixed: Batches that only mixed keys serve, by size.
        uniform: For each uniform length, its batches, which run on the cheaper of the two kinds.
        cost: What a batch costs on a mixed key of a size; more than on a uniform one.
        takes: What a mixed key of a size takes of the limit.
        key: The mixed key of a size.
    """

    def __init__(
        self,
        mixed: dict[int, int],
        uniform: Sequence[Chain],
        cost: Callable[[int], float],
        takes: Callable[[int], float],
        key: Callable[[int], BatchDescriptor],
    ) -> None:
        self._uniform = uniform
        self._sizes = sorted({*mixed, *(size for chain in uniform for size in chain.sizes)})
        self._batches = [0]
        for size in self._sizes:
            self._batches.append(self._batches[-1] + mixed.get(size, 0))
        self._costs = [cost(size) for size in self._sizes]
        self._takes = [takes(size) for size in self._sizes]
        self._key = cache(key)
        # The position in each chain that a node stands for: node 0 is before all sizes, node v
        # a mixed key of size v - 1.
        self._places = [
            [0, *(bisect_right(chain.sizes, size) for size in self._sizes)] for chain in uniform
        ]
        self._priced: dict[float, tuple[list[list[float]], list[float]]] = {}
        self._started: dict[float, list[float]] = {}

    def best(self, price: float) -> Choice:
        """The cheapest set of keys at that price of what they take."""
        arcs, to_end = self._arcs(price)
        choice, v = NOTHING, 0
        top = len(self._sizes) + 1
        while v != top:
            rest = to_end[v]
            after = min(
                range(top, v, -1),  # the largest step of equals: fewer keys
                key=lambda w, v=v, rest=rest: abs(arcs[v][w - v - 1] + to_end[w] - rest),
            )
            parts = [choice, *(self._inner(q, v, after, price) for q in range(len(self._uniform)))]
            choice = Choice(
                sum(part.taken for part in parts),
                sum(part.work for part in parts),
                tuple(part.keys for part in parts),
            )
            choice = self._mixed_step(choice, v, after)
            v = after
        return choice

    def front(self, rooms: Sequence[Room]) -> list[Choice]:
        """Every set of keys within all rooms that none equals or beats."""
        top = len(self._sizes) + 1
        bounds: list[tuple[float, list[list[float]], list[float], list[float], float]] = []
        for price, slack in rooms:
            arcs, to_end = self._arcs(price)
            if price not in self._started:
                self._started[price] = _from_start(arcs)
            bounds.append((price, arcs, self._started[price], to_end, to_end[0] + slack))
        nodes = [
            v
            for v in range(top + 1)
            if all(start[v] + rest[v] <= most for _, _, start, rest, most in bounds)
        ]
        reached: dict[int, list[Choice]] = {v: [] for v in nodes}
        for at, v in enumerate(nodes):
            choices = reached[v] = [NOTHING] if v == 0 else cheapest(reached[v])
            for w in nodes[at + 1 :] if choices else ():
                # What a beginning may cost at v, if all is for the best from there on.
                ends = [
                    (price, most - arcs[v][w - v - 1] - rest[w])
                    for price, arcs, _, rest, most in bounds
                ]
                live = [choice for choice in choices if within(choice, ends)]
                if not live:
                    continue
                inner = [
                    Room(price, end - min(c.work + price * c.taken for c in live))
                    for price, end in ends
                ]
                ends = [(price, most - rest[w]) for price, _, _, rest, most in bounds]
                reached[w] += [
                    joint
                    for b in self._between(v, w, inner)
                    for a in live
                    if within(joint := self._mixed_step(both(a, b), v, w), ends)
                ]
        return reached[top]

    def _between(self, v: int, w: int, rooms: Sequence[Room]) -> list[Choice]:
        """The uniform keys between two nodes."""
        fronts = [
            chain.front(rooms, places[v], self._place(q, w), self._fallback(w))
            for q, (chain, places) in enumerate(zip(self._uniform, self._places, strict=True))
        ]
        return combined(fronts, rooms)

    def _mixed_step(self, choice: Choice, v: int, w: int) -> Choice:
        if w > len(self._sizes):
            return choice
        return Choice(
            choice.taken + self._takes[w - 1],
            choice.work + (self._batches[w] - self._batches[v]) * self._costs[w - 1],
            (choice.keys, self._key(self._sizes[w - 1])),
        )

    def _inner(self, q: int, v: int, w: int, price: float) -> Choice:
        return self._uniform[q].best(
            price, self._places[q][v], self._place(q, w), self._fallback(w)
        )

    def _place(self, q: int, w: int) -> int:
        places = self._places[q]
        return places[min(w, len(places) - 1)]

    def _fallback(self, w: int) -> float | None:
        return self._costs[w - 1] if w <= len(self._sizes) else None

    def _arcs(self, price: float) -> tuple[list[list[float]], list[float]]:
        """The price of each step between nodes, and of the best rest from each node.

        The last node stands for the end, above all mixed keys.
        """
        known = self._priced.get(price)
        if known is not None:
            return known
        infinite = float("inf")
        size = len(self._sizes)
        inner = [
            chain.rows(
                price,
                [
                    *zip(places[1:], self._costs, strict=True),
                    (places[-1], infinite),
                ],
            )
            for chain, places in zip(self._uniform, self._places, strict=True)
        ]
        priced = [price * takes for takes in self._takes]
        arcs: list[list[float]] = []
        for v in range(size + 1):
            before = self._batches[v]
            row = [
                (batches - before) * cost + own
                for batches, cost, own in zip(
                    self._batches[v + 1 :], self._costs[v:], priced[v:], strict=True
                )
            ]
            row.append(0.0 if before == self._batches[-1] else infinite)
            for rows, places in zip(inner, self._places, strict=True):
                row = [a + b for a, b in zip(row, rows[places[v]][v:], strict=True)]
            arcs.append(row)
        to_end = [0.0] * (size + 2)
        for v in range(size, -1, -1):
            to_end[v] = min(a + b for a, b in zip(arcs[v], to_end[v + 1 :], strict=True))
        if len(self._priced) >= _MAX_PRICED:
            self._priced.clear()
            self._started.clear()
        self._priced[price] = arcs, to_end
        return arcs, to_end


def _from_start(arcs: list[list[float]]) -> list[float]:
    """The price of the best keys up to each node."""
    values = [0.0] + [float("inf")] * len(arcs)
    for v, row in enumerate(arcs):
        begun = values[v]
        for w, cost in enumerate(row, v + 1):
            if begun + cost < values[w]:
                values[w] = begun + cost
    return values
