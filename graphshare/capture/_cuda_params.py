"""Where the words of a kernel's parameters are."""

from __future__ import annotations

from typing import Any

import torch

from graphshare.capture._graph_driver import GraphDriver, demangled
from graphshare.capture._tensor_maps import MAP_WORDS, TensorMaps

__all__ = ["FunctionLayout"]


class FunctionLayout:
    """Where the words of one function's parameters are.

    Args:
        driver: The driver.
        params: What it returned for a node of the function.
        maps: What tensor maps look like.

    Attributes:
        params: Offset and size of each parameter, in bytes.
        begin: Where the first parameter begins, in bytes.
        nbytes: Where the last one ends.
        words: The same in words of eight bytes, rounded up.
        aligned: For each word, 1 if it may be an address, else 0.
        starts: The words where a tensor map may begin.
        usual: For each word a value that is known to be no address, ``[words]``, int64, on the
            host; ``None`` before any node was looked at.
    """

    __slots__ = (
        "_driver", "_function", "_name", "_places", "aligned", "begin", "nbytes", "params",
        "starts", "usual", "words",
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
        aligned = bytearray(self.words)
        starts: list[int] = []
        for number, (start, size) in enumerate(self.params):
            for word in range(-(-start // 8), (start + size) // 8):
                self._places[word] = number, 8 * word - start
            if start % 8:
                continue
            for offset in range(start, start + size - 7, 8):
                aligned[offset // 8] = 1
                if maps.may_start(offset) and start + size - offset >= 8 * MAP_WORDS:
                    starts.append(offset // 8)
        self.aligned, self.starts = bytes(aligned), tuple(sorted(starts))
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
