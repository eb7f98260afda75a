"""Owners whose build returns the very object that it returned before, and what may happen to it."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from graphshare import (
    AddressChangedError,
    AttentionState,
    BakedValueChangedError,
    BatchDescriptor,
    CaptureError,
    GraphPool,
    Phase,
    Staleness,
    StaleStateError,
    share_states,
)
from graphshare.memory import MemoryRanges
from graphshare.state import LayoutChecker
from graphshare.state import checker as checker_module
from graphshare.watch import Watch
from tests.layout_checks import each_refresh  # noqa: F401 - each test runs in each way
from tests.looks import count_looks
from tests.one_buffer import BIG, SMALL, Apart, Owner, borrower, captured, double


@dataclass(frozen=True, slots=True)
class Metadata:
    """Nothing in it can be assigned to."""

    lens: torch.Tensor
    table: torch.Tensor
    weight: torch.nn.Parameter
    most: int = 8
    window: tuple[int, int] = (-1, -1)
    dtype: torch.dtype = torch.bfloat16
    name: str | None = "causal"


class Keeper:
    """Returns the same state at each build for a key; its buffers are apart from all others."""

    def __init__(self, make: Callable[[], Any] | None = None) -> None:
        self.make = make or self.metadata
        self.kept: dict[Any, Any] = {}
        self.error: Exception | None = None

    @staticmethod
    def metadata() -> AttentionState:
        lens, table = torch.zeros(4), torch.zeros(2, 4)
        weight = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        return AttentionState(Metadata(lens, table, weight), torch.zeros(4, dtype=torch.int64))

    def build(self, key: Any, batch: Any, phase: Phase) -> Any:
        if self.error is not None:
            raise self.error
        if key not in self.kept:
            self.kept[key] = self.make()
        return self.kept[key]


def nothing(key: Any, state: Any) -> torch.Tensor:
    return torch.zeros(1) + 1


def kept(owner: Any, key: Any = BIG, **options: Any) -> tuple[GraphPool[Any], Any]:
    """A pool, refreshed as often as it takes to see that the object is always the same."""
    pool = captured(owner, [key], nothing, **options)
    for _ in range(3):
        pool.refresh(key, 1)
    return pool, owner.kept[key]


def count_full_looks(pool: GraphPool[Any], key: Any) -> list[Any]:
    """Every state that is looked at in full from now on."""
    seen = count_looks(pool, key)
    pool.ledger.epoch += 1  # as if something had happened
    return seen


def replace_values(tensor: torch.Tensor, values: torch.Tensor) -> None:
    tensor.data = values


def swap(tensor: torch.Tensor) -> None:
    torch.utils.swap_tensors(tensor, torch.zeros(2, 4))


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "set_": lambda t: t.set_(torch.zeros(2, 4)),
    "set_ to a part": lambda t: t.set_(t.untyped_storage(), 1, (2, 3), (4, 1)),
    "resize_": lambda t: t.resize_(1, 4),
    "resize_ to more": lambda t: t.resize_(200, 4),
    "t_": lambda t: t.t_(),
    "unsqueeze_": lambda t: t.unsqueeze_(0),
    "as_strided_": lambda t: t.as_strided_((2, 4), (1, 2)),
    "data elsewhere": lambda t: replace_values(t, t.clone()),
    "data of another dtype": lambda t: replace_values(t, t.view(torch.int32)),
    "data of another shape": lambda t: replace_values(t, t.view(8)),
    "its storage grew": lambda t: t.untyped_storage().resize_(1 << 20),
    "swapped": swap,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_tensor_changed_in_place_is_seen(name: str) -> None:
    pool, state = kept(Keeper())
    full = count_full_looks(pool, BIG)
    pool.refresh(BIG, 1)
    assert full == []
    pool.replay(BIG)
    CHANGES[name](state.attn_metadata.table)
    with pytest.raises(AddressChangedError) as caught:
        pool.refresh(BIG, 1)
    assert caught.value.path == "attn_metadata.table"
    with pytest.raises(StaleStateError):
        pool.replay(BIG)
    with pytest.raises(AddressChangedError):
        pool.refresh(BIG, 1)


@pytest.mark.parametrize("leaf", ["lens", "table", "weight", "slot_mappings"])
def test_each_tensor_is_looked_at_and_may_come_back(leaf: str) -> None:
    pool, state = kept(Keeper())
    tensor = state.slot_mappings if leaf == "slot_mappings" else getattr(state[0], leaf)
    before = tensor.data
    for _ in range(12):  # more often than anything is learned
        replace_values(tensor, before.clone())
        with pytest.raises(AddressChangedError) as caught:
            pool.refresh(BIG, 1)
        assert caught.value.path.endswith(leaf)
        replace_values(tensor, before)
        pool.refresh(BIG, 1)
        pool.replay(BIG)


def test_what_no_layout_has_does_not_count(each_refresh: str) -> None:  # noqa: F811
    pool, state = kept(Keeper())
    full = count_full_looks(pool, BIG)
    looks = 0 if each_refresh == "without guards" else 1
    state.attn_metadata.table.requires_grad_()
    for _ in range(3):
        pool.refresh(BIG, 1)
        assert len(full) == looks
    with torch.inference_mode():
        pool.refresh(BIG, 1)
        pool.refresh(BIG, 1)
    pool.refresh(BIG, 1)
    pool.replay(BIG)


class Pair(NamedTuple):
    one: Any
    other: Any = None


@dataclass
class Open:
    lens: Any


@dataclass(frozen=True)
class WithDict:
    lens: Any


class Part:
    __slots__ = ("lens",)

    def __init__(self, lens: Any) -> None:
        self.lens = lens


@dataclass(frozen=True, slots=True)
class Base:
    lens: Any


class Derived(Base):  # type: ignore[misc]
    __slots__ = ("more",)
    more: int


def derived(lens: Any) -> Derived:
    made = Derived(lens)
    object.__setattr__(made, "more", 1)
    return made


def change_more(state: Any, tensor: Any) -> None:
    Derived.more.__set__(state[0], 2)  # type: ignore[attr-defined]


ASSIGNED: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    "dict": (lambda t: {"lens": t}, lambda s, t: s.update(lens=t)),
    "list": (lambda t: [t], lambda s, t: s.__setitem__(0, t)),
    "deque": (lambda t: deque([t]), lambda s, t: s.__setitem__(0, t)),
    "namespace": (lambda t: types.SimpleNamespace(lens=t), lambda s, t: setattr(s, "lens", t)),
    "dataclass": (Open, lambda s, t: setattr(s, "lens", t)),
    "slots": (Part, lambda s, t: setattr(s, "lens", t)),
    "frozen, with a __dict__": (WithDict, lambda s, t: s.__dict__.update(lens=t)),
    "below a frozen class": (lambda t: (derived(t),), change_more),
    "in a tuple": (lambda t: (0, {"lens": t}), lambda s, t: s[1].update(lens=t)),
    "in a named tuple": (lambda t: Pair(t, [t]), lambda s, t: s.other.__setitem__(0, t)),
    "a view of a dict": (
        lambda t: types.MappingProxyType({"d": {"lens": t}}),
        lambda s, t: s["d"].update(lens=t),
    ),
    "in an object": (lambda t: Open(Pair(t)), lambda s, t: setattr(s, "lens", Pair(t))),
    "a set beside it": (lambda t: Pair(t, {1}), lambda s, t: s.other.add(2)),
    "bytes beside it": (lambda t: Pair(t, bytearray(b"a")), lambda s, t: s.other.append(1)),
}


@pytest.mark.parametrize("name", ASSIGNED)
def test_an_object_that_can_be_assigned_to_is_taken_apart_each_time(
    name: str,
    each_refresh: str,  # noqa: F811
) -> None:
    make, assign = ASSIGNED[name]
    pool, state = kept(Keeper(lambda: make(torch.zeros(4))))
    full = count_full_looks(pool, BIG)
    pool.refresh(BIG, 1)
    if each_refresh == "without guards":
        assert full == [state]
    pool.refresh(BIG, 1)
    pool.replay(BIG)
    assign(state, torch.zeros(4))
    with pytest.raises((AddressChangedError, BakedValueChangedError)):
        pool.refresh(BIG, 1)
    with pytest.raises(StaleStateError):
        pool.replay(BIG)


class Lens:
    """Equal by its number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self) -> None:
        """So that it is a value, and is not walked."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lens) and other.number == self.number

    __hash__ = None  # type: ignore[assignment]


def test_a_value_equal_to_the_captured_one_may_change() -> None:
    """The first build's object is the captured one; all later ones return another, equal one."""
    tensor, later = torch.zeros(4), Pair(torch.zeros(4), Lens(1))

    class Second(Keeper):
        def build(self, key: Any, batch: Any, phase: Phase) -> Any:
            return Pair(tensor, Lens(1)) if batch is None else self.kept[key]

    owner = Second()
    owner.kept[BIG] = Pair(tensor, later.other)
    pool, _ = kept(owner)
    later.other.number = 2
    with pytest.raises(BakedValueChangedError) as caught:
        pool.refresh(BIG, 1)
    assert caught.value.path == "other"


