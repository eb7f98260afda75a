"""GraphPool: replays, and how much is checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from graphshare import (
    AddressChangedError,
    BatchDescriptor,
    KeyMismatchError,
    ReleasedStateError,
    Staleness,
    StaleStateError,
)
from tests.one_buffer import BIG, SMALL, Apart, Owner, captured, double, served


def test_outputs_keep_their_place():
    """The same objects at each replay; a copy, of any nest, is another."""

    class Pair(NamedTuple):
        one: torch.Tensor
        rest: object

    @dataclass
    class Box:
        inside: torch.Tensor
        note: str = "kept"

    def forward(key, state):
        return Pair(state + 1, {"a": [state + 2, None], "b": Box(state + 3), "c": (state + 4,)})

    pool = captured(forward=forward, replays_per_refresh=None)
    pool.refresh(BIG, 1)
    first, again = pool.replay(BIG), pool.replay(BIG)
    assert first is again
    kept = pool.replay(BIG, copy=True)
    assert type(kept) is Pair
    pool.refresh(BIG, 5)
    pool.replay(BIG)

    def values(pair):
        inner = pair.rest
        tensors = (pair.one, inner["a"][0], inner["b"].inside, inner["c"][0])
        return [int(each[0]) for each in tensors]

    assert values(kept) == [2, 3, 4, 5]
    assert values(first) == [6, 7, 8, 9]
    assert kept.rest["a"][1] is None
    assert kept.rest["b"].note == "kept"


def test_bound_replays_share_the_allowance():
    """A handle is the pool's replay without the lookup: same count, same refusals."""
    pool = captured(replays_per_refresh=2)
    bound = pool.bind(BIG)
    assert bound.key == BIG
    with pytest.raises(StaleStateError):
        bound.replay()
    pool.refresh(BIG, 2)
    assert bound.replay().tolist() == [4] * 4
    assert pool.replay(BIG).tolist() == [4] * 4
    with pytest.raises(StaleStateError) as caught:
        bound.replay()
    assert (caught.value.key, caught.value.rule) == (BIG, Staleness.USED_UP)
    assert pool.statistics().replays == 2


def test_bound_replay_after_release():
    """A handle outlives its key, and says so."""
    pool = captured()
    bound = pool.bind(BIG)
    pool.refresh(BIG, 2)
    pool.release(BIG)
    for _ in range(2):
        with pytest.raises(ReleasedStateError) as caught:
            bound.replay()
        assert caught.value.key == BIG
    with pytest.raises(KeyMismatchError):
        pool.replay(BIG)
    pool.capture([BIG], double)
    pool.refresh(BIG, 2)
    with pytest.raises(ReleasedStateError):
        bound.replay()
    assert served(pool, SMALL, 1) == [2, 2]


def test_the_first_who_wrote_over_it_is_named():
    """Others have written since, which the message does not hide."""
    tiny = BatchDescriptor(1)
    pool = captured(keys=(BIG, SMALL, tiny), live_keys=3)
    pool.refresh(BIG, 1)
    pool.refresh(SMALL, 2)
    pool.refresh(tiny, 3)
    with pytest.raises(StaleStateError) as caught:
        pool.replay(BIG)
    assert caught.value.rule is Staleness.OVERWRITTEN
    assert caught.value.written_by == ("pool", SMALL)
    assert f"first overwritten by pool for key {SMALL}" in str(caught.value)


def test_live_keys():
    """The oldest of more than ``live_keys`` refreshed keys is stale, even on memory apart."""
    pool = captured(Apart(), live_keys=1)
    pool.refresh(BIG, 1)
    pool.refresh(SMALL, 2)
    assert pool.statistics().fresh == (SMALL,)
    with pytest.raises(StaleStateError) as caught:
        pool.replay(BIG)
    assert caught.value.rule is Staleness.SUPERSEDED
    assert caught.value.written_by == ("pool", SMALL)

    pool = captured(Apart(), live_keys=2, keys=(BIG, SMALL, BatchDescriptor(1)))
    pool.refresh(BIG, 1)
    pool.refresh(SMALL, 2)
    assert pool.replay(BIG).tolist() == [2] * 4
    pool.refresh(BatchDescriptor(1), 3)
    assert set(pool.statistics().fresh) == {SMALL, BatchDescriptor(1)}
    assert pool.replay(SMALL).tolist() == [4] * 2


def test_checks_off_checks_nothing():
    """Stale, moved and used up are let through: the caller's own risk."""
    owner = Owner()
    pool = captured(owner, checks="off")
    pool.replay(BIG)
    pool.refresh(BIG, 1)
    pool.refresh(SMALL, 2)
    for _ in range(3):
        assert pool.replay(BIG).tolist() == [4, 4, 2, 2]
    owner.buffer = torch.zeros(8)
    pool.refresh(BIG, 5)
    assert pool.replay(BIG).tolist() == [4, 4, 2, 2]
    assert pool.statistics().replays == 5
    assert pool.statistics().refusals == {}
    pool.release(BIG)
    with pytest.raises(KeyMismatchError):
        pool.replay(BIG)


def test_checks_strict_looks_at_each_replay():
    """A tensor that moved after its refresh is noticed; ``fast`` looks at refreshes only."""

    class Holding(Owner):
        def build(self, key, batch, phase):
            super().build(key, batch, phase)
            self.held = getattr(self, "held", self.buffer)
            return {"seq_lens": self.held}

    def forward(key, state):
        return state["seq_lens"] * 2

    for checks in ("fast", "strict"):
        owner = Holding()
        pool = captured(owner, keys=[BIG], forward=forward, checks=checks)
        pool.refresh(BIG, 3)
        assert pool.replay(BIG).tolist() == [6] * 4 + [0] * 4
        pool.refresh(BIG, 3)
        owner.held.set_(torch.ones(8))
        if checks == "fast":
            pool.replay(BIG)
            continue
        with pytest.raises(AddressChangedError) as caught:
            pool.replay(BIG)
        assert (caught.value.path, caught.value.field) == ("seq_lens", "address")
        with pytest.raises(AddressChangedError):
            pool.bind(BIG).replay()


def test_checks_strict_serves_as_fast_does():
    """It refuses nothing that is right."""
    pool = captured(checks="strict", replays_per_refresh=2)
    for step in range(3):
        for key in (BIG, SMALL):
            pool.refresh(key, step)
            for _ in range(2):
                assert pool.replay(key).tolist() == [2 * step] * key.num_tokens
            with pytest.raises(StaleStateError):
                pool.replay(key)
