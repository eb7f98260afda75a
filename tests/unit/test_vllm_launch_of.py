"""What a graph of torch's is launched by, without what torch puts in front of it."""

from __future__ import annotations

import functools

import pytest
import torch

from graphshare.adapters.vllm.launches import bare, launch_of


class Base:
    """The part of torch's class that launches."""

    def __init__(self):
        self.launched = 0

    def replay(self):
        self.launched += 1


BODY = "        super().replay()"
METHOD = """
class CUDAGraph(base):
    def replay(self):
{}
"""


@pytest.fixture
def torchs(monkeypatch):
    """Gives torch a class whose method, of torch's own module, has a body."""

    def make(body=BODY):
        # In torch's own names, as its method is.
        names = vars(torch.cuda.graphs)
        monkeypatch.setitem(names, "base", Base)
        made = {}
        exec(METHOD.format(body), names, made)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", made["CUDAGraph"])
        return made["CUDAGraph"]

    return make


def test_it_is_the_method_of_the_base(torchs) -> None:
    graph = torchs()()
    launch = launch_of(graph)
    assert launch.__func__ is Base.replay
    launch()
    assert graph.launched == 1


def test_a_graph_whose_inputs_are_followed_is_left_as_it_is(torchs) -> None:
    body = "        self._tracker and self._tracker.check_alive(self.pool())\n" + BODY
    graph = torchs(body)()
    graph._tracker = None
    assert launch_of(graph) is not None
    graph._tracker = object()
    assert launch_of(graph) is None
    assert bare(graph) is graph


def test_a_method_that_does_more_is_left_as_it_is(torchs) -> None:
    """Such as one of a torch to come."""
    assert launch_of(torchs("        self.count()\n" + BODY)()) is None


def test_a_graph_with_a_method_of_its_own_is_left_as_it_is(torchs) -> None:
    graph = torchs()()
    graph.replay = lambda: None
    assert launch_of(graph) is None


@pytest.mark.parametrize("keeps_name", [False, True])
def test_a_class_that_others_have_patched_is_left_as_it_is(torchs, monkeypatch, keeps_name) -> None:
    cls = torchs()
    own = cls.replay

    def replay(self):
        own(self)

    if keeps_name:
        replay = functools.wraps(own)(replay)
    monkeypatch.setattr(cls, "replay", replay)
    assert launch_of(cls()) is None
    monkeypatch.setattr(cls, "replay", functools.partialmethod(own))
    assert launch_of(cls()) is None
    monkeypatch.delattr(cls, "replay")
    assert launch_of(cls()) is None


def test_a_class_that_others_have_put_there_is_left_as_it_is(torchs, monkeypatch) -> None:
    own = torchs()

    class CUDAGraph(own):
        def replay(self):
            super().replay()

    assert launch_of(CUDAGraph()) is None
    monkeypatch.setattr(torch.cuda, "CUDAGraph", CUDAGraph)
    assert launch_of(CUDAGraph()) is None
    assert launch_of(own()) is None


def test_a_bare_graph_is_that_graph_otherwise(torchs) -> None:
    cls = torchs()
    cls.pool = lambda self: 7
    graph = cls()
    stands = bare(graph)
    assert stands is not graph
    stands.replay()
    assert graph.launched == stands.launched == 1
    assert stands.pool() == 7
    with pytest.raises(AttributeError, match="nothing_of_it"):
        _ = stands.nothing_of_it


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
