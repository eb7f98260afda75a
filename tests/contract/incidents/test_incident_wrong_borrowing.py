"""Pairs for which borrowing is wrong, in whole or in part."""

from __future__ import annotations

import pytest
import torch

from graphshare import (
    AttentionSpec,
    AttentionState,
    CaptureError,
    OwnershipError,
    Phase,
    SpecMismatchError,
    StateDifferenceError,
    share_states,
)
from tests.small_engine import (
    HEAD_SIZE,
    Batch,
    Model,
    Owner,
    attention,
    is_close,
    key_of,
)

KEYS = [key_of(4), key_of(2)]
BATCH = Batch((3, 5, 2))


class LayeredOwner(Owner):
    """One metadata object for all layers, those of the draft among them."""

    layers = ("target.0", "target.1", "draft.0")

    def write(self, batch, rows):
        metadata, slots = super().write(batch, rows)
        return AttentionState(dict.fromkeys(self.layers, metadata), slots)


class LayeredModel(Model):
    """Runs every layer that it is handed metadata for."""

    def __init__(self, device, layers, seed=0):
        super().__init__(device, seed)
        self.scales = {name: float(i + 1) for i, name in enumerate(layers)}

    def forward(self, key, state):
        self.store(state.slot_mappings)
        return sum(
            self.scales[name] * attention(self.cache, metadata)
            for name, metadata in state.attn_metadata.items()
        )


def _draft_layers(state):
    own = {name: each for name, each in state.attn_metadata.items() if name.startswith("draft")}
    return AttentionState(own, state.slot_mappings)


def test_wrong_layers_in_the_state(place, make_pool):
    """``view`` hands the draft its own layers only; vllm-ascend PR 14791."""
    owner = LayeredOwner(place.device)
    model = LayeredModel(place.device, LayeredOwner.layers)
    draft = LayeredModel(place.device, ["draft.0"], seed=1)

    # The fault: the state is handed over whole.
    target, prefill = make_pool("target", owner=owner), make_pool("draft.prefill")
    share_states(target, prefill)
    target.capture(KEYS, model.forward)
    with pytest.raises(CaptureError) as caught:
        prefill.capture(KEYS, draft.forward)
    assert isinstance(caught.value.__cause__, KeyError)
    assert len(prefill) == 0

    prefill = make_pool("draft.prefill")
    share_states(target, prefill, view=_draft_layers)
    prefill.capture(KEYS, draft.forward)
    assert set(prefill.states[KEYS[0]].attn_metadata) == {"draft.0"}
    target.refresh(KEYS[0], BATCH)
    assert is_close(prefill.replay(KEYS[0]), draft.expected(BATCH))


def test_view_that_copies(place, make_pool):
    """A view that returns other memory than the lender's is refused; vllm-ascend PR 14791."""
    target, prefill = make_pool("target", owner=Owner(place.device)), make_pool("draft.prefill")
    model = Model(place.device)

    def copied(state):
        return AttentionState(state.attn_metadata, state.slot_mappings.clone())

    share_states(target, prefill, view=copied)
    target.capture(KEYS, model.forward)
    with pytest.raises(OwnershipError) as caught:
        prefill.capture(KEYS, model.forward)
    assert caught.value.key == KEYS[0]
    assert len(prefill) == 0


class ShardedOwner(Owner):
    """Context parallelism: a rank sees the later part of each long request only."""

    def __init__(self, device, longest):
        super().__init__(device)
        self.longest = longest

    def build(self, key, batch, phase):
        if batch is not None:
            lengths = (min(length, self.longest) for length in batch.seq_lens)
            batch = batch._replace(seq_lens=tuple(lengths))
        return super().build(key, batch, phase)


