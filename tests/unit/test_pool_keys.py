"""GraphPool: kinds of key."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from graphshare import (
    BatchDescriptor,
    GraphPool,
    KeyMismatchError,
    StaleStateError,
    bound,
    exact,
)
from tests.one_buffer import BIG, SMALL, Apart, Owner, captured, double, make, served


def test_foreign_keys_with_covers_and_cost_of_the_pool():
    """Plain integers, say, as batch sizes."""

    class Sized(Owner):
        def rows(self, key):
            return key

    pool = GraphPool(
        "pool",
        owner=Sized(),
        device="cpu",
        covers=lambda key, shape: key >= shape,
        cost=lambda key: key,
    )
    order = []
    pool.capture([2, 8, 4], lambda key, state: order.append(key) or state * 2)
    assert order == [8, 4, 2, 8, 4, 2]
    assert [pool.dispatch(shape) for shape in (1, 2, 3, 5, 8, 9)] == [2, 2, 4, 8, 8, None]
    assert served(pool, 4, 3) == [6] * 4
    assert pool.statistics().dispatched == {2: 2, 4: 1, 8: 2}
    assert sum(pool.statistics().missed.values()) == 1
    with pytest.raises(TypeError):
        pool.dispatch(num_tokens=3)
    with pytest.raises(KeyMismatchError) as caught:
        pool.refresh(3, 1)
    assert caught.value.missing == (3,)


@dataclass(frozen=True)
class BatchKey:
    """An engine's own key type."""

    tokens: int
    uniform: bool = False

    def covers(self, shape):
        return self.tokens >= shape.tokens and self.uniform <= shape.uniform

    def cost(self):
        return (self.tokens, not self.uniform)


def test_foreign_keys_with_methods_of_their_own():
    """Their ``covers`` and ``cost`` are used as they are."""

    class Sized(Owner):
        def rows(self, key):
            return key.tokens

    keys = [BatchKey(4), BatchKey(4, uniform=True), BatchKey(2)]
    pool = GraphPool("pool", owner=Sized(), device="cpu")
    pool.capture(keys, double)
    assert pool.dispatch(BatchKey(3)) == keys[0]
    assert pool.dispatch(BatchKey(3, uniform=True)) == keys[1]
    assert pool.dispatch(BatchKey(2, uniform=True)) == keys[2]
    assert pool.dispatch(BatchKey(5)) is None


def test_keys_that_cannot_be_dispatched_serve_by_key():
    """Names for graphs need no ``covers``, until someone dispatches."""

    class Named(Owner):
        def rows(self, key):
            return len(key)

    pool = GraphPool("pool", owner=Named(), device="cpu")
    pool.capture(["prefill", "step"], double)
    assert served(pool, "step", 2) == [4] * 4
    with pytest.raises(TypeError):
        pool.dispatch("step")


def test_keys_of_two_types_do_not_mix():
    """Neither says whether it covers the other's shapes; the pool is as before."""
    pool = captured()
    with pytest.raises(TypeError):
        pool.capture([BatchKey(4)], double)
    assert pool.keys() == (BIG, SMALL)
    assert served(pool, BIG, 1) == [2] * 4
    with pytest.raises(TypeError):
        pool.capture([[1, 2]], double)  # not hashable


class BeamDescriptor(BatchDescriptor):
    beam_width: int | None = exact(default=1)
    max_pages: int | None = bound(default=None)


def test_subclassed_descriptors():
    """An engine's own fields match as declared, by keyword and by shape."""
    wide, plain, paged = (
        BeamDescriptor(4, 4, beam_width=2),
        BeamDescriptor(4, 4),
        BeamDescriptor(4, 4, max_pages=8),
    )
    pool = captured(keys=[wide, plain, paged])
    assert pool.dispatch(num_tokens=3, num_reqs=3, beam_width=2) == wide
    assert pool.dispatch(num_tokens=3, num_reqs=3, max_pages=4) == paged
    assert pool.dispatch(num_tokens=3, num_reqs=3, max_pages=9) == plain
    assert pool.dispatch(BeamDescriptor(3, 3, beam_width=3)) is None
    with pytest.raises(TypeError):
        pool.dispatch(BatchDescriptor(3, 3))
    with pytest.raises(TypeError):
        pool.dispatch(num_tokens=3, beams=2)
    with pytest.raises(ValueError, match="num_tokens"):
        pool.dispatch(num_tokens=0)


def test_a_key_of_a_later_capture_joins_the_state():
    """``state_key`` holds across captures: one refresh serves both keys."""
    lora = BatchDescriptor(4, 4, num_active_loras=1)
    pool = captured(keys=[BIG], state_key=lambda key: key.num_tokens, replays_per_refresh=2)
    pool.capture([lora], double)
    pool.refresh(BIG, 2)
    assert set(pool.statistics().fresh) == {BIG, lora}
    assert pool.replay(lora).tolist() == pool.replay(BIG).tolist() == [4] * 4


def test_state_key_lets_keys_share_one_state():
    """Two graphs on one state: one refresh serves both, and they do not make each other stale."""

    class ByTokens(Apart):
        def build(self, key, batch, phase):
            return super().build(key.num_tokens, batch, phase)

        def rows(self, key):
            return key

        def writes(self, key):
            return super().writes(key.num_tokens)

    plain, lora = BIG, BatchDescriptor(4, 4, num_active_loras=1)
    pool = make(
        ByTokens(),
        state_key=lambda key: (key.num_tokens, key.num_reqs),
        replays_per_refresh=2,
        live_keys=1,
    )
    pool.capture([plain, lora, SMALL], lambda key, state: state * (2 + key.num_active_loras))
    assert pool.states[plain].data_ptr() == pool.states[lora].data_ptr()
    pool.refresh(plain, 5)
    assert pool.replay(plain).tolist() == [10] * 4
    assert pool.replay(lora).tolist() == [15] * 4
    with pytest.raises(StaleStateError):
        pool.replay(plain)  # one allowance for one state
    pool.refresh(SMALL, 1)
    with pytest.raises(StaleStateError):
        pool.replay(lora)
