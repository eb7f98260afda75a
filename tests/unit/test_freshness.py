"""Corners of the freshness rules that few calls reach; the state machine covers the rules."""

from __future__ import annotations

import pytest
import torch

from graphshare import BatchDescriptor, Phase, Staleness, StaleStateError, share_states
from tests.one_buffer import BIG, KEYS, SMALL, Apart, Owner, borrower, captured, double, make

TINY = BatchDescriptor(1, 1)


def refusal(pool, key):
    with pytest.raises(StaleStateError) as caught:
        pool.replay(key)
    return caught.value.rule, caught.value.written_by


def sharing_memory_with(tensor):
    owner = Owner()
    owner.buffer = tensor
    return owner


def test_a_later_capture_leaves_earlier_keys_stale():
    """Rule 2: the check after a capture builds them, and not for a batch."""
    pool = captured(Apart(), [BIG])
    pool.refresh(BIG, 1)
    pool.capture([SMALL], double)
    assert pool.statistics().fresh == ()
    assert refusal(pool, BIG) == (Staleness.BUILT_FOR_CAPTURE, ("pool", BIG))


def test_a_stale_key_does_not_count_as_live():
    """Rule 3: a refresh pushes out no fresh key as long as fewer than ``live_keys`` are fresh."""
    pool = captured(Apart(), [BIG, SMALL, TINY], live_keys=2)
    pool.refresh(BIG, 1)
    pool.refresh(SMALL, 2)
    pool.invalidate(SMALL)
    pool.refresh(TINY, 3)
    assert set(pool.statistics().fresh) == {BIG, TINY}


def test_the_oldest_is_the_one_refreshed_longest_ago():
    """Rule 3: a key that is refreshed again is the newest."""
    pool = captured(Apart(), [BIG, SMALL, TINY], live_keys=2)
    for key in (BIG, SMALL, BIG, TINY):
        pool.refresh(key, 1)
    assert set(pool.statistics().fresh) == {BIG, TINY}


def test_replays_that_were_not_used_are_lost():
    """Rule 4: a refresh grants ``replays_per_refresh``, whatever was left."""
    pool = captured(keys=[BIG], replays_per_refresh=2)
    pool.refresh(BIG, 1)
    pool.replay(BIG)
    pool.refresh(BIG, 1)
    pool.replay(BIG)
    pool.replay(BIG)
    assert refusal(pool, BIG) == (Staleness.USED_UP, None)


class Positions(Owner):
    """Its state has positions that no build writes, and that the forward advances."""

    def __init__(self):
        super().__init__()
        self.positions = torch.zeros(4)

    def build(self, key, batch, phase):
        return {"own": super().build(key, batch, phase), "positions": self.positions}

    def writes(self, key):
        return [self.buffer]


def advance(key, state):
    state["positions"].add_(1)
    return state["own"] * 2


def test_a_forward_that_writes_its_state_stales_what_lies_there():
    """Rule 5: states of other pools too, where their memory is written, and only there."""
    owner = Positions()
    reader = captured(sharing_memory_with(owner.positions), name="reader")
    apart = captured(Owner(), name="apart")
    pool = make(owner)
    reader.refresh(BIG, 1)
    apart.refresh(BIG, 1)
    pool.capture([BIG], advance, writes_state=True)  # its warmup ran the forward
    assert refusal(reader, BIG) == (Staleness.FORWARD_WROTE, ("pool", BIG))
    assert apart.statistics().fresh == (BIG,)

    reader.refresh(BIG, 1)
    pool.refresh(BIG, 1)
    assert reader.statistics().fresh == (BIG,)
    pool.replay(BIG)
    assert refusal(reader, BIG) == (Staleness.FORWARD_WROTE, ("pool", BIG))
    assert apart.statistics().fresh == (BIG,)


def test_the_first_cause_is_told():
    """Who wrote over a state first tells more than who did so last."""
    target, draft = make(name="target"), borrower()
    share_states(target, draft)
    target.capture([BIG], lambda key, state: state.add_(1), writes_state=True)
    draft.capture([BIG], double)
    other = captured(sharing_memory_with(target.owner.buffer), name="other")
    target.refresh(BIG, 1)
    target.replay(BIG)
    other.refresh(BIG, 1)
    assert refusal(draft, BIG) == (Staleness.FORWARD_WROTE, ("target", BIG))


class Scattered(Apart):
    """A buffer for each key, and no word of what a build writes."""

    writes = None


def test_every_key_of_a_capture_counts_for_its_owners_footprint():
    """Rule 2: by default a build may write each of them, however late it was built first."""
    owner = Scattered()
    beneath = captured(sharing_memory_with(owner.apart.setdefault(SMALL, torch.zeros(8))), [BIG])
    pool = make(owner)
    beneath.refresh(BIG, 1)
    pool.capture(KEYS, double)
    beneath.refresh(BIG, 1)
    pool.refresh(BIG, 1)
    assert refusal(beneath, BIG) == (Staleness.OVERWRITTEN, ("pool", BIG))


def test_a_state_that_moved_before_its_capture_is_looked_at_anew():
    """Rule 2: what was found of its memory at the warmup does not hold for where it is now."""
    there = torch.zeros(8)
    owner = Owner()
    writer = captured(sharing_memory_with(there), [BIG], name="writer")
    pool = make(owner)
    with pool.capturing([BIG]) as capturing:
        capturing.state(BIG, Phase.WARMUP)
        writer.refresh(BIG, 1)
        owner.buffer = there
        capturing.state(BIG, Phase.CAPTURE)
        capturing.commit(BIG, lambda: None)
    pool.refresh(BIG, 1)
    writer.refresh(BIG, 1)
    assert refusal(pool, BIG) == (Staleness.OVERWRITTEN, ("writer", BIG))
