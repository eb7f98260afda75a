"""What a change of some words of a CUDA graph concerns: which nodes, and what sets them."""

from __future__ import annotations

from itertools import groupby
from typing import Any, NamedTuple

import torch

from graphshare.capture._cuda_nodes import GraphIndex, NodeIndex
from graphshare.capture._graph_driver import DriverError
from graphshare.errors import RebindError

__all__ = ["Batch", "Concern", "Concerns", "Settable", "failed", "refused"]

_KEPT = 4  # changes of a graph


class Settable(NamedTuple):
    """A node that can be set to its words.

    Attributes:
        kind: In words.
        handle: The driver's.
        params: What the driver takes.
        node: The node.
    """

    kind: str
    handle: Any
    params: Any
    node: NodeIndex


class Batch(NamedTuple):
    """Nodes of one kind, to be set one after the other.

    Apart from one another, handles and parameters are read in half the time: in a move the memory
    of each is cold.

    Attributes:
        kind: In words.
        nodes: The nodes.
        handles: Of each.
        params: Of each.
    """

    kind: str
    nodes: list[Settable]
    handles: list[Any]
    params: list[Any]


class Concern(NamedTuple):
    """What a change of some slots concerns.

    Attributes:
        nodes: The nodes that they are in, kind by kind.
        batches: The same.
        operands: Parameters of copies and fills, with an attribute and the word that it is.
        places: The words that change, ``[n]``, int64, on the host.
        slots: The slot of each of them, ``[n]``, int64, on the host.
    """

    nodes: list[Settable]
    batches: list[Batch]
    operands: list[tuple[Any, str, int]]
    places: torch.Tensor
    slots: torch.Tensor


class Concerns:
    """What changes of one graph concern; found once for buffers that move again and again.

    Args:
        index: Of the graph.

    Attributes:
        index: The same.
    """

    def __init__(self, index: GraphIndex) -> None:
        self.index = index
        self._settable: dict[int, Settable] = {}
        self._found: dict[tuple[int, ...], Concern] = {}

    def of(self, slots: tuple[int, ...]) -> Concern:
        """Return what a change of some slots concerns.

        Args:
            slots: In ascending order.
        """
        found = self._found.get(slots)
        if found is None:
            if len(self._found) >= _KEPT:
                self._found.clear()
            found = self._found[slots] = self._find(slots)
        return found

    def _find(self, slots: tuple[int, ...]) -> Concern:
        moving = self.index.moving
        chosen = torch.isin(moving.slots, torch.tensor(slots, dtype=torch.int64, device="cpu"))
        numbers: list[int] = moving.numbers[chosen].unique().tolist()
        nodes = [self.settable(number) for number in numbers]
        nodes.sort(key=lambda each: each.kind)
        operands = [
            (each.params, attribute, self.index.range_of(each.node)[0] + word)
            for each in nodes
            for word, attribute in enumerate(each.node.ends)
            if attribute
        ]
        return Concern(
            nodes,
            [_batch(kind, list(each)) for kind, each in groupby(nodes, lambda each: each.kind)],
            operands,
            moving.places[chosen],
            moving.slots[chosen],
        )

    def settable(self, number: int) -> Settable:
        """Return what the driver needs to set a node to its words; the same one each time."""
        found = self._settable.get(number)
        if found is None:
            index = self.index
            node = index.nodes[number]
            params = node.params
            if node.rows is not None:
                params = index.driver.kernel(node.handle)
                node.rows.point(params, node.row)
            found = self._settable[number] = Settable(node.kind, node.handle, params, node)
        return found


def _batch(kind: str, nodes: list[Settable]) -> Batch:
    return Batch(kind, nodes, [each.handle for each in nodes], [each.params for each in nodes])


def failed(node: NodeIndex, call: Any, code: Any) -> RebindError:
    """Make the error for a node that the driver did not change.

    Args:
        node: The node.
        call: What was called.
        code: The ``CUresult``.
    """
    named = getattr(call, "__name__", "the driver").lstrip("_")
    return refused(node, "a node that the driver changes", str(DriverError(named, code.name)))


def refused(node: NodeIndex, expected: str, got: str) -> RebindError:
    """Make the error for a node that cannot be changed."""
    named = f"{node.number}: {node.name}"
    return RebindError(
        f"rebind of node {named}",
        expected=expected,
        got=got,
        consequence="The graph would go on reading the old memory",
        remedy="Capture the keys anew",
        node=named,
    )
