"""What a refresh looks at by itself, and a refresh of what the engine has built already."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphshare import (
    AddressChangedError,
    AttentionState,
    BakedValueChangedError,
    GraphPool,
    KeyMismatchError,
    OwnershipError,
    Phase,
    ReleasedStateError,
    Staleness,
    StaleStateError,
    share_states,
)
from graphshare import refreshing as refreshing_module
from graphshare.state import checker as checker_module
from graphshare.state._guards import guard_maker
from tests.looks import count_looks
from tests.one_buffer import BIG, SMALL, borrower


@dataclass
class Metadata:
    """As engines have it: a new one at each build, of new views."""

    lens: torch.Tensor
    table: torch.Tensor
    most: int = 8
    causal: bool = True
    window: Any = (-1, -1)
    name: Any = "causal"


class Engine:
    """Persistent buffers, sliced anew at each build; ``change`` may do anything to the result."""

    host_values = {"most": "at_most"}

    def __init__(self) -> None:
        self.lens, self.table = torch.zeros(8), torch.zeros(8, 4)
        self.change: Callable[[Metadata], Any] = lambda state: state

    def metadata(self, key: Any, batch: Any) -> Metadata:
        rows = key.num_tokens
        lens = self.lens[:rows].fill_(0.0 if batch is None else batch)
        return Metadata(lens, self.table[:rows])

    def build(self, key: Any, batch: Any, phase: Phase) -> Any:
        return self.change(self.metadata(key, batch))

    def move(self) -> dict[torch.Tensor, torch.Tensor]:
        moves = {each: torch.zeros_like(each) for each in (self.lens, self.table)}
        self.lens, self.table = moves.values()
        return moves


def forward(key: Any, state: Metadata) -> torch.Tensor:
    return state.lens * 2 + state.table.sum(1)


def captured(engine: Any, keys: Any = (BIG,), **options: Any) -> GraphPool[Any]:
    pool = GraphPool("pool", owner=engine, device="cpu", **options)
    pool.capture(keys, forward)
    return pool


@pytest.fixture
def guards() -> None:
    if guard_maker() is None:
        pytest.skip("this torch has no guards that can be trusted")


By = Callable[[GraphPool[Any], Engine], Callable[[Any], None]]


def refreshing(pool: GraphPool[Any], engine: Engine) -> Callable[[Any], None]:
    return lambda batch: pool.refresh(BIG, batch)


def accepting(pool: GraphPool[Any], engine: Engine) -> Callable[[Any], None]:
    accept = pool.accepting(BIG)
    return lambda batch: accept(engine.build(BIG, batch, Phase.REPLAY))


either = pytest.mark.parametrize("by", [refreshing, accepting])


@either
def test_new_objects_need_no_second_look(by: By, guards: None) -> None:
    engine = Engine()
    pool = captured(engine)
    refresh = by(pool, engine)
    for _ in range(3):
        refresh(1)
    looks = count_looks(pool, BIG)
    for _ in range(3):
        pool.invalidate()
        for _ in range(10):
            refresh(3)
            assert pool.replay(BIG).tolist() == [6.0] * 4
    assert looks == []


def test_what_was_learned_since_is_asked(guards: None) -> None:
    """Another thread's mode, say: the guard has to be learned anew, once."""
    engine = Engine()
    pool = captured(engine)
    for _ in range(3):
        pool.refresh(BIG, 1)
    engine.change = lambda state: replace(state, lens=state.lens.requires_grad_())
    for _ in range(2):
        pool.refresh(BIG, 1)
    looks = count_looks(pool, BIG)
    pool.invalidate()
    for _ in range(3):
        pool.refresh(BIG, 1)
    assert looks == []


