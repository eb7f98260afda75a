"""The nodes of a CUDA graph and the words in their parameters that may be addresses."""

from __future__ import annotations

import ctypes
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from graphshare.capture._graph_driver import DriverError, GraphDriver, demangled
from graphshare.capture._tensor_maps import MAP_WORDS, TensorMaps

__all__ = ["GraphIndex", "KernelParams", "NodeIndex", "Site"]

# Numbers outside of these are no addresses: the first page, and what user space does not reach.
_LEAST, _MOST = 1 << 16, 1 << 56

_BUFFER, _SIZE = 1, 2  # CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE

_WITHOUT_ADDRESSES = frozenset(
    {"empty", "event wait", "event record", "semaphore signal", "semaphore wait"}
)


@dataclass(slots=True)
class Site:
    """A word that may be an address.

    Attributes:
        value: The word.
        word: Its place: in a kernel's parameters, counted in eight bytes; else 0 for the source
            of a copy, 1 for the target.
        parameter: Number of the kernel's parameter.
        offset: In that parameter, in bytes.
        in_map: Whether it looks like the address in a tensor map.
    """

    value: int
    word: int
    parameter: int = 0
    offset: int = 0
    in_map: bool = False


@dataclass(slots=True)
class NodeIndex:
    """One node as it was read.

    Attributes:
        number: In the order of the graph, enclosed nodes after their encloser.
        handle: The driver's.
        kind: In words.
        name: Of the kernel; else the kind.
        inside: Number of the encloser.
        sites: What may be addresses.
        opaque: What cannot be read.
        sealed: Whether what cannot be read may hold an address of a buffer.
    """

    number: int
    handle: Any
    kind: str
    name: str
    inside: int | None
    sites: list[Site] = field(default_factory=list[Site])
    opaque: list[str] = field(default_factory=list[str])
    sealed: bool = False


