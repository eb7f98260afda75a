"""Layouts are equal exactly when paths, places and host values are.

A nest is drawn as a specification, and built from it as often as needed: with new containers and
new views each time, its shared parts shared or not. Then one thing in it is changed.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from graphshare.state import (
    HostLeaf,
    LayoutChecker,
    TensorLeaf,
    compare,
    device_tensors,
    layout_of,
    walk,
)
from graphshare.testing import strategies
from graphshare.testing.strategies import Branch, Place, leaf_paths, make, places, spell
from tests.layout_checks import each_way  # noqa: F401 - a fixture

BUFFERS = [torch.zeros(96, dtype=torch.int64) for _ in range(3)]


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Small(enum.IntEnum):
    ONE = 1


class Raises:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    __hash__ = None

    def __call__(self) -> None: ...


def opaque() -> None: ...


RAISES = Raises()

# Any two of them differ, and each is like itself made again.
HOST_VALUES: list[Callable[[], Any]] = [
    *(lambda: None, lambda: True, lambda: False, lambda: 0, lambda: 1, lambda: 10**12),
    *(lambda: 0.0, lambda: 1.0, lambda: float("nan"), lambda: float("inf")),
    *(lambda: 1j, lambda: complex(float("nan"), 0), lambda: complex(0, float("nan"))),
    *(lambda: "".join("1"), lambda: "".join(["a", "b"]), lambda: bytes([1]), lambda: bytearray(1)),
    *(lambda: Color.RED, lambda: Color.BLUE, lambda: Small.ONE, lambda: Color),
    *(lambda: {1}, lambda: {True}, lambda: {1.0}, lambda: frozenset({1}), lambda: set()),
    *(lambda: range(3), lambda: range(4), lambda: slice(1, 2), lambda: slice(True, 2)),
    *(lambda: torch.int32, lambda: torch.float32, lambda: torch.strided),
    *(lambda: torch.device("cpu"), lambda: torch.device("cuda", 0), lambda: torch.Size([1])),
    *(lambda: opaque, lambda: RAISES, lambda: torch.Tensor),
]


@dataclass(eq=False)
class Value:
    """A host value: a leaf."""

    index: int

    def make(self) -> Any:
        return HOST_VALUES[self.index]()


leaves = st.one_of(places(BUFFERS), st.builds(Value, st.integers(0, len(HOST_VALUES) - 1)))


def nests() -> st.SearchStrategy[Branch]:
    return strategies.nests(leaves, cycles=True)


booleans = st.booleans()


@given(nests(), booleans)
def test_walk_gives_each_leaf_once_for_each_path(spec: Branch, share: bool) -> None:
    assert sorted(path for path, _ in walk(make(spec, share=share))) == leaf_paths(spec)


@given(nests(), booleans, booleans)
def test_a_rebuild_has_the_same_layout(spec: Branch, first: bool, second: bool) -> None:
    a, b = make(spec, share=first), make(spec, share=second)
    mine, theirs = layout_of(a, "cpu"), layout_of(b, "cpu")
    assert mine == theirs
    assert compare(mine, theirs) == []
    checker = LayoutChecker(a, "cpu")
    assert checker.matches(a)
    assert checker.matches(b)
    assert checker.differences(b) == []
    assert sorted(leaf.path for leaf in mine.leaves) == leaf_paths(spec)
    for leaf in mine.leaves:
        assert isinstance(leaf, TensorLeaf | HostLeaf)
    places = [part for _, part in spell(spec) if isinstance(part, Place)]
    assert len(mine.tensors) == len(places)
    tensors = device_tensors(b, "cpu")
    assert len(set(map(id, tensors))) == len(tensors)
    assert len(tensors) == (len(set(map(id, places))) if second else len(places))


def fields_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


FIELDS = ("address", "shape", "stride", "dtype", "device")


@st.composite
def changed(draw: st.DrawFn) -> tuple[Branch, Any, Any, set[tuple[str, str]]]:
    """A specification, its nest before and after one change, and the differences to be seen."""
    spec = draw(nests())
    before = make(spec, share=draw(booleans))
    if draw(booleans):
        part = _unshared(draw, spec)
    else:
        spots = {id(part): part for _, part in spell(spec)}
        part = draw(st.sampled_from(list(spots.values())))
    where = {path for path, other in spell(spec) if other is part}
    wanted: set[tuple[str, str]]
    if isinstance(part, Place):
        old, new = part.make(), draw(places(BUFFERS))
        if draw(booleans):  # in one respect alone
            one = draw(st.sampled_from(["buffer", "offset", "dtype", "stride"]))
            if one != "stride" or len(new.stride) == len(part.stride):
                setattr(part, one, getattr(new, one))
        else:
            vars(part).update(vars(new))
        pairs = list(zip(FIELDS, fields_of(old), fields_of(part.make()), strict=True))
        wanted = {(path, name) for path in where for name, a, b in pairs if a != b}
    elif isinstance(part, Value):
        old = part.make()
        part.index = draw(st.integers(0, len(HOST_VALUES) - 1))
        new = part.make()
        assume(not (type(old) is type(new) and repr(old) == repr(new)))
        wanted = {(path, "value" if type(old) is type(new) else "type") for path in where}
    else:
        wanted = _change_branch(draw, spec, part, where)
    assume(wanted)
    return spec, before, make(spec, share=draw(booleans)), wanted


def _unshared(draw: st.DrawFn, spec: Branch) -> Place | Value | Branch:
    """Makes one place's part its own, so that a change shows there alone."""
    branches = [part for _, part in spell(spec) if isinstance(part, Branch)]
    places = [
        (branch, i)
        for branch in {id(branch): branch for branch in branches}.values()
        for i, (name, _) in enumerate(branch.items)
        if name != "up"
    ]
    if not places:
        return spec
    branch, i = draw(st.sampled_from(places))
    name, part = branch.items[i]
    if isinstance(part, Branch):
        alone: Place | Value | Branch = Branch(part.kind, list(part.items))
    else:
        alone = copy.copy(part)
    branch.items[i] = (name, alone)
    return alone


