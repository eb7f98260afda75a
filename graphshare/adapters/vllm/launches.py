"""What stands for captured graphs, and their launch, where vLLM launches them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import torch

__all__ = ["Graphs", "Launching", "Replay", "bare", "launch_of"]


class Replay:
    """A graph to vLLM: something with ``replay``."""

    __slots__ = ("replay",)

    def __init__(self, replay: Callable[[], object]) -> None:
        self.replay = replay


class _Bare(Replay):
    """A graph of torch's, launched without what torch calls on the way; see :func:`launch_of`.

    What others set on it they have set on the graph.
    """

    __slots__ = ("__weakref__", "_graph")

    def __init__(self, graph: Any, launch: Callable[[], object]) -> None:
        object.__setattr__(self, "_graph", graph)
        object.__setattr__(self, "replay", launch)

    def __getattr__(self, name: str) -> Any:
        if name in ("_graph", "replay"):  # it is not made yet, as while it is copied
            raise AttributeError(name)
        return getattr(self._graph, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._graph, name, value)
        if name == "replay":
            object.__setattr__(self, name, value)


# What the methods of torch 2.11 to 2.13 name.
_NAMED = {"super", "replay", "_tracker", "check_alive", "pool"}


def _launches_alone(code: CodeType) -> bool:
    # Without functions of its own or of others', in constants or variables of a closure.
    return (
        "super" in code.co_names
        and _NAMED.issuperset(code.co_names)
        and code.co_freevars == ("__class__",)
        and all(each is None or isinstance(each, str) for each in code.co_consts)
    )


def launch_of(graph: Any) -> Callable[[], object] | None:
    """Return what torch's ``replay`` calls, where it is all that it calls.

    torch's method calls that of its base, which launches, and before that, from 2.12 on, a tracker
    of inputs if one was asked for.

    Args:
        graph: Of any kind.

    Returns:
        ``None`` for another kind of graph, where others have put something in the method's place,
        and where there is more to it.
    """
    cls = torch.cuda.CUDAGraph
    if type(graph) is not cls or "replay" in getattr(graph, "__dict__", ()):
        return None
    replay = vars(cls).get("replay")
    # Not by its module's name, which a wrapper has from what it wraps.
    if not isinstance(replay, FunctionType) or replay.__globals__ is not vars(torch.cuda.graphs):
        return None
    if not _launches_alone(replay.__code__):
        return None
    return None if getattr(graph, "_tracker", None) is not None else super(cls, graph).replay


def bare(graph: Any) -> Any:
    """Return what launches a graph of torch's sooner, and is that graph otherwise."""
    launch = launch_of(graph)
    return graph if launch is None else _Bare(graph, launch)


_Latest = tuple[Any, Any, Any, Any, Any]
_NOTHING: _Latest = (object(), None, None, None, None)


class Graphs(dict[Any, Any]):
    """A manager's graphs by descriptor, with a place for what was launched last.

    Attributes:
        changed: Another object after each change of the table.
        latest: Descriptor, graph, and, where rows are returned, what they were taken of and they;
            then what ``changed`` was when the graph was found.
    """

    __slots__ = ("changed", "latest")

    changed: object
    latest: _Latest


def _changing(of_dict: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(of_dict)
    def changing(self: Graphs, *args: Any, **kwargs: Any) -> Any:
        try:
            return of_dict(self, *args, **kwargs)
        finally:
            self.changed, self.latest = object(), _NOTHING

    return changing


# All but `setdefault`, which replaces nothing. `__init__` can be called on a table that is in use.
for _name in (
    "__delitem__", "__init__", "__ior__", "__setitem__", "clear", "pop", "popitem", "update",
):  # fmt: skip
    setattr(Graphs, _name, _changing(getattr(dict, _name)))


class Launching:
    """A manager's ``run_fullgraph`` with less on the way to the graph.

    vLLM's looks for the graph twice, asks whether it is one of a whole model, and makes a view of
    the target's outputs anew each time (0.25.1, ``cudagraph_utils.py`` 399 to 412 and 578 to 591).
    Most steps launch what the step before has launched: then the graph is at hand. What has no
    graph is left to vLLM's, and so is a manager to which somebody has given another table.

    Args:
        manager: vLLM's, whose ``run_fullgraph`` is its own, see :func:`.signatures.is_released`.
        table: Its graphs, as it has them.
        module: Where the managers lie. They ask its ``get_offloader`` each time.
        returns: Whether it returns the rows of ``hidden_states`` that the graph has.

    Attributes:
        run_fullgraph: Takes, does and returns what vLLM's does.
    """

    __slots__ = ("end", "run_fullgraph")

    def __init__(self, manager: Any, table: Graphs, module: Any, *, returns: bool) -> None:
        own = manager.run_fullgraph
        current: Graphs | None = table

        def run_fullgraph(desc: Any) -> Any:
            graphs = current  # once: another thread may end it
            if graphs is None or manager.graphs is not graphs:
                return own(desc)
            latest, found = graphs.latest, graphs.changed  # once, likewise
            if latest[0] is desc and latest[4] is found:
                _, graph, whole, rows, _ = latest
            else:
                latest, whole, rows = None, _NOTHING, None
                graph = graphs.get(desc)
                if graph is None:
                    return own(desc)
            module.get_offloader().sync_prev_onload()
            graph.replay()
            if returns:
                hidden = manager.hidden_states
                if hidden is not whole:
                    latest, whole, rows = None, hidden, hidden[: desc.num_tokens]
            if latest is None:
                graphs.latest = desc, graph, whole, rows, found
                # Ended or changed meanwhile: nothing that went is kept.
                if current is not graphs or graphs.changed is not found:
                    graphs.latest = _NOTHING
            return rows

        def end() -> None:
            nonlocal current
            current = None
            table.latest = _NOTHING

        self.run_fullgraph = run_fullgraph
        self.end: Callable[[], None] = end
        """From now on, do what vLLM does."""
