"""Memory that goes while a graph still reads it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from graphshare import Phase, ReleasedStateError, share_states
from tests.small_engine import MAX_PAGES, MAX_REQS, Batch, Model, Owner, by_hand, is_close, key_of

KEYS = [key_of(4), key_of(2)]
BATCH = Batch((3, 5))


class Arena:
    """Hands out one block; a block that was given back goes to the next who asks."""

    def __init__(self, device):
        self.block = torch.zeros(MAX_REQS, MAX_PAGES, dtype=torch.int64, device=device)


class ArenaOwner(Owner):
    def __init__(self, device, arena):
        super().__init__(device)
        self.block_table.tensor = arena.block


def test_released_under_a_borrower(place, make_pool):
    """What is lent may be released, and then no borrower replays on it; vLLM issue 46067."""
    key, model, arena = KEYS[0], Model(place.device), Arena(place.device)

    # The fault: scratch memory goes back to the arena while a graph still points to it.
    owner = ArenaOwner(place.device, arena)
    graph = by_hand(place, model.forward, key, owner.build(key, None, Phase.CAPTURE))
    owner.build(key, BATCH, Phase.REPLAY)
    arena.block.fill_(3)  # the next one who was given it
    graph.replay()
    assert not is_close(graph.outputs, model.expected(BATCH))

    for let_go in ("release", "release one", "close"):
        target = make_pool("target", owner=ArenaOwner(place.device, arena))
        prefill, chained = make_pool("draft.prefill"), make_pool("chained")
        share_states(target, prefill)
        share_states(prefill, chained)
        for pool in (target, prefill, chained):
            pool.capture(KEYS, model.forward)
        target.refresh(key, BATCH)
        {
            "release": target.release,
            "release one": lambda target=target: target.release(key),
            "close": target.close,
        }[let_go]()
        arena.block.fill_(3)
        for pool in (prefill, chained):
            with pytest.raises(ReleasedStateError) as caught:
                pool.replay(key)
            assert caught.value.key == key
            with pytest.raises(ReleasedStateError):
                pool.bind(key).replay()


def test_borrower_is_captured_anew(place, make_pool):
    """After a release, lender first and borrower next, all is as it was; vLLM issue 46067."""
    key, model = KEYS[0], Model(place.device)
    target, prefill = make_pool("target", owner=Owner(place.device)), make_pool("draft.prefill")
    shared = share_states(target, prefill)
    target.capture(KEYS, model.forward)
    prefill.capture(KEYS, model.forward)
    target.release(key)
    with pytest.raises(ReleasedStateError):
        prefill.replay(key)
    target.capture([key], model.forward)
    with pytest.raises(ReleasedStateError):
        prefill.replay(key)  # its graph still reads the old state
    prefill.capture([key], model.forward)
    target.refresh(key, BATCH)
    assert shared.live_key == key
    assert is_close(prefill.replay(key), model.expected(BATCH))
    target.refresh(KEYS[1], BATCH)  # which was never released
    assert is_close(prefill.replay(KEYS[1]), model.expected(BATCH))


def test_memory_lives_until_the_last_borrower_goes(place, make_pool):
    """What is borrowed outlives a release, and no longer; vLLM issue 46067."""
    model, owner = Model(place.device), Owner(place.device)
    target, prefill = make_pool("target", owner=owner), make_pool("draft.prefill")
    share_states(target, prefill)
    target.capture(KEYS, model.forward)
    prefill.capture(KEYS, model.forward)
    storage = weakref.ref(owner.seq_lens.tensor.untyped_storage())
    target.close()
    del target, owner
    gc.collect()
    assert storage() is not None
    prefill.close()
    del prefill
    gc.collect()
    assert storage() is None


def test_careless_del_of_the_producer(place, make_pool):
    """A producer that nobody names any more goes on lending; vLLM issue 46067."""
    key, model = KEYS[0], Model(place.device)
    target, prefill = make_pool("target", owner=Owner(place.device)), make_pool("draft.prefill")
    shared = share_states(target, prefill)
    target.capture(KEYS, model.forward)
    prefill.capture(KEYS, model.forward)
    target.refresh(key, BATCH)
    del target
    gc.collect()
    assert is_close(prefill.replay(key), model.expected(BATCH))
    later = BATCH.advanced()
    expected = model.expected(later)
    shared.producer.refresh(key, later)
    assert is_close(prefill.replay(key), expected)
