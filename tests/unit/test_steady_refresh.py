"""A refresh after which nothing but replays has happened does little; every event is noticed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from graphshare import (
    AddressChangedError,
    GraphPool,
    ReleasedStateError,
    Staleness,
    StaleStateError,
    share_states,
)
from tests.layout_checks import each_refresh  # noqa: F401 - each test runs in each way
from tests.one_buffer import BIG, SMALL, Apart, Owner, borrower, captured, double


def stale(pool: GraphPool[Any], key: Any) -> Staleness:
    with pytest.raises(StaleStateError) as caught:
        pool.replay(key)
    return caught.value.rule


def steady(pool: GraphPool[Any], key: Any, *others: GraphPool[Any]) -> None:
    """Refreshes and replays of one key, until they are as short as they get."""
    for batch in range(12):
        pool.refresh(key, batch)
        for each in (pool, *others):
            each.replay(key)


def lent(**options: Any) -> tuple[GraphPool[Any], GraphPool[Any]]:
    target, draft = captured(Owner(), [BIG]), borrower(**options)
    share_states(target, draft)
    draft.capture([BIG], double)
    return target, draft


def test_nothing_is_looked_at_while_nothing_happens() -> None:
    target, draft = lent()
    steady(target, BIG, draft)
    epoch = target.ledger.epoch
    steady(target, BIG, draft)
    assert target.ledger.epoch == epoch


def test_counts_are_exact_in_a_steady_run() -> None:
    target, draft = lent(replays_per_refresh=3)
    steady(target, BIG, draft)
    for pool, avoided in ((target, 0), (draft, 12)):
        found = pool.statistics()
        assert (found.replays, found.builds_avoided) == (12, avoided)
    target.refresh(BIG, 1)
    for _ in range(3):
        draft.replay(BIG)
    assert stale(draft, BIG) is Staleness.USED_UP
    target.refresh(BIG, 1)
    target.refresh(BIG, 1)  # nobody replayed on the first
    assert draft.statistics().replays == 15
    assert draft.statistics().builds_avoided == 13
    found = target.statistics()
    assert (found.refreshes, found.builds["replay"], found.replays) == (15, 15, 12)
    target.release()
    found = target.statistics()
    assert (found.refreshes, found.builds["replay"], found.replays) == (15, 15, 12)


def test_an_invalidation() -> None:
    target, draft = lent()
    steady(target, BIG, draft)
    target.invalidate(BIG)
    assert stale(draft, BIG) is Staleness.INVALIDATED
    target.refresh(BIG, 1)
    assert set(target.statistics().fresh) == {BIG}
    assert target.holdings.entries[BIG].record.fresh
    for pool in (target, draft):
        pool.replay(BIG)
        assert stale(pool, BIG) is Staleness.USED_UP


def test_a_build_that_invalidates_while_it_runs() -> None:
    """An owner may call what makes its own state stale; the refresh still makes it fresh."""

    class Calling(Owner):
        pool: GraphPool[Any] | None = None

        def build(self, key: Any, batch: Any, phase: Any) -> Any:
            if self.pool is not None:
                self.pool.invalidate()
            return super().build(key, batch, phase)

    owner = Calling()
    pool = captured(owner, [BIG])
    steady(pool, BIG)
    owner.pool = pool
    pool.refresh(BIG, 1)
    assert pool.holdings.entries[BIG].record.fresh
    pool.replay(BIG)


def test_a_forward_that_writes() -> None:
    target, draft = captured(Owner(), [BIG]), borrower()
    share_states(target, draft)
    draft.capture([BIG], lambda key, state: state.add_(1) * 1, writes_state=True)
    steady(target, BIG)
    target.refresh(BIG, 1)
    draft.replay(BIG)
    assert stale(target, BIG) is Staleness.FORWARD_WROTE
    target.refresh(BIG, 1)
    target.replay(BIG)
    assert stale(target, BIG) is Staleness.USED_UP


def test_a_neighbour_that_becomes_fresh() -> None:
    memory = torch.zeros(8)
    owners = [Owner(), Owner()]
    for owner in owners:
        owner.buffer = memory
    one, two = (captured(owner, [BIG], name=f"pool{i}") for i, owner in enumerate(owners))
    for _ in range(3):
        steady(one, BIG)
        two.refresh(BIG, 1)
        assert stale(one, BIG) is Staleness.OVERWRITTEN
        one.refresh(BIG, 1)
        assert stale(two, BIG) is Staleness.OVERWRITTEN


def test_a_neighbour_that_writes_nowhere_else() -> None:
    """Its refresh makes nobody stale, and it is in the memory that another build writes."""
    neighbour = Owner()

    class Scribbling(Owner):
        def writes(self, key: Any) -> list[torch.Tensor]:
            return [self.buffer, neighbour.buffer]

    pool, other = captured(Scribbling(), [BIG]), captured(neighbour, [BIG], name="other")
    for _ in range(3):
        steady(pool, BIG)
        other.refresh(BIG, 1)
        pool.refresh(BIG, 1)
        assert stale(other, BIG) is Staleness.OVERWRITTEN


def test_borrowers_that_come_and_go() -> None:
    target = captured(Owner(), [BIG])
    steady(target, BIG)
    first, second = borrower("first"), borrower("second")
    for draft in (first, second):
        share_states(target, draft)
        draft.capture([BIG], double)
        target.refresh(BIG, 1)
        draft.replay(BIG)
        steady(target, BIG, draft)
    lease = first.holdings.entries[BIG].lease
    target.refresh(BIG, 1)
    first.replay(BIG)
    first.close()
    target.refresh(BIG, 1)
    assert lease.left == 0
    second.replay(BIG)


def test_keys_of_disjoint_memory_in_turn() -> None:
    """Rule 3 goes by the order of refreshes, also where each of them changes nothing else."""
    pool = captured(Apart(), [BIG, SMALL], live_keys=2)
    for _ in range(6):
        pool.refresh(BIG, 1)
        pool.refresh(SMALL, 1)
    tiny = type(BIG)(1, 1)
    pool.capture([tiny], double)
    for key in (BIG, SMALL, BIG):
        pool.refresh(key, 1)
    pool.refresh(tiny, 1)
    assert set(pool.statistics().fresh) == {BIG, tiny}


def test_the_live_key_of_a_pool_that_owns_and_borrows() -> None:
    """Its lender's refresh of another key comes between two of its own, each of them steady."""
    lender = captured(Owner(), [SMALL], name="lender")
    middle = GraphPool("middle", owner=Owner(), device="cpu")
    share_states(lender, middle, when=lambda key: key == SMALL)
    middle.capture([BIG, SMALL], double)
    last = borrower("last")
    shared = share_states(middle, last)
    last.capture([BIG, SMALL], double)
    for _ in range(12):
        middle.refresh(BIG, 1)
        assert shared.live_key == BIG
        lender.refresh(SMALL, 1)
        assert shared.live_key == SMALL
    middle.refresh(BIG, 1)
    last.replay(BIG)
    last.replay(SMALL)


