"""Descriptors, sets of keys, and what a key covers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from hypothesis import strategies as st

from graphshare.arguments import whole_number, wrong_type
from graphshare.descriptor import BatchDescriptor, Match

__all__ = ["Requests", "batches", "descriptor_fields", "descriptors", "key_sets", "shapes"]

_D = TypeVar("_D", bound=BatchDescriptor)
_BASE = frozenset(BatchDescriptor.matching())
_Extra = Mapping[str, st.SearchStrategy[Any]]


@st.composite
def descriptor_fields(
    draw: st.DrawFn,
    kind: type[BatchDescriptor] = BatchDescriptor,
    *,
    max_tokens: int = 12,
    extra: _Extra | None = None,
) -> dict[str, Any]:
    """The fields of a possible descriptor, by name; some are left out.

    Args:
        draw: Hypothesis's.
        kind: The descriptor type.
        max_tokens: Most tokens. Small, so that keys often cover shapes, and often do not.
        extra: What the fields of a subclass may hold, by name. A bound that is not named holds
            ``None`` or a few; any other field that is not named keeps its default.

    Raises:
        TypeError: ``kind`` is no type of descriptors, or a number no integer.
        ValueError: ``max_tokens`` is below 1.
    """
    if not (isinstance(kind, type) and issubclass(kind, BatchDescriptor)):
        raise wrong_type("kind", "BatchDescriptor or a subclass", kind)
    max_tokens = whole_number("max_tokens", max_tokens, 1)
    num_tokens = draw(st.integers(1, max_tokens))
    drawn: dict[str, Any] = {"num_tokens": num_tokens}
    uniform = draw(st.none() | st.integers(1, 4))
    if uniform is not None and num_tokens % uniform == 0:
        drawn["uniform_query_len"] = uniform
        if draw(st.booleans()):
            drawn["max_query_len"] = uniform
    elif draw(st.booleans()):
        drawn["max_query_len"] = draw(st.none() | st.integers(1, num_tokens))
    if draw(st.booleans()):
        most = num_tokens // drawn.get("uniform_query_len", 1)
        drawn["num_reqs"] = draw(st.none() | st.integers(1, most))
    if draw(st.booleans()):
        drawn["num_active_loras"] = draw(st.none() | st.integers(0, 2))
    if draw(st.booleans()):
        drawn["num_ubatches"] = draw(st.none() | st.integers(1, 2))
    named = extra or {}
    for name, match in kind.matching().items():
        if name in _BASE or not (name in named or match is Match.BOUND):
            continue
        if draw(st.booleans()):
            drawn[name] = draw(named.get(name, st.none() | st.integers(0, 3)))
    return drawn


def descriptors(
    kind: type[_D] = BatchDescriptor,
    *,
    max_tokens: int = 12,
    extra: _Extra | None = None,
) -> st.SearchStrategy[_D]:
    """Possible descriptors, as keys or as shapes.

    Args:
        kind: The descriptor type.
        max_tokens: Most tokens.
        extra: As :func:`descriptor_fields`.
    """
    fields = descriptor_fields(kind, max_tokens=max_tokens, extra=extra)
    return fields.map(lambda drawn: kind(**drawn))


def key_sets(
    kind: type[_D] = BatchDescriptor,
    *,
    max_size: int = 8,
    max_tokens: int = 12,
    extra: _Extra | None = None,
) -> st.SearchStrategy[list[_D]]:
    """Keys to capture together: of one type, no two equal, in any order.

    Args:
        kind: The descriptor type.
        max_size: Most keys; at least one.
        max_tokens: Most tokens of a key.
        extra: As :func:`descriptor_fields`.

    Raises:
        TypeError: ``max_size`` is no integer.
        ValueError: ``max_size`` is below 1.
    """
    max_size = whole_number("max_size", max_size, 1)
    every = descriptors(kind, max_tokens=max_tokens, extra=extra)
    return st.lists(every, min_size=1, max_size=max_size, unique=True)


class Requests(NamedTuple):
    """A batch, as far as a key is concerned.

    Attributes:
        query_lens: Tokens of each request in this step.
        seq_lens: Tokens of each request in the cache after it, at least as many.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests."""
        return sum(self.query_lens)

    @property
    def num_reqs(self) -> int:
        """Requests."""
        return len(self.query_lens)

    @property
    def max_query_len(self) -> int:
        """The longest query."""
        return max(self.query_lens)

    @property
    def uniform_query_len(self) -> int | None:
        """The query length, if all have the same."""
        lengths = set(self.query_lens)
        return lengths.pop() if len(lengths) == 1 else None


@st.composite
def batches(draw: st.DrawFn, key: BatchDescriptor, *, max_seq_len: int = 64) -> Requests:
    """Batches that a key covers; LoRA adapters and microbatches aside, a batch has any number.

    Args:
        draw: Hypothesis's.
        key: The key.
        max_seq_len: Most tokens of a request in the cache.

    Raises:
        TypeError: ``key`` is no descriptor, or ``max_seq_len`` no integer.
        ValueError: The key's only queries are longer than ``max_seq_len``.
    """
    _check_key(key)
    max_seq_len = whole_number("max_seq_len", max_seq_len, 1)
    uniform = key.uniform_query_len
    least = uniform or 1
    if least > max_seq_len:
        raise ValueError(f"max_seq_len: expected at least {least} for {key}, got {max_seq_len}")
    most = min(key.max_query_len or key.num_tokens, max_seq_len)
    room = key.num_tokens
    lengths: list[int] = []
    # At least one request; a key always has room for that.
    for _ in range(draw(st.integers(1, min(key.num_reqs or room, room // least)))):
        if room < least:
            break
        length = uniform or draw(st.integers(1, min(most, room)))
        lengths.append(length)
        room -= length
    cached = [draw(st.integers(length, max_seq_len)) for length in lengths]
    return Requests(tuple(lengths), tuple(cached))


@st.composite
def shapes(draw: st.DrawFn, key: _D) -> _D:
    """Shapes that a key covers, of its type.

    Args:
        draw: Hypothesis's.
        key: The key.

    Raises:
        TypeError: ``key`` is no descriptor.
    """
    _check_key(key)
    batch = draw(batches(key, max_seq_len=key.num_tokens))
    fields: dict[str, Any] = {"num_tokens": batch.num_tokens}
    # What a key leaves open a shape may say, or may not.
    if key.num_reqs is not None or draw(st.booleans()):
        fields["num_reqs"] = batch.num_reqs
    if key.uniform_query_len is not None or draw(st.booleans()):
        fields["uniform_query_len"] = batch.uniform_query_len
    if key.max_query_len is not None or draw(st.booleans()):
        fields["max_query_len"] = batch.max_query_len
    for name, match in key.matching().items():
        if name in ("num_tokens", "num_reqs", "uniform_query_len", "max_query_len"):
            continue
        value = getattr(key, name)
        if match is Match.BOUND and value is not None:
            value = draw(st.integers(0, value))
        fields[name] = value
    return type(key)(**fields)


def _check_key(key: Any) -> None:
    if not isinstance(key, BatchDescriptor):
        raise wrong_type("key", "a BatchDescriptor", key)
