"""What `bind` returns: refreshes and replays of one key without a lookup, on either backend."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from graphshare import (
    AddressChangedError,
    BatchDescriptor,
    GraphPool,
    OwnershipError,
    Phase,
    ReleasedStateError,
    Staleness,
    StaleStateError,
    share_states,
)

BIG, SMALL = BatchDescriptor(8, 8), BatchDescriptor(4, 4)
OTHER = BatchDescriptor(8, 8, num_active_loras=1)


class Owner:
    def __init__(self, device: torch.device) -> None:
        self.buffer = torch.zeros(8, dtype=torch.int32, device=device)
        self.builds = 0

    def build(self, key: Any, batch: Any, phase: Phase) -> Any:
        self.builds += 1
        return {"lens": self.buffer[: key.num_tokens].fill_(0 if batch is None else batch)}


def forward(key: Any, state: Any) -> torch.Tensor:
    return state["lens"] * 2


def lent(kind: str, device: torch.device) -> tuple[Owner, GraphPool[Any], GraphPool[Any]]:
    owner = Owner(device)
    target = GraphPool("target", owner=owner, backend=kind, device=device)
    draft = GraphPool("draft", backend=kind, device=device)
    share_states(target, draft)
    for pool in (target, draft):
        pool.capture([BIG, SMALL], forward)
    return owner, target, draft


def on_one_state(kind: str, device: torch.device, owner: Owner) -> GraphPool[Any]:
    """A pool whose keys ``BIG`` and ``OTHER`` share their state, and its lease."""
    pool = GraphPool(
        "pool", owner=owner, backend=kind, device=device, state_key=lambda key: key.num_tokens
    )
    pool.capture([BIG, OTHER], forward)
    return pool


def stale(replay: Callable[[], Any]) -> Staleness:
    with pytest.raises(StaleStateError) as caught:
        replay()
    return caught.value.rule


def test_a_handle_refreshes_and_replays_as_its_pool(kind: str, device: torch.device) -> None:
    owner, target, draft = lent(kind, device)
    big, small, borrowed = target.bind(BIG), target.bind(SMALL), draft.bind(BIG)
    builds = owner.builds
    for batch in range(12):
        big.refresh(batch)
        for replay in (big.replay, borrowed.replay):
            assert replay().tolist() == [2 * batch] * 8
            assert stale(replay) is Staleness.USED_UP
        target.refresh(BIG, batch + 1)
        assert borrowed.replay().tolist() == [2 * (batch + 1)] * 8
    assert owner.builds - builds == target.statistics().refreshes == 24
    small.refresh(5)
    assert stale(borrowed.replay) is Staleness.OVERWRITTEN
    assert draft.replay(SMALL).tolist() == [10] * 4
    owner.buffer, before = torch.zeros_like(owner.buffer), owner.buffer
    with pytest.raises(AddressChangedError):
        big.refresh(1)
    assert stale(borrowed.replay) is Staleness.BUILD_FAILED
    owner.buffer = before
    big.refresh(3)
    assert borrowed.replay().tolist() == [6] * 8


def test_a_borrowed_key_is_refreshed_by_its_owner(kind: str, device: torch.device) -> None:
    owner, _, draft = lent(kind, device)
    handle, builds = draft.bind(BIG), owner.builds
    by_key = partial(draft.refresh, BIG)
    for refresh in (handle.refresh, by_key, draft.accepting(BIG)):
        with pytest.raises(OwnershipError, match="target"):
            refresh(1)
    assert owner.builds == builds


ENDS: dict[str, Callable[[GraphPool[Any]], Any]] = {
    "released": lambda pool: pool.release(BIG),
    "all released": lambda pool: pool.release(),
    "closed": lambda pool: pool.close(),
    "captured anew": lambda pool: pool.recapture([BIG]),
    "all captured anew": lambda pool: pool.recapture(),
}


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("refreshes", [0, 6])
def test_what_was_taken_from_a_handle_refuses_too(
    kind: str, device: torch.device, name: str, refreshes: int
) -> None:
    """And builds nothing: its memory may be somebody else's by now."""
    owner, target, draft = lent(kind, device)
    for pool in (draft, target):
        handle = pool.bind(BIG)
        taken = [handle.refresh]
        if pool is target:
            taken.append(target.accepting(BIG))
        for batch in range(refreshes):
            target.refresh(BIG, batch)
            if pool is target:
                handle.refresh(batch)
                taken[1](owner.build(BIG, batch, Phase.REPLAY))
        ENDS[name](pool)
        builds = owner.builds
        for refresh in (handle.refresh, *taken):
            with pytest.raises(ReleasedStateError, match="Take a new handle"):
                refresh({"lens": owner.buffer})
        with pytest.raises(ReleasedStateError):
            handle.replay()
        assert owner.builds == builds
    if "anew" in name:
        target.bind(BIG).refresh(4)
        assert target.replay(BIG).tolist() == [8] * 8
        if not draft.statistics().fresh:
            draft.recapture([BIG])
            target.refresh(BIG, 4)
        assert draft.replay(BIG).tolist() == [8] * 8


