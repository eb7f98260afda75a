"""Whether an owner returns the same object at each build, and the shorter check if it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphshare.state import Fixed, LayoutChecker

__all__ = ["Watch"]

_CHANCES = 8
_NOTHING = object()


class Watch:
    """What the last refresh of one key was given, and how little of it has to be looked at again.

    Attributes:
        state: What the last build returned, for as long as that may help; never ``None``.
        unmoved: Where it is the very object that was watched: whether its tensors are where they
            were. ``False`` says nothing.
        chances: How many more states are worth a thought.
    """

    __slots__ = ("_count", "_hold", "chances", "state", "unmoved")

    state: Any
    unmoved: Callable[[], bool]

    def __init__(self) -> None:
        self._count, self._hold = 0, _hold_nothing
        self.reset()

    def in_line(self, count: int, hold: Callable[[Any, Fixed | None], None]) -> None:
        """Tell a refresh, from now on, what to look at in line.

        Args:
            count: Of the tensors that it has room for.
            hold: ``hold(state, fixed)``; with ``None`` for both, it is to let go of what it holds.
        """
        self._count, self._hold = count, hold

    def reset(self) -> None:
        """Let go of the state: it has gone to other memory."""
        self.state, self.unmoved, self.chances = _NOTHING, _never, _CHANCES
        self._hold(None, None)

    def learn(self, state: Any, checker: LayoutChecker) -> None:
        """Look at a state that has just passed its check in full."""
        again = state is self.state
        unmoved = checker.watch(state) if again else None
        self.state, self.unmoved = state, unmoved or _never
        self.chances -= 1
        self._hold(None, None)
        if unmoved is not None:
            fixed = checker.fixed(state) if self._count else None
            if fixed is not None and len(fixed.tensors) == self._count:
                self._hold(state, fixed)
        elif again or self.chances <= 0:
            # Such objects can be assigned to, or each build makes new ones.
            self.state, self.chances = _NOTHING, 0


def _never() -> bool:
    return False


def _hold_nothing(state: Any, fixed: Fixed | None) -> None:
    del state, fixed
