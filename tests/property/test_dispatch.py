"""Dispatch against a search over all keys."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from graphshare.descriptor import BatchDescriptor, Match, capture_descriptors
from graphshare.dispatch import Dispatcher, tables
from tests.property.descriptors import descriptors, fields, kinds


def least_padding(keys: list[Any], shape: Any) -> Any:
    fitting = [key for key in keys if key.covers(shape)]
    return min(fitting, key=lambda key: key.cost(), default=None)


def admits(match: Match, mine: Any, value: Any) -> bool:
    if mine is None:
        return True
    if value is None:
        return False
    return mine >= value if match is Match.BOUND else mine == value


def why_none(keys: list[BatchDescriptor], shape: BatchDescriptor) -> str:
    """The first field, in order of declaration, with which no key is left."""
    if not keys:
        return "no_keys"
    left = keys
    for name, match in shape.matching().items():
        value = getattr(shape, name)
        if match is not Match.ANY:
            left = [key for key in left if admits(match, getattr(key, name), value)]
        if not left:
            return name
    raise AssertionError("some key covers the shape")


@st.composite
def keys_and_shapes(draw: st.DrawFn) -> tuple[list[BatchDescriptor], list[dict[str, Any]]]:
    kind = draw(kinds)
    keys = draw(st.lists(descriptors(kind), min_size=1, max_size=12))
    return keys, draw(st.lists(fields(kind, most=14), min_size=1, max_size=12))


@given(keys_and_shapes(), st.booleans(), st.booleans(), st.randoms())
def test_dispatch_is_the_search_for_least_padding(
    made: tuple[list[BatchDescriptor], list[dict[str, Any]]],
    crowded: bool,
    huge: bool,
    random: Any,
) -> None:
    """The same key object by fields and by shape, whatever the order of capture; misses counted.

    Tables and bit sets, values looked up in lists and by bisection: all four ways.
    """
    keys, shapes = made
    kind = type(keys[0])
    shuffled = random.sample(keys, len(keys))
    with (
        mock.patch.object(tables, "MAX_CELLS", 0 if crowded else tables.MAX_CELLS),
        mock.patch.object(tables, "MAX_INDEXED", 2 if huge else tables.MAX_INDEXED),
        mock.patch("graphshare.dispatch.source.MAX_INDEXED", 2 if huge else tables.MAX_INDEXED),
    ):
        dispatcher, other = Dispatcher(keys), Dispatcher(shuffled)
    hits: Counter[BatchDescriptor] = Counter()
    misses: Counter[str] = Counter()
    for values in shapes:
        shape = kind(**values)
        expected = least_padding(keys, shape)
        found = dispatcher.dispatch(**values)
        assert found == expected
        assert dispatcher.dispatch(shape) is found
        assert other.dispatch(**values) == expected
        if expected is None:
            misses[why_none(keys, shape)] += 2
        else:
            assert any(found is key for key in keys)
            hits[expected] += 2
    assert dispatcher.hits == {key: hits[key] for key in keys}
    assert dispatcher.misses == misses
    carried = Dispatcher(keys[1:], carry=dispatcher)
    assert {key: count for key, count in carried.hits.items() if count} == dict(hits)
    assert carried.misses == misses


@given(keys_and_shapes())
def test_searched_keys_give_the_same_answer(
    made: tuple[list[BatchDescriptor], list[dict[str, Any]]],
) -> None:
    """``covers`` and ``cost`` given from outside are searched; so are foreign keys."""
    keys, shapes = made
    kind = type(keys[0])
    table = Dispatcher(keys)
    searched = Dispatcher(keys, covers=kind.covers, cost=kind.cost)
    for values in shapes * 2:  # the second time from memory
        assert searched.dispatch(**values) == table.dispatch(**values)
        assert searched.dispatch(kind(**values)) == table.dispatch(kind(**values))
    assert searched.hits == table.hits
    assert sum(searched.misses.values()) == sum(table.misses.values())


@dataclasses.dataclass(frozen=True)
class Foreign:
    """A key type of another library."""

    tokens: int
    causal: bool = True

    def covers(self, shape: Foreign) -> bool:
        return self.causal == shape.causal and self.tokens >= shape.tokens


class Priced(Foreign):
    def cost(self) -> int:
        return self.tokens


@given(
    st.sampled_from([Foreign, Priced]),
    st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, unique=True),
    st.lists(st.tuples(st.integers(1, 10), st.booleans())),
    st.randoms(),
)
def test_foreign_keys_by_their_own_covers(
    kind: type[Foreign], sizes: list[tuple[int, bool]], asked: list[tuple[int, bool]], random: Any
) -> None:
    keys = [kind(*size) for size in sizes]
    dispatcher = Dispatcher(keys)
    other = Dispatcher(random.sample(keys, len(keys)))
    missed = 0
    for size in asked:
        shape = kind(*size)
        fitting = [key for key in keys if key.covers(shape)]
        expected = min(fitting, key=lambda key: key.tokens, default=None)
        assert dispatcher.dispatch(shape) == expected
        assert other.dispatch(shape) == expected
        missed += expected is None
    assert dispatcher.misses == ({"not_covered": missed} if missed else {})


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.integers(1, 8),
    st.lists(st.integers(1, 5), max_size=2),
)
def test_every_captured_range_is_total(
    sizes: list[int], max_num_reqs: int, lengths: list[int]
) -> None:
    """Incident 7 (vLLM PR 36165, issue 53407): no batch in the range falls to eager."""
    dispatcher = Dispatcher(capture_descriptors(sizes, max_num_reqs, lengths))
    for num_tokens in range(1, max(sizes) + 1):
        for num_reqs in range(1, min(max_num_reqs, num_tokens) + 1):
            assert dispatcher.dispatch(num_tokens=num_tokens, num_reqs=num_reqs) is not None
            for length in lengths:
                if num_reqs * length == num_tokens:
                    key = dispatcher.dispatch(
                        num_tokens=num_tokens, num_reqs=num_reqs, uniform_query_len=length
                    )
                    assert key is not None
    assert dispatcher.misses == {}
