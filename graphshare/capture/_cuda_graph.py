"""A ``torch.cuda.CUDAGraph`` that can be read and put on other memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from graphshare.capture._cuda_concern import Concerns
from graphshare.capture._cuda_known import KnownMemory
from graphshare.capture._cuda_memory import CudaMemory, spans_of
from graphshare.capture._cuda_nodes import GraphIndex, Site
from graphshare.capture._cuda_patch import GraphPatch
from graphshare.capture._failure import graph_memory_moves
from graphshare.capture._graph_driver import DriverError, GraphDriver, graph_driver
from graphshare.capture._kept_graph import Behind, CatchesUp
from graphshare.capture._tensor_maps import TensorMaps, tensor_maps
from graphshare.capture.moves import Moves
from graphshare.capture.patching import Patch
from graphshare.capture.reading import Certainty, GraphNode, GraphReading, Word
from graphshare.errors import ProvenanceError, RebindError, ReleasedStateError
from graphshare.memory import MemoryRanges

__all__ = ["ForeignGraph", "GraphNodes"]


class GraphNodes:
    """The nodes of one CUDA graph; read when they are first asked for, and kept.

    Args:
        graph: Captured, and kept beside its executable.
        device: Where it runs, with its index.
        known: What is known of the device's memory when it was captured.

    Raises:
        ProvenanceError: The graph was not kept, or the driver does not let it be read.
    """

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        device: torch.device,
        known: KnownMemory,
    ) -> None:
        self._graph = graph
        self._device = device
        self._known = known
        self._driver: GraphDriver = graph_driver()
        try:
            raw = self._driver.graph(graph.raw_cuda_graph())
        except RuntimeError as error:
            raise ProvenanceError(
                "reading a CUDA graph",
                expected="a graph that was kept beside its executable form",
                got="one that was not",
                consequence="The executable form cannot be read",
                remedy="Capture with GraphPool(..., inspectable=True), or with "
                "torch.cuda.CUDAGraph(keep_graph=True)",
            ) from error
        try:
            with torch.cuda.device(device):
                self._maps: TensorMaps = tensor_maps(device.index)
                own = known.pool(graph.pool())
                self._own = MemoryRanges.merged(own.pairs, device)
                self._index = GraphIndex(self._driver, raw, self._maps, known, own)
                self._concerns = Concerns(self._index)
            self._behind: Behind | None = None
            if isinstance(graph, CatchesUp):
                self._behind = Behind(self._concerns, device)
                graph.behind = (*graph.behind, self._behind)
        except DriverError as error:
            raise ProvenanceError(
                "reading a CUDA graph",
                expected="a driver that lets it be read",
                got=str(error),
                remedy="See `graphshare doctor` for the versions that are supported",
            ) from error

    def read(self) -> GraphReading:
        """Return the nodes and the addresses in them."""
        with torch.cuda.device(self._device):
            memory = self._memory()
            nodes = tuple(_seen(self._index, memory))
        has_maps = self._index.has_maps
        unknown = self._maps.exist and self._maps.word is None
        notes = (self._maps.note,) if has_maps or unknown else ()
        facts = {"driver": str(self._driver.version), "cuda": str(torch.version.cuda)}
        return GraphReading(nodes, memory.find, notes, facts)

    def _memory(self) -> CudaMemory:
        pool = self._graph.pool()
        return CudaMemory(
            self._device, self._driver, pool, self._known.spans, self._index.allocations
        )

    def patch(self, moves: Moves) -> Patch:
        """Prepare to change what ``moves`` asks for.

        Raises:
            RebindError: A node cannot be changed, or may hold what cannot be read.
        """
        self._check_own(moves)
        for node in self._index.sealed:
            named = f"{node.number}: {node.name}"
            raise RebindError(
                f"rebind of a graph with node {named}",
                expected="nodes that can be read",
                got=node.opaque[0],
                consequence="It may hold the old address, and would go on using it",
                remedy="Capture the keys anew",
                node=named,
            )
        executable = self._driver.executable(self._executable())
        return GraphPatch(self._concerns, executable, moves, self._device, self._behind)

    def _executable(self) -> int:
        # Asked each time: torch makes another one when it instantiates the graph again.
        try:
            return self._graph.raw_cuda_graph_exec()
        except RuntimeError:  # an engine may leave it to the first replay
            self._graph.instantiate()
            return self._graph.raw_cuda_graph_exec()

    def _check_own(self, moves: Moves) -> None:
        """Refuse to move the graph's own memory, parts of which it uses again and again.

        Nothing may move there either: replays of other graphs in the pool write it.
        """
        if self._own.overlaps(moves.ranges) or self._own.overlaps(moves.targets):
            raise graph_memory_moves()


def _seen(index: GraphIndex, memory: CudaMemory) -> Iterator[GraphNode]:
    # Many nodes have the same address at the same place, and share a word for it.
    in_kernels: dict[Site, Word | None] = {}
    in_others: dict[Site, Word | None] = {}
    for node in index.nodes:
        kernel = node.rows is not None
        made = in_kernels if kernel else in_others
        words: list[Word] = []
        for site in index.sites(node):
            try:
                word = made[site]
            except KeyError:
                word = made[site] = _word(site, memory, kernel=kernel)
            if word is not None:
                words.append(word)
        yield GraphNode(node.number, node.kind, node.name, tuple(words), node.opaque, node.inside)


def _word(site: Site, memory: CudaMemory, *, kernel: bool) -> Word | None:
    value, parameter, offset, in_map = site
    if memory.find(value) is None:
        return None
    place = parameter, offset
    if not kernel:
        return Word(value, "dst" if offset else "src", Certainty.READ, 0, place)
    where = f"parameter {parameter}" + (f" + {offset}" if offset else "")
    return Word(value, where, Certainty.TENSOR_MAP if in_map else Certainty.INFERRED, 0, place)


class ForeignGraph:
    """A graph that an engine captured by itself; see ``InspectableGraph``.

    Args:
        graph: Captured with ``keep_graph=True``, or it cannot be read.
        outputs: What its forward returned.
        device: Where it runs, with its index.
    """

    outputs: Any
    nbytes: int = 0

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Any, device: torch.device) -> None:
        self.outputs = outputs
        self.replay: Callable[[], None] = graph.replay
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._device = device
        self._nodes: GraphNodes | None = None
        self._known = KnownMemory(spans_of(device))

    def read(self) -> GraphReading:
        """Return the nodes and the addresses in them."""
        return self._read().read()

    def patch(self, moves: Moves) -> Patch:
        """Prepare to change what ``moves`` asks for."""
        return self._read().patch(moves)

    def _read(self) -> GraphNodes:
        if self._graph is None:
            raise ReleasedStateError(
                "reading a CUDA graph", expected="a captured graph", got="one that was released"
            )
        if self._nodes is None:
            self._nodes = GraphNodes(self._graph, self._device, self._known)
        return self._nodes

    def release(self) -> None:
        """Let go of the graph, which is the engine's."""
        self._graph = self._nodes = None
        self.outputs = None
