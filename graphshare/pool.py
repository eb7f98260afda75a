"""GraphPool: captured graphs and the states they read, keyed by batch descriptor."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import torch

from graphshare.arguments import check_call, check_flag
from graphshare.capture import CaptureBackend
from graphshare.capturing import Capturing
from graphshare.core import Checks, Forward
from graphshare.entry import BoundReplay
from graphshare.holdings import States
from graphshare.lease import Staleness, Why
from graphshare.outputs import clone_outputs
from graphshare.owner import AttentionSpec, Phase, StateOwner
from graphshare.progress import Progress, check_progress, reporting
from graphshare.provenance.pool import InspectedPool
from graphshare.statistics import PoolStatistics

__all__ = ["GraphPool"]

K = TypeVar("K", bound=Hashable)

_ORDER = "The keys come first, the forward second."


class GraphPool(InspectedPool[K]):
    """Graphs captured for batch shapes, with the state that each of them reads.

    Not thread-safe: one thread drives the pools of one device, as it drives the device.

    Args:
        name: For messages and statistics.
        owner: Writes this pool's states; a pool without one can only borrow.
        spec: What the states are planned for; compared by ``share_states``.
        device: Where the states lie and the graphs run; by default the current accelerator, or
            the CPU where there is none.
        backend: ``"cuda"`` captures CUDA graphs, ``"tape"`` records operators on the CPU,
            ``"auto"`` picks by device; or a capture backend of your own.
        covers: ``covers(key, shape)`` for keys that have no such method.
        cost: ``cost(key)``, an ordering for keys that have no such method; least is chosen.
        state_key: Keys with equal ``state_key(key)`` share one state.
        live_keys: Keys that may be fresh at a time.
        replays_per_refresh: Replays of this pool on one refresh; ``None`` for no limit.
        checks: ``"fast"``: layout at each refresh, freshness at each replay. ``"strict"``: layout
            and stream order at each replay as well. ``"off"``: nothing.
        memory_pool: A graph memory pool to capture into; by default one of this pool's own.
        inspectable: Keep the graphs readable: for ``provenance``, ``prove``, ``rebind``, ``adopt``.
        backend_options: Further options of the capture backend, e.g. ``capture_error_mode``.

    Attributes:
        states: Read-only mapping of key to state. These are addresses: the contents are those of
            the last build.

    Raises:
        TypeError, ValueError: For arguments that are wrong in themselves.
        RuntimeError: The device is not there.
    """

    def __init__(
        self,
        name: str,
        *,
        owner: StateOwner | None = None,
        spec: AttentionSpec | None = None,
        device: torch.device | str | None = None,
        backend: Literal["auto", "cuda", "tape"] | CaptureBackend = "auto",
        covers: Callable[[K, Any], bool] | None = None,
        cost: Callable[[K], Any] | None = None,
        state_key: Callable[[Any], Hashable] | None = None,
        live_keys: int = 1,
        replays_per_refresh: int | None = 1,
        checks: Checks = "fast",
        memory_pool: Any = None,
        inspectable: bool = False,
        backend_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            name,
            owner=owner,
            spec=spec,
            device=device,
            backend=backend,
            covers=covers,
            cost=cost,
            state_key=state_key,
            live_keys=live_keys,
            replays_per_refresh=replays_per_refresh,
            checks=checks,
            memory_pool=memory_pool,
            inspectable=inspectable,
            backend_options=backend_options,
        )
        self.states: Mapping[K, Any] = States(self.holdings.entries, self.refuse)

    def __repr__(self) -> str:
        return f"GraphPool({self.name!r}, {len(self._entries)} keys, {self.device})"

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __enter__(self) -> GraphPool[K]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def keys(self) -> tuple[K, ...]:
        """Return the captured keys, in the order of capture."""
        return tuple(self._entries)

    # The serving path.

    def dispatch(self, shape: Any = None, **fields: int | None) -> K | None:
        """Return the captured key that covers a batch with the least padding, or ``None``.

        Fewest tokens first, then fewest requests, then the most constrained key; the same
        whatever the order of capture, in constant time.

        Args:
            shape: A descriptor, or whatever shape a foreign key type's ``covers`` takes.
            fields: For descriptors, the batch as plain integers: ``num_tokens=13, num_reqs=4``.

        Raises:
            TypeError, ValueError: No batch has this shape, or the keys take another one.
            ReleasedStateError: The pool is closed; ``None`` would mean to run eagerly.
        """
        # After the first capture an instance carries a function made for its keys in its place.
        return self.holdings.dispatcher.dispatch(shape, **fields)

    def refresh(self, key: K, batch: Any) -> None:
        """Have the owner build the state of ``key`` for ``batch``, in place, and check it.

        On success the key is fresh for this pool and for every pool that borrows it.

        Args:
            key: A captured key whose state this pool owns.
            batch: Passed on to the owner as it is. ``None`` is for owners that hold the batch
                themselves: one that takes it for a capture and fills in dummies has its state
                called fresh with those, so it should go by the phase.

        Raises:
            KeyMismatchError: The key is not captured.
            OwnershipError: The state is borrowed; its owner's pool refreshes it.
            AddressChangedError: The owner returned a tensor elsewhere, or otherwise shaped.
            BakedValueChangedError: A host value breaks its rule.
        """
        if key is not self._refreshed:
            entry = self._by_id.get(id(key)) or self.lookup(key, "refresh")
            self._refreshed, self._refresh = key, entry.refresh
        refresh = self._refresh
        refresh(batch)

    def replay(self, key: K, copy: bool = False) -> Any:
        """Launch the graph of ``key`` and return what its forward returned at capture.

        Args:
            key: A captured key whose state is fresh.
            copy: Return clones. The captured outputs themselves are valid until the next replay
                in the same memory pool.

        Raises:
            KeyMismatchError: The key is not captured.
            StaleStateError: The state is not fresh for this key and this pool.
            ReleasedStateError: What the graph needs was released.
        """
        entry = self._replayed
        if entry is None or entry.key is not key:
            entry = self._replayed = self._by_id.get(id(key)) or self.lookup(key, "replay")
        lease = entry.lease
        if lease.left <= 0:
            raise entry.why_not(self.refuse)
        entry.launch()
        lease.left -= 1
        return clone_outputs(entry.outputs) if copy else entry.outputs

    def bind(self, key: K) -> BoundReplay[K]:
        """Return a handle whose ``refresh(batch)`` and ``replay()`` skip the lookup.

        Raises:
            KeyMismatchError: The key is not captured.
        """
        return BoundReplay(self.lookup(key, "bind"))

    def invalidate(self, key: K | None = None) -> None:
        """Tell of a write that graphshare did not see, e.g. an eager step of the same builders.

        Makes stale, for every pool, the state of ``key`` and all that a build for it may have
        written over; without a key, those of all keys of this pool.

        Raises:
            KeyMismatchError: The key is not captured.
        """
        entries = self._entries.values() if key is None else [self.lookup(key, "invalidate")]
        for entry in entries:
            record = entry.record
            record.overwrite((self.name, entry.key), entry.owner_key)
            record.spoil(Why(Staleness.INVALIDATED, (self.name, entry.key)))

    # Capture.

    def capture(
        self,
        keys: Iterable[K],
        forward: Forward,
        *,
        writes_state: bool = False,
        progress: bool | Progress | None = None,
    ) -> None:
        """Warm up and capture ``forward`` for each key, largest first; all of them or none.

        Args:
            keys: Keys that are not captured yet, each once; none is fine, and does nothing.
            forward: ``forward(key, state)``, returns tensors or any nest of them.
            writes_state: Whether it writes into its state.
            progress: ``True`` for a bar, or a callable; by default a bar on a terminal.

        Raises:
            KeyMismatchError: A key has no state at the lender.
            OwnershipError: A key is not borrowed and the pool has no owner.
            LazyStateError, AddressChangedError, BakedValueChangedError: See the guide on capture.
            CaptureError: A key is held already; or the forward failed, or did what is forbidden;
                or the owner returned no tensor on the pool's device, or one that no graph can read.
            ReleasedStateError: The pool is closed, or what it borrows was released.
            TypeError, ValueError: For arguments that are wrong in themselves: a key given twice,
                an iterator that was used up before.
        """
        ordered = self.ordered(keys)
        check_call(f"{self.name}: capture: forward", forward, remedy=_ORDER)
        check_flag(f"{self.name}: capture: writes_state", writes_state)
        check_progress(f"{self.name}: capture: progress", progress)
        forwards = dict.fromkeys(ordered, forward)
        writers = set(ordered) if writes_state else set[K]()
        self._capture(ordered, forwards, writers, replace=False, progress=progress)

    def recapture(
        self,
        keys: Iterable[K] | None = None,
        forward: Forward | None = None,
        *,
        progress: bool | Progress | None = None,
    ) -> None:
        """Capture held keys again and replace their graphs; on failure the old ones stay.

        Pools that borrow a state which comes out elsewhere must capture anew as well.

        Args:
            keys: Held keys; by default all of them.
            forward: By default the one that each key was captured with.
            progress: As in :meth:`capture`.

        Raises:
            KeyMismatchError: A key is not captured.
            TypeError, ValueError: For arguments that are wrong in themselves; or a key was
                captured by the engine itself, and no forward is given.
        """
        ordered = self.ordered(self._entries if keys is None else keys, "recapture")
        check_call(f"{self.name}: recapture: forward", forward, optional=True, remedy=_ORDER)
        check_progress(f"{self.name}: recapture: progress", progress)
        missing = [key for key in ordered if key not in self._entries]
        if missing:
            raise self.holdings.unknown("recapture", missing)
        forwards = {key: forward or self.forward_of(key) for key in ordered}
        writers = {key for key in ordered if self._entries[key].writes_state}
        self._capture(ordered, forwards, writers, replace=True, progress=progress)

    def capturing(
        self, keys: Iterable[K], *, writes_state: bool = False, replace: bool = False
    ) -> Capturing[K]:
        """Return a context manager for an engine that keeps its own capture loop.

        Args:
            keys: As in :meth:`capture`.
            writes_state: As in :meth:`capture`.
            replace: The keys are held, and their graphs to be replaced.

        Raises:
            As :meth:`capture` does.
        """
        ordered = self.ordered(keys, "capturing")
        check_flag(f"{self.name}: capturing: writes_state", writes_state)
        check_flag(f"{self.name}: capturing: replace", replace)
        writers = set(ordered) if writes_state else set[K]()
        return Capturing(self, ordered, writers=writers, replace=replace)

    def _capture(
        self,
        keys: Sequence[K],
        forwards: Mapping[K, Forward],
        writers: set[K],
        *,
        replace: bool,
        progress: bool | Progress | None,
    ) -> None:
        with (
            reporting(progress, f"graphshare: {self.name}", 2 * len(keys)) as step,
            Capturing(self, keys, writers=writers, replace=replace) as capturing,
            self.backend.session(),
        ):
            for key in keys:
                state = capturing.state(key, Phase.WARMUP)
                with self.refuse.capture_errors(key):
                    self.backend.warmup(partial(forwards[key], key, state))
                step(f"warm up {key}")
            for key in keys:
                state = capturing.state(key, Phase.CAPTURE)
                protected = capturing.protected(key)
                with self.refuse.capture_errors(key):
                    graph = self.backend.capture(
                        partial(forwards[key], key, state), protected=protected
                    )
                capturing.commit(
                    key,
                    graph.replay,
                    graph.outputs,
                    nbytes=graph.nbytes,
                    release=graph.release,
                    forward=forwards[key],
                    graph=graph,
                )
                step(f"capture {key}")

    # Letting go.

    def release(self, key: K | None = None) -> None:
        """Let go of one key, or of all, with the graphs.

        What is lent lives on until the last borrower lets go, but can no longer be refreshed:
        a borrower's replay raises ``ReleasedStateError`` until it is captured anew.

        Raises:
            KeyMismatchError: The key is not captured.
        """
        keys = tuple(self._entries) if key is None else (self.lookup(key, "release").key,)
        self.holdings.release(keys)
        self.keys_changed()

    def close(self) -> None:
        """Release everything and end the pool's own loan; may be called again.

        Every later call that needs a graph or a state raises ``ReleasedStateError``, and so does
        ``dispatch``.
        """
        if self.closed:
            return
        self.release()
        if self.loan is not None:
            self.loan.close()
            self.loan = None  # it holds the lender
        self.holdings.named.clear()
        self.closed = self.refuse.ended = True
        self.dispatch = self.refuse.after_close

    def statistics(self) -> PoolStatistics:
        """Return a snapshot of what the pool counts."""
        leases = self.holdings.leases()
        tally = self.tally
        dispatcher = self.holdings.dispatcher
        refreshes = tally.gone_refreshes + sum(lease.refreshes for lease in leases)
        return PoolStatistics(
            name=self.name,
            keys=len(self._entries),
            captures=tally.captures,
            builds=MappingProxyType(tally.all_builds(refreshes)),
            refreshes=refreshes,
            replays=tally.gone_replays + sum(lease.replays for lease in leases),
            builds_avoided=tally.gone_avoided + sum(lease.builds_avoided for lease in leases),
            refusals=MappingProxyType(dict(self.refuse.counts)),
            dispatched=MappingProxyType({k: n for k, n in dispatcher.hits.items() if n}),
            missed=MappingProxyType(dict(dispatcher.misses)),
            bytes=MappingProxyType({key: each.nbytes for key, each in self._entries.items()}),
            fresh=self.holdings.fresh_keys(),
        )
