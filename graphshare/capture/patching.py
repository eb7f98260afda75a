"""Changing a graph in steps that are undone together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Protocol

__all__ = ["Change", "Patch"]


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


class Patch:
    """The changes of one graph: all of them, or none.

    Args:
        changes: One for each node concerned.
        old: The addresses that are there now and will change.

    Attributes:
        changes: As given.
        old: As given.
    """

    def __init__(self, changes: Sequence[Change], old: Iterable[int]) -> None:
        self.changes = list(changes)
        self.old = frozenset(old)
        self._done = 0

    @property
    def nodes(self) -> int:
        """Nodes that change."""
        return len(self.changes)

    @property
    def words(self) -> int:
        """Addresses that change."""
        return sum(change.words for change in self.changes)

    def apply(self) -> None:
        """Make every change; where one raises, those before it are undone."""
        try:
            for change in self.changes:
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
            for change in self.changes[: self._done]:
                stack.callback(change.revert)
            self._done = 0
