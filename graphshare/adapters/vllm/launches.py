"""What stands for captured graphs, their choice and their launch, where vLLM launches them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

__all__ = ["Launching", "Remembering", "Replay", "is_released"]


class Replay:
    """A graph to vLLM: something with ``replay``."""

    __slots__ = ("replay",)

    def __init__(self, replay: Callable[[], None]) -> None:
        self.replay = replay


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
        known: tuple[tuple[Any, ...], dict[str, Any], Any] | None = None
        remembers = True

        def dispatched(*args: Any, **kwargs: Any) -> Any:
            nonlocal known
            last = known  # once: another thread may tell it to forget
            if last is not None:
                asked, named, answer = last
                if args == asked and kwargs == named and remembers:
                    return answer
            answer = dispatch(*args, **kwargs)
            if remembers:
                known = args, kwargs, answer
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
    What has no graph is left to it.

    Args:
        manager: vLLM's, whose ``run_fullgraph`` is its own, see :func:`is_released`.
        module: Where the managers lie. They ask its ``get_offloader`` each time.
        returns: Whether it returns the rows of ``hidden_states`` that the graph has.

    Attributes:
        run_fullgraph: Takes, does and returns what vLLM's does.
    """

    __slots__ = ("end", "run_fullgraph")

    def __init__(self, manager: Any, module: Any, *, returns: bool) -> None:
        own = manager.run_fullgraph
        on = True
        last: tuple[Any, Any, Any] | None = None

        def run_fullgraph(desc: Any) -> Any:
            nonlocal last
            graph = manager.graphs.get(desc) if on else None
            if graph is None:
                return own(desc)
            module.get_offloader().sync_prev_onload()
            graph.replay()
            if not returns:
                return None
            hidden = manager.hidden_states
            known = last  # once: another thread may end it
            if known is not None:
                launched, whole, rows = known
                if desc is launched and hidden is whole:
                    return rows
            rows = hidden[: desc.num_tokens]
            last = desc, hidden, rows
            if not on:  # ended meanwhile
                last = None
            return rows

        def end() -> None:
            nonlocal last, on
            on, last = False, None

        self.run_fullgraph = run_fullgraph
        self.end: Callable[[], None] = end
        """From now on, do what vLLM does."""
