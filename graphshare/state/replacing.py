"""A state with some of its tensors replaced, all else as it was."""

from __future__ import annotations

import operator
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from graphshare.state.nest import MISSING, attributes_of, iterate_of, slot_of
from graphshare.state.shapes import Kind, shape_of

__all__ = ["with_tensors"]

_SETS = (set, frozenset)


def with_tensors(nest: Any, replace: Callable[[torch.Tensor], torch.Tensor | None]) -> Any:
    """Return ``nest`` with other tensors in it.

    Containers on the way to a replaced tensor are copied, one copy for each object, so what was
    shared is shared again; all others are the very objects of ``nest``. No method that a class
    overrides runs.

    Args:
        nest: Any nest of tensors and host values.
        replace: Asked once for each tensor object; returns what to put in its place, or ``None``
            to leave it.

    Raises:
        TypeError: A tuple that contains itself holds a replaced tensor.
    """
    try:
        return _Once(replace).of(nest)
    except (_CycleError, RecursionError):  # a cycle, or a nest deeper than Python's
        return _Replacing(nest, replace).result


class _CycleError(Exception):
    """A container leads back to itself."""


class _Once:
    """One visit to each object, from below: what most nests need, at a third of the time."""

    def __init__(self, replace: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        self._replace = replace
        # By the identity of the object, which what holds it keeps alive. None while it is visited.
        self._made: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        """Return ``value`` on other tensors; ``value`` itself if it has none of those."""
        how = _way_of(type(value))
        if how is _VALUE:
            return value
        made, name = self._made, id(value)
        if name in made:
            result = made[name]
            if result is None:
                raise _CycleError
            return result
        if how is _TENSOR:
            other = self._replace(value)
            result = made[name] = value if other is None else other
            return result
        made[name] = None
        result: Any = value
        if how is _ITEMS:
            items = self._items(value)
            if items is not None:
                result = items
        elif how is _ATTRIBUTES:
            items = self._items(attributes_of(value))
            if items is not None:
                result = object.__new__(type(value))
                attributes_of(result).update(items)
        elif how is _LIST:
            found = list(map(self.of, value))
            if not all(map(operator.is_, found, value)):
                result = found
        elif how is _TUPLE:
            items = list(tuple.__iter__(value))
            found = list(map(self.of, items))
            if not all(map(operator.is_, found, items)):
                result = tuple.__new__(type(value), found)
        else:
            found = {id(item): self.of(item) for item in _within(value)}
            if any(name != id(item) for name, item in found.items()):
                result = _copied(value, lambda item: found[id(item)])
        made[name] = result
        return result

    def _items(self, items: dict[Any, Any]) -> dict[Any, Any] | None:
        """Return a copy of a dict on other tensors; ``None`` if it has none of those."""
        of, known = self.of, self._made.get
        found: dict[Any, Any] = {}
        changed = False
        for key, item in items.items():
            there = known(id(item))  # layers often share one object
            if there is None:
                there = of(item)
            found[key] = there
            if there is not item:
                changed = True
        return found if changed else None


# How the objects of a class are copied by :class:`_Once`.
_VALUE, _TENSOR, _ITEMS, _ATTRIBUTES, _LIST, _TUPLE, _OTHER = range(7)


@lru_cache(maxsize=1024)
def _way_of(cls: type) -> int:
    shape, kind = shape_of(cls), _kind_of(cls)
    if kind is Kind.VALUE:
        return _VALUE
    if kind is Kind.TENSOR:
        return _TENSOR
    if cls is dict:
        return _ITEMS
    if cls is list:
        return _LIST
    if shape.slots:
        return _OTHER
    if kind is Kind.OBJECT:
        plain = shape.has_dict and not issubclass(cls, types.SimpleNamespace)
        return _ATTRIBUTES if plain else _OTHER
    if issubclass(cls, tuple) and not shape.has_dict and not hasattr(cls, "n_sequence_fields"):
        return _TUPLE
    return _OTHER


class _Replacing:
    def __init__(self, nest: Any, replace: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        # What is in each object that may hold a tensor, without values. Holds the objects: an id
        # is good while its object lives.
        self._below: dict[int, tuple[Any, list[Any]]] = {}
        self._made: dict[int, Any] = {}
        self._building: set[int] = set()
        changed = self._look(nest, replace)
        self._changed = self._above(changed) if changed else changed
        self.result = self._of(nest)

    def _look(self, nest: Any, replace: Callable[[torch.Tensor], torch.Tensor | None]) -> set[int]:
        """Visit everything once; return the ids of the tensors that are replaced."""
        changed: set[int] = set()
        below = self._below
        stack = [nest]
        while stack:
            value = stack.pop()
            if id(value) in below:
                continue
            kind = _kind_of(type(value))
            if kind is Kind.VALUE:
                continue
            if kind is Kind.TENSOR:
                below[id(value)] = value, []
                other = replace(value)
                if other is not None:
                    self._made[id(value)] = other
                    changed.add(id(value))
                continue
            # Layers often share one object: once is enough.
            items = list({id(item): item for item in _within(value)}.values())
            below[id(value)] = value, items
            stack.extend(items)
        return changed

    def _above(self, changed: set[int]) -> set[int]:
        """Return the ids of the replaced tensors and of every container that leads to one."""
        parents: dict[int, list[int]] = {}
        below = self._below
        for name, (_, items) in below.items():
            for item in items:
                if id(item) in below:
                    parents.setdefault(id(item), []).append(name)
        found, stack = set(changed), list(changed)
        while stack:
            for parent in parents.get(stack.pop(), ()):
                if parent not in found:
                    found.add(parent)
                    stack.append(parent)
        return found

    def _of(self, value: Any) -> Any:
        if id(value) not in self._changed:
            return value
        made = self._made.get(id(value))
        if made is not None:
            return made
        if isinstance(value, (tuple, types.MappingProxyType)):
            if id(value) in self._building:
                name = type(value).__name__
                raise TypeError(f"state: a {name} that contains itself cannot be copied")
            self._building.add(id(value))
        return _copied(value, self._of, self._made)


def _copied(value: Any, of: Callable[[Any], Any], made: dict[int, Any] | None = None) -> Any:
    """Return a container of the same class with what ``of`` makes of each of its items.

    Args:
        value: The container.
        of: What is to be in the place of an item.
        made: Where the copy is noted, before what is within if that can be: it may lead back here.
    """
    made = {} if made is None else made
    cls = type(value)
    if cls in _SETS:
        copy = made[id(value)] = cls(map(of, value))
        return copy
    if isinstance(value, (tuple, types.MappingProxyType)):
        copy = made[id(value)] = _frozen(value, of)
    else:
        copy = made[id(value)] = _blank(value)
        _fill(value, copy, of)
    shape = shape_of(cls)
    if shape.has_dict:
        attributes = object.__getattribute__(copy, "__dict__")
        for name, item in object.__getattribute__(value, "__dict__").items():
            attributes[name] = of(item)
    for _, member in shape.slots:
        item = slot_of(member, value)
        if item is not MISSING:
            member.__set__(copy, of(item))
    return copy


def _frozen(value: Any, of: Callable[[Any], Any]) -> Any:
    if isinstance(value, types.MappingProxyType):
        return types.MappingProxyType({key: of(item) for key, item in value.items()})
    items = [of(item) for item in tuple.__iter__(value)]
    if hasattr(type(value), "n_sequence_fields"):  # as torch.max returns: made by its own type
        return type(value)(items)
    return tuple.__new__(type(value), items)


def _fill(value: Any, copy: Any, of: Callable[[Any], Any]) -> None:
    if isinstance(value, OrderedDict):
        for key, item in OrderedDict.items(value):
            OrderedDict.__setitem__(copy, key, of(item))
    elif isinstance(value, dict):
        dict.update(copy, {key: of(item) for key, item in dict.items(value)})
    elif isinstance(value, list):
        list.extend(copy, map(of, list.__iter__(value)))
    elif isinstance(value, deque):
        deque.extend(copy, map(of, deque.__iter__(value)))


def _kind_of(cls: type) -> Kind:
    # Elsewhere a set is a value: nothing in it has a path. But it holds what is in it.
    return Kind.SEQUENCE if cls in _SETS else shape_of(cls).kind


def _within(value: Any) -> list[Any]:
    """Return what is one step down, as ``children`` does, without the steps."""
    cls = type(value)
    if cls is dict:  # of layers, often
        return list(value.values())
    if cls in _SETS:
        return list(value)
    shape = shape_of(cls)
    found: list[Any] = []
    if isinstance(value, tuple):
        found.extend(tuple.__iter__(value))
    elif shape.kind is Kind.SEQUENCE:
        found.extend(iterate_of(cls)(value))
    elif shape.kind is Kind.MAPPING:
        found.extend(dict.values(value) if isinstance(value, dict) else value.values())
    if shape.has_dict:
        found.extend(attributes_of(value).values())
    for _, member in shape.slots:
        item = slot_of(member, value)
        if item is not MISSING:
            found.append(item)
    return found


def _blank(value: Any) -> Any:
    """Return an empty object of the same class, made by the built-in type below it."""
    cls = type(value)
    if isinstance(value, deque):
        made: Any = deque.__new__(cls)
        deque.__init__(made, (), value.maxlen)
        return made
    if isinstance(value, defaultdict):
        made = defaultdict.__new__(cls)
        made.default_factory = value.default_factory
        return made
    for base in (OrderedDict, dict, list, types.SimpleNamespace):
        if isinstance(value, base):
            return base.__new__(cls)
    return object.__new__(cls)
