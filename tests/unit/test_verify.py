"""SharedStates.verify: a borrowed state against the one the consumer would build itself."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from graphshare import (
    AttentionState,
    BatchDescriptor,
    GraphPool,
    OwnershipError,
    Phase,
    ReleasedStateError,
    Staleness,
    StaleStateError,
    StateDifferenceError,
    share_states,
)

KEY = BatchDescriptor(4, 4)


class Batch(NamedTuple):
    num_reqs: int
    value: float = 1.0


class Owner:
    """seq_lens ``[4]``, query_start_loc ``[5]``, workspace ``[7]``, and a host value."""

    def __init__(self, *, padding=0.0, offset=0.0, scale=1, buffers=None):
        self.seq_lens, self.starts, self.work = buffers or (
            torch.zeros(4),
            torch.zeros(5),
            torch.zeros(7),
        )
        self.padding, self.offset, self.scale = padding, offset, scale
        self.builds = []

    def build(self, key, batch, phase):
        self.builds.append(phase)
        live = 4 if batch is None else batch.num_reqs
        value = 1.0 if batch is None else batch.value + self.offset
        self.seq_lens.fill_(self.padding)
        self.seq_lens[:live] = value
        self.starts.fill_(self.padding)
        self.starts[: live + 1] = 1.0
        self.work.fill_(value)
        metadata = {"seq_lens": self.seq_lens, "starts": self.starts, "scale": self.scale}
        return AttentionState(metadata, self.work)


def pools(lender, own=None, **loan):
    target = GraphPool("target", owner=lender, device="cpu")
    draft = GraphPool("draft", owner=own, device="cpu")
    shared = share_states(target, draft, **loan)
    forward = lambda key, state: state.attn_metadata["seq_lens"] * 2  # noqa: E731
    target.capture([KEY], forward)
    draft.capture([KEY], forward)
    return target, draft, shared


def test_equal_states_verify():
    """Nothing is raised; the producer is stale afterwards, whatever the buffers."""
    own = Owner()
    target, draft, shared = pools(Owner(), own)
    assert own.builds == []
    target.refresh(KEY, Batch(3))
    shared.verify(Batch(3))
    assert own.builds == [Phase.REPLAY]
    for pool in (target, draft):
        with pytest.raises(StaleStateError) as caught:
            pool.replay(KEY)
        assert caught.value.rule is Staleness.INVALIDATED
    assert shared.live_key is None
    target.refresh(KEY, Batch(3))
    assert draft.replay(KEY).tolist() == [2, 2, 2, 0]


@pytest.mark.parametrize("shared_buffers", [False, True])
def test_differing_values_are_found(shared_buffers):
    """Also where both owners write the same buffers: the borrowed values were kept before."""
    lender = Owner()
    buffers = (lender.seq_lens, lender.starts, lender.work) if shared_buffers else None
    target, draft, shared = pools(lender, Owner(offset=1.0, buffers=buffers))
    target.refresh(KEY, Batch(3))
    with pytest.raises(StateDifferenceError) as caught:
        shared.verify(Batch(3))
    assert caught.value.path == "attn_metadata.seq_lens"
    assert caught.value.paths == ("attn_metadata.seq_lens", "slot_mappings")
    assert caught.value.key == KEY
    with pytest.raises(StaleStateError):
        target.replay(KEY)
    assert draft.statistics().refusals == {"StateDifferenceError": 1}


def test_padding_is_compared_on_request():
    """Rows past the live batch do not matter, unless they are asked for."""
    target, _, shared = pools(Owner(), Owner(padding=-1.0))
    target.refresh(KEY, Batch(2))
    shared.verify(Batch(2))
    target.refresh(KEY, Batch(2))
    with pytest.raises(StateDifferenceError) as caught:
        shared.verify(Batch(2), padding=True)
    assert caught.value.paths == ("attn_metadata.seq_lens", "attn_metadata.starts")


def test_a_full_batch_has_no_padding():
    """Then every row counts."""
    target, _, shared = pools(Owner(), Owner(padding=-1.0))
    target.refresh(KEY, Batch(4))
    shared.verify(Batch(4), padding=True)


def test_live_rows_of_the_owner():
    """An owner that knows how many rows are live says so, by pattern; the rest counts whole."""

    class Telling(Owner):
        def live_rows(self, key, batch):
            return {"*.seq_lens": batch.num_reqs, "slot_mappings": 1}

    lender, own = Owner(), Telling(padding=-1.0)
    target, _, shared = pools(lender, own)
    target.refresh(KEY, Batch(2))
    lender.work[1:] = 99.0  # past what is live
    shared.verify(Batch(2))
    target.refresh(KEY, Batch(2))
    lender.work[0] = 99.0
    with pytest.raises(StateDifferenceError) as caught:
        shared.verify(Batch(2))
    assert caught.value.paths == ("slot_mappings",)
    target.refresh(KEY, Batch(2))
    lender.work[1:] = 99.0
    with pytest.raises(StateDifferenceError):
        shared.verify(Batch(2), padding=True)


def test_host_values_and_missing_leaves_are_compared():
    """A state is more than its tensors."""
    target, _, shared = pools(Owner(), Owner(scale=2))
    target.refresh(KEY, Batch(2))
    with pytest.raises(StateDifferenceError) as caught:
        shared.verify(Batch(2))
    assert caught.value.paths == ("attn_metadata.scale",)

    class More(Owner):
        window = torch.zeros(1)

        def build(self, key, batch, phase):
            metadata, work = super().build(key, batch, phase)
            return AttentionState({**metadata, "window": self.window}, work)

    target, _, shared = pools(Owner(), More())
    target.refresh(KEY, Batch(2))
    with pytest.raises(StateDifferenceError) as caught:
        shared.verify(Batch(2))
    assert caught.value.paths == ("attn_metadata.window",)

    target, _, shared = pools(More(), Owner())
    target.refresh(KEY, Batch(2))
    with pytest.raises(StateDifferenceError) as caught:
        shared.verify(Batch(2))
    assert caught.value.paths == ("attn_metadata.window",)


def test_any_is_not_compared():
    """By the rules of either owner: no kernel depends on it."""
    for ruled in (0, 1):
        owners = Owner(), Owner(scale=2)
        owners[ruled].host_values = {"*.scale": "any"}
        target, _, shared = pools(*owners)
        target.refresh(KEY, Batch(2))
        shared.verify(Batch(2))


def test_only_what_the_view_shows_is_compared():
    """The consumer's own owner builds what the consumer sees."""

    class Part(Owner):
        def build(self, key, batch, phase):
            metadata, _ = super().build(key, batch, phase)
            return AttentionState({"seq_lens": metadata["seq_lens"]})

    def view(state):
        return AttentionState({"seq_lens": state.attn_metadata["seq_lens"]})

    target, _, shared = pools(Owner(), Part(), view=view)
    target.refresh(KEY, Batch(2))
    shared.verify(Batch(2))


