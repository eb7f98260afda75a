"""A state with some of its tensors replaced, all else as it was."""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

from graphshare.state.nest import MISSING, Kind, attributes_of, iterate_of, shape_of, slot_of

__all__ = ["with_tensors"]


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
    return _Replacing(nest, replace).result


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
            kind = shape_of(type(value)).kind
            if kind is Kind.VALUE and not _is_set_of_tensors(value):
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
        cls = type(value)
        shape = shape_of(cls)
        if isinstance(value, (set, frozenset)):
            made = self._made[id(value)] = type(value)(map(self._of, value))
            return made
        if isinstance(value, (tuple, types.MappingProxyType)):
            if id(value) in self._building:
                raise TypeError(f"state: a {cls.__name__} that contains itself cannot be copied")
            self._building.add(id(value))
            made = self._frozen(value)
            self._made[id(value)] = made
        else:
            made = _blank(value)
            self._made[id(value)] = made  # before what is within: it may lead back here
            self._fill(value, made)
        if shape.has_dict:
            attributes = object.__getattribute__(made, "__dict__")
            for name, item in object.__getattribute__(value, "__dict__").items():
                attributes[name] = self._of(item)
        for _, member in shape.slots:
            try:
                item = member.__get__(value, cls)
            except AttributeError:  # unset
                continue
            member.__set__(made, self._of(item))
        return made

    def _frozen(self, value: Any) -> Any:
        if isinstance(value, types.MappingProxyType):
            return types.MappingProxyType({key: self._of(item) for key, item in value.items()})
        items = [self._of(item) for item in tuple.__iter__(value)]
        if hasattr(type(value), "n_sequence_fields"):  # as torch.max returns: made by its own type
            return type(value)(items)
        return tuple.__new__(type(value), items)

    def _fill(self, value: Any, made: Any) -> None:
        if isinstance(value, OrderedDict):
            for key, item in OrderedDict.items(value):
                OrderedDict.__setitem__(made, key, self._of(item))
        elif isinstance(value, dict):
            changed, known = self._changed, self._made
            for key, item in dict.items(value):
                name = id(item)
                if name in changed:
                    item = known[name] if name in known else self._of(item)
                dict.__setitem__(made, key, item)
        elif isinstance(value, list):
            list.extend(made, map(self._of, list.__iter__(value)))
        elif isinstance(value, deque):
            deque.extend(made, map(self._of, deque.__iter__(value)))


def _is_set_of_tensors(value: Any) -> bool:
    # A value in every other respect: its order is that of addresses.
    return type(value) in (set, frozenset) and any(isinstance(e, torch.Tensor) for e in value)


def _within(value: Any) -> list[Any]:
    """Return what is one step down, as ``children`` does, without the steps."""
    cls = type(value)
    if cls is dict:  # of layers, often
        return list(value.values())
    if cls in (set, frozenset):
        return list(value)
    shape = shape_of(cls)
    found: list[Any] = []
    if shape.kind is Kind.SEQUENCE:
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
