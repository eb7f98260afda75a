"""A warmup that initialises what the capture would then find initialised."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from graphshare import AttentionState, LazyStateError, Phase, share_states
from tests.small_engine import Batch, Metadata, Model, Owner, by_hand, is_close, key_of

KEY = key_of(4)
BATCH = Batch((3, 5, 2))


@dataclass
class Schedule:
    """As FlashMLA's: the first kernel call plans."""

    have_initialized: bool = False


@dataclass
class LazyMetadata(Metadata):
    schedule: Schedule = field(default_factory=Schedule)
    tables: Any = None


class FlagModel(Model):
    """Plans into a buffer of its own, on the first call that a schedule sees."""

    def __init__(self, device):
        super().__init__(device)
        self.plan = self.x.new_ones(8)

    def plan_once(self, metadata):
        if not metadata.schedule.have_initialized:
            self.plan[: metadata.seq_lens.shape[0]].copy_(metadata.seq_lens)
            metadata.schedule.have_initialized = True
        return self.plan[: metadata.seq_lens.shape[0]]

    def forward(self, key, state):
        metadata = state.attn_metadata
        planned = Metadata(self.plan_once(metadata), metadata.block_table)
        return super().forward(key, AttentionState(planned, state.slot_mappings))


class TensorModel(FlagModel):
    """Allocates the plan lazily and leaves it in the metadata."""

    def plan_once(self, metadata):
        if metadata.tables is None:
            metadata.tables = metadata.seq_lens.clone()
        return metadata.tables


class HoldingOwner(Owner):
    """One metadata object for each key, whatever the phase."""

    def __init__(self, device):
        super().__init__(device)
        self.held = {}

    def build(self, key, batch, phase):
        metadata, slots = super().build(key, batch, phase)
        if key not in self.held:
            self.held[key] = self.new(metadata)
        return AttentionState(self.held[key], slots)

    def new(self, metadata):
        return LazyMetadata(metadata.seq_lens, metadata.block_table)


class SeparateOwner(HoldingOwner):
    """A new object in each build."""

    def build(self, key, batch, phase):
        self.held.clear()
        return super().build(key, batch, phase)


LAZY = [
    (FlagModel, "attn_metadata.schedule.have_initialized"),
    (TensorModel, "attn_metadata.tables"),
]


@pytest.mark.parametrize(("model_type", "path"), LAZY)
def test_one_state_for_warmup_and_capture(place, make_pool, model_type, path):
    """What a warmup's forward left behind is not captured on; vLLM PR 42444 and 44253."""
    expected = Model(place.device).expected(BATCH)

    # The fault: the capture finds the plan made, so no replay ever makes one.
    owner, model = HoldingOwner(place.device), model_type(place.device)
    graph = by_hand(place, model.forward, KEY, owner.build(KEY, None, Phase.WARMUP))
    owner.build(KEY, BATCH, Phase.REPLAY)
    graph.replay()
    assert not is_close(graph.outputs, expected)

    pool = make_pool("target", owner=HoldingOwner(place.device))
    with pytest.raises(LazyStateError) as caught:
        pool.capture([KEY], model_type(place.device).forward)
    assert caught.value.path == path
    assert caught.value.key == KEY
    assert len(pool) == 0


@pytest.mark.parametrize(("model_type", "path"), LAZY)
def test_separate_states_for_warmup_and_capture(place, make_pool, model_type, path):
    """With a state for each phase the graph contains the initialisation; vLLM PR 44253."""
    model = model_type(place.device)
    pool = make_pool("target", owner=SeparateOwner(place.device))
    pool.capture([KEY], model.forward)
    for batch in (BATCH, BATCH.advanced()):
        expected = model.expected(batch)
        pool.refresh(KEY, batch)
        assert is_close(pool.replay(KEY), expected)


def test_lazy_state_of_a_lender_seen_by_a_borrower(place, make_pool):
    """A borrower's warmup may not initialise for its capture either; vLLM PR 42444."""
    target = make_pool("target", owner=HoldingOwner(place.device))
    target.capture([KEY], Model(place.device).forward)
    prefill = make_pool("draft.prefill")
    share_states(target, prefill)
    with pytest.raises(LazyStateError) as caught:
        prefill.capture([KEY], FlagModel(place.device).forward)
    assert caught.value.path == "attn_metadata.schedule.have_initialized"
    assert len(prefill) == 0
