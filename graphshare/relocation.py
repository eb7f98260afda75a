"""A captured state on other memory, after its graphs were put there."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from graphshare.capture.moves import Moves
from graphshare.freshness import StateRecord
from graphshare.lease import Staleness, Why, Writer
from graphshare.memory import MemoryRanges
from graphshare.state import LayoutChecker, tensors_by_use, with_tensors

__all__ = ["Relocation", "relocation_of"]


class Relocation:
    """A state on other memory, worked out beforehand: :meth:`commit` cannot fail.

    Args:
        record: Of the state.
        states: It as captured and as last built, with the tensors that replace those that move;
            ``None`` if only what its owner declared to write has moved.
        declared: What builds may write, by the owner's key.
        device: Of the pool.
    """

    def __init__(
        self,
        record: StateRecord,
        states: tuple[Any, Any] | None,
        declared: dict[Hashable, MemoryRanges],
        device: torch.device,
    ) -> None:
        self.record = record
        self.states = states
        self._declared = declared
        self._checker: LayoutChecker | None = None
        self._reads: list[torch.Tensor] = []
        self._leaves = MemoryRanges()
        if states is not None:
            rules = getattr(record.book.owner, "host_values", None)
            if record.checker is not None:
                self._checker = LayoutChecker(states[0], device, rules, prepared=False)
            self._reads, leaves = tensors_by_use(states[0], device, rules)
            self._leaves = MemoryRanges.of(leaves)

    def commit(self, by: Writer) -> None:
        """Let the record stand for it; nobody has built it there, so it is stale (rule 6).

        Args:
            by: Whose rebind it was.
        """
        record = self.record
        if self.states is not None:
            record.stand_for(self.states, self._checker, self._reads, self._leaves)
            record.spoil(Why(Staleness.MOVED, by))
        record.redeclare(self._declared)


def relocation_of(record: StateRecord, moves: Moves, device: torch.device) -> Relocation | None:
    """Work out what a state is on other memory; ``None`` if nothing of it moves.

    Raises:
        SplitError: A leaf moves only in part.
    """
    before = record.declared()
    declared = {key: moves.memory(each) for key, each in before.items()}
    captured, state = with_tensors((record.captured, record.state), moves.tensor)
    if captured is not record.captured:
        return Relocation(record, (captured, state), declared, device)
    return None if declared == before else Relocation(record, None, declared, device)
