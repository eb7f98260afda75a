"""Tensors that a graph reads, and that are elsewhere by now."""

from __future__ import annotations

import pytest
import torch

from graphshare import (
    AddressChangedError,
    AttentionState,
    Phase,
    Staleness,
    StaleStateError,
    share_states,
)
from tests.small_engine import (
    MAX_PAGES,
    Batch,
    Metadata,
    Model,
    Owner,
    by_hand,
    is_close,
    key_of,
)

KEYS = [key_of(4), key_of(2)]
BATCH = Batch((3, 5, 2))


class AllocatingOwner(Owner):
    """Makes ``seq_lens`` anew in the builds of some phases."""

    def __init__(self, device, phases):
        super().__init__(device)
        self.phases = phases

    def build(self, key, batch, phase):
        metadata, slots = super().build(key, batch, phase)
        if phase in self.phases:
            metadata = Metadata(metadata.seq_lens.clone(), metadata.block_table)
        return AttentionState(metadata, slots)


def test_fresh_tensors_in_metadata(place, make_pool):
    """A build that allocates is refused: the graph reads the old tensor; SGLang 27664."""
    model, key = Model(place.device), KEYS[0]

    owner = AllocatingOwner(place.device, set(Phase))
    state = owner.build(key, None, Phase.CAPTURE)
    graph = by_hand(place, model.forward, key, state)
    owner.build(key, BATCH, Phase.REPLAY)
    graph.replay()
    assert not is_close(graph.outputs, model.expected(BATCH))

    pool = make_pool("target", owner=AllocatingOwner(place.device, set(Phase)))
    with pytest.raises(AddressChangedError) as caught:
        pool.capture(KEYS, model.forward)
    assert caught.value.path == "attn_metadata.seq_lens"
    assert caught.value.field == "address"
    assert set(caught.value.keys) == set(KEYS)
    assert len(pool) == 0

    # One that allocates while it serves only.
    pool = make_pool("target", owner=AllocatingOwner(place.device, {Phase.REPLAY}))
    draft = make_pool("draft")
    share_states(pool, draft)
    pool.capture(KEYS, model.forward)
    draft.capture(KEYS, model.forward)
    for _ in range(3):  # however often the allocator hands out memory again
        with pytest.raises(AddressChangedError) as caught:
            pool.refresh(key, BATCH)
        assert caught.value.path == "attn_metadata.seq_lens"
        assert caught.value.field == "address"
        assert caught.value.key == key
        for each in (pool, draft):
            with pytest.raises(StaleStateError) as stale:
                each.replay(key)
            assert stale.value.rule is Staleness.BUILD_FAILED


class ReshapingOwner(Owner):
    """Returns the live rows, and not the padded ones, where ``trim`` says so."""

    trim = False

    def build(self, key, batch, phase):
        metadata, slots = super().build(key, batch, phase)
        if self.trim and batch is not None:
            live = batch.num_reqs
            metadata = Metadata(metadata.seq_lens[:live], metadata.block_table)
        return AttentionState(metadata, slots)


def test_rebuilt_view_of_another_shape(place, make_pool):
    """The graph keeps the captured shape, so a rebuild must too; a relative of SGLang 27664."""
    owner, model, key = ReshapingOwner(place.device), Model(place.device), KEYS[0]
    pool = make_pool("target", owner=owner)
    pool.capture(KEYS, model.forward)
    owner.trim = True
    pool.refresh(key, Batch((3, 5, 2, 4)))
    pool.replay(key)
    with pytest.raises(AddressChangedError) as caught:
        pool.refresh(key, BATCH)
    assert (caught.value.path, caught.value.field) == ("attn_metadata.seq_lens", "shape")


class GrowingOwner(Owner):
    """Plans into a workspace that grows by replacement, by the need of each key."""

    def __init__(self, device, needs, *, grows_in=frozenset(Phase)):
        super().__init__(device)
        self.needs = needs
        self.grows_in = grows_in
        self.workspace = torch.zeros(4, dtype=torch.int64, device=device)
        self.old = []

    def build(self, key, batch, phase):
        metadata, slots = super().build(key, batch, phase)
        need = self.needs[key]
        if self.workspace.numel() < need and phase in self.grows_in:
            self.old.append(self.workspace)
            self.workspace = torch.zeros(need, dtype=torch.int64, device=self.device)
        size = key.num_reqs * MAX_PAGES
        plan = self.workspace[: min(size, need)].view(-1, MAX_PAGES)
        plan.copy_(metadata.block_table)
        return AttentionState(Metadata(metadata.seq_lens, plan), slots)


