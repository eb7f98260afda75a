"""What a build is taken to write, where several keys share one state."""

from __future__ import annotations

import pytest
import torch

from graphshare import (
    AddressChangedError,
    BatchDescriptor,
    CaptureError,
    GraphPool,
    Phase,
    StaleStateError,
    share_states,
)
from tests.one_buffer import BIG, SMALL, Apart, Owner, captured, double, make

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


def assert_overwritten(other, pool, key, batch):
    """What ``other`` has refreshed is stale once ``pool`` has, for a key."""
    other.refresh(SMALL, 1)
    pool.refresh(key, batch)
    with pytest.raises(StaleStateError) as caught:
        other.replay(SMALL)
    assert caught.value.written_by == ("pool", key)


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
    assert_overwritten(other, pool, LORA, 3)


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
        assert_overwritten(other, pool, BIG, 1)


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


class Workspace(Owner):
    """Each build writes a scratch as well; one for ``LORA`` needs a larger one, if there is any."""

    def __init__(self):
        super().__init__()
        self.scratch, self.larger, self.answers = torch.zeros(1), None, True

    def build(self, key, batch, phase):
        if key == LORA and self.larger is not None:
            self.scratch = self.larger
        self.scratch.fill_(99)
        return super().build(key, batch, phase)

    def writes(self, key):
        if not self.answers:
            raise KeyError(key)
        return [self.buffer, self.scratch]


def fails(key, state):
    raise RuntimeError("no memory")


def captures_in_vain(owner):
    pool = captured(owner, [BIG])

    def act():
        with pytest.raises(CaptureError, match="no memory"):
            pool.capture([LORA], fails)

    return pool, act


def loop_is_left(owner):
    pool = captured(owner, [BIG])

    def leave():
        with pool.capturing([LORA]) as capture:
            capture.state(LORA, Phase.WARMUP)
            raise ZeroDivisionError

    def act():
        with pytest.raises(ZeroDivisionError):
            leave()

    return pool, act


def borrower_captures_in_vain(owner):
    pool, draft = captured(owner, [BIG, LORA]), GraphPool("draft", device="cpu")
    share_states(pool, draft)

    def act():
        with pytest.raises(CaptureError, match="no memory"):
            draft.capture([LORA], fails)

    return pool, act


def lends(owner):
    lender = captured(Owner(), [LORA], name="lender", inspectable=True)
    pool = make(owner, inspectable=True)
    shared = share_states(lender, pool, when=lambda key: key == LORA)
    pool.capture([BIG, LORA], double)
    lender.refresh(LORA, 1)
    return pool, shared


def is_verified(owner):
    pool, shared = lends(owner)
    return pool, lambda: shared.verify(1)


def is_proved(owner):
    pool, shared = lends(owner)
    return pool, shared.prove


@pytest.mark.parametrize(
    "how",
    [captures_in_vain, loop_is_left, borrower_captures_in_vain, is_verified, is_proved],
)
def test_what_one_build_made_grow_is_written_by_those_for_other_keys(how):
    """Nothing is captured anew, so no other key is built, but the owner is asked for all."""
    owner, neighbour = Workspace(), Owner()
    pool, act = how(owner)
    other = captured(neighbour, [SMALL], name="other")
    owner.larger = neighbour.buffer[:4]
    act()
    assert owner.scratch is owner.larger
    for _ in range(2):
        assert_overwritten(other, pool, BIG, 1)


def test_an_owner_that_no_longer_answers_does_not_hide_why_a_capture_failed():
    """What it said before still counts."""
    owner, neighbour = Workspace(), Owner()
    owner.scratch = neighbour.buffer[:4]
    pool, other = captured(owner, [BIG]), captured(neighbour, [SMALL], name="other")

    def forgets(key, state):
        owner.answers = False
        raise RuntimeError("no memory")

    with pytest.raises(CaptureError, match="no memory"):
        pool.capture([LORA], forgets)
    other.refresh(SMALL, 1)
    pool.refresh(BIG, 1)
    with pytest.raises(StaleStateError):
        other.replay(SMALL)
