"""Why a state is stale, and how many replays a pool has left on it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

__all__ = ["NEVER", "Lease", "PoolClock", "Staleness", "Why", "Writer"]

_UNLIMITED = 1 << 62


def _nobody() -> None:
    """The holder of a lease that no pool has."""


class Staleness(str, enum.Enum):
    """Why a state is not fresh."""

    NEVER_REFRESHED = "never refreshed"
    """Captured, and not built for a batch since (rule 1)."""
    BUILT_FOR_CAPTURE = "built for a warmup or capture"
    """Its last build was for a warmup, a capture or the check after one (rule 2)."""
    BUILD_FAILED = "build failed"
    """Its last build raised, or returned what the graph cannot read (rule 2)."""
    OVERWRITTEN = "overwritten"
    """A build for another key may have written over it (rule 2)."""
    SUPERSEDED = "superseded"
    """The pool refreshed more keys since than ``live_keys`` (rule 3)."""
    USED_UP = "used up"
    """This pool replayed ``replays_per_refresh`` times on it (rule 4)."""
    MOVED = "moved"
    """A rebind put it into other memory, which no build has filled (rule 6)."""
    FORWARD_WROTE = "written by a forward"
    """A graph captured with ``writes_state=True`` ran on it (rule 5)."""
    INVALIDATED = "invalidated"
    """``invalidate`` or ``verify`` said so (rule 6)."""
    RELEASED = "released"
    """The owner's pool released it; not staleness proper, replays raise ReleasedStateError."""


Writer = tuple[str, Hashable]
"""``(pool name, key)``."""


class Why(NamedTuple):
    """A cause of staleness and who brought it about."""

    rule: Staleness
    by: Writer | None = None


_USED_UP = Why(Staleness.USED_UP)
NEVER = Why(Staleness.NEVER_REFRESHED)


class PoolClock:
    """Which state a pool's leases were granted on last; apart from the pool to avoid a cycle."""

    __slots__ = ("latest",)

    def __init__(self) -> None:
        self.latest = 0


class Lease:
    """One pool's allowance of replays on one state, for all of its keys on that state.

    Attributes:
        left: Replays that remain; what the hot path reads.
        limit: Replays that a refresh grants.
        grants: How often ``limit`` was granted. The owner's pool is granted it at each of its
            refreshes, others where they used some of what they had.
        unspent: Replays that were taken back, or were left when more were granted.
        unused: Grants that ended without a replay.
        keys: The pool's captured keys on this state.
        borrowed: Whether the pool is not the owner's.
        checked: Whether the pool wants its states checked at refresh.
        holder: The pool's :class:`~graphshare.holdings.Holdings`, weakly: a state must not keep
            the pools alive that borrow it.
    """

    __slots__ = (
        "borrowed", "checked", "clock", "grants", "holder", "keys", "left", "limit", "live_key",
        "unspent", "unused", "why",
    )  # fmt: skip

    def __init__(
        self, limit: int | None, clock: PoolClock, *, borrowed: bool, checked: bool
    ) -> None:
        self.limit = _UNLIMITED if limit is None else limit
        self.clock = clock
        self.borrowed = borrowed
        self.checked = checked
        self.keys: list[Hashable] = []
        self.holder: Callable[[], Any] = _nobody
        self.live_key: Hashable = None
        self.why: Why | None = NEVER
        self.left = self.unspent = 0
        self.grants = self.unused = int(not checked)  # one that no refresh brought about
        if not checked:
            self.left = self.limit = _UNLIMITED

    def choose_live_key(self, owner_keys: Sequence[Hashable]) -> None:
        """Of several keys on one state, prefer the one that the owner calls by the same name."""
        named = [key for key in self.keys if key in owner_keys]
        self.live_key = (named or self.keys)[0]

    @property
    def ended(self) -> bool:
        """Whether the state was released, or the loan closed; nothing revives it."""
        return self.why is not None and self.why.rule is Staleness.RELEASED

    def grant(self) -> None:
        """A refresh: allow ``limit`` replays again."""
        # `steady` has the same in line, for leases that nothing has stopped.
        left = self.left
        if left != self.limit or not self.borrowed:
            self.unspent += left
            self.left = self.limit
            self.grants += 1
        elif self.why is not None:
            self.unused -= 1  # of a pool that checks nothing: from now on it saves builds
        self.why = None

    def stop(self, why: Why, *, first: bool = False) -> None:
        """Allow no further replay.

        Args:
            why: The cause.
            first: Keep an earlier cause, if there is one: who wrote over it first tells more.
        """
        if not self.checked and why.rule is not Staleness.RELEASED:
            return
        before = self.why
        if before is None:
            self.unused += self.left == self.limit
        elif before.rule is Staleness.RELEASED:
            return
        # Counting here keeps every counter but `left` off the replay path.
        self.unspent += self.left
        self.left = 0
        if before is None or not first:
            self.why = why

    @property
    def cause(self) -> Why:
        """Why nothing is left."""
        return self.why or _USED_UP

    @property
    def replays(self) -> int:
        """Replays so far."""
        return self.grants * self.limit - self.unspent - self.left

    @property
    def refreshes(self) -> int:
        """Refreshes of the state by the pool whose lease it is, if it is the owner's."""
        return 0 if self.borrowed else self.grants - (not self.checked)

    @property
    def builds_avoided(self) -> int:
        """Refreshes by the owner on which this borrower replayed, each a build of its own saved."""
        idle = self.why is None and self.left == self.limit
        return self.borrowed * (self.grants - self.unused - idle)
