"""Nests of tensors and host values, drawn as plans and made from them as often as wanted."""

from __future__ import annotations

import collections
import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from hypothesis import strategies as st

__all__ = [
    "Branch",
    "Place",
    "Plan",
    "Value",
    "leaf_paths",
    "make",
    "nests",
    "places",
    "spell",
    "values",
]

_ELEMENTS = 96
_DTYPES = (torch.int64, torch.int32, torch.float32)
_SHAPES = ((), (4,), (1,), (0,), (2, 3), (3, 2), (1, 4), (2, 1, 3))


@runtime_checkable
class Plan(Protocol):
    """How to make a leaf: an object of its own with the same place, or the same value."""

    def make(self) -> Any:
        """Make it."""
        ...


@dataclass(eq=False)
class Place:
    """A tensor leaf: a view of a buffer.

    Attributes:
        buffer: ``[elements]`` int64, on any device.
        dtype: What it is viewed as.
        offset: First element.
        shape: Sizes.
        stride: Strides, in elements; 0 and overlaps are possible.
    """

    buffer: torch.Tensor
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def make(self) -> torch.Tensor:
        """Return a new view."""
        typed = self.buffer.view(self.dtype)
        return typed.as_strided(self.shape, self.stride, self.offset)


@dataclass(eq=False)
class Value:
    """A leaf on the host.

    Attributes:
        of: Returns an equal value each time.
    """

    of: Callable[[], Any]

    def make(self) -> Any:
        """Return the value, made anew."""
        return self.of()


@dataclass(eq=False)
class Branch:
    """A container; the same plan in two places is one object there, or two equal ones.

    Attributes:
        kind: What it is.
        items: Names and plans; names are not used where items have indices.
    """

    kind: str
    items: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])

    @property
    def is_mutable(self) -> bool:
        """Whether it can be put into itself."""
        return self.kind in ("dict", "ordered", "default", "list", "deque", "plain")


class Triple(NamedTuple):
    """A named tuple."""

    a: Any
    b: Any
    c: Any


@dataclass
class Open:
    """A dataclass with ``__dict__``."""

    a: Any
    b: Any
    c: Any


@dataclass(slots=True)
class Slotted:
    """A dataclass with slots, whose properties and ``==`` must not be used."""

    a: Any
    b: Any
    c: Any

    @property
    def costly(self) -> Any:
        """Must not be read.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("a property was read")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("containers were compared")

    __hash__ = None  # pyright: ignore[reportAssignmentType]


class Plain:
    """An object of attributes."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class Attributed(dict[str, Any]):
    """A dict that also has attributes."""


class Color(enum.Enum):
    """Two values that are no numbers."""

    RED = 1
    BLUE = 2


_FIXED = ("triple", "open", "slotted")
_OF_ANY_SIZE = ("dict", "ordered", "default", "attributed", "list", "tuple", "deque", "plain")
_EMPTY: dict[str, Callable[[], Any]] = {
    "dict": dict,
    "ordered": collections.OrderedDict,
    "default": lambda: collections.defaultdict(list),
    "attributed": Attributed,
    "list": list,
    "deque": collections.deque,
    "plain": Plain,
}
_WHOLE: dict[str, Callable[..., Any]] = {
    "tuple": lambda *parts: parts,
    "triple": Triple,
    "open": Open,
    "slotted": Slotted,
}
_VALUES: tuple[Callable[[], Any], ...] = (
    *(lambda: None, lambda: True, lambda: 0, lambda: 1, lambda: 4096, lambda: 0.5),
    *(lambda: float("nan"), lambda: "".join(["n", "hd"]), lambda: Color.RED, lambda: {1, 2}),
    *(lambda: torch.int32, lambda: torch.device("cpu"), lambda: torch.Size([2, 3])),
)


