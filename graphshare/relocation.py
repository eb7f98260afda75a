"""A captured state on other memory, after its graphs were put there."""

from __future__ import annotations

from typing import Any

import torch

from graphshare.capture.moves import Moves
from graphshare.freshness import StateRecord
from graphshare.lease import Staleness, Why, Writer
from graphshare.state import LayoutChecker, with_tensors

__all__ = ["Relocation", "relocation_of"]


class Relocation:
    """A state on other memory, worked out beforehand: :meth:`commit` cannot fail.

    Args:
        record: Of the state.
        states: It as captured and as last built, with the tensors that replace those that move;
            ``None`` if it was captured on none of the memory that moves.
        built: It as last built. Leaves that nobody reads may lie elsewhere than at capture, and so
            may all of a build that was refused.
        tensors: Those of them that a graph on this state reads.
        moves: What goes where.
    """

    def __init__(
        self,
        record: StateRecord,
        states: tuple[Any, Any] | None,
        built: Any,
        tensors: list[torch.Tensor],
        moves: Moves,
    ) -> None:
        self.record = record
        self.states = states
        self._built = built
        self._tensors = tensors
        self._declared = {key: moves.memory(each) for key, each in record.declared().items()}
        self._checker: LayoutChecker | None = None
        self._reads = moves.memory(record.reads)
        same = record.leaves is record.reads
        self._leaves = self._reads if same else moves.memory(record.leaves)
        if states is not None and record.checker is not None:
            self._checker = record.checker.moved(moves.shift.address)

    def commit(self, by: Writer) -> None:
        """Let the record stand for it; nobody has built it there, so it is stale (rule 6).

        Args:
            by: Whose rebind it was.
        """
        record = self.record
        if self.states is not None:
            record.stand_for(self.states, self._checker, self._tensors, self._reads, self._leaves)
            record.spoil(Why(Staleness.MOVED, by))
        else:
            record.rest_on(self._built, self._leaves)
        record.redeclare(self._declared)


def relocation_of(record: StateRecord, moves: Moves) -> Relocation | None:
    """Work out what a state is on other memory; ``None`` if nothing of it moves.

    Raises:
        SplitError: A leaf moves only in part.
    """
    before = record.captured, record.state, record.tensors
    captured, state, tensors = with_tensors(before, moves.tensor)
    if captured is not record.captured or tensors is not record.tensors:
        return Relocation(record, (captured, state), state, tensors, moves)
    others = record.leaves, *record.declared().values()
    if state is not record.state or any(each.overlaps(moves.ranges) for each in others):
        return Relocation(record, None, state, tensors, moves)
    return None
