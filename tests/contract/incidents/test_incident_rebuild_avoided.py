"""State that is rebuilt although it has just been built."""

from __future__ import annotations

import torch

from graphshare import Phase, share_states
from tests.small_engine import Batch, Model, Owner, is_close, key_of

KEYS = [key_of(4), key_of(2)]
BATCHES = [Batch((3, 5, 2)), Batch((4, 6, 3)), Batch((8,), shift=2)]


def test_state_rebuilt_for_nothing(place, make_pool):
    """Between the target's replay and the borrowing draft's there is no build; vLLM PR 40410."""
    target_model, draft_model = Model(place.device), Model(place.device, seed=1)

    # The fault: each pool has an owner, and the second build writes what the first one wrote.
    first, second = Owner(place.device), Owner(place.device)
    one, other = make_pool("target", owner=first), make_pool("draft.prefill", owner=second)
    one.capture(KEYS, target_model.forward)
    other.capture(KEYS, draft_model.forward)
    for batch in BATCHES:
        key = one.dispatch(num_tokens=batch.num_reqs, num_reqs=batch.num_reqs)
        one.refresh(key, batch)
        one.replay(key)
        other.refresh(key, batch)
        other.replay(key)
        metadata, again = one.states[key].attn_metadata, other.states[key].attn_metadata
        assert torch.equal(metadata.seq_lens, again.seq_lens)
        assert torch.equal(metadata.block_table, again.block_table)
    assert second.count(Phase.REPLAY) == len(BATCHES)

    owner, idle = Owner(place.device), Owner(place.device)
    target = make_pool("target", owner=owner)
    prefill = make_pool("draft.prefill", owner=idle)
    share_states(target, prefill)
    target.capture(KEYS, target_model.forward)
    prefill.capture(KEYS, draft_model.forward)
    for batch in BATCHES:
        key = target.dispatch(num_tokens=batch.num_reqs, num_reqs=batch.num_reqs)
        hidden, drafts = target_model.expected(batch), draft_model.expected(batch)
        target.refresh(key, batch)
        assert is_close(target.replay(key), hidden)
        builds = len(owner.builds)
        assert is_close(prefill.replay(key), drafts)
        assert len(owner.builds) == builds
    assert owner.count(Phase.REPLAY) == len(BATCHES)
    assert idle.builds == []
    assert prefill.statistics().builds_avoided == len(BATCHES)
    assert prefill.statistics().builds["replay"] == 0
