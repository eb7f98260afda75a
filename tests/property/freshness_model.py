"""The freshness rules over plain sets: what each call must do, from the design alone.

Memory is a set of cells. A state (`Record`) reads some of them, a build may write some of them,
and why a state is stale is a set of causes, empty while it is fresh. Where the design leaves a
choice (see `Record.maybe`), the model allows both, and follows what was observed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from graphshare import (
    CaptureError,
    KeyMismatchError,
    OwnershipError,
    ReleasedStateError,
    Staleness,
    StaleStateError,
)

Cells = frozenset[tuple[int, int]]
NOTHING: Cells = frozenset()
By = tuple[str, Hashable]


@dataclass(frozen=True)
class Cause:
    """Why a state is stale; `by` is None where the design does not say who it was."""

    rule: Staleness
    by: By | None = None


@dataclass(eq=False)
class Record:
    """One state: an owner's, for one key of one pool, or several under a `state_key`.

    `maybe` are causes that the design allows an implementation to see and to ignore: a forward
    that writes its state may have written any part of it, `verify` leaves "the producer" stale.
    """

    owner: Any
    pool: Pool
    place: Any  # where its leaves lie, as captured
    reads: Cells
    rows: Cells  # the part that a writing forward really writes
    declared: Cells | None  # what the owner says a build may write
    keys: list[Hashable] = field(default_factory=list)
    names: list[Hashable] = field(default_factory=list)  # all keys that it ever had
    causes: set[Cause] = field(default_factory=lambda: {Cause(Staleness.NEVER_REFRESHED)})
    maybe: set[Cause] = field(default_factory=set)
    released: bool = False
    refreshed: int = 0
    token: int = 0  # what its last refresh was given
    contents: list[list[int]] = field(default_factory=list)
    leases: dict[str, Lease] = field(default_factory=dict)


@dataclass(eq=False)
class Lease:
    """What one pool may still do on one state."""

    limit: int | None  # replays on one refresh
    left: int | None = 0
    causes: set[Cause] = field(default_factory=lambda: {Cause(Staleness.NEVER_REFRESHED)})
    counted: bool = False  # a replay on this refresh is in builds_avoided


@dataclass(eq=False)
class Entry:
    key: Hashable
    record: Record
    borrowed: bool
    writes: bool
    views: tuple[Callable[[Any], Any], ...] = ()
    ended: bool = False  # the loan was closed
    engine_made: bool = False

    @property
    def dead(self) -> bool:
        return self.ended or self.record.released


@dataclass(eq=False)
class Loan:
    lender: Pool
    key: Callable[[Any], Any]
    view: Callable[[Any], Any] | None
    when: Callable[[Any], bool]
    closed: bool = False


@dataclass(eq=False)
class Pool:
    name: str
    owner: Any
    live_keys: int
    limit: int | None
    state_key: Callable[[Any], Hashable] | None = None
    loan: Loan | None = None
    closed: bool = False
    entries: dict[Hashable, Entry] = field(default_factory=dict)
    captures: int = 0
    refreshes: int = 0
    replays: int = 0
    builds_avoided: int = 0
    refusals: dict[str, int] = field(default_factory=dict)
    latest: Record | None = None  # the state that was refreshed last, of those it replays on

    def group(self, key: Any) -> Hashable:
        return key if self.state_key is None else self.state_key(key)

    def find(self, key: Any) -> Entry | None:
        """The entry with the state of `key`."""
        if key in self.entries:
            return self.entries[key]
        same = [e for e in self.entries.values() if self.group(e.key) == self.group(key)]
        return same[0] if same else None

    def refused(self, error: BaseException) -> None:
        name = type(error).__name__
        self.refusals[name] = self.refusals.get(name, 0) + 1


@dataclass(frozen=True)
class Source:
    """Where a key to be captured has its state; no record where it is still to be made."""

    key: Hashable
    owner: Any
    record: Record | None
    borrowed: bool
    views: tuple[Callable[[Any], Any], ...] = ()


@dataclass(frozen=True)
class Expected:
    """What a call must do: raise one of `errors`, or succeed; either where `may_pass`."""

    errors: tuple[type[BaseException], ...] = ()
    rules: frozenset[Staleness] = frozenset()
    written_by: frozenset[By | None] = frozenset()
    may_pass: bool = False


PASS = Expected(may_pass=True)


class Model:
    """All pools of one device."""

    def __init__(self) -> None:
        self.pools: list[Pool] = []
        self.records: list[Record] = []
        self.time = itertools.count(1)

    # What writes.

    def owned(self, owner: Any) -> list[Record]:
        return [record for record in self.records if record.owner is owner]

    def footprint(self, owner: Any, declared: Cells | None) -> Cells:
        """Rule 2: what the owner says, or every leaf of every key of this owner."""
        if declared is not None:
            return declared
        return NOTHING.union(*(record.reads for record in self.owned(owner)))

    def overwrite(
        self,
        cells: Cells,
        causes: Iterable[Cause],
        *,
        but: Iterable[Record] = (),
        maybe: Cells = NOTHING,
    ) -> None:
        """Make stale what reads `cells`; where it reads only `maybe`, it may be stale."""
        causes, spared = set(causes), set(but)
        for record in self.records:
            if record in spared:
                continue
            if record.reads & cells:
                record.causes |= causes
            elif record.reads & maybe:
                record.maybe |= causes

    def invalidate(self, entry: Entry, by: By, maybe: Cells) -> None:
        """Rule 6: an unseen build; it may write what the owner once said."""
        record = entry.record
        causes = [Cause(Staleness.OVERWRITTEN, by), Cause(Staleness.INVALIDATED, by)]
        cells = self.footprint(record.owner, record.declared)
        if record.released:  # nobody builds for it any more, but who borrows may still say so
            self.overwrite(NOTHING, causes, but=[record], maybe=cells | record.reads | maybe)
            return
        self.overwrite(cells, causes, but=[record], maybe=maybe)
        record.causes.add(causes[1])

    def refreshed(self, pool: Pool, record: Record, contents: list[list[int]], token: int) -> None:
        """Rules 1 and 3, after a build that succeeded."""
        record.causes.clear()
        record.maybe.clear()
        record.contents = contents
        record.token = token
        record.refreshed = next(self.time)
        pool.refreshes += 1
        for lease in record.leases.values():
            lease.causes.clear()
            lease.counted = False
            lease.left = lease.limit
        for other in self.pools:
            if any(e.record is record and not e.dead for e in other.entries.values()):
                other.latest = record
        own = [
            each
            for each in self.records
            if each.pool is pool and each is not record and not each.causes and each.refreshed
        ]
        newest_first = sorted(own, key=lambda each: -each.refreshed)
        surely = possibly = 1  # states of this pool that are fresh and not older
        for each in newest_first:
            cause = Cause(Staleness.SUPERSEDED)
            if surely >= pool.live_keys:
                each.causes.add(cause)
            elif possibly >= pool.live_keys:
                each.maybe.add(cause)
            if each.maybe:
                possibly += 1
            else:
                surely += 1
                possibly += 1

    def replayed(self, pool: Pool, entry: Entry) -> None:
        """Rules 4 and 5, after a replay that was let through."""
        record = entry.record
        record.maybe.clear()  # whatever might have been was not
        lease = record.leases[pool.name]
        if lease.left is not None:
            lease.left -= 1
        pool.replays += 1
        if entry.borrowed and not lease.counted:
            pool.builds_avoided += 1
            lease.counted = True
        if entry.writes:
            cause = Cause(Staleness.FORWARD_WROTE, (pool.name, entry.key))
            for name, other in record.leases.items():
                if name != pool.name:
                    other.causes.add(cause)
            self.overwrite(record.rows, [cause], but=[record], maybe=record.reads)
            record.contents[0] = [value + 1 for value in record.contents[0]]

    # What must happen.

    def replay(self, pool: Pool, key: Hashable) -> Expected:
        entry = pool.entries.get(key)
        if entry is None:
            # Of a pool that was closed, both are true.
            closed = (ReleasedStateError,) if pool.closed else ()
            return Expected((KeyMismatchError, *closed))
        if entry.dead:
            return Expected((ReleasedStateError,))
        record, lease = entry.record, entry.record.leases[pool.name]
        sure = record.causes | lease.causes
        used_up = {Cause(Staleness.USED_UP)} if lease.left == 0 else set()
        why = sure | used_up | record.maybe
        if not why:
            return PASS
        return Expected(
            (StaleStateError,),
            frozenset(cause.rule for cause in why),
            frozenset(cause.by for cause in why if cause.rule is Staleness.OVERWRITTEN),
            may_pass=not sure and not used_up,
        )

    def was_stale(self, pool: Pool, key: Hashable) -> None:
        """A replay that the model left open was refused."""
        record = pool.entries[key].record
        record.causes |= record.maybe
        record.maybe.clear()

    def fresh(self, pool: Pool) -> tuple[set[Hashable], set[Hashable]]:
        """Keys that may be replayed now, and keys that perhaps may."""
        surely, perhaps = set(), set()
        for key in pool.entries:
            expected = self.replay(pool, key)
            if not expected.errors:
                surely.add(key)
            elif expected.may_pass:
                perhaps.add(key)
        return surely, perhaps

    def live_keys(self, consumer: Pool, loan: Loan) -> tuple[set[Hashable], bool]:
        """The keys that `live_key` may name, and whether it may name none."""
        if loan.closed or consumer.closed or loan.lender.closed:
            return set(), True
        latest = loan.lender.latest
        surely, perhaps = self.fresh(consumer)
        mine = {
            key
            for key, entry in consumer.entries.items()
            if entry.borrowed and entry.record is latest
        }
        return mine & (surely | perhaps), not mine & surely

    # Captures.

    def sources(self, pool: Pool, keys: Iterable[Any], *, replace: bool) -> tuple[Any, Any]:
        """Return (sources, errors); a call with errors is refused before anything is built."""
        errors: set[type[BaseException]] = set()
        sources: list[Source] = []
        if pool.closed:
            return [], {ReleasedStateError}
        for key in keys:
            held = pool.entries.get(key)
            if replace and held is None:
                errors.add(KeyMismatchError)
                continue
            if not replace and held is not None and not held.dead:
                errors.add(CaptureError)
                continue
            loan = pool.loan
            if loan is not None and loan.when(key):
                lender = loan.lender
                found = lender.find(loan.key(key))
                if lender.closed:
                    errors |= {ReleasedStateError, KeyMismatchError}
                elif found is None:
                    errors.add(KeyMismatchError)
                elif found.dead:
                    errors |= {ReleasedStateError, KeyMismatchError}
                else:
                    views = found.views if loan.view is None else (*found.views, loan.view)
                    sources.append(Source(key, found.record.owner, found.record, True, views))
            elif pool.owner is None:
                errors.add(OwnershipError)
            else:
                sources.append(Source(key, pool.owner, self._shared(pool, key, keys), False))
        return sources, errors

    def _shared(self, pool: Pool, key: Any, replaced: Iterable[Any]) -> Record | None:
        """The state that `key` shares with a key which stays, if there is one."""
        going = set(replaced)
        for other in pool.entries.values():
            stays = other.key not in going and not other.borrowed and not other.dead
            if stays and pool.group(other.key) == pool.group(key):
                return other.record
        return None

    def register(
        self,
        pool: Pool,
        sources: Iterable[Source],
        new: Callable[[Pool, Any, Hashable], Record],
        writes: Mapping[Hashable, bool],
        *,
        engine_made: bool = False,
    ) -> None:
        """A capture succeeded. `new` makes the record of a key where the owner has it now."""
        made: dict[Hashable, Record] = {}
        for source in sources:
            record = source.record
            if record is None:
                group = pool.group(source.key)
                if group not in made:
                    made[group] = self._kept_or(
                        pool, source.key, new(pool, source.owner, source.key)
                    )
                record = made[group]
            if not source.borrowed and source.key not in record.keys:
                record.keys.append(source.key)
                record.names.append(source.key)
            if record not in self.records:
                self.records.append(record)
            old = pool.entries.get(source.key)
            entry = Entry(
                source.key,
                record,
                source.borrowed,
                writes[source.key],
                source.views,
                engine_made=engine_made,
            )
            pool.entries[source.key] = entry
            record.leases.setdefault(pool.name, Lease(pool.limit))
            pool.captures += 1
            if old is not None and old.record is not record:
                self._let_go(pool, old)

    def _kept_or(self, pool: Pool, key: Hashable, record: Record) -> Record:
        """Borrowers need not notice a recapture that comes out at the same place."""
        old = pool.entries.get(key)
        if old is None or old.borrowed or old.dead or old.record.place != record.place:
            return record
        return old.record

    # Letting go.

    def _let_go(self, pool: Pool, entry: Entry) -> None:
        record = entry.record
        if not entry.borrowed and entry.key in record.keys:
            record.keys.remove(entry.key)
        if any(other.record is record for other in pool.entries.values()):
            return
        record.leases.pop(pool.name, None)
        if not entry.borrowed:
            record.released = True
            if record in self.records:
                self.records.remove(record)

    def release(self, pool: Pool, keys: Iterable[Hashable]) -> None:
        for key in list(keys):
            self._let_go(pool, pool.entries.pop(key))

    def forget(self, pool: Pool) -> None:
        """Nobody holds the pool any more; its states stay while somebody borrows them."""
        self.pools.remove(pool)
        for record in list(self.records):
            record.leases.pop(pool.name, None)
            if not record.leases:
                self.records.remove(record)

    def close(self, pool: Pool) -> None:
        self.release(pool, pool.entries)
        if pool.loan is not None:
            pool.loan.closed = True
            pool.loan = None
        pool.closed = True

    def end_loan(self, consumer: Pool, loan: Loan) -> None:
        if loan.closed:
            return
        loan.closed = True
        if consumer.loan is loan:
            consumer.loan = None
        for entry in consumer.entries.values():
            if entry.borrowed:
                entry.ended = True
                entry.record.leases.pop(consumer.name, None)


def lenders(pool: Pool) -> Iterator[Pool]:
    """A pool, its lender, its lender's lender, and so on."""
    current: Pool | None = pool
    while current is not None:
        yield current
        current = current.loan.lender if current.loan is not None else None
