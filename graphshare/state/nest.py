"""What a nest is made of: the steps down from its containers, its leaves, and its paths."""

from __future__ import annotations

import enum
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from graphshare.state.rules import RuleSet
from graphshare.state.shapes import Kind, shape_of

__all__ = [
    "Step",
    "children",
    "each_once",
    "label",
    "unroll",
    "walk",
    "walk_rules",
]

MAX_LEAVES = 1 << 20
"""Most leaves, counted once for each path, that a state may have."""

_LEAVES = (Kind.TENSOR, Kind.VALUE)


class Step(NamedTuple):
    """One step down: to the item ``key``, the value under ``key``, or the attribute ``key``.

    Two steps are equal when Python takes their keys for the same one, as a dict does.
    """

    how: str  # "item", "key", "attr" or "slot"
    key: Any


class _Missing(enum.Enum):
    MISSING = enum.auto()


MISSING: Any = _Missing.MISSING
"""What an unset slot or an absent key gives."""

# The raw access of the built-in types: what a subclass overrides may compute, copy or insert.
_ITERATE: tuple[tuple[type, Callable[[Any], Iterator[Any]]], ...] = (
    (tuple, tuple.__iter__),
    (list, list.__iter__),
    (deque, deque.__iter__),
)


def iterate_of(cls: type) -> Callable[[Any], Iterator[Any]]:
    """The built-in iteration over values of a sequence type."""
    return next(iterate for base, iterate in _ITERATE if issubclass(cls, base))


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes in ``value.__dict__``, whatever its class does with attribute access."""
    return object.__getattribute__(value, "__dict__")


def slot_of(member: types.MemberDescriptorType, value: Any) -> Any:
    """What the slot holds, or :data:`MISSING`."""
    try:
        return member.__get__(value, type(value))
    except AttributeError:
        return MISSING


def children(value: Any) -> Iterable[tuple[Step, Any]] | None:
    """The steps down from a container and what they lead to; ``None`` for a leaf.

    No property, no ``__getattr__`` and no overridden access of a subclass runs.
    """
    cls = type(value)
    shape = shape_of(cls)
    if shape.kind in _LEAVES:
        return None
    found: list[tuple[Step, Any]] = []
    if shape.kind is Kind.SEQUENCE:
        found.extend((Step("item", i), item) for i, item in enumerate(iterate_of(cls)(value)))
    elif shape.kind is Kind.MAPPING:
        items = dict.items(value) if isinstance(value, dict) else value.items()
        found.extend((Step("key", key), item) for key, item in items)
    if shape.declared is not None:
        found.extend(
            (Step("attr", name), item)
            for name in shape.declared
            if (item := getattr(value, name, MISSING)) is not MISSING
        )
    elif shape.has_dict:
        found.extend((Step("attr", name), item) for name, item in attributes_of(value).items())
    for name, member in shape.slots:
        item = slot_of(member, value)
        if item is not MISSING:
            found.append((Step("slot", name), item))
    return found


def label(cls: type, step: Step) -> str:
    """How a step down from a container of type ``cls`` reads in a path."""
    if step.how == "item":
        fields = shape_of(cls).fields
        return fields[step.key] if step.key < len(fields) else str(step.key)
    return str(step.key)


_T = TypeVar("_T")


def too_many_leaves(path: str) -> ValueError:
    """The error for a state with more than :data:`MAX_LEAVES` leaves."""
    return ValueError(
        f"state: expected at most {MAX_LEAVES} leaves, got more, at path {path[:200]!r}. "
        "It seems to reach into the engine, or shares its parts many times over. "
        "Return only what the forward reads."
    )


def unroll(
    root: _T,
    below: Callable[[_T], Iterable[tuple[str, _T]] | None],
    rules: RuleSet,
) -> Iterator[tuple[str, _T, str]]:
    """Every leaf as ``(path, leaf, rule)``, once for each path that leads to it.

    A container that is inside itself is not entered again.

    Args:
        root: Where to start, at path ``""``.
        below: Labels and values one step down, or ``None`` for a leaf.
        rules: Containers in which all is ``any`` are passed by.

    Raises:
        ValueError: There are more than :data:`MAX_LEAVES` leaves.
    """
    count = 0
    path, index = "", rules.ceiling
    around: set[int] = set()
    # `None` for a label closes the container: a stack, since nests may be deeper than Python's.
    stack: list[tuple[str, str | None, _T, int]] = [("", "", root, index)]
    while stack:
        prefix, name, value, index = stack.pop()
        if name is None:
            around.discard(id(value))
            continue
        path = f"{prefix}.{name}" if prefix else name
        inside = below(value)
        if inside is None:
            count += 1
            if count > MAX_LEAVES:
                raise too_many_leaves(path)
            yield path, value, rules.rule(path, index)
            continue
        if id(value) in around:
            continue
        if rules:
            index = rules.within(path, index)
            if rules.leaves_out(index):
                continue
        around.add(id(value))
        stack.append(("", None, value, 0))
        stack.extend((path, name, item, index) for name, item in reversed(list(inside)))


def each_once(state: Any, rules: RuleSet) -> list[tuple[Any, str]] | None:
    """Every leaf as ``(leaf, rule)``, in the order of the walk, at least once for each rule.

    As :func:`unroll`, but a container is not entered again where the same rules hold within, and
    those in which all is ``any`` are entered too.

    Args:
        state: Any nest.
        rules: The rules.

    Returns:
        The leaves; ``None`` if only :func:`unroll` can tell: a pattern looks at more than the
        end of a path, or there is a cycle, where each path is another.
    """
    if not rules.by_ending:
        return None
    found: list[tuple[Any, str]] = []
    seen: set[tuple[int, int, str]] = set()
    alive: list[Any] = []  # an id is only good while its object lives
    around: set[int] = set()
    stack: list[tuple[str, str | None, Any, int]] = [("", "", state, rules.ceiling)]
    while stack:
        prefix, name, value, index = stack.pop()
        if name is None:
            around.discard(id(value))
            continue
        path = f"{prefix}.{name}" if prefix else name
        if shape_of(type(value)).kind in _LEAVES:
            found.append((value, rules.rule(path, index)))
            continue
        if id(value) in around:
            return None
        index = rules.within(path, index)
        context = (id(value), index, rules.context(path))
        if context in seen:
            continue
        seen.add(context)
        alive.append(value)
        around.add(id(value))
        stack.append(("", None, value, 0))
        stack.extend(
            (path, name, item, index) for name, item in reversed(list(labelled(value) or ()))
        )
    return found


_NO_RULES = RuleSet()


def labelled(value: Any) -> Iterable[tuple[str, Any]] | None:
    """As :func:`children`, with labels for steps."""
    cls = type(value)
    if cls is dict:  # of layers, often: without a step for each
        return [(str(key), item) for key, item in value.items()]
    found = children(value)
    if found is None:
        return None
    return [(label(cls, step), item) for step, item in found]


def walk_rules(
    state: Any, rules: Mapping[str, str] | None = None
) -> Iterator[tuple[str, Any, str]]:
    """As :func:`walk`, with the rule for each leaf.

    Args:
        state: Any nest.
        rules: Path pattern to rule, as ``StateOwner.host_values``.

    Raises:
        ValueError: A rule is unknown, or there are more than a million leaves.
    """
    return unroll(state, labelled, RuleSet(rules))


def walk(state: Any) -> Iterator[tuple[str, Any]]:
    """Every leaf of ``state`` with its path, once for each path that leads to it.

    Containers are dataclasses, named tuples, dicts, lists, tuples, deques and plain objects with
    ``__dict__`` or ``__slots__``; all else is a leaf. A path has the names of attributes and
    fields, ``str()`` of dict keys and the indices of items, with dots between; a root that is a
    leaf has path ``""``. A container inside itself is not entered again.

    Raises:
        ValueError: There are more than a million leaves.
    """
    for path, value, _ in unroll(state, labelled, _NO_RULES):
        yield path, value
