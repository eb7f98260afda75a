"""GraphPool: invalidate, release, close, and what is left when it is gone."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from functools import partial

import pytest
import torch

from graphshare import (
    BatchDescriptor,
    Phase,
    ReleasedStateError,
    Staleness,
    StaleStateError,
)
from graphshare.ledger import ledger_for
from tests.one_buffer import BIG, SMALL, Apart, Owner, captured, double, make, served


def test_invalidate_one_or_all():
    """What an unseen build for that key may have written is stale."""
    pool = captured(Apart(), live_keys=2)
    pool.refresh(BIG, 1)
    pool.refresh(SMALL, 2)
    pool.invalidate(BIG)
    assert pool.statistics().fresh == (SMALL,)
    with pytest.raises(StaleStateError) as caught:
        pool.replay(BIG)
    assert caught.value.rule is Staleness.INVALIDATED
    assert caught.value.written_by == ("pool", BIG)
    pool.refresh(BIG, 1)
    pool.invalidate()
    assert pool.statistics().fresh == ()

    together = captured(live_keys=2)
    together.refresh(BIG, 1)
    together.invalidate(SMALL)
    assert together.statistics().fresh == ()


def test_close_is_idempotent():
    """Everything goes once; what comes after is refused as released."""
    pool = captured()
    bound = pool.bind(BIG)
    pool.close()
    pool.close()
    assert len(pool) == 0
    for call in (
        bound.replay,
        lambda: pool.replay(BIG),
        lambda: pool.refresh(BIG, 1),
        lambda: pool.capture([BIG], double),
        lambda: pool.bind(BIG),
        lambda: pool.dispatch(num_tokens=1, num_reqs=1),
    ):
        with pytest.raises(ReleasedStateError):
            call()
    assert pool.statistics().keys == 0


def test_a_released_graph_is_freed_once_and_launched_no_more():
    """Though another key of the same state may be replayed still."""
    lora = BatchDescriptor(4, 4, num_active_loras=1)
    diary = []
    pool = make(state_key=lambda key: key.num_tokens)
    with pool.capturing([BIG, lora]) as capturing:
        for key in capturing.keys:
            capturing.state(key, Phase.CAPTURE)
            launch, release = (partial(diary.append, (word, key)) for word in ("launch", "free"))
            capturing.commit(key, launch, release=release)
    bound = pool.bind(lora)
    pool.refresh(BIG, 1)
    pool.release(lora)
    with pytest.raises(ReleasedStateError):
        bound.replay()
    assert diary == [("free", lora)]
    pool.replay(BIG)
    pool.close()
    assert diary == [("free", lora), ("launch", BIG), ("free", BIG)]


def test_a_pool_is_a_context_manager():
    """It closes on leaving, and hides no exception."""
    with captured() as pool:
        assert served(pool, BIG, 1) == [2] * 4
    assert pool.closed
    with pytest.raises(ZeroDivisionError), captured() as pool:
        raise ZeroDivisionError
    assert pool.closed


def test_a_dropped_pool_leaves_no_trace():
    """States, owner, tensors and footprints go with the pool; no other pool is disturbed."""
    gc.collect()
    ledger = ledger_for(torch.device("cpu"))
    live, books = set(ledger.live), set(ledger._books)
    owner = Owner()
    pool = captured(owner, live_keys=2)
    other = captured(owner, name="other")
    pool.refresh(BIG, 1)
    pool.replay(BIG)
    assert set(ledger.live) > live
    gone = [weakref.ref(each) for each in (pool, pool.holdings, pool.backend)]
    del pool
    gc.collect()
    assert all(ref() is None for ref in gone)
    assert served(other, BIG, 1) == [2] * 4

    gone = [weakref.ref(owner), weakref.ref(owner.buffer)]
    del owner, other
    gc.collect()
    assert all(ref() is None for ref in gone)
    assert set(ledger.live) == live
    assert set(ledger._books) == books


def test_a_footprint_goes_with_its_pool():
    """By default a build may write all leaves of its owner, without those of a gone pool."""

    class Tail(Owner):
        def build(self, key, batch, phase):
            return self.buffer[6:].fill_(0.0 if batch is None else batch)

    owner, tail = Owner(), Tail()
    tail.buffer = owner.buffer
    narrow, other = captured(owner, name="narrow"), captured(tail, name="tail", keys=[SMALL])
    wide = captured(owner, name="wide", keys=[BatchDescriptor(8)])
    other.refresh(SMALL, 1)
    narrow.refresh(BIG, 1)
    with pytest.raises(StaleStateError) as caught:
        other.replay(SMALL)
    assert caught.value.written_by == ("narrow", BIG)

    del wide
    gc.collect()
    other.refresh(SMALL, 1)
    narrow.refresh(BIG, 1)
    assert other.replay(SMALL).tolist() == [2] * 2


@pytest.mark.parametrize("checks", ["fast", "strict", "off"])
def test_memory_is_flat(checks):
    """100,000 refreshes and replays leave no more behind than the first thousands did."""
    owner = Owner()
    owner.builds = _Forgetful()
    pool = captured(owner, checks=checks, live_keys=2)
    bound = pool.bind(BIG)
    rounds = 45_000 if checks == "fast" else 10_000

    def serve(times):
        for step in range(times):
            pool.refresh(BIG, step)
            bound.replay()
            pool.refresh(SMALL, step)
            pool.replay(SMALL)
            pool.dispatch(num_tokens=1 + step % 4, num_reqs=1)

    serve(5_000)
    gc.collect()
    tracemalloc.start()
    try:
        serve(100)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    serve(rounds)
    gc.collect()
    objects = len(gc.get_objects())
    tracemalloc.start()
    try:
        serve(100)
        gc.collect()
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(gc.get_objects()) <= objects + 10
    assert after <= before + 4_000
    assert pool.statistics().refreshes == 2 * (5_200 + rounds)


class _Forgetful(list):
    def append(self, _):
        pass


class ReleasesIt:
    """Somebody's object in a cycle, whose finalizer lets a key go."""

    def __init__(self, pool):
        self.pool = pool
        self.itself = self

    def __del__(self):
        if BIG in self.pool:
            self.pool.release(BIG)


def test_a_key_that_a_finalizer_releases_was_whole(monkeypatch):
    """A collection between two halves of taking over a capture would find half a key."""
    pool = make(Owner())
    register = pool.holdings.register

    def registered(entries):
        register(entries)
        ReleasesIt(pool)  # garbage from here on

    monkeypatch.setattr(pool.holdings, "register", registered)
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        pool.capture([BIG, SMALL], double)
        gc.collect()
    finally:
        gc.set_threshold(*before)
    assert BIG not in pool
    pool.refresh(SMALL, 1)
    with pytest.raises(KeyError):
        pool.bind(BIG)
