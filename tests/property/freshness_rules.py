"""Further rules of the machines, by subject; a machine takes those that it needs."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from graphshare import (
    GraphShareError,
    OwnershipError,
    Phase,
    ReleasedStateError,
    Staleness,
    StaleStateError,
    StateDifferenceError,
)
from tests.property import freshness_model as m
from tests.property.freshness_captures import Used, attempt, check_capture, same_error
from tests.property.freshness_machine import (
    MAPS,
    VIEWS,
    WHENS,
    Machine,
    key_sets,
    picks,
    pools,
)
from tests.property.freshness_world import KEYS, Batch, seen

# Where it is not 0, a rule does nothing that would leave little to look at.
reluctances = st.integers(0, 2)


class Faults(Machine):
    """Refreshes that fail."""

    @rule(
        index=pools,
        pick=picks,
        fault=st.sampled_from(["raise", "raise late", "moved", "capacity", "splits"]),
    )
    def failing_refresh(self, index: int, pick: int, fault: str) -> None:
        used = self.pool(index)
        self.check_refresh(used, self.key(used, pick), fault)

    @rule(index=pools, pick=picks)
    def move(self, index: int, pick: int) -> None:
        """Buffers grow behind graphshare's back: refused until captured anew, or moved back."""
        used = self.pool(index)
        if used.model.owner is not None:
            used.model.owner.move(self.key(used, pick))


class Verifying(Machine):
    """Proofs that borrowing is right."""

    @precondition(lambda self: self.shares)
    @rule(pick=picks, same=st.booleans(), refreshes=st.booleans())
    def verify(self, pick: int, same: bool, refreshes: bool) -> None:
        share = self.shares[pick % len(self.shares)]
        if refreshes:
            self.refresh_for(share.consumer, pick)
        used, world, model = share.consumer, self.world, self.model
        pool, owner = used.model, used.model.owner
        keys, may_be_none = model.live_keys(pool, share.loan)
        entries = [pool.entries[key] for key in keys]
        if (keys and may_be_none) or any(entry.views for entry in entries):
            return
        record = entries[0].record if entries else None
        token = record.token if same and record is not None else world.new_token()
        before = self.numbers(record)
        world.log.clear()
        _, error = attempt(used, lambda: share.real.verify(Batch(token)))
        if owner is None or record is None:
            none = () if record is not None else (StaleStateError, ReleasedStateError)
            without = () if owner is not None else (OwnershipError,)
            same_error(error, (*none, *without))
            assert not world.log
            return
        (build,) = world.builds()
        assert build.owner is owner
        assert build.phase is Phase.REPLAY
        key = build.key
        assert key in keys
        contents = seen(before, pool.entries[key].views)
        same_error(error, () if build.contents == contents else (StateDifferenceError,))
        self.built(build, None, (pool.name, key))
        record.causes.add(m.Cause(Staleness.INVALIDATED))
        for lender in m.lenders(share.loan.lender):
            for entry in lender.entries.values():
                entry.record.maybe.add(m.Cause(Staleness.INVALIDATED))

    def refresh_for(self, consumer: Used, pick: int) -> None:
        """Refresh something that it borrows."""
        borrowed = [e.record for e in consumer.model.entries.values() if e.borrowed and not e.dead]
        if borrowed:
            record = borrowed[pick % len(borrowed)]
            for used in self.used:
                if used.model is record.pool:
                    self.check_refresh(used, record.keys[0])

    def numbers(self, record: m.Record | None) -> list[list[int]]:
        if record is None:
            return []
        return [self.world.tensor(leaf).tolist() for leaf in record.place.leaves]


class Captures(Machine):
    """Captures of more keys, and again; some of them fail."""

    def plan(self, failing: int, failure: str) -> None:
        """Let the `failing`-th build or forward of the next capture fail."""
        if failure == "write" and self.backend != "tape":
            return  # nobody sees it there
        self.world.failure = failure
        if failure == "build":
            self.world.failing_build = failing
        elif failure != "none":
            self.world.failing_call = failing

    failures = st.sampled_from(["none", "none", "none", "build", "raise", "host", "write"])

    @rule(
        index=pools,
        chosen=key_sets,
        writes=st.booleans(),
        engine_made=st.booleans(),
        aborts=st.integers(0, 3),
        failing=st.integers(0, 6),
        failure=failures,
    )
    def capture(
        self,
        index: int,
        chosen: list[int],
        writes: bool,
        engine_made: bool,
        aborts: int,
        failing: int,
        failure: str,
    ) -> None:
        used = self.pool(index)
        keys = [KEYS[i] for i in chosen]
        missing = [k for k in keys if k not in used.model.entries or used.model.entries[k].dead]
        if failing:  # mostly keys that are not held
            keys = missing or keys
        self.plan(failing, failure)
        check_capture(
            self,
            used,
            keys,
            writes=writes,
            engine_made=engine_made,
            aborts=engine_made and not aborts,
        )

    @rule(
        index=pools,
        chosen=st.lists(picks, min_size=0, max_size=3),
        failing=st.integers(0, 6),
        failure=failures,
    )
    def recapture(self, index: int, chosen: list[int], failing: int, failure: str) -> None:
        """With no key chosen, all of them."""
        used = self.pool(index)
        if not used.model.entries:
            return
        keys = list(dict.fromkeys(self.key(used, pick) for pick in chosen))
        self.plan(failing, failure)
        check_capture(
            self,
            used,
            keys or list(used.model.entries),
            replace=True,
            everything=not keys,
        )

    @rule(index=pools, pick=picks, writes=st.booleans())
    def recapture_by_engine(self, index: int, pick: int, writes: bool) -> None:
        used = self.pool(index)
        key = self.key(used, pick)
        check_capture(self, used, [key], writes=writes, replace=True, engine_made=True)


