"""Across streams a replay waits for the build, and the next build for every replay.

Streams and events are stand-ins, so that what waits for what is seen without a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphshare.ordering import StreamOrder
from tests.one_buffer import BIG, Owner, captured


class Stream:
    def __init__(self, number: int) -> None:
        self.cuda_stream = number
        self.waited_for: list[int] = []

    def wait_event(self, event: Event) -> None:
        self.waited_for.append(event.stream)


class Event:
    stream: int

    def record(self, stream: Stream) -> None:
        self.stream = stream.cuda_stream


class Streams:
    """Three streams, one of them current."""

    def __init__(self) -> None:
        self.all = [Stream(number) for number in range(3)]
        self.current = self.all[0]

    def use(self, number: int) -> Stream:
        self.current = self.all[number]
        return self.current


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.current)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return made


def build(order: StreamOrder) -> None:
    order.before_build()
    order.after_build()


def replay(order: StreamOrder) -> None:
    order.before_replay()
    order.after_replay()


def test_a_replay_waits_for_a_build_on_another_stream(streams: Streams) -> None:
    order = StreamOrder(torch.device("cuda", 0))
    build(order)
    other = streams.use(1)
    replay(order)
    assert other.waited_for == [0]


def test_a_build_waits_for_the_replays_on_every_other_stream(streams: Streams) -> None:
    order = StreamOrder(torch.device("cuda", 0))
    for number in (1, 2):
        streams.use(number)
        replay(order)
    own = streams.use(0)
    build(order)
    assert own.waited_for == [1, 2]
    build(order)  # those replays have been waited for
    assert own.waited_for == [1, 2]


def test_on_one_stream_nothing_waits(streams: Streams) -> None:
    order = StreamOrder(torch.device("cuda", 0))
    for _ in range(2):
        build(order)
        replay(order)
    assert streams.current.waited_for == []


def test_on_a_cpu_nothing_is_noted(streams: Streams) -> None:
    order = StreamOrder(torch.device("cpu"))
    build(order)
    streams.use(1)
    replay(order)
    streams.use(2)
    build(order)
    assert [stream.waited_for for stream in streams.all] == [[], [], []]


def test_strict_pools_order_each_build_and_each_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    diary: list[str] = []

    class Noted:
        def __init__(self, device: Any) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            return lambda: diary.append(name)

    class Noting(Owner):
        def build(self, key: Any, batch: Any, phase: Any) -> Any:
            diary.append("build")
            return super().build(key, batch, phase)

    monkeypatch.setattr("graphshare.core.StreamOrder", Noted)
    pool = captured(Noting(), checks="strict")
    diary.clear()
    pool.refresh(BIG, 3.0)
    pool.replay(BIG)
    assert diary == ["before_build", "build", "after_build", "before_replay", "after_replay"]
