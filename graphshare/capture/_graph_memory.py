"""The memory and the side stream that CUDA graphs are captured with.

Three of PyTorch's ways are guarded against here:

* A capture that fails leaks its memory pool and leaves its generators in capture mode (PyTorch
  issue 190348): :func:`end_failed_capture`.
* Destroying a graph frees the cuBLAS workspace of the stream it was captured on, though other
  graphs of that stream still write to it (PyTorch issue 193402). :meth:`GraphMemory.prepare`
  has the workspace allocated in a pool where nobody else allocates: freed or not, its address
  stays good, and the next workspace of that stream takes the same place.
* A memory pool that is freed while anybody allocates into another one, or captures, ends the
  process (PyTorch PR 182062), and what frees it may be a collection of garbage: there is none
  meanwhile.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Generator
from typing import Any

import torch

from graphshare.capture._collection import no_collection
from graphshare.capture._driver import begin_capture

__all__ = [
    "GraphMemory",
    "end_failed_capture",
    "memory_for",
    "segments_of",
    "workspace_pools",
]

_STREAMS_IN_TORCH = 32  # torch.cuda.Stream() hands them out in turn

# One pool for the cuBLAS workspaces of each stream, by device and stream. It is kept for good, as
# PyTorch keeps the workspaces: graphs that are still alive may have been captured with them.
_workspaces: dict[tuple[int, int], torch.cuda.MemPool] = {}

_shared: weakref.WeakValueDictionary[tuple[int, tuple[int, int]], GraphMemory] = (
    weakref.WeakValueDictionary()
)


def workspace_pools(device: torch.device) -> set[tuple[int, int]]:
    """Return the ids of the pools in which the cuBLAS workspaces of a device lie."""
    return {pool.id for (index, _), pool in _workspaces.items() if index == device.index}


def memory_for(device: torch.device, given: Any) -> GraphMemory:
    """Return the memory for captures on a device.

    Args:
        device: A CUDA device with its index.
        given: ``None``, a ``torch.cuda.MemPool``, or a pool handle. All who give the same pool
            get the same object, thus the same side stream: the allocator reuses a block only on
            the stream that it was allocated for.

    Raises:
        TypeError: ``given`` is something else.
    """
    if given is None:
        return GraphMemory(device, None)
    if isinstance(given, torch.cuda.MemPool):
        pool_id = given.id
    elif isinstance(given, tuple) and len(given) == 2:
        pool_id = (int(given[0]), int(given[1]))
    else:
        raise TypeError(
            "memory_pool: expected a torch.cuda.MemPool or what torch.cuda.graph_pool_handle() "
            f"returns, got {type(given).__name__}"
        )
    key = (device.index, pool_id)
    memory = _shared.get(key)
    if memory is None:
        memory = _shared[key] = GraphMemory(device, given)
    return memory


class GraphMemory:
    """A memory pool for graphs, and the stream they are captured on.

    Args:
        device: A CUDA device with its index.
        given: The caller's ``MemPool`` or pool handle, or ``None``.
    """

    def __init__(self, device: torch.device, given: Any) -> None:
        self._device = device
        self._owned = given is None
        self._handle: tuple[int, int] | None = None
        self._pool: torch.cuda.MemPool | None = None
        with torch.cuda.device(device):
            if given is None:
                self._pool = torch.cuda.MemPool()
            elif isinstance(given, torch.cuda.MemPool):
                self._pool = given
            else:
                self._handle = (int(given[0]), int(given[1]))
        self.stream = self._own_stream()
        # PyTorch gives up a pool with its last graph, and cannot take it up again: a capture into
        # it fails, or stops the process where outputs still live there. One graph stays.
        self._anchor = None if self._owned else self._empty_graph()

    def apart(self) -> GraphMemory:
        """Return a pool of its own, for captures on the same stream: it has the workspaces."""
        other = GraphMemory.__new__(GraphMemory)
        other._device, other._owned, other._handle = self._device, True, None
        with torch.cuda.device(self._device):
            other._pool = torch.cuda.MemPool()
        other.stream, other._anchor = self.stream, None
        return other

    @property
    def pool_id(self) -> Any:
        """What ``CUDAGraph.capture_begin`` calls the pool."""
        return self._pool.id if self._pool is not None else self._handle or (0, 0)

    def prepare(self) -> None:
        """Have the stream's cuBLAS workspaces allocated, in the pool that is kept for them."""
        workspaces = _workspaces.get((self._device.index, self.stream.cuda_stream))
        if workspaces is not None:
            _touch_workspaces(self._device, self.stream, workspaces)

    def uses(self) -> int | None:
        """Return how many users the pool has, or ``None`` where PyTorch does not tell."""
        return None if self._pool is None else self._pool.use_count()

    def trim(self) -> None:
        """Give memory back to the device if no graph is left in a pool of our own."""
        if self._owned and self.uses() == 1:
            with torch.cuda.device(self._device):
                # A pool keeps its memory for as long as it lives.
                self._pool = torch.cuda.MemPool()
            torch.cuda.empty_cache()

    def _empty_graph(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(self._device),
            torch.cuda.stream(self.stream),
            _quiet(),
            no_collection(),
        ):
            try:
                graph.capture_begin(pool=self.pool_id, capture_error_mode="thread_local")
            except RuntimeError as error:
                with contextlib.suppress(RuntimeError):
                    torch._C._cuda_endAllocateToPool(self._device.index, self.pool_id)
                raise RuntimeError(
                    "memory_pool: PyTorch cannot capture into this pool, whose last graph was "
                    "destroyed; give a new one"
                ) from error
            graph.capture_end()
        return graph

    def _own_stream(self) -> torch.cuda.Stream:
        """Pick a side stream whose workspaces lie in a pool of ours."""
        stream = torch.cuda.Stream(self._device)
        for _ in range(_STREAMS_IN_TORCH):
            key = (self._device.index, stream.cuda_stream)
            if key in _workspaces:
                return stream
            with torch.cuda.device(self._device):
                workspaces = torch.cuda.MemPool()
            _touch_workspaces(self._device, stream, workspaces)
            if _has_live_blocks(workspaces, self._device):
                _workspaces[key] = workspaces
                return stream
            stream = torch.cuda.Stream(self._device)  # that one's lie elsewhere already
        return stream


