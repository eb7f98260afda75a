"""The capture backend of CUDA devices: ``torch.cuda.CUDAGraph``, one memory pool, one side stream.

What it cannot see: a forward that writes its attention state (the tape can).
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NoReturn

import torch

from graphshare.capture._collection import no_collection
from graphshare.capture._cuda_graph import GraphNodes
from graphshare.capture._cuda_known import KnownMemory
from graphshare.capture._cuda_memory import spans_of
from graphshare.capture._failure import forward_raised
from graphshare.capture._graph_memory import (
    GraphMemory,
    end_failed_capture,
    memory_for,
    segments_of,
)
from graphshare.capture._kept_graph import KeptGraph
from graphshare.capture.moves import Moves
from graphshare.capture.patching import Patch
from graphshare.capture.reading import GraphReading
from graphshare.errors import CaptureError, ReleasedStateError

__all__ = ["CudaBackend", "CudaGraph"]

_ERROR_MODES = ("global", "thread_local", "relaxed")


class CudaGraph:
    """A captured forward; see :class:`~graphshare.capture.protocol.CapturedGraph`.

    Attributes:
        outputs: What the forward returned; garbage until the first replay.
        nbytes: Bytes by which the memory pool grew. The driver's own memory for the graph is not
            in it.
        replay: Launches the graph on the current stream of its device. An attribute rather than
            a method: it is the launch itself, with nothing before it.
        graph: The ``torch.cuda.CUDAGraph``, or ``None`` once released.
        known: The device's memory when the session ended in which it was captured, of a graph that
            can be read: an address there that is nobody's any more was one.
    """

    outputs: Any
    nbytes: int
    graph: torch.cuda.CUDAGraph | None

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        outputs: Any,
        nbytes: int,
        device: torch.device,
        memory: GraphMemory,
    ) -> None:
        self.graph = graph
        self.outputs = outputs
        self.nbytes = nbytes
        self.replay: Callable[[], None] = graph.replay
        self._device = device
        self._memory = memory  # keeps the pool alive, and the cuBLAS workspace
        self._nodes: GraphNodes | None = None
        self.known = KnownMemory()

    def release(self) -> None:
        """Destroy the graph and drop its outputs; waits for replays under way."""
        graph, self.graph = self.graph, None
        if graph is None:
            return
        self.replay = _replay_released
        self.outputs = self._nodes = None
        with torch.cuda.device(self._device):
            if torch.cuda.is_current_stream_capturing():
                graph.reset()  # waiting or freeing memory would void the capture under way
                return
            torch.cuda.synchronize()
            graph.reset()
        self._memory.trim()

    def read(self) -> GraphReading:
        """Return the nodes and the addresses in them; see ``InspectableGraph``."""
        return self._read("read").read()

    def patch(self, moves: Moves) -> Patch:
        """Prepare to put it on other memory; see ``InspectableGraph``."""
        return self._read("rebind").patch(moves)

    def _read(self, doing: str) -> GraphNodes:
        if self.graph is None:
            raise ReleasedStateError(
                f"{doing} of a CUDA graph", expected="a captured graph", got="one that was released"
            )
        if self._nodes is None:
            self._nodes = GraphNodes(self.graph, self._device, self.known)
        return self._nodes


class CudaBackend:
    """Captures CUDA graphs on one device.

    All of a backend's graphs share one memory pool and one side stream: replays of them may not
    overlap, and the outputs of one last until the next replay of any.

    Args:
        device: A CUDA device.
        memory_pool: A ``torch.cuda.MemPool`` or ``torch.cuda.graph_pool_handle()`` to capture
            into, or ``None`` for one of its own. Backends given the same one share its memory
            and the side stream; a pool of its own returns its memory with the last graph.
        inspectable: Keep the graph beside its executable form, for
            ``CUDAGraph.raw_cuda_graph()``; costs host memory.
        capture_error_mode: What the driver refuses while a capture is under way.
            ``"thread_local"``, the default, refuses what *this* thread may not do.
            ``"global"``, PyTorch's default, also fails calls of other threads, such as an
            allocation of a data loader or an event query of the NCCL watchdog, which neither
            enter the graph nor harm it; and such a call spoils the capture. ``"relaxed"`` lets
            unsafe calls of this thread pass, and a graph that lacks them.
        generators: Generators of this device, besides its default one, that forwards draw from.

    Raises:
        RuntimeError: There is no CUDA device.
        ValueError: Not a CUDA device, an unknown mode, or a generator of another device.
    """

    name: str = "cuda"
    device: torch.device

    def __init__(
        self,
        device: torch.device | str = "cuda",
        *,
        memory_pool: Any = None,
        inspectable: bool = False,
        capture_error_mode: Literal["global", "thread_local", "relaxed"] = "thread_local",
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        resolved = torch.device(device)
        if resolved.type != "cuda":
            raise ValueError(f"device: CUDA graphs need a CUDA device, got {resolved}")
        if capture_error_mode not in _ERROR_MODES:
            raise ValueError(
                f"capture_error_mode: expected one of {', '.join(_ERROR_MODES)}, "
                f"got {capture_error_mode!r}"
            )
        if not torch.cuda.is_available():
            raise RuntimeError("device: CUDA graphs need a CUDA device, and torch finds none")
        if resolved.index is None:
            resolved = torch.device("cuda", torch.cuda.current_device())
        for generator in generators:
            if generator.device != resolved:
                raise ValueError(
                    f"generators: expected generators of {resolved}, got one of {generator.device}"
                )
        self.device = resolved
        self._inspectable = inspectable
        self._mode = capture_error_mode
        self._generators = tuple(generators)
        self._depth = 0
        self._captured: list[CudaGraph] = []
        self._memory = memory_for(resolved, memory_pool)

    def session(self) -> AbstractContextManager[None]:
        """Bracket warmups and captures: collect garbage and empty the cache, once."""
        return self._session()

    @contextlib.contextmanager
    def _session(self) -> Generator[None, None, None]:
        if self._depth == 0:
            with torch.cuda.device(self.device):
                self._refuse_nesting()
                # Before every capture this would cost seconds: memory for the pool is what it is
                # for, and within a session only warmups make garbage.
                torch.cuda.synchronize()
                gc.collect()
                torch.cuda.empty_cache()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0 and self._captured:
                captured, self._captured = self._captured, []
                known = KnownMemory(spans_of(self.device))
                for graph in captured:
                    graph.known = known

    def warmup(self, forward: Callable[[], Any]) -> Any:
        """Run ``forward`` on the side stream, ordered after and before the current stream.

        Raises:
            CaptureError: ``forward`` raised.
        """
        with self.session(), self._on_side_stream():
            try:
                return forward()
            except Exception as error:
                raise forward_raised("warmup", error) from error

    def capture(
        self, forward: Callable[[], Any], *, protected: Sequence[torch.Tensor] = ()
    ) -> CudaGraph:
        """Capture one call of ``forward`` on the side stream.

        Args:
            forward: Takes nothing, returns any nest.
            protected: Ignored: no write of a kernel can be seen.

        Raises:
            CaptureError: ``forward`` raised or did what a capture forbids. The stream, the
                generators and the pool are as before; tensors that the exception's traceback
                refers to free their memory with it.
        """
        del protected
        with self.session(), torch.cuda.device(self.device):
            self._refuse_nesting()
            memory = self._memory
            graph = KeptGraph(keep_graph=True) if self._inspectable else torch.cuda.CUDAGraph()
            for generator in self._generators:
                graph.register_generator_state(generator)
            reserved_bytes = torch.cuda.memory_reserved()
            try:
                # A collection may free a dead memory pool, and cudaFree voids a capture.
                with self._on_side_stream(), no_collection():
                    outputs = _record(graph, forward, memory, self._mode)
                if self._inspectable:
                    graph.instantiate()
            except BaseException as error:
                graph.reset()
                memory.trim()
                if isinstance(error, CaptureError) or not isinstance(error, Exception):
                    raise
                raise forward_raised("capture", error) from error
            nbytes = torch.cuda.memory_reserved() - reserved_bytes
            captured = CudaGraph(graph, outputs, nbytes, self.device, memory)
            if self._inspectable:
                self._captured.append(captured)
            return captured

    def apart(self) -> CudaBackend:
        """Return a backend like this one, with a memory pool of its own, on the same stream."""
        other = copy.copy(self)
        other._depth = 0
        other._captured = []
        other._memory = self._memory.apart()
        return other

    def segments(self) -> list[dict[str, Any]]:
        """Return what the memory pool holds, as ``torch.cuda.memory_snapshot`` tells it."""
        return segments_of(self._memory.pool_id, self.device)

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)

    def _refuse_nesting(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                "capture inside a capture",
                expected="a stream that is not capturing",
                got="one that is",
                remedy="Capture the two forwards one after the other",
            )

    @contextlib.contextmanager
    def _on_side_stream(self) -> Generator[None, None, None]:
        with torch.cuda.device(self.device):
            current, side = torch.cuda.current_stream(), self._memory.stream
            self._memory.prepare()
            side.wait_stream(current)  # what the state's owner has just written
            try:
                with torch.cuda.stream(side):
                    yield
            finally:
                current.wait_stream(side)


def _record(
    graph: torch.cuda.CUDAGraph, forward: Callable[[], Any], memory: GraphMemory, mode: Any
) -> Any:
    graph.capture_begin(pool=memory.pool_id, capture_error_mode=mode)
    try:
        outputs = forward()
    except BaseException:
        # The capture must end on this stream whatever happened, or the stream stays in it.
        torch.cuda.set_stream(memory.stream)
        end_failed_capture(graph, memory.stream)
        raise
    torch.cuda.set_stream(memory.stream)
    try:
        graph.capture_end()
    except Exception as error:
        end_failed_capture(graph, memory.stream)
        raise CaptureError(
            "the forward did what a capture forbids, and went on",
            got=str(error).splitlines()[0],
            expected="work that stays on the device",
            consequence="The graph is void",
            remedy="Look for a swallowed exception, or a side stream that was not joined",
        ) from error
    return outputs


def _replay_released() -> NoReturn:
    raise ReleasedStateError(
        "replay of a CUDA graph", expected="a captured graph", got="one that was released"
    )
