"""Stamps, footprints, and who made whom stale.

One :class:`StateRecord` stands for one captured state, shared by its owner's pool and every
pool that borrows it. Each pool that replays on it holds a :class:`Lease`: the number of replays
it has left. A refresh grants the leases, anything that writes over the state stops them, so a
replay only has to look at one counter.

The numbered rules are those of the documentation's page on freshness.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch

from graphshare.errors import CaptureError
from graphshare.lease import NEVER, Lease, Staleness, Why, Writer
from graphshare.ledger import Ledger, OwnerBook
from graphshare.memory import MemoryRanges
from graphshare.owner import Phase, declared_tensors, name_build
from graphshare.state import LayoutChecker, tensors_by_use
from graphshare.statistics import Tally
from graphshare.watch import Watch

__all__ = ["StateRecord"]

_EMPTY = MemoryRanges.of(())
_MEMO_LIMIT = 4096
_serials = itertools.count(1)


class StateRecord:
    """One captured state, or one that a capture in progress builds.

    Attributes:
        key: The owner's key that stands for it.
        keys: Every owner's key that is built into it, more than one under ``state_key``.
        checker: Compares a rebuilt state with what the graphs bake in; ``None`` before a capture.
        captured: The state as captured; keeps the baked memory alive.
        state: The state as last built.
        tensors: Those of ``captured`` that a graph on this state reads.
        reads: Memory that a graph on this state reads.
        leaves: All memory of the state, leaves under the rule ``any`` included.
        intact: Whether the memory still holds what was last built, for a warmup or a capture.
        extent: Number of the memory that it covers; a new one for each adopted state.
        released: Whether the owner's pool let it go.
        leases: Of the pools that replay on it.
        borrowers: Those of them that are not the owner's pool.
        former: The holders of loans that have ended, weakly.
        watches: By the owner's key, what its refreshes returned.
        why: Why it is not fresh, ``None`` while it is.
    """

    __slots__ = (
        "__weakref__", "_declared", "_forward_memo", "_memo", "_memo_version", "book", "borrowers",
        "captured", "checker", "extent", "former", "intact", "key", "keys", "leases", "leaves",
        "ledger", "order", "pool_name", "reads", "ref", "released", "serial", "state", "tally",
        "tensors", "wants_check", "watches", "why",
    )  # fmt: skip

    def __init__(
        self, ledger: Ledger, book: OwnerBook, pool_name: str, key: Hashable, tally: Tally
    ) -> None:
        self.serial = self.extent = next(_serials)
        self.ledger = ledger
        self.book = book
        self.pool_name = pool_name
        self.tally = tally
        self.key = key
        self.keys: list[Hashable] = [key]
        self.checker: LayoutChecker | None = None
        self.captured: Any = None
        self.state: Any = None
        self.tensors: list[torch.Tensor] = []
        self.reads = self.leaves = _EMPTY
        self.leases: list[Lease] = []
        self.borrowers: list[Lease] = []
        self.former: list[Callable[[], Any]] = []
        self.intact = self.released = False
        self.wants_check = True
        self.why: Why | None = NEVER
        self.order: Any = None
        self.watches: dict[Hashable, Watch] = {}
        self._declared: dict[Hashable, MemoryRanges] = {}
        self._memo: dict[tuple[Hashable, int], bool] = {}
        self._memo_version = -1
        self._forward_memo: dict[int, bool] = {}
        live, serial = ledger.live, self.serial
        self.ref: weakref.ref[StateRecord] = weakref.ref(self, lambda _: live.pop(serial, None))
        book.add(self)

    def adopt(self, state: Any, device: torch.device, *, check: bool) -> None:
        """Take ``state`` as what the record stands for, as its owner just built it.

        Args:
            state: The state.
            device: Of the pool.
            check: Whether graphs are captured on it, so that later builds are to be compared.

        Raises:
            CaptureError: It has a tensor without an address.
        """
        owner = self.book.owner
        rules = getattr(owner, "host_values", None)
        before = self.leaves
        try:
            self.checker = LayoutChecker(state, device, rules) if check else None
            reads, leaves = tensors_by_use(state, device, rules)
            self.reads = MemoryRanges.of(reads)
            self.leaves = self.reads if len(reads) == len(leaves) else MemoryRanges.of(leaves)
        except TypeError as error:
            raise CaptureError(
                f"{self.pool_name}: capture on what the owner's build returned",
                expected="tensors with an address",
                got=f"one without ({error})",
                key=self.key,
                consequence="A graph would have nothing to read it from",
                remedy="Return the strided tensors that it is made of",
            ) from error
        self.captured = self.state = state
        self.tensors = reads
        self._lies_elsewhere()
        self._memo.clear()
        self._forward_memo.clear()
        if before and before != self.leaves:
            self.book.version += 1
        else:
            self.book.grew(self.leaves)

    def _declare(self, key: Hashable, device: torch.device) -> bool:
        """Ask what a build for ``key`` may write; say whether the answer is new."""
        writes: Callable[[Any], Iterable[torch.Tensor]] | None
        writes = getattr(self.book.owner, "writes", None)
        if writes is None:
            return False
        tensors = declared_tensors(self.pool_name, key, writes(key))
        ranges = MemoryRanges.of(tensor for tensor in tensors if tensor.device == device)
        before = self._declared.get(key)
        if before is not None and before.contains(ranges):
            return False
        # Of every state that builds for the key go into: one may be captured anew in vain.
        for record in self.book.records():
            known = record._declared.get(key)
            if known is not None or record is self:
                # Buffers that moved, and were refused, may move back.
                record._declared[key] = ranges if known is None else ranges.union(known)
                record._memo.clear()
        self.ledger.forget()
        return True

    def ask_again(self, device: torch.device) -> None:
        """Ask what builds may write for every key of the owner that said so before.

        For the end of what built outside a refresh and did not build for every key: a buffer that
        all of them write may have grown on the way.

        Args:
            device: Of the pool.
        """
        records = [each for each in self.book.records() if not each.released]
        asked = {key: each for each in records for key in each._declared}
        for key, record in asked.items():
            # Something has failed, or is a check that is over: what it said before still counts.
            with contextlib.suppress(Exception):
                record._declare(key, device)

    def stand_for(
        self,
        states: tuple[Any, Any],
        checker: LayoutChecker | None,
        tensors: list[torch.Tensor],
        reads: MemoryRanges,
        leaves: MemoryRanges,
    ) -> None:
        """Take the state to be on other memory, as captured and as last built.

        Args:
            states: As captured, and as last built.
            checker: For the first.
            tensors: Its tensors that a graph on this state reads.
            reads: Their memory.
            leaves: All memory of the state.
        """
        self.captured, self.state = states
        self.checker = checker
        self.tensors = tensors
        self.reads, self.leaves = reads, leaves
        self._lies_elsewhere()
        self._forward_memo.clear()

    def rest_on(self, state: Any, leaves: MemoryRanges) -> None:
        """Take what no graph reads of the state to be on other memory; it is as fresh as before.

        Args:
            state: As last built.
            leaves: All memory of the state.
        """
        self.state, self.leaves = state, leaves
        self._reset_watches()

    def _lies_elsewhere(self) -> None:
        self.extent = next(_serials)  # what others remember of its memory no longer holds
        self.ledger.forget()
        self._reset_watches()

    def _reset_watches(self) -> None:
        for watch in self.watches.values():
            watch.reset()

    def declared(self) -> dict[Hashable, MemoryRanges]:
        """What builds may write by the owner's own word, by the owner's key."""
        return dict(self._declared)

    def redeclare(self, declared: dict[Hashable, MemoryRanges]) -> None:
        """Take what builds may write to be this."""
        self._declared = declared
        self._memo.clear()
        self.ledger.forget()
        self.book.version += 1

    def renew(self, after: StateRecord) -> None:
        """A recapture came out at the same place; leaves that no graph reads may lie elsewhere.

        Args:
            after: What was captured, of one layout with this state.
        """
        self.state = after.state
        if not self.leaves.contains(after.leaves):
            self.leaves = self.leaves.union(after.leaves)
            self.book.version += 1
            self.ledger.forget()

    def footprint(self, key: Hashable) -> MemoryRanges:
        """Memory that a build for the owner's ``key`` may write."""
        declared = self._declared.get(key)
        return self.book.footprint() if declared is None else declared

    @property
    def fresh(self) -> bool:
        """Whether the owner has rebuilt it for a batch and nothing has written over it."""
        return self.why is None

    def overwrites(self, other: StateRecord, key: Hashable) -> bool:
        """Whether a build for the owner's ``key`` may write memory that ``other`` reads."""
        version = self.book.version
        if self._memo_version != version or len(self._memo) > _MEMO_LIMIT:
            self._memo.clear()
            self._memo_version = version
        asked = (key, other.extent)
        found = self._memo.get(asked)
        if found is None:
            found = self._memo[asked] = self.footprint(key).overlaps(other.reads)
        return found

    def forward_overwrites(self, other: StateRecord) -> bool:
        """Whether a forward that writes this state may write memory that ``other`` reads."""
        found = self._forward_memo.get(other.extent)
        if found is None:
            if len(self._forward_memo) > _MEMO_LIMIT:
                self._forward_memo.clear()
            found = self._forward_memo[other.extent] = self.reads.overlaps(other.reads)
        return found

    def attach(self, lease: Lease) -> None:
        """Let one more pool replay on this state."""
        self.leases.append(lease)
        self._leases_changed()

    def remember(self, holder: Callable[[], Any]) -> None:
        """Know whose loan has ended: it holds graphs on this memory as long as it lives.

        Args:
            holder: Its :class:`~graphshare.holdings.Holdings`, weakly.
        """
        self.former = [*(each for each in self.former if each() is not None), holder]

    def detach(self, lease: Lease) -> None:
        """Forget a pool that no longer has a key on this state."""
        if lease in self.leases:
            self.leases.remove(lease)
            self._leases_changed()

    def _leases_changed(self) -> None:
        self.ledger.epoch += 1
        wanted, self.wants_check = self.wants_check, any(each.checked for each in self.leases)
        if self.wants_check is not wanted:
            self._reset_watches()
        self.borrowers = [each for each in self.leases if each.borrowed]

    def build(
        self, key: Hashable, batch: Any, phase: Phase, device: torch.device, *, adopt: bool
    ) -> Any:
        """Have the owner build, outside a refresh; the state is not fresh afterwards.

        Args:
            key: The owner's key.
            batch: ``None`` unless the phase is ``REPLAY``.
            phase: Why.
            device: Of the pool.
            adopt: Whether the record is to stand for what comes back.

        Returns:
            What the owner returned, not compared with anything.

        Raises:
            CaptureError: What the owner returned has a tensor without an address, or its
                ``writes`` returned no tensors.
        """
        by = (self.pool_name, key)
        known = self.extent != self.serial and (
            key in self._declared or getattr(self.book.owner, "writes", None) is None
        )
        if known:
            self.begin(by, key)
        begun = self.ledger.epoch
        try:
            state = self.book.owner.build(key, batch, phase)
        except BaseException as error:
            name_build(error, self.pool_name, key, phase)
            if not known:
                # Nothing came back to look at, and an owner whose build failed may not answer:
                # then all that it is known to own may have been written.
                with contextlib.suppress(Exception):
                    self._declare(key, device)
            if not known or self.ledger.epoch != begun:
                self.begin(by, key)
            raise
        self.tally.builds[phase.value] += 1
        try:
            if adopt:
                self.adopt(state, device, check=phase is not Phase.WARMUP)
            else:
                self.state = state
            more = self._declare(key, device)
        except BaseException:
            self.begin(by, key)  # what came back is of no use, but the owner has written
            raise
        if more or adopt or not known or self.ledger.epoch != begun:
            # What it wrote may be more than what was known before, or later than what became fresh
            # while it was built.
            self.begin(by, key)
        self.spoil(Why(Staleness.BUILT_FOR_CAPTURE, by))
        self.intact = True
        self.ledger.live[self.serial] = self.ref
        return state

    def abandon(self) -> None:
        """It will not be captured; a traceback may keep it alive, but it counts no more."""
        self.released = True
        self.spoil(Why(Staleness.RELEASED))
        self.book.version += 1

    def begin(self, by: Writer, key: Hashable) -> None:
        """A build is about to write: everything its footprint touches becomes stale (rule 2).

        Args:
            by: Who writes, for messages.
            key: The owner's key.
        """
        self.overwrite(by, key)
        self.spoil(Why(Staleness.BUILD_FAILED, by))

    def overwrite(self, by: Writer, key: Hashable) -> None:
        """As :meth:`begin`, for other states alone: the caller spoils its own."""
        for record in self.ledger.others(self):
            if self.overwrites(record, key):
                record.spoil(Why(Staleness.OVERWRITTEN, by), first=True)

    def strayed(self, state: Any, by: Writer, device: torch.device) -> None:
        """A build returned memory that its graphs do not read, and wrote there as well (rule 2).

        Args:
            state: What it returned.
            by: Who wrote, for messages.
            device: Of the pool.
        """
        _, leaves = tensors_by_use(state, device)
        elsewhere = MemoryRanges.of(
            leaf for leaf in leaves if not self.leaves.contains(MemoryRanges.of((leaf,)))
        )
        for record in self.ledger.others(self):
            if elsewhere.overlaps(record.reads):
                record.spoil(Why(Staleness.OVERWRITTEN, by), first=True)

    def revive(self) -> None:
        """The build for a batch returned what the graphs can read (rule 1); leases come on top."""
        self.intact = False  # a batch's: no longer what a capture was made on
        self.why = None
        self.ledger.live[self.serial] = self.ref
        self.ledger.epoch += 1

    def spoil(self, why: Why, *, first: bool = False) -> None:
        """Make it stale for every pool; ``first`` as in :meth:`Lease.stop`."""
        self.intact = False
        if self.why is None or not first:
            self.why = why
        self.ledger.live.pop(self.serial, None)
        self.ledger.epoch += 1
        for lease in self.leases:
            lease.stop(why, first=first)

    def written_by_forward(self, by: Writer, own: Lease | None) -> None:
        """A graph that writes its state is about to run (rule 5)."""
        why = Why(Staleness.FORWARD_WROTE, by)
        self.ledger.epoch += 1
        for lease in self.leases:
            if lease is not own:
                lease.stop(why, first=True)
        for record in self.ledger.others(self):
            if self.forward_overwrites(record):
                record.spoil(why, first=True)
