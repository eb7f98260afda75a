"""Changing a graph in steps that are undone together."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

__all__ = ["Change", "Patch", "Steps"]


class Change(Protocol):
    """One node's change.

    Attributes:
        words: Addresses that it changes.
    """

    words: int

    def apply(self) -> None:
        """Put the new addresses in; leaves the node as it was where it raises."""
        ...

    def revert(self) -> None:
        """Put the old addresses back."""
        ...


class Patch(Protocol):
    """A change of one graph: all of it, or none.

    Attributes:
        nodes: How many nodes change.
        words: How many addresses change.
        pairs: Numbers of the pairs of :class:`~graphshare.capture.moves.Moves` whose old memory
            the graph has an address in.
    """

    nodes: int
    words: int
    pairs: AbstractSet[int]

    def apply(self) -> None:
        """Make the change; the graph is as it was where it raises."""
        ...

    def revert(self) -> None:
        """Undo it, all that can be undone; then raises what could not."""
        ...


class Steps(Patch):
    """A patch in steps, each of which changes one node.

    Args:
        changes: The steps.
        pairs: As in :class:`Patch`.
    """

    def __init__(self, changes: Sequence[Change], pairs: AbstractSet[int]) -> None:
        self.pairs = pairs
        self.nodes = len(changes)
        self.words = sum(change.words for change in changes)
        self._changes = list(changes)
        self._done = 0

    def apply(self) -> None:
        """Make every change; where one raises, those before it are undone."""
        try:
            for change in self._changes:
                change.apply()
                self._done += 1
        except BaseException as error:
            try:
                self.revert()
            except Exception as second:
                raise second from error
            raise

    def revert(self) -> None:
        """Undo what was done, last first; goes on where one cannot be undone, then raises that."""
        with contextlib.ExitStack() as stack:  # runs its callbacks last first, all of them
            for change in self._changes[: self._done]:
                stack.callback(change.revert)
            self._done = 0