def test_two_pools_in_turn_are_both_steady() -> None:
    one, two = captured(Owner(), [BIG]), captured(Owner(), [BIG], name="two")
    for _ in range(12):
        one.refresh(BIG, 1)
        two.refresh(BIG, 1)
    epoch = one.ledger.epoch
    for _ in range(4):
        one.refresh(BIG, 1)
        two.refresh(BIG, 1)
        one.replay(BIG)
        two.replay(BIG)
    assert one.ledger.epoch == epoch


def test_a_strict_borrower_that_comes_later() -> None:
    """From then on the owner's pool waits for replays, and takes every state apart."""
    target, draft = captured(Owner(), [BIG]), borrower(checks="strict")
    steady(target, BIG)
    share_states(target, draft)
    draft.capture([BIG], double)
    record = target.holdings.entries[BIG].record
    calls: list[str] = []
    record.order = type(
        "Order",
        (),
        {
            name: lambda self, name=name: calls.append(name)
            for name in ("before_build", "after_build")
        },
    )()
    for _ in range(3):
        target.refresh(BIG, 1)
    assert calls == ["before_build", "after_build"] * 3


def test_a_state_that_moves() -> None:
    """New views at each build, of another buffer all at once; then of the first again."""
    owner = Owner()
    pool = captured(owner, [BIG])
    for _ in range(3):
        steady(pool, BIG)
        before, owner.buffer = owner.buffer, torch.zeros(8)
        for _ in range(2):
            with pytest.raises(AddressChangedError):
                pool.refresh(BIG, 1)
            assert stale(pool, BIG) is Staleness.BUILD_FAILED
        owner.buffer = before
        assert pool.statistics().fresh == ()