CHANGES: dict[str, tuple[Callable[[Metadata], Any], type[Exception]]] = {
    "elsewhere": (lambda s: setattr(s, "table", s.table.clone()), AddressChangedError),
    "shifted": (
        lambda s: setattr(s, "lens", s.lens.as_strided((4,), (1,), 1)),
        AddressChangedError,
    ),
    "shape": (lambda s: setattr(s, "lens", s.lens[:3]), AddressChangedError),
    "dtype": (lambda s: setattr(s, "lens", s.lens.view(torch.int32)), AddressChangedError),
    "in place": (lambda s: s.table.t_(), AddressChangedError),
    "value": (lambda s: setattr(s, "causal", False), BakedValueChangedError),
    "type of a value": (lambda s: setattr(s, "causal", 1), BakedValueChangedError),
    "window": (lambda s: setattr(s, "window", (-1, 4)), BakedValueChangedError),
    "bound": (lambda s: setattr(s, "most", 9), BakedValueChangedError),
    "none": (lambda s: setattr(s, "name", None), BakedValueChangedError),
    "attribute that came": (lambda s: setattr(s, "more", s.lens), AddressChangedError),
    "attribute that went": (lambda s: s.__dict__.pop("window"), AddressChangedError),
    "renamed": (lambda s: s.__dict__.update(other=s.__dict__.pop("name")), AddressChangedError),
}


