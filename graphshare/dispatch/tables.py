"""Descriptors of one type, laid out so that finding the key for a batch takes constant time.

Every field on which the keys differ is an axis, every value that they hold a place on it. Nested
lists, one level for each axis, name for every combination of places the cheapest key that covers
it, or why none does. A dispatch looks up one place for each axis and follows them down: no search
over keys, no object built. The function is generated for the keys at hand, as :mod:`dataclasses`
generates ``__init__``, so that a field on which they agree costs one comparison.

Combinations that the same keys cover share their lists, so the lists stay small for the keys that
engines capture. They are bounded nevertheless (:data:`MAX_CELLS`): keys with hundreds of unrelated
values in three or more fields are told apart by bit sets instead. A place is then the set of keys
that the value admits, and a dispatch intersects the sets, in time that grows by a machine word for
every 30 keys and memory that grows with keys times distinct values.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

from graphshare.descriptor import BatchDescriptor, Match
from graphshare.dispatch.leaf import Leaf
from graphshare.dispatch.source import MAX_INDEXED, Axis, dispatch_source

__all__ = ["tabulate"]

MAX_CELLS = 1 << 18
"""List elements that the tables of one dispatcher may have, 8 bytes each."""


def _axes(kind: type[BatchDescriptor], keys: Sequence[BatchDescriptor]) -> list[Axis]:
    axes: list[Axis] = []
    for order, field in enumerate(kind._fields):
        column = [key._values[order] for key in keys]
        if field.match is Match.ANY:
            column = [None]
        values = list(dict.fromkeys(value for value in column if value is not None))
        if field.match is Match.BOUND:
            values.sort()
        axes.append(Axis(field, order, values, None in column))
    return axes


def tabulate(
    kind: type[BatchDescriptor], keys: list[BatchDescriptor]
) -> tuple[Callable[..., Any], list[Leaf]]:
    """The dispatch function for keys of one type, and its leaves.

    Args:
        kind: The keys' type.
        keys: The keys, cheapest first, no two equal, at least one.
    """
    axes = _axes(kind, keys)
    misses = [Leaf(None, axis.field.name, axis.order) for axis in axes]
    hits = [Leaf(key, "", len(axes)) for key in keys]
    tabled = [axis for axis in axes if axis.tabled]
    sets = [_bit_sets(axis, keys) for axis in tabled]
    unsatisfied = [misses[axis.order] for axis in tabled]
    places = [f"_at{axis.order}" for axis in tabled]
    names: dict[str, Any] = {}
    table = _table(sets, unsatisfied, hits)
    if table is not None:
        names["_cells"] = table
        combine = f"_leaf = _cells[{']['.join(places)}]"
        for axis, admitted in zip(tabled, sets, strict=True):
            names |= _places(axis, list(range(len(admitted))))
    else:
        names["_hits"] = hits
        combine = "_left = -1\n"
        for axis in tabled:
            combine += (
                f"if not (_left := _left & _at{axis.order}):\n    _leaf = _miss{axis.order}\nel"
            )
        combine += "se:\n    _leaf = _hits[(_left & -_left).bit_length() - 1]"
        for axis, admitted in zip(tabled, sets, strict=True):
            names |= _places(axis, admitted)
    for axis in axes:
        names[f"_miss{axis.order}"] = misses[axis.order]
        if axis.constant:
            names[f"_only{axis.order}"] = axis.values[0]
        if axis.field.default is not dataclasses.MISSING:
            names[f"_default{axis.order}"] = axis.field.default
    names |= {"_type": kind, "_bisect": bisect_left, "_int": int, "_TypeError": TypeError}
    scope: dict[str, Any] = {}
    exec(dispatch_source(axes, combine, names), scope)
    dispatch = scope["_make"](**names)
    dispatch.__name__ = dispatch.__qualname__ = "dispatch"
    return dispatch, [*misses, *hits]


def _places(axis: Axis, places: list[Any]) -> dict[str, Any]:
    """What the generated function looks an axis's place up in; the last place is for the rest."""
    order = axis.order
    names: dict[str, Any] = {f"_rest{order}": places[-1]}
    if axis.field.match is Match.EXACT:
        names[f"_of{order}"] = dict(zip(axis.values, places, strict=False))
    elif axis.values[-1] <= MAX_INDEXED:
        listed: list[Any] = []
        for value, place in zip(axis.values, places, strict=False):
            listed += [place] * (value + 1 - len(listed))
        names[f"_of{order}"] = listed
    else:
        names[f"_of{order}"] = places
        names[f"_values{order}"] = axis.values
    return names


def _bit_sets(axis: Axis, keys: Sequence[BatchDescriptor]) -> list[int]:
    """For every place on the axis the set of keys that it admits; bit 0 is the cheapest key."""
    free, setting = 0, dict.fromkeys(axis.values, 0)
    for index, key in enumerate(keys):
        value = key._values[axis.order]
        if value is None:
            free |= 1 << index
        else:
            setting[value] |= 1 << index
    places = [free]
    for value in reversed(axis.values):
        admitted = places[-1] if axis.field.match is Match.BOUND else free
        places.append(admitted | setting[value])
    return [*reversed(places[1:]), free]


def _table(
    sets: Sequence[Sequence[int]], misses: Sequence[Leaf], hits: Sequence[Leaf]
) -> list[Any] | None:
    """Nested lists, one level for each axis, whose innermost elements are the leaves.

    Where the same keys are left, the same list is used. ``None`` if that takes too many cells.
    """
    last = len(sets) - 1
    known: list[dict[int, list[Any]]] = [{} for _ in sets]
    cells = 0
    nothing: list[Any] = []  # for a miss at each level, the lists of the levels below it
    for depth, miss in enumerate(misses):
        rest: Any = miss
        for below in reversed(sets[depth + 1 :]):
            rest = [rest] * len(below)
        nothing.append(rest)

    def fill(depth: int, left: int) -> list[Any]:
        nonlocal cells
        cells += len(sets[depth])
        if cells > MAX_CELLS:
            raise _TooLargeError
        row: list[Any] = []
        before = -1
        for place in sets[depth]:
            now = left & place
            if now == before:
                row.append(row[-1])
            elif not now:
                row.append(nothing[depth])
            elif depth == last:
                row.append(hits[(now & -now).bit_length() - 1])
            else:
                below = known[depth + 1].get(now)
                row.append(fill(depth + 1, now) if below is None else below)
            before = now
        known[depth][left] = row
        return row

    try:
        return fill(0, (1 << len(hits)) - 1)
    except _TooLargeError:
        return None


class _TooLargeError(Exception):
    pass
