"""Descriptors and shapes small enough that keys often cover them, and often do not."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from graphshare.descriptor import BatchDescriptor, anything, bound, exact
from graphshare.testing import strategies


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


def fields(
    kind: type[BatchDescriptor] = BatchDescriptor, most: int = 12
) -> st.SearchStrategy[dict[str, Any]]:
    """The fields of a possible descriptor, some left out."""
    return strategies.descriptor_fields(kind, max_tokens=most, extra=_EXTRA)


def descriptors(
    kind: type[BatchDescriptor] = BatchDescriptor, most: int = 12
) -> st.SearchStrategy[BatchDescriptor]:
    return strategies.descriptors(kind, max_tokens=most, extra=_EXTRA)


kinds = st.sampled_from(TYPES)
