"""Long sequences of host values, which a check compares in a loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphshare.state import LayoutChecker

# Equal, and not the same for a capture; and what has no hash.
VALUES: list[Any] = [0, False, 0.0, 1, True, 1.0, frozenset({1}), frozenset({True}), {1}, {1.0}]
FORMS = st.sampled_from([list, tuple])


def sequences(values: Any) -> Any:
    return st.lists(values, min_size=16, max_size=17) | st.builds(
        lambda value, count: [value] * count, values, st.integers(16, 17)
    )


@given(
    sequences(st.sampled_from(VALUES)),
    sequences(st.sampled_from(VALUES)),
    sequences(st.sampled_from(VALUES)),
    FORMS,
)
def test_what_the_check_lets_through_has_no_difference(
    first: list[Any], second: list[Any], other: list[Any], form: Any
) -> None:
    tensor = torch.zeros(4)
    checker = LayoutChecker([tensor, form(first), form(second)], "cpu")
    for one in (first, second, other):
        for two in (first, second, other):
            state = [tensor, form(one), form(two)]
            assert not checker.matches(state) or not checker.differences(state)
    assert checker.matches([tensor, form(first), form(second)])


@pytest.mark.parametrize("one", [1, True, 1.0])
@pytest.mark.parametrize("two", [1, True, 1.0])
def test_two_sequences_that_are_equal_are_two(one: Any, two: Any) -> None:
    tensor = torch.zeros(4)
    checker = LayoutChecker([tensor, [one] * 16, [two] * 16], "cpu")
    for got in (1, True, 1.0):
        for state in ([tensor, [one] * 16, [got] * 16], [tensor, [got] * 16, [two] * 16]):
            assert checker.matches(state) is (not checker.differences(state))


@pytest.mark.parametrize("value", [{1}, slice(0, 1), bytearray(b"a")])
def test_values_without_a_hash(value: Any) -> None:
    tensor = torch.zeros(4)
    checker = LayoutChecker([tensor, [value] * 16], "cpu")
    assert checker.matches([tensor, [value] * 16])
    assert checker.differences([tensor, [*[value] * 15, None]])
