"""Names for memory, and which of them an address belongs to."""

from __future__ import annotations

import enum
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
    """

    use: Use
    name: str
    address: int
    nbytes: int
    pool: str = ""
    also: tuple[str, ...] = ()


def place_of(use: Use, name: str, tensor: torch.Tensor, pool: str = "") -> Place | None:
    """Return a tensor's place; ``None`` if it has no memory."""
    with plain_tensors():
        start = address_of(tensor)
        if start == 0 or tensor.numel() == 0:
            return None
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((size - 1) * step for size, step in steps)
        return Place(use, name, start, (last + 1) * tensor.element_size(), pool)


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
        same: dict[tuple[Use, str, int, int], list[Place]] = {}
        for each in places:
            same.setdefault((each.use, each.pool, each.address, each.nbytes), []).append(each)
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
            if address < each.address + each.nbytes:
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
