"""The parameters of kernel nodes: where their words are, and a copy to be changed and set."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

from graphshare.capture._graph_driver import GraphDriver, demangled
from graphshare.capture._tensor_maps import MAP_WORDS, TensorMaps

__all__ = ["FunctionLayout", "KernelParams"]

_BUFFER, _SIZE = 1, 2  # CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE


class FunctionLayout:
    """Where the words of one function's parameters are.

    Args:
        driver: The driver.
        params: What it returned for a node of the function.
        maps: What tensor maps look like.

    Attributes:
        params: Offset and size of each parameter, in bytes.
        nbytes: Of all parameters.
        words: The same in words of eight bytes, rounded up.
        aligned: For each word, 1 if it may be an address, else 0.
        starts: For each word, 1 if a tensor map may begin there, else 0.
    """

    __slots__ = (
        "_driver", "_function", "_name", "_pointers", "_slices", "aligned", "nbytes", "params",
        "starts", "words",
    )  # fmt: skip

    def __init__(self, driver: GraphDriver, params: Any, maps: TensorMaps) -> None:
        self._driver, self._function = driver, params
        self._name: str | None = None
        self.params = driver.layout(params)
        self.nbytes = max((offset + size for offset, size in self.params), default=0)
        self.words = -(-self.nbytes // 8)
        self._pointers = struct.Struct(f"{len(self.params)}Q")
        aligned, starts = bytearray(self.words), bytearray(self.words)
        for start, size in self.params:
            if start % 8:
                continue  # nothing in it is aligned for an address
            for offset in range(start, start + size - 7, 8):
                aligned[offset // 8] = 1
                if maps.may_start(offset) and start + size - offset >= 8 * MAP_WORDS:
                    starts[offset // 8] = 1
        self.aligned, self.starts = bytes(aligned), bytes(starts)
        self._slices = [(slice(start, start + size), size) for start, size in self.params]

    @property
    def name(self) -> str:
        """Of the function."""
        if self._name is None:
            self._name = demangled(self._driver.name(self._function))
        return self._name

    def place(self, word: int) -> tuple[int, int]:
        """Return which parameter a word is in, and its offset there in bytes."""
        for number, (start, size) in enumerate(self.params):
            if start <= 8 * word < start + size:
                return number, 8 * word - start
        return 0, 8 * word

    def content(self, params: Any) -> bytes | bytearray:
        """Return the parameters of a node as the device will see them, in whole words."""
        extra = int(params.extra or 0)
        if extra:
            data, size = _extra(extra)
            return ctypes.string_at(data, min(size, self.nbytes)).ljust(8 * self.words, b"\0")
        if not self.params:
            return b""
        packed = ctypes.string_at(int(params.kernelParams), self._pointers.size)
        found = bytearray(8 * self.words)
        for pointer, (place, size) in zip(self._pointers.unpack(packed), self._slices, strict=True):
            found[place] = ctypes.string_at(pointer, size)
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
    """The parameters of one kernel node, in memory of our own.

    Args:
        params: What the driver returned for the node.
        layout: Of its function.
        address: Where the words are that it is to have; they may change later.

    Attributes:
        params: What the driver takes; refers to that memory.
    """

    __slots__ = ("_extra", "_pointers", "_size", "params")

    def __init__(self, params: Any, layout: FunctionLayout, address: int) -> None:
        if int(params.extra or 0):
            self._size = ctypes.c_size_t(layout.nbytes)
            self._extra = (ctypes.c_uint64 * 5)(
                _BUFFER, address, _SIZE, ctypes.addressof(self._size), 0
            )
            params.extra = ctypes.addressof(self._extra)
        else:
            starts = [address + offset for offset, _ in layout.params]
            self._pointers = (ctypes.c_void_p * len(starts))(*starts)
            params.kernelParams = ctypes.addressof(self._pointers)
        self.params = params
