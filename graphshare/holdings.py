"""The keys that one pool holds: entries, leases, and the dispatch over them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from graphshare.arguments import wrong_type
from graphshare.dispatch import Dispatcher
from graphshare.entry import Entry, View
from graphshare.freshness import StateRecord
from graphshare.lease import Lease, PoolClock, Staleness, Why, Writer
from graphshare.refusals import Refusals
from graphshare.statistics import Tally

__all__ = ["Holdings", "Source", "States"]

K = TypeVar("K", bound=Hashable)


class Source(NamedTuple):
    """Where the state of one key comes from; no record where it is still to be made."""

    key: Any
    owner_key: Hashable
    record: StateRecord | None
    views: tuple[View, ...]
    borrowed: bool


class States(Mapping[K, Any]):
    """The states of a pool by key, as last built, as the pool sees them."""

    def __init__(self, entries: Mapping[K, Entry[K]], refuse: Refusals) -> None:
        self._entries = entries
        self._refuse = refuse

    def __getitem__(self, key: K) -> Any:
        entry = self._entries.get(key)
        if entry is None:
            raise self._refuse.unknown_key("states", [key], tuple(self._entries)[:3])
        return entry.state()

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class Holdings(Generic[K]):
    """What a pool holds. Keeps no reference to the pool, so that dropping a pool frees it.

    Args:
        refuse: Makes the pool's errors.
        tally: The pool's counters.
        clock: Which of the leases was granted last.
        state_key: Keys with an equal one share a state.
        covers, cost: For foreign key types.
        limit: Replays that a refresh grants this pool; ``None`` for no limit.
        checked: Whether the pool checks at all.
    """

    def __init__(
        self,
        refuse: Refusals,
        tally: Tally,
        clock: PoolClock,
        *,
        state_key: Callable[[Any], Hashable] | None,
        covers: Callable[[K, Any], bool] | None,
        cost: Callable[[K], Any] | None,
        limit: int | None,
        checked: bool,
    ) -> None:
        self.refuse = refuse
        self.tally = tally
        self.clock = clock
        self.entries: dict[K, Entry[K]] = {}
        # The same by the identity of the key, for who replays the very key that dispatch returned:
        # no hash in Python. An entry holds its key, so no other object can have that identity.
        self.by_id: dict[int, Entry[K]] = {}
        self.state_key: Callable[[Any], Hashable] = state_key or (lambda key: key)
        self._covers, self._cost = covers, cost
        self._limit, self._checked = limit, checked
        self._leases: dict[int, tuple[StateRecord, Lease]] = {}
        self._by_state: dict[Hashable, Entry[K]] = {}
        self.named: dict[Any, tuple[torch.Tensor, ...]] = {}  # by use and name, for provenance
        self.dispatcher: Dispatcher[K] = Dispatcher((), covers=covers, cost=cost)

    def __del__(self) -> None:
        # States outlive the pool where others borrow them; they must not go on granting to it.
        for record, lease in getattr(self, "_leases", {}).values():
            record.detach(lease)

    # Looking up.

    def holds(self, key: K) -> bool:
        """Whether ``key`` has a graph that can still be replayed some day."""
        entry = self.entries.get(key)
        return entry is not None and not entry.lease.ended

    def unknown(self, doing: str, missing: Sequence[Any]) -> Exception:
        """Return the error for keys that are not captured here."""
        return self.refuse.unknown_key(doing, missing, self.dispatcher.nearest(missing[0]))

    def find(self, key: Hashable) -> Entry[K] | None:
        """Return the entry that a borrower's key maps to: the same key, or the same state key."""
        entry = self.entries.get(key)  # pyright: ignore[reportArgumentType]
        if entry is None:
            entry = self._by_state.get(self.state_key(key))
        return entry

    def own_record(self, key: K) -> StateRecord | None:
        """Return the pool's own state that ``key`` shares with a key held already."""
        entry = self._by_state.get(self.state_key(key))
        if entry is None or entry.borrowed or entry.lease.ended:
            return None
        return entry.record

    def lease_on(self, serial: int) -> Lease | None:
        """Return the pool's lease on a state, by its number."""
        found = self._leases.get(serial)
        return found[1] if found else None

    def fresh_keys(self) -> tuple[K, ...]:
        """Return the keys that may be replayed now."""
        return tuple(key for key, entry in self.entries.items() if entry.lease.left > 0)

    def records(self) -> list[StateRecord]:
        """Return the states that the keys are captured on, once each."""
        return [record for record, _ in self._leases.values()]

    def reads(self, record: StateRecord) -> bool:
        """Say whether a key is captured on a state, whether it may be replayed or not."""
        return record.serial in self._leases

    def leases(self) -> list[Lease]:
        """Return all leases."""
        return [lease for _, lease in self._leases.values()]

    # Changing.

    def leaving(self, keys: Iterable[K]) -> set[int]:
        """Return the numbers of own states that go when ``keys`` are replaced."""
        going = set(keys)
        return {
            record.serial
            for record, lease in self._leases.values()
            if not lease.borrowed and going.issuperset(lease.keys)
        }

    def register(self, entries: Sequence[Entry[K]]) -> None:
        """Take over what a capture made, in place of what was held for the same keys."""
        replaced: list[tuple[Entry[K], Entry[K]]] = []
        for entry in entries:
            old = self.entries.get(entry.key)
            if old is not None:
                replaced.append((old, entry))
                self._keep_record(old, entry)
            self._lease(entry)
        # Only now: a state must not look unused while its keys change hands.
        for old, entry in replaced:
            self._let_go(old, entry)
        for entry in entries:
            self.entries[entry.key] = entry
        self.tally.captures += len(entries)
        self._reindex()

    def release(self, keys: Iterable[K]) -> None:
        """Let keys go, with their graphs; states that no key of this pool needs are released."""
        for key in list(keys):
            self._let_go(self.entries.pop(key))
        self._reindex()

    def _keep_record(self, old: Entry[K], new: Entry[K]) -> None:
        """Where a recapture came out at the same place, borrowers need not notice."""
        before, after = old.record, new.record
        if before is after or new.borrowed or old.borrowed or before.released or after.leases:
            return
        if before.checker is None or after.checker is None:
            return
        if before.checker.layout == after.checker.layout:
            new.record = before
            before.renew(after)
            after.abandon()

    def _lease(self, entry: Entry[K]) -> None:
        record, borrowed = entry.record, entry.borrowed
        found = self._leases.get(record.serial)
        if found is not None and found[1].ended:  # by a loan that was closed, and this is another
            self._count(found[1])
            found = None
        if found is None:
            lease = Lease(self._limit, self.clock, borrowed=borrowed, checked=self._checked)
            lease.holder = weakref.ref(self)
            self._leases[record.serial] = record, lease
            record.attach(lease)
        else:
            lease = found[1]
        if entry.key not in lease.keys:
            lease.keys.append(entry.key)
        if not borrowed and entry.owner_key not in record.keys:
            record.keys.append(entry.owner_key)
        lease.choose_live_key(record.keys)
        entry.lease = lease

    def _let_go(self, entry: Entry[K], renewed: Entry[K] | None = None) -> None:
        record, lease = entry.record, entry.lease
        entry.retire(self.refuse)
        if renewed is not None and renewed.lease is lease:
            return
        lease.keys.remove(entry.key)
        if lease.keys:
            if not lease.borrowed:
                record.keys.remove(entry.owner_key)
                record.key = record.keys[0]
            lease.choose_live_key(record.keys)
            return
        if self.lease_on(record.serial) is not lease:
            return  # it ended, and was counted when another took its place
        self._count(lease)
        del self._leases[record.serial]
        if not lease.borrowed:
            record.released = True
            record.spoil(Why(Staleness.RELEASED, (record.pool_name, entry.key)))
            record.book.version += 1
        record.detach(lease)

    def _count(self, lease: Lease) -> None:
        self.tally.gone_refreshes += lease.refreshes
        self.tally.gone_replays += lease.replays
        self.tally.gone_avoided += lease.builds_avoided

    def end_loan(self, by: Writer) -> None:
        """The loan was closed: nothing borrowed may be replayed any more."""
        for record, lease in self._leases.values():
            if lease.borrowed:
                lease.stop(Why(Staleness.RELEASED, by))
                record.detach(lease)
                record.remember(lease.holder)

    def _reindex(self) -> None:
        self.by_id.clear()
        self.by_id.update((id(entry.key), entry) for entry in self.entries.values())
        self._by_state = {}
        for entry in self.entries.values():
            self._by_state.setdefault(self.state_key(entry.key), entry)
        self.dispatcher = self._dispatcher_for(self.entries, carry=self.dispatcher)

    def check_keys(self, keys: Sequence[K]) -> None:
        """Refuse, before a capture, keys that cannot be dispatched to beside the held ones.

        Raises:
            TypeError: As :class:`Dispatcher` does, or a ``state_key`` is not hashable.
        """
        for key in keys:
            shared_by = self.state_key(key)
            try:
                hash(shared_by)
            except TypeError as error:
                raise wrong_type(
                    f"{self.refuse.name}: state_key({key!r})", "what can be hashed", shared_by
                ) from error
        try:
            self._dispatcher_for((*self.entries, *keys))
        except TypeError as error:
            raise TypeError(f"{self.refuse.name}: {error}") from error

    def _dispatcher_for(
        self, keys: Iterable[K], carry: Dispatcher[K] | None = None
    ) -> Dispatcher[K]:
        return Dispatcher(keys, covers=self._covers, cost=self._cost, carry=carry)