def _change_branch(
    draw: st.DrawFn, spec: Branch, part: Branch, where: set[str]
) -> set[tuple[str, str]]:
    swaps = {"tuple": "deque", "open": "slotted", "slotted": "triple", "triple": "open"}
    if part.kind in swaps:
        part.kind = swaps[part.kind]
        return {(path, "type") for path in where}
    leaf = draw(leaves)
    part.items.append(("new", leaf))
    return {(path, "presence") for path, other in spell(spec) if other is leaf}


@given(changed())
def test_one_change_is_seen_and_nothing_else(
    case: tuple[Branch, Any, Any, set[tuple[str, str]]],
) -> None:
    _, before, after, wanted = case
    mine, theirs = layout_of(before, "cpu"), layout_of(after, "cpu")
    assert mine != theirs
    checker = LayoutChecker(before, "cpu")
    assert not checker.matches(after)
    found = checker.differences(after)
    assert found == compare(mine, theirs)
    assert {(one.path, one.field) for one in found} == wanted
    assert len(found) == len(wanted)
    # Seen from the other side it is the same change.
    assert {(one.path, one.field) for one in compare(theirs, mine)} == wanted


@given(changed())
def test_any_leaves_out_what_it_names(
    case: tuple[Branch, Any, Any, set[tuple[str, str]]],
) -> None:
    _, before, after, wanted = case
    rules = {path: "any" for path, _ in wanted}
    checker = LayoutChecker(before, "cpu", rules)
    assert checker.differences(after) == []
    assert not any(leaf.path in rules for leaf in checker.layout.leaves)


@given(changed(), st.sampled_from(["*", "*a*", "*.a", "*.b.*", "a", "*.new"]))
def test_matches_never_lets_a_difference_through(
    case: tuple[Branch, Any, Any, set[tuple[str, str]]], pattern: str
) -> None:
    _, before, after, wanted = case
    for rule in ("any", "at_most", "equal"):
        checker = LayoutChecker(before, "cpu", {pattern: rule})
        found = checker.differences(after)
        if checker.matches(after):
            assert found == []
        assert {(one.path, one.field) for one in found} <= wanted


numbers = st.one_of(st.integers(-3, 3), st.floats(-3, 3), st.booleans())


