"""The parameters of kernel nodes: where their words are, and a copy to be changed and set.

Nodes of one function are read and copied together: a model of many layers has thousands of nodes,
and a few dozen functions.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from graphshare.capture._graph_driver import DriverError, GraphDriver, demangled
from graphshare.capture._tensor_maps import MAP_WORDS, TensorMaps

__all__ = ["FunctionLayout", "Rows"]

_BUFFER, _SIZE = 1, 2  # CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE
_Pair = ctypes.c_uint64 * 2
_move = ctypes.memmove


class FunctionLayout:
    """Where the words of one function's parameters are.

    Args:
        driver: The driver.
        params: What it returned for a node of the function.
        maps: What tensor maps look like.

    Attributes:
        params: Offset and size of each parameter, in bytes.
        offsets: The offsets, ``[params]``, int64, on the host.
        begin: Where the first parameter begins, in bytes.
        nbytes: Where the last one ends.
        words: The same in words of eight bytes, rounded up.
        aligned: The words that may be an address, ``[n]``, int64, on the host.
        starts: The words where a tensor map may begin, ``[m]``, int64, on the host.
        usual: For each word a value that is known to be no address, ``[words]``, int64, on the
            host; ``None`` before any node was looked at.
    """

    __slots__ = (
        "_driver", "_function", "_name", "_places", "aligned", "begin", "nbytes", "offsets",
        "params", "starts", "usual", "words",
    )  # fmt: skip

    def __init__(self, driver: GraphDriver, params: Any, maps: TensorMaps) -> None:
        self._driver, self._function = driver, params
        self._name: str | None = None
        self.params = driver.layout(params)
        self.begin = min((offset for offset, _ in self.params), default=0)
        self.nbytes = max((offset + size for offset, size in self.params), default=0)
        self.words = -(-self.nbytes // 8)
        # Where nothing in a parameter is aligned for an address, its words are not its own.
        self._places = [(0, 8 * word) for word in range(self.words)]
        aligned: set[int] = set()
        starts: set[int] = set()
        for number, (start, size) in enumerate(self.params):
            for word in range(-(-start // 8), (start + size) // 8):
                self._places[word] = number, 8 * word - start
            if start % 8:
                continue
            for offset in range(start, start + size - 7, 8):
                aligned.add(offset // 8)
                if maps.may_start(offset) and start + size - offset >= 8 * MAP_WORDS:
                    starts.add(offset // 8)
        self.offsets = _tensor([offset for offset, _ in self.params])
        self.aligned, self.starts = _tensor(sorted(aligned)), _tensor(sorted(starts))
        self.usual: torch.Tensor | None = None

    @property
    def name(self) -> str:
        """Of the function."""
        if self._name is None:
            self._name = demangled(self._driver.name(self._function))
        return self._name

    def place(self, word: int) -> tuple[int, int]:
        """Return which parameter a word is in, and its offset there in bytes."""
        return self._places[word]


class Rows:
    """Kernel nodes of one graph that run one function, and the words of their parameters.

    Those lie in memory of our own, in one row for each node.

    Args:
        layout: Of the function.
        in_one: Whether the nodes are given their parameters in one buffer, not one by one.

    Attributes:
        layout: As given.
        numbers: Of the nodes.
        base: The first word of the first row.
    """

    def __init__(self, layout: FunctionLayout, *, in_one: bool) -> None:
        self.layout = layout
        self.numbers: list[int] = []
        self.base = 0
        self._in_one = in_one
        self._sources: list[int] = []
        self._sizes: list[int] = []
        self._address = 0
        self._pointers: torch.Tensor | None = None
        self._size = ctypes.c_size_t(layout.nbytes)

    @property
    def nbytes(self) -> int:
        """Of all rows."""
        return 8 * self.layout.words * len(self.numbers)

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
        if self._in_one:
            source, given = _buffer_at(int(params.extra))
            size = min(size, given)
        else:
            source = int(params.kernelParams)
        if not source and self.layout.params:
            raise DriverError("cuGraphKernelNodeGetParams", "CUDA_SUCCESS without parameters")
        self._sources.append(source)
        self._sizes.append(size)
        self.numbers.append(number)
        return len(self.numbers) - 1

    def copy_to(self, address: int, base: int) -> None:
        """Copy the words of all nodes.

        Args:
            address: Where the memory for all rows begins; it is zero.
            base: The number of the word there.
        """
        self._address, self.base = address, base
        sources, self._sources = self._sources, []
        sizes, self._sizes = self._sizes, []
        layout = self.layout
        if not layout.words:
            return
        rows = range(address, address + self.nbytes, 8 * layout.words)
        if self._in_one:
            for row, source, size in zip(rows, sources, sizes, strict=True):
                _move(row, source, size)
            return
        nbytes = 8 * len(layout.params)
        held = bytearray(nbytes * len(rows))
        at = ctypes.addressof((ctypes.c_char * len(held)).from_buffer(held))
        for place, source in zip(range(at, at + len(held), nbytes), sources, strict=True):
            _move(place, source, nbytes)
        pointers = torch.frombuffer(held, dtype=torch.int64).view(len(rows), -1)
        begins = pointers - layout.offsets
        # The driver was seen to keep the parameters as the device is to see them, which is one
        # copy then; whether it does is looked at for each node.
        as_given = (begins == begins[:, :1]).all(1).tolist()
        begin, size = layout.begin, layout.nbytes - layout.begin
        for number, (row, source) in enumerate(zip(rows, begins[:, 0].tolist(), strict=True)):
            if as_given[number]:
                _move(row + begin, source + begin, size)
            else:
                for pointer, (offset, each) in zip(
                    pointers[number].tolist(), layout.params, strict=True
                ):
                    _move(row + offset, pointer, each)

    def point(self, params: Any, row: int) -> None:
        """Have what the driver returned for a node refer to its row, whatever it holds then.

        Args:
            params: Of the node. Good for as long as these rows.
            row: The number of its row.
        """
        pointers = self._pointers
        if pointers is None:
            pointers = self._pointers = self._pointing()
        at = pointers.data_ptr() + 8 * pointers.shape[1] * row
        if self._in_one:
            params.extra = at
        else:
            params.kernelParams = at

    def _pointing(self) -> torch.Tensor:
        """Return what the driver takes for each row, ``[rows, n]``, int64, on the host."""
        starts = self._address + 8 * self.layout.words * torch.arange(
            len(self.numbers), dtype=torch.int64, device="cpu"
        )
        if not self._in_one:
            return starts[:, None] + self.layout.offsets
        pointers = _tensor([_BUFFER, 0, _SIZE, ctypes.addressof(self._size), 0])
        pointers = pointers.repeat(len(self.numbers), 1)
        pointers[:, 1] = starts
        return pointers


def _buffer_at(address: int) -> tuple[int, int]:
    """Return address and size of a parameter buffer: pairs of a number and a pointer, then 0."""
    data = size = 0
    while True:
        number = ctypes.c_uint64.from_address(address).value
        if number not in (_BUFFER, _SIZE):
            return data, size
        _, value = _Pair.from_address(address)
        if number == _BUFFER:
            data = value
        else:
            size = ctypes.c_size_t.from_address(value).value
        address += 16


def _tensor(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")
