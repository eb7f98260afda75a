"""Dispatch: examples, and what is refused."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import pytest

from graphshare.descriptor import (
    BatchDescriptor,
    anything,
    bound,
    capture_descriptors,
    exact,
)
from graphshare.dispatch import Dispatcher


def test_the_example_of_the_design() -> None:
    keys = capture_descriptors(num_tokens=[1, 2, 4, 8, 16], max_num_reqs=8, uniform_query_lens=[4])
    dispatch = Dispatcher(keys).dispatch
    assert dispatch(num_tokens=13, num_reqs=4) == BatchDescriptor(16, 8)
    uniform = dispatch(num_tokens=12, num_reqs=3, uniform_query_len=4)
    assert uniform == BatchDescriptor(16, 4, 4)
    assert dispatch(num_tokens=17, num_reqs=4) is None


def test_mixed_sizes_hit() -> None:
    """Incident 7 (vLLM PR 36165, issue 53407): sizes that a uniform length does not divide.

    Rounding them to multiples of the query length must not lose the mixed keys between.
    """
    keys = capture_descriptors([1, 2, 4, 8, 16, 24], max_num_reqs=24, uniform_query_lens=[3])
    dispatcher = Dispatcher(keys)
    for num_tokens in range(1, 25):
        for num_reqs in range(1, num_tokens + 1):
            key = dispatcher.dispatch(num_tokens=num_tokens, num_reqs=num_reqs)
            assert key is not None
            assert key.uniform_query_len is None
            assert key.num_tokens < 2 * num_tokens
    for num_tokens in range(3, 25, 3):
        key = dispatcher.dispatch(
            num_tokens=num_tokens, num_reqs=num_tokens // 3, uniform_query_len=3
        )
        assert key is not None
        # 12 and 15 tokens fit the mixed 16 with less padding than the uniform 18.
        assert key.uniform_query_len == (None if num_tokens in (12, 15) else 3)
    assert dispatcher.misses == {}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_tokens": 17}, "num_tokens"),
        ({"num_tokens": 8}, "num_reqs"),
        ({"num_tokens": 16, "num_reqs": 9}, "num_reqs"),
        ({"num_tokens": 8, "num_reqs": 2, "num_active_loras": 1}, "num_active_loras"),
        ({"num_tokens": 8, "num_reqs": 2, "num_active_loras": None}, "num_active_loras"),
        ({"num_tokens": 8, "num_reqs": 2, "num_ubatches": 2}, "num_ubatches"),
        ({"num_tokens": 17, "num_ubatches": 2}, "num_tokens"),
    ],
)
def test_misses_are_counted_by_the_field_that_no_key_satisfies(
    fields: dict[str, Any], reason: str
) -> None:
    dispatcher = Dispatcher(capture_descriptors([8, 16], max_num_reqs=8))
    assert dispatcher.dispatch(**fields) is None
    assert dispatcher.misses == {reason: 1}


class Tagged(BatchDescriptor):
    tag: str = anything(default="")
    width: int = bound(default=1)


@pytest.mark.parametrize(
    ("keys", "fields", "chosen"),
    [
        ([BatchDescriptor(8, 4), BatchDescriptor(8)], {"num_tokens": 8, "num_reqs": 4}, 0),
        (  # the most constrained of two that pad alike
            [BatchDescriptor(8, 4, 2), BatchDescriptor(8, 4)],
            {"num_tokens": 8, "num_reqs": 4, "uniform_query_len": 2},
            0,
        ),
        ([Tagged(8, tag="a"), Tagged(8, tag="b")], {"num_tokens": 8}, 0),
        ([Tagged(8, tag="b", width=2), Tagged(8, tag="a", width=4)], {"num_tokens": 8}, 0),
        (  # an exact field is no bound, in either direction
            [BatchDescriptor(4, num_active_loras=1), BatchDescriptor(8, num_active_loras=2)],
            {"num_tokens": 6, "num_active_loras": 1},
            None,
        ),
        (
            [BatchDescriptor(8, num_active_loras=1), BatchDescriptor(4, num_active_loras=2)],
            {"num_tokens": 6, "num_active_loras": 2},
            None,
        ),
    ],
    ids=["requests", "constrained", "free", "bound before free", "exact up", "exact down"],
)
@pytest.mark.parametrize("tables", ["lists", "bit sets"])
def test_the_choice_does_not_depend_on_the_order_of_capture(
    monkeypatch: pytest.MonkeyPatch,
    keys: list[BatchDescriptor],
    fields: dict[str, Any],
    chosen: int | None,
    tables: str,
) -> None:
    if tables == "bit sets":
        monkeypatch.setattr("graphshare.dispatch.tables.MAX_CELLS", 0)
    expected = None if chosen is None else keys[chosen]
    for held in (keys, keys[::-1]):
        assert Dispatcher(held).dispatch(**fields) == expected


def test_counts_go_on() -> None:
    keys = [BatchDescriptor(8), BatchDescriptor(4)]
    first = Dispatcher(keys)
    first.dispatch(num_tokens=8)
    first.dispatch(num_tokens=9)
    second = Dispatcher(keys[:1], carry=first)
    second.dispatch(num_tokens=4)
    second.dispatch(num_tokens=9)
    assert second.hits == {keys[0]: 2, keys[1]: 0}
    assert second.misses == {"num_tokens": 2}


def test_no_keys() -> None:
    dispatcher: Dispatcher[BatchDescriptor] = Dispatcher([])
    assert dispatcher.dispatch(num_tokens=8, whatever=3) is None
    assert dispatcher.dispatch(BatchDescriptor(8)) is None
    assert dispatcher.misses == {"no_keys": 2}
    assert dispatcher.hits == {}
    assert dispatcher.nearest(BatchDescriptor(8)) == ()


SETS = [
    pytest.param([BatchDescriptor(8)], id="one"),
    pytest.param(capture_descriptors([4, 8], 8, [2, 4]), id="some"),
    pytest.param(capture_descriptors([4, 8], 8, [4], num_active_loras=[0, 1]), id="loras"),
    pytest.param([BatchDescriptor(8, None, 4)], id="uniform"),
    pytest.param([BatchDescriptor(100_000, 90_000), BatchDescriptor(8, 4)], id="large"),
]


@pytest.mark.parametrize("keys", SETS)
@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({}, TypeError),
        ({"num_tokens": None}, TypeError),
        ({"num_tokens": True}, TypeError),
        ({"num_tokens": 8.0}, TypeError),
        ({"num_tokens": "8"}, TypeError),
        ({"num_tokens": 8, "unknown": 1}, TypeError),
        ({"num_tokens": 8, "num_reqs": True}, TypeError),
        ({"num_tokens": 8, "num_reqs": 2.0}, TypeError),
        ({"num_tokens": 8, "uniform_query_len": 4.0}, TypeError),
        ({"num_tokens": 8, "max_query_len": 4.0}, TypeError),
        ({"num_tokens": 8, "num_active_loras": False}, TypeError),
        ({"num_tokens": 8, "num_active_loras": "x"}, TypeError),
        ({"num_tokens": 8, "num_ubatches": 1.0}, TypeError),
        ({"num_tokens": 0}, ValueError),
        ({"num_tokens": -1}, ValueError),
        ({"num_tokens": 8, "num_reqs": 0}, ValueError),
        ({"num_tokens": 8, "num_reqs": -1}, ValueError),
        ({"num_tokens": 8, "num_reqs": 9}, ValueError),
        ({"num_tokens": 8, "uniform_query_len": 0}, ValueError),
        ({"num_tokens": 8, "uniform_query_len": 3}, ValueError),
        ({"num_tokens": 8, "uniform_query_len": 4, "max_query_len": 5}, ValueError),
        ({"num_tokens": 8, "uniform_query_len": 4, "num_reqs": 3}, ValueError),
        ({"num_tokens": 8, "max_query_len": 9}, ValueError),
        ({"num_tokens": 8, "max_query_len": -1}, ValueError),
        ({"num_tokens": 8, "num_active_loras": -1}, ValueError),
        ({"num_tokens": 8, "num_ubatches": 0}, ValueError),
    ],
)
def test_impossible_arguments_are_refused_and_not_counted(
    keys: list[BatchDescriptor], fields: dict[str, Any], error: type[Exception]
) -> None:
    dispatcher = Dispatcher(keys)
    with pytest.raises(error):
        dispatcher.dispatch(**fields)
    assert dispatcher.misses == {}
    assert not any(dispatcher.hits.values())


@pytest.mark.parametrize("keys", SETS)
def test_integers_of_other_types_are_taken(keys: list[BatchDescriptor]) -> None:
    numpy = pytest.importorskip("numpy")
    dispatcher = Dispatcher(keys)
    plain = {"num_tokens": 8, "num_reqs": 2, "uniform_query_len": 4, "num_active_loras": 0}
    expected = dispatcher.dispatch(**plain)
    assert expected is not None
    for kind in (numpy.int32, numpy.uint8, numpy.int64):
        fields = {name: kind(value) for name, value in plain.items()}
        assert dispatcher.dispatch(**fields) is expected
    assert sum(dispatcher.hits.values()) == 4


class Beam(BatchDescriptor):
    beam_width: int | None = exact(default=1)


@pytest.mark.parametrize("shape", [Beam(8), 8, (8,), "eight"])
def test_a_shape_of_another_type_is_refused(shape: Any) -> None:
    dispatcher = Dispatcher([BatchDescriptor(8)])
    with pytest.raises(TypeError):
        dispatcher.dispatch(shape)
    with pytest.raises(TypeError):
        dispatcher.dispatch(BatchDescriptor(8), num_tokens=8)
    with pytest.raises(TypeError):
        dispatcher.dispatch(BatchDescriptor(8), num_reqs=8)


def test_a_field_of_a_subclass_has_its_default() -> None:
    dispatch = Dispatcher([Beam(8), Beam(8, beam_width=2)]).dispatch
    assert dispatch(num_tokens=5) == Beam(8)
    assert dispatch(num_tokens=5, beam_width=2) == Beam(8, beam_width=2)
    assert dispatch(num_tokens=5, beam_width=3) is None
    with pytest.raises(TypeError):
        dispatch(num_tokens=5, beam_width=[])


def test_descriptors_of_several_types_do_not_mix() -> None:
    with pytest.raises(TypeError):
        Dispatcher([BatchDescriptor(8), Beam(8)])
    with pytest.raises(TypeError):
        Dispatcher([BatchDescriptor(8), (8,)])


def test_a_subclass_with_a_cover_of_its_own_is_asked() -> None:
    class Exactly(BatchDescriptor):
        def covers(self, shape: Any) -> bool:
            return self == shape

    dispatcher = Dispatcher([Exactly(8), Exactly(4)])
    assert dispatcher.dispatch(num_tokens=4) == Exactly(4)
    assert dispatcher.dispatch(Exactly(8)) == Exactly(8)
    assert dispatcher.dispatch(num_tokens=5) is None
    assert dispatcher.misses == {"not_covered": 1}


def test_keys_that_say_nothing_can_be_held_but_not_dispatched() -> None:
    dispatcher = Dispatcher([4, 8])
    with pytest.raises(TypeError):
        dispatcher.dispatch(3)
    assert dispatcher.nearest(5, 1) in ((4,), (8,))
    with pytest.raises(TypeError):
        dispatcher.dispatch(num_tokens=3)


def test_foreign_keys_by_functions() -> None:
    dispatcher = Dispatcher([8, 2, 4], covers=lambda key, shape: key >= shape, cost=int)
    assert [dispatcher.dispatch(n) for n in (1, 2, 3, 8, 9)] == [2, 2, 4, 8, None]
    assert dispatcher.hits == {2: 2, 4: 1, 8: 1}
    assert dispatcher.misses == {"not_covered": 1}


def test_foreign_shapes_need_not_be_hashable() -> None:
    dispatcher = Dispatcher([8, 4], covers=lambda key, shape: key >= len(shape), cost=int)
    assert dispatcher.dispatch([0] * 3) == 4
    assert dispatcher.dispatch([0] * 9) is None


def test_a_shape_that_changes_is_asked_anew() -> None:
    """A shape that is hashed by identity must not be answered from memory."""

    class Batch:
        size = 3

    dispatcher = Dispatcher([8, 4], covers=lambda key, shape: key >= shape.size, cost=int)
    batch = Batch()
    assert dispatcher.dispatch(batch) == 4
    batch.size = 7
    assert dispatcher.dispatch(batch) == 8


def test_equal_shapes_of_different_types_are_different_shapes() -> None:
    def covers(key: int, shape: Any) -> bool:
        return not isinstance(shape, bool) and key >= shape

    dispatcher = Dispatcher([8], covers=covers, cost=int)
    assert dispatcher.dispatch(1) == 8
    assert dispatcher.dispatch(True) is None


def test_memory_of_foreign_shapes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphshare.dispatch.search.MAX_REMEMBERED", 4)
    asked: list[int] = []

    def covers(key: int, shape: int) -> bool:
        asked.append(shape)
        return key >= shape

    dispatcher = Dispatcher([100], covers=covers, cost=int)
    for shape in [*range(20), *range(18, 20)]:
        assert dispatcher.dispatch(shape) == 100
    assert asked == [*range(20)]  # the last two were remembered
    for shape in range(20):
        dispatcher.dispatch(shape)
    assert len(asked) > 30


def test_nearest_keys() -> None:
    keys = capture_descriptors([1, 2, 4, 8, 16], 16)
    dispatcher = Dispatcher(keys)
    assert dispatcher.nearest(BatchDescriptor(8, 8, num_active_loras=1), 1) == (
        BatchDescriptor(8, 8),
    )
    assert len(dispatcher.nearest(BatchDescriptor(7, 7))) == 3
    assert len(dispatcher.nearest("anything", 9)) == 5
    assert dispatcher.nearest(Beam(8, 8), 1) == (BatchDescriptor(8, 8),)


def _unrelated(count: int) -> list[BatchDescriptor]:
    rng = random.Random(0)
    sizes = [rng.randrange(2, 10**6) for _ in range(count)]
    return [
        BatchDescriptor(
            size,
            rng.randrange(1, size),
            max_query_len=rng.randrange(1, size),
            num_active_loras=rng.choice([None, rng.randrange(500)]),
            num_ubatches=rng.choice([None, rng.randrange(1, 500)]),
        )
        for size in sizes
    ]


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(_unrelated(500), id="unrelated"),
        pytest.param([BatchDescriptor(10**6), BatchDescriptor(10**12)], id="huge"),
        pytest.param([BatchDescriptor(60_000 + n, 50_000 + n) for n in range(300)], id="long"),
    ],
)
def test_memory_stays_small_for_any_keys(keys: list[BatchDescriptor]) -> None:
    tracemalloc.start()
    try:
        dispatcher = Dispatcher(keys)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 * 2**20
    for key in keys[::50]:
        found = dispatcher.dispatch(key)
        assert found is not None
        assert found.covers(key)
    assert dispatcher.dispatch(num_tokens=10**13) is None