@st.composite
def places(draw: st.DrawFn, buffers: Sequence[torch.Tensor] | None = None) -> Place:
    """Plans of tensors, some of which overlap, in themselves too.

    Args:
        draw: Hypothesis's.
        buffers: Where they lie: each of at least 96 elements int64, contiguous. Two on the CPU,
            for all examples, if left out.
    """
    if buffers is None:
        buffers = _default_buffers()
    shape = draw(st.sampled_from(_SHAPES))
    stride = tuple(draw(st.sampled_from((0, 1, 2, 3, 4, 6))) for _ in shape)
    return Place(
        draw(st.sampled_from(buffers)),
        draw(st.sampled_from(_DTYPES)),
        draw(st.integers(0, 40)),
        shape,
        stride,
    )


_made: list[torch.Tensor] = []


def _default_buffers() -> list[torch.Tensor]:
    if not _made:
        _made.extend(torch.zeros(_ELEMENTS, dtype=torch.int64) for _ in range(2))
    return _made


def values() -> st.SearchStrategy[Value]:
    """Plans of values on the host, of the kinds that metadata has."""
    return st.sampled_from(_VALUES).map(Value)


@st.composite
def nests(
    draw: st.DrawFn,
    leaves: st.SearchStrategy[Any] | None = None,
    *,
    cycles: bool = False,
) -> Branch:
    """Plans of states: containers of every kind, parts of which are shared.

    Args:
        draw: Hypothesis's.
        leaves: Plans of leaves; :func:`places` and :func:`values` if left out.
        cycles: Whether a container may be inside itself.
    """
    each = st.one_of(places(), values()) if leaves is None else leaves
    pool: list[Any] = draw(st.lists(each, min_size=1, max_size=6))
    branches: list[Branch] = []
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(_FIXED + _OF_ANY_SIZE))
        count = 3 if kind in _FIXED else draw(st.integers(0, 4))
        # From all that was made before: what is drawn twice is shared.
        parts = [pool[-1 - draw(st.integers(0, len(pool) - 1))] for _ in range(count)]
        branch = Branch(kind, list(zip("abcd", parts, strict=False)))
        branches.append(branch)
        pool.append(branch)
    root = branches[-1]
    looping = [branch for branch in branches if branch.is_mutable]
    if cycles and looping and draw(st.booleans()):
        branch = draw(st.sampled_from(looping))
        up = root if root.is_mutable and draw(st.booleans()) else branch
        branch.items.append(("up", up))
    return root


def make(plan: Any, *, share: bool = True) -> Any:
    """Make what a plan describes, in new containers and with new views.

    Args:
        plan: A plan.
        share: Whether what the plan has in several places is one object there.
    """
    return _make(plan, share, {}, {})


def _make(plan: Any, share: bool, opened: dict[int, Any], done: dict[int, Any]) -> Any:
    if not isinstance(plan, Branch):
        if id(plan) not in done or not share:
            done[id(plan)] = plan.make()
        return done[id(plan)]
    if id(plan) in opened:
        return opened[id(plan)]
    if share and id(plan) in done:
        return done[id(plan)]
    made: Any = _EMPTY[plan.kind]() if plan.kind in _EMPTY else None
    if plan.is_mutable:
        opened[id(plan)] = made
    parts = [(name, _make(part, share, opened, done)) for name, part in plan.items]
    opened.pop(id(plan), None)
    if plan.kind in ("list", "deque"):
        made.extend(part for _, part in parts)
    elif plan.kind == "plain":
        vars(made).update(parts)
    elif plan.kind == "attributed":
        made.update(parts[1:])
        vars(made).update(parts[:1])
    elif made is not None:
        made.update(parts)
    else:
        made = _WHOLE[plan.kind](*(part for _, part in parts))
    done[id(plan)] = made
    return made


def spell(plan: Any, path: str = "", around: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every path of a plan with what it leads to, containers too.

    Args:
        plan: A plan.
        path: Of the plan itself.
        around: Identities of the plans that it is inside of.
    """
    if id(plan) in around:
        return
    yield path, plan
    if isinstance(plan, Branch):
        for i, (name, part) in enumerate(plan.items):
            step = str(i) if plan.kind in ("list", "tuple", "deque") else name
            yield from spell(part, f"{path}.{step}" if path else step, (*around, id(plan)))


def leaf_paths(plan: Any) -> list[str]:
    """The paths of a plan's leaves, sorted."""
    return sorted(path for path, part in spell(plan) if not isinstance(part, Branch))
