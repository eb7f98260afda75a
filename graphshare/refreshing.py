"""Refreshes: one function for each captured key, with all that it needs at hand.

A build leaves the processor's caches cold, so every object that is touched after it counts many
times. What can be decided when a key is registered is decided then, and what only some event can
have changed is looked at where there was one: the ledger counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from graphshare.entry import Entry
from graphshare.freshness import StateRecord
from graphshare.lease import Lease, Staleness, Why
from graphshare.live_states import LiveStates
from graphshare.owner import Phase, name_build
from graphshare.reach import Reach
from graphshare.refusals import Refusals
from graphshare.state import LayoutChecker, LayoutDifference, compiled
from graphshare.statistics import Tally
from graphshare.steady import write_holding, write_taking, write_watching
from graphshare.watch import Watch

__all__ = ["differences", "prepare_refresh", "refuse_refresh"]

_IN_LINE = 16  # tensors that are worth variables of their own


def differences(
    refuse: Refusals, record: StateRecord, key: Hashable, state: Any, doing: str
) -> list[LayoutDifference]:
    """Return in what a rebuilt state differs from what its graphs bake in.

    Raises:
        AddressChangedError: It has a tensor without an address.
    """
    if record.checker is None:
        return []
    try:
        return record.checker.differences(state)
    except TypeError as error:
        raise refuse.without_address(key, error, doing) from error


def refuse_refresh(entry: Entry[Any], refuse: Refusals) -> Callable[[Any], None]:
    """Return the refresh of a borrowed key."""
    lender, key = entry.record.pool_name, entry.key
    ended = False

    def end() -> None:
        nonlocal ended
        ended = True

    def refused(_: Any) -> None:
        if ended:
            raise refuse.gone(key, "refresh")
        raise refuse.ownership(
            "refresh of a borrowed key",
            expected=f"a refresh by {lender}, which owns the state",
            got=f"one by {refuse.name}",
            key=key,
            remedy=f"Refresh {lender}; this pool follows",
        )

    entry.enders.append(end)
    return refused


def prepare_refresh(
    entry: Entry[Any],
    *,
    builds: bool,
    refuse: Refusals,
    tally: Tally,
    latest: LiveStates,
    device: torch.device,
) -> Callable[[Any], None]:
    """Return ``refresh(batch)`` for one key whose state its pool owns.

    It holds neither the pool nor the entry, so that dropping a pool frees it. When the entry is
    retired it refuses, before anything is built.

    Args:
        entry: With its lease.
        builds: If not, it is ``accept(state)``, for states that are built already. Such a state is
            not kept: it goes when whoever built it lets go of it, unless replays look at it.
        refuse: Makes the pool's errors.
        tally: The pool's counters.
        latest: The pool's states that were refreshed last.
        device: Of the pool.
    """
    watches = entry.record.watches
    if builds:
        watches[entry.key] = Watch()
    full = _InFull(entry, refuse, tally, latest, device, watches[entry.key], builds=builds)
    entry.enders.append(full.end)
    return full.refresh()


_Constants = tuple[Any, ...] | None
_Known = tuple[int, Lease | None, Callable[[Any], bool], _Constants]
"""What a refresh has at hand: the epoch in which nothing but this need be done, a lease of another
pool, what compares a state with the layout, and what it is looked at with in line: a guard of its
tensors and constants, if there is a guard."""


class _InFull:
    """What a refresh of one key does where something has happened since the last one."""

    __slots__ = (
        "_begun", "_builds", "_constants", "_device", "_latest", "_overwritten", "_reach",
        "_refuse", "_retired", "_taken", "_takes", "_tally", "by", "key", "lease", "ledger",
        "matches", "nothing_known", "others", "record", "watch",
    )  # fmt: skip

    def __init__(
        self,
        entry: Entry[Any],
        refuse: Refusals,
        tally: Tally,
        latest: LiveStates,
        device: torch.device,
        watch: Watch,
        *,
        builds: bool,
    ) -> None:
        self._refuse, self._tally, self._latest, self._device = refuse, tally, latest, device
        self.record, self.key, self.lease = entry.record, entry.key, entry.lease
        self.ledger = entry.record.ledger
        self.by = refuse.name, entry.key
        self.watch = watch
        self._builds = builds
        self._reach, self._overwritten = Reach(), Why(Staleness.OVERWRITTEN, self.by)
        self._begun = -1
        self._retired = False
        self.nothing_known: _Known = (-1, None, _anything, None)
        self.matches: Callable[[Any], bool] = _anything
        self.others: Sequence[Lease] = ()
        # What a function with the check in line is made of; the checker whose constants it has.
        self._takes: Callable[..., Any] | None = None
        self._taken: tuple[LayoutChecker | None, tuple[Any, ...]] = (None, ())
        self._constants: _Constants = None

    def refresh(self) -> Callable[[Any], None]:
        """Return the function that does it all, and asks this object for what is not steady."""
        record, builds = self.record, self._builds
        checker = record.checker if record.wants_check else None
        source, count = write_watching(builds=builds), 0
        if checker is not None:
            fixed = checker.count_fixed(record.captured)
            taking = None if fixed else checker.taking()
            if 0 < fixed <= _IN_LINE and builds:
                source, count = write_holding(fixed), fixed
            elif taking is not None:
                source = write_taking(taking, builds=builds)
                self._takes = _compiled(source)
                self._taken = checker, taking.constants
        refresh, hold = _compiled(source)(
            self.ledger,
            record.book.owner,
            self.key,
            Phase.REPLAY,
            self,
            record,
            self.lease,
            self.lease.limit,
            self.watch,
        )
        if count:
            self.watch.in_line(count, hold)
        return refresh

    def end(self) -> None:
        """The key goes: from now on, refuse."""
        self._retired = True
        self.ledger.epoch += 1

    def begin(self) -> _Constants:
        """Before the build: whom it may write over becomes stale (rule 2).

        Returns:
            What the state is looked at with in line.

        Raises:
            ReleasedStateError: The key was released or captured anew.
        """
        if self._retired:
            if not self._builds:
                self._written_in_vain()
            raise self._refuse.gone(self.key, "refresh")
        order = self.record.order
        if order is not None:
            order.before_build()
        self._reach.overwrite(self.record, self.key, self._overwritten)
        self._begun = self.ledger.epoch
        if self._takes is not None:
            self._constants = self._at_hand()
        return self._constants

    def _written_in_vain(self) -> None:
        # Whoever asks to accept a state has built it, where the key's lay and its owner may write.
        record = self.record
        if not record.released:  # another key has it, or the one that was captured anew
            record.spoil(Why(Staleness.BUILD_FAILED, self.by), first=True)
        for other in self.ledger.others(record):
            if record.leaves.overlaps(other.reads) or record.overwrites(other, self.key):
                other.spoil(self._overwritten, first=True)

    def _ended(self) -> None:
        # An owner may refresh or capture another pool while it builds. Its own writes may be the
        # later ones.
        if self.ledger.epoch != self._begun:
            self._reach.overwrite(self.record, self.key, self._overwritten)

    def failed(self, error: BaseException) -> None:
        """The build raised."""
        self._ended()
        self.record.spoil(Why(Staleness.BUILD_FAILED, self.by))
        name_build(error, self._refuse.name, self.key, Phase.REPLAY)

    def unseen(self) -> None:
        """What was built has not been looked at, or not to the end; whatever raised."""
        if not self._retired:
            self.record.spoil(Why(Staleness.BUILD_FAILED, self.by), first=True)

    def finish(self, state: Any, right: bool) -> _Known:
        """After the build, whoever began it: look at what came of it, and make the state fresh.

        Args:
            state: The state.
            right: Whether it was looked at in line, with what was at hand, and is right.

        Returns:
            What is known from now on.

        Raises:
            AddressChangedError, BakedValueChangedError: No graph can read the state.
        """
        record, order, lease = self.record, self.record.order, self.lease
        # What was at hand when the build began may be too old by now.
        right = right and self.ledger.epoch == self._begun
        self._ended()
        matches = self._check(state, right=right)
        if order is not None:
            order.after_build()
        if record.why is not None:
            if record.released:  # by the owner, while it built
                self._tally.refused += 1
                raise self._refuse.released(
                    self.key, "the key was released while it was built", doing="refresh"
                )
            record.revive()
        if self._builds or order is not None:
            record.state = state
        lease.grant()
        self._grant(lease)
        for borrower in record.borrowers:
            borrower.grant()
            self._grant(borrower)
        if self._latest.newest is not record:
            self._latest.supersede(record, self.by)
        # A key that went while it was built is no longer refreshed, though its state may live on.
        steady = self.ledger.epoch if order is None and not self._retired else -1
        borrowers = record.borrowers
        first = borrowers[0] if borrowers else None
        self.others = borrowers[1:] if len(borrowers) > 1 else ()
        self.matches = matches
        if self._takes is not None and not right:
            self._constants = self._at_hand()
        return steady, first, matches, self._constants

    def grant_others(self) -> None:
        """Grant the leases that a refresh has not at hand."""
        for lease in self.others:
            lease.grant()

    def _at_hand(self) -> _Constants:
        record = self.record
        if not record.wants_check:
            return None
        checker, constants = self._taken
        if checker is not record.checker:  # the state has gone to other memory
            checker, constants = self._take_anew()
            self._constants = None
        guard = checker.learned() if checker and constants else None
        if guard is None:
            return None
        known = self._constants
        return known if known and known[0] is guard else (guard, *constants)

    def _take_anew(self) -> tuple[LayoutChecker | None, tuple[Any, ...]]:
        checker = self.record.checker
        taking = None if checker is None else checker.taking()
        constants = ()
        if taking and _compiled(write_taking(taking, builds=self._builds)) is self._takes:
            constants = taking.constants
        self._taken = checker, constants
        return self._taken

    def _check(self, state: Any, *, right: bool) -> Callable[[Any], bool]:
        record, watch, checker = self.record, self.watch, self.record.checker
        if checker is None or not record.wants_check:
            watch.chances = 0  # until somebody wants it looked at, when the watch is reset
            return _anything
        if right:
            return checker.matches
        if state is not watch.state or record.order is not None or not watch.unmoved():
            if not checker.matches(state):
                self._look_closely(state)
            if watch.chances and self._takes is None:
                watch.learn(state, checker)
        return checker.matches

    def _look_closely(self, state: Any) -> None:
        """Refuse what a build returned, unless it is right after all."""
        record, refuse, tally = self.record, self._refuse, self._tally
        # Before the look, which may raise: the owner has written.
        record.spoil(Why(Staleness.BUILD_FAILED, self.by))
        tally.refused += 1
        found = differences(refuse, record, self.key, state, "refresh")
        if found:
            record.strayed(state, self.by, self._device)
            raise refuse.layout(self.key, found, keys=record.keys)
        tally.refused -= 1

    def _grant(self, lease: Lease) -> None:
        clock, serial = lease.clock, self.record.serial
        if clock.latest != serial:
            clock.latest = serial
            self.ledger.epoch += 1


def _compiled(source: str) -> Callable[..., Any]:
    return compiled(source, "refresh")


def _anything(_: Any) -> bool:
    return True
