"""The nodes of a CUDA graph and the words in their parameters that may be addresses.

All words of all nodes lie side by side in one buffer of our own, those of one function row by row,
so that those that may be addresses are found in a few operations over many of them, and a node is
put on other memory by writing there and handing the driver what refers to it. A word is named by
its place in the buffer.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from graphshare.capture._cuda_known import KnownMemory, Pairs
from graphshare.capture._cuda_params import FunctionLayout
from graphshare.capture._cuda_slots import Addresses
from graphshare.capture._cuda_words import Rows
from graphshare.capture._graph_driver import DriverError, GraphDriver
from graphshare.capture._tensor_maps import TensorMaps

__all__ = ["GraphIndex", "Moving", "NodeIndex", "Site"]

# Numbers outside of these are no addresses: the first page, and what user space does not reach.
_LEAST, _MOST = 1 << 16, 1 << 56

_WITHOUT_ADDRESSES = frozenset(
    {"empty", "event wait", "event record", "semaphore signal", "semaphore wait"}
)
_HOST, _DEVICE, _UNIFIED = 1, 2, 4  # CUmemorytype

_ByFunction = dict[tuple[int, bool], Rows]
"""By the driver's number for the function, and whether its parameters are in one buffer."""


class Moving(NamedTuple):
    """The words of a graph that may move; all ``[n]``, int64, on the host.

    Attributes:
        places: Where each is.
        slots: The slot of each.
        numbers: The node of each, by number.
    """

    places: torch.Tensor
    slots: torch.Tensor
    numbers: torch.Tensor


class Site(NamedTuple):
    """A word that may be an address.

    Attributes:
        value: The word.
        parameter: Number of the kernel's parameter; else 0.
        offset: In that parameter, in bytes; else 0 for the source of a copy, 1 for the target.
        in_map: Whether it looks like the address in a tensor map.
    """

    value: int
    parameter: int
    offset: int
    in_map: bool = False


@dataclass(slots=True)
class NodeIndex:
    """One node as it was read.

    Attributes:
        number: In the order of the graph, enclosed nodes after their encloser.
        handle: The driver's.
        kind: In words.
        inside: Number of the encloser.
        rows: Of a kernel: where its words are.
        row: Which of them.
        params: Of a copy or a fill: what the driver takes for it.
        ends: The attribute of ``params`` that each word is, empty where it is none.
        first: Of a node that is no kernel: its first word, counted from the first of all such.
        words: How many it has.
        opaque: What cannot be read.
        sealed: Whether what cannot be read may hold an address of a buffer.
    """

    number: int
    handle: Any
    kind: str
    inside: int | None
    rows: Rows | None = None
    row: int = 0
    params: Any = None
    ends: tuple[str, ...] = ()
    first: int = 0
    words: int = 0
    opaque: tuple[str, ...] = ()
    sealed: bool = False

    @property
    def layout(self) -> FunctionLayout | None:
        """Of a kernel's parameters."""
        return None if self.rows is None else self.rows.layout

    @property
    def name(self) -> str:
        """Of the kernel; else the kind."""
        return self.kind if self.rows is None else self.rows.layout.name

    def seal(self, why: str) -> None:
        """Know that it may hold an address that cannot be read."""
        self.opaque = (*self.opaque, why)
        self.sealed = True


