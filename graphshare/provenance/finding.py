"""Reads one captured graph and says what each of its addresses is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from graphshare.capture import InspectableGraph
from graphshare.capture.reading import GraphReading, Holder, Word
from graphshare.entry import Entry, apply_views
from graphshare.errors import ProvenanceError
from graphshare.provenance.labels import Named, named_places
from graphshare.provenance.places import Place, Places, Use, place_of
from graphshare.provenance.report import Address, NodeReport, Provenance
from graphshare.refusals import Refusals
from graphshare.state import walk
from graphshare.state.nodes import is_on

__all__ = ["argument", "leaves_in", "leaves_of", "places_of", "readable_graph", "report_of"]

_USES = {
    Holder.GRAPH: Use.GRAPH,
    Holder.TORCH: Use.TORCH,
    Holder.DEVICE: Use.DEVICE,
    Holder.HOST: Use.HOST,
    Holder.NONE: Use.DANGLING,
}

_UNKNOWN: Any = object()


def readable_graph(entry: Entry[Any], refuse: Refusals, doing: str) -> InspectableGraph:
    """Return the graph of a key, which can be read.

    Raises:
        ReleasedStateError: The key was released.
        ProvenanceError: Its graph was not handed over, or its backend has no such graphs.
    """
    if entry.dead:
        raise refuse.released(entry.key, "the key was released or captured anew", doing=doing)
    graph: Any = entry.graph
    # Not by isinstance: asking a protocol takes as long as changing a dozen nodes.
    if callable(getattr(graph, "read", None)) and callable(getattr(graph, "patch", None)):
        return graph
    got = "none was handed over" if entry.graph is None else f"a {type(entry.graph).__name__}"
    raise refuse.counted(
        ProvenanceError(
            f"{refuse.name}: {doing} of a graph that cannot be read",
            expected="a graph that the pool captured, or that commit was given",
            got=got,
            key=entry.key,
            remedy="Capture with pool.capture, or pass the graph to "
            "commit(key, launch, outputs, graph=...)",
            keys=(entry.key,),
        )
    )


def leaves_of(entry: Entry[Any], device: torch.device) -> Iterator[Place]:
    """Yield the leaves of a key's state on the device, as its pool sees them."""
    use = Use.BORROWED if entry.borrowed else Use.STATE
    state = apply_views(entry.views, entry.record.captured)
    return leaves_in(state, device, use, entry.record.pool_name)


def leaves_in(state: Any, device: torch.device, use: Use, pool: str) -> Iterator[Place]:
    """Yield the leaves of a state on the device.

    Args:
        state: Any nest.
        device: Of the pool.
        use: What they are.
        pool: Whose owner builds them.
    """
    for path, value in walk(state):
        if isinstance(value, torch.Tensor) and is_on(value.device, device):
            place = _place(use, path, value, pool)
            if place is not None:
                yield place


def argument(kind: str, where: str) -> str:
    """Return the words for the place of an address in a node.

    Args:
        kind: The node's. The places of an operator are the names of its arguments alone.
        where: As :class:`~graphshare.capture.reading.Word` has it.
    """
    return f"argument {where}" if kind == "operator" and " " not in where else where


def _place(use: Use, name: str, tensor: torch.Tensor, pool: str = "") -> Place | None:
    try:
        return place_of(use, name, tensor, pool)
    except TypeError:  # sparse, nested, a wrapper: of a leaf under the rule "any"
        return None


def places_of(entry: Entry[Any], device: torch.device, named: Named) -> list[Place]:
    """Return all memory that has a name for a key: its state, its outputs, what was named."""
    found = list(leaves_of(entry, device))
    for path, value in walk(entry.outputs):
        if isinstance(value, torch.Tensor) and is_on(value.device, device):
            place = _place(Use.OUTPUT, path or "output", value)
            if place is not None:
                found.append(place)
    return [*found, *named_places(named, device)]


def report_of(
    entry: Entry[Any],
    reading: GraphReading,
    places: Places,
    *,
    pool: str,
    backend: str,
    device: torch.device,
) -> Provenance:
    """Say of each address of a graph what it is."""
    # Most addresses are in many nodes, and nodes may share a word.
    named: dict[int, _Named | None] = {}
    known: dict[int, Address | None] = {}  # by the identity of the word, which the reading holds

    def address_of(word: Word) -> Address | None:
        address = word.address
        if address not in named:
            named[address] = _named(address, places, reading)
        what = named[address]
        if what is None:
            return None
        use, name, offset, pool, also = what
        return Address(address, word.where, use, name, offset, pool, word.certainty, also)

    nodes: list[NodeReport] = []
    for node in reading.nodes:
        addresses: list[Address] = []
        for word in node.words:
            found = known.get(id(word), _UNKNOWN)
            if found is _UNKNOWN:
                found = known[id(word)] = address_of(word)
            if found is not None:
                addresses.append(found)
        nodes.append(
            NodeReport(
                node.number, node.kind, node.name, tuple(addresses), node.opaque, node.inside
            )
        )
    return Provenance(
        pool=pool,
        key=str(entry.key),
        backend=backend,
        device=str(device),
        nodes=tuple(nodes),
        places=tuple(places.all),
        notes=reading.notes,
        facts={"torch": str(torch.__version__), **reading.facts},
    )


class _Named(NamedTuple):
    """What an address is; as :class:`Address` has it."""

    use: Use
    name: str
    offset: int
    pool: str = ""
    also: tuple[str, ...] = ()


def _named(address: int, places: Places, reading: GraphReading) -> _Named | None:
    allocation = reading.find(address)
    if allocation is None:
        return None
    use = _USES[allocation.holder]
    found = places.at(address)
    if not found or use is Use.DANGLING:  # a name does not bring freed memory back
        name, start = (found[0].name, found[0].address) if found else ("", allocation.start)
        return _Named(use, name, address - start)
    first, *rest = found
    also = tuple(dict.fromkeys(each.name for each in rest))
    return _Named(first.use, first.name, address - first.address, first.pool, also)
