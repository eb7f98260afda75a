"""The nodes of a CUDA graph and the words in their parameters that may be addresses.

All words of all nodes lie side by side in one buffer of our own, so that those that may be
addresses are found in a few operations over all of them, and a node is put on other memory by
writing there and handing the driver what refers to it. A word is named by its place in the buffer.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from graphshare.capture._cuda_known import KnownMemory, Pairs
from graphshare.capture._cuda_params import FunctionLayout
from graphshare.capture._graph_driver import DriverError, GraphDriver
from graphshare.capture._tensor_maps import TensorMaps

__all__ = ["GraphIndex", "Moving", "NodeIndex", "Site"]

# Numbers outside of these are no addresses: the first page, and what user space does not reach.
_LEAST, _MOST = 1 << 16, 1 << 56

_WITHOUT_ADDRESSES = frozenset(
    {"empty", "event wait", "event record", "semaphore signal", "semaphore wait"}
)
_HOST, _DEVICE, _UNIFIED = 1, 2, 4  # CUmemorytype
_OPERAND = 2  # of a word: an address, whoever has the memory


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


@dataclass(frozen=True, slots=True)
class Site:
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
        base: Its first word.
        layout: Of a kernel's parameters.
        params: Of a copy or a fill: what the driver takes for it.
        ends: The attribute of ``params`` that each word is, empty where it is none.
        opaque: What cannot be read.
        sealed: Whether what cannot be read may hold an address of a buffer.
    """

    number: int
    handle: Any
    kind: str
    inside: int | None
    base: int
    layout: FunctionLayout | None = None
    params: Any = None
    ends: tuple[str, ...] = ()
    opaque: list[str] = field(default_factory=list[str])
    sealed: bool = False

    @property
    def name(self) -> str:
        """Of the kernel; else the kind."""
        return self.kind if self.layout is None else self.layout.name


