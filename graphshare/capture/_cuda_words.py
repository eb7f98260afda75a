"""The words of all kernel nodes of a graph, copied into memory of our own.

Nodes of one function lie row by row. What can be worked out from the functions and the numbers of
their nodes alone is worked out once for all graphs that have the same.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate, repeat
from typing import Any

import torch

from graphshare.capture._cuda_params import FunctionLayout
from graphshare.capture._graph_driver import DriverError

__all__ = ["Rows", "Shape", "Structure"]

_BUFFER, _SIZE = 1, 2  # CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE
_Pair = ctypes.c_uint64 * 2
_move = ctypes.memmove

Shape = tuple[tuple[FunctionLayout, bool, int], ...]
"""Of each function: its layout, whether its nodes are given their parameters in one buffer, and
the number of its nodes."""


class Rows:
    """Kernel nodes of one graph that run one function, and the words of their parameters.

    Args:
        layout: Of the function.
        in_one: Whether the nodes are given their parameters in one buffer, not one by one.

    Attributes:
        layout: As given.
        in_one: As given.
        numbers: Of the nodes.
        sources: Of each node: where its parameters are, or the pointers to them.
        sizes: Of each node: how many bytes it is given.
        base: The first word of the first row, once they are copied.
    """

    def __init__(self, layout: FunctionLayout, *, in_one: bool) -> None:
        self.layout = layout
        self.in_one = in_one
        self.numbers: list[int] = []
        self.sources: list[int] = []
        self.sizes: list[int] = []
        self.base = 0
        self._address = 0
        self._pointers: torch.Tensor | None = None
        self._pointing_at = self._step = 0
        self._size = ctypes.c_size_t(layout.nbytes)

    def add(self, number: int, params: Any) -> int:
        """Add a node; its words are copied later, and are the driver's until then.

        Args:
            number: Of the node.
            params: What the driver returned for it.

        Returns:
            The number of its row.

        Raises:
            DriverError: The driver does not say where the words are.
        """
        size = self.layout.nbytes
        if self.in_one:
            source, given = _buffer_at(int(params.extra))
            size = min(size, given)
        else:
            source = int(params.kernelParams)
        if not source and self.layout.params:
            raise DriverError("cuGraphKernelNodeGetParams", "CUDA_SUCCESS without parameters")
        self.sources.append(source)
        self.sizes.append(size)
        self.numbers.append(number)
        return len(self.numbers) - 1

    def lie_at(self, address: int, base: int) -> None:
        """Know where the rows were copied to.

        Args:
            address: Where the first begins.
            base: The number of the word there.
        """
        self._address, self.base = address, base
        self.sources, self.sizes = [], []

    def point(self, params: Any, row: int) -> None:
        """Have what the driver returned for a node refer to its row, whatever it holds then.

        Args:
            params: Of the node. Good for as long as these rows.
            row: The number of its row.
        """
        if self._pointers is None:
            self._pointers = self._pointing()
            self._pointing_at = self._pointers.data_ptr()
            self._step = 8 * self._pointers.shape[1]
        at = self._pointing_at + self._step * row
        if self.in_one:
            params.extra = at
        else:
            params.kernelParams = at

    def _pointing(self) -> torch.Tensor:
        """Return what the driver takes for each row, ``[rows, n]``, int64, on the host."""
        starts = self._address + 8 * self.layout.words * torch.arange(
            len(self.numbers), dtype=torch.int64, device="cpu"
        )
        if not self.in_one:
            return starts[:, None] + _tensor(offset for offset, _ in self.layout.params)
        pointers = _tensor([_BUFFER, 0, _SIZE, ctypes.addressof(self._size), 0])
        pointers = pointers.repeat(len(self.numbers), 1)
        pointers[:, 1] = starts
        return pointers


class Structure:
    """Where the words of a graph's kernels lie.

    Args:
        shape: Of the graph.

    Attributes:
        words: How many there are.
        bases: For each function, the first word of its first row.
        begins: The first word of each row, ``[rows]``, int64, on the host.
        aligned: Whether each word may be an address, ``[words]``, bool, on the host.
        starts: The words where a tensor map may begin, ``[n]``, int64, on the host.
    """

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        *self.bases, self.words = accumulate(
            (layout.words * rows for layout, _, rows in shape), initial=0
        )
        self._firsts = [
            base + layout.words * row
            for base, (layout, _, rows) in zip(self.bases, shape, strict=True)
            for row in range(rows)
        ]
        self.begins = _tensor(self._firsts)
        aligned = bytearray()
        starts: list[int] = []
        for base, (layout, _, rows) in zip(self.bases, shape, strict=True):
            aligned += layout.aligned * rows
            if layout.starts:
                for first in range(base, base + layout.words * rows, layout.words):
                    starts += [first + start for start in layout.starts]
        self.aligned = _bools(aligned)
        self.starts = _tensor(starts)
        self._usual: torch.Tensor | None = None
        self._prepare_pointers()

    def _prepare_pointers(self) -> None:
        """Work out where the pointers to parameters are put, and what each should be."""
        self._in_one: list[int] = []  # the first bytes of the rows of nodes with one buffer
        self._one_by_one: list[int] = []  # and of the others
        self._layouts: list[FunctionLayout] = []  # of those
        offsets: list[int] = []
        owner: list[int] = []
        counts: list[int] = []
        firsts = iter(self._firsts)
        for layout, in_one, rows in self._shape:
            begins = [8 * next(firsts) for _ in range(rows)]
            if in_one:
                self._in_one += begins
            elif layout.params:
                each = [offset for offset, _ in layout.params]
                for _ in range(rows):
                    owner += repeat(len(counts), len(each))
                    counts.append(len(each))
                offsets += each * rows
                self._one_by_one += begins
                self._layouts += repeat(layout, rows)
        self._offsets, self._owner = _tensor(offsets), _tensor(owner)
        *first, self._count = accumulate(counts, initial=0)
        self._first_places = first
        self._first = _tensor(first)
        self._counts = counts

    @property
    def usual(self) -> torch.Tensor | None:
        """For each word a value that is no address, ``[words]``, int64; ``None`` if not known."""
        if self._usual is None and all(
            layout.usual is not None for layout, _, _ in self._shape if layout.words
        ):
            self._usual = torch.cat(
                [
                    layout.usual.repeat(rows)
                    for layout, _, rows in self._shape
                    if layout.usual is not None
                ]
                or [_tensor(())]
            )
        return self._usual

    def copy(self, rows: Sequence[Rows], address: int) -> None:
        """Copy the words of all nodes.

        Args:
            rows: Of the graph that has this structure.
            address: Where the memory for them begins; it is zero.
        """
        given = [each for each in rows if each.in_one]
        if given:
            _copy_all(
                [address + begin for begin in self._in_one],
                [source for each in given for source in each.sources],
                [size for each in given for size in each.sizes],
            )
        if self._one_by_one:
            self._copy_pointed(
                [
                    source
                    for each in rows
                    if not each.in_one and each.layout.params
                    for source in each.sources
                ],
                address,
            )
        for each, base in zip(rows, self.bases, strict=True):
            each.lie_at(address + 8 * base, base)

    def _copy_pointed(self, sources: list[int], address: int) -> None:
        held = bytearray(8 * self._count)
        at = ctypes.addressof((ctypes.c_char * len(held)).from_buffer(held))
        _copy_all(
            [at + 8 * first for first in self._first_places],
            sources,
            [8 * count for count in self._counts],
        )
        pointers = torch.frombuffer(held, dtype=torch.int64)
        begins = pointers - self._offsets
        first = begins[self._first]
        # The driver was seen to keep the parameters as the device is to see them, which is one
        # copy then; whether it does is looked at for each node.
        apart = begins != first[self._owner]
        scattered = set(self._owner[apart].tolist()) if bool(apart.any()) else ()
        places, layouts = self._one_by_one, self._layouts
        found: list[int] = first.tolist()
        together = (
            range(len(found))
            if not scattered
            else [row for row in range(len(found)) if row not in scattered]
        )
        _copy_all(
            [address + places[row] + layouts[row].begin for row in together],
            [found[row] + layouts[row].begin for row in together],
            [layouts[row].nbytes - layouts[row].begin for row in together],
        )
        for row in scattered:
            start = self._first_places[row]
            each = pointers[start : start + self._counts[row]].tolist()
            for pointer, (offset, size) in zip(each, layouts[row].params, strict=True):
                _move(address + places[row] + offset, pointer, size)


def _copy_all(targets: Iterable[int], sources: Iterable[int], sizes: Iterable[int]) -> None:
    deque(map(_move, targets, sources, sizes), maxlen=0)


def _buffer_at(address: int) -> tuple[int, int]:
    """Return address and size of a parameter buffer: pairs of a number and a pointer, then 0."""
    data = size = 0
    while True:
        number = ctypes.c_uint64.from_address(address).value
        if number not in (_BUFFER, _SIZE):
            return (data, size) if size else (0, 0)
        _, value = _Pair.from_address(address)
        if number == _BUFFER:
            data = value
        else:
            size = ctypes.c_size_t.from_address(value).value
        address += 16


def _tensor(values: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64, device="cpu")


def _bools(values: bytearray) -> torch.Tensor:
    if not values:
        return torch.empty(0, dtype=torch.bool, device="cpu")
    return torch.frombuffer(values, dtype=torch.bool)
