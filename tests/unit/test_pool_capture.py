"""GraphPool: captures, by the pool and by an engine's own loop."""

from __future__ import annotations

import pytest
import torch

from graphshare import (
    AddressChangedError,
    BatchDescriptor,
    CaptureError,
    KeyMismatchError,
    Phase,
    ReleasedStateError,
    Staleness,
    StaleStateError,
)
from graphshare.capture import make_backend
from tests.one_buffer import BIG, SMALL, Apart, Owner, captured, double, make, served


def test_order_of_a_capture():
    """All keys warm up, largest first, then all are captured, then all are looked at again."""
    owner = Owner()
    pool = captured(owner, keys=(SMALL, BIG))
    assert owner.builds == [
        (key, None, phase)
        for phase in (Phase.WARMUP, Phase.CAPTURE, Phase.CAPTURE)
        for key in (BIG, SMALL)
    ]
    assert pool.statistics().builds == {"warmup": 2, "capture": 4, "replay": 0}
    pool.capture([BatchDescriptor(1)], double)
    assert [key.num_tokens for key, _, _ in owner.builds[6:]] == [1, 1, 4, 2, 1]


def test_build_is_called_positionally_and_looked_up_each_time():
    """So an engine may name its parameters as it likes, and patch its owner."""

    class Odd:
        def build(self, a, b, c, /):
            return buffer

    buffer = torch.zeros(2)
    owner = Odd()
    pool = captured(owner, keys=[BIG])
    owner.build = lambda key, batch, phase: buffer.fill_(batch)
    assert served(pool, BIG, 4) == [8, 8]


def test_a_held_key_is_refused():
    """``capture`` never replaces in silence."""
    pool = captured()
    with pytest.raises(CaptureError) as caught:
        pool.capture([BatchDescriptor(1), SMALL], double)
    assert caught.value.key == SMALL
    assert pool.keys() == (BIG, SMALL)
    pool.release(SMALL)
    pool.capture([SMALL], double)
    assert served(pool, SMALL, 3) == [6, 6]


@pytest.mark.parametrize("in_phase", list(Phase)[:2])
def test_a_failing_build_passes_its_own_exception_on(in_phase):
    """The owner's exception is not dressed up, and the pool is as before."""

    class Failing(Owner):
        armed = False

        def build(self, key, batch, phase):
            if self.armed and key == SMALL and phase is in_phase:
                raise ZeroDivisionError
            return super().build(key, batch, phase)

    owner = Failing()
    pool = captured(owner, keys=[BIG])
    owner.armed = True
    with pytest.raises(ZeroDivisionError):
        pool.capture([SMALL], double)
    assert pool.keys() == (BIG,)
    owner.armed = False
    pool.capture([SMALL], double)
    assert served(pool, SMALL, 1) == [2, 2]


def test_a_failing_refresh_leaves_nothing_fresh():
    """What the build had touched by then is unknown, so nothing on that memory is fresh."""

    class Failing(Owner):
        def build(self, key, batch, phase):
            if batch == "fail":
                raise ZeroDivisionError
            return super().build(key, batch, phase)

    pool = captured(Failing(), live_keys=2)
    pool.refresh(BIG, 1)
    with pytest.raises(ZeroDivisionError):
        pool.refresh(SMALL, "fail")
    for key, rule in ((SMALL, Staleness.BUILD_FAILED), (BIG, Staleness.OVERWRITTEN)):
        with pytest.raises(StaleStateError) as caught:
            pool.replay(key)
        assert (caught.value.rule, caught.value.written_by) == (rule, ("pool", SMALL))
    assert pool.statistics().refreshes == 1


def test_a_failing_look_leaves_its_key_stale():
    """The look at the addresses of earlier keys builds them too, each in memory of its own."""

    class Failing(Apart):
        fails = False

        def build(self, key, batch, phase):
            if self.fails and key == SMALL and phase is Phase.CAPTURE:
                self.apart[key].fill_(99)
                raise ZeroDivisionError
            return super().build(key, batch, phase)

    owner = Failing()
    pool = captured(owner, keys=[SMALL])
    pool.refresh(SMALL, 1)
    owner.fails = True
    with pytest.raises(ZeroDivisionError):
        pool.capture([BIG], double)
    with pytest.raises(StaleStateError) as caught:
        pool.replay(SMALL)
    assert caught.value.rule is Staleness.BUILD_FAILED
    owner.fails = False
    assert served(pool, SMALL, 3) == [6] * 2


