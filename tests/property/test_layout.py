"""Layouts are equal exactly when paths, places and host values are.

A nest is drawn as a specification, and built from it as often as needed: with new containers and
new views each time, its shared parts shared or not. Then one thing in it is changed.
"""

from __future__ import annotations

import collections
import copy
import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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

BUFFERS = [torch.zeros(96, dtype=torch.int64) for _ in range(3)]
DTYPES = [torch.int64, torch.int32, torch.float32]


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


class Triple(NamedTuple):
    a: Any
    b: Any
    c: Any


@dataclass
class Open:
    a: Any
    b: Any
    c: Any


@dataclass(slots=True)
class Slotted:
    a: Any
    b: Any
    c: Any

    @property
    def costly(self) -> Any:
        raise RuntimeError("a property was read")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("containers were compared")

    __hash__ = None


class Plain:
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class Attributed(dict[str, Any]):
    """A dict that also has attributes."""


@dataclass(eq=False)
class Place:
    """A view: tensor leaf."""

    buffer: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def make(self) -> torch.Tensor:
        typed = BUFFERS[self.buffer].view(self.dtype)
        return typed.as_strided(self.shape, self.stride, self.offset)


@dataclass(eq=False)
class Value:
    """A host value: a leaf."""

    index: int

    def make(self) -> Any:
        return HOST_VALUES[self.index]()


@dataclass(eq=False)
class Branch:
    kind: str
    items: list[tuple[str, Any]] = field(default_factory=list)

    @property
    def is_mutable(self) -> bool:
        return self.kind in ("dict", "ordered", "default", "list", "deque", "plain")


Spec = Place | Value | Branch
THREE = ("triple", "open", "slotted")
ANY_NUMBER = ("dict", "ordered", "default", "attributed", "list", "tuple", "deque", "plain")


@st.composite
def places(draw: st.DrawFn) -> Place:
    shape = draw(st.sampled_from([(), (4,), (1,), (0,), (2, 3), (3, 2), (1, 4), (2, 1, 3)]))
    stride = tuple(draw(st.sampled_from([0, 1, 2, 3, 4, 6])) for _ in shape)
    return Place(
        draw(st.integers(0, 2)),
        draw(st.sampled_from(DTYPES)),
        draw(st.integers(0, 40)),
        shape,
        stride,
    )


leaves = st.one_of(places(), st.builds(Value, st.integers(0, len(HOST_VALUES) - 1)))


@st.composite
def nests(draw: st.DrawFn) -> Branch:
    pool: list[Spec] = draw(st.lists(leaves, min_size=1, max_size=6))
    branches: list[Branch] = []
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(THREE + ANY_NUMBER))
        count = 3 if kind in THREE else draw(st.integers(0, 4))
        # From all that was made before: what is drawn twice is shared.
        parts = [pool[-1 - draw(st.integers(0, len(pool) - 1))] for _ in range(count)]
        branch = Branch(kind, list(zip("abcd", parts, strict=False)))
        branches.append(branch)
        pool.append(branch)
    root = branches[-1]
    looping = [branch for branch in branches if branch.is_mutable]
    if looping and draw(st.booleans()):
        branch = draw(st.sampled_from(looping))
        up = root if root.is_mutable and draw(st.booleans()) else branch
        branch.items.append(("up", up))
    return root


def build(spec: Spec, *, share: bool, _open: dict | None = None, _done: dict | None = None) -> Any:
    """The nest, with new containers; what the specification shares is shared if ``share``."""
    opened = {} if _open is None else _open
    done = {} if _done is None else _done
    if not isinstance(spec, Branch):
        if id(spec) not in done or not share:
            done[id(spec)] = spec.make()
        return done[id(spec)]
    if id(spec) in opened:
        return opened[id(spec)]
    if share and id(spec) in done:
        return done[id(spec)]
    empty = {
        "dict": dict,
        "ordered": collections.OrderedDict,
        "default": lambda: collections.defaultdict(list),
        "attributed": Attributed,
        "list": list,
        "deque": collections.deque,
        "plain": Plain,
    }
    made = empty[spec.kind]() if spec.kind in empty else None
    if spec.is_mutable:
        opened[id(spec)] = made
    parts = [
        (name, build(part, share=share, _open=opened, _done=done)) for name, part in spec.items
    ]
    opened.pop(id(spec), None)
    values = [part for _, part in parts]
    match spec.kind:
        case "dict" | "ordered" | "default":
            made.update(parts)
        case "attributed":
            made.update(parts[1:])
            vars(made).update(parts[:1])
        case "list" | "deque":
            made.extend(values)
        case "plain":
            vars(made).update(parts)
        case "tuple":
            made = tuple(values)
        case other:
            made = {"triple": Triple, "open": Open, "slotted": Slotted}[other](*values)
    done[id(spec)] = made
    return made


def spell(spec: Spec, path: str = "", around: tuple[int, ...] = ()) -> Iterator[tuple[str, Spec]]:
    """Every path, of containers too."""
    if id(spec) in around:
        return
    yield path, spec
    if isinstance(spec, Branch):
        for i, (name, part) in enumerate(spec.items):
            step = str(i) if spec.kind in ("list", "tuple", "deque") else name
            yield from spell(part, f"{path}.{step}" if path else step, (*around, id(spec)))


def leaf_paths(spec: Spec) -> list[str]:
    return sorted(path for path, part in spell(spec) if not isinstance(part, Branch))


booleans = st.booleans()


@given(nests(), booleans)
def test_walk_gives_each_leaf_once_for_each_path(spec: Branch, share: bool) -> None:
    assert sorted(path for path, _ in walk(build(spec, share=share))) == leaf_paths(spec)


@given(nests(), booleans, booleans)
def test_a_rebuild_has_the_same_layout(spec: Branch, first: bool, second: bool) -> None:
    a, b = build(spec, share=first), build(spec, share=second)
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
    before = build(spec, share=draw(booleans))
    if draw(booleans):
        part = _unshared(draw, spec)
    else:
        spots = {id(part): part for _, part in spell(spec)}
        part = draw(st.sampled_from(list(spots.values())))
    where = {path for path, other in spell(spec) if other is part}
    wanted: set[tuple[str, str]]
    if isinstance(part, Place):
        old, new = part.make(), draw(places())
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
    return spec, before, build(spec, share=draw(booleans)), wanted


def _unshared(draw: st.DrawFn, spec: Branch) -> Spec:
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
        alone: Spec = Branch(part.kind, list(part.items))
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
    for i, make in enumerate(HOST_VALUES):
        for rule in ("equal", "at_most"):
            checker = LayoutChecker((make(),), "cpu", {"0": rule})
            assert checker.differences((make(),)) == []
            assert checker.matches((make(),)), make()
        checker = LayoutChecker((make(),), "cpu")
        for j, other in enumerate(HOST_VALUES):
            assert (checker.differences((other(),)) == []) is (i == j)
            assert checker.matches((other(),)) is (i == j), (make(), other())


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
    state = {"nest": build(spec, share=True), "seq_lens": {"deep": tensor} if deep else tensor}
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