def test_a_key_that_shares_its_state(kind: str, device: torch.device) -> None:
    """The state stays with the other key, and nothing but the one key has gone."""
    owner = Owner(device)
    pool = on_one_state(kind, device, owner)
    handle, kept = pool.bind(BIG), pool.bind(OTHER)
    refresh, replay = handle.refresh, handle.replay
    for batch in range(6):
        refresh(batch)
        assert kept.replay().tolist() == [2 * batch] * 8
    pool.release(BIG)
    builds = owner.builds
    with pytest.raises(ReleasedStateError):
        refresh(1)
    assert owner.builds == builds
    kept.refresh(7)
    for again in (handle.replay, replay):  # the lease that both keys have is good
        with pytest.raises(ReleasedStateError):
            again()
    assert kept.replay().tolist() == [14] * 8


def test_a_graph_that_cannot_be_freed_is_not_launched(
    kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = on_one_state(kind, device, Owner(device))
    replay, kept = pool.bind(BIG).replay, pool.bind(OTHER)

    def fail() -> None:
        raise MemoryError

    monkeypatch.setattr(pool.holdings.entries[BIG], "release_graph", fail)
    with pytest.raises(MemoryError):
        pool.release(BIG)
    kept.refresh(7)
    with pytest.raises(ReleasedStateError):
        replay()


def test_handles_of_a_key_replay_with_one_function(kind: str, device: torch.device) -> None:
    """Made with the key, and told what changes: none that was handed out is forgotten."""
    _, target, draft = lent(kind, device)
    for pool in (target, draft):
        one, other = pool.bind(BIG), pool.bind(BIG)
        assert one.replay is other.replay is pool.bind(BIG).replay
    target.refresh(BIG, 3)
    assert target.bind(BIG).replay().tolist() == [6] * 8


def test_what_replays_goes_with_its_pool(kind: str, device: torch.device) -> None:
    pool = GraphPool("pool", owner=Owner(device), backend=kind, device=device)
    pool.capture([BIG], forward)
    gone = [weakref.ref(pool), weakref.ref(pool.bind(BIG).replay)]
    gc.collect()
    gc.disable()
    try:
        del pool
        assert [each() for each in gone] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ENDS)
def test_a_handle_holds_no_state_of_a_key_that_went(
    kind: str, device: torch.device, name: str
) -> None:
    _, target, draft = lent(kind, device)
    draft.close()
    handles = [target.bind(BIG) for _ in range(3)]
    for batch in range(6):
        handles[batch % 3].refresh(batch)
    del handles[0]
    functions = [weakref.ref(handle.refresh) for handle in handles]
    ENDS[name](target)
    gc.collect()
    assert [each() for each in functions] == [None] * 2
    for handle in handles:
        with pytest.raises(ReleasedStateError):
            handle.refresh(1)


