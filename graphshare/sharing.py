"""share_states: one pool's graphs replay on the state that another pool's owner builds."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from graphshare.arguments import check_call, check_flag, wrong_type
from graphshare.entry import View
from graphshare.errors import StateDifferenceError
from graphshare.lease import Staleness, Why
from graphshare.loan import Loan, lenders, lends_anything
from graphshare.pool import GraphPool
from graphshare.verification import build_own, first_differences, snapshot

if TYPE_CHECKING:
    from graphshare.provenance.report import Provenance

__all__ = ["SharedStates", "share_states"]

P = TypeVar("P", bound=Hashable)
C = TypeVar("C", bound=Hashable)


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
            StaleStateError: The producer's last refresh is no longer fresh for the consumer.
            ReleasedStateError: The loan has ended.
            StateDifferenceError: The two states differ.
            TypeError: ``padding`` is no switch.
        """
        consumer = self.consumer
        check_flag(f"{consumer.name}: verify: padding", padding)
        owner = consumer.owner
        if owner is None:
            raise consumer.refuse.ownership(
                "verify without an owner",
                expected="an owner of the consumer's own to compare with",
                got="none",
                consequence="There is nothing to compare what is borrowed with",
                remedy="Give the consumer an owner; it stays unused while it borrows",
            )
        key = self.live_key
        if key is None:
            lease = consumer.holdings.lease_on(self.producer.clock.latest)
            cause = Why(Staleness.NEVER_REFRESHED) if lease is None else lease.cause
            raise consumer.refuse.not_fresh(None, cause, doing="verify")
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

    def prove(self, keys: Iterable[C] | None = None, *, build: bool = True) -> dict[C, Provenance]:
        """Prove from the graphs that the consumer's read the producer's buffers.

        For each borrowed leaf that the producer's graph has an address of, the consumer's graph
        must have one too, in that leaf; and none in a buffer of the consumer's own owner, but for
        buffers that the two owners share. Both pools must be inspectable. It sees no address that
        lies in device memory; see the page on provenance.

        Args:
            keys: Of the consumer; by default every borrowed one.
            build: Have the consumer's own owner, if there is one, build for each key, to learn
                which buffers are its own; what that writes over becomes stale. Otherwise only
                those count that states of its captured keys lie in.

        Returns:
            What was found in the consumer's graphs, by key.

        Raises:
            ReleasedStateError: The loan has ended, or the lender let a key go.
            KeyMismatchError: A key is not captured or not borrowed, or there is none.
            TypeError: ``keys`` is one key, or ``build`` no switch.
            ProvenanceError: A graph does not read what it should, or cannot be read.
        """
        from graphshare.provenance.proof import prove

        consumer = self.consumer
        check_flag(f"{consumer.name}: prove: build", build)
        if self._loan.closed:
            raise consumer.refuse.released(None, "the loan was closed", doing="prove")
        lent: dict[Any, Any] = {}
        gone: list[Any] = []
        for key, entry in consumer.holdings.entries.items():
            lender = self._loan.lender_entry(key) if entry.borrowed else None
            if lender is not None and lender.record is entry.record:
                lent[key] = lender
            elif entry.borrowed:
                gone.append(key)
        lender_name = self.producer.name
        found: dict[Any, Provenance] = prove(
            consumer, lent, keys, gone=gone, lender=lender_name, build=build
        )
        return found

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
    adopt: bool = False,
) -> SharedStates[P, C]:
    """Let ``consumer``'s graphs replay on the states that ``producer``'s owner builds.

    What is shared is the owner and its addresses: before each warmup and each capture of the
    consumer, the producer's owner builds the state again for that key. At run time one refresh of
    the producer serves both.

    Along a chain of loans the state is the first pool's: where a pool in the middle releases its
    key, closes, or ends its own loan, what was captured further down stays valid.

    Args:
        producer: The pool that lends; it may itself borrow.
        consumer: The pool that borrows; it has captured nothing yet, unless ``adopt``.
        key: Maps a consumer's key to the producer's; by default the same key.
        view: Picks what the consumer sees of the state (its own layers, its own cache group).
            Returns the state's own tensors or views of them.
        when: Asked once for each key at capture; where it says no, the consumer's own owner
            builds that key.
        adopt: The consumer has captured on its own owner's buffers: put those graphs on the
            producer's. Its states must correspond to the producer's leaf by leaf, and its graphs
            be inspectable. All keys, or none.

    Raises:
        KeyMismatchError: ``adopt``, and the producer has no state for a key.
        ProvenanceError: ``adopt``, and a graph cannot be read.
        RebindError: ``adopt``, and the states do not correspond, or a node cannot be changed.
        OwnershipError: The consumer borrows already or has captured, the loan would close a
            cycle, or the pools are on two devices.
        SpecMismatchError: The specs differ in a field that the kernel bakes in.
        ReleasedStateError: One of the pools is closed.
        TypeError: What is given is no pool, or cannot be called.
    """
    for role, given in (("producer", producer), ("consumer", consumer)):
        if not isinstance(given, GraphPool):
            raise wrong_type(f"share_states: {role}", "a GraphPool", given)
    for option, call in (("key", key), ("view", view), ("when", when)):
        check_call(f"share_states: {option}", call, optional=True)
    check_flag("share_states: adopt", adopt)
    refuse = consumer.refuse
    for pool in (producer, consumer):
        if pool.closed:
            raise refuse.closed("share_states", pool=pool.name)
    if producer is consumer:
        raise refuse.ownership(
            "a loan of a pool to itself",
            expected="two pools",
            got=f"{producer.name} twice",
            remedy="A pool replays on its own states without a loan",
        )
    if consumer.loan is not None:
        raise refuse.ownership(
            "a second producer",
            expected="one lender",
            got=f"{producer.name} beside {consumer.loan.producer.name}",
            remedy="Close the first loan, or use one pool for each lender",
        )
    if consumer.owner is not None and not lends_anything(producer):
        raise refuse.ownership(
            f"share_states with nothing to borrow from {producer.name}",
            expected="a producer with an owner, or with a lender of its own",
            got=f"{producer.name}, which has neither, for {consumer.name}, which has an owner",
            consequence=f"{consumer.name} would borrow states that nobody builds",
            remedy="Give the pools as share_states(producer, consumer), in this order; if "
            f"{producer.name} is to lend on what it borrows, declare its own loan first",
        )
    held = [each for each in consumer.holdings.entries if consumer.holdings.holds(each)]
    if held and not adopt:
        raise refuse.ownership(
            "share_states after the consumer's capture",
            expected="a consumer without graphs",
            got=f"{len(held)} captured keys, on addresses of its own",
            remedy="Declare the loan first, release the consumer's keys, or put its graphs on the "
            "producer's buffers with adopt=True",
        )
    if producer.device != consumer.device:
        raise refuse.ownership(
            "share_states across devices",
            expected=str(producer.device),
            got=str(consumer.device),
            remedy="Share within one device",
        )
    if any(pool is consumer for pool in lenders(producer)):
        raise refuse.ownership(
            "a cycle of loans",
            expected="a lender that does not borrow from its borrower",
            got=" <- ".join(pool.name for pool in lenders(producer)),
            remedy="Lend from the pool whose owner builds the state",
        )
    loan = Loan(producer, key, view, when)
    spec_checked = loan.check_specs(consumer.spec, refuse)
    if held:
        from graphshare.provenance.adoption import plan_adoption

        plan_adoption(consumer, loan).apply()
    consumer.loan = loan
    return SharedStates(producer, consumer, loan, spec_checked=spec_checked)
