"""Descriptors: examples, and what is refused."""

from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
import sys
from typing import Any, ClassVar

import pytest

from graphshare.descriptor import (
    BatchDescriptor,
    Match,
    anything,
    bound,
    capture_descriptors,
    exact,
)


class Beam(BatchDescriptor):
    beam_width: int | None = exact(default=1)
    kind: ClassVar[str] = "beam"


class Tagged(BatchDescriptor):
    tag: str = anything(default="")
    width: int = bound(default=1)


def test_a_captured_stride_does_not_serve_another() -> None:
    """Incident 9 (SGLang 21987): captured uniform, replayed varied or with another length."""
    key = BatchDescriptor(12, num_reqs=4, uniform_query_len=3)
    assert key.covers(BatchDescriptor(9, num_reqs=3, uniform_query_len=3))
    assert not key.covers(BatchDescriptor(8, num_reqs=4, uniform_query_len=2))
    assert not key.covers(BatchDescriptor(9, num_reqs=3))


def test_lora_count_is_part_of_the_key() -> None:
    """Incident 6 (vLLM PR 28318)."""
    assert not BatchDescriptor(8).covers(BatchDescriptor(8, num_active_loras=1))
    assert BatchDescriptor(8, num_active_loras=None).covers(BatchDescriptor(8, num_active_loras=1))


def test_none_in_a_shape_is_covered_only_by_none() -> None:
    assert not BatchDescriptor(8, num_reqs=4).covers(BatchDescriptor(8))
    assert BatchDescriptor(8).covers(BatchDescriptor(8, num_reqs=4))


def test_uniform_implies_the_longest_query() -> None:
    key = BatchDescriptor(8, uniform_query_len=4)
    assert key.max_query_len == 4
    assert BatchDescriptor(8, max_query_len=4).covers(key)
    assert not BatchDescriptor(8, max_query_len=3).covers(key)


@pytest.mark.parametrize("other", [Beam(8), 8, None, (8,)])
def test_another_type_is_neither_covered_nor_equal(other: Any) -> None:
    key = BatchDescriptor(8)
    with pytest.raises(TypeError):
        key.covers(other)
    assert key != other


@pytest.mark.parametrize("value", [True, 8.0, "eight", None, [8]])
def test_num_tokens_must_be_an_integer(value: Any) -> None:
    with pytest.raises(TypeError):
        BatchDescriptor(value)


@pytest.mark.parametrize(
    "name", [name for name in BatchDescriptor.matching() if name != "num_tokens"]
)
def test_every_count_must_be_an_integer_or_none(name: str) -> None:
    for value in (True, 1.0, "1"):
        with pytest.raises(TypeError):
            BatchDescriptor(8, **{name: value})
    assert getattr(BatchDescriptor(8, **{name: None}), name) is None


def test_integers_of_other_types_become_int() -> None:
    numpy = pytest.importorskip("numpy")
    key = BatchDescriptor(numpy.int32(8), num_reqs=numpy.int64(4))
    assert (type(key.num_tokens), type(key.num_reqs)) == (int, int)
    assert key == BatchDescriptor(8, num_reqs=4)
    assert hash(key) == hash(BatchDescriptor(8, num_reqs=4))
    assert type(Beam(8, beam_width=numpy.int8(2)).beam_width) is int


def test_a_free_field_tells_keys_apart_and_is_never_compared() -> None:
    one, other = Tagged(8, tag="a"), Tagged(8, tag="b")
    assert one != other
    assert one.covers(other)


def test_a_subclass_equals_no_other_type_and_its_fields_count() -> None:
    class Same(BatchDescriptor):
        pass

    assert Same(8) != BatchDescriptor(8)
    assert Beam(8) != Beam(8, beam_width=2)
    assert len({Same(8), BatchDescriptor(8), Beam(8), Beam(8), Beam(8, beam_width=2)}) == 4


