"""A driver of CUDA graphs that is made up: kernels whose parameters are some words."""

from __future__ import annotations

import ctypes
import functools
from types import SimpleNamespace

import torch

from graphshare.capture._cuda_concern import Concerns
from graphshare.capture._cuda_known import KnownMemory, Pairs
from graphshare.capture._cuda_memory import Span
from graphshare.capture._cuda_nodes import GraphIndex
from graphshare.capture._cuda_patch import GraphPatch
from graphshare.capture._graph_driver import Setters
from graphshare.capture._tensor_maps import TensorMaps
from graphshare.capture.moves import Moves

BASE = 0x7F00_0000_0000
NO_MAPS = TensorMaps(False, None)
# As a driver for the H200 encodes them: the address, the format and a stride, sizes, a box.
MAPS = TensorMaps(
    True,
    0,
    (0, 0xFFF8980D, 0, 0xFFFFFFFF00000000, 0, 0, 0, 0xFFFFFFFF00000000),
    (1, 4, 6),
    0x210,
)
MAP = (BASE, 0x8000046522, 1 << 60, 0, 0x3FF000003FF, 0, 0x3F00000000000000, 0x1F)


class Code(int):
    """As the enumerations of cuda-bindings are."""

    name = "CUDA_ERROR_PLANTED"


class Driver:
    """A graph of kernels; by default an integer of 4 bytes, 7, and a parameter of some words.

    Args:
        kernels: The words of each.
        layouts: Offset and size of each kernel's parameters, which are part of its words then.
        extra: Whether the parameters are in one buffer.
        apart: Whether each parameter lies by itself, not as the device is to see them.
        allocations: Start and size of what further nodes allocate.
    """

    def __init__(self, kernels, *, layouts=None, extra=False, apart=False, allocations=()):
        if layouts is None:
            kernels = [(7, *words) for words in kernels]
            layouts = [[(0, 4), (8, 8 * len(words) - 8)] for words in kernels]
        self.layouts = layouts
        self.blocks = [self._block(*each) for each in zip(kernels, layouts, strict=True)]
        self.run = list(self.blocks)
        self.extra, self.apart = extra, apart
        self.allocations = list(allocations)
        self.asked = []
        self.asked_layouts = 0
        self.set = 0
        self.fail_at = ()
        self.setters = {"kernel": Setters(self._in_executable, self._in_graph)}
        self._alive = []

    @staticmethod
    def _block(words, layout):
        """What the device sees: nothing but the parameters counts."""
        content = b"".join(word.to_bytes(8, "little") for word in words)
        block = bytearray(max((start + size for start, size in layout), default=0))
        for start, size in layout:
            block[start : start + size] = content[start : start + size]
        return bytes(block)

    def nodes(self, graph):
        return range(len(self.blocks) + len(self.allocations))

    def kind(self, node):
        return "kernel" if node < len(self.blocks) else "allocation"

    def allocation(self, node):
        return self.allocations[node - len(self.blocks)]

    def function(self, params):
        return repr(self.layouts[params.node])

    def name(self, params):
        return "kernel"

    def layout(self, params):
        self.asked_layouts += 1
        return self.layouts[params.node]

    def kernel(self, node):
        content = self.blocks[node]
        data = ctypes.create_string_buffer(content, max(1, len(content)))
        start = ctypes.addressof(data)
        if self.extra:
            size = ctypes.c_size_t(len(content))
            pairs = (ctypes.c_uint64 * 5)(1, start, 2, ctypes.addressof(size), 0)
            self._alive += [data, size, pairs]
            return SimpleNamespace(node=node, extra=ctypes.addressof(pairs), kernelParams=0)
        starts = [start + offset for offset, _ in self.layouts[node]]
        if self.apart:
            parts = [
                ctypes.create_string_buffer(content[offset : offset + size], max(1, size))
                for offset, size in self.layouts[node]
            ]
            self._alive += parts
            starts = [ctypes.addressof(part) for part in parts]
        pointers = (ctypes.c_void_p * len(starts))(*starts)
        self._alive += [data, pointers]
        return SimpleNamespace(node=node, extra=0, kernelParams=ctypes.addressof(pointers))

    def is_memory(self, address):
        self.asked.append(address)
        return BASE <= address < BASE + (1 << 20)

    def _content(self, params):
        if params.extra:
            pairs = (ctypes.c_uint64 * 5).from_address(params.extra)
            return ctypes.string_at(pairs[1], ctypes.c_size_t.from_address(pairs[3]).value)
        layout = self.layouts[params.node]
        pointers = (ctypes.c_void_p * len(layout)).from_address(params.kernelParams)
        block = bytearray(len(self.blocks[params.node]))
        for pointer, (start, size) in zip(pointers, layout, strict=True):
            block[start : start + size] = ctypes.string_at(pointer, size) if size else b""
        return bytes(block)

    def _in_executable(self, executable, node, params):
        self.set += 1
        if self.set in self.fail_at:
            return (Code(1),)
        self.run[node] = self._content(params)
        return (Code(0),)

    def _in_graph(self, node, params):
        self.set += 1
        if self.set in self.fail_at:
            return (Code(1),)
        self.blocks[node] = self._content(params)
        return (Code(0),)


def words_of(block):
    return [int.from_bytes(block[i : i + 8], "little") for i in range(8, len(block), 8)]


class Swaps(Moves):
    """Moves of addresses alone, each of one byte."""

    def __init__(self, swaps):
        self.swaps = swaps
        self.steps = [new - old for old, new in swaps.items()]
        self.outcomes = {}

    def moving(self, ascending):
        pairs = {old: pair for pair, old in enumerate(self.swaps)}
        found = [place for place, value in enumerate(ascending) if value in pairs]
        return found, [pairs[ascending[place]] for place in found]


def read(driver, *, maps=NO_MAPS, spans=(), fixed=()):
    known = KnownMemory(Span(start, end, (0, 0)) for start, end in spans)
    return GraphIndex(driver, None, maps, known, Pairs(fixed))


def patch_of(index, swaps, behind=None):
    return GraphPatch(concerns_of(index), "exec", Swaps(swaps), torch.device("cpu"), behind)


@functools.cache
def concerns_of(index):
    return Concerns(index)


def held(index):
    """The words that may move, by what they hold: where they are, and the nodes that have them."""
    found = {}
    for place, slot, number in zip(*map(torch.Tensor.tolist, index.moving), strict=True):
        places, numbers = found.setdefault(index.addresses.by_slot[slot], ([], []))
        places.append(place)
        if number not in numbers:
            numbers.append(number)
    return {value: (places, sorted(numbers)) for value, (places, numbers) in found.items()}