def test_a_failing_recapture_keeps_the_old_graphs():
    """All keys are replaced or none."""
    pool = captured()
    bound = pool.bind(SMALL)

    def forward(key, state):
        if key == SMALL:
            raise ZeroDivisionError
        return state * 10

    with pytest.raises(CaptureError):
        pool.recapture(forward=forward)
    assert pool.statistics().captures == 2
    assert served(pool, BIG, 3) == [6] * 4
    pool.refresh(SMALL, 3)
    assert bound.replay().tolist() == [6] * 2


def test_recapture_replaces():
    """New graphs, old handles refused; keys that are not captured are not added."""
    pool = captured()
    bound = pool.bind(BIG)
    pool.recapture([BIG], lambda key, state: state * 10)
    assert served(pool, BIG, 3) == [30] * 4
    assert served(pool, SMALL, 3) == [6] * 2
    pool.refresh(BIG, 1)
    with pytest.raises(ReleasedStateError):
        bound.replay()
    with pytest.raises(KeyMismatchError):
        pool.recapture([BatchDescriptor(1)])
    pool.recapture()  # each with the forward it was captured with last
    assert served(pool, BIG, 3) == [30] * 4
    assert served(pool, SMALL, 3) == [6] * 2
    assert pool.statistics().captures == 5


def test_recapture_after_the_buffers_moved():
    """What a refresh refuses, a recapture mends."""
    owner = Owner()
    pool = captured(owner)
    before = owner.buffer.data_ptr()
    kept, owner.buffer = owner.buffer, torch.zeros(8)
    with pytest.raises(AddressChangedError) as caught:
        pool.refresh(BIG, 1)
    assert caught.value.path == ""
    assert (caught.value.expected, caught.value.got) == (before, owner.buffer.data_ptr())
    assert f"expected {before:#x}, got {owner.buffer.data_ptr():#x}" in str(caught.value)
    assert "pool.rebind" in caught.value.remedy
    owner.buffer = kept.double()
    with pytest.raises(AddressChangedError) as caught:
        pool.refresh(BIG, 1)
    assert "rebind" not in caught.value.remedy  # it takes no other dtype
    owner.buffer = torch.zeros(8)
    pool.recapture()
    assert served(pool, BIG, 3) == [6] * 4


def test_what_a_capture_refuses_is_for_no_rebind():
    class Fresh(Owner):
        def build(self, key, batch, phase):
            self.kept = [*getattr(self, "kept", ()), torch.zeros(8)]
            return self.kept[-1]

    with pytest.raises(AddressChangedError) as caught:
        captured(Fresh(), keys=[BIG, SMALL])
    assert "rebind" not in caught.value.remedy


def test_progress_is_reported():
    """A callable sees every step once, in order; one that raises fails the capture as a whole."""
    steps = []
    pool = make()
    pool.capture([BIG, SMALL], double, progress=lambda *step: steps.append(step))
    assert [done for done, _, _ in steps] == [1, 2, 3, 4]
    assert {total for _, total, _ in steps} == {4}
    assert all(isinstance(what, str) for _, _, what in steps)

    def failing(done, total, what):
        if done == 3:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        make().capture([BIG, SMALL], double, progress=failing)
    make().capture([BIG], double, progress=False)
    make().capture([BIG], double, progress=True)


def engine_loop(pool, keys, *, replace=False, forward=double):
    backend = make_backend("tape", "cpu")
    with pool.capturing(keys, replace=replace) as capturing:
        for key in capturing.keys:
            forward(key, capturing.state(key, Phase.WARMUP))
            state = capturing.state(key, Phase.CAPTURE)
            graph = backend.capture(lambda key=key, state=state: forward(key, state))
            capturing.commit(key, graph.replay, graph.outputs, nbytes=7, release=graph.release)


def test_an_engine_keeps_its_own_loop():
    """What it commits serves like what the pool captures."""
    pool = make()
    engine_loop(pool, [SMALL, BIG])
    assert pool.keys() == (BIG, SMALL)
    assert served(pool, BIG, 3) == [6] * 4
    assert pool.statistics().bytes == {BIG: 7, SMALL: 7}
    with pytest.raises(ValueError, match="recapture"):
        pool.recapture([BIG])
    engine_loop(pool, [BIG], replace=True, forward=lambda key, state: state * 10)
    assert served(pool, BIG, 3) == [30] * 4
    pool.recapture([BIG], double)
    assert served(pool, BIG, 3) == [6] * 4


def test_a_loop_that_forgets_a_key_captures_none():
    """All or nothing, as in ``capture``."""
    pool, released = make(), []

    def loop():
        with pool.capturing([BIG, SMALL]) as capturing:
            capturing.state(BIG, Phase.CAPTURE)
            capturing.commit(BIG, lambda: None, release=lambda: released.append(BIG))

    with pytest.raises(CaptureError) as caught:
        loop()
    assert caught.value.key == SMALL
    assert len(pool) == 0
    assert released == [BIG]
    pool.capture([BIG], double)


