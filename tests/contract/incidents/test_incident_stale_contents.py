"""Buffers that hold something else than what the graph that reads them needs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from graphshare import (
    AttentionState,
    CaptureError,
    GraphPool,
    Phase,
    Staleness,
    StaleStateError,
    share_states,
)
from tests.small_engine import (
    MAX_PAGES,
    MAX_REQS,
    PAGE_SIZE,
    Batch,
    Metadata,
    Model,
    Owner,
    is_close,
    key_of,
)

KEYS = [key_of(4), key_of(2), key_of(1)]


@dataclass
class SplitMetadata(Metadata):
    """With ``num_splits [reqs]`` int32: into how many parts each request's cache is split."""

    num_splits: torch.Tensor


class SplitOwner(Owner):
    """As FlashAttention 3's metadata: the key's rows are written, the tail of the buffer zeroed."""

    def __init__(self, device):
        super().__init__(device)
        self.num_splits = torch.zeros(MAX_REQS, dtype=torch.int32, device=device)

    def build(self, key, batch, phase):
        metadata, slots = super().build(key, batch, phase)
        self.num_splits[: key.num_reqs] = 2
        self.num_splits[key.num_reqs :] = 0
        splits = self.num_splits[: key.num_reqs]
        return AttentionState(SplitMetadata(metadata.seq_lens, metadata.block_table, splits), slots)


class SplitModel(Model):
    """Attention in ``num_splits`` equal parts, which a last kernel combines."""

    def forward(self, key, state):
        whole = super().forward(key, state)
        splits = state.attn_metadata.num_splits[:, None]
        used = torch.arange(4, device=splits.device) < splits
        parts = whole[:, None] / splits[..., None] * used[..., None]
        return parts.sum(1)


def test_stale_contents_at_capture(place, make_pool):
    """A borrower warms up and captures on contents built for that very key; vLLM PR 48261."""
    owner, model, draft = (
        SplitOwner(place.device),
        SplitModel(place.device),
        SplitModel(place.device, seed=1),
    )
    target = make_pool("target", owner=owner)
    target.capture(KEYS, model.forward)

    # The fault: the captured states handed over as they are hold the contents of another key.
    handed_over = {key: target.states[key] for key in KEYS}
    owner.build(KEYS[-1], None, Phase.CAPTURE)  # what the target happened to capture last
    assert not draft.forward(KEYS[0], handed_over[KEYS[0]]).isfinite().all()

    seen = []

    def forward(key, state):
        seen.append((key, *owner.builds[-1]))
        out = draft.forward(key, state)
        if owner.builds[-1][1] is Phase.WARMUP:
            assert out.isfinite().all()
        return out

    prefill = make_pool("draft.prefill")
    share_states(target, prefill)
    prefill.capture(KEYS, forward)
    assert seen == [(key, key, phase) for phase in (Phase.WARMUP, Phase.CAPTURE) for key in KEYS]
    batch = Batch((3, 7, 4))
    target.refresh(KEYS[0], batch)
    assert is_close(prefill.replay(KEYS[0]), Model(place.device, seed=1).expected(batch))


def test_replay_without_rebuild(place, make_pool):
    """A second step on one refresh is refused as used up; vLLM PR 38311."""
    key, batch = KEYS[0], Batch((2, 3, 5, 4))
    model = Model(place.device)

    unsafe = make_pool("draft.decode", owner=Owner(place.device), checks="off")
    unsafe.capture([key], model.forward)
    unsafe.refresh(key, batch)
    assert is_close(unsafe.replay(key), model.expected(batch))
    assert not is_close(unsafe.replay(key), model.expected(batch.advanced()))

    decode = make_pool("draft.decode", owner=Owner(place.device))
    decode.capture([key], model.forward)
    bound = decode.bind(key)
    decode.refresh(key, batch)
    assert is_close(decode.replay(key), model.expected(batch))
    for replay in (lambda: decode.replay(key), bound.replay):
        with pytest.raises(StaleStateError) as caught:
            replay()
        assert caught.value.key == key
        assert caught.value.rule is Staleness.USED_UP
    decode.refresh(key, batch.advanced())
    assert is_close(bound.replay(), model.expected(batch.advanced()))
    assert decode.statistics().refusals == {"StaleStateError": 2}


