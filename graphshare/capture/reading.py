"""What a captured graph holds: its nodes, and the addresses in their parameters."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

__all__ = ["Allocation", "Certainty", "GraphNode", "GraphReading", "Holder", "Word"]


class Certainty(str, enum.Enum):
    """How it is known that a word is an address."""

    READ = "read"
    """The node says so: a tensor of a recorded operator, the source of a copy."""
    INFERRED = "inferred"
    """Eight bytes of a kernel's parameters that fall into memory of the device."""
    TENSOR_MAP = "tensor map"
    """As ``INFERRED``, and where the driver was seen to write the address of a tensor map."""
    CONFIRMED = "confirmed"
    """It moved with the memory, in a second capture at other addresses."""
    UNMOVED = "unmoved"
    """It stayed where it was in a capture on another state: a number that looks like an address,
    or a buffer that the forward takes from elsewhere than its state."""


class Holder(str, enum.Enum):
    """Whose memory an address lies in."""

    GRAPH = "graph"
    """The memory pool that the graph was captured into."""
    TORCH = "torch"
    """A live allocation of PyTorch."""
    DEVICE = "device"
    """Memory of the device that PyTorch did not allocate: a library's, a kernel's constants."""
    HOST = "host"
    """Pinned memory of the host."""
    NONE = "none"
    """Was memory when the graph was captured; no live allocation has it now."""


@dataclass(frozen=True, slots=True)
class Word:
    """An address in the parameters of a node.

    Attributes:
        address: In bytes.
        where: Place in the node: ``"parameter 3"``, ``"parameter 0 + 64"`` (bytes), ``"src"``, or
            the name of an operator's argument.
        certainty: How it is known to be one.
        nbytes: Bytes from there that the node is known to reach; 0 where nothing tells.
        place: ``(parameter, offset in bytes)`` of a kernel's word; what two captures have in
            common.
    """

    address: int
    where: str
    certainty: Certainty
    nbytes: int = 0
    place: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One node of a captured graph.

    Attributes:
        number: In the order in which the graph lists them, enclosed nodes after their encloser.
        kind: ``"kernel"``, ``"memcpy"``, ``"memset"``, ``"child graph"``, ``"conditional"``, ...;
            ``"operator"`` on the tape.
        name: Of the kernel or operator; else the kind.
        words: The addresses in its parameters.
        opaque: What of it cannot be read, and why.
        inside: Number of the node that encloses it, or ``None``.
    """

    number: int
    kind: str
    name: str
    words: tuple[Word, ...] = ()
    opaque: tuple[str, ...] = ()
    inside: int | None = None


@dataclass(frozen=True, slots=True)
class Allocation:
    """Where an address lies.

    Attributes:
        holder: Whose memory it is.
        start: First address of the allocation, 0 where nothing tells.
        nbytes: Its size, 0 where nothing tells.
    """

    holder: Holder
    start: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class GraphReading:
    """A graph as it was read.

    Attributes:
        nodes: Every node, enclosed ones included.
        find: The allocation that an address lies in; ``None`` for a number that is no address.
        notes: What was found out about the machine on the way, for the report.
        facts: Versions of what it was read with.
    """

    nodes: tuple[GraphNode, ...]
    find: Callable[[int], Allocation | None]
    notes: tuple[str, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict[str, str])