def test_a_loop_that_fails_captures_none():
    """The body's own exception comes out, and what was committed is let go."""
    pool, released = make(), []

    def loop():
        with pool.capturing([BIG, SMALL]) as capturing:
            capturing.state(BIG, Phase.CAPTURE)
            capturing.commit(BIG, lambda: None, release=lambda: released.append(BIG))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert len(pool) == 0
    assert released == [BIG]
    engine_loop(pool, [BIG])
    assert served(pool, BIG, 1) == [2] * 4


def test_a_commit_needs_a_build_for_that_key_just_before():
    """A graph on another key's contents is refused."""
    pool = make()
    with pool.capturing([BIG, SMALL]) as capturing:
        with pytest.raises(CaptureError):
            capturing.commit(BIG, lambda: None)  # never built
        capturing.state(BIG, Phase.WARMUP)
        with pytest.raises(CaptureError):
            capturing.commit(BIG, lambda: None)  # built for a warmup only
        capturing.state(BIG, Phase.CAPTURE)
        capturing.state(SMALL, Phase.CAPTURE)
        with pytest.raises(CaptureError) as caught:
            capturing.commit(BIG, lambda: None)  # written over since
        assert caught.value.key == BIG
        capturing.commit(SMALL, lambda: None)
        capturing.state(BIG, Phase.CAPTURE)
        with pytest.raises(TypeError):
            capturing.commit(BIG, None)
        capturing.commit(BIG, lambda: None)
        with pytest.raises(CaptureError):
            capturing.commit(BIG, lambda: None)  # twice on one build
        with pytest.raises(KeyMismatchError):
            capturing.state(BatchDescriptor(1), Phase.CAPTURE)
        with pytest.raises(ValueError, match="WARMUP"):
            capturing.state(BIG, Phase.REPLAY)
    assert set(pool.keys()) == {BIG, SMALL}
    with pytest.raises(RuntimeError):
        capturing.state(BIG, Phase.CAPTURE)


def test_a_commit_after_a_refresh_is_refused():
    """Of a joint state: the graph may have been captured after it, on a batch's contents."""
    joint, more = BatchDescriptor(4), BatchDescriptor(4, num_active_loras=1)
    pool = make(state_key=lambda key: key.num_tokens)
    pool.capture([joint], double)
    with pool.capturing([more]) as capturing:
        capturing.state(more, Phase.WARMUP)
        capturing.state(more, Phase.CAPTURE)
        pool.refresh(joint, 3)
        with pytest.raises(CaptureError) as caught:
            capturing.commit(more, lambda: None)
        assert caught.value.key == more
        capturing.state(more, Phase.CAPTURE)
        capturing.commit(more, lambda: None)
    assert set(pool.keys()) == {joint, more}


def test_captures_do_not_nest():
    """One capture of a pool at a time; another pool's is its own affair."""
    pool, other = make(), make()
    with pool.capturing([BIG]) as capturing:
        with pytest.raises(RuntimeError):
            pool.capture([SMALL], double)
        other.capture([SMALL], double)
        capturing.state(BIG, Phase.CAPTURE)
        capturing.commit(BIG, lambda: None)
    assert pool.keys() == (BIG,)
    pool.capture([SMALL], double)


def test_a_capture_looks_at_the_pool_when_it_begins():
    """Not when ``capturing`` was called: what is held may have changed in between."""
    pool = make()
    capturing = pool.capturing([BIG])
    pool.capture([BIG], double)
    with pytest.raises(CaptureError):
        capturing.__enter__()
    pool.capture([SMALL], double)
    assert served(pool, BIG, 1) == [2] * 4


def test_a_forward_that_fails_is_named():
    """The error says in which pool and for which key, is chained, and is counted."""
    pool = make()
    for failing in (BIG, SMALL):

        def forward(key, state, failing=failing):
            if key == failing:
                raise ZeroDivisionError
            return state * 2

        with pytest.raises(CaptureError) as caught:
            pool.capture([BIG, SMALL], forward)
        assert caught.value.key == failing
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert pool.statistics().refusals == {"CaptureError": 2}
    with pytest.raises(KeyboardInterrupt):
        pool.capture([BIG], _interrupted)
    pool.capture([BIG], double)
    assert served(pool, BIG, 1) == [2] * 4


def _interrupted(key, state):
    raise KeyboardInterrupt