@either
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("trusted", [True, False])
def test_what_changes_is_refused(
    name: str, by: By, trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not trusted:
        monkeypatch.setattr(checker_module, "guard_maker", lambda: None)
    change, error = CHANGES[name]
    engine = Engine()
    pool = captured(engine)
    refresh = by(pool, engine)
    for _ in range(12):
        refresh(1)
        pool.replay(BIG)
    for _ in range(2):
        engine.change = lambda state: (change(state), state)[1]
        with pytest.raises(error):
            refresh(2)
        with pytest.raises(StaleStateError) as caught:
            pool.replay(BIG)
        assert caught.value.rule is Staleness.BUILD_FAILED
        engine.change = lambda state: state
        for _ in range(3):
            refresh(3)
            assert pool.replay(BIG).tolist() == [6.0] * 4


@either
def test_another_object_altogether_is_refused(by: By) -> None:
    engine = Engine()
    pool = captured(engine)
    refresh = by(pool, engine)
    for _ in range(3):
        refresh(1)
    for other in (None, {}, 3, AttentionState(None)):
        engine.change = lambda state, other=other: other
        with pytest.raises((AddressChangedError, BakedValueChangedError)):
            refresh(1)


@either
def test_a_state_that_was_moved_is_looked_at_where_it_lies(by: By, guards: None) -> None:
    engine = Engine()
    pool = captured(engine, inspectable=True)
    refresh = by(pool, engine)
    for turn in range(3):
        for _ in range(3):
            refresh(turn)
            assert pool.replay(BIG).tolist() == [2.0 * turn] * 4
        before = engine.lens, engine.table
        pool.rebind(engine.move())
        refresh(1)
        looks = count_looks(pool, BIG)
        pool.invalidate()
        for _ in range(3):
            refresh(5)
            assert pool.replay(BIG).tolist() == [10.0] * 4
        assert looks == []
        after = engine.lens, engine.table
        engine.lens, engine.table = before
        with pytest.raises(AddressChangedError):
            refresh(1)
        engine.lens, engine.table = after


def test_an_engine_that_invalidates_while_it_builds() -> None:
    engine = Engine()
    pool = captured(engine)
    for calls in (False, True, True, False):
        engine.change = lambda state, calls=calls: (calls and pool.invalidate(), state)[1]
        for _ in range(4):
            pool.refresh(BIG, 1)
            assert pool.holdings.entries[BIG].record.fresh
            assert pool.replay(BIG).tolist() == [2.0] * 4


@pytest.mark.parametrize("stale", [False, True])
def test_a_state_that_moves_while_it_is_built(stale: bool) -> None:
    """What the build returns lies where its graphs read no more, though it was right till then."""
    engine = Engine()
    pool = captured(engine, inspectable=True)
    for _ in range(2):
        for _ in range(4):
            pool.refresh(BIG, 1)
        if stale:
            pool.invalidate()
        engine.change = lambda state: (pool.rebind(engine.move()), state)[1]
        with pytest.raises(AddressChangedError):
            pool.refresh(BIG, 1)
        with pytest.raises(StaleStateError):
            pool.replay(BIG)
        engine.change = lambda state: state


def test_a_borrower_that_checked_and_went() -> None:
    engine = Engine()
    target, draft = GraphPool("target", owner=engine, device="cpu", checks="off"), borrower()
    share_states(target, draft)
    target.capture([BIG], forward)
    for _ in range(2):
        draft.capture([BIG], forward)
        target.recapture()  # while somebody wants it looked at
        for _ in range(4):
            target.refresh(BIG, 1)
            draft.replay(BIG)
        engine.change = lambda state: replace(state, causal=False)
        with pytest.raises(BakedValueChangedError):
            target.refresh(BIG, 1)
        draft.release()
        for _ in range(3):
            target.refresh(BIG, 1)  # nobody wants it looked at
        engine.change = lambda state: state


def test_numbers_that_are_addresses_stay_numbers() -> None:
    """Equal constants are one in what is written, and a move makes others of them equal."""

    class Telling(Engine):
        def metadata(self, key: Any, batch: Any) -> Metadata:
            return replace(super().metadata(key, batch), name=old, window=new)

    engine = Telling()
    before, after = engine.lens, torch.zeros(8)
    old, new = before.data_ptr(), after.data_ptr()
    pool = captured(engine, inspectable=True)
    for engine.lens in (before, after):
        if engine.lens is after:
            pool.rebind({before: after})
        for _ in range(3):
            pool.refresh(BIG, 1)
            assert pool.replay(BIG).tolist() == [2.0] * 4
    engine.lens = before
    with pytest.raises(AddressChangedError):
        pool.refresh(BIG, 1)


@dataclass(frozen=True)
class Frozen:
    __slots__ = ("lens", "table")
    lens: torch.Tensor
    table: torch.Tensor


class Keeper(Engine):
    """Returns one frozen object as long as its buffers stay."""

    kept: Any = None

    def metadata(self, key: Any, batch: Any) -> Any:
        state = super().metadata(key, batch)
        if self.kept is None:
            self.kept = Frozen(state.lens, state.table)
        return self.kept


def test_a_frozen_state_that_was_moved() -> None:
    engine = Keeper()
    pool = captured(engine, inspectable=True)
    for turn in range(3):
        for _ in range(4):
            pool.refresh(BIG, turn)
            assert pool.replay(BIG).tolist() == [2.0 * turn] * 4
        before = engine.kept
        gone = StorageWeakRef(before.lens.untyped_storage())
        pool.rebind(engine.move())
        for _ in range(2):
            with pytest.raises(AddressChangedError):
                pool.refresh(BIG, 1)
        engine.kept = before = None
        gc.collect()
        assert gone.expired()
    pool.refresh(BIG, 1)


def test_an_object_that_shares_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """At capture one tensor object twice, then two objects that are alike, and once more one."""
    finished: list[Any] = []
    finish = refreshing_module._InFull.finish

    def counting(self: Any, state: Any, right: bool) -> Any:
        finished.append(state)
        return finish(self, state, right)

    monkeypatch.setattr(refreshing_module._InFull, "finish", counting)
    tensor = torch.zeros(4)
    one, two = Frozen(tensor, tensor), Frozen(tensor, tensor[:])

    class Owner:
        state = one

        def build(self, key: Any, batch: Any, phase: Phase) -> Any:
            return self.state

    owner = Owner()
    pool = GraphPool("pool", owner=owner, device="cpu")
    pool.capture([BIG], lambda key, state: state.lens * 2)
    for owner.state in (one, two, one):
        for _ in range(6):
            pool.refresh(BIG, 1)
            pool.replay(BIG)
        assert finished
        finished.clear()
        pool.refresh(BIG, 1)
        assert not finished  # known by now
    two.table.t_()
    two.table.resize_(2)
    owner.state = two
    with pytest.raises(AddressChangedError):
        pool.refresh(BIG, 1)


@either
def test_modes_that_alternate_are_looked_at_without_guards(by: By) -> None:
    engine = Engine()
    pool = captured(engine)
    refresh = by(pool, engine)
    wants = False

    def change(state: Metadata) -> Metadata:
        nonlocal wants
        wants = not wants
        state.lens.requires_grad_(wants)
        return state

    engine.change = change
    for batch in range(2 * checker_module._CHANCES + 4):
        with torch.no_grad():
            refresh(batch)
            assert pool.replay(BIG).tolist() == [2.0 * batch] * 4
    engine.change = lambda state: Metadata(state.lens, state.table[1:])
    with pytest.raises(AddressChangedError):
        refresh(1)


def test_objects_in_turn_and_the_state_that_is_shown() -> None:
    """Of two frozen objects the one that came last is shown, however well the other is known."""
    tensor = torch.zeros(4)
    states = [AttentionState(tensor), AttentionState(tensor)]

    class Owner:
        turn = 0

        def build(self, key: Any, batch: Any, phase: Phase) -> Any:
            return states[self.turn]

    owner = Owner()
    pool = GraphPool("pool", owner=owner, device="cpu")
    pool.capture([BIG], lambda key, state: state.attn_metadata * 2)
    for turns in ([0] * 4, [1, 0] * 12, [1] * 4, [0, 1]):
        for owner.turn in turns:
            pool.refresh(BIG, 1)
            assert pool.states[BIG] is states[owner.turn]


class Interrupting(str):
    """Whoever compares it is interrupted while ``armed``, as by Ctrl-C during a look."""

    __slots__ = ()
    armed = False

    def __eq__(self, other: object) -> bool:
        if Interrupting.armed:
            raise KeyboardInterrupt
        return True

    __hash__ = str.__hash__


FORMS: dict[str, Callable[[Metadata], Any]] = {
    "looked at in line": lambda state: replace(state, name=Interrupting()),
    "without a tensor that a guard takes": lambda state: [
        Interrupting(),
        *(each.as_subclass(Subclass) for each in (state.lens, state.table)),
    ],
}


class Subclass(torch.Tensor):
    pass


@either
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("event", [False, True])
def test_an_interrupt_before_the_look_is_over(form: str, event: bool, by: By) -> None:
    """What was built may be anything: nobody replays on it with what an earlier refresh granted."""
    engine = Engine()
    engine.change = FORMS[form]
    target = GraphPool("target", owner=engine, device="cpu", replays_per_refresh=None)
    draft = borrower(replays_per_refresh=None)
    share_states(target, draft)
    lens = engine.lens[:4]
    for pool in (target, draft):
        pool.capture([BIG], lambda key, state: lens * 2)
    refresh = by(target, engine)
    for _ in range(3):
        for batch in range(4):
            refresh(batch)
            for pool in (target, draft):
                assert pool.replay(BIG).tolist() == [2.0 * batch] * 4
        if event:
            target.invalidate()
            refresh(1)
            target.ledger.epoch += 1
        Interrupting.armed = True
        try:
            with pytest.raises(KeyboardInterrupt):
                refresh(9)
        finally:
            Interrupting.armed = False
        for pool in (target, draft):
            with pytest.raises(StaleStateError) as caught:
                pool.replay(BIG)
            assert caught.value.rule is Staleness.BUILD_FAILED


# A refresh of what has been built already.


def lent(**options: Any) -> tuple[Engine, GraphPool[Any], GraphPool[Any]]:
    engine = Engine()
    target, draft = GraphPool("target", owner=engine, device="cpu"), borrower(**options)
    share_states(target, draft)
    target.capture([BIG, SMALL], forward)
    draft.capture([BIG, SMALL], forward)
    return engine, target, draft


def test_what_is_accepted_is_fresh_for_all_and_counts_as_built() -> None:
    engine, target, draft = lent()
    accept = target.accepting(BIG)
    for batch in range(12):
        accept(engine.build(BIG, batch, Phase.REPLAY))
        for pool in (target, draft):
            assert pool.replay(BIG).tolist() == [2.0 * batch] * 4
            with pytest.raises(StaleStateError) as caught:
                pool.replay(BIG)
            assert caught.value.rule is Staleness.USED_UP
    found = target.statistics()
    assert (found.refreshes, found.builds["replay"], found.replays) == (12, 12, 12)
    assert draft.statistics().builds_avoided == 12


def test_what_is_accepted_makes_others_stale() -> None:
    engine, target, draft = lent()
    accepts = {key: target.accepting(key) for key in (BIG, SMALL)}
    begun = False
    for _ in range(3):
        for key, other in ((BIG, SMALL), (SMALL, BIG)):
            accepts[key](engine.build(key, 1, Phase.REPLAY))
            assert set(target.statistics().fresh) == set(draft.statistics().fresh) == {key}
            with pytest.raises(StaleStateError) as caught:
                draft.replay(other)
            assert caught.value.rule is (
                Staleness.OVERWRITTEN if begun else Staleness.NEVER_REFRESHED
            )
            begun = True


def test_refreshes_and_acceptances_in_turn() -> None:
    engine, target, draft = lent()
    accept = target.accepting(BIG)
    for batch in range(6):
        target.refresh(BIG, batch)
        draft.replay(BIG)
        accept(engine.build(BIG, batch + 1, Phase.REPLAY))
        assert draft.replay(BIG).tolist() == [2.0 * (batch + 1)] * 4
    target.invalidate()
    with pytest.raises(StaleStateError):
        draft.replay(BIG)
    accept(engine.build(BIG, 9, Phase.REPLAY))
    draft.replay(BIG)


@pytest.mark.parametrize("checks", ["fast", "strict"])
def test_what_is_accepted_is_kept_for_strict_replays_alone(checks: Any) -> None:
    engine = Engine()
    pool = captured(engine, checks=checks)
    accept = pool.accepting(BIG)
    states = [engine.build(BIG, 1, Phase.REPLAY) for _ in range(4)]
    for state in states:
        accept(state)
        assert (pool.states[BIG] is state) is (checks == "strict")
    gone = [weakref.ref(state) for state in states]
    states.clear()
    del state
    gc.collect()
    assert [each() is None for each in gone] == [True, True, True, checks == "fast"]


def test_a_strict_pool_orders_what_it_accepts() -> None:
    calls: list[str] = []

    class Order:
        def __getattr__(self, name: str) -> Any:
            return lambda: calls.append(name)

    engine = Engine()
    pool = captured(engine, checks="strict")
    pool.holdings.entries[BIG].record.order = Order()
    accept = pool.accepting(BIG)
    for _ in range(3):
        accept(engine.build(BIG, 1, Phase.REPLAY))
    assert calls == ["before_build", "after_build"] * 3


def test_who_may_not_accept() -> None:
    engine, target, draft = lent()
    state = engine.build(BIG, 1, Phase.REPLAY)
    with pytest.raises(OwnershipError):
        draft.accepting(BIG)(state)
    with pytest.raises(KeyMismatchError):
        target.accepting("another")
    accept = target.accepting(BIG)
    accept(state)
    target.release(BIG)
    with pytest.raises(ReleasedStateError):
        accept(state)
    with pytest.raises(ReleasedStateError):
        draft.replay(BIG)


# The key that was asked for last.


def test_a_key_that_was_asked_for_last_goes_with_its_graph() -> None:
    engine = Engine()
    pool = captured(engine, [BIG, SMALL])
    for key in (BIG, SMALL, BIG):
        pool.refresh(key, 1)
        pool.replay(key)
    pool.recapture([BIG])
    pool.refresh(BIG, 2)
    assert pool.replay(BIG).tolist() == [4.0] * 4
    pool.release(BIG)
    for call in (lambda: pool.refresh(BIG, 1), lambda: pool.replay(BIG)):
        with pytest.raises(KeyMismatchError):
            call()
    pool.refresh(SMALL, 3)
    pool.close()
    for call in (lambda: pool.refresh(SMALL, 1), lambda: pool.replay(SMALL)):
        with pytest.raises(ReleasedStateError):
            call()


def test_a_pool_holds_no_entry_that_it_has_let_go() -> None:
    pool = captured(Engine(), [BIG, SMALL])
    pool.refresh(BIG, 1)
    pool.replay(BIG)
    gone = weakref.ref(pool.holdings.entries[BIG].record)
    pool.release(BIG)
    gc.collect()
    assert gone() is None


def test_an_equal_key_is_the_same_key() -> None:
    pool = captured(Engine(), [BIG, SMALL])
    again = type(BIG)(BIG.num_tokens, BIG.num_reqs)
    for key in (BIG, again, SMALL, again, again, BIG):
        pool.refresh(key, key.num_tokens)
        assert pool.replay(key).tolist() == [2.0 * key.num_tokens] * key.num_tokens
