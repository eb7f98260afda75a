"""The memory under a set of states, as bytes: poisoned before a build, looked at afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from graphshare.memory import MemoryRanges, address_of, plain_tensors

__all__ = ["POISONS", "Bytes", "Leaf", "Watched"]

POISONS = (0xA5, 0x5A)
"""The bytes of two poisons: what a build leaves alone differs after the one and the other."""

_BOOL_POISONS = (1, 0)  # a bool of another byte is undefined behaviour

Bytes = list[torch.Tensor]
"""One tensor for each region of a :class:`Watched`: uint8 contents, or a bool for each byte."""


class Leaf(NamedTuple):
    """A tensor of a state, on the device.

    Attributes:
        path: The first path that leads to it.
        tensor: The tensor.
    """

    path: str
    tensor: torch.Tensor

    @property
    def start(self) -> int:
        """Its address."""
        return address_of(self.tensor)

    @property
    def extent(self) -> int:
        """Bytes from its first to the end of its last element."""
        steps = zip(self.tensor.shape, self.tensor.stride(), strict=True)
        last = sum((size - 1) * step for size, step in steps)
        return (last + 1) * self.tensor.element_size() if self.tensor.numel() else 0


class _Region(NamedTuple):
    start: int
    view: torch.Tensor  # uint8, of the memory itself


class Watched:
    """The memory under leaves of several states.

    Args:
        leaves: The leaves, all on one device.

    Attributes:
        mask: A bool for each byte: whether it belongs to a leaf.
    """

    def __init__(self, leaves: Iterable[Leaf]) -> None:
        with plain_tensors():
            every = [leaf for leaf in leaves if leaf.extent and leaf.start]
            self._regions = _regions(every)
            self._poisons = [
                [torch.full_like(region.view, byte) for region in self._regions] for byte in POISONS
            ]
            flags = [leaf.tensor for leaf in every if leaf.tensor.dtype is torch.bool]
            for poison, byte in zip(self._poisons, _BOOL_POISONS, strict=True):
                for values, mask in zip(poison, self.mask_of(MemoryRanges.of(flags)), strict=True):
                    values[mask] = byte
            self.mask = self.mask_of(MemoryRanges.of(leaf.tensor for leaf in every))

    def mask_of(self, ranges: MemoryRanges) -> Bytes:
        """A bool for each byte: whether it is in ``ranges``."""
        masks: Bytes = []
        for start, view in self._regions:
            mask = torch.zeros(view.shape, dtype=torch.bool)
            for first, end in zip(ranges.starts, ranges.ends, strict=True):
                mask[max(first - start, 0) : max(end - start, 0)] = True
            masks.append(mask.to(view.device))
        return masks

    def ranges_of(self, masks: Bytes) -> MemoryRanges:
        """The bytes that ``masks`` has as true."""
        runs: list[tuple[int, int]] = []
        for (start, view), mask in zip(self._regions, masks, strict=True):
            edge = torch.zeros(1, dtype=torch.int8, device=view.device)
            steps = torch.diff(mask.to(torch.int8), prepend=edge, append=edge)
            first = (steps == 1).nonzero().flatten().tolist()
            end = (steps == -1).nonzero().flatten().tolist()
            runs.extend((start + a, start + b) for a, b in zip(first, end, strict=True))
        device = self._regions[0].view.device if self._regions else None
        return MemoryRanges.merged(runs, device)

    def contents(self) -> Bytes:
        """A copy of what the memory holds."""
        self._settle()
        return [region.view.clone() for region in self._regions]

    def put(self, contents: Bytes) -> None:
        """Put ``contents`` back."""
        for region, values in zip(self._regions, contents, strict=True):
            region.view.copy_(values)
        self._settle()

    def poison(self, which: int, where: Bytes) -> Bytes:
        """Overwrite the bytes in ``where`` with one of the two poisons; return the contents."""
        self._settle()
        for region, values, mask in zip(self._regions, self._poisons[which], where, strict=True):
            region.view.copy_(torch.where(mask, values, region.view))
        contents = self.contents()
        self._settle()
        return contents

    def _settle(self) -> None:
        """Wait for the device: an owner may write on a stream of its own."""
        for region in self._regions[:1]:
            if region.view.is_cuda:
                torch.cuda.synchronize(region.view.device)

    def changed(self, before: Bytes) -> Bytes:
        """A bool for each byte: whether it belongs to a leaf and is not as in ``before``."""
        self._settle()
        return [
            (region.view != values) & mask
            for region, values, mask in zip(self._regions, before, self.mask, strict=True)
        ]

    def kept(self, leaf: Leaf, contents: Bytes, which: int) -> torch.Tensor:
        """``[*shape]`` bool: which elements of a leaf are the poison in ``contents``."""
        found = self.elements(leaf, contents)
        return (found == self.elements(leaf, self._poisons[which])).all(-1)

    def elements(self, leaf: Leaf, contents: Bytes) -> torch.Tensor:
        """``[*shape, itemsize]``: the bytes of a leaf's elements, or bools, in ``contents``."""
        for (start, view), values in zip(self._regions, contents, strict=True):
            offset = leaf.start - start
            if 0 <= offset < view.shape[0]:
                size = leaf.tensor.element_size()
                steps = [step * size for step in leaf.tensor.stride()]
                return values.as_strided((*leaf.tensor.shape, size), (*steps, 1), offset)
        return torch.empty((*leaf.tensor.shape, 1), dtype=contents[0].dtype if contents else None)


def _regions(leaves: Sequence[Leaf]) -> list[_Region]:
    """One region for each stretch of a storage that leaves overlap in."""
    stretches: list[tuple[int, int, torch.UntypedStorage]] = []
    ordered = sorted(
        leaves, key=lambda leaf: (leaf.tensor.untyped_storage().data_ptr(), leaf.start)
    )
    for leaf in ordered:
        storage = leaf.tensor.untyped_storage()
        start, end = leaf.start, leaf.start + leaf.extent
        if stretches:
            first, last, other = stretches[-1]
            if other.data_ptr() == storage.data_ptr() and start <= last:
                stretches[-1] = first, max(last, end), other
                continue
        stretches.append((start, end, storage))
    return [
        _Region(
            start,
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(
                storage, start - storage.data_ptr(), (end - start,), (1,)
            ),
        )
        for start, end, storage in stretches
    ]