class AdvancingModel(Model):
    """Several draft steps on one build: each writes the next step's metadata in the graph."""

    def forward(self, key, state):
        out = super().forward(key, state).clone()
        metadata = state.attn_metadata
        metadata.seq_lens.add_(1)
        newest = (metadata.seq_lens - 1).long()[:, None]
        page = metadata.block_table.gather(1, newest // PAGE_SIZE)
        state.slot_mappings.copy_((page * PAGE_SIZE + newest % PAGE_SIZE)[:, 0])
        return out


def test_state_not_advanced_between_steps(place, make_pool):
    """Steps on one build need metadata of their own, up to the declared number; vLLM PR 41162."""
    key, batch, steps = KEYS[0], Batch((2, 3, 5)), 3
    model = Model(place.device)

    # The fault: one build serves all steps, and no step moves it on.
    unsafe = make_pool("draft.decode", owner=Owner(place.device), checks="off")
    unsafe.capture([key], model.forward)
    unsafe.refresh(key, batch)
    got = [unsafe.replay(key, copy=True) for _ in range(steps)]
    assert [is_close(each, model.expected(batch.advanced(i))) for i, each in enumerate(got)] == [
        True,
        False,
        False,
    ]

    advancing = AdvancingModel(place.device, seed=1)
    plain = Model(place.device, seed=1)
    decode = make_pool("draft.decode", owner=Owner(place.device), replays_per_refresh=steps)
    decode.capture([key], advancing.forward, writes_state=True)
    decode.refresh(key, batch)
    for step in range(steps):
        # Row by row the cache fills up; the plain model takes over what was written so far.
        plain.cache.copy_(advancing.cache)
        assert is_close(decode.replay(key), plain.expected(batch.advanced(step)))
    with pytest.raises(StaleStateError) as caught:
        decode.replay(key)
    assert caught.value.rule is Staleness.USED_UP


def test_forward_that_advances_the_state_stales_it_for_others(place, make_pool):
    """What a forward wrote over is fresh for no other pool; vLLM PR 41162."""
    key, batch = KEYS[0], Batch((2, 3, 5))
    advancing, reader = AdvancingModel(place.device), Model(place.device, seed=1)

    def pools(checks):
        decode = make_pool("decode", owner=Owner(place.device), replays_per_refresh=2)
        other = make_pool("other", checks=checks)
        share_states(decode, other)
        decode.capture([key], advancing.forward, writes_state=True)
        other.capture([key], reader.forward)
        decode.refresh(key, batch)
        return decode, other

    decode, other = pools("off")
    right = reader.expected(batch)
    decode.replay(key)
    assert not is_close(other.replay(key), right)

    decode, other = pools("fast")
    decode.replay(key)
    with pytest.raises(StaleStateError) as caught:
        other.replay(key)
    assert caught.value.rule is Staleness.FORWARD_WROTE
    assert caught.value.written_by == ("decode", key)
    decode.replay(key)  # its own allowance counts on


def test_undeclared_write_into_the_state():
    """The tape refuses a forward that advances its state without saying so; vLLM PR 41162."""
    pool = GraphPool("decode", owner=Owner("cpu"), device="cpu", backend="tape")
    with pytest.raises(CaptureError):
        pool.capture(KEYS, AdvancingModel("cpu").forward)
    assert len(pool) == 0


class PlanOwner(Owner):
    """Plans into a workspace from outside: the block tables, row by row."""

    def __init__(self, device, workspace):
        super().__init__(device)
        self.block_table.tensor = workspace.view(MAX_REQS, MAX_PAGES)


def test_two_plans_in_one_workspace(place, make_pool):
    """A plan over another one's memory makes that one stale; TensorRT-LLM PR 18436."""
    key, batch, later = KEYS[0], Batch((3, 5, 2)), Batch((4, 2, 6), shift=4)
    size = MAX_REQS * MAX_PAGES
    target_model, draft_model = Model(place.device), Model(place.device, seed=1)

    def pools(first, second, **options):
        target = make_pool("target", owner=PlanOwner(place.device, first), **options)
        decode = make_pool("draft.decode", owner=PlanOwner(place.device, second), **options)
        target.capture(KEYS, target_model.forward)
        decode.capture(KEYS, draft_model.forward)
        target.refresh(key, batch)
        decode.refresh(key, later)
        return target, decode

    workspace = torch.zeros(2 * size, dtype=torch.int64, device=place.device)
    target, decode = pools(workspace[:size], workspace[:size], checks="off")
    assert not is_close(target.replay(key), target_model.expected(batch))

    # Overlapping in part only, at an offset of one row.
    target, decode = pools(workspace[:size], workspace[MAX_PAGES : size + MAX_PAGES])
    with pytest.raises(StaleStateError) as caught:
        target.replay(key)
    assert caught.value.key == key
    assert caught.value.rule is Staleness.OVERWRITTEN
    assert caught.value.written_by == ("draft.decode", key)
    assert is_close(decode.replay(key), draft_model.expected(later))
    target.refresh(key, batch)
    assert is_close(target.replay(key), target_model.expected(batch))

    # Side by side in one workspace neither disturbs the other.
    target, decode = pools(workspace[:size], workspace[size:])
    assert is_close(target.replay(key), target_model.expected(batch))
    assert is_close(decode.replay(key), draft_model.expected(later))


def test_eager_step_through_the_same_buffers(place, make_pool):
    """A write that graphshare does not see is told by ``invalidate``; a relative of PR 38311."""
    key, batch, other = KEYS[0], Batch((3, 5, 2)), Batch((6, 4, 7), shift=3)
    model = Model(place.device)

    def refreshed(checks):
        owner = Owner(place.device)
        pool = make_pool("target", owner=owner, checks=checks)
        pool.capture(KEYS, model.forward)
        pool.refresh(key, batch)
        owner.write(other, 4)  # an eager step
        return pool

    assert not is_close(refreshed("off").replay(key), model.expected(batch))
    pool = refreshed("fast")
    pool.invalidate()
    with pytest.raises(StaleStateError) as caught:
        pool.replay(key)
    assert caught.value.rule is Staleness.INVALIDATED
    pool.refresh(key, batch)
    assert is_close(pool.replay(key), model.expected(batch))
