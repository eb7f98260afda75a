"""What stands for captured graphs, their choice and their launch, where vLLM launches them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

__all__ = [
    "NOT_GIVEN", "Graphs", "Launching", "Remembering", "Replay", "ask", "is_released", "launch_of",
]  # fmt: skip

NOT_GIVEN: Any = object()
"""Of the adapters that a ``dispatch`` is asked about, before 0.25."""


class Replay:
    """A graph to vLLM: something with ``replay``."""

    __slots__ = ("replay",)

    def __init__(self, replay: Callable[[], object]) -> None:
        self.replay = replay


def launch_of(graph: Any) -> Callable[[], object] | None:
    """Return what torch's ``replay`` calls, where it is all that it calls.

    torch's method calls that of its base, which launches, and before that, from 2.12 on, a tracker
    of inputs if one was asked for.

    Args:
        graph: Of any kind.

    Returns:
        ``None`` for another kind of graph, and where there is more.
    """
    cls = torch.cuda.CUDAGraph
    plain = type(graph) is cls and cls.replay.__module__ == cls.__module__
    if plain and getattr(graph, "_tracker", None) is None:
        return super(cls, graph).replay
    return None


class Graphs(dict[Any, Any]):
    """A manager's graphs by descriptor, with a place for what was launched last.

    Attributes:
        latest: Descriptor, graph, and, where rows are returned, what they were taken of and they;
            ``None`` after each change of the table.
    """

    __slots__ = ("latest",)

    latest: tuple[Any, Any, Any, Any] | None

    def __init__(self, graphs: Mapping[Any, Any]) -> None:
        super().__init__(graphs)
        self.latest = None


def _changing(of_dict: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(of_dict)
    def changing(self: Graphs, *args: Any, **kwargs: Any) -> Any:
        try:
            return of_dict(self, *args, **kwargs)
        finally:
            self.latest = None

    return changing


# All but `setdefault`, which replaces nothing.
for _name in ("__delitem__", "__ior__", "__setitem__", "clear", "pop", "popitem", "update"):
    setattr(Graphs, _name, _changing(getattr(dict, _name)))


def is_released(manager: Any, name: str, released: Collection[Callable[..., Any]]) -> bool:
    """Whether a manager's method is vLLM's own, so that what it does is known.

    Args:
        manager: One of vLLM's.
        name: Of the method.
        released: The functions that are as they were released.
    """
    if not hasattr(manager, "__dict__") or name in vars(manager):
        return False
    # All of them: each may call that of the class before.
    methods = [vars(each)[name] for each in type(manager).__mro__ if name in vars(each)]
    # Without any, it is something that hands on what it is asked for.
    return bool(methods) and all(any(each is one for one in released) for each in methods)


def ask(
    dispatch: Callable[..., Any],
    num_reqs: Any,
    num_tokens: Any,
    uniform_token_count: Any,
    num_active_loras: Any,
) -> Any:
    """Ask a manager's ``dispatch`` as vLLM asks it, about adapters if they are given."""
    if num_active_loras is NOT_GIVEN:
        return dispatch(num_reqs, num_tokens, uniform_token_count)
    return dispatch(num_reqs, num_tokens, uniform_token_count, num_active_loras=num_active_loras)


class Remembering:
    """A manager's ``dispatch`` that answers at once what it was asked the time before.

    Most steps ask for what the step before has asked, and the answer hangs on nothing else: the
    tables that it comes from are made by ``__init__`` and the capture alone (0.25.1,
    ``cudagraph_utils.py`` 141 to 287 and 368).

    Args:
        dispatch: vLLM's own, see :func:`is_released`: somebody else's may hang on other things.

    Attributes:
        dispatch: Takes and returns what vLLM's does.
    """

    __slots__ = ("dispatch", "forget")

    def __init__(self, dispatch: Callable[..., Any]) -> None:
        known: tuple[Any, Any, Any, Any, Any] | None = None
        remembers = True

        def dispatched(
            num_reqs: Any,
            num_tokens: Any,
            uniform_token_count: Any,
            num_active_loras: Any = NOT_GIVEN,
        ) -> Any:
            nonlocal known
            last = known  # once: another thread may tell it to forget
            if last is not None:
                reqs, tokens, uniform, loras, answer = last
                if (
                    num_tokens == tokens
                    and num_reqs == reqs
                    and uniform_token_count == uniform
                    and num_active_loras == loras
                    and remembers
                ):
                    return answer
            answer = ask(dispatch, num_reqs, num_tokens, uniform_token_count, num_active_loras)
            if remembers:
                known = num_reqs, num_tokens, uniform_token_count, num_active_loras, answer
            return answer

        def forget() -> None:
            nonlocal known, remembers
            known, remembers = None, False

        self.dispatch = dispatched
        self.forget: Callable[[], None] = forget
        """From now on, ask each time."""


class Launching:
    """A manager's ``run_fullgraph`` with less on the way to the graph.

    vLLM's looks for the graph twice, asks whether it is one of a whole model, and makes a view of
    the target's outputs anew each time (0.25.1, ``cudagraph_utils.py`` 399 to 412 and 578 to 591).
    Most steps launch what the step before has launched: then the graph is at hand. What has no
    graph is left to vLLM's, and so is a manager to which somebody has given another table.

    Args:
        manager: vLLM's, whose ``run_fullgraph`` is its own, see :func:`is_released`.
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
            latest = graphs.latest  # once, likewise
            if latest is not None and latest[0] is desc:
                _, graph, whole, rows = latest
            else:
                latest = whole = rows = None
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
                graphs.latest = desc, graph, whole, rows
                # Ended meanwhile, or another graph was filed since this one was found.
                if current is not graphs or graphs.get(desc) is not graph:
                    graphs.latest = None
            return rows

        def end() -> None:
            nonlocal current
            current = None
            table.latest = None

        self.run_fullgraph = run_fullgraph
        self.end: Callable[[], None] = end
        """From now on, do what vLLM does."""
