"""Where a tensor map holds its address, as the driver that runs here was seen to write it.

A tensor map (``CUtensorMap``, 128 bytes) is what a kernel of an H100 and later loads tiles by. Its
encoding is the driver's own business, so it is looked at rather than assumed: maps with known
addresses are encoded, and the words compared.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch

from graphshare.capture._graph_driver import DriverError, graph_driver

__all__ = ["MAP_WORDS", "TensorMaps", "tensor_maps"]

MAP_WORDS = 8
"""Words of eight bytes that are looked at: libraries were seen to pass the first 64 of the 128
bytes alone, back to back. What the driver encodes beyond is for the host."""

_ALL = (1 << 64) - 1
_BANKS = {9: 0x210}
"""Where a kernel's parameters begin in the device's memory for constants, by major capability, as
kernels of cuBLAS and FlashAttention on an H200 agree. Tensor maps are aligned to 64 bytes there."""

_CUBLAS_BIT = 0x2  # of the format: set by maps in cuBLAS's kernels, and none of the driver's
_FORMAT = 1  # the word whose lower half differs by type, number of dimensions and swizzle alone
_ADDRESS = 0x7F12_3456_0000
_ADDRESS_BITS = range(4, 47)  # a tensor map's address is a multiple of 16

_SHAPES: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((16,), (16,)),
    ((64, 128), (16, 8)),
    ((4096, 4096), (16, 256)),
    ((64, 16, 3), (16, 2, 1)),
    ((64, 16, 3, 5), (16, 2, 1, 1)),
    ((128, 256, 8, 1000, 7), (16, 1, 1, 1, 1)),
)
_SWIZZLES = ("NONE", "32B", "64B", "128B")
_PROMOTIONS = ("NONE", "L2_64B", "L2_128B", "L2_256B")
_DTYPES = (
    *(("UINT8", 1), ("UINT16", 2), ("UINT32", 4), ("INT32", 4), ("UINT64", 8), ("INT64", 8)),
    *(("FLOAT16", 2), ("FLOAT32", 4), ("FLOAT64", 8), ("BFLOAT16", 2), ("TFLOAT32", 4)),
)


@dataclass(frozen=True, slots=True)
class TensorMaps:
    """What the driver's tensor maps look like.

    Attributes:
        exist: Whether the device has them.
        word: The word that holds the address as it is, and nothing else; ``None`` if none was
            found to.
        unused: For each word, the bits that no map had set.
        always: The words, but for the address, that are zero in no map.
        bank: Where a kernel's parameters begin, in bytes, as far as alignment goes; ``None`` where
            it is not known.
    """

    exist: bool
    word: int | None
    unused: tuple[int, ...] = ()
    always: tuple[int, ...] = ()
    bank: int | None = None

    def may_start(self, offset: int) -> bool:
        """Whether a tensor map may start at an offset in a kernel's parameters."""
        return offset % 16 == 0 if self.bank is None else (self.bank + offset) % 64 == 0

    def look_like(self, words: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Find where eight of some words may be a tensor map.

        Args:
            words: ``[n]``, int64, on the host.
            starts: ``[m]``, int64: where one may begin, eight words before the end at most.

        Returns:
            Those of them where one may begin.
        """
        if not self.exist or not len(starts):
            return starts[:0]
        # The word that tells most goes first: few are left for the others.
        for place in sorted(range(MAP_WORDS), key=lambda each: each != _FORMAT):
            found = words[starts + place]
            fits = None
            if place in self.always:
                fits = found != 0
            if place != self.word:
                if place < len(self.unused) and self.unused[place]:
                    free = found & _signed(self.unused[place]) == 0
                    fits = free if fits is None else fits & free
                if place == _FORMAT and self.word is not None:
                    strides = found >> 32 != 0  # only a map of one dimension has none
                    fits = strides if fits is None else fits & strides
            if fits is not None:
                starts = starts[fits]
        return starts

    @property
    def note(self) -> str:
        """A sentence for the report."""
        if not self.exist:
            return "The device has no tensor maps."
        if self.word is None:
            return (
                "Tensor maps: this driver does not write their address as it is; parameters that "
                "look like one are reported as opaque."
            )
        return (
            f"Tensor maps: this driver was seen to write the address as it is into word "
            f"{self.word}, and nowhere else. The format is not documented."
        )


@functools.cache
def tensor_maps(device: int) -> TensorMaps:
    """Look at what the driver encodes; once for each device, whose context is the current one."""
    try:
        base = _encode(_ADDRESS)
    except DriverError:
        return TensorMaps(False, None)
    word = next((place for place, each in enumerate(base) if each == _ADDRESS), None)
    if word is not None:
        for bit in _ADDRESS_BITS:
            changed = _encode(_ADDRESS ^ (1 << bit))
            differing = [place for place, each in enumerate(base) if changed[place] != each]
            if differing != [word] or changed[word] != _ADDRESS ^ (1 << bit):
                word = None
                break
    used, always = list(base), set(range(MAP_WORDS)) - {word}
    plain = ("NONE", "NONE")
    tried = [(*dtype, *shape, *plain) for dtype in _DTYPES for shape in _SHAPES]
    tried += [("BFLOAT16", 2, *_SHAPES[1], *each) for each in product(_SWIZZLES, _PROMOTIONS)]
    for each in tried:
        try:
            found = graph_driver().tensor_map(_ADDRESS, *each)
        except DriverError:  # not a combination that there is
            continue
        used = [one | other for one, other in zip(used, found, strict=True)]
        always &= {place for place, content in enumerate(found) if content}
    unused = (~each & _ALL for each in _widened(used[:MAP_WORDS]))
    major, _ = torch.cuda.get_device_capability(device)
    return TensorMaps(True, word, tuple(unused), tuple(sorted(always)), _BANKS.get(major))


def _encode(address: int) -> list[int]:
    return graph_driver().tensor_map(address, "BFLOAT16", 2, (64, 128), (16, 8), "NONE", "NONE")


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _widened(used: Sequence[int]) -> list[int]:
    """Let each half of a word that some map uses be used altogether.

    Sizes and strides that were not tried set other bits of it. Not so the half that tells one
    format from another and no address or size: all formats were tried, or their bits.
    """
    halves = [
        (0xFFFFFFFF if each & 0xFFFFFFFF else 0) | (0xFFFFFFFF00000000 if each >> 32 else 0)
        for each in used
    ]
    halves[_FORMAT] &= used[_FORMAT] | _CUBLAS_BIT | 0xFFFFFFFF00000000
    return halves
