"""A saved report, read with the types that it says it has: it may come from anywhere."""

from __future__ import annotations

import dataclasses
import enum
import json
import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from graphshare.arguments import shown

__all__ = ["parsed", "read"]

_T = TypeVar("_T")

Reader = Callable[[Any], Any]


class _RefusalError(Exception):
    """Says what is wrong, and where, from the inside out."""

    def __init__(self, problem: str, *at: str) -> None:
        super().__init__(problem)
        self.problem, self.at = problem, list(at)

    def __str__(self) -> str:
        return f"{''.join(reversed(self.at)).removeprefix('.') or 'report'}: {self.problem}"


def parsed(text: str | bytes) -> dict[str, Any]:
    """Return the object that a JSON text is.

    Raises:
        ValueError: It is something else.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"expected an object, got {shown(content)}")
    return cast("dict[str, Any]", content)


def read(kind: type[_T], value: Any) -> _T:
    """Return a value of JSON as what it is declared to be.

    Args:
        kind: A dataclass, whose fields are such, enums of strings, ``str``, ``int``, or a tuple,
            mapping or optional of these.
        value: As JSON has it.

    Raises:
        ValueError: It is something else; says which part of it.
    """
    try:
        return _reader(kind)(value)
    except _RefusalError as error:
        raise ValueError(str(error)) from None


@cache
def _reader(kind: Any) -> Reader:
    if dataclasses.is_dataclass(kind):
        return _reader_of_fields(cast("type[Any]", kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _reader_of_members(kind)
    origin, parts = get_origin(kind), get_args(kind)
    if origin is types.UnionType:
        (other,) = (part for part in parts if part is not types.NoneType)
        inner = _reader(other)
        return lambda value: None if value is None else inner(value)
    if origin is tuple:
        return _reader_of_items(parts)
    if origin is Mapping:
        return _reader_of_entries(_reader(parts[1]))
    expected = "a number" if kind is int else "a string"

    def plain(value: Any) -> Any:
        if type(value) is not kind:  # a bool is no number
            raise _expected(expected, value)
        return value

    return plain


def _reader_of_members(kind: type[enum.Enum]) -> Reader:
    members = {member.value: member for member in kind}

    def member(value: Any) -> Any:
        if type(value) is not str or value not in members:
            raise _expected(f"one of {', '.join(members)}", value)
        return members[value]

    return member


def _reader_of_items(parts: tuple[Any, ...]) -> Reader:
    every = parts[-1] is Ellipsis
    readers = [_reader(part) for part in parts if part is not Ellipsis]

    def items(value: Any) -> Any:
        if not isinstance(value, list):
            raise _expected("a list", value)
        given = cast("list[Any]", value)
        if not every and len(given) != len(readers):
            raise _RefusalError(f"expected {len(readers)} items, got {len(given)}")
        found: list[Any] = []
        try:
            for item in given:
                found.append(readers[0 if every else len(found)](item))
        except _RefusalError as error:
            error.at.append(f"[{len(found)}]")
            raise
        return tuple(found)

    return items


def _reader_of_entries(inner: Reader) -> Reader:
    def entries(value: Any) -> Any:
        return {name: _entry(inner, name, entry) for name, entry in _object(value).items()}

    return entries


def _reader_of_fields(kind: type[Any]) -> Reader:
    hints = get_type_hints(kind)
    readers = {field.name: _reader(hints[field.name]) for field in dataclasses.fields(kind)}
    needed = [
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]

    def fields(value: Any) -> Any:
        given = _object(value)
        for name in needed:
            if name not in given:
                raise _RefusalError("missing", f".{name}")
        found: dict[str, Any] = {}
        for name, entry in given.items():
            if name not in readers:
                raise _RefusalError(f"no such field: {name}")
            found[name] = _entry(readers[name], name, entry)
        return kind(**found)

    return fields


def _entry(inner: Reader, name: str, entry: Any) -> Any:
    try:
        return inner(entry)
    except _RefusalError as error:
        error.at.append(f".{name}")
        raise


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _expected("an object", value)
    return cast("dict[str, Any]", value)


def _expected(what: str, got: Any) -> _RefusalError:
    return _RefusalError(f"expected {what}, got {shown(got)}")