def test_nan_equals_nan():
    """Padding may be poisoned with it."""
    target, _, shared = pools(Owner(padding=float("nan")), Owner(padding=float("nan")))
    target.refresh(KEY, Batch(2))
    shared.verify(Batch(2), padding=True)


def test_a_consumer_without_an_owner_cannot_verify():
    """And nothing is stale by the attempt."""
    target, draft, shared = pools(Owner())
    target.refresh(KEY, Batch(2))
    with pytest.raises(OwnershipError):
        shared.verify(Batch(2))
    draft.replay(KEY)
    target.replay(KEY)


def test_nothing_to_verify():
    """Before a refresh, when it is used up, and after the loan's end; the cause is named."""
    own = Owner()
    target, draft, shared = pools(Owner(), own)
    with pytest.raises(StaleStateError) as caught:
        shared.verify(Batch(2))
    assert caught.value.rule is Staleness.NEVER_REFRESHED
    target.refresh(KEY, Batch(2))
    draft.replay(KEY)
    with pytest.raises(StaleStateError) as caught:
        shared.verify(Batch(2))
    assert caught.value.rule is Staleness.USED_UP
    target.refresh(KEY, Batch(2))
    shared.close()
    with pytest.raises(ReleasedStateError):
        shared.verify(Batch(2))
    assert own.builds == []


def test_what_the_consumers_build_writes_over_is_stale():
    """A third pool's state may lie where the consumer's owner builds."""
    own, third = Owner(), Owner()
    third.work = own.work
    other = GraphPool("other", owner=third, device="cpu")
    other.capture([KEY], lambda key, state: state.slot_mappings * 2)
    target, _, shared = pools(Owner(), own)
    other.refresh(KEY, Batch(2))
    target.refresh(KEY, Batch(2))
    shared.verify(Batch(2))
    with pytest.raises(StaleStateError) as caught:
        other.replay(KEY)
    assert (caught.value.rule, caught.value.written_by) == (Staleness.OVERWRITTEN, ("draft", KEY))


def test_a_failing_build_of_the_consumer():
    """Its own exception comes out, and the producer is stale: buffers may be shared."""

    class Failing(Owner):
        def build(self, key, batch, phase):
            raise ZeroDivisionError

    target, draft, shared = pools(Owner(), Failing())
    target.refresh(KEY, Batch(2))
    with pytest.raises(ZeroDivisionError):
        shared.verify(Batch(2))
    for pool in (target, draft):
        with pytest.raises(StaleStateError):
            pool.replay(KEY)
    target.refresh(KEY, Batch(2))
    draft.replay(KEY)
