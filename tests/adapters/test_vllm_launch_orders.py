"""Launches and answers that are remembered, and what other threads do between any two lines."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch

from graphshare.adapters.vllm.choices import Remembering
from graphshare.adapters.vllm.launches import Graphs, Launching
from tests.between_lines import before_each_line
from tests.vllm_standin import offloader


class Graph:
    """One that says when it is replayed."""

    def __init__(self):
        self.log = []

    def replay(self):
        self.log.append(self)


class Desc(int):
    num_tokens = 4


DESC = Desc(4)


class Manager:
    def __init__(self):
        self.graphs = Graphs({4: Graph()})
        self.hidden_states = torch.zeros(8)

    def run_fullgraph(self, desc):
        self.graphs[desc].replay()
        return self.hidden_states[:4]


def test_hooks_that_are_off_keep_no_memory() -> None:
    manager = Manager()
    seen = weakref.ref(manager.hidden_states)
    launching = Launching(manager, manager.graphs, offloader, returns=True)
    assert launching.run_fullgraph(DESC).shape == (4,)
    launching.end()
    del manager.hidden_states
    assert seen() is None


def launched(happens, *, again):
    """Launch once, or twice, and have something happen before each line of the last launch.

    Returns:
        The manager, its launches, the rows' shape, and the number of lines.
    """
    manager, lines = Manager(), []
    launching = Launching(manager, manager.graphs, offloader, returns=True)
    if again:
        launching.run_fullgraph(DESC)

    def before(line):
        lines.append(line)
        happens(manager, launching, line)

    with before_each_line(launching.run_fullgraph, before):
        shape = launching.run_fullgraph(DESC).shape
    return manager, launching, shape, len(lines)


def places(*, again):
    *_, lines = launched(lambda *_: None, again=again)
    assert lines > 5
    return range(lines)


@pytest.mark.parametrize("again", [False, True])
def test_a_launch_during_which_the_hooks_are_taken_off_returns_the_same(again) -> None:
    """By another thread, between any two lines of it; no memory is kept then."""

    def hidden_states_are_kept(happens):
        manager, launching, shape, _ = launched(happens, again=again)
        assert shape == (4,)
        whole = weakref.ref(manager.hidden_states)
        del manager.hidden_states
        assert launching.run_fullgraph
        return whole() is not None

    assert hidden_states_are_kept(lambda *_: None)
    for at in places(again=again):

        def ended(_, launching, seen, at=at):
            if seen == at:
                launching.end()

        assert not hidden_states_are_kept(ended), at


@pytest.mark.parametrize("again", [False, True])
def test_a_graph_that_is_filed_during_a_launch_is_the_next_to_be_replayed(again) -> None:
    """By another thread, between any two lines of it; the next may begin before its end."""
    for filed_at in places(again=again):
        for next_at in (*places(again=again)[filed_at:], None):
            other = Graph()

            def happens(manager, launching, seen, filed_at=filed_at, next_at=next_at, other=other):
                if seen == filed_at:
                    manager.graphs.update({4: other})
                if seen == next_at:
                    other.log.clear()
                    launching.run_fullgraph(DESC)
                    assert other.log == [other], (filed_at, next_at)

            _, launching, shape, _ = launched(happens, again=again)
            assert shape == (4,)
            other.log.clear()
            launching.run_fullgraph(DESC)
            launching.run_fullgraph(DESC)
            assert other.log == [other] * 2, (filed_at, next_at)


def test_after_a_change_of_a_table_its_graph_is_replayed_whoever_launched_during_it() -> None:
    lines = []
    with before_each_line(Graphs.__setitem__, lines.append):
        Graphs()[4] = None
    assert len(lines) > 2
    for at in lines:
        manager, other = Manager(), Graph()
        launching = Launching(manager, manager.graphs, offloader, returns=True)

        def launch(seen, at=at, launching=launching):
            if seen == at:
                launching.run_fullgraph(DESC)

        launching.run_fullgraph(DESC)
        with before_each_line(Graphs.__setitem__, launch):
            manager.graphs[4] = other
        other.log.clear()
        launching.run_fullgraph(DESC)
        assert other.log == [other], at


def test_hooks_that_were_taken_off_during_launches_keep_no_memory() -> None:
    lines = []
    manager = Manager()
    launching = Launching(manager, manager.graphs, offloader, returns=True)
    with before_each_line(launching.end, lines.append):
        launching.end()
    assert len(lines) > 1
    for at in lines:
        manager = Manager()
        launching = Launching(manager, manager.graphs, offloader, returns=True)

        def launch(seen, at=at, launching=launching):
            if seen == at:
                launching.run_fullgraph(DESC)

        with before_each_line(launching.end, launch):
            launching.end()
        whole = weakref.ref(manager.hidden_states)
        del manager.hidden_states
        assert whole() is None, at


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("how", ["another is filed", "it is taken out", "the table is emptied"])
def test_a_graph_that_went_is_not_kept(again, how) -> None:
    """Whenever during a launch it went."""
    for at in places(again=again):
        gone = []

        def happens(manager, launching, seen, at=at, gone=gone):
            if seen != at:
                return
            gone.append((weakref.ref(manager.graphs[4]), manager, launching))
            if how == "another is filed":
                manager.graphs[4] = Graph()
            elif how == "it is taken out":
                manager.graphs.pop(4)
            else:
                manager.graphs.clear()

        with contextlib.suppress(KeyError):  # of vLLM's own
            launched(happens, again=again)
        ((graph, *kept),) = gone
        gc.collect()
        assert graph() is None, (at, kept)


@pytest.mark.parametrize("again", [False, True])
def test_what_is_told_to_forget_while_it_answers_asks_each_time(again) -> None:
    def answered(forgets_at):
        """Return the number of lines, and whether it was asked each time afterwards."""
        calls, lines = [], []
        remembering = Remembering(lambda *shape: calls.append(shape))
        if again:
            remembering.dispatch(1, 4, 4)

        def before(line):
            lines.append(line)
            if line == forgets_at:
                remembering.forget()

        with before_each_line(remembering.dispatch, before):
            remembering.dispatch(1, 4, 4)
        calls.clear()
        remembering.dispatch(1, 4, 4)
        remembering.dispatch(1, 4, 4)
        return len(lines), len(calls) == 2

    lines, asked = answered(-1)
    assert lines > 3
    assert not asked
    for at in range(lines):
        assert answered(at)[1], at


def test_what_was_told_to_forget_holds_no_answer() -> None:
    class Answer:
        pass

    remembering = Remembering(lambda *_: Answer())
    answer = weakref.ref(remembering.dispatch(1, 4, 4))
    assert answer() is not None
    remembering.forget()
    assert answer() is None
    answer = weakref.ref(remembering.dispatch(1, 4, 4))
    assert answer() is None
