"""What graphs that were captured together have in common, so that it is asked for once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from graphshare.capture._cuda_memory import Span
from graphshare.capture._cuda_params import FunctionLayout
from graphshare.capture._graph_driver import GraphDriver
from graphshare.capture._tensor_maps import TensorMaps

__all__ = ["KnownMemory", "runs_of", "within"]


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
        self._runs = runs_of((each.start, each.end) for each in self.spans)
        self._layouts: dict[int, FunctionLayout] = {}
        self._asked: dict[int, bool] = {}

    def pool(self, pool_id: Any) -> list[tuple[int, int]]:
        """Return start and end of what belonged to a memory pool of PyTorch's."""
        wanted = tuple(pool_id)
        return [(each.start, each.end) for each in self.spans if each.pool_id == wanted]

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
        self, driver: GraphDriver, values: torch.Tensor, more: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        """Say which numbers are, or were at the capture, addresses of memory that anybody has.

        Args:
            driver: To ask about memory that is not PyTorch's.
            values: ``[n]``, int64, on the host.
            more: Start and size of further memory.

        Returns:
            ``[n]``, bool.
        """
        found = within(values, self._runs)
        addresses: list[int] = []
        for value in values[~found].unique().tolist():
            known = any(start <= value < start + size for start, size in more)
            if not known:
                answer = self._asked.get(value)
                if answer is None:
                    answer = self._asked[value] = driver.is_memory(value)
                known = answer
            if known:
                addresses.append(value)
        if addresses:
            found |= torch.isin(values, torch.tensor(addresses, dtype=torch.int64, device="cpu"))
        return found


Runs = tuple[torch.Tensor, torch.Tensor]
"""Starts and ends, in ascending order, ``[n]`` each, int64, on the host."""


def runs_of(pairs: Iterable[tuple[int, int]]) -> Runs:
    """Return pairs of a start and an end, which do not overlap, to be searched."""
    # The first, which is empty, is for numbers below all others.
    starts, ends = zip((-1, -1), *sorted(pairs), strict=True)
    return (
        torch.tensor(starts, dtype=torch.int64, device="cpu"),
        torch.tensor(ends, dtype=torch.int64, device="cpu"),
    )


def within(values: torch.Tensor, runs: Runs) -> torch.Tensor:
    """Say which numbers lie in one of some runs.

    Args:
        values: ``[n]``, int64, on the host; none is negative.
        runs: Of :func:`runs_of`.

    Returns:
        ``[n]``, bool.
    """
    starts, ends = runs
    return values < ends[torch.searchsorted(starts, values, right=True) - 1]
