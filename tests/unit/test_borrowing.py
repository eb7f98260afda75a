"""share_states: what a borrower sees, and which key is live."""

from __future__ import annotations

import pytest
import torch

from graphshare import (
    AddressChangedError,
    BatchDescriptor,
    KeyMismatchError,
    OwnershipError,
    Phase,
    Staleness,
    StaleStateError,
    share_states,
)
from tests.one_buffer import (
    BIG,
    KEYS,
    SMALL,
    Apart,
    Owner,
    borrower,
    captured,
    double,
    make,
    pair,
    triple,
)

# What a borrower sees.


def test_a_borrower_is_fresh_by_its_lenders_refresh_alone():
    """Neither a capture, nor the lender's replay, makes it so."""
    target, draft, _ = pair()
    for key in KEYS:
        with pytest.raises(StaleStateError):
            draft.replay(key)
    target.refresh(BIG, 1)
    assert target.statistics().fresh == draft.statistics().fresh == (BIG,)
    target.refresh(SMALL, 1)
    for pool in (target, draft):
        with pytest.raises(StaleStateError) as caught:
            pool.replay(BIG)
        assert caught.value.written_by == ("target", SMALL)
        assert caught.value.rule in (Staleness.OVERWRITTEN, Staleness.SUPERSEDED)


def test_a_key_map():
    """The consumer's key is mapped to the producer's; several may share one state."""
    lora = BatchDescriptor(4, 4, num_active_loras=1)
    target, draft, shared = pair(
        keys=[BIG, lora],
        key=lambda key: BatchDescriptor(key.num_tokens, key.num_reqs),
        options={"replays_per_refresh": 2},
    )
    target.refresh(BIG, 2)
    assert shared.live_key == BIG
    assert draft.replay(lora).tolist() == [6] * 4
    assert draft.replay(BIG).tolist() == [6] * 4
    assert shared.live_key is None


def test_a_key_map_to_a_missing_key():
    """The consumer's keys are named, and the producer's that come closest."""
    target, draft = captured(name="target"), borrower()
    share_states(target, draft, key=lambda key: BatchDescriptor(key.num_tokens * 2))
    with pytest.raises(KeyMismatchError) as caught:
        draft.capture([BIG, SMALL], triple)
    assert set(caught.value.missing) == {BIG, SMALL}
    assert set(caught.value.nearest) == {BIG, SMALL}


def test_the_lenders_state_key_finds_the_state():
    """A draft key without the LoRA count of its target's needs no map."""
    target = make(name="target", state_key=lambda key: (key.num_tokens, key.num_reqs))
    draft = borrower()
    shared = share_states(target, draft)
    lora = BatchDescriptor(4, 4, num_active_loras=1)
    target.capture([lora], double)
    draft.capture([BIG], triple)
    target.refresh(lora, 2)
    assert shared.live_key == BIG
    assert draft.replay(BIG).tolist() == [6] * 4


def test_a_view():
    """The consumer sees what the view picks: views of the lender's tensors, along a chain too."""
    target, middle, last = captured(name="target"), borrower("middle"), borrower("last")
    share_states(target, middle, view=lambda state: {"rows": state[1:]})
    share_states(middle, last, view=lambda state: state["rows"][:2])
    middle.capture([BIG], lambda key, state: state["rows"] * 3)
    last.capture([BIG], triple)
    assert middle.states[BIG]["rows"].shape == (3,)
    assert last.states[BIG].data_ptr() == target.states[BIG][1:].data_ptr()
    target.refresh(BIG, 2)
    assert middle.replay(BIG).tolist() == [6] * 3
    assert last.replay(BIG).tolist() == [6] * 2


@pytest.mark.parametrize(
    "view",
    [
        lambda state: state.clone(),
        lambda state: state * 1,
        lambda state: {"a": state, "b": torch.zeros(1)},
        lambda state: state.as_strided((9,), (1,), 0),  # past the state, in the same storage
    ],
    ids=["copied", "computed", "added", "widened"],
)
def test_a_view_that_leaves_the_state_is_refused(view):
    """It returns the state's own bytes or none."""
    owner = Owner()
    owner.buffer = torch.zeros(16)
    target, draft = captured(owner, name="target"), borrower()
    share_states(target, draft, view=view)
    with pytest.raises(OwnershipError) as caught:
        draft.capture([BIG], lambda key, state: torch.zeros(1))
    assert caught.value.key == BIG
    assert len(draft) == 0


