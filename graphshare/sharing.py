"""share_states: one pool's graphs replay on the state that another pool's owner builds."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from graphshare.entry import View
from graphshare.errors import KeyMismatchError, SpecMismatchError, StateDifferenceError
from graphshare.freshness import Staleness, Why
from graphshare.holdings import Source
from graphshare.owner import AttentionSpec
from graphshare.pool import GraphPool
from graphshare.refusals import Refusals
from graphshare.verification import build_own, first_differences, snapshot

__all__ = ["Loan", "SharedStates", "share_states"]

P = TypeVar("P", bound=Hashable)
C = TypeVar("C", bound=Hashable)


class Loan:
    """What a consumer knows of its lender. Held by the consumer, and holds the producer."""

    __slots__ = ("closed", "producer", "_key", "_view", "_when")

    def __init__(
        self,
        producer: GraphPool[Any],
        key: Callable[[Any], Hashable] | None,
        view: View | None,
        when: Callable[[Any], bool] | None,
    ) -> None:
        self.producer = producer
        self.closed = False
        self._key, self._view, self._when = key, view, when

    def lends(self, key: Hashable) -> bool:
        """Whether ``key`` is to be borrowed."""
        return self._when is None or bool(self._when(key))

    def source(self, key: Hashable, refuse: Refusals) -> Source | None:
        """Return where the lender's state for a consumer's key lies, ``None`` if there is none.

        Raises:
            ReleasedStateError: The lender was closed, or let that state go.
        """
        if self.producer.closed:
            raise refuse.released(key, f"{self.producer.name} is closed", doing="capture")
        entry = self.producer.holdings.find(key if self._key is None else self._key(key))
        if entry is None:
            return None
        if entry.lease.ended:
            raise refuse.released(
                key, f"{self.producer.name} no longer has this state", doing="capture"
            )
        views = entry.views if self._view is None else (*entry.views, self._view)
        return Source(key, entry.owner_key, entry.record, views, borrowed=True)

    def check_specs(self, spec: AttentionSpec | None, refuse: Refusals) -> bool:
        """Compare a borrower's spec with those of all its lenders; say whether any was stated.

        Raises:
            SpecMismatchError: They differ in a field that the kernel bakes in.
        """
        return _check_specs(self.producer, spec, refuse)

    def no_state(self, missing: Sequence[Hashable], refuse: Refusals) -> KeyMismatchError:
        """Return the error for consumer's keys that the lender has no state for."""
        producer = self.producer
        wanted = missing[0] if self._key is None else self._key(missing[0])
        nearest = producer.holdings.dispatcher.nearest(wanted) if len(producer) else ()
        return refuse.counted(
            KeyMismatchError(
                f"{refuse.name}: capture of keys that {producer.name} has no state for",
                expected="keys that are captured there (nearest: "
                + (", ".join(map(repr, nearest)) or "none, it has captured nothing")
                + ")",
                got=", ".join(map(repr, missing)),
                key=missing[0] if len(missing) == 1 else None,
                consequence="There is no state to borrow, and the graphs would run on nothing",
                remedy=f"Capture them in {producer.name} first, map them with "
                "share_states(key=...), or leave them out with when=...",
                missing=tuple(missing),
                nearest=tuple(nearest),
            )
        )

    def close(self) -> None:
        """Mark it ended."""
        self.closed = True


class SharedStates(Generic[P, C]):
    """The handle of a loan; made by :func:`share_states`.

    Attributes:
        producer: The pool that lends.
        consumer: The pool that borrows.
        spec_checked: Whether both pools stated a spec, so that they were compared.
    """

    def __init__(
        self, producer: GraphPool[P], consumer: GraphPool[C], loan: Loan, *, spec_checked: bool
    ) -> None:
        self.producer = producer
        self.consumer = consumer
        self.spec_checked = spec_checked
        self._loan = loan

    def __repr__(self) -> str:
        state = ", closed" if self._loan.closed else ""
        return f"SharedStates({self.producer.name!r} -> {self.consumer.name!r}{state})"

    @property
    def closed(self) -> bool:
        """Whether the loan has ended."""
        return self._loan.closed

    @property
    def live_key(self) -> C | None:
        """The consumer's key that is fresh by the producer's latest refresh, or ``None``.

        The consumer follows it and need not dispatch by itself, where it might choose another.
        """
        if self._loan.closed:
            return None
        lease = self.consumer.holdings.lease_on(self.producer.clock.latest)
        if lease is None or lease.left <= 0 or not lease.borrowed:
            return None
        key: Any = lease.live_key
        return key

    def verify(self, batch: Any, *, padding: bool = False) -> None:
        """Build the live key with the consumer's own owner too, and compare value by value.

        Proof, in a test, that borrowing is right for this pair. The producer is stale afterwards,
        since the two owners may share buffers.

        Args:
            batch: What the producer was refreshed with, as the consumer's owner takes it.
            padding: Compare the rows past the live batch as well.

        Raises:
            OwnershipError: The consumer has no owner of its own.
            StaleStateError: The producer has not been refreshed.
            StateDifferenceError: The two states differ.
        """
        consumer = self.consumer
        owner = consumer.owner
        if owner is None:
            raise consumer.refuse.ownership(
                "verify without an owner",
                expected="an owner of the consumer's own to compare with",
                got="none",
                remedy="Give the consumer an owner; it stays unused while it borrows",
            )
        key = self.live_key
        if key is None:
            raise consumer.refuse.not_fresh(None, Why(Staleness.NEVER_REFRESHED))
        entry = consumer.holdings.entries[key]
        rules = {
            **(getattr(owner, "host_values", None) or {}),
            **(getattr(entry.record.book.owner, "host_values", None) or {}),
        }
        borrowed = snapshot(entry.state(), rules)
        try:
            own = build_own(consumer, owner, key, batch)
            differences = first_differences(
                borrowed, own, key=key, batch=batch, owner=owner, rules=rules, padding=padding
            )
        finally:
            entry.record.spoil(Why(Staleness.INVALIDATED, (consumer.name, key)))
        if differences:
            path, expected, got = differences[0]
            raise consumer.refuse.counted(
                StateDifferenceError(
                    f"{consumer.name}: verify: {path or '(the state itself)'} differs from "
                    f"what {entry.record.pool_name} built",
                    expected=f"{expected} (the consumer's own)",
                    got=f"{got} (borrowed)",
                    key=key,
                    consequence="Borrowing gives other results than building, for this pair",
                    remedy="Turn borrowing off for such keys with when=..., or narrow the state "
                    "with view=...",
                    path=path,
                    paths=tuple(each.path for each in differences),
                )
            )

    def close(self) -> None:
        """End the loan; may be called again.

        The consumer's borrowed graphs raise ``ReleasedStateError`` until they are captured anew,
        on another loan or on the consumer's own owner.
        """
        if self._loan.closed:
            return
        self._loan.close()
        if self.consumer.loan is self._loan:
            self.consumer.loan = None
        self.consumer.holdings.end_loan((self.producer.name, None))


