"""What a graph of torch's is launched by, without what torch puts in front of it."""

from __future__ import annotations

import pytest
import torch

from graphshare.adapters.vllm.launches import launch_of


class Base:
    """The part of torch's class that launches."""

    def __init__(self):
        self.launched = 0

    def replay(self):
        self.launched += 1


@pytest.fixture
def graph_class(monkeypatch):
    """A class as torch's: its method, in Python, calls that of its base."""

    class CUDAGraph(Base):
        def replay(self):
            self.through_torch = True
            super().replay()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", CUDAGraph)
    return CUDAGraph


def test_it_is_the_method_of_the_base(graph_class) -> None:
    graph = graph_class()
    launch_of(graph)()
    assert graph.launched == 1
    assert not hasattr(graph, "through_torch")


def test_a_graph_whose_inputs_are_followed_is_left_as_it_is(graph_class) -> None:
    graph = graph_class()
    graph._tracker = object()
    assert launch_of(graph) is None


def test_graphs_of_other_kinds_are_left_as_they_are(graph_class, monkeypatch) -> None:
    class Others(graph_class):
        pass

    assert launch_of(Others()) is None
    assert launch_of(Base()) is None
    graph = graph_class()
    assert launch_of(graph) is not None
    monkeypatch.setattr(graph_class, "replay", Base.replay)
    replaced = type("replay", (), {"__module__": "elsewhere", "__call__": lambda self: None})()
    monkeypatch.setattr(graph_class, "replay", replaced)
    assert launch_of(graph) is None


@pytest.mark.gpu
def test_a_graph_of_torchs_own_is_launched_by_it() -> None:
    source = torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = source * 2
    launch = launch_of(graph)
    assert launch is not None
    assert launch != graph.replay
    for value in (3, 5):
        source.fill_(value)
        launch()
        assert doubled.tolist() == [2 * value] * 4