class GraphIndex:
    """All nodes of a graph, read once.

    Attributes:
        driver: As given.
        nodes: Every node, enclosed ones included.
        sealed: Those that may hold an address that cannot be read.
        allocations: Start and size of the memory that the graph's own nodes allocate.
        words: Every word of every node; may be written.
        address: Where that memory begins.
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
        parts = _Parts()
        self._read(graph, None, parts)
        self._buffer = bytearray(b"".join(parts.content))
        self.address = ctypes.addressof((ctypes.c_char * parts.words).from_buffer(self._buffer))
        self.words = memoryview(self._buffer).cast("Q")
        self.word_tensor = _tensor_on(self._buffer)
        self._places: list[int] = []
        self._in_maps: frozenset[int] = frozenset()
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        self.moving = Moving(none, none, none)
        self.addresses = known.addresses(())
        if parts.words:
            self._find(parts, fixed)
        self.sealed = [node for node in self.nodes if node.sealed]

    def _read(self, graph: Any, inside: int | None, parts: _Parts) -> None:
        driver, nodes = self.driver, self.nodes
        for handle in driver.nodes(graph):
            kind = driver.kind(handle)
            node = NodeIndex(len(nodes), handle, kind, inside, parts.words)
            nodes.append(node)
            if kind == "kernel":
                params = driver.kernel(handle)
                try:
                    layout = self._known.layout(driver, params, self._maps)
                except DriverError as error:
                    node.opaque.append(f"its parameters: {error}")
                    node.sealed = True
                    continue
                node.layout = layout
                parts.add(layout.content(params), layout.aligned, layout.starts)
            elif kind == "memcpy":
                node.params = driver.memcpy(handle)
                node.ends = tuple(_operand(node.params, end) for end in ("src", "dst"))
                parts.add_ends([_value(node.params, name) for name in node.ends])
            elif kind == "memset":
                node.params = driver.memset(handle)
                node.ends = "", "dst"
                parts.add_ends([0, _value(node.params, "dst")])
            elif kind == "child graph":
                self._read(driver.child(handle), node.number, parts)
            elif kind == "conditional":
                bodies = driver.bodies(handle)
                if bodies is None:
                    node.opaque.append("its body: this driver does not show it")
                    node.sealed = True
                for body in bodies or ():
                    self._read(body, node.number, parts)
            elif kind == "allocation":
                self.allocations.append(driver.allocation(handle))
            elif kind == "free":
                parts.add_ends([0, driver.freed(handle)])
            elif kind == "host":
                node.opaque.append("a function on the host, and what it is given")
            elif kind not in _WITHOUT_ADDRESSES:
                node.opaque.append(f"a node of the kind {kind!r}")
                node.sealed = True

    def _find(self, parts: _Parts, fixed: Pairs) -> None:
        """Find the words that may be addresses, and the slots of those that may move."""
        words = self.word_tensor
        aligned = torch.frombuffer(bytearray(b"".join(parts.aligned)), dtype=torch.uint8)
        places = ((words >= _LEAST) & (words < _MOST) & (aligned > 0)).nonzero().flatten()
        values = words[places]
        are = self._known.are_memory(self.driver, values, self.allocations)
        are |= aligned[places] == _OPERAND  # an address, whoever has the memory
        places, values = places[are], values[are]
        self._places = places.tolist()
        bases = [node.base for node in self.nodes]
        bases = torch.tensor(bases, dtype=torch.int64, device="cpu")
        self._find_maps(
            words, torch.frombuffer(bytearray(b"".join(parts.starts)), dtype=torch.bool), bases
        )
        moving = ~fixed.hold(values)
        places = places[moving]
        found, slots = values[moving].unique(return_inverse=True)  # in ascending order
        self.moving = Moving(places, slots, torch.searchsorted(bases, places, right=True) - 1)
        self.addresses = self._known.addresses(found.tolist())

    def _find_maps(self, words: torch.Tensor, starts: torch.Tensor, bases: torch.Tensor) -> None:
        """Find the tensor maps; seal the nodes that have one whose address cannot be told."""
        maps = self._maps
        begin = starts.nonzero().flatten()
        begin = begin[maps.look_like(words, begin)]
        if maps.word is not None:
            addresses = begin + maps.word
            may_be = (words[addresses] >= _LEAST) & (words[addresses] < _MOST)
            self._in_maps = frozenset(addresses[may_be].tolist())
            return
        numbers = torch.searchsorted(bases, begin, right=True) - 1
        for place, number in zip(begin.tolist(), numbers.tolist(), strict=True):
            node = self.nodes[number]
            node.opaque.append(f"what may be a tensor map at byte {8 * (place - node.base)}")
            node.sealed = True

    @property
    def has_maps(self) -> bool:
        """Whether an address in a tensor map was found."""
        return not self._in_maps.isdisjoint(self._places)

    def sites(self, node: NodeIndex) -> Iterator[Site]:
        """Yield the words of a node that may be addresses, with what they hold now."""
        places, words, layout = self._places, self.words, node.layout
        end = len(words) if node is self.nodes[-1] else self.nodes[node.number + 1].base
        for place in places[bisect_left(places, node.base) : bisect_left(places, end)]:
            word = place - node.base
            parameter, offset = (0, word) if layout is None else layout.place(word)
            yield Site(words[place], parameter, offset, place in self._in_maps)


class _Parts:
    """What the nodes of a graph have in their parameters, one after the other."""

    def __init__(self) -> None:
        self.content: list[bytes | bytearray] = []
        self.aligned: list[bytes] = []
        self.starts: list[bytes] = []
        self.words = 0

    def add(self, content: bytes | bytearray, aligned: bytes, starts: bytes) -> None:
        self.content.append(content)
        self.aligned.append(aligned)
        self.starts.append(starts)
        self.words += len(aligned)

    def add_ends(self, values: Sequence[int]) -> None:
        content = b"".join(value.to_bytes(8, "little") for value in values)
        self.add(content, bytes(_OPERAND if value else 0 for value in values), bytes(len(values)))


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