def test_a_build_that_raises() -> None:
    class Failing(Owner):
        fails = False

        def build(self, key: Any, batch: Any, phase: Any) -> Any:
            if self.fails:
                raise KeyError
            return super().build(key, batch, phase)

    owner = Failing()
    pool = captured(owner, [BIG])
    steady(pool, BIG)
    owner.fails = True
    with pytest.raises(KeyError):
        pool.refresh(BIG, 1)
    assert stale(pool, BIG) is Staleness.BUILD_FAILED
    owner.fails = False
    pool.refresh(BIG, 1)
    pool.replay(BIG)


class Nesting(Owner):
    """Does something else first, and writes when that has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Callable[[], None] | None = None
        self.fails = False

    def build(self, key: Any, batch: Any, phase: Any) -> Any:
        if self.first is not None:
            self.first()
        state = super().build(key, batch, phase)
        if self.fails:
            raise KeyError
        return state


@pytest.mark.parametrize("runs", [1, 12])
def test_a_neighbour_is_stale_from_the_beginning_of_a_build(runs: int) -> None:
    owner, neighbour = Nesting(), Owner()
    neighbour.buffer = owner.buffer[2:]
    pool, other = captured(owner, [BIG]), captured(neighbour, [SMALL], name="other")
    seen: list[Staleness | None] = []
    for batch in range(runs):
        pool.refresh(BIG, batch)
    for _ in range(2):
        other.refresh(SMALL, 7)
        owner.first = lambda: seen.append(stale(other, SMALL))
        pool.refresh(BIG, 1)
        owner.first = None
    assert seen == [Staleness.OVERWRITTEN] * 2


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("runs", [0, 12])
@pytest.mark.parametrize("again", ["refresh", "capture"])
def test_a_neighbour_that_becomes_fresh_within_a_build(again: str, runs: int, fails: bool) -> None:
    """What the outer build writes comes later, and a refresh after it has to look again."""
    owner, neighbour = Nesting(), Owner()
    neighbour.buffer = owner.buffer[2:]
    pool, other = captured(owner, [BIG]), captured(neighbour, [SMALL], name="other")
    for batch in range(runs):
        pool.refresh(BIG, batch)
    for _ in range(2):
        owner.first, owner.fails = lambda: other.refresh(SMALL, 7), fails
        with pytest.raises(KeyError) if fails else nullcontext():
            if again == "refresh":
                pool.refresh(BIG, 1)
            else:
                draft = borrower()
                share_states(pool, draft)
                draft.capture([BIG], double)
        owner.first, owner.fails = None, False
        assert stale(other, SMALL) is Staleness.OVERWRITTEN
        pool.refresh(BIG, 2)
        assert pool.replay(BIG).tolist() == [4] * 4
        assert stale(other, SMALL) is Staleness.OVERWRITTEN


@pytest.mark.parametrize("runs", [0, 12])
def test_a_key_that_is_released_within_its_build(runs: int) -> None:
    """Nobody may replay on what was let go; the build is counted all the same."""
    owner = Nesting()
    target, draft = captured(owner, [BIG]), borrower()
    share_states(target, draft)
    draft.capture([BIG], double)
    for batch in range(runs):
        target.refresh(BIG, batch)
    handle = target.bind(BIG)
    owner.first = target.release
    with pytest.raises(ReleasedStateError):
        target.refresh(BIG, 1)
    for replay in (handle.replay, lambda: draft.replay(BIG)):
        with pytest.raises(ReleasedStateError):
            replay()
    found = target.statistics()
    assert (found.refreshes, found.builds["replay"], found.fresh) == (runs, runs + 1, ())