def test_what_any_names_may_be_assigned_to() -> None:
    class Free(Keeper):
        host_values = {"other": "any", "other.*": "any"}

    pool, state = kept(Free(lambda: Pair(torch.zeros(4), [torch.zeros(4)])))
    full = count_full_looks(pool, BIG)
    state.other[0] = None
    pool.refresh(BIG, 1)
    assert full == []
    pool.replay(BIG)


def test_host_data_is_looked_at_too() -> None:
    """Of tensors off the pool's device, here ``meta``, the type and the device are baked in."""
    state = Pair(torch.zeros(4, device="meta"), torch.zeros(2))
    checker = LayoutChecker(state, "meta")
    unmoved = checker.watch(state)
    assert unmoved is not None
    assert unmoved()
    state.other.resize_(3)
    assert unmoved()
    state.one.t_().resize_(3)
    assert not unmoved()
    state.one.resize_(4)
    assert unmoved()
    torch.utils.swap_tensors(state.other, torch.zeros(3, device="meta"))
    assert not unmoved()
    assert not checker.matches(state)


def test_a_state_without_tensors_is_taken_apart() -> None:
    state = Pair(1, "x")
    assert LayoutChecker(state, "cpu").watch(state) is None


@pytest.mark.parametrize("trusted", [True, False])
def test_without_guards_the_same_is_seen(trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not trusted:
        monkeypatch.setattr(checker_module, "guard_maker", lambda: None)
    for change in CHANGES.values():
        state = Keeper.metadata()
        unmoved = LayoutChecker(state, "cpu").watch(state)
        assert unmoved is not None
        assert unmoved()
        change(state.attn_metadata.table)
        assert not unmoved()


def test_another_object_is_taken_apart_and_learned_again() -> None:
    owner = Keeper()
    pool, state = kept(owner)
    full = count_full_looks(pool, BIG)
    owner.kept[BIG] = again = AttentionState(*state)
    for _ in range(3):
        pool.refresh(BIG, 1)
    assert full == [again, again]
    owner.kept[BIG] = AttentionState(state[0], state[1].clone())
    with pytest.raises(AddressChangedError):
        pool.refresh(BIG, 1)
    owner.kept[BIG] = again
    pool.refresh(BIG, 1)
    pool.replay(BIG)


def test_new_objects_at_each_build_are_not_kept() -> None:
    class New(Keeper):
        def build(self, key: Any, batch: Any, phase: Phase) -> Any:
            return AttentionState(*super().build(key, batch, phase))

    pool, _ = kept(New())
    for _ in range(10):
        pool.refresh(BIG, 1)
    record = pool.holdings.entries[BIG].record
    assert record.watches[BIG].chances == 0
    assert not isinstance(record.watches[BIG].state, AttentionState)


def test_strict_takes_every_state_apart() -> None:
    """``object.__setattr__`` gets around a frozen dataclass; ``fast`` trusts that nobody does."""
    pool, state = kept(Keeper(), checks="strict")
    full = count_full_looks(pool, BIG)
    pool.refresh(BIG, 1)
    assert full == [state]
    object.__setattr__(state.attn_metadata, "table", torch.zeros(2, 4))
    with pytest.raises(AddressChangedError):
        pool.refresh(BIG, 1)


def test_a_pool_without_checks_looks_at_nothing() -> None:
    pool, state = kept(Keeper(), checks="off")
    full = count_full_looks(pool, BIG)
    state.attn_metadata.table.t_()
    pool.refresh(BIG, 1)
    pool.replay(BIG)
    assert full == []


def test_each_key_of_a_shared_state_has_an_object_of_its_own() -> None:
    """Two keys on one state, refreshed in turn, each with its own object."""
    lora = BatchDescriptor(4, 4, num_active_loras=1)
    lens = torch.zeros(4)
    owner = Keeper(lambda: Pair(lens, 1))
    pool = captured(owner, [BIG, lora], nothing, state_key=lambda key: key.num_tokens)
    for _ in range(3):
        pool.refresh(BIG, 1)
        pool.refresh(lora, 1)
    full = count_full_looks(pool, BIG)
    pool.refresh(BIG, 1)
    pool.refresh(lora, 1)
    assert full == []
    owner.kept[lora] = Pair(torch.zeros(4), 1)
    with pytest.raises(AddressChangedError):
        pool.refresh(lora, 1)
    with pytest.raises(StaleStateError):
        pool.replay(BIG)


def test_a_build_that_raises_leaves_it_stale_and_recovers() -> None:
    owner = Keeper()
    pool, _ = kept(owner)
    owner.error = RuntimeError("no")
    with pytest.raises(RuntimeError):
        pool.refresh(BIG, 1)
    with pytest.raises(StaleStateError) as caught:
        pool.replay(BIG)
    assert caught.value.rule is Staleness.BUILD_FAILED
    owner.error = None
    pool.refresh(BIG, 1)
    pool.replay(BIG)
    statistics = pool.statistics()
    assert (statistics.builds["replay"], statistics.refreshes) == (4, 4)


def test_a_build_that_is_right_after_a_second_look_counts_once() -> None:
    tensor = torch.zeros(4)
    owner = Keeper(lambda: Pair(tensor))
    pool, _ = kept(owner)
    owner.kept[BIG] = Pair(torch.nn.Parameter(tensor, requires_grad=False))  # lies where it lay
    full = count_full_looks(pool, BIG)
    pool.refresh(BIG, 1)
    assert len(full) == 1
    pool.replay(BIG)
    statistics = pool.statistics()
    assert (statistics.builds["replay"], statistics.refreshes) == (4, 4)
    owner.kept[BIG] = Pair(tensor.clone())
    with pytest.raises(AddressChangedError):
        pool.refresh(BIG, 1)
    statistics = pool.statistics()
    assert (statistics.builds["replay"], statistics.refreshes) == (5, 4)


def test_borrowers_that_come_later_are_granted() -> None:
    pool, _ = kept(Keeper())
    drafts = [borrower(f"draft{i}") for i in range(2)]
    for draft in drafts:
        share_states(pool, draft)
        draft.capture([BIG], nothing)
        pool.refresh(BIG, 1)
        draft.replay(BIG)
    pool.replay(BIG)
    assert pool.statistics().builds_avoided == 0
    drafts[0].close()
    pool.refresh(BIG, 1)
    drafts[1].replay(BIG)
    assert [draft.statistics().builds_avoided for draft in drafts] == [1, 2]


def test_a_borrower_that_checks_makes_an_unchecked_lender_look() -> None:
    owner = Keeper()
    pool, state = kept(owner, checks="off")
    draft = borrower()
    share_states(pool, draft)
    draft.capture([BIG], nothing)
    state.attn_metadata.table.t_()
    with pytest.raises(AddressChangedError):
        pool.refresh(BIG, 1)


# Whom a build leaves alone is remembered; what must not outlive the reason for it.


def stale_by_overwriting(pool: GraphPool[Any], key: Any) -> bool:
    with pytest.raises(StaleStateError) as caught:
        pool.replay(key)
    return caught.value.rule is Staleness.OVERWRITTEN


def on(memory: torch.Tensor) -> Owner:
    owner = Owner()
    owner.buffer = memory
    return owner


def test_another_owner_that_comes_into_the_memory_later() -> None:
    memory = torch.zeros(8)
    first = captured(on(memory), [BIG])
    apart = captured(Owner(), [BIG], name="apart")
    for _ in range(2):
        apart.refresh(BIG, 1)
        first.refresh(BIG, 1)
    second = captured(on(memory), [BIG], name="second")
    for _ in range(3):
        second.refresh(BIG, 2)
        assert stale_by_overwriting(first, BIG)
        first.refresh(BIG, 1)
        assert stale_by_overwriting(second, BIG)
    apart.replay(BIG)


def test_an_owner_that_writes_more_than_it_did() -> None:
    class Growing(Owner):
        def __init__(self) -> None:
            super().__init__()
            self.also: list[torch.Tensor] = []

        def writes(self, key: Any) -> list[torch.Tensor]:
            return [self.buffer, *self.also]

    neighbour, owner = Owner(), Growing()
    pool, other = captured(owner, [BIG]), captured(neighbour, [BIG], name="other")
    other.refresh(BIG, 1)
    pool.refresh(BIG, 1)
    other.replay(BIG)
    owner.also.append(neighbour.buffer)
    draft = borrower()
    share_states(pool, draft)
    draft.capture([BIG], double)  # asks again what a build may write
    other.refresh(BIG, 1)
    pool.refresh(BIG, 1)
    assert stale_by_overwriting(other, BIG)


def test_what_an_owner_declares_is_moved() -> None:
    pool, neighbour = captured(Apart(), [BIG]), Owner()
    other = captured(neighbour, [BIG], name="other")
    for _ in range(12):  # until nobody enters any more, and no object is hoped to come again
        other.refresh(BIG, 1)
        pool.refresh(BIG, 1)
        other.replay(BIG)
    other.refresh(BIG, 1)
    pool.holdings.entries[BIG].record.redeclare({BIG: MemoryRanges.of([neighbour.buffer])})
    pool.refresh(BIG, 1)
    assert stale_by_overwriting(other, BIG)


class Wide(Owner):
    """Each of its keys has a buffer; a build may write any of them."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers = {BIG: torch.zeros(8), SMALL: torch.zeros(8)}

    def build(self, key: Any, batch: Any, phase: Phase) -> Any:
        self.buffer = self.buffers[key]
        return super().build(key, batch, phase)


def test_a_key_more_of_an_owner_that_may_write_all() -> None:
    owner = Wide()
    pool = captured(owner, [BIG])
    other = captured(on(owner.buffers[SMALL]), [BIG], name="other")
    other.refresh(BIG, 1)
    pool.refresh(BIG, 1)
    other.replay(BIG)
    pool.capture([SMALL], double)
    for _ in range(2):  # the new key is fresh for nobody, and not looked at in the second round
        other.refresh(BIG, 1)
        pool.refresh(BIG, 1)
        assert stale_by_overwriting(other, BIG)


def test_a_key_less_of_an_owner_that_may_write_all() -> None:
    owner = Wide()
    pool = captured(owner, [BIG, SMALL])
    other = captured(on(owner.buffers[SMALL]), [BIG], name="other")
    other.refresh(BIG, 1)
    pool.refresh(BIG, 1)
    assert stale_by_overwriting(other, BIG)
    pool.release(SMALL)
    other.refresh(BIG, 1)
    pool.refresh(BIG, 1)
    other.replay(BIG)


def test_a_state_that_moves_away() -> None:
    """One that lies in another owner's memory, and elsewhere before its capture."""
    memory = torch.zeros(8)
    first = captured(on(memory), [BIG])
    owner = on(memory)
    second = GraphPool("second", owner=owner, device="cpu")
    with second.capturing([BIG]) as loop:
        loop.state(BIG, Phase.WARMUP)
        first.refresh(BIG, 1)
        owner.buffer = torch.zeros(8)
        loop.state(BIG, Phase.WARMUP)
        loop.state(BIG, Phase.CAPTURE)
        first.refresh(BIG, 1)
        loop.commit(BIG, functools.partial(memory.add_, 0))


def test_a_state_that_is_built_elsewhere_before_its_capture() -> None:
    """A commit on a state that somebody wrote over since is refused, however it came there."""
    memory = torch.zeros(8)
    first = captured(on(memory), [BIG])
    owner = Owner()
    second = GraphPool("second", owner=owner, device="cpu")
    launch = functools.partial(memory.add_, 0)
    with second.capturing([BIG]) as loop:
        loop.state(BIG, Phase.WARMUP)
        first.refresh(BIG, 1)  # far from it
        owner.buffer = memory
        loop.state(BIG, Phase.WARMUP)
        loop.state(BIG, Phase.CAPTURE)
        first.refresh(BIG, 1)
        with pytest.raises(CaptureError):
            loop.commit(BIG, launch)
        loop.state(BIG, Phase.CAPTURE)
        loop.commit(BIG, launch)


def test_a_lenders_state_between_its_build_and_the_borrowers_commit() -> None:
    memory = torch.zeros(8)
    lender, draft = captured(on(memory), [BIG], name="lender"), borrower()
    share_states(lender, draft)
    other = captured(on(memory), [BIG])
    for _ in range(3):
        other.refresh(BIG, 1)
    launch = functools.partial(memory.add_, 0)
    with draft.capturing([BIG]) as loop:
        loop.state(BIG, Phase.CAPTURE)
        other.refresh(BIG, 1)
        with pytest.raises(CaptureError):
            loop.commit(BIG, launch)
        loop.state(BIG, Phase.CAPTURE)
        loop.commit(BIG, launch)


def test_a_watch_that_gave_up_holds_nothing() -> None:
    pool, state = kept(Keeper(lambda: [torch.zeros(4)]))
    watch = pool.holdings.entries[BIG].record.watches[BIG]
    assert isinstance(watch, Watch)
    for _ in range(12):
        assert watch.state is not state
        pool.refresh(BIG, 1)