class GraphIndex:
    """All nodes of a graph, read once.

    Attributes:
        driver: As given.
        nodes: Every node, enclosed ones included.
        sealed: Those that may hold an address that cannot be read.
        allocations: Start and size of the memory that the graph's own nodes allocate.
        words: Every word of every node; may be written.
        word_tensor: The same memory, ``[n]``, int64, on the host.
        moving: The words that may move.
        addresses: What they hold, by slot.

    Args:
        driver: The driver.
        graph: Its handle.
        maps: What tensor maps look like.
        known: What is known of the memory at its capture.
        fixed: The memory that does not move: the graph's own.

    Raises:
        DriverError: The driver does not let it be read.
    """

    def __init__(
        self,
        driver: GraphDriver,
        graph: Any,
        maps: TensorMaps,
        known: KnownMemory,
        fixed: Pairs,
    ) -> None:
        self.nodes: list[NodeIndex] = []
        self.allocations: list[tuple[int, int]] = []
        self.driver, self._maps, self._known = driver, maps, known
        by_function: _ByFunction = {}
        # Of the nodes that are no kernels, two for each: addresses, whoever has the memory.
        self._operands: list[int] = []
        self._owners: list[int] = []
        self._read(graph, None, by_function)
        rows = [each for each in by_function.values() if each.numbers]
        self._structure = known.structure(
            tuple((each.layout, each.in_one, len(each.numbers)) for each in rows)
        )
        self._numbers = [number for each in rows for number in each.numbers]  # row by row
        self._copy(rows)
        self._places: list[int] = []
        self._in_maps: frozenset[int] = frozenset()
        self.moving, self.addresses = self._find(rows, fixed)
        self.sealed = [node for node in self.nodes if node.sealed]

    def _read(self, graph: Any, inside: int | None, rows: _ByFunction) -> None:
        driver, nodes, known, maps = self.driver, self.nodes, self._known, self._maps
        for handle in driver.nodes(graph):
            kind = driver.kind(handle)
            node = NodeIndex(len(nodes), handle, kind, inside)
            nodes.append(node)
            if kind == "kernel":
                params = driver.kernel(handle)
                which = driver.function(params), bool(params.extra)
                mine = rows.get(which)
                try:
                    if mine is None:
                        layout = known.layout(driver, params, maps)
                        mine = rows[which] = Rows(layout, in_one=which[1])
                    node.row = mine.add(node.number, params)
                    node.rows = mine
                except DriverError as error:
                    node.seal(f"its parameters: {error}")
            else:
                self._read_other(node, rows)

    def _read_other(self, node: NodeIndex, rows: _ByFunction) -> None:
        driver, handle, kind = self.driver, node.handle, node.kind
        if kind == "memcpy":
            node.params = driver.memcpy(handle)
            node.ends = tuple(_operand(node.params, end) for end in ("src", "dst"))
            self._add(node, *(_value(node.params, name) for name in node.ends))
        elif kind == "memset":
            node.params = driver.memset(handle)
            node.ends = "", "dst"
            self._add(node, 0, _value(node.params, "dst"))
        elif kind == "child graph":
            self._read(driver.child(handle), node.number, rows)
        elif kind == "conditional":
            bodies = driver.bodies(handle)
            if bodies is None:
                node.seal("its body: this driver does not show it")
            for body in bodies or ():
                self._read(body, node.number, rows)
        elif kind == "allocation":
            self.allocations.append(driver.allocation(handle))
        elif kind == "free":
            self._add(node, 0, driver.freed(handle))
        elif kind == "host":
            node.opaque = ("a function on the host, and what it is given",)
        elif kind not in _WITHOUT_ADDRESSES:
            node.seal(f"a node of the kind {kind!r}")

    def _add(self, node: NodeIndex, one: int, other: int) -> None:
        node.first, node.words = len(self._operands), 2
        self._operands += one, other
        self._owners.append(node.number)

    def _copy(self, rows: list[Rows]) -> None:
        """Copy all words into memory of our own: the kernels', and then the others'."""
        operands = struct.pack(f"{len(self._operands)}Q", *self._operands)
        self._buffer = bytearray(8 * self._structure.words) + operands
        self.words = memoryview(self._buffer).cast("Q")
        self.word_tensor = _tensor_on(self._buffer)
        self._structure.copy(rows, self.word_tensor.data_ptr())

    def _find(self, rows: list[Rows], fixed: Pairs) -> tuple[Moving, Addresses]:
        """Find the words that may be addresses, and the slots of those that may move."""
        structure, words = self._structure, self.word_tensor
        kernels = words[: structure.words]
        may_be = (words >= _LEAST) & (words < _MOST)
        may_be[: structure.words] &= structure.aligned
        if not self.allocations:  # else numbers are addresses that are none in other graphs
            self._learn(rows)
            may_be[: structure.words] &= kernels != structure.usual
        places = may_be.nonzero().flatten()
        values = words[places]
        are = self._known.are_memory(self.driver, values, self.allocations)
        are |= places >= structure.words  # an address, whoever has the memory
        places, values = places[are], values[are]
        self._places = places.tolist()
        self._find_maps(kernels)
        moving = ~fixed.hold(values)
        by_slot, slots = values[moving].unique(return_inverse=True)  # in ascending order
        places = places[moving]
        moved = Moving(places, slots, self._nodes_at(places))
        return moved, self._known.addresses(by_slot.tolist())

    def _nodes_at(self, places: torch.Tensor) -> torch.Tensor:
        """Return the numbers of the nodes that some words are in."""
        others = self._structure.words + 2 * torch.arange(len(self._owners), device="cpu")
        begins = torch.cat([self._structure.begins, others])
        numbers = torch.tensor([*self._numbers, *self._owners], dtype=torch.int64, device="cpu")
        return numbers[torch.searchsorted(begins, places, right=True) - 1]

    def _learn(self, rows: list[Rows]) -> None:
        """Ask about what a node of each function holds that is no address: most hold the same."""
        words, aligned = self.word_tensor, self._structure.aligned
        for each in rows:
            layout, begin = each.layout, each.base
            if layout.usual is None:
                end = begin + layout.words
                usual = words[begin:end].clone()
                may_be = (usual >= _LEAST) & (usual < _MOST) & aligned[begin:end]
                are = self._known.are_memory(self.driver, usual[may_be])
                usual[may_be] = usual[may_be].where(~are, 0)
                layout.usual = usual

    def _find_maps(self, kernels: torch.Tensor) -> None:
        """Find the tensor maps; seal the nodes that have one whose address cannot be told."""
        maps = self._maps
        begin = maps.look_like(kernels, self._structure.starts)
        if maps.word is not None:
            found = begin + maps.word
            values = kernels[found]
            self._in_maps = frozenset(found[(values >= _LEAST) & (values < _MOST)].tolist())
            return
        for place, number in zip(begin.tolist(), self._nodes_at(begin).tolist(), strict=True):
            node = self.nodes[number]
            node.seal(f"what may be a tensor map at byte {8 * (place - self.range_of(node)[0])}")

    @property
    def has_maps(self) -> bool:
        """Whether an address in a tensor map was found."""
        return not self._in_maps.isdisjoint(self._places)

    def range_of(self, node: NodeIndex) -> tuple[int, int]:
        """Return the first word of a node, and the one after its last."""
        rows = node.rows
        if rows is not None:
            base = rows.base + node.row * rows.layout.words
            return base, base + rows.layout.words
        base = self._structure.words + node.first
        return base, base + node.words

    def sites(self, node: NodeIndex) -> Iterator[Site]:
        """Yield the words of a node that may be addresses, with what they hold now."""
        places, words, layout, in_maps = self._places, self.words, node.layout, self._in_maps
        base, end = self.range_of(node)
        for place in places[bisect_left(places, base) : bisect_left(places, end)]:
            word = place - base
            parameter, offset = (0, word) if layout is None else layout.place(word)
            yield Site(words[place], parameter, offset, place in in_maps)


def _tensor_on(buffer: bytearray) -> torch.Tensor:
    if not buffer:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    with torch.inference_mode(mode=False):  # what is made in it cannot be written outside of it
        return torch.frombuffer(buffer, dtype=torch.int64)


def _operand(params: Any, end: str) -> str:
    """Return the name of an operand of a copy; empty for an array of the device, without one."""
    kind = int(getattr(params, f"{end}MemoryType"))
    if kind == _HOST:
        return f"{end}Host"
    return f"{end}Device" if kind in (_DEVICE, _UNIFIED) else ""


def _value(params: Any, name: str) -> int:
    return int(getattr(params, name) or 0) if name else 0
