"""The memory that the graphs of a set of keys will take, from captures of its two largest keys.

An engine sizes its KV cache by what is left when everything else is there, so it must know what the
graphs take before it captures them. Graphs of one memory pool reuse each other's memory: the first
one, of the largest key, pays for the working memory of all; each later one adds what it keeps, its
outputs above all, since their memory is never given up. Both grow with the tokens of a key, so two
captures tell them. (vLLM's estimate takes a constant amount for each later graph: its second one's.
That misses where the first graphs' free memory still serves the second one, and no longer the
twentieth.)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from graphshare.arguments import check_call, check_flag, wrong_type
from graphshare.capture import CaptureBackend, CapturedGraph, CudaBackend, TapeBackend
from graphshare.owner import Phase
from graphshare.pool import GraphPool

__all__ = ["Estimate", "estimate"]

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What capturing a set of keys will take.

    Attributes:
        keys: Number of keys.
        first_bytes: What the memory pool held after the capture of the largest key.
        second_bytes: What the second largest one added, as memory that it keeps.
        low_bytes: What the memory pool will hold after all captures if outputs find room in the
            working memory of larger graphs.
        high_bytes: The same if none do.
        driver_bytes: What the driver will take for the graphs themselves, outside of the pool, by
            the free memory of the device: rough, since the driver takes memory in large pieces.
            0 on the CPU.
    """

    keys: int
    first_bytes: int
    second_bytes: int
    low_bytes: int
    high_bytes: int
    driver_bytes: int

    @property
    def pool_bytes(self) -> int:
        """What the memory pool will hold, half-way between the two; exact for one key or two."""
        return (self.low_bytes + self.high_bytes) // 2

    @property
    def total_bytes(self) -> int:
        """Memory to leave free for the graphs."""
        return self.pool_bytes + self.driver_bytes


def estimate(
    pool: GraphPool[K],
    keys: Iterable[K],
    forward: Callable[[K, Any], Any],
    *,
    writes_state: bool = False,
) -> Estimate:
    """Estimate what ``pool.capture(keys, forward)`` will take, without capturing all of them.

    The two largest keys are warmed up and captured as ``pool.capture`` would, on states that the
    pool's owner, or its lender's, builds; but into a memory pool of their own, which is given back.
    The pool is then as it was, and all its states are stale: refresh before the next replay.

    Args:
        pool: The pool that is to capture.
        keys: Keys that it does not hold.
        forward: As in :meth:`graphshare.GraphPool.capture`.
        writes_state: As in :meth:`graphshare.GraphPool.capture`.

    Returns:
        The estimate. It is for a memory pool that is empty before; one that other graphs have
        grown already grows less.

    Raises:
        ValueError: No keys, or a key twice.
        TypeError: An argument is of another type, or the pool has a capture backend of the
            caller's own.
        GraphShareError: What :meth:`graphshare.GraphPool.capture` would raise.
    """
    if not isinstance(pool, GraphPool):
        raise wrong_type("estimate: pool", "a GraphPool", pool)
    ordered = pool.ordered(keys, "estimate")
    check_call(f"{pool.name}: estimate: forward", forward)
    check_flag(f"{pool.name}: estimate: writes_state", writes_state)
    if not ordered:
        raise ValueError(f"{pool.name}: estimate: expected at least one key, got none")
    backend = _apart(pool)
    meter = _Meter(backend)
    graphs: list[CapturedGraph] = []
    try:
        _capture(pool, ordered[:2], forward, backend, meter, graphs, writes_state=writes_state)
    finally:
        for graph in reversed(graphs):
            graph.release()
        if meter.started:  # what is refused before a build leaves freshness alone
            pool.invalidate()
    sizes = [_tokens(key) for key in ordered]
    low, high = _extrapolated(meter.readings, sizes)
    driver = [reading.driver_bytes for reading in meter.readings]
    first, last = meter.readings[0], meter.readings[-1]
    return Estimate(
        keys=len(ordered),
        first_bytes=first.reserved_bytes,
        second_bytes=last.held_bytes - first.held_bytes,
        low_bytes=low,
        high_bytes=high,
        driver_bytes=max(0, driver[0]) + max(0, driver[-1]) * (len(ordered) - 1),
    )


class _EnoughError(Exception):
    """Ends a capture from which nothing is kept."""


