"""What holds of every descriptor."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphshare.descriptor import BatchDescriptor, Match, capture_descriptors
from tests.property import descriptors as examples
from tests.property.descriptors import Rich, Richer, descriptors, fields, kinds

ANY_INT = st.none() | st.integers(-2, 9)


@given(kinds.flatmap(descriptors))
def test_covers_is_reflexive(key: BatchDescriptor) -> None:
    assert key.covers(key)


@st.composite
def _wider(draw: st.DrawFn, key: BatchDescriptor) -> BatchDescriptor:
    """A key with some of the constraints loosened."""
    wider = {name: getattr(key, name) for name in key.matching()}
    for name, match in key.matching().items():
        if not draw(st.booleans()):
            continue
        if match is Match.ANY:
            wider[name] = draw(st.sampled_from("xyz"))
        elif name == "num_tokens":
            wider[name] *= draw(st.integers(1, 3))
        elif match is Match.EXACT or wider[name] is None or draw(st.booleans()):
            wider[name] = None
        elif name not in ("num_reqs", "max_query_len"):
            wider[name] += draw(st.integers(0, 2))
        elif key.uniform_query_len is None:
            room = wider["num_tokens"] - wider[name]
            wider[name] += draw(st.integers(0, room))
    if wider["uniform_query_len"] is not None:
        wider["max_query_len"] = wider["uniform_query_len"]
    return type(key)(**wider)


@given(kinds.flatmap(descriptors), st.data())
def test_covers_is_transitive(small: BatchDescriptor, data: st.DataObject) -> None:
    middle = data.draw(_wider(small))
    large = data.draw(_wider(middle))
    assert middle.covers(small)
    assert large.covers(middle)
    assert large.covers(small)


@given(kinds.flatmap(lambda kind: st.lists(descriptors(kind, 4), min_size=3, max_size=8)))
def test_covers_is_transitive_in_any_set(keys: list[BatchDescriptor]) -> None:
    for large, middle, small in itertools.permutations(keys, 3):
        if large.covers(middle) and middle.covers(small):
            assert large.covers(small)


@given(kinds.flatmap(descriptors), st.data())
def test_covers_is_monotone_in_each_dimension(key: BatchDescriptor, data: st.DataObject) -> None:
    """Loosening any constraint loses no shape."""
    wider = data.draw(_wider(key))
    shape = data.draw(descriptors(type(key)))
    if key.covers(shape):
        assert wider.covers(shape)


@given(kinds.flatmap(lambda kind: st.tuples(*[descriptors(kind)] * 2)), st.data())
def test_covers_follows_the_rule_of_each_field(
    pair: tuple[BatchDescriptor, BatchDescriptor], data: st.DataObject
) -> None:
    """Against the design's sentence, written out without the class's own tables."""
    key, shape = pair
    ignored = {"tag"}
    bounds = {"num_tokens", "num_reqs", "max_query_len", "cap"}

    def admits(name: str) -> bool:
        mine, other = getattr(key, name), getattr(shape, name)
        if mine is None or name in ignored:
            return True
        if other is None:
            return False
        return mine >= other if name in bounds else mine == other

    assert key.covers(shape) == all(map(admits, key.matching()))


@given(kinds.flatmap(lambda kind: st.tuples(*[descriptors(kind, 4)] * 2)))
def test_a_key_that_covers_another_is_never_cheaper_and_no_two_cost_the_same(
    pair: tuple[BatchDescriptor, BatchDescriptor],
) -> None:
    one, other = pair
    assert (one.cost() == other.cost()) == (one == other)
    if one.covers(other) and not other.covers(one):
        assert other.cost() < one.cost()


@given(kinds.flatmap(lambda kind: st.tuples(*[descriptors(kind)] * 2)))
def test_cost_is_tokens_then_requests_then_constraints(
    pair: tuple[BatchDescriptor, BatchDescriptor],
) -> None:
    def stated(key: BatchDescriptor) -> tuple[float, float, int]:
        matching = key.matching()
        free = sum(
            getattr(key, name) is None for name in matching if matching[name] is not Match.ANY
        )
        return key.num_tokens, math.inf if key.num_reqs is None else key.num_reqs, free

    one, other = pair
    if stated(one) < stated(other):
        assert one.cost() < other.cost()


@given(kinds.flatmap(lambda kind: st.tuples(st.just(kind), fields(kind))), st.data())
def test_equal_keys_hash_equal_and_unequal_values_are_unequal(
    made: tuple[type[BatchDescriptor], dict[str, object]], data: st.DataObject
) -> None:
    kind, values = made
    one, again = kind(**values), kind(**values)
    assert one == again
    assert hash(one) == hash(again)
    assert len({one, again}) == 1
    other = data.draw(descriptors(kind))
    assert (one == other) == (dataclasses.astuple(one) == dataclasses.astuple(other))


@given(fields())
def test_a_subclass_never_equals_its_base(values: dict[str, int | None]) -> None:
    base, rich, richer = BatchDescriptor(**values), Rich(**values), Richer(**values)
    assert base != rich
    assert rich != base
    assert rich != richer
    assert len({base, rich, richer}) == 3


@given(kinds.flatmap(descriptors), st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_copies_are_equal(key: BatchDescriptor, protocol: int) -> None:
    for twin in (
        pickle.loads(pickle.dumps(key, protocol)),
        copy.copy(key),
        copy.deepcopy(key),
        dataclasses.replace(key),
        eval(repr(key), {**vars(examples)}),
    ):
        assert type(twin) is type(key)
        assert twin == key
        assert hash(twin) == hash(key)
        assert key.covers(twin)
        assert twin.covers(key)


@given(st.integers(-2, 9), ANY_INT, ANY_INT, ANY_INT, st.none() | st.integers(-2, 3), ANY_INT)
def test_impossible_shapes_are_refused_and_no_others(
    tokens: int,
    reqs: int | None,
    uniform: int | None,
    longest: int | None,
    loras: int | None,
    ubatches: int | None,
) -> None:
    """A shape is possible exactly if padding can make some batch into it."""

    def at_least(value: int | None, least: int) -> bool:
        return value is None or value >= least

    possible = (
        all(at_least(value, 1) for value in (tokens, reqs, uniform, longest, ubatches))
        and at_least(loras, 0)
        and (reqs is None or reqs <= tokens)
        and (longest is None or longest <= tokens)
        and (
            uniform is None
            or (
                tokens % uniform == 0
                and longest in (None, uniform)
                and (reqs is None or reqs * uniform <= tokens)
            )
        )
    )
    arguments = (tokens, reqs, uniform, longest, loras, ubatches)
    if not possible:
        with pytest.raises(ValueError, match="expected"):
            BatchDescriptor(*arguments)
    else:
        key = BatchDescriptor(*arguments)
        assert key.max_query_len == (longest if uniform is None else uniform)


@given(
    st.lists(st.integers(1, 40), min_size=1),
    st.integers(1, 12),
    st.lists(st.integers(1, 6), max_size=3),
    st.lists(st.integers(0, 2), min_size=1, max_size=2),
)
def test_capture_descriptors_cover_their_range(
    sizes: list[int], max_num_reqs: int, lengths: list[int], loras: list[int]
) -> None:
    """Every batch up to the largest size and ``max_num_reqs`` is covered, the uniform by theirs."""
    keys = capture_descriptors(sizes, max_num_reqs, lengths, num_active_loras=loras)
    assert len(set(keys)) == len(keys)
    assert keys == sorted(keys, key=BatchDescriptor.cost, reverse=True)
    assert all(key.num_reqs is not None and key.num_reqs <= max_num_reqs for key in keys)
    for lora in loras:
        for reqs in range(1, max_num_reqs + 1):
            if reqs <= max(sizes):
                shape = BatchDescriptor(max(sizes), reqs, num_active_loras=lora)
                assert any(key.covers(shape) for key in keys)
            for length in lengths:
                if reqs * length <= max(sizes):
                    shape = BatchDescriptor(reqs * length, reqs, length, num_active_loras=lora)
                    fitting = [key for key in keys if key.covers(shape)]
                    assert any(key.uniform_query_len == length for key in fitting)
