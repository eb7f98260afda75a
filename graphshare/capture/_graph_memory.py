"""The memory and the side stream that CUDA graphs are captured with.

Two of PyTorch's ways are guarded against here, and nowhere else:

* A capture that fails leaks its memory pool (PyTorch issue 190348) and may leave its generators
  in capture mode, so that the next ``torch.rand`` raises. :meth:`GraphMemory.reclaim` undoes
  both, whether or not the PyTorch at hand does so itself.
* Destroying a graph frees the cuBLAS workspace of the stream it was captured on, though other
  graphs of that stream still write to it (PyTorch issue 193402). :meth:`GraphMemory.prepare`
  has the workspace allocated in a pool where nobody else allocates: freed or not, its address
  stays good, and the next workspace of that stream takes the same place.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Generator, Iterable
from typing import Any, cast

import torch

__all__ = ["GraphMemory", "memory_for"]

_STREAMS_IN_TORCH = 32  # torch.cuda.Stream() hands them out in turn

# A capture that could not be ended leaves callbacks into its graph in the allocator of pinned
# memory. They find nothing to do, but they must find the graph.
_abandoned: list[torch.cuda.CUDAGraph] = []

# One pool for the cuBLAS workspaces of each stream, by device and stream. It is kept for good, as
# PyTorch keeps the workspaces: graphs that are still alive may have been captured with them.
_workspaces: dict[tuple[int, int], torch.cuda.MemPool] = {}

_shared: weakref.WeakValueDictionary[tuple[int, tuple[int, int]], GraphMemory] = (
    weakref.WeakValueDictionary()
)


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
                # Without a user, the pool behind a handle goes with its last graph, and a capture
                # into it while outputs still live there stops the process.
                torch._C._cuda_beginAllocateCurrentThreadToPool(device.index, self._handle)
                torch._C._cuda_endAllocateToPool(device.index, self._handle)
                weakref.finalize(
                    self,
                    torch._C._cuda_releasePool,
                    device.index,
                    self._handle,
                ).atexit = False
        self.stream = self._own_stream()

    @property
    def pool_id(self) -> Any:
        """What ``CUDAGraph.capture_begin`` calls the pool."""
        return self._pool.id if self._pool is not None else self._handle or (0, 0)

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the pool holds on the device."""
        segments = torch.cuda.memory_snapshot(self.pool_id)
        return sum(s["total_size"] for s in segments if s["device"] == self._device.index)

    def prepare(self) -> None:
        """Have the stream's cuBLAS workspaces allocated, in the pool that is kept for them."""
        workspaces = _workspaces.get((self._device.index, self.stream.cuda_stream))
        if workspaces is not None:
            _touch_workspaces(self._device, self.stream, workspaces)

    def uses(self) -> int | None:
        """Return how many users the pool has, or ``None`` where PyTorch does not tell."""
        return None if self._pool is None else self._pool.use_count()

    def reclaim(
        self,
        graph: torch.cuda.CUDAGraph,
        *,
        uses_before: int | None,
        ended: bool,
        generators: Iterable[torch.Generator],
    ) -> None:
        """Undo a capture that failed.

        Args:
            graph: The graph of that capture.
            uses_before: What :meth:`uses` returned before it began.
            ended: Whether ``capture_end`` returned.
            generators: The generators that were registered with the graph.
        """
        index = self._device.index
        if not ended:
            _abandoned.append(graph)
            with contextlib.suppress(RuntimeError):  # already ended, say newer versions
                torch._C._cuda_endAllocateToPool(index, self.pool_id)
        graph.reset()
        uses = self.uses()
        if uses is not None and uses_before is not None:
            leaked = uses - uses_before
        else:
            leaked = 0 if ended or _reset_releases_failed_captures(index) else 1
        for _ in range(leaked):
            torch._C._cuda_releasePool(index, self.pool_id)
        if not ended:
            _leave_capture_mode(self._device, self.stream, generators)
        self.trim()

    def trim(self) -> None:
        """Give memory back to the device if no graph is left in a pool of our own."""
        if self._owned and self.uses() == 1:
            with torch.cuda.device(self._device):
                # A pool keeps its memory for as long as it lives.
                self._pool = torch.cuda.MemPool()
            torch.cuda.empty_cache()

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
            if _has_live_blocks(workspaces):
                _workspaces[key] = workspaces
                return stream
            stream = torch.cuda.Stream(self._device)  # that one's lie elsewhere already
        return stream


def _touch_workspaces(
    device: torch.device, stream: torch.cuda.Stream, pool: torch.cuda.MemPool
) -> None:
    with (
        torch.no_grad(),
        torch.cuda.device(device),
        torch.cuda.use_mem_pool(pool, device),
        torch.cuda.stream(stream),
    ):
        square = torch.zeros(16, 16, device=device)
        torch.mm(square, square)  # cuBLAS
        torch.addmm(square[0], square, square)  # cuBLASLt


def _has_live_blocks(pool: torch.cuda.MemPool) -> bool:
    return any(
        block["state"] == "active_allocated"
        for segment in torch.cuda.memory_snapshot(pool.id)
        for block in segment["blocks"]
    )


def _leave_capture_mode(
    device: torch.device, stream: torch.cuda.Stream, generators: Iterable[torch.Generator]
) -> None:
    """Let generators that a failed capture left in capture mode draw again.

    Only the end of a capture that succeeds switches the mode off, so a tiny one is made.
    """
    with torch.cuda.device(device), torch.cuda.stream(stream), torch.no_grad():
        scratch = torch.zeros(1, device=device)
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        graph.capture_begin(capture_error_mode="thread_local")
        scratch.zero_()
        graph.capture_end()
        graph.reset()


@functools.cache
def _reset_releases_failed_captures(index: int) -> bool:
    """Find out, by failing a capture in a pool of its own, whether ``reset`` releases its pool."""
    pool = torch.cuda.MemPool()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream(index)), quiet():
        graph.capture_begin(pool=cast("Any", pool.id), capture_error_mode="thread_local")
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(index)  # forbidden in a capture, and harmless
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
    _abandoned.append(graph)
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(index, pool.id)
    graph.reset()
    released = pool.use_count() == 1
    if not released:
        torch._C._cuda_releasePool(index, pool.id)
    return released


@contextlib.contextmanager
def quiet() -> Generator[None, None, None]:
    """Hold back the warning that a graph is empty, which a failed capture's often is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
