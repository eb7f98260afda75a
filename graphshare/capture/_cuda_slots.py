"""The addresses in CUDA graphs by slot, and where a move takes them.

The words of a graph that held one address when it was read are a slot. Graphs that were captured
together read the same weights, caches and buffers, so most have the same addresses in their slots:
where a move takes those is worked out once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from functools import cached_property
from typing import NamedTuple

import torch

from graphshare.capture.moves import Moves

__all__ = ["Addresses", "Outcome", "outcome_of"]


class Addresses:
    """An address for each slot of a graph; two slots may have come to hold the same one.

    Not to be changed: graphs share it.

    Args:
        by_slot: The addresses.

    Attributes:
        by_slot: The same.
    """

    def __init__(self, by_slot: Iterable[int]) -> None:
        self.by_slot = tuple(by_slot)

    @cached_property
    def order(self) -> list[int]:
        """The slots in ascending order of their addresses."""
        return sorted(range(len(self.by_slot)), key=self.by_slot.__getitem__)

    @cached_property
    def tensor(self) -> torch.Tensor:
        """The addresses, ``[slots]``, int64, on the host."""
        return torch.tensor(self.by_slot, dtype=torch.int64, device="cpu")


class Outcome(NamedTuple):
    """What some moves do to some addresses.

    Attributes:
        slots: Those that move, in ascending order.
        pairs: Numbers of the pairs that they move with.
        after: The addresses afterwards.
    """

    slots: tuple[int, ...]
    pairs: AbstractSet[int]
    after: Addresses


def outcome_of(moves: Moves, addresses: Addresses) -> Outcome:
    """Return what moves do to addresses; the same object each time."""
    found = moves.outcomes.get(addresses)
    if found is None:
        found = moves.outcomes[addresses] = _outcome(moves, addresses)
    return found


def _outcome(moves: Moves, addresses: Addresses) -> Outcome:
    order = addresses.order
    after = list(addresses.by_slot)
    places, pairs = moves.moving([after[slot] for slot in order])
    for place, pair in zip(places, pairs, strict=True):
        after[order[place]] += moves.steps[pair]
    slots = tuple(sorted(order[place] for place in places))
    return Outcome(slots, frozenset(pairs), Addresses(after) if slots else addresses)