@contextlib.contextmanager
def _allocating_into(pool: torch.cuda.MemPool, device: torch.device) -> Generator[None, None, None]:
    with no_collection(), torch.cuda.use_mem_pool(pool, device):
        yield


def _touch_workspaces(
    device: torch.device, stream: torch.cuda.Stream, pool: torch.cuda.MemPool
) -> None:
    with (
        torch.no_grad(),
        torch.cuda.device(device),
        _allocating_into(pool, device),
        torch.cuda.stream(stream),
    ):
        square = torch.zeros(16, 16, device=device)
        torch.mm(square, square)  # cuBLAS
        torch.addmm(square[0], square, square)  # cuBLASLt


def segments_of(pool_id: Any, device: torch.device) -> list[dict[str, Any]]:
    """Return what the allocator holds for one memory pool, as ``torch.cuda.memory_snapshot`` does.

    Not ``memory_snapshot(pool_id)``: with PyTorch 2.11 processes that had called it for some
    hundreds of pools crashed in Python's own allocation of integers, and no longer without it. It
    looks as if references to the id were given up that were never taken, which integers up to 256
    survive.
    """
    return [
        segment
        for segment in torch.cuda.memory_snapshot()
        if segment["segment_pool_id"] == pool_id and segment["device"] == device.index
    ]


def _has_live_blocks(pool: torch.cuda.MemPool, device: torch.device) -> bool:
    return any(
        block["state"] == "active_allocated"
        for segment in segments_of(pool.id, device)
        for block in segment["blocks"]
    )


def end_failed_capture(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
    """Bring a capture that failed to its end, so that ``graph.reset()`` gives everything back.

    ``CUDAGraph.capture_end`` gives up where the driver says that the capture is void, with the
    allocators of device and pinned memory still recording into the pool, and the generators in
    capture mode (PyTorch issue 190348). The stream is out of the capture then, so an empty one is
    begun on it for ``capture_end`` to end: now it does the rest as well.

    Args:
        graph: After ``capture_begin``.
        stream: The stream it was called on, which is the current one.
    """
    with _quiet():
        try:
            graph.capture_end()
        except RuntimeError:
            begin_capture(stream)
            graph.capture_end()


@contextlib.contextmanager
def _quiet() -> Generator[None, None, None]:
    """Hold back the warning that a graph is empty, which a failed capture's often is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