def share_states(
    producer: GraphPool[P],
    consumer: GraphPool[C],
    *,
    key: Callable[[C], P] | None = None,
    view: View | None = None,
    when: Callable[[C], bool] | None = None,
) -> SharedStates[P, C]:
    """Let ``consumer``'s graphs replay on the states that ``producer``'s owner builds.

    What is shared is the owner and its addresses: before each warmup and each capture of the
    consumer, the producer's owner builds the state again for that key. At run time one refresh of
    the producer serves both.

    Args:
        producer: The pool that lends; it may itself borrow.
        consumer: The pool that borrows; it has captured nothing yet.
        key: Maps a consumer's key to the producer's; by default the same key.
        view: Picks what the consumer sees of the state (its own layers, its own cache group).
            Returns the state's own tensors or views of them.
        when: Asked once for each key at capture; where it says no, the consumer's own owner
            builds that key.

    Raises:
        OwnershipError: The consumer borrows already or has captured, the loan would close a
            cycle, or the pools are on two devices.
        SpecMismatchError: The specs differ in a field that the kernel bakes in.
        ReleasedStateError: One of the pools is closed.
    """
    refuse = consumer.refuse
    for pool in (producer, consumer):
        if pool.closed:
            raise refuse.released(None, f"{pool.name} is closed", doing="share_states")
    if consumer.loan is not None:
        raise refuse.ownership(
            "a second producer",
            expected="one lender",
            got=f"{producer.name} beside {consumer.loan.producer.name}",
            remedy="Close the first loan, or use one pool for each lender",
        )
    held = [each for each in consumer.keys() if consumer.holdings.holds(each)]
    if held:
        raise refuse.ownership(
            "share_states after the consumer's capture",
            expected="a consumer without graphs",
            got=f"{len(held)} captured keys, on addresses of its own",
            remedy="Declare the loan first, or release the consumer's keys",
        )
    if producer.device != consumer.device:
        raise refuse.ownership(
            "share_states across devices",
            expected=str(producer.device),
            got=str(consumer.device),
            remedy="Share within one device",
        )
    if any(pool is consumer for pool in _lenders(producer)):
        raise refuse.ownership(
            "a cycle of loans",
            expected="a lender that does not borrow from its borrower",
            got=" <- ".join(pool.name for pool in _lenders(producer)),
            remedy="Lend from the pool whose owner builds the state",
        )
    loan = Loan(producer, key, view, when)
    spec_checked = loan.check_specs(consumer.spec, refuse)
    consumer.loan = loan
    return SharedStates(producer, consumer, loan, spec_checked=spec_checked)


def _lenders(pool: GraphPool[Any]) -> Iterator[GraphPool[Any]]:
    """Yield a pool, its lender, its lender's lender, and so on."""
    current: GraphPool[Any] | None = pool
    while current is not None:
        yield current
        current = current.loan.producer if current.loan is not None else None


def _check_specs(producer: GraphPool[Any], spec: AttentionSpec | None, refuse: Refusals) -> bool:
    mine = spec
    stated = [pool for pool in _lenders(producer) if pool.spec is not None]
    if mine is None or not stated:
        return False
    for pool in stated:
        theirs = pool.spec
        differing = theirs.differing(mine) if theirs is not None else ()
        if differing:
            raise refuse.counted(
                SpecMismatchError(
                    f"{refuse.name}: cannot borrow from {pool.name}",
                    expected=", ".join(f"{name}={getattr(theirs, name)}" for name in differing),
                    got=", ".join(f"{name}={getattr(mine, name)}" for name in differing),
                    consequence="The kernel bakes in a plan for the lender's values and would "
                    "compute with them",
                    remedy="Let this pool's own owner build its states",
                    fields=differing,
                )
            )
    return True
