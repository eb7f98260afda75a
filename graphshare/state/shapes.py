"""How values of a type are taken apart, and which types are leaves."""

from __future__ import annotations

import dataclasses
import enum
import keyword
import os
import struct
import types
import weakref
from collections import deque
from functools import lru_cache
from typing import Any, NamedTuple

import torch

__all__ = ["Kind", "Shape", "declared_only", "is_read_plainly", "shape_of"]

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_POINTER_BYTES = struct.calcsize("P")
_VALUES: tuple[type, ...] = (
    *(bool, int, float, complex, str, bytes, bytearray, set, frozenset, range, slice),
    *(type(None), type(...), type(NotImplemented), enum.Enum, os.PathLike),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)


class Kind(enum.Enum):
    """How a value is taken apart."""

    TENSOR = enum.auto()
    VALUE = enum.auto()  # a leaf
    SEQUENCE = enum.auto()
    MAPPING = enum.auto()
    OBJECT = enum.auto()


class Shape(NamedTuple):
    """How values of one type are taken apart.

    Attributes:
        kind: What the type is.
        has_dict: Whether instances have a ``__dict__`` of attributes.
        slots: Name and descriptor of each slot.
        fields: Names of the items, of a named tuple.
        declared: Names of the fields, of a dataclass that is looked at through these alone.
    """

    kind: Kind
    has_dict: bool = False
    slots: tuple[tuple[str, types.MemberDescriptorType], ...] = ()
    fields: tuple[str, ...] = ()
    declared: tuple[str, ...] | None = None


def _is_written_in_python(cls: type) -> bool:
    # The first type on top of `object` decides the memory layout. A class statement leaves
    # `__slots__` or `__dict__` in it, and room for slots, `__dict__` and `__weakref__` alone;
    # an extension type keeps state there that no walk can see.
    base = cls
    while base.__base__ is not None and base.__base__ is not object:
        base = base.__base__
    members = sum(isinstance(value, types.MemberDescriptorType) for value in vars(base).values())
    return (
        bool(base.__flags__ & _HEAP_TYPE)
        and ("__slots__" in vars(base) or "__dict__" in vars(base))
        and base.__basicsize__ <= object.__basicsize__ + _POINTER_BYTES * (members + 2)
    )


def _slots(cls: type) -> tuple[tuple[str, types.MemberDescriptorType], ...]:
    found: dict[str, types.MemberDescriptorType] = {}
    for base in cls.__mro__:
        if "__slots__" in vars(base):
            for name, member in vars(base).items():
                if isinstance(member, types.MemberDescriptorType):
                    found.setdefault(name, member)
    return tuple(found.items())


_declared: dict[type, tuple[str, ...]] = {}
_read: weakref.WeakSet[type] = weakref.WeakSet()
"""Types of objects that were taken apart, whole."""


def declared_only(cls: type) -> bool:
    """Take instances of a dataclass for what their fields give, from now on, and nothing else.

    A check need not ask for their ``__dict__`` then, which CPython makes only when asked: half of
    the time that such an object takes, with cold caches. An attribute that is no field is not seen
    any more, so it is for classes of which it is known that nothing sets others, and no forward
    reads others.

    Args:
        cls: A dataclass itself, not only of one; as torch's ``register_dataclass`` it holds for
            the process.

    Returns:
        Whether it is done. It is not where a state with such an instance was looked at before, and
        layouts of the whole object may be in use.

    Raises:
        TypeError: ``cls`` is no dataclass, or a field of it is more than what an instance holds:
            reading it could run Python, or finds something with parts in the class.
    """
    if cls in _declared:
        return True
    if "__dataclass_fields__" not in vars(cls):
        raise TypeError(f"declared_only: expected a dataclass, got {cls}")
    names = tuple(field.name for field in dataclasses.fields(cls))
    plain = all(_is_plain(cls, name) for name in names)
    if not plain or _shape_of(cls).kind is not Kind.OBJECT:
        raise TypeError(
            f"declared_only: expected fields that are plain attributes, got {cls}, "
            "which computes some or holds more than attributes"
        )
    if cls in _read:
        return False
    _declared[cls] = names
    shape_of.cache_clear()
    return True


def is_read_plainly(cls: type, name: Any) -> bool:
    """Whether ``value.name`` can be written in source, and runs nothing of the class ``cls``."""
    # Source takes other identifiers for what they are normalised to.
    if type(name) is not str or not (name.isascii() and name.isidentifier()):
        return False
    if keyword.iskeyword(name) or hasattr(cls, "__getattr__"):
        return False
    return cls.__getattribute__ is object.__getattribute__


def _is_plain(cls: type, name: str) -> bool:
    """Whether ``value.name`` is what the instance holds, or a plain value that the class has."""
    if not is_read_plainly(cls, name):
        return False
    defaults = [type(vars(base)[name]) for base in cls.__mro__ if name in vars(base)]
    if any(hasattr(each, "__get__") for each in defaults):
        return False
    return all(_shape_of(each).kind is Kind.VALUE for each in defaults)


@lru_cache(maxsize=1024)
def shape_of(cls: type) -> Shape:
    """How values of type ``cls`` are taken apart."""
    shape = _shape_of(cls)
    if shape.kind is Kind.OBJECT and shape.declared is None:
        _read.add(cls)
    return shape


def _shape_of(cls: type) -> Shape:
    if issubclass(cls, torch.Tensor):
        return Shape(Kind.TENSOR)
    if issubclass(cls, _VALUES):
        return Shape(Kind.VALUE)
    attributes = bool(getattr(cls, "__dictoffset__", 0)), _slots(cls)
    if issubclass(cls, (tuple, list, deque)):
        fields = getattr(cls, "_fields", ()) if issubclass(cls, tuple) else ()
        return Shape(Kind.SEQUENCE, *attributes, fields=tuple(fields))
    if issubclass(cls, (dict, types.MappingProxyType)):
        return Shape(Kind.MAPPING, *attributes)
    if issubclass(cls, types.SimpleNamespace):
        return Shape(Kind.OBJECT, *attributes)
    called = any("__call__" in vars(base) for base in cls.__mro__)
    if called or issubclass(cls, type) or not _is_written_in_python(cls):
        return Shape(Kind.VALUE)
    return Shape(Kind.OBJECT, *attributes, declared=_declared.get(cls))