def test_handles_that_are_dropped_leave_no_trace(kind: str, device: torch.device) -> None:
    _, target, _ = lent(kind, device)
    for _ in range(100):
        target.bind(BIG)
    assert len(target.holdings.entries[BIG].handles) <= 1


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("refreshes", [0, 6])
def test_what_was_built_for_a_key_that_went_has_been_written(
    kind: str, device: torch.device, name: str, refreshes: int
) -> None:
    """It cannot be accepted, and nobody replays on what it was written over."""
    owner, target, draft = lent(kind, device)
    theirs = Owner(device)
    theirs.buffer = owner.buffer
    beside = GraphPool("beside", owner=theirs, backend=kind, device=device)
    beside.capture([BIG], forward)
    accept = target.accepting(BIG)
    for batch in range(refreshes):
        accept(owner.build(BIG, batch, Phase.REPLAY))
    ENDS[name](target)
    pools = {"beside": beside}
    if "anew" in name:
        draft.recapture([BIG])
        pools |= {"target": target, "draft": draft}
    for refreshed in ["beside", *(["target"] if "anew" in name else [])]:
        pools[refreshed].refresh(BIG, 3)
        state = owner.build(BIG, 9, Phase.REPLAY)
        with pytest.raises(ReleasedStateError):
            accept(state)
        for pool in [beside] if refreshed == "beside" else [target, draft]:
            with pytest.raises(StaleStateError):
                pool.replay(BIG)
    for pool in pools.values():
        assert pool.statistics().fresh == ()
    beside.refresh(BIG, 4)
    assert beside.replay(BIG).tolist() == [8] * 8


@pytest.mark.parametrize("checks", ["fast", "strict", "off"])
def test_what_was_accepted_counts_and_is_kept_where_replays_look_at_it(
    kind: str, device: torch.device, checks: Any
) -> None:
    owner = Owner(device)
    pool = GraphPool("pool", owner=owner, backend=kind, device=device, checks=checks)
    pool.capture([BIG, SMALL], forward)
    before = pool.states[BIG]
    built = owner.build(BIG, 3, Phase.REPLAY)
    pool.accepting(BIG)(built)
    assert pool.states[BIG] is (built if checks == "strict" else before)
    assert pool.replay(BIG).tolist() == [6] * 8
    assert pool.statistics().refreshes == pool.statistics().builds["replay"] == 1


def test_asking_often_leaves_no_trace(kind: str, device: torch.device) -> None:
    owner, target, _ = lent(kind, device)
    entry = target.holdings.entries[BIG]
    target.accepting(BIG)
    before = len(entry.enders)
    for batch in range(100):
        target.accepting(BIG)(owner.build(BIG, batch, Phase.REPLAY))
        assert target.replay(BIG).tolist() == [2 * batch] * 8
    assert len(entry.enders) == before


@pytest.mark.parametrize("end", ["released", "captured anew"])
def test_a_key_that_goes_while_it_is_built_and_leaves_its_state(
    kind: str, device: torch.device, end: str
) -> None:
    """To another key, or to the one that was captured anew: what was taken before refuses."""

    class Ending(Owner):
        def build(self, key: Any, batch: Any, phase: Phase) -> Any:
            state = super().build(key, batch, phase)
            if batch == 9:
                ENDS[end](pool)
                self.buffer.fill_(batch)
            return state

    owner = Ending(device)
    pool = on_one_state(kind, device, owner)
    refresh, kept = pool.bind(BIG).refresh, pool.bind(OTHER)
    for batch in (*range(6), 9):
        refresh(batch)
        assert kept.replay().tolist() == [2 * batch] * 8
    builds = owner.builds
    for _ in range(2):
        with pytest.raises(ReleasedStateError):
            refresh(1)
    assert owner.builds == builds
    kept.refresh(7)
    assert kept.replay().tolist() == [14] * 8
