"""GraphPool: its arguments, its mapping, what it counts."""

from __future__ import annotations

import pytest

from graphshare import (
    BatchDescriptor,
    GraphPool,
    KeyMismatchError,
    OwnershipError,
    StaleStateError,
)
from graphshare.capture import make_backend
from tests.one_buffer import BIG, SMALL, Owner, captured, double, make, pair, served


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"checks": "none"}, ValueError),
        ({"live_keys": 0}, ValueError),
        ({"live_keys": -1}, ValueError),
        ({"live_keys": True}, TypeError),
        ({"live_keys": 1.5}, TypeError),
        ({"live_keys": None}, TypeError),
        ({"replays_per_refresh": 0}, ValueError),
        ({"replays_per_refresh": "2"}, TypeError),
        ({"owner": object()}, TypeError),
        ({"backend": "graph"}, ValueError),
        ({"backend": "cuda"}, ValueError),
        ({"device": "meta"}, ValueError),
        ({"backend_options": {"spell": 1}}, TypeError),
    ],
)
def test_wrong_arguments_are_refused(options, error):
    """Before anything is made."""
    with pytest.raises(error):
        GraphPool("pool", **{"owner": Owner(), "device": "cpu", **options})


@pytest.mark.parametrize(
    ("rules", "error"), [({"*.a": "atmost"}, ValueError), ({"*.a": 1}, TypeError), (3, TypeError)]
)
def test_rules_of_the_owner_are_checked_at_once(rules, error):
    """A misspelt rule would otherwise check nothing."""
    owner = Owner()
    owner.host_values = rules
    with pytest.raises(error):
        make(owner)


def test_a_pool_without_an_owner_cannot_capture():
    """Nobody would write its states."""
    pool = GraphPool("pool", device="cpu")
    with pytest.raises(OwnershipError) as caught:
        pool.capture([BIG], double)
    assert caught.value.key == BIG
    assert len(pool) == 0


def test_auto_picks_the_tape_on_the_cpu():
    """And a backend of one's own is used as it is."""
    assert make().backend.name == "tape"
    backend = make_backend("tape", "cpu")
    assert make(backend=backend).backend is backend


def test_capturing_nothing_is_nothing():
    """No keys, no builds, no graphs."""
    owner = Owner()
    pool = make(owner)
    pool.capture([], double)
    assert (len(pool), owner.builds, pool.statistics().captures) == (0, [], 0)


def test_reads_like_a_mapping():
    """Keys in order of capture, membership, length, states by key."""
    pool = captured()
    assert pool.keys() == (BIG, SMALL)
    assert BIG in pool
    assert BatchDescriptor(3) not in pool
    assert len(pool) == len(pool.states) == 2
    assert list(pool.states) == [BIG, SMALL]
    assert pool.states[BIG].shape == (4,)
    assert "pool" in repr(pool)
    with pytest.raises(KeyMismatchError):
        pool.states[BatchDescriptor(3)]
    with pytest.raises(TypeError):
        pool.states[BIG] = None


@pytest.mark.parametrize("doing", ["refresh", "replay", "bind", "invalidate", "release"])
def test_an_unknown_key_is_named(doing):
    """Every entry point says which key is missing, and which ones come closest."""
    pool = captured()
    key = BatchDescriptor(3, 3)
    call = getattr(pool, doing)
    with pytest.raises(KeyMismatchError) as caught:
        call(key, 1) if doing == "refresh" else call(key)
    assert caught.value.missing == (key,)
    assert set(caught.value.nearest) == {BIG, SMALL}
    assert caught.value.key == key
    for odd in (3, "key", [BIG]):
        with pytest.raises(KeyMismatchError):
            pool.replay(odd)


def test_builds_avoided_are_refreshes_that_a_borrower_used():
    """However often it replays on one; an owner avoids none."""
    target, draft, _ = pair(options={"replays_per_refresh": 3})
    for batch, replays in ((1, 2), (2, 0), (3, 1)):
        target.refresh(BIG, batch)
        target.replay(BIG)
        for _ in range(replays):
            draft.replay(BIG)
    assert draft.statistics().builds_avoided == 2
    assert draft.statistics().replays == 3
    target.refresh(BIG, 4)
    assert draft.statistics().builds_avoided == 2
    assert target.statistics().builds_avoided == 0


def test_bytes_are_those_of_each_capture():
    """A tape counts what its forward allocated."""
    pool = captured()
    held = pool.statistics().bytes
    assert set(held) == {BIG, SMALL}
    assert held[BIG] > held[SMALL] > 0


def test_states_are_those_of_the_last_build():
    """Where an owner returns new containers, ``states`` has the newest."""

    class Numbered(Owner):
        host_values = {"batch": "any"}

        def build(self, key, batch, phase):
            return {"rows": super().build(key, batch, phase), "batch": batch}

    pool = captured(Numbered(), forward=lambda key, state: state["rows"] * 2)
    pool.refresh(BIG, 7.0)
    assert pool.states[BIG]["batch"] == 7.0
    assert pool.states[SMALL]["batch"] is None


def test_statistics_are_a_frozen_snapshot():
    """What was taken does not change, by us or by anyone."""
    pool = captured()
    before = pool.statistics()
    pool.refresh(BIG, 1)
    pool.replay(BIG)
    pool.dispatch(num_tokens=3, num_reqs=3)
    pool.dispatch(num_tokens=9, num_reqs=3)
    with pytest.raises(StaleStateError):
        pool.replay(BIG)
    after = pool.statistics()
    assert (before.refreshes, before.replays, before.fresh) == (0, 0, ())
    assert before.builds["replay"] == 0
    assert before.dispatched == before.missed == before.refusals == {}
    assert (after.name, after.keys, after.captures) == ("pool", 2, 2)
    assert (after.refreshes, after.replays, after.builds["replay"]) == (1, 1, 1)
    assert after.builds_avoided == 0
    assert after.refusals == {"StaleStateError": 1}
    assert after.dispatched == {BIG: 1}
    assert after.missed == {"num_tokens": 1}
    assert set(after.bytes) == {BIG, SMALL}
    assert all(type(each) is int and each >= 0 for each in after.bytes.values())
    with pytest.raises(AttributeError):
        after.replays = 0
    for mapping in (after.builds, after.refusals, after.dispatched, after.missed, after.bytes):
        with pytest.raises(TypeError):
            mapping["x"] = 1


def test_counters_survive_release_and_recapture():
    """They count the pool's life."""
    pool = captured()
    for _ in range(3):
        served(pool, BIG, 1)
    pool.dispatch(num_tokens=4, num_reqs=4)
    pool.recapture([BIG])
    served(pool, BIG, 1)
    pool.release(BIG)
    pool.dispatch(num_tokens=4, num_reqs=4)
    statistics = pool.statistics()
    assert (statistics.replays, statistics.refreshes, statistics.captures) == (4, 4, 3)
    assert statistics.dispatched == {BIG: 1}
    assert statistics.missed == {"num_tokens": 1}
    pool.close()
    assert pool.statistics().replays == 4
