"""Names for memory, and which of them an address belongs to."""

from __future__ import annotations

import enum
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphshare.memory import address_of, plain_tensors
from graphshare.state import walk

__all__ = ["Place", "Places", "Use", "named_tensors", "place_of"]


class Use(str, enum.Enum):
    """What an address of a graph is."""

    STATE = "state"
    """A leaf of the pool's own state."""
    BORROWED = "borrowed"
    """A leaf of a state that another pool's owner builds."""
    INPUT = "input"
    OUTPUT = "output"
    """A named output buffer, or what the forward returned at capture."""
    WEIGHT = "weight"
    BUFFER = "buffer"
    """Another named tensor: a cache, a workspace."""
    GRAPH = "graph"
    """The memory pool that the graph was captured into: intermediate results."""
    TORCH = "torch"
    """A live allocation of PyTorch that has no name here."""
    DEVICE = "device"
    """Memory of the device that PyTorch did not allocate."""
    HOST = "host"
    """Pinned memory of the host."""
    DANGLING = "dangling"
    """In no live allocation."""


_FIRST = tuple(Use)  # of two names for the same bytes, the first in this order


@dataclass(frozen=True, slots=True)
class Place:
    """Memory with a name.

    Attributes:
        use: What it is.
        name: Path of the leaf, or the name that the caller gave.
        address: Of its first element, in bytes.
        nbytes: From there to the end of its last element.
        pool: The pool whose owner builds it, for a leaf of a state; else empty.
        also: Further names of the same bytes: layers share their metadata.
        steps: Where there are gaps, as in a column of a matrix: size and stride of each dimension,
            in bytes, the longest stride first.
        item: Bytes of an element, where there are gaps.
    """

    use: Use
    name: str
    address: int
    nbytes: int
    pool: str = ""
    also: tuple[str, ...] = ()
    steps: tuple[tuple[int, int], ...] = ()
    item: int = 0

    def holds(self, address: int) -> bool:
        """Whether an address is that of one of its bytes, not of a gap between them."""
        rest = address - self.address
        if not 0 <= rest < self.nbytes:
            return False
        if not self.steps:
            return True
        for size, stride in self.steps:
            rest -= min(rest // stride, size - 1) * stride
        return rest < self.item


def place_of(use: Use, name: str, tensor: torch.Tensor, pool: str = "") -> Place | None:
    """Return a tensor's place; ``None`` if it has no memory."""
    with plain_tensors():
        start = address_of(tensor)
        if start == 0 or tensor.numel() == 0:
            return None
        item = tensor.element_size()
        steps = [
            (size, step * item)
            for size, step in zip(tensor.shape, tensor.stride(), strict=True)
            if size > 1 and step
        ]
        nbytes = sum((size - 1) * step for size, step in steps) + item
        return Place(use, name, start, nbytes, pool, (), *_gaps(steps, nbytes, item))


def _gaps(
    steps: list[tuple[int, int]], nbytes: int, item: int
) -> tuple[tuple[tuple[int, int], ...], int]:
    """Return the dimensions and an item's size where there are gaps between nested ones."""
    steps = sorted(steps, key=lambda each: -each[1])
    elements = math.prod(size for size, _ in steps)
    span = item
    for size, step in reversed(steps):
        if step < span:  # dimensions that overlap: then all from first to last counts
            return (), 0
        span = (size - 1) * step + span
    return (tuple(steps), item) if elements * item < nbytes else ((), 0)


def named_tensors(what: str, named: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors of what a caller gave to name.

    Args:
        what: The argument, for messages.
        named: ``None``; a module, for its parameters and buffers; or a nest of tensors and
            modules, whose paths are the names.

    Raises:
        TypeError: It is a bare tensor.
    """
    if named is None:
        return
    if isinstance(named, torch.nn.Module):
        yield from named.named_parameters()
        yield from named.named_buffers()
        return
    if isinstance(named, torch.Tensor):
        raise TypeError(f"{what}: expected a name for the tensor, e.g. {{'name': tensor}}")
    for path, value in walk(named):
        if isinstance(value, torch.nn.Module):
            for name, tensor in named_tensors(what, value):
                yield f"{path}.{name}", tensor
        elif isinstance(value, torch.Tensor):
            yield path, value


class Places:
    """Finds the name of an address.

    Where several names have it, the one that begins right there goes first, then the smallest,
    then by the order of :class:`Use`.

    Args:
        places: Any number, which may overlap.
    """

    def __init__(self, places: Iterable[Place]) -> None:
        same: dict[Any, list[Place]] = {}
        for each in places:
            where = each.use, each.pool, each.address, each.nbytes, each.steps
            same.setdefault(where, []).append(each)
        merged = [
            replace(
                first,
                also=tuple(
                    dict.fromkeys(name for each in found for name in (each.name, *each.also))
                )[1:],
            )
            for found in same.values()
            for first in found[:1]
        ]
        self.all = sorted(merged, key=lambda each: each.address)
        self._starts = [each.address for each in self.all]
        # The furthest end of this place and all before it: where to stop looking back.
        self._reach: list[int] = []
        reach = 0
        for each in self.all:
            reach = max(reach, each.address + each.nbytes)
            self._reach.append(reach)

    def at(self, address: int) -> list[Place]:
        """Return the places that contain an address, the one to name it by first."""
        found: list[Place] = []
        place = bisect_right(self._starts, address) - 1
        while place >= 0 and self._reach[place] > address:
            each = self.all[place]
            if each.holds(address):
                found.append(each)
            place -= 1
        if len(found) > 1:
            found.sort(
                key=lambda each: (
                    each.address != address,
                    each.nbytes,
                    _FIRST.index(each.use),
                    each.name,
                )
            )
        return found
