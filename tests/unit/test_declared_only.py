"""Dataclasses that are looked at through their fields alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphshare.state import LayoutChecker, declared_only, walk
from tests.layout_checks import each_way  # noqa: F401 - a fixture

BUFFER = torch.zeros(16, dtype=torch.int32)


@dataclass
class Metadata:
    num_tokens: int
    seq_lens: Any
    table: Any
    causal: bool = True
    splits: int | None = None
    plan: Any = field(init=False)


declared_only(Metadata)


@dataclass
class Child(Metadata):
    more: int = 0


def made() -> Metadata:
    return Metadata(4, BUFFER[:4], BUFFER[4:8].view(2, 2))


def set_to(name: str, value: Callable[[], Any]) -> Callable[[Any], None]:
    return lambda state: setattr(state, name, value())


# What is done to a state, and the path of the difference if there is one.
CHANGES: dict[str, tuple[Callable[[Any], None], str | None]] = {
    "nothing": (lambda state: None, None),
    "an attribute that is no field": (set_to("extra", lambda: 3), None),
    "a tensor that is no field": (set_to("extra", lambda: BUFFER[:1]), None),
    "equal fields": (set_to("seq_lens", lambda: BUFFER[:4]), None),
    "a value": (set_to("num_tokens", lambda: 5), "num_tokens"),
    "a type": (set_to("num_tokens", lambda: 4.0), "num_tokens"),
    "another place": (set_to("seq_lens", lambda: BUFFER[1:5]), "seq_lens"),
    "another shape": (set_to("table", lambda: BUFFER[4:8]), "table"),
    "no tensor": (set_to("table", lambda: None), "table"),
    "a field with a default": (set_to("causal", lambda: False), "causal"),
    "one that was None": (set_to("splits", lambda: 2), "splits"),
    "a default that shows again": (lambda state: delattr(state, "causal"), None),
    "a field that has gone": (lambda state: delattr(state, "num_tokens"), "num_tokens"),
    "a field that came": (set_to("plan", lambda: None), "plan"),
    "one gone and one more": (
        lambda state: (delattr(state, "seq_lens"), setattr(state, "other", 1)),
        "seq_lens",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize(
    "around", [lambda s: s, lambda s: {"layer": (s, s)}], ids=["alone", "shared"]
)
def test_fields_are_seen_and_nothing_else(name: str, around: Callable[[Any], Any]) -> None:
    change, path = CHANGES[name]
    checker = LayoutChecker(around(made()), "cpu")
    state = made()
    change(state)
    for _ in range(3):
        found = checker.differences(around(state))
        assert {one.path.rpartition(".")[2] for one in found} == ({path} - {None})
        assert checker.matches(around(state)) is (path is None)


def test_a_default_that_shows_again_is_compared() -> None:
    state = made()
    state.causal = False
    checker = LayoutChecker(state, "cpu")
    again = made()
    del again.causal
    assert not checker.matches(again)
    assert [one.path for one in checker.differences(again)] == ["causal"]


@given(st.lists(st.sampled_from(sorted(CHANGES)), max_size=4))
def test_the_quick_check_and_the_exact_one_agree(names: list[str]) -> None:
    checker = LayoutChecker(made(), "cpu")
    state = made()
    for name in names:
        try:
            CHANGES[name][0](state)
        except AttributeError:  # it has gone already
            continue
    for _ in range(2):
        assert checker.matches(state) is (checker.differences(state) == [])


def test_a_subclass_is_looked_at_whole() -> None:
    checker = LayoutChecker(Child(4, BUFFER[:4], None), "cpu")
    state = Child(4, BUFFER[:4], None)
    assert checker.matches(state)
    state.extra = 3  # type: ignore[attr-defined]
    assert not checker.matches(state)
    assert [one.path for one in checker.differences(state)] == ["extra"]


def test_walks_give_the_fields() -> None:
    state = made()
    state.extra = 3  # type: ignore[attr-defined]
    paths = [path for path, _ in walk(state)]
    assert paths == ["num_tokens", "seq_lens", "table", "causal", "splits"]


class Plain:
    number = 1


@dataclass
class Inherits(Plain): ...


class OfADataclass(Metadata): ...


@dataclass
class WithProperty:
    number: int

    def __post_init__(self) -> None: ...


WithProperty.number = property(lambda self: 3)  # type: ignore[assignment]


@dataclass
class Asks:
    number: int

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


@dataclass
class AsksFirst:
    number: int

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name)


@dataclass(slots=True)
class Slotted:
    number: int


@dataclass
class Called:
    number: int

    def __call__(self) -> None: ...


@dataclass
class TensorInClass:
    number: int
    table: Any = field(init=False)


TensorInClass.table = BUFFER


@dataclass
class ListInClass:
    number: int
    layers: Any = field(init=False)


ListInClass.layers = [BUFFER]


@pytest.mark.parametrize(
    "cls",
    [
        TensorInClass,
        ListInClass,
        Plain,
        OfADataclass,
        WithProperty,
        Asks,
        AsksFirst,
        Slotted,
        Called,
    ],
)
def test_what_may_hold_more_or_run_python_is_refused(cls: type) -> None:
    with pytest.raises(TypeError, match="declared_only: expected"):
        declared_only(cls)


def test_a_dataclass_without_fields_is_its_type() -> None:
    declared_only(Inherits)
    checker = LayoutChecker((Inherits(), BUFFER), "cpu")
    other = Inherits()
    other.extra = 3  # type: ignore[attr-defined]
    assert checker.matches((other, BUFFER))
    assert checker.differences((other, BUFFER)) == []
    assert not checker.matches((Plain(), BUFFER))


def test_a_class_that_was_looked_at_stays_as_it_was() -> None:
    """Checks of the whole object may be in use."""

    @dataclass
    class Early:
        lens: Any
        plan: Any = field(init=False, default=None)

    captured = Early(BUFFER)
    captured.extra = 3  # type: ignore[attr-defined]
    checker = LayoutChecker(captured, "cpu")
    assert checker.matches(captured)
    assert declared_only(Early) is False
    state = Early(BUFFER)
    for _ in range(2):
        assert not checker.matches(state)
        assert [one.path for one in checker.differences(state)] == ["extra"]
    assert not LayoutChecker(captured, "cpu").matches(state)


def test_a_class_is_taken_for_its_fields_once_and_for_all() -> None:
    @dataclass
    class Late:
        lens: Any

    assert declared_only(Late)
    LayoutChecker(Late(BUFFER), "cpu")
    assert declared_only(Late)