# The smaller batch splits more, and needs the larger workspace.
NEEDS = {key_of(4): 16, key_of(2): 64, key_of(1): 256}


def test_workspace_grew_after_capture(place, make_pool):
    """Growth during the captures is over before any graph exists; TensorRT-LLM 16319."""
    model = Model(place.device)
    large, small = KEYS

    # The fault: each key is warmed up and captured by itself, largest first.
    owner = GrowingOwner(place.device, NEEDS)
    graphs = {
        key: by_hand(place, model.forward, key, owner.build(key, None, Phase.CAPTURE))
        for key in KEYS
    }
    owner.build(large, BATCH, Phase.REPLAY)
    graphs[large].replay()
    assert not is_close(graphs[large].outputs, model.expected(BATCH))

    pool = make_pool("target", owner=GrowingOwner(place.device, NEEDS))
    pool.capture(KEYS, model.forward)
    for key, batch in ((large, BATCH), (small, Batch((8,), shift=3))):
        pool.refresh(key, batch)
        assert is_close(pool.replay(key), model.expected(batch))


def test_workspace_grew_between_two_captures(place, make_pool):
    """A capture that moves an earlier one's workspace names its keys; TensorRT-LLM 16319."""
    model = Model(place.device)
    pool = make_pool("target", owner=GrowingOwner(place.device, NEEDS))
    pool.capture(KEYS, model.forward)
    with pytest.raises(AddressChangedError) as caught:
        pool.capture([key_of(1)], model.forward)
    assert set(caught.value.keys) == set(KEYS)
    assert caught.value.path == "attn_metadata.block_table"
    assert caught.value.field == "address"
    assert set(pool.keys()) == set(KEYS)
    # The workspace has moved for good: what was captured on the old one stays refused.
    with pytest.raises(AddressChangedError):
        pool.refresh(KEYS[0], BATCH)
    pool.recapture()
    pool.capture([key_of(1)], model.forward)
    pool.refresh(KEYS[0], BATCH)
    assert is_close(pool.replay(KEYS[0]), model.expected(BATCH))


def test_workspace_grew_in_the_capture_phase(place, make_pool):
    """Growth that no warmup provoked is found at the end; TensorRT-LLM 16319."""
    model = Model(place.device)
    owner = GrowingOwner(place.device, {KEYS[0]: 16, KEYS[1]: 64}, grows_in={Phase.CAPTURE})
    owner.workspace = torch.zeros(16, dtype=torch.int64, device=place.device)
    pool = make_pool("target", owner=owner)
    with pytest.raises(AddressChangedError) as caught:
        pool.capture(KEYS, model.forward)
    assert caught.value.keys == (KEYS[0],)
    assert len(pool) == 0
    # It has grown by now, so a second attempt is sound.
    pool.capture(KEYS, model.forward)
    pool.refresh(KEYS[0], BATCH)
    assert is_close(pool.replay(KEYS[0]), model.expected(BATCH))


def test_output_overwritten(place, make_pool):
    """An output outlives later replays as a copy on request; TensorRT-LLM 16290."""
    model, key = Model(place.device), KEYS[0]
    pool = make_pool("target", owner=Owner(place.device))
    pool.capture(KEYS, model.forward)
    first, second = BATCH, Batch((7, 1, 4), shift=4)

    # The fault: the output itself is kept beyond the next replay.
    pool.refresh(key, first)
    expected = model.expected(first)
    kept = pool.replay(key)
    pool.refresh(key, second)
    pool.replay(key)
    assert not is_close(kept, expected)

    pool.refresh(key, first)
    expected = model.expected(first)
    kept = pool.replay(key, copy=True)
    pool.refresh(key, second)
    pool.replay(key)
    assert is_close(kept, expected)


def test_outputs_are_held_while_their_graph_is(place, make_pool):
    """An output that the engine dropped is not handed to the next capture; TensorRT-LLM 16290."""
    model = Model(place.device)
    pool = make_pool("target", owner=Owner(place.device))
    places = {}
    for key in KEYS:
        pool.capture([key], lambda key, state: {"hidden": model.forward(key, state) * 2})
        pool.refresh(key, Batch((2,)))
        places[key] = pool.replay(key)["hidden"].data_ptr()  # dropped at once
    assert len(set(places.values())) == len(KEYS)
    for key in KEYS:
        expected = model.expected(Batch((6, 5))) * 2
        pool.refresh(key, Batch((6, 5)))
        hidden = pool.replay(key)["hidden"]
        assert hidden.data_ptr() == places[key]
        assert is_close(hidden, expected)
