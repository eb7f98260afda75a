"""What graphs that were captured together have in common, so that it is asked for once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from graphshare.capture._cuda_memory import Span
from graphshare.capture._cuda_params import FunctionLayout
from graphshare.capture._cuda_slots import Addresses
from graphshare.capture._cuda_words import Shape, Structure
from graphshare.capture._graph_driver import GraphDriver
from graphshare.capture._tensor_maps import TensorMaps

__all__ = ["KnownMemory", "Pairs"]

_KEPT = 8  # structures, some words of host memory for each word of a graph


class Pairs:
    """Memory from a start to an end, many times over, to be searched for many addresses.

    Args:
        pairs: Start and end of each; they do not overlap.

    Attributes:
        pairs: The same, in ascending order.
    """

    def __init__(self, pairs: Iterable[tuple[int, int]] = ()) -> None:
        self.pairs = sorted(pairs)
        # The first, which is empty, is for numbers below all others.
        starts, ends = zip((-1, -1), *self.pairs, strict=True)
        self._starts = torch.tensor(starts, dtype=torch.int64, device="cpu")
        self._ends = torch.tensor(ends, dtype=torch.int64, device="cpu")

    def hold(self, values: torch.Tensor) -> torch.Tensor:
        """Say which numbers lie there.

        Args:
            values: ``[n]``, int64, on the host; none is negative.

        Returns:
            ``[n]``, bool.
        """
        return values < self._ends[torch.searchsorted(self._starts, values, right=True) - 1]


class KnownMemory:
    """The memory of a device when some graphs had been captured, and what was found out since.

    What it remembers is right for those graphs, and not for later ones: a number that was no
    address when it was asked for may be one in a graph that is captured afterwards, and a handle
    of a function may be another's by then.

    Args:
        spans: What PyTorch's allocator had of the device's memory when they had been captured.

    Attributes:
        spans: The same, in ascending order.
    """

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self.spans = tuple(sorted(spans))
        self._all = Pairs((each.start, each.end) for each in self.spans)
        self._pools: dict[tuple[int, ...], Pairs] = {}
        self._layouts: dict[int, FunctionLayout] = {}
        self._asked: dict[int, bool] = {}
        self._addresses: dict[tuple[int, ...], Addresses] = {}
        self._structures: dict[Shape, Structure] = {}

    def pool(self, pool_id: Any) -> Pairs:
        """Return what belonged to a memory pool of PyTorch's; the same object each time."""
        name = tuple(pool_id)
        found = self._pools.get(name)
        if found is None:
            found = Pairs((each.start, each.end) for each in self.spans if each.pool_id == name)
            self._pools[name] = found
        return found

    def addresses(self, by_slot: Iterable[int]) -> Addresses:
        """Return the addresses that a graph was captured with; one object for graphs alike."""
        name = tuple(by_slot)
        found = self._addresses.get(name)
        if found is None:
            found = self._addresses[name] = Addresses(name)
        return found

    def structure(self, shape: Shape) -> Structure:
        """Return where the words of a graph's kernels lie; the same object for graphs alike."""
        found = self._structures.get(shape)
        if found is None:
            if len(self._structures) >= _KEPT:
                self._structures.clear()
            found = self._structures[shape] = Structure(shape)
        return found

    def layout(self, driver: GraphDriver, params: Any, maps: TensorMaps) -> FunctionLayout:
        """Return the layout of a kernel node's function.

        Raises:
            DriverError: The driver does not tell.
        """
        function = driver.function(params)
        layout = self._layouts.get(function)
        if layout is None:
            layout = self._layouts[function] = FunctionLayout(driver, params, maps)
        return layout

    def are_memory(
        self, driver: GraphDriver, values: torch.Tensor, more: Sequence[tuple[int, int]] = ()
    ) -> torch.Tensor:
        """Say which numbers are, or were at the capture, addresses of memory that anybody has.

        Args:
            driver: To ask about memory that is not PyTorch's.
            values: ``[n]``, int64, on the host.
            more: Start and size of further memory.

        Returns:
            ``[n]``, bool.
        """
        found = self._all.hold(values)
        asked = self._asked
        addresses: list[int] = []
        for value in values[~found].unique().tolist():
            known = asked.get(value)
            if known is None:
                known = asked[value] = driver.is_memory(value)
            if known or (more and any(start <= value < start + size for start, size in more)):
                addresses.append(value)
        if addresses:
            found |= torch.isin(values, torch.tensor(addresses, dtype=torch.int64, device="cpu"))
        return found
