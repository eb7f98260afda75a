"""What a build is taken to write, where several keys share one state."""

from __future__ import annotations

import pytest
import torch

from graphshare import (
    AddressChangedError,
    BatchDescriptor,
    CaptureError,
    GraphPool,
    StaleStateError,
)
from tests.one_buffer import BIG, SMALL, Apart, Owner, captured, double

LORA = BatchDescriptor(4, 4, num_active_loras=1)


def tokens(key):
    return key.num_tokens


class ExtraOwner(Owner):
    """Writes one buffer more for keys with a LoRA."""

    def __init__(self):
        super().__init__()
        self.extra = torch.zeros(4)

    def writes(self, key):
        return [self.buffer, self.extra] if key.num_active_loras else [self.buffer]

    def build(self, key, batch, phase):
        if key.num_active_loras:
            self.extra.fill_(99)
        return super().build(key, batch, phase)


@pytest.mark.parametrize("together", [True, False])
def test_each_key_of_a_shared_state_writes_what_it_declares(together):
    """A key that joins a state by ``state_key`` is asked for, in the same capture or a later one;
    and its footprint is not taken for that of the others."""
    owner, neighbour = ExtraOwner(), Owner()
    neighbour.buffer = owner.extra
    pool = GraphPool("pool", owner=owner, device="cpu", state_key=tokens)
    other = GraphPool("other", owner=neighbour, device="cpu")
    if together:
        pool.capture([BIG, LORA], double)
        other.capture([SMALL], double)
    else:
        pool.capture([BIG], double)
        other.capture([SMALL], double)
        pool.capture([LORA], double)
    other.refresh(SMALL, 1)
    pool.refresh(BIG, 3)
    assert other.replay(SMALL, copy=True).tolist() == [2.0, 2.0]
    other.refresh(SMALL, 1)
    pool.refresh(LORA, 3)
    with pytest.raises(StaleStateError) as caught:
        other.replay(SMALL)
    assert caught.value.written_by == ("pool", LORA)


def test_an_owner_is_asked_what_it_writes_only_after_a_build():
    class LazyOwner(Owner):
        def __init__(self):
            super().__init__()
            self.made = {}

        def build(self, key, batch, phase):
            self.made[key] = self.buffer
            return super().build(key, batch, phase)

        def writes(self, key):
            return [self.made[key]]

    pool = GraphPool("pool", owner=LazyOwner(), device="cpu", state_key=tokens)
    pool.capture([BIG, LORA], double)
    pool.refresh(LORA, 2)
    assert pool.replay(LORA)[0] == 4.0


def test_a_buffer_that_moved_may_move_back():
    """What a build was once said to write stays in its footprint."""

    class Declaring(Owner):
        def writes(self, key):
            return [self.buffer]

    owner, neighbour = Declaring(), Owner()
    first = neighbour.buffer = owner.buffer
    pool = captured(owner, [BIG])
    other = captured(neighbour, [BIG])
    owner.buffer = torch.zeros(8)
    with pytest.raises(AddressChangedError):
        pool.capture([SMALL], double)
    owner.buffer = first
    other.refresh(BIG, 1)
    pool.refresh(BIG, 2)
    with pytest.raises(StaleStateError):
        other.replay(BIG)


def test_a_first_build_that_fails_may_have_written():
    """It said nothing of where, so all that is known of its owner is stale."""

    class Failing(Owner):
        def build(self, key, batch, phase):
            state = super().build(key, batch, phase)
            if key == SMALL:
                raise RuntimeError
            return state

    pool = captured(Failing(), [BIG])
    pool.refresh(BIG, 1)
    with pytest.raises(RuntimeError):
        pool.capture([SMALL], double)
    assert pool.statistics().fresh == ()


def test_what_a_failed_capture_built_counts_no_more():
    """Though a debugger may hold the exception, and with it the capture."""
    owner = Apart()
    owner.writes = None  # a build may write every key's state
    pool = captured(owner, [BIG])

    def failing(key, state):
        raise RuntimeError

    with pytest.raises(CaptureError) as caught:
        pool.capture([SMALL], failing)
    neighbour = Owner()
    neighbour.buffer = owner.apart[SMALL]
    other = captured(neighbour, [BIG])
    other.refresh(BIG, 1)
    pool.refresh(BIG, 1)
    assert other.statistics().fresh == (BIG,)
    assert caught.value.key == SMALL


