"""Descriptors and shapes small enough that keys often cover them, and often do not."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from graphshare.descriptor import BatchDescriptor, anything, bound, exact


class Rich(BatchDescriptor):
    """Every kind of match on a field of its own."""

    beam: int | None = exact(default=1)
    mode: str | None = exact(default=None)
    cap: int | None = bound(default=None)
    tag: str = anything(default="")


class Richer(Rich):
    """A subclass of a subclass, with names that a generated function might trip over."""

    dispatch: int | None = exact(default=None)
    int: bool = exact(default=False)


TYPES = (BatchDescriptor, Rich, Richer)

_EXTRA: dict[str, st.SearchStrategy[Any]] = {
    "beam": st.none() | st.integers(0, 2),
    "mode": st.none() | st.sampled_from("ab"),
    "cap": st.none() | st.integers(0, 3),
    "tag": st.sampled_from("xy"),
    "dispatch": st.none() | st.integers(0, 1),
    "int": st.booleans(),
}


@st.composite
def fields(
    draw: st.DrawFn, kind: type[BatchDescriptor] = BatchDescriptor, most: int = 12
) -> dict[str, Any]:
    """The fields of a possible descriptor, some left out."""
    num_tokens = draw(st.integers(1, most))
    values: dict[str, Any] = {"num_tokens": num_tokens}
    uniform = draw(st.none() | st.integers(1, 4))
    if uniform is not None and num_tokens % uniform == 0:
        values["uniform_query_len"] = uniform
        if draw(st.booleans()):
            values["max_query_len"] = uniform
    elif draw(st.booleans()):
        values["max_query_len"] = draw(st.none() | st.integers(1, num_tokens))
    if draw(st.booleans()):
        most_reqs = num_tokens // values.get("uniform_query_len", 1)
        values["num_reqs"] = draw(st.none() | st.integers(1, most_reqs))
    if draw(st.booleans()):
        values["num_active_loras"] = draw(st.none() | st.integers(0, 2))
    if draw(st.booleans()):
        values["num_ubatches"] = draw(st.none() | st.integers(1, 2))
    for name in kind.matching():
        if name in _EXTRA and draw(st.booleans()):
            values[name] = draw(_EXTRA[name])
    return values


def descriptors(
    kind: type[BatchDescriptor] = BatchDescriptor, most: int = 12
) -> st.SearchStrategy[BatchDescriptor]:
    return fields(kind, most).map(lambda values: kind(**values))


kinds = st.sampled_from(TYPES)
