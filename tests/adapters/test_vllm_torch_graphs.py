"""Graphs as torch's, which vLLM captures: whose method is called, with the hooks on and off."""

from __future__ import annotations

import functools
import sys

import pytest
import torch

from graphshare.adapters.vllm import activate, deactivate, sessions
from tests.like_torchs import give_torch_graphs
from tests.vllm_standin.engine import requests, serve
from tests.vllm_standin.installed import managers_of


class Base:
    """The part of torch's class that launches."""

    def replay(self):
        self.tape.replay()


class Recorder:
    """Captures as another one, into such graphs."""

    def __init__(self, recorder, whose):
        self._recorder, self._whose = recorder, whose

    def __getattr__(self, name):
        return getattr(self._recorder, name)

    def capture(self, *args):
        graph = torch.cuda.CUDAGraph()
        graph.tape, graph.whose = self._recorder.capture(*args), self._whose
        return graph


@pytest.fixture
def torchs(monkeypatch):
    return give_torch_graphs(monkeypatch, Base)


@pytest.fixture
def start(vllm, torchs):
    def started():
        runner = vllm.make()
        for name, manager in managers_of(runner).items():
            manager._recorder = Recorder(manager._recorder, name)
        vllm.warm_up(runner)
        return runner

    return started


def counting(own, seen):
    @functools.wraps(own)
    def replay(self):
        seen.add(self.whose)
        own(self)

    return replay


def served(runner, seen):
    seen.clear()
    serve(runner, requests(seed=1, count=2))
    return set(seen)


def test_what_others_have_wrapped_before_the_capture_is_called(torchs, start, monkeypatch) -> None:
    seen = set()
    monkeypatch.setattr(torchs, "replay", counting(torchs.replay, seen))
    activate()
    runner = start()
    assert served(runner, seen) == {"target", "prefill", "decode"}
    deactivate()
    assert served(runner, seen) == {"target", "prefill", "decode"}


def test_what_others_wrap_while_the_hooks_are_on_may_go_uncalled(
    torchs, start, monkeypatch
) -> None:
    seen = set()
    activate()
    runner = start()
    monkeypatch.setattr(torchs, "replay", counting(torchs.replay, seen))
    assert served(runner, seen) == set()
    sessions()[-1].pause()
    assert served(runner, seen) == {"target", "prefill", "decode"}
    sessions()[-1].resume()
    assert served(runner, seen) == {"decode"}  # the others are launched as they were captured


def test_torchs_method_is_not_called_while_the_hooks_are_on(torchs, start) -> None:
    """It can be launched without."""
    code, called = torchs.replay.__code__, set()

    def calling(frame, event, _):
        if event == "call" and frame.f_code is code:
            called.add(frame.f_locals["self"].whose)

    activate()
    runner = start()

    def launched():
        before = sys.getprofile()
        sys.setprofile(calling)
        try:
            return served(runner, called)
        finally:
            sys.setprofile(before)

    assert launched() == set()
    sessions()[-1].pause()
    assert launched() == {"target", "prefill", "decode"}


def test_what_others_put_on_a_graph_of_a_draft_decode_stays(torchs, start) -> None:
    seen = []
    activate()
    runner = start()
    manager = managers_of(runner)["decode"]
    for graph in manager.graphs.values():

        def replay(own=graph.replay):
            seen.append(None)
            own()

        graph.replay = replay

    def launched():
        seen.clear()
        serve(runner, requests(seed=1, count=2))
        return len(seen)

    on = launched()
    assert on > 0
    sessions()[-1].pause()
    assert launched() == on
    sessions()[-1].resume()
    assert launched() == on