def _capture(
    pool: GraphPool[K],
    keys: Sequence[K],
    forward: Callable[[K, Any], Any],
    backend: CaptureBackend,
    meter: _Meter,
    graphs: list[CapturedGraph],
    *,
    writes_state: bool,
) -> None:
    try:
        with pool.capturing(keys, writes_state=writes_state) as capturing, backend.session():
            meter.started = True
            for key in keys:
                state = capturing.state(key, Phase.WARMUP)
                with pool.refuse.capture_errors(key):
                    backend.warmup(partial(forward, key, state))
            meter.start()
            for key in keys:
                state = capturing.state(key, Phase.CAPTURE)
                protected = capturing.protected(key)
                with pool.refuse.capture_errors(key):
                    graph = backend.capture(partial(forward, key, state), protected=protected)
                graphs.append(graph)
                meter.read(graph)
            raise _EnoughError  # a capture that fails leaves the pool as it was
    except _EnoughError:
        pass


def _apart(pool: GraphPool[Any]) -> CaptureBackend:
    """A backend like the pool's, with memory of its own."""
    backend = pool.backend
    if isinstance(backend, CudaBackend):
        return backend.apart()
    if isinstance(backend, TapeBackend):
        return backend  # each tape has memory of its own
    raise TypeError(
        f"{pool.name}: estimate: expected a backend of graphshare's, got {type(backend).__name__}"
    )


def _tokens(key: Any) -> int | None:
    tokens = getattr(key, "num_tokens", None)
    return tokens if isinstance(tokens, int) else None


class _Reading(NamedTuple):
    """Memory after a capture.

    Attributes:
        reserved_bytes: What the pool holds of the device's memory.
        held_bytes: The part of it that tensors asked for and keep.
        driver_bytes: What the capture took outside of PyTorch's allocator.
    """

    reserved_bytes: int
    held_bytes: int
    driver_bytes: int


class _Meter:
    """Reads the memory of captures, one after the other."""

    def __init__(self, backend: CaptureBackend) -> None:
        self._backend = backend
        self._outside = 0
        self._taped = 0
        self.started = False
        self.readings: list[_Reading] = []

    def start(self) -> None:
        self._outside = self._outside_of_torch()

    def read(self, graph: CapturedGraph) -> None:
        backend = self._backend
        if not isinstance(backend, CudaBackend):
            self._taped += graph.nbytes
            self.readings.append(_Reading(self._taped, self._taped, 0))
            return
        segments = backend.segments()
        # As it was asked for: a block that was not worth splitting hides how keys differ.
        held = sum(
            block["requested_size"]
            for segment in segments
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        )
        reserved = sum(segment["total_size"] for segment in segments)
        outside = self._outside_of_torch()
        self.readings.append(_Reading(reserved, held, outside - self._outside))
        self._outside = outside

    def _outside_of_torch(self) -> int:
        """Bytes of the device that are in use, but not by PyTorch's allocator."""
        backend = self._backend
        if not isinstance(backend, CudaBackend):
            return 0
        backend.synchronize()
        free, total = torch.cuda.mem_get_info(backend.device)
        return total - free - torch.cuda.memory_reserved(backend.device)


def _extrapolated(readings: Sequence[_Reading], sizes: Sequence[int | None]) -> tuple[int, int]:
    """What the pool will come to after all keys, at least and at most.

    At least: every later graph's outputs find room in memory that earlier graphs worked in and
    no longer need. At most: none do. Which of it is true the allocator decides, by the sizes of
    its free blocks.

    Args:
        readings: After the first capture and, where there is a second key, after the second.
        sizes: Tokens of each key, the largest first; ``None`` for keys that have none.
    """
    first, last = readings[0], readings[-1]
    if len(sizes) <= len(readings):
        return last.reserved_bytes, last.reserved_bytes
    held = [first.held_bytes, last.held_bytes - first.held_bytes]
    working = first.reserved_bytes - first.held_bytes
    largest, second = sizes[0] or 1, sizes[1] or 1
    if largest > second:
        each_token = max(0.0, (held[0] - held[1]) / (largest - second))
    else:
        each_token = held[1] / second
    kept = float(sum(held))
    least = kept + working * second / largest
    for size in sizes[2:]:
        tokens = second if size is None else size
        kept += max(0.0, held[1] - each_token * (second - tokens))
        least = max(least, kept + working * tokens / largest)
    return (
        max(last.reserved_bytes, round(least)),
        max(last.reserved_bytes, round(kept + working)),
    )
