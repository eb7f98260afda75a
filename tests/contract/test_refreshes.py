"""Refreshes with their check in line, on either backend: what is right, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from graphshare import (
    AddressChangedError,
    BakedValueChangedError,
    BatchDescriptor,
    GraphPool,
    Phase,
    StaleStateError,
    share_states,
)

BIG, SMALL = BatchDescriptor(8, 8), BatchDescriptor(4, 4)


@dataclass
class Open:
    """As engines have it: new at each build."""

    lens: torch.Tensor
    table: torch.Tensor
    most: int = 8
    causal: bool = True


@dataclass(frozen=True, slots=True)
class Frozen:
    """The same object at each build for a key."""

    lens: torch.Tensor
    table: torch.Tensor
    most: int = 8
    causal: bool = True


class Engine:
    def __init__(self, device: torch.device, form: Any) -> None:
        self.lens = torch.zeros(8, dtype=torch.int32, device=device)
        self.table = torch.zeros(8, 3, dtype=torch.int64, device=device)
        self.form = form
        self.kept: dict[Any, Any] = {}

    def build(self, key: Any, batch: Any, phase: Phase) -> Any:
        rows = key.num_tokens
        self.lens[:rows] = 1 if batch is None else batch
        self.table[:rows] = 2 if batch is None else batch
        if self.form is Open:
            return Open(self.lens[:rows], self.table[:rows])
        if key not in self.kept:
            self.kept[key] = Frozen(self.lens[:rows], self.table[:rows])
        return self.kept[key]


def forward(key: Any, state: Any) -> torch.Tensor:
    return state.lens + state.table.sum(1)


CHANGES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "elsewhere": lambda s, t: t.set_(t.clone()),
    "transposed": lambda s, t: t.t_(),
    "smaller": lambda s, t: t.resize_(2, 3),
    "another dtype": lambda s, t: setattr(t, "data", t.view(torch.float64)),
}


def pools(kind: str, engine: Engine) -> tuple[GraphPool[Any], GraphPool[Any]]:
    target = GraphPool("target", owner=engine, backend=kind, device=engine.lens.device)
    draft = GraphPool("draft", backend=kind, device=engine.lens.device)
    share_states(target, draft)
    for pool in (target, draft):
        pool.capture([BIG, SMALL], forward)
    return target, draft


def refreshes(pool: GraphPool[Any], engine: Engine, by: str) -> dict[Any, Callable[[Any], None]]:
    if by == "refresh":
        return {key: lambda batch, key=key: pool.refresh(key, batch) for key in (BIG, SMALL)}

    def accepting(key: Any) -> Callable[[Any], None]:
        accept = pool.accepting(key)
        return lambda batch: accept(engine.build(key, batch, Phase.REPLAY))

    return {key: accepting(key) for key in (BIG, SMALL)}


@pytest.mark.parametrize("by", ["refresh", "accept"])
@pytest.mark.parametrize("form", [Open, Frozen])
def test_replays_are_those_of_the_last_batch(
    kind: str, device: torch.device, form: Any, by: str
) -> None:
    engine = Engine(device, form)
    target, draft = pools(kind, engine)
    refresh = refreshes(target, engine, by)
    looks: list[Any] = []
    for entry in target.holdings.entries.values():
        checker = entry.record.checker
        assert checker is not None
        checker.matches = lambda state, inner=checker.matches: (looks.append(state), inner(state))[
            1
        ]
    for turn in range(30):
        if turn == 20:
            looks.clear()
        key = SMALL if turn % 5 == 3 else BIG
        refresh[key](turn)
        for pool in (target, draft):
            assert pool.replay(key).tolist() == [4 * turn] * key.num_tokens
            with pytest.raises(StaleStateError):
                pool.replay(key)
    assert looks == []  # all of it was looked at in line


def steady(kind: str, device: torch.device, form: Any, by: str) -> tuple[Any, Any, Any, Any]:
    """An engine, its pools and their refreshes, after some of the larger key."""
    engine = Engine(device, form)
    target, draft = pools(kind, engine)
    refresh = refreshes(target, engine, by)
    for turn in range(12):
        refresh[BIG](turn)
        draft.replay(BIG)
    return engine, target, draft, refresh


@pytest.mark.parametrize("by", ["refresh", "accept"])
@pytest.mark.parametrize("form", [Open, Frozen])
@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_in_place_is_refused(
    kind: str, device: torch.device, form: Any, by: str, name: str
) -> None:
    engine, target, draft, refresh = steady(kind, device, form, by)
    build = engine.build

    def changed(key: Any, batch: Any, phase: Phase) -> Any:
        state = build(key, batch, phase)
        CHANGES[name](state, state.table)
        return state

    engine.build = changed  # type: ignore[method-assign]
    with pytest.raises(AddressChangedError) as caught:
        refresh[BIG](1)
    assert caught.value.path == "table"
    for pool in (target, draft):
        with pytest.raises(StaleStateError):
            pool.replay(BIG)
    engine.build = build  # type: ignore[method-assign]
    engine.kept.clear()
    for turn in range(3):
        refresh[BIG](turn)
        assert draft.replay(BIG).tolist() == [4 * turn] * 8


@pytest.mark.parametrize("by", ["refresh", "accept"])
def test_host_values_are_compared(kind: str, device: torch.device, by: str) -> None:
    engine, _, draft, refresh = steady(kind, device, Open, by)
    build = engine.build
    for name, value in (("most", 9), ("most", 8.0), ("causal", 1), ("causal", None)):

        def changed(key: Any, batch: Any, phase: Phase, name=name, value=value) -> Any:
            state = build(key, batch, phase)
            setattr(state, name, value)
            return state

        engine.build = changed  # type: ignore[method-assign]
        with pytest.raises(BakedValueChangedError) as caught:
            refresh[BIG](1)
        assert caught.value.path == name
        engine.build = build  # type: ignore[method-assign]
        refresh[BIG](2)
        assert draft.replay(BIG).tolist() == [8] * 8
