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
        begins, starts, aligned = [_tensor(())], [_tensor(())], bytearray()
        for base, (layout, _, rows) in zip(self.bases, shape, strict=True):
            each = base + layout.words * torch.arange(rows, device="cpu")
            begins.append(each)
            if layout.starts:
                starts.append((each[:, None] + _tensor(layout.starts)).flatten())
            aligned += layout.aligned * rows
        self.begins, self.starts = torch.cat(begins), torch.cat(starts)
        self.aligned = _bools(aligned)
        self._usual: torch.Tensor | None = None
        self._prepare_copies()

    def _prepare_copies(self) -> None:
        """Work out what is copied where, in bytes from the first word, row by row."""
        self._in_one: list[int] = []  # targets of the nodes with one buffer
        self._pointed: list[FunctionLayout] = []  # of the nodes with pointers
        self._targets: list[int] = []  # of those, where the first parameter begins
        self._sizes: list[int] = []  # from there to the end of the last
        self._counts: list[int] = []  # of pointers
        offsets: list[int] = []  # of the parameter that each pointer is to
        for base, (layout, in_one, rows) in zip(self.bases, self._shape, strict=True):
            if not layout.words:
                continue
            places = range(8 * base, 8 * (base + layout.words * rows), 8 * layout.words)
            if in_one:
                self._in_one += places
                continue
            self._pointed += repeat(layout, rows)
            self._targets += (place + layout.begin for place in places)
            self._sizes += repeat(layout.nbytes - layout.begin, rows)
            self._counts += repeat(len(layout.params), rows)
            offsets += [offset for offset, _ in layout.params] * rows
        *self._firsts, self._pointers = accumulate(self._counts, initial=0)
        self._offsets, self._first = _tensor(offsets), _tensor(self._firsts)
        self._begin = _tensor(layout.begin for layout in self._pointed)
        counts = _tensor(self._counts)
        self._owner = torch.arange(len(counts), device="cpu").repeat_interleave(counts)

    @property
    def usual(self) -> torch.Tensor:
        """For each word one that is no address, ``[words]``, int64; known of each layout."""
        if self._usual is None:
            each = [
                layout.usual.repeat(rows)
                for layout, _, rows in self._shape
                if layout.usual is not None
            ]
            self._usual = torch.cat([_tensor(()), *each])
        return self._usual

    def copy(self, rows: Sequence[Rows], address: int) -> None:
        """Copy the words of all nodes.

        Args:
            rows: Of the graph that has this structure.
            address: Where the memory for them begins; it is zero.
        """
        with_words = [each for each in rows if each.layout.words]
        given = [each for each in with_words if each.in_one]
        _copy_all(
            [address + begin for begin in self._in_one],
            [source for each in given for source in each.sources],
            [size for each in given for size in each.sizes],
        )
        if self._pointed:
            self._copy_pointed(
                [source for each in with_words if not each.in_one for source in each.sources],
                address,
            )
        for each, base in zip(rows, self.bases, strict=True):
            each.lie_at(address + 8 * base, base)

    def _copy_pointed(self, sources: list[int], address: int) -> None:
        held = bytearray(8 * self._pointers)
        at = ctypes.addressof((ctypes.c_char * len(held)).from_buffer(held))
        _copy_all(
            [at + 8 * first for first in self._firsts],
            sources,
            [8 * count for count in self._counts],
        )
        pointers = torch.frombuffer(held, dtype=torch.int64)
        begins = pointers - self._offsets
        first = begins[self._first]
        # The driver was seen to keep the parameters as the device is to see them, which is one
        # copy then; whether it does is looked at for each node.
        apart = begins != first[self._owner]
        targets = [address + target for target in self._targets]
        found: list[int] = (first + self._begin).tolist()
        if not bool(apart.any()):
            _copy_all(targets, found, self._sizes)
            return
        scattered = set(self._owner[apart].tolist())
        for row, (target, source, size) in enumerate(zip(targets, found, self._sizes, strict=True)):
            if row not in scattered:
                _move(target, source, size)
                continue
            layout, start = self._pointed[row], self._firsts[row]
            each = pointers[start : start + self._counts[row]].tolist()
            for pointer, (offset, length) in zip(each, layout.params, strict=True):
                _move(target - layout.begin + offset, pointer, length)


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