def test_a_key_that_joins_a_state_is_built_once_more_after_the_capture():
    built = []

    class Counting(Owner):
        def build(self, key, batch, phase):
            built.append(key)
            return super().build(key, batch, phase)

    pool = GraphPool("pool", owner=Counting(), device="cpu", state_key=tokens)
    pool.capture([BIG], double)
    built.clear()
    pool.capture([LORA], double)
    assert built == [LORA, LORA, BIG, LORA]  # warmup, capture, and the check of all


def test_a_recapture_that_fails_replaces_nothing():
    """Whether or not a forward writes its state, all keys are kept or all are replaced."""

    def fails_later(key, state):
        if armed:
            raise ArithmeticError
        state.add_(0)
        return state * 3

    armed = []
    pool = GraphPool("pool", owner=Owner(), device="cpu")
    pool.capture([BIG], double)
    pool.capture([SMALL], fails_later, writes_state=True)
    handle = pool.bind(BIG)
    armed.append(True)
    with pytest.raises(CaptureError):
        pool.recapture()
    assert pool.statistics().captures == 2
    pool.refresh(BIG, 1)
    assert handle.replay()[0] == 2.0
    armed.clear()
    pool.recapture()
    pool.refresh(SMALL, 2)
    assert pool.replay(SMALL)[0] == 6.0


@pytest.mark.parametrize("declares", [True, False])
@pytest.mark.parametrize("again", ["refresh", "capture"])
def test_a_build_that_came_out_elsewhere_has_written_there(declares, again):
    """A refused build wrote where it returned its state, whoever reads that memory."""

    class Moving:
        def __init__(self):
            self.buffers = [torch.zeros(4), torch.zeros(4)]

        def build(self, key, batch, phase):
            return {"rows": self.buffers[0].fill_(7)}

    class Declaring(Moving):
        def writes(self, key):
            return [self.buffers[0]]

    owner, neighbour = (Declaring if declares else Moving)(), Owner()
    pool = GraphPool("pool", owner=owner, device="cpu")
    other = GraphPool("other", owner=neighbour, device="cpu")
    neighbour.buffer = owner.buffers[1]
    pool.capture([SMALL], lambda key, state: state["rows"] * 2)
    other.capture([SMALL], double)
    other.refresh(SMALL, 1)
    owner.buffers.reverse()
    if again == "refresh":
        with pytest.raises(AddressChangedError):
            pool.refresh(SMALL, 1)
    else:
        with pytest.raises(AddressChangedError):
            pool.capture([BIG], lambda key, state: state["rows"] * 2)
    with pytest.raises(StaleStateError):
        other.replay(SMALL)


class Growing(ExtraOwner):
    """Two leaves, the first under the rule ``any``; writes what ``more`` has as well."""

    host_values = {"0": "any"}

    def __init__(self):
        super().__init__()
        self.more = []

    def build(self, key, batch, phase):
        for each in self.more:
            each.fill_(99)
        return self.extra.fill_(99), super().build(key, batch, phase)


class GrowingDeclared(Growing):
    def writes(self, key):
        return [self.buffer, *self.more]


class GrowingUndeclared(Growing):
    writes = None


def overwritten_after_a_recapture(owner, change, forward=None):
    pool = captured(owner, [BIG, SMALL], lambda key, state: state[1] * 2)
    neighbour = Owner()
    other = captured(neighbour, [SMALL], name="other")
    change(neighbour.buffer[:4])
    if forward is None:
        pool.recapture()
    else:
        with pytest.raises(CaptureError):
            pool.recapture(forward=forward)
    for _ in range(3):
        other.refresh(SMALL, 1)
        assert other.replay(SMALL).tolist() == [2, 2]
        other.refresh(SMALL, 1)
        pool.refresh(BIG, 1)
        with pytest.raises(StaleStateError) as caught:
            other.replay(SMALL)
        assert caught.value.written_by == ("pool", BIG)


def test_a_recapture_at_the_same_place_declares_anew():
    owner = GrowingDeclared()
    overwritten_after_a_recapture(owner, owner.more.append)


def test_a_recapture_in_vain_declares_anew():
    """The old graphs stay, and the owner has said what its builds write from now on."""
    owner = GrowingDeclared()
    overwritten_after_a_recapture(owner, owner.more.append, lambda key, state: state[1].tolist())


def test_a_recapture_at_the_same_place_finds_leaves_elsewhere():
    """No graph reads them, so the layout is the same, but builds write there."""
    owner = GrowingUndeclared()
    overwritten_after_a_recapture(owner, lambda memory: setattr(owner, "extra", memory))
