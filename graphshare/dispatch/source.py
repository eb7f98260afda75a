"""The source of a dispatch function for the keys at hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

from graphshare.matching import Field, Match

__all__ = ["MAX_INDEXED", "Axis", "dispatch_source"]

MAX_INDEXED = 1 << 16
"""Largest value of a bound that is looked up in a list; above, by bisection."""


class Axis(NamedTuple):
    """A field as the generated function handles it.

    Attributes:
        field: The field.
        order: Its place in the order of declaration.
        values: The distinct values that keys set, in order if it is a bound.
        free: Whether some key does not constrain it.
    """

    field: Field
    order: int
    values: list[Any]
    free: bool

    @property
    def unconstrained(self) -> bool:
        """No key sets it: only checked."""
        return not self.values

    @property
    def constant(self) -> bool:
        """An exact field on which all keys agree: compared, at the end, instead of looked up."""
        return self.field.match is Match.EXACT and len(self.values) == 1 and not self.free

    @property
    def tabled(self) -> bool:
        """Keys differ in it: looked up."""
        return not (self.unconstrained or self.constant)


# A descriptor type may call its fields anything without a leading underscore: all else has one.
_DISPATCH = """\
def _dispatch(_shape=None, /, *, {parameters}):
    if _shape is not None:
        if _shape.__class__ is not _type:
            raise _TypeError(
                f"dispatch: expected {{_type.__qualname__}} or fields by name, got {{_shape!r}}"
            )
        if {given}:
            raise _TypeError("dispatch: expected a shape or fields, got both")
        {names}, = _shape._values
{places}
    {combine}
{agreed}
    _leaf.count += 1
    return _leaf.key
"""
# What is no plain int, or impossible, goes to the constructor, which converts or refuses it.
_AGAIN = "return _dispatch(_type({arguments}))"


def _indent(text: str, by: int = 4) -> str:
    return "\n".join(" " * by + line if line else line for line in text.split("\n"))


def dispatch_source(axes: list[Axis], combine: str, given: Iterable[str]) -> str:
    """The source of ``_make``, which returns the dispatch function.

    Args:
        axes: All fields, in order of declaration.
        combine: Statements that find ``_leaf`` from the places ``_at<order>``.
        given: The names that ``_make`` takes.
    """
    names = [axis.field.name for axis in axes]
    again = _AGAIN.format(arguments=", ".join(names))
    defaults = [
        "None" if axis.field.default is dataclasses.MISSING else f"_default{axis.order}"
        for axis in axes
    ]
    source = _DISPATCH.format(
        parameters=", ".join(map("{}={}".format, names, defaults)),
        given=" or ".join(map("{} is not {}".format, names, defaults)),
        names=", ".join(names),
        places=_indent("\n".join(_place(axis, again) for axis in axes)),
        combine=combine.replace("\n", "\n    "),
        agreed=_indent(_agreed([axis for axis in axes if axis.constant], again)),
    )
    return f"def _make({', '.join(given)}):\n{_indent(source)}\n    return _dispatch\n"


def _proper(axis: Axis) -> str:
    """The condition under which a value that is not ``None`` is possible for this field."""
    name, least = axis.field.name, axis.field.least
    if least is None:
        return ""
    text = f"{name}.__class__ is _int and {name} >= {least}"
    if name in ("num_reqs", "max_query_len"):
        text += f" and {name} <= num_tokens"
    if name == "uniform_query_len":
        text += (
            f" and not num_tokens % {name}"
            f" and (num_reqs is None or num_reqs * {name} <= num_tokens)"
            f" and (max_query_len is None or max_query_len == {name})"
        )
    return text


def _lookup(axis: Axis) -> str:
    name, order = axis.field.name, axis.order
    if axis.field.match is Match.EXACT:
        return f"_of{order}.get({name}, _rest{order})"
    most = axis.values[-1]
    if most <= MAX_INDEXED:
        return f"_of{order}[{name}] if {name} <= {most} else _rest{order}"
    return f"_of{order}[_bisect(_values{order}, {name})]"


def _place(axis: Axis, again: str) -> str:
    """Statements that check one field and find its place ``_at<order>``, if it has one."""
    name, order, proper = axis.field.name, axis.order, _proper(axis)
    found = f"_at{order} = {_lookup(axis)}" if axis.tabled else ""
    unknown = f"_at{order} = _rest{order}" if axis.tabled else ""
    implied = "if max_query_len is None: max_query_len = uniform_query_len"
    extra = implied if name == "uniform_query_len" else ""
    if axis.field.match is Match.ANY or not (proper or found):
        return ""
    if not proper:
        return found
    if name == "num_tokens":
        return f"if not ({proper}):\n    {again}\n{found}"
    if axis.constant and not extra:
        return ""  # checked at the end, and only if it is another object than the constant
    if found:
        body = "\n".join(f"    {line}" for line in (extra, found) if line)
        return f"if {name} is None:\n    {unknown}\nelif {proper}:\n{body}\nelse:\n    {again}"
    body = f"\n    {extra}" if extra else ""
    return f"if {name} is not None:\n    if not ({proper}):\n        {again}{body}"


def _agreed(axes: list[Axis], again: str) -> str:
    """Statements that compare the fields on which all keys agree."""
    if not axes:
        return ""
    lines: list[str] = []
    for axis in axes:
        name, order, proper = axis.field.name, axis.order, _proper(axis)
        if proper and name != "uniform_query_len":
            lines.append(f"if {name} is not None and not ({proper}):\n    {again}")
        lines.append(
            f"if {name} != _only{order} and _leaf.order > {order}:\n    _leaf = _miss{order}"
        )
    another = " or ".join(f"{axis.field.name} is not _only{axis.order}" for axis in axes)
    return f"if {another}:\n" + _indent("\n".join(lines))
