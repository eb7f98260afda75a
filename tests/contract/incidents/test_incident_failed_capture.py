"""A capture that fails half-way."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from graphshare import CaptureError, KeyMismatchError, share_states
from tests.small_engine import Batch, Model, Owner, is_close, key_of

KEYS = [key_of(8), key_of(4), key_of(2)]
BATCH = Batch((3, 5))


class BrokenError(RuntimeError):
    pass


@pytest.mark.parametrize("fails_at", ["warmup", "capture", "host access"])
def test_failed_capture_leaks(place, make_pool, fails_at):
    """After a capture that failed the pool and its memory are as before; PyTorch 190348."""
    owner, model = Owner(place.device), Model(place.device)
    pool = make_pool("target", owner=owner)
    pool.capture(KEYS[2:], model.forward)
    pool.refresh(KEYS[2], BATCH)
    expected = model.expected(BATCH)
    calls, made = [], []

    def forward(key, state):
        calls.append(key)
        large = torch.zeros(1 << 20, device=place.device)
        made.append(weakref.ref(large.untyped_storage()))
        out = model.forward(key, state) + large[0]
        last = {"warmup": 2, "capture": 4, "host access": 4}[fails_at]
        if len(calls) == last:
            if fails_at == "host access":
                return out * float(out.sum())
            raise BrokenError
        return out, large

    before, reserved = _memory(place)[0], []
    for attempt in range(1, 4):
        calls.clear()
        with pytest.raises(CaptureError) as caught:
            pool.capture(KEYS[:2], forward)
        assert caught.value.key == KEYS[1]
        if fails_at != "host access":
            assert isinstance(caught.value.__cause__, BrokenError)
        del caught
        gc.collect()
        assert all(ref() is None for ref in made)
        allocated, held = _memory(place)
        assert allocated == before
        reserved.append(held)
        assert set(pool.keys()) == {KEYS[2]}
        with pytest.raises(KeyMismatchError):
            pool.refresh(KEYS[0], BATCH)
        assert pool.statistics().captures == 1
        assert pool.statistics().refusals["CaptureError"] == attempt

    # What a first failure left in the memory pool of the older graph serves the next capture.
    assert reserved[0] == reserved[-1]
    pool.refresh(KEYS[2], BATCH)
    assert is_close(pool.replay(KEYS[2]), expected)
    pool.capture(KEYS[:2], model.forward)
    pool.refresh(KEYS[0], BATCH)
    assert is_close(pool.replay(KEYS[0]), model.expected(BATCH))


def test_failed_recapture_keeps_the_old_graphs(place, make_pool):
    """A recapture replaces all of its keys or none; PyTorch 190348."""
    model = Model(place.device)
    target, draft = make_pool("target", owner=Owner(place.device)), make_pool("draft")
    share_states(target, draft)
    target.capture(KEYS, model.forward)
    draft.capture(KEYS, model.forward)
    bound = target.bind(KEYS[0])

    def forward(key, state):
        if key == KEYS[1]:
            raise BrokenError
        return model.forward(key, state)

    with pytest.raises(CaptureError):
        target.recapture(forward=forward)
    for key in KEYS:
        target.refresh(key, BATCH)
        assert is_close(target.replay(key), model.expected(BATCH))
        assert is_close(draft.replay(key), model.expected(BATCH))
    target.refresh(KEYS[0], BATCH)
    assert is_close(bound.replay(), model.expected(BATCH))


@pytest.mark.parametrize("fails_at", [3, 6], ids=["warmup", "capture"])
def test_failed_first_capture_returns_all_memory(place, make_pool, fails_at):
    """Where nothing else was captured, not even a cached block stays; PyTorch 190348."""
    pool = make_pool("target", owner=Owner(place.device))
    model, calls = Model(place.device), []

    def forward(key, state):
        calls.append(key)
        large = torch.zeros(1 << 20, device=place.device)
        out = model.forward(key, state) + large[0]
        if len(calls) == fails_at:
            raise BrokenError
        return out, large

    gc.collect()
    before = _memory(place)
    for _ in range(3):
        calls.clear()
        with pytest.raises(CaptureError):
            pool.capture(KEYS, forward)
        gc.collect()
        assert _memory(place) == before
    assert len(pool) == 0


def _memory(place):
    """Bytes allocated, and bytes held from the device."""
    if place.backend != "cuda":
        return 0, 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
