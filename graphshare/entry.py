"""One captured key of a pool: its graph, the state it reads, and how it is launched."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from graphshare.capture import CapturedGraph
from graphshare.freshness import StateRecord
from graphshare.lease import Lease
from graphshare.refusals import Refusals
from graphshare.state import LayoutChecker

__all__ = ["BoundReplay", "Entry", "View", "apply_views"]

_K = TypeVar("_K", bound=Hashable)

View = Callable[[Any], Any]


def apply_views(views: tuple[View, ...], state: Any) -> Any:
    """Return what a borrower sees of its lender's state, outermost lender first."""
    for view in views:
        state = view(state)
    return state


@dataclass(eq=False, slots=True)
class Entry(Generic[_K]):
    """One captured key.

    Attributes:
        key: The pool's key.
        owner_key: The key that the state's owner builds for; another one under ``key=``.
        record: The state that the graph reads.
        views: What narrows the owner's state to what this pool sees.
        borrowed: Whether another pool owns the state.
        view_checker: The narrowed state as captured, where there are views.
        launch: Replays the graph, with whatever the pool's options add.
        outputs: What the forward returned at capture.
        graph: The captured graph, to be read and put on other memory; ``None`` where the engine
            captured by itself and did not hand it over.
        release_graph: Frees the graph.
        nbytes: Memory that the capture added.
        writes_state: Whether the forward writes its state.
        forward: For a recapture; ``None`` where the engine captured by itself.
        lease: The pool's allowance on the record; set once, when the capture is complete.
        refresh: ``refresh(batch)``, or its refusal for a borrowed key; set with the lease.
        accept: ``accept(state)``, once it was asked for.
        bare_launch: What replays the graph and does nothing else.
        dead: Whether the pool let the key go.
        handles: What ``bind`` made of it.
        replay: What they replay with; set with the lease.
        tell: Tells that function what has changed.
        enders: Called when the key goes: what was prepared for it refuses from then on.
    """

    key: _K
    owner_key: Hashable
    record: StateRecord
    views: tuple[View, ...]
    borrowed: bool
    view_checker: LayoutChecker | None
    launch: Callable[[], object]
    outputs: Any
    graph: CapturedGraph | None
    release_graph: Callable[[], object] | None
    nbytes: int
    writes_state: bool
    forward: Callable[[Any, Any], Any] | None
    lease: Lease = field(init=False)
    refresh: Callable[[Any], None] = field(init=False)
    accept: Callable[[Any], None] | None = field(default=None, init=False)
    bare_launch: Callable[[], object] = field(init=False)
    dead: bool = field(default=False, init=False)
    handles: list[weakref.ref[BoundReplay[_K]]] = field(default_factory=list, init=False)
    replay: Callable[[], Any] = field(init=False)
    tell: Callable[[Callable[[], object], Any, bool], None] = field(init=False)
    enders: list[Callable[[], None]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.bare_launch = self.launch

    def state(self) -> Any:
        """Return the state as this pool sees it, as last built."""
        return apply_views(self.views, self.record.state)

    def prepare_replay(self, refuse: Refusals) -> None:
        """Make what handles replay with, once the launch has all that the pool puts around it."""
        self.replay, self.tell = _replay_of(self.key, self.lease, self.launch, self.outputs, refuse)

    def put(self, launch: Callable[[], object], outputs: Any) -> None:
        """Launch this from now on; the outputs lie there."""
        self.launch, self.outputs = launch, outputs
        self.tell(launch, outputs, self.dead)

    def retire(self, refuse: Refusals) -> None:
        """Free the graph; whatever still holds the entry is refused from now on.

        It has no state any more: a handle must not keep the memory alive.
        """
        key = self.key
        self.dead = True

        def refused() -> None:
            raise refuse.gone(key)

        def no_refresh(_: Any) -> None:
            raise refuse.gone(key, "refresh")

        self.bare_launch = refused
        self.put(refused, self.outputs)  # which the graph may be writing yet
        self.refresh = no_refresh
        self.accept = None
        for end in self.enders:
            end()
        self.enders.clear()
        for handle in filter(None, (each() for each in self.handles)):
            handle.refresh = no_refresh
        self.handles.clear()
        if self.release_graph is not None:
            self.release_graph()
            self.release_graph = None
        self.forward = None
        self.put(refused, None)
        self.graph = None
        self.views = ()
        self.view_checker = None
        del self.record

    def why_not(self, refuse: Refusals) -> Exception:
        """Return the error of a replay that may not be."""
        return _why_not(self.key, self.lease, refuse, gone=self.dead)


def _why_not(key: Hashable, lease: Lease, refuse: Refusals, *, gone: bool) -> Exception:
    return refuse.gone(key) if gone else refuse.not_fresh(key, lease.cause)


def _replay_of(
    key: Hashable, lease: Lease, launch: Callable[[], object], outputs: Any, refuse: Refusals
) -> tuple[Callable[[], Any], Callable[[Callable[[], object], Any, bool], None]]:
    # A closure, with what the hottest path reads in variables of its own: in an engine's step each
    # object that is touched costs a cache miss. It does not hold the entry, which holds it.
    gone = False

    def replay() -> Any:
        if lease.left <= 0:
            raise _why_not(key, lease, refuse, gone=gone)
        launch()
        lease.left -= 1
        return outputs

    def tell(now_launch: Callable[[], object], now_outputs: Any, now_gone: bool) -> None:
        nonlocal launch, outputs, gone
        launch, outputs, gone = now_launch, now_outputs, now_gone

    return replay, tell


class BoundReplay(Generic[_K]):
    """A captured key without the lookup; made by :meth:`graphshare.GraphPool.bind`.

    Attributes:
        key: The captured key.
        replay: Does what ``pool.replay(key)`` does, with the same refusals; it has no ``copy``.
            After the key was released or captured anew it raises
            :class:`graphshare.ReleasedStateError`.
        refresh: Does what ``pool.refresh(key, batch)`` does, likewise.
    """

    __slots__ = ("__weakref__", "key", "refresh", "replay")

    key: _K
    replay: Callable[[], Any]
    refresh: Callable[[Any], None]

    def __init__(self, entry: Entry[_K]) -> None:
        self.key = entry.key
        self.replay = entry.replay
        self.refresh = entry.refresh
        # The function holds the state: when the key goes, the handle lets go of it.
        entry.handles = [each for each in entry.handles if each() is not None]
        entry.handles.append(weakref.ref(self))

    def __repr__(self) -> str:
        return f"BoundReplay({self.key!r})"
