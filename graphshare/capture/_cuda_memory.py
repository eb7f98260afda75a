"""Whose memory an address of a CUDA graph lies in."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from graphshare.capture._graph_driver import GraphDriver
from graphshare.capture._graph_memory import workspace_pools
from graphshare.capture.reading import Allocation, Holder

__all__ = ["CudaMemory", "Span", "spans_of"]

_LIVE = "active_allocated"


class Span(NamedTuple):
    """A segment of PyTorch's allocator: its start, its end, and the memory pool it belongs to."""

    start: int
    end: int
    pool_id: tuple[int, int]


def spans_of(device: torch.device) -> list[Span]:
    """Return all that PyTorch's allocator has of a device's memory, in ascending order."""
    return sorted(
        Span(
            segment["address"],
            segment["address"] + segment["total_size"],
            tuple(segment["segment_pool_id"]),
        )
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device.index
    )


class CudaMemory:
    """The memory of one device as it is now.

    Args:
        device: With its index.
        driver: To ask about memory that is not PyTorch's.
        pool_id: The pool that the graph was captured into.
        known: What the allocator had when the graph was captured.
        allocations: Start and size of what nodes of the graph allocate.
    """

    def __init__(
        self,
        device: torch.device,
        driver: GraphDriver,
        pool_id: Any,
        known: Iterable[Span],
        allocations: Iterable[tuple[int, int]],
    ) -> None:
        self._driver = driver
        self._own = {tuple(pool_id), *workspace_pools(device)}
        self._segments = sorted(
            (each for each in torch.cuda.memory_snapshot() if each["device"] == device.index),
            key=lambda each: each["address"],
        )
        self._starts = [each["address"] for each in self._segments]
        self._blocks: dict[int, list[int]] = {}
        self._known = sorted(known)
        self._known_starts = [each.start for each in self._known]
        self._allocations = list(allocations)
        self._found: dict[int, Allocation | None] = {}

    def find(self, address: int) -> Allocation | None:
        """Return the allocation of an address, ``None`` for a number that is none."""
        try:
            return self._found[address]
        except KeyError:
            found = self._found[address] = self._find(address)
            return found

    def _find(self, address: int) -> Allocation | None:
        for start, size in self._allocations:
            if start <= address < start + size:
                return Allocation(Holder.GRAPH, start, size)
        place = bisect_right(self._starts, address) - 1
        if place >= 0 and address < self._starts[place] + self._segments[place]["total_size"]:
            return self._in_segment(place, address)
        found = self._driver.allocated(address)
        if found is not None:
            where, start, size = found
            return Allocation(Holder.HOST if where == "host" else Holder.DEVICE, start, size)
        place = bisect_right(self._known_starts, address) - 1
        if place >= 0 and address < self._known[place].end:
            return Allocation(Holder.NONE, address)
        return None

    def _in_segment(self, place: int, address: int) -> Allocation:
        segment = self._segments[place]
        blocks = segment["blocks"]
        starts = self._blocks.get(place)
        if starts is None:
            starts = self._blocks[place] = [block["address"] for block in blocks]
        number = max(bisect_right(starts, address) - 1, 0)
        block, start = blocks[number], starts[number]
        size = block["size"]
        if tuple(segment["segment_pool_id"]) in self._own:
            return Allocation(Holder.GRAPH, start, size)
        if block["state"] == _LIVE:
            return Allocation(Holder.TORCH, start, size)
        return Allocation(Holder.NONE, start, size)