class Lifetimes(Machine):
    """Keys, pools and loans that go."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped: list[tuple[m.Pool, weakref.ref[Any]]] = []

    @rule(index=pools, pick=picks)
    def release(self, index: int, pick: int) -> None:
        used = self.pool(index)
        key = self.key(used, pick)
        _, error = attempt(used, lambda: used.real.release(key))
        if key in used.model.entries:
            same_error(error, ())
            self.model.release(used.model, [key])
        else:
            same_error(error, self.model.replay(used.model, key).errors)

    @rule(index=pools, reluctance=reluctances)
    def release_all(self, index: int, reluctance: int) -> None:
        used = self.pool(index)
        if reluctance:
            return
        used.real.release()
        self.model.release(used.model, used.model.entries)

    @rule(index=pools, reluctance=reluctances)
    def close(self, index: int, reluctance: int) -> None:
        used = self.pool(index)
        if reluctance:
            return
        used.real.close()
        self.model.close(used.model)
        self.sweep()

    @precondition(lambda self: self.shares)
    @rule(pick=picks)
    def close_loan(self, pick: int) -> None:
        share = self.shares[pick % len(self.shares)]
        share.real.close()
        assert share.real.closed
        assert share.real.live_key is None
        self.model.end_loan(share.consumer.model, share.loan)
        self.sweep()

    @rule(
        index=pools,
        other=pools,
        when=st.sampled_from(sorted(WHENS)),
        view=st.sampled_from(sorted(VIEWS)),
        key=st.sampled_from(sorted(MAPS)),
    )
    def share(self, index: int, other: int, when: str, view: str, key: str) -> None:
        """A loan, or what forbids it."""
        lender, consumer = self.pool(index), self.pool(other)
        if consumer.model.state_key is not None:
            return
        if consumer.model.owner is None:
            when = "always"
        error: BaseException | None = None
        refused: list[type[BaseException]] = []
        if lender.model.closed or consumer.model.closed:
            refused.append(ReleasedStateError)
        lends = len(lender.real) or lender.model.owner is not None or lender.model.loan is not None
        if consumer.model.owner is not None and not lends:
            refused.append(OwnershipError)
        alive = any(not entry.dead for entry in consumer.model.entries.values())
        cycle = any(pool is consumer.model for pool in m.lenders(lender.model))
        if alive or cycle or consumer.model.loan is not None:
            refused.append(OwnershipError)
        try:
            self.lend(lender, consumer, when, view, key)
        except GraphShareError as raised:
            error = raised
        same_error(error, refused)
        for used in (lender, consumer):  # who counts it is not said
            used.model.refusals = dict(used.real.statistics().refusals)

    @precondition(lambda self: len(self.used) > 1)
    @rule(index=pools, reluctance=reluctances)
    def drop(self, index: int, reluctance: int) -> None:
        """A careless `del`: what is borrowed from the pool outlives it, and nothing else does."""
        used = self.pool(index)
        if reluctance:
            return
        model = used.model
        self.dropped.append((model, weakref.ref(used.real)))
        self.used.remove(used)
        self.handles = [handle for handle in self.handles if handle[0] is not used]
        self.shares = [
            share
            for share in self.shares
            if share.consumer is not used and share.real.producer is not used.real
        ]
        if model.owner is not None:
            self.uncounted.add(model.owner.name)
        del used
        self.sweep()

    def sweep(self) -> None:
        """Forget pools that nobody reaches any more, as graphshare must."""
        reached = {id(pool) for used in self.used for pool in m.lenders(used.model)}
        for pool, real in list(self.dropped):
            if id(pool) in reached:
                assert real() is not None, f"{pool.name} is gone, and something borrows from it"
                continue
            if real() is not None:
                gc.collect()
            assert real() is None, f"{pool.name} is still there"
            self.dropped.remove((pool, real))
            self.model.forget(pool)
