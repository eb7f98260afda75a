"""What a graph of torch's is launched by, without what torch puts in front of it."""

from __future__ import annotations

import functools
import weakref

import pytest
import torch

from graphshare.adapters.vllm.launches import _launches_alone, bare, launch_of
from tests.like_torchs import LAUNCH, give_torch_graphs


class Base:
    """The part of torch's class that launches."""

    def __init__(self):
        self.launched = 0

    def replay(self):
        self.launched += 1


WRAPPER = """
def wrapped(own):
    class CUDAGraph(base):
        def replay(self):
            own(self)
            super().replay()
    return CUDAGraph
"""


@pytest.fixture
def torchs(monkeypatch):
    """Gives torch a class whose method has a body."""
    return functools.partial(give_torch_graphs, monkeypatch, Base)


def test_it_is_the_method_of_the_base(torchs) -> None:
    graph = torchs()()
    launch = launch_of(graph)
    assert launch.__func__ is Base.replay
    launch()
    assert graph.launched == 1


def test_a_graph_whose_inputs_are_followed_is_left_as_it_is(torchs) -> None:
    body = "        self._tracker and self._tracker.check_alive(self.pool())\n" + LAUNCH
    graph = torchs(body)()
    graph._tracker = None
    assert launch_of(graph) is not None
    graph._tracker = object()
    assert launch_of(graph) is None
    assert bare(graph) is graph


def test_a_method_that_does_more_is_left_as_it_is(torchs) -> None:
    """Such as one of a torch to come."""
    assert launch_of(torchs("        self.count()\n" + LAUNCH)()) is None
    assert launch_of(torchs("        (lambda: self.count())()\n" + LAUNCH)()) is None
    for nothing in ("        pass", "        __class__"):
        assert launch_of(torchs(nothing)()) is None


def test_a_method_with_variables_of_others_is_left_as_it_is(torchs, monkeypatch) -> None:
    """A wrapper that was made in torch's own module."""
    torchs()
    calls, made = [], {}
    exec(WRAPPER, vars(torch.cuda.graphs), made)
    cls = made["wrapped"](lambda _: calls.append(None))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", cls)
    graph = cls()
    graph.replay()
    assert (graph.launched, len(calls)) == (1, 1)
    assert launch_of(graph) is None


def test_a_method_with_code_of_others_is_left_as_it_is(torchs) -> None:
    """As tools put it there that look at each call."""
    cls = torchs()
    code = cls.replay.__code__
    cls.replay.__code__ = code.replace(co_consts=(*code.co_consts, print))
    assert launch_of(cls()) is None


def test_torchs_own_method_does_no_more() -> None:
    """Else the shortcut would not be taken, and nobody would see it."""
    replay = vars(torch.cuda.CUDAGraph)["replay"]
    assert replay.__globals__ is vars(torch.cuda.graphs)
    assert _launches_alone(replay.__code__)


def test_a_class_without_a_dictionary_is_left_as_it_is(monkeypatch) -> None:
    class Slotted:
        __slots__ = ()

        def replay(self):
            pass

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Slotted)
    assert launch_of(Slotted()) is None


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

    class Others(cls):
        def replay(self):
            super().replay()

    monkeypatch.setattr(cls, "replay", Others.replay)
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
    assert weakref.ref(stands)() is stands
    assert not hasattr(object.__new__(type(stands)), "pool")


def test_what_is_set_on_a_bare_graph_is_set_on_that_graph(torchs) -> None:
    graph = torchs()()
    stands, calls = bare(graph), []
    stands.note = 5
    assert graph.note == stands.note == 5
    launch = stands.replay

    def replay():
        calls.append(None)
        launch()

    stands.replay = replay
    stands.replay()
    graph.replay()
    assert (len(calls), graph.launched) == (2, 2)
    assert bare(graph) is graph


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
