"""Rules of host values, and what the fast check of a state lets through."""

from __future__ import annotations

import enum
from typing import Any

import pytest
import torch

from graphshare.state import LayoutChecker
from tests.layout_checks import each_way  # noqa: F401 - a fixture

SQUARE = torch.zeros(4, 4)


def differences(before: Any, after: Any, rules: dict[str, str] | None = None):
    """Path and field of each difference; where there is one, the fast check is not content."""
    checker = LayoutChecker(before, "cpu", rules)
    found = checker.differences(after)
    assert not (found and checker.matches(after))
    return [(one.path, one.field) for one in found]


class Level(enum.IntEnum):
    HIGH = 2
    LOW = 1


@pytest.mark.parametrize(("value", "less"), [("b", "a"), (True, False), (Level.HIGH, Level.LOW)])
def test_at_most_bounds_nothing_but_numbers(value: Any, less: Any) -> None:
    assert differences([value], [less], {"0": "at_most"}) == [("0", "value")]


@pytest.mark.parametrize("value", [4, 2.5])
def test_at_most_is_checked_on_the_fast_path(value: Any) -> None:
    checker = LayoutChecker({"max_seq_len": value}, "cpu", {"*.max_seq_len": "at_most"})
    assert checker.matches({"max_seq_len": value - 1})
    assert checker.matches({"max_seq_len": value})
    assert not checker.matches({"max_seq_len": value + 1})


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(4, 4),
        SQUARE.t(),
        SQUARE[:3],
        SQUARE[1:],
        SQUARE.view(torch.int32),
        SQUARE.view(2, 8),
    ],
    ids=["address", "stride", "shape", "place", "dtype", "view"],
)
def test_the_fast_path_lets_no_other_tensor_through(other: torch.Tensor) -> None:
    checker = LayoutChecker({"t": SQUARE}, "cpu")
    assert checker.matches({"t": SQUARE[:]})
    assert not checker.matches({"t": other})


def test_the_fast_path_sees_what_came_and_what_went() -> None:
    checker = LayoutChecker({"a": 1, "b": [1, 2]}, "cpu")
    for other in ({"a": 1}, {"a": 1, "b": [1, 2], "c": 3}, {"a": 1, "b": [1]}):
        assert not checker.matches(other)
    assert not checker.matches({"a": 1, "b": [1, 2, 3]})


def test_the_first_pattern_that_matches_a_leaf_wins() -> None:
    before, after = {"x": {"a": 1, "b": 1}}, {"x": {"a": 2, "b": 2}}
    assert differences(before, after, {"x.b": "equal", "x.*": "any"}) == [("x.b", "value")]
    assert differences(before, after, {"x.*": "any", "x.b": "equal"}) == []


def test_a_nan_is_the_same_as_another() -> None:
    assert differences([float("nan")], [float("nan")]) == []
    assert differences([complex("nan")], [complex("nan")]) == []