def test_a_view_that_picks_something_else_later_is_refused():
    """The check after a capture looks at what views return, as at what owners do."""
    picks = [4, 4, 3]  # for the warmup, for the capture, and after it
    target, draft = captured(name="target"), borrower()
    share_states(target, draft, view=lambda state: state[: picks.pop(0)])
    with pytest.raises(AddressChangedError) as caught:
        draft.capture([BIG], triple)
    assert (caught.value.key, caught.value.field) == (BIG, "shape")
    assert len(draft) == 0


def test_a_state_that_is_elsewhere_for_a_borrowers_capture_is_refused():
    """Where the lender's graphs read it, the borrower's must, though it comes back later."""

    class Straying(Owner):
        astray = -1

        def build(self, key, batch, phase):
            state = super().build(key, batch, phase)
            self.astray -= phase is Phase.CAPTURE
            return state.clone() if self.astray == 0 else state

    owner = Straying()
    target, draft = captured(owner, [BIG], name="target"), borrower()
    share_states(target, draft)
    owner.astray = 1
    with pytest.raises(AddressChangedError) as caught:
        draft.capture([BIG], triple)
    assert (caught.value.key, caught.value.field) == (BIG, "address")
    assert len(draft) == 0


def test_when_decides_key_by_key():
    """Asked once for each key; what is not borrowed the consumer's own owner builds."""
    own, asked = Owner(), []

    def when(key):
        asked.append(key)
        return key == SMALL

    target, draft, shared = pair(options={"owner": own}, when=when)
    assert sorted(asked, key=KEYS.index) == list(KEYS)
    assert [key for key, _, _ in own.builds] == [BIG, BIG, BIG]
    target.refresh(BIG, 1)
    assert shared.live_key is None
    with pytest.raises(StaleStateError):
        draft.replay(BIG)
    draft.refresh(BIG, 7)
    assert draft.replay(BIG).tolist() == [21] * 4
    target.refresh(SMALL, 2)
    assert draft.replay(SMALL).tolist() == [6] * 2
    with pytest.raises(OwnershipError):
        draft.refresh(SMALL, 2)
    assert draft.statistics().builds_avoided == 1
    assert own.builds[-1] == (BIG, 7, Phase.REPLAY)


def test_when_without_an_owner():
    """A key that is neither borrowed nor owned is refused, before anything is built."""
    owner = Owner()
    target, draft = captured(owner, name="target"), borrower()
    share_states(target, draft, when=lambda key: key == SMALL)
    builds = len(owner.builds)
    with pytest.raises(OwnershipError) as caught:
        draft.capture(KEYS, triple)
    assert caught.value.key == BIG
    assert len(owner.builds) == builds


# The live key.


def test_the_live_key_follows_the_latest_refresh():
    """Of several fresh keys the one refreshed last; none when it is not lent, used up, or over."""
    target = make(Apart(), name="target", live_keys=2)
    draft = borrower()
    shared = share_states(target, draft)
    target.capture((*KEYS, BatchDescriptor(1)), double)
    draft.capture(KEYS, triple)
    assert shared.live_key is None
    for key in (BIG, SMALL, BIG):
        target.refresh(key, 1)
        assert shared.live_key == key
    assert draft.statistics().fresh == KEYS
    draft.replay(BIG)
    assert shared.live_key is None
    target.refresh(BatchDescriptor(1), 1)
    assert shared.live_key is None
    target.refresh(SMALL, 1)
    target.invalidate(SMALL)
    assert shared.live_key is None
    target.refresh(SMALL, 1)
    shared.close()
    assert shared.live_key is None


def test_the_live_key_along_a_chain():
    """By the latest refresh of the pool that owns the state, however far."""
    target, middle, last = captured(name="target"), borrower("middle"), borrower("last")
    share_states(target, middle)
    shared = share_states(middle, last)
    middle.capture(KEYS, triple)
    last.capture(KEYS, triple)
    target.refresh(SMALL, 1)
    assert shared.live_key == SMALL
    middle.replay(SMALL)  # does not use up the last one's allowance
    assert shared.live_key == SMALL


def test_the_live_key_is_the_key_object_that_was_captured():
    """So it is hashed once."""
    target, _draft, shared = pair()
    target.refresh(BatchDescriptor(4, 4), 1)
    assert shared.live_key == BIG