class _Layout:
    """Where the words of one function's parameters are."""

    __slots__ = ("maps", "name", "nbytes", "params", "words")

    def __init__(self, driver: GraphDriver, params: Any, maps: TensorMaps) -> None:
        self.params = driver.layout(params)
        self.name = demangled(driver.name(params))
        self.nbytes = max((offset + size for offset, size in self.params), default=0)
        self.words: list[tuple[int, int, int]] = []  # word, parameter, offset in it
        self.maps: list[int] = []  # words at which a tensor map may begin
        for number, (start, size) in enumerate(self.params):
            if start % 8:
                continue  # nothing in it is aligned for an address
            for offset in range(0, size - 7, 8):
                self.words.append(((start + offset) // 8, number, offset))
                if maps.may_start(start + offset) and size - offset >= 8 * MAP_WORDS:
                    self.maps.append((start + offset) // 8)

    def bytes_of(self, params: Any) -> bytearray:
        """Return the parameters of a node as the device will see them."""
        found = bytearray(-(-self.nbytes // 8) * 8)
        extra = int(params.extra or 0)
        if extra:
            data, size = _extra(extra)
            size = min(size, len(found))
            found[:size] = ctypes.string_at(data, size)
        elif self.params:
            pointers = (ctypes.c_void_p * len(self.params)).from_address(int(params.kernelParams))
            for pointer, (offset, size) in zip(pointers, self.params, strict=True):
                found[offset : offset + size] = ctypes.string_at(pointer, size)
        return found


def _extra(address: int) -> tuple[int, int]:
    """Return address and size of a parameter buffer: pairs of a number and a pointer, then 0."""
    data = size = 0
    while True:
        number, value = (ctypes.c_uint64 * 2).from_address(address)
        if number == _BUFFER:
            data = value
        elif number == _SIZE:
            size = ctypes.c_size_t.from_address(value).value
        else:
            return data, size
        address += 16


class KernelParams:
    """The parameters of one kernel node in memory of our own, to be changed and set.

    Args:
        params: What the driver returned for the node.
        layout: Of its function.

    Attributes:
        params: What the driver takes; refers to :attr:`words`.
        words: The parameters, eight bytes each; may be written.
    """

    def __init__(self, params: Any, layout: _Layout) -> None:
        content = layout.bytes_of(params)
        self._buffer = (ctypes.c_char * len(content)).from_buffer(content)
        self.words = (ctypes.c_uint64 * (len(content) // 8)).from_buffer(content)
        base = ctypes.addressof(self._buffer)
        if int(params.extra or 0):
            self._size = ctypes.c_size_t(layout.nbytes)
            self._extra = (ctypes.c_uint64 * 5)(
                _BUFFER, base, _SIZE, ctypes.addressof(self._size), 0
            )
            params.extra = ctypes.addressof(self._extra)
        else:
            starts = [base + offset for offset, _ in layout.params]
            self._pointers = (ctypes.c_void_p * len(starts))(*starts)
            params.kernelParams = ctypes.addressof(self._pointers)
        self.params = params


class GraphIndex:
    """All nodes of a graph, read once.

    Attributes:
        nodes: Every node, enclosed ones included.
        allocations: Start and size of the memory that the graph's own nodes allocate.

    Args:
        driver: The driver.
        graph: Its handle.
        maps: What tensor maps look like.
        spans: Start and end of the memory that PyTorch had when it was captured.

    Raises:
        DriverError: The driver does not let it be read.
    """

    def __init__(
        self, driver: GraphDriver, graph: Any, maps: TensorMaps, spans: Sequence[tuple[int, int]]
    ) -> None:
        self.nodes: list[NodeIndex] = []
        self.allocations: list[tuple[int, int]] = []
        self._layouts: dict[int, _Layout] = {}
        self._own: dict[int, KernelParams] = {}
        self._driver = driver
        self._maps = maps
        self._spans = sorted(spans)
        self._known: dict[int, bool] = {}
        self._read(graph, None)
        self._by_value: dict[int, list[tuple[NodeIndex, Site]]] = {}
        for node in self.nodes:
            for site in node.sites:
                self._by_value.setdefault(site.value, []).append((node, site))
        self._ascending = sorted(self._by_value)

    def _read(self, graph: Any, inside: int | None) -> None:
        driver = self._driver
        for handle in driver.nodes(graph):
            kind = driver.kind(handle)
            node = NodeIndex(len(self.nodes), handle, kind, kind, inside)
            self.nodes.append(node)
            if kind == "kernel":
                self._kernel(node)
            elif kind == "memcpy":
                params = driver.memcpy(handle)
                node.sites = [Site(value, place) for place, value in _ends(params) if value]
            elif kind == "memset":
                node.sites = [Site(int(driver.memset(handle).dst), 1)]
            elif kind == "child graph":
                self._read(driver.child(handle), node.number)
            elif kind == "conditional":
                bodies = driver.bodies(handle)
                if bodies is None:
                    node.opaque.append("its body: this driver does not show it")
                    node.sealed = True
                for body in bodies or ():
                    self._read(body, node.number)
            elif kind == "allocation":
                self.allocations.append(driver.allocation(handle))
            elif kind == "free":
                node.sites = [Site(driver.freed(handle), 1)]
            elif kind == "host":
                node.opaque.append("a function on the host, and what it is given")
            elif kind not in _WITHOUT_ADDRESSES:
                node.opaque.append(f"a node of the kind {kind!r}")
                node.sealed = True

    def own_params(self, node: NodeIndex) -> KernelParams:
        """Return a kernel node's parameters to be changed; the same object each time."""
        own = self._own.get(node.number)
        if own is None:
            params = self._driver.kernel(node.handle)
            own = self._own[node.number] = KernelParams(params, self._layout(params))
        return own

    def _layout(self, params: Any) -> _Layout:
        function = self._driver.function(params)
        layout = self._layouts.get(function)
        if layout is None:
            layout = self._layouts[function] = _Layout(self._driver, params, self._maps)
        return layout

    def _kernel(self, node: NodeIndex) -> None:
        params = self._driver.kernel(node.handle)
        try:
            layout = self._layout(params)
        except DriverError as error:
            node.opaque.append(f"its parameters: {error}")
            node.sealed = True
            return
        node.name = layout.name
        content = layout.bytes_of(params)
        words = struct.unpack(f"<{len(content) // 8}Q", content)
        maps = self._maps
        in_maps: set[int] = set()
        for start in layout.maps:
            if maps.word is None:
                if maps.looks_like(words, start):
                    node.opaque.append(f"what may be a tensor map at byte {8 * start}")
                    node.sealed = True
            elif _LEAST <= words[start + maps.word] < _MOST and maps.looks_like(words, start):
                in_maps.add(start + maps.word)
        node.sites = [
            Site(words[word], word, parameter, offset, word in in_maps)
            for word, parameter, offset in layout.words
            if _LEAST <= words[word] < _MOST and self._is_address(words[word])
        ]

    def _is_address(self, value: int) -> bool:
        """Whether it is, or was at the capture, an address of memory that anybody has."""
        known = self._known.get(value)
        if known is None:
            place = bisect_right(self._spans, (value, _MOST)) - 1
            known = self._known[value] = (
                (place >= 0 and value < self._spans[place][1])
                or any(start <= value < start + size for start, size in self.allocations)
                or self._driver.allocated(value) is not None
            )
        return known

    @property
    def ascending(self) -> list[int]:
        """Each value that may be an address, once, in ascending order."""
        return self._ascending

    def holding(self, value: int) -> list[tuple[NodeIndex, Site]]:
        """Return where a value of :attr:`ascending` is."""
        return self._by_value[value]

    def changed(self, values: Iterable[int]) -> None:
        """Bring it up to date where sites had, or have, one of some values."""
        by_value = self._by_value
        gone = set(values)
        moved = [each for value in gone for each in by_value.pop(value, ())]
        for node, site in moved:
            by_value.setdefault(site.value, []).append((node, site))
        # What stays is in order, so that sorting is a merge.
        stays = [value for value in self._ascending if value not in gone]
        self._ascending = sorted([*stays, *sorted({site.value for _, site in moved})])


def _ends(params: Any) -> Iterator[tuple[int, int]]:
    # An operand in an array of the device has no address.
    for place, end in enumerate(("src", "dst")):
        kind = int(getattr(params, f"{end}MemoryType"))
        if kind == _HOST:
            yield place, int(getattr(params, f"{end}Host") or 0)
        elif kind in (_DEVICE, _UNIFIED):
            yield place, int(getattr(params, f"{end}Device"))


_HOST, _DEVICE, _UNIFIED = 1, 2, 4  # CUmemorytype
