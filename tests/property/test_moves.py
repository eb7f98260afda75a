"""Where addresses, bytes and nests of tensors go, against a model that looks at each byte."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from graphshare.capture.moves import Moves, SplitError
from graphshare.memory import MemoryRanges
from graphshare.state import walk, with_tensors

SIZE = 64


def bytes_of(tensor: torch.Tensor) -> set[int]:
    ranges = MemoryRanges.of([tensor])
    return {b for s, e in zip(ranges.starts, ranges.ends, strict=True) for b in range(s, e)}


@st.composite
def views(draw: st.DrawFn, base: torch.Tensor) -> torch.Tensor:
    start = draw(st.integers(0, SIZE - 1))
    rows = draw(st.integers(1, 4))
    step = draw(st.integers(1, 12))
    width = draw(st.integers(1, 6))
    assume(start + (rows - 1) * step + width <= SIZE)
    return base.as_strided((rows, width), (step, 1), start)


@settings(max_examples=4 * settings.default.max_examples)
@given(data=st.data())
def test_moves_agree_with_a_model_of_single_bytes(data):
    """Addresses, sets of bytes and views follow the old tensor that they lie in, and no other."""
    old, new = torch.zeros(SIZE, dtype=torch.uint8), torch.zeros(4 * SIZE, dtype=torch.uint8)
    pairs, model = [], {}
    for place in range(data.draw(st.integers(1, 3), label="moves")):
        one = data.draw(views(old))
        assume(not bytes_of(one) & model.keys())
        other = new.as_strided(one.shape, one.stride(), place * SIZE)
        pairs.append((one, other))
        by = other.data_ptr() - one.data_ptr()
        model.update({each: each + by for each in bytes_of(one)})
    assume(len(set(model.values())) == len(model))
    moves = Moves(pairs)
    base = old.data_ptr()
    every = list(range(base - 2, base + SIZE + 2))
    assert [moves.address(each) for each in every] == [model.get(each, each) for each in every]
    found, pairs_of_them = moves.moving(every)
    assert [every[place] for place in found] == sorted(model)
    for place, pair in zip(found, pairs_of_them, strict=True):
        assert moves.pair_at(every[place]) == pair
        assert model[every[place]] == every[place] + moves.steps[pair]
    for asked in data.draw(st.lists(views(old), min_size=1, max_size=3), label="asked"):
        check_view(moves, model, asked)
        check_view(moves, model, asked.T)
        if (asked.storage_offset() + base) % 2 == 0 and asked.shape[1] % 2 == 0:
            with contextlib.suppress(RuntimeError):  # rows that are not aligned for it
                check_view(moves, model, asked.view(torch.int16))


def check_view(moves: Moves, model: dict[int, int], asked: torch.Tensor) -> None:
    mine = bytes_of(asked)
    ranges = moves.memory(MemoryRanges.of([asked]))
    there = {b for s, e in zip(ranges.starts, ranges.ends, strict=True) for b in range(s, e)}
    assert there == {model.get(each, each) for each in mine}
    shifts = {model.get(each, each) - each for each in mine}
    owners = {moves.pair_at(each) for each in mine}
    if owners == {None}:
        assert moves.tensor(asked) is None
    elif len(owners) == 1:
        by = shifts.pop()
        if by % asked.element_size():
            with pytest.raises(SplitError):
                moves.tensor(asked)
            return
        moved = moves.tensor(asked)
        assert moved is not None
        assert moved.data_ptr() - asked.data_ptr() == by
        assert (moved.shape, moved.stride()) == (asked.shape, asked.stride())
        assert moved.dtype is asked.dtype
    else:
        with pytest.raises(SplitError):
            moves.tensor(asked)


def test_bits_of_a_view_are_its_own_where_a_plain_one_lies_there_too():
    old = torch.zeros(4, dtype=torch.complex64)
    new = torch.tensor([1 + 2j, 3 + 4j, 5 - 6j, 7j])
    for views_of in (
        lambda x: (x, x.conj(), x),
        lambda x: (x.conj(), x, x.conj()),
        lambda x: (x.imag, x.conj().imag, x.imag),
        lambda x: (x.conj().imag, x.imag, x.conj().imag),
        lambda x: (x, torch.nn.Parameter(x), x),
    ):
        moves = Moves([(old, new)])
        for asked, want in zip(views_of(old), views_of(new), strict=True):
            moved = moves.tensor(asked)
            assert moved is not None
            assert torch.equal(
                moved.resolve_conj().resolve_neg(), want.resolve_conj().resolve_neg()
            )
            assert moved.is_conj() == want.is_conj()
            assert moved.is_neg() == want.is_neg()
            assert type(moved) is type(want)
            assert moved.requires_grad == want.requires_grad


class Pair(NamedTuple):
    one: Any
    two: Any


@dataclass(frozen=True)
class Frozen:
    one: Any
    two: Any = 3


class Slotted:
    __slots__ = ("one", "unset")

    def __init__(self, one: Any) -> None:
        self.one = one


class Bare:
    __slots__ = ()


class Both(Slotted):
    """Slots, and a dict of attributes as well."""

    def __init__(self, one: Any) -> None:
        super().__init__(one)
        self.two = one


class Plain:
    def __init__(self, one: Any) -> None:
        self.one, self.two = one, 5


class Loud(dict):
    """A dict whose own access must not be what copies it."""

    def __setitem__(self, key, value):
        raise AssertionError


POOL = [torch.zeros(2) for _ in range(4)]
LEAVES = st.sampled_from([*POOL, 1, "x", None])
NESTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(deque),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(Loud),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(OrderedDict),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(MappingProxyType),
        st.builds(Pair, inner, inner),
        st.builds(Frozen, inner, inner),
        st.builds(Slotted, inner),
        st.builds(Both, inner),
        st.builds(Plain, inner),
        st.sets(st.sampled_from([1, "x"])).map(lambda of: (of, Bare())),
        st.builds(lambda one: SimpleNamespace(one=one), inner),
    ),
    max_leaves=12,
)


@settings(max_examples=4 * settings.default.max_examples)
@given(nest=NESTS, chosen=st.sets(st.integers(0, 3)))
def test_tensors_are_replaced_and_all_else_is_kept(nest, chosen):
    """Same paths and types; replaced tensors are the new ones, other leaves the very objects."""
    new = {id(POOL[i]): torch.ones(2) for i in chosen}
    before = list(walk(nest))
    made = with_tensors(nest, lambda tensor: new.get(id(tensor)))
    after = list(walk(made))
    assert [path for path, _ in after] == [path for path, _ in before]
    for (_, old), (_, now) in zip(before, after, strict=True):
        assert now is new.get(id(old), old)
    assert all(one is other for (_, one), (_, other) in zip(walk(nest), before, strict=True))
    assert type(made) is type(nest) or isinstance(nest, torch.Tensor)
    if not any(id(leaf) in new for _, leaf in before):
        assert made is nest


def test_what_was_shared_is_shared_again():
    shared = {"x": POOL[0]}
    nest = {"a": shared, "b": shared, "c": {"x": POOL[1]}}
    nest["cycle"] = nest
    factory = defaultdict(list, {"k": POOL[0]})
    nest["d"] = factory
    new = torch.ones(2)
    nest["e"] = deque([POOL[0]], maxlen=1)
    nest["f"] = OrderedDict(x=POOL[0], y=1)
    nest["f"].move_to_end("x")
    made = with_tensors(nest, lambda tensor: new if tensor is POOL[0] else None)
    assert made["e"].maxlen == 1
    assert list(made["f"]) == ["y", "x"]
    assert made["a"] is made["b"]
    assert made["a"]["x"] is new
    assert made["c"] is nest["c"]
    assert made["cycle"] is made
    assert made["d"].default_factory is list
    assert made["d"]["k"] is new
    assert nest["a"]["x"] is POOL[0]


def test_attributes_of_containers_are_replaced_too():
    class Listed(list):
        pass

    nest = Listed([POOL[0]])
    nest.extra = POOL[0]
    new = torch.ones(2)
    made = with_tensors(nest, lambda tensor: new)
    assert made[0] is new
    assert made.extra is new
    assert nest.extra is POOL[0]