def test_frozen() -> None:
    key = Beam(8)
    for name in ("num_tokens", "beam_width", "other"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(key, name, 3)


def test_repr_leaves_out_defaults_and_what_is_implied() -> None:
    assert repr(BatchDescriptor(8, num_reqs=4)) == "BatchDescriptor(num_tokens=8, num_reqs=4)"
    assert repr(Beam(8, None, 4, beam_width=2)) == (
        "Beam(num_tokens=8, uniform_query_len=4, beam_width=2)"
    )


def test_matching_lists_every_field() -> None:
    assert dict(Beam.matching()) == {
        "num_tokens": Match.BOUND,
        "num_reqs": Match.BOUND,
        "uniform_query_len": Match.EXACT,
        "max_query_len": Match.BOUND,
        "num_active_loras": Match.EXACT,
        "num_ubatches": Match.EXACT,
        "beam_width": Match.EXACT,
    }


def test_the_hash_is_made_anew_in_another_process() -> None:
    """Strings and types hash differently there; a pickled hash would lose the key."""
    code = (
        "import pickle, sys; from graphshare.descriptor import BatchDescriptor; "
        "key = pickle.loads(bytes.fromhex(sys.argv[1])); "
        "sys.exit(key not in {BatchDescriptor(8, num_reqs=4)})"
    )
    data = pickle.dumps(BatchDescriptor(8, num_reqs=4)).hex()
    subprocess.run(
        [sys.executable, "-c", code, data],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def test_values_of_a_subclass_must_be_hashable_and_equal_themselves() -> None:
    class Odd(BatchDescriptor):
        what: Any = exact(default=None)
        cap: Any = bound(default=None)
        tag: Any = anything(default=None)

    for name in ("what", "tag"):
        with pytest.raises(TypeError):
            Odd(8, **{name: []})
        with pytest.raises(ValueError, match="itself"):
            Odd(8, **{name: float("nan")})
    with pytest.raises(TypeError):
        Odd(8, cap=1.5)
    with pytest.raises(ValueError, match="at least 0"):
        Odd(8, cap=-1)
    assert Odd(8, what=True).covers(Odd(8, what=True))


def test_a_subclass_must_say_how_a_field_matches() -> None:
    with pytest.raises(TypeError):
        type("Bad", (BatchDescriptor,), {"__annotations__": {"beam": "int"}, "beam": 1})
    with pytest.raises(TypeError):
        type("Bad", (BatchDescriptor,), {"__annotations__": {"beam": "int"}})


@pytest.mark.parametrize("name", ["covers", "cost", "matching", "_hash", "num_reqs", "num_tokens"])
def test_a_subclass_cannot_take_a_name_that_is_in_use(name: str) -> None:
    body = {"__annotations__": {name: "int"}, name: exact(default=1)}
    with pytest.raises(TypeError):
        type("Bad", (BatchDescriptor,), body)


def test_a_subclass_cannot_change_an_inherited_default() -> None:
    with pytest.raises(TypeError):
        type("Bad", (BatchDescriptor,), {"num_active_loras": None})


def test_capture_descriptors_of_the_design() -> None:
    keys = capture_descriptors(num_tokens=[1, 2, 4, 8, 16], max_num_reqs=8, uniform_query_lens=[4])
    assert keys == [
        BatchDescriptor(16, 8),
        BatchDescriptor(16, 4, 4),
        BatchDescriptor(8, 8),
        BatchDescriptor(8, 2, 4),
        BatchDescriptor(4, 4),
        BatchDescriptor(4, 1, 4),
        BatchDescriptor(2, 2),
        BatchDescriptor(1, 1),
    ]


def test_uniform_keys_have_no_more_than_the_most_requests() -> None:
    keys = capture_descriptors([64], max_num_reqs=3, uniform_query_lens=[4])
    assert keys == [BatchDescriptor(64, 3), BatchDescriptor(12, 3, 4)]


def test_capture_descriptors_multiplies_loras_and_microbatches() -> None:
    keys = capture_descriptors([2, 2, 1], 8, num_active_loras=[0, 1], num_ubatches=[1, 2])
    assert len(keys) == 8
    assert {(key.num_active_loras, key.num_ubatches) for key in keys} == {
        (0, 1),
        (0, 2),
        (1, 1),
        (1, 2),
    }
    assert capture_descriptors([], 8) == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (([0], 8), ValueError),
        (([8], 0), ValueError),
        (([8], 8, [0]), ValueError),
        (([8], True), TypeError),
        (([8.0], 8), TypeError),
        ((8, 8), TypeError),
    ],
)
def test_capture_descriptors_refuses(arguments: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        capture_descriptors(*arguments)
