"""Which bytes a set of tensors occupies, and whether two sets meet.

A build writes a footprint, and a state lies somewhere in memory: one has overwritten the other
exactly when their bytes overlap. Two views of one buffer may interleave without sharing a byte,
so strides count here, not extents.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["MAX_RUNS", "MemoryRanges"]

MAX_RUNS = 16384
"""Most separate runs of bytes that one tensor is split into; beyond, its whole extent counts."""


@dataclass(frozen=True, slots=True)
class MemoryRanges:
    """The bytes of a set of tensors on one device, as sorted runs that neither touch nor overlap.

    Exact for strided tensors: a byte belongs to the set if an element of a tensor covers it. Only
    a view of more than :data:`MAX_RUNS` separate runs counts with its whole extent, the gaps
    too: then ``overlaps`` may say yes where no byte is shared, and never no where one is.

    Tensors without memory (of size zero, on ``meta``, or with a storage that was freed) add
    nothing. Two values are equal when their devices and bytes are.

    Args:
        starts: First byte address of each run, ascending.
        ends: The address after each run's last byte.
        device: Where the bytes are; ``None`` for the empty set.
    """

    starts: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    device: torch.device | None = None

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor]) -> MemoryRanges:
        """The bytes under ``tensors``.

        Args:
            tensors: Strided tensors of any shape, stride and dtype, all on one device.

        Raises:
            TypeError: A value is no tensor, or a tensor has no address (sparse, or a wrapper).
            ValueError: The tensors are on different devices.
        """
        device: torch.device | None = None
        runs: list[tuple[int, int]] = []
        # State leaves are often the same views under many paths: each description counts once.
        seen: set[tuple[int, Sequence[int], Sequence[int], int]] = set()
        given = list(tensors)
        with plain_tensors():
            for tensor in given:
                start = address_of(tensor)
                if start == 0:
                    continue
                if device is None:
                    device = tensor.device
                elif tensor.device != device:
                    raise ValueError(
                        f"MemoryRanges.of: expected tensors on one device, got {device} and "
                        f"{tensor.device}. Their addresses cannot be compared. "
                        "Make one set for each."
                    )
                described = (start, tensor.shape, tensor.stride(), tensor.element_size())
                if described not in seen:
                    seen.add(described)
                    runs.extend(_runs(*described))
        return cls.merged(runs, device)

    @classmethod
    def merged(cls, runs: Iterable[tuple[int, int]], device: torch.device | None) -> MemoryRanges:
        """The bytes of ``(first address, address after the last)`` runs, in any order."""
        starts: list[int] = []
        ends: list[int] = []
        for start, end in sorted(runs):
            if ends and start <= ends[-1]:
                if end > ends[-1]:
                    ends[-1] = end
            else:
                starts.append(start)
                ends.append(end)
        return cls(tuple(starts), tuple(ends), device if starts else None)

    @property
    def nbytes(self) -> int:
        """Bytes in the set; one that several tensors share counts once."""
        return sum(self.ends) - sum(self.starts)

    def __bool__(self) -> bool:
        return bool(self.starts)

    def overlaps(self, other: MemoryRanges) -> bool:
        """Whether a byte is in both sets; never so on different devices."""
        if not self.starts or not other.starts or self.device != other.device:
            return False
        mine, theirs = self, other
        i = j = 0
        # Leaps with a bisection over all runs that end before the other side's current one.
        while i < len(mine.starts):
            j = bisect_right(theirs.ends, mine.starts[i], j)
            if j == len(theirs.starts):
                return False
            if theirs.starts[j] < mine.ends[i]:
                return True
            mine, theirs, i, j = theirs, mine, j, i
        return False

    def contains(self, other: MemoryRanges) -> bool:
        """Whether every byte of ``other`` is in this set; the empty set is in every one."""
        if not other.starts:
            return True
        if self.device != other.device:
            return False
        i = 0
        for start, end in zip(other.starts, other.ends, strict=True):
            i = bisect_right(self.ends, start, i)
            if i == len(self.starts) or self.starts[i] > start or self.ends[i] < end:
                return False
        return True

    def hold(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether every byte of some tensors is in this set.

        As ``contains(MemoryRanges.of(tensors))``, without making that set of what is in one run.

        Raises:
            TypeError: As :meth:`of` does.
        """
        for tensor in tensors:
            if type(tensor) is torch.Tensor:
                start, nbytes = address_of(tensor), tensor.nbytes
                if not start or not nbytes:
                    continue
                if tensor.is_contiguous():
                    i = bisect_right(self.ends, start)
                    if (
                        i == len(self.starts)
                        or self.starts[i] > start
                        or self.ends[i] < start + nbytes
                        or tensor.device != self.device
                    ):
                        return False
                    continue
            if not self.contains(MemoryRanges.of((tensor,))):
                return False
        return True

    def union(self, other: MemoryRanges) -> MemoryRanges:
        """The bytes that are in either set.

        Raises:
            ValueError: The sets are on different devices.
        """
        if not other.starts:
            return self
        if not self.starts:
            return other
        if self.device != other.device:
            raise ValueError(
                f"MemoryRanges.union: expected one device, got {self.device} and {other.device}. "
                "Their addresses cannot be compared. Keep one set for each device."
            )
        mine = zip(self.starts, self.ends, strict=True)
        return self.merged([*mine, *zip(other.starts, other.ends, strict=True)], self.device)


# A subclass of Tensor, a parameter too, may answer for its attributes in Python; within this the
# tensor itself is asked. Documented for writers of subclasses, but in a private module: where it
# is not, their code runs.
plain_tensors: Callable[[], AbstractContextManager[Any]] = getattr(
    torch._C, "DisableTorchFunctionSubclass", nullcontext
)


def address_of(tensor: torch.Tensor) -> int:
    """Where ``tensor``'s first element is; 0 if it has no memory.

    Raises:
        TypeError: ``tensor`` is no tensor, or none with an address.
    """
    if not isinstance(tensor, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"expected a tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        raise TypeError(
            f"expected a strided tensor, got {kind}. It has no one address. "
            "Return the tensors that it is made of."
        )
    if tensor.is_meta:
        return 0
    address = tensor.data_ptr()
    if address == 0 and tensor.numel() and not _is_freed(tensor):
        raise TypeError(
            f"expected a tensor with an address, got {type(tensor).__name__}, which has none. "
            "Return the tensors that it wraps."
        )
    return address


def _is_freed(tensor: torch.Tensor) -> bool:
    try:
        return tensor.untyped_storage().nbytes() == 0
    except RuntimeError:  # a wrapper has no storage to ask
        return False


def _runs(
    start: int, shape: Sequence[int], stride: Sequence[int], itemsize: int
) -> Iterable[tuple[int, int]]:
    """The runs of bytes of one tensor, unsorted; they may touch or overlap."""
    if 0 in shape:
        return ()
    dims = sorted(
        (step * itemsize, size)
        for step, size in zip(stride, shape, strict=True)
        if size > 1 and step != 0
    )
    # From the innermost dimension outwards: as long as the next step leaves no gap, what is
    # covered stays one run.
    length = itemsize
    outer = 0
    for step, size in dims:
        if step > length:
            break
        length += step * (size - 1)
        outer += 1
    gapped = dims[outer:]
    count = 1
    for _, size in gapped:
        count *= size
    if count > MAX_RUNS:
        return ((start, start + length + sum(step * (size - 1) for step, size in gapped)),)
    offsets = [start]
    for step, size in gapped:
        offsets = [offset + step * i for i in range(size) for offset in offsets]
    return ((offset, offset + length) for offset in offsets)
