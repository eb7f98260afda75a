"""Host values that a capture froze."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from graphshare import (
    AttentionState,
    BakedValueChangedError,
    Phase,
    Staleness,
    StaleStateError,
    share_states,
)
from tests.small_engine import (
    MAX_LEN,
    Batch,
    Metadata,
    Model,
    Owner,
    attention,
    by_hand,
    is_close,
    key_of,
)

KEY = key_of(4)
SHORT, LONG = Batch((1, 2, 2)), Batch((3, 8, 5))


@dataclass
class HostMetadata(Metadata):
    max_seq_len: int
    num_splits: int
    num_actual_tokens: int
    chunk: torch.Tensor  # [1] int64: positions of one split


class HostOwner(Owner):
    """Takes host values from the batch; ``at_capture`` is the longest length of a capture."""

    def __init__(self, device, at_capture, num_splits=lambda batch: 1):
        super().__init__(device)
        self.at_capture = at_capture
        self.num_splits = num_splits
        self.chunk = torch.zeros(1, dtype=torch.int64, device=device)

    def build(self, key, batch, phase):
        metadata, slots = super().build(key, batch, phase)
        longest = self.at_capture if batch is None else max(batch.seq_lens)
        splits = 1 if batch is None else self.num_splits(batch)
        reqs = 0 if batch is None else batch.num_reqs
        self.chunk.fill_(MAX_LEN // splits)
        metadata = HostMetadata(
            metadata.seq_lens, metadata.block_table, longest, splits, reqs, self.chunk
        )
        return AttentionState({"model.layers.0": metadata}, slots)


class BoundedModel(Model):
    """Reads no position past ``max_seq_len``, as FlashAttention sizes its grid."""

    def forward(self, key, state):
        metadata = state.attn_metadata["model.layers.0"]
        self.store(state.slot_mappings)
        return attention(self.cache, metadata, metadata.max_seq_len)


LENGTH = "attn_metadata.model.layers.0.max_seq_len"
TOKENS = {"*.num_actual_tokens": "any"}


def _by_hand(place, owner, model, batch):
    graph = by_hand(place, model.forward, KEY, owner.build(KEY, None, Phase.CAPTURE))
    owner.build(KEY, batch, Phase.REPLAY)
    graph.replay()
    return graph.outputs


def test_host_value_frozen(place, make_pool):
    """A host value that must come out as captured is compared; vLLM issue 20301, PR 25490."""
    model = BoundedModel(place.device)
    got = _by_hand(place, HostOwner(place.device, at_capture=2), model, LONG)
    assert not is_close(got, model.expected(LONG))  # truncated in silence

    owner = HostOwner(place.device, at_capture=2)
    owner.host_values = TOKENS
    pool = make_pool("target", owner=owner)
    pool.capture([KEY], model.forward)
    pool.refresh(KEY, SHORT)
    assert is_close(pool.replay(KEY), model.expected(SHORT))
    with pytest.raises(BakedValueChangedError) as caught:
        pool.refresh(KEY, LONG)
    assert caught.value.path == LENGTH
    assert caught.value.rule == "equal"
    assert caught.value.key == KEY
    assert (caught.value.expected, caught.value.got) == (2, 8)
    with pytest.raises(StaleStateError) as stale:
        pool.replay(KEY)
    assert stale.value.rule is Staleness.BUILD_FAILED
    pool.refresh(KEY, SHORT)
    assert is_close(pool.replay(KEY), model.expected(SHORT))


def test_host_value_captured_at_capacity(place, make_pool):
    """What was captured at capacity may be smaller, never larger; vLLM PR 27128."""
    model = BoundedModel(place.device)
    owner = HostOwner(place.device, at_capture=MAX_LEN)
    owner.host_values = {"*.max_seq_len": "at_most", **TOKENS}
    target, draft = make_pool("target", owner=owner), make_pool("draft")
    share_states(target, draft)
    target.capture([KEY], model.forward)
    draft.capture([KEY], model.forward)
    for batch in (SHORT, LONG):
        target.refresh(KEY, batch)
        assert is_close(target.replay(KEY), model.expected(batch))
        assert is_close(draft.replay(KEY), model.expected(batch))

    # Captured below capacity, and the rule says so.
    owner = HostOwner(place.device, at_capture=4)
    owner.host_values = {"*.max_seq_len": "at_most", **TOKENS}
    pool = make_pool("target", owner=owner)
    pool.capture([KEY], model.forward)
    with pytest.raises(BakedValueChangedError) as caught:
        pool.refresh(KEY, LONG)
    assert caught.value.path == LENGTH
    assert caught.value.rule == "at_most"


class SplitModel(Model):
    """Splits each cache into ``num_splits`` chunks, one launch each, and combines them."""

    def forward(self, key, state):
        metadata = state.attn_metadata["model.layers.0"]
        self.store(state.slot_mappings)
        rows = self.cache[metadata.block_table].flatten(1, 2)
        positions = torch.arange(MAX_LEN, device=rows.device)
        scores = rows.sum(-1).exp() * (positions < metadata.seq_lens[:, None])
        top = torch.zeros_like(rows[:, 0])
        bottom = torch.zeros_like(scores[:, :1])
        for split in range(metadata.num_splits):
            begin = split * metadata.chunk
            weights = scores * ((positions >= begin) & (positions < begin + metadata.chunk))
            top = top + (weights[..., None] * rows).sum(1)
            bottom = bottom + weights.sum(1, keepdim=True)
        return top / bottom


def test_number_of_splits_frozen(place, make_pool):
    """The number of splits at the build and in the graph are one; vLLM PR 25490 and 27128."""
    model = SplitModel(place.device)

    def num_splits(batch):
        return 2 if max(batch.seq_lens) > MAX_LEN // 2 else 1

    got = _by_hand(place, HostOwner(place.device, MAX_LEN, num_splits), model, LONG)
    assert not is_close(got, model.expected(LONG))  # the second chunk is never computed

    owner = HostOwner(place.device, MAX_LEN, num_splits)
    owner.host_values = {"*.max_seq_len": "any", **TOKENS}
    pool = make_pool("target", owner=owner)
    pool.capture([KEY], model.forward)
    pool.refresh(KEY, SHORT)
    assert is_close(pool.replay(KEY), model.expected(SHORT))
    with pytest.raises(BakedValueChangedError) as caught:
        pool.refresh(KEY, LONG)
    assert caught.value.path == "attn_metadata.model.layers.0.num_splits"
    assert (caught.value.expected, caught.value.got) == (1, 2)