@given(numbers, numbers)
def test_at_most_bounds_numbers_of_one_type(captured: Any, got: Any) -> None:
    checker = LayoutChecker({"max_seq_len": captured}, "cpu", {"*.max_seq_len": "at_most"})
    same_type = type(captured) is type(got)
    wanted = same_type and (got == captured if type(got) is bool else got <= captured)
    state = {"max_seq_len": got}
    assert checker.matches(state) is wanted
    assert (checker.differences(state) == []) is wanted


def test_no_two_host_values_are_the_same_but_each_is_like_itself() -> None:
    for i, value in enumerate(HOST_VALUES):
        for rule in ("equal", "at_most"):
            checker = LayoutChecker((value(),), "cpu", {"0": rule})
            assert checker.differences((value(),)) == []
            assert checker.matches((value(),)), value()
        checker = LayoutChecker((value(),), "cpu")
        for j, other in enumerate(HOST_VALUES):
            assert (checker.differences((other(),)) == []) is (i == j)
            assert checker.matches((other(),)) is (i == j), (value(), other())


IN_PLACE: dict[str, Callable[[torch.Tensor], Any]] = {
    "set_": lambda t: t.set_(torch.zeros_like(t)),
    "set_ of a view": lambda t: t.set_(t.untyped_storage(), 1, (2, 2), (2, 1)),
    "resize_": lambda t: t.resize_(2, 3),
    "as_strided_": lambda t: t.as_strided_((4, 4), (1, 4)),
    ".data": lambda t: setattr(t, "data", torch.zeros_like(t)),
    ".data of another dtype": lambda t: setattr(t, "data", t.view(torch.int32)),
    "t_": lambda t: t.t_(),
    "unsqueeze_": lambda t: t.unsqueeze_(0),
    "storage resize_": lambda t: t.untyped_storage().resize_(0),
    "storage grows": lambda t: t.untyped_storage().resize_(1 << 20),
}


@given(st.sampled_from(sorted(IN_PLACE)), nests(), booleans)
def test_a_tensor_that_is_changed_in_place_is_seen(name: str, spec: Branch, deep: bool) -> None:
    tensor = torch.zeros(4, 4)
    state = {"nest": make(spec, share=True), "seq_lens": {"deep": tensor} if deep else tensor}
    checker = LayoutChecker(state, "cpu")
    assert checker.matches(state)
    before = fields_of(tensor)
    IN_PLACE[name](tensor)
    after = fields_of(tensor)
    wanted = {name for name, a, b in zip(FIELDS, before, after, strict=True) if a != b}
    assume(wanted)
    assert not checker.matches(state)
    found = checker.differences(state)
    assert {one.field for one in found} == wanted
    assert {one.path for one in found} == {"seq_lens.deep" if deep else "seq_lens"}


def test_each_change_in_place_changes_something() -> None:
    for name, change in IN_PLACE.items():
        tensor = torch.zeros(4, 4)
        before = fields_of(tensor)
        change(tensor)
        assert fields_of(tensor) != before, name


frozen = st.recursive(
    st.one_of(places(BUFFERS), st.sampled_from([None, 1, 1.5, "x", Color.RED, torch.int32])),
    lambda inside: st.lists(inside, min_size=1, max_size=4).map(tuple),
    max_leaves=12,
)


def _unshared_make(spec: Any) -> Any:
    if isinstance(spec, tuple):
        return tuple(map(_unshared_make, spec))
    return spec.make() if isinstance(spec, Place) else spec


@given(frozen, st.data())
def test_a_watched_state_is_unmoved_while_it_matches(spec: Any, data: st.DataObject) -> None:
    """Whatever is done in place to its tensors, and undone."""
    state = _unshared_make((spec, spec))
    checker = LayoutChecker(state, "cpu")
    assert checker.matches(state)
    tensors = device_tensors(state, "cpu")
    unmoved = checker.watch(state)
    assert (unmoved is None) is (tensors == [])
    if unmoved is None:
        return
    assert unmoved()
    before = [tensor.detach() for tensor in tensors]
    for _ in range(data.draw(st.integers(1, 3))):
        index = data.draw(st.integers(0, len(tensors) - 1))
        tensors[index].data = data.draw(places(BUFFERS)).make()
        assert unmoved() is checker.matches(state) is (checker.differences(state) == [])
        if data.draw(booleans):
            tensors[index].data = before[index]
    for tensor, old in zip(tensors, before, strict=True):
        tensor.data = old
    assert unmoved()