def test_batch_changed_between_models(place, make_pool):
    """``verify`` finds that borrowing is wrong, ``when`` turns it off; vLLM issue 53660."""
    model, draft = Model(place.device), Model(place.device, seed=1)
    large, small = KEYS
    short = Batch((2, 1))

    def pools(**options):
        target = make_pool("target", owner=ShardedOwner(place.device, 2))
        own = Owner(place.device)
        prefill = make_pool("draft.prefill", owner=own)
        shared = share_states(target, prefill, **options)
        target.capture(KEYS, model.forward)
        prefill.capture(KEYS, draft.forward)
        return target, prefill, shared, own

    # The fault: the borrower attends to the lender's shard.
    target, prefill, shared, own = pools()
    target.refresh(large, BATCH)
    assert not is_close(prefill.replay(large), draft.expected(BATCH))

    target.refresh(large, BATCH)
    with pytest.raises(StateDifferenceError) as caught:
        shared.verify(BATCH)
    assert caught.value.path == "attn_metadata.seq_lens"
    assert set(caught.value.paths) == {"attn_metadata.seq_lens", "slot_mappings"}
    assert caught.value.key == large
    assert prefill.statistics().refusals == {"StateDifferenceError": 1}
    target.refresh(small, short)
    shared.verify(short)  # short requests are not sharded

    # Large batches build for themselves, small ones borrow.
    asked = []

    def when(key):
        asked.append(key)
        return key != large

    target, prefill, shared, own = pools(when=when)
    assert sorted(asked, key=KEYS.index) == KEYS  # once for each key
    target.refresh(large, BATCH)
    assert shared.live_key is None
    prefill.refresh(large, BATCH)
    assert is_close(prefill.replay(large), draft.expected(BATCH))
    builds = own.count(Phase.REPLAY)
    target.refresh(small, short)
    assert shared.live_key == small
    assert is_close(prefill.replay(small), draft.expected(short))
    assert own.count(Phase.REPLAY) == builds
    with pytest.raises(OwnershipError) as refused:
        prefill.refresh(small, short)
    assert refused.value.key == small


class HeadsOwner(Owner):
    """A plan in which each head of each request has a tile."""

    def __init__(self, device, heads):
        super().__init__(device)
        self.heads = heads
        self.tiles = torch.zeros(64, dtype=torch.int64, device=device)

    def build(self, key, batch, phase):
        metadata, slots = super().build(key, batch, phase)
        rows = torch.arange(key.num_reqs, device=self.device).repeat_interleave(self.heads)
        self.tiles.fill_(-1)
        self.tiles[: rows.numel()] = rows
        return AttentionState((metadata, self.tiles), slots)


class HeadsModel(Model):
    """Heads beyond those of the plan are never computed."""

    def __init__(self, device, heads, seed=0):
        super().__init__(device, seed)
        self.heads = heads

    def forward(self, key, state):
        metadata, tiles = state.attn_metadata
        self.store(state.slot_mappings)
        out = attention(self.cache, metadata)
        count = out.shape[0] * self.heads
        mine = tiles[:count]
        heads = torch.zeros(out.shape[0] + 1, HEAD_SIZE, device=out.device)
        rows = out[mine.clamp(min=0)]
        return heads.index_add_(0, mine + 1, rows)[1:]


def test_heads_differ(place, make_pool):
    """A plan for other heads is not borrowed where both say so; FlashInfer, FlashAttention."""
    target_spec = AttentionSpec(num_q_heads=2, head_size=HEAD_SIZE, page_size=2)
    draft_spec = AttentionSpec(num_q_heads=4, head_size=HEAD_SIZE, page_size=1)
    model, draft = HeadsModel(place.device, 2), HeadsModel(place.device, 4, seed=1)
    key, batch = key_of(4), Batch((3, 5, 2, 4))

    # The fault: no spec, so nothing is checked, and the handle says so.
    target, prefill = make_pool("target", owner=HeadsOwner(place.device, 2)), make_pool("draft")
    shared = share_states(target, prefill)
    assert not shared.spec_checked
    target.capture([key], model.forward)
    prefill.capture([key], draft.forward)
    target.refresh(key, batch)
    assert is_close(target.replay(key), 2 * model.expected(batch))
    assert not is_close(prefill.replay(key), 4 * draft.expected(batch))

    target = make_pool("target", owner=HeadsOwner(place.device, 2), spec=target_spec)
    prefill = make_pool("draft", owner=HeadsOwner(place.device, 4), spec=draft_spec)
    with pytest.raises(SpecMismatchError) as caught:
        share_states(target, prefill)
    assert set(caught.value.fields) == {"num_q_heads", "page_size"}
    prefill.capture([key], draft.forward)  # and it may still build for itself
    prefill.refresh(key, batch)
    assert is_close(prefill.replay(key), 4 * draft.expected(batch))

    alike = make_pool("draft", spec=AttentionSpec(num_q_heads=2, causal=True))
    assert share_states(target, alike).spec_checked
