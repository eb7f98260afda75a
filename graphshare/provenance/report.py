"""What was found in one captured graph: a value that can be saved and shown elsewhere."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from graphshare.arguments import shown
from graphshare.capture.reading import Certainty
from graphshare.plan_file import write_whole
from graphshare.provenance.places import Place, Places, Use
from graphshare.provenance.saved import parsed, read

__all__ = ["Address", "NodeReport", "Provenance"]

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Address:
    """An address in a node's parameters, and what it is.

    Attributes:
        address: In bytes.
        where: Its place in the node: ``"parameter 3"``, ``"parameter 0 + 64"``, ``"src"``, or an
            operator's argument.
        use: What it is.
        name: Path of the leaf or the name that the caller gave; ``""`` where there is none.
        offset: Bytes from the start of that leaf, buffer or allocation.
        pool: The pool whose owner builds it, for a leaf; else ``""``.
        certainty: How it is known to be an address.
        also: Further names of the same byte.
    """

    address: int
    where: str
    use: Use
    name: str = ""
    offset: int = 0
    pool: str = ""
    certainty: Certainty = Certainty.READ
    also: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One node of the graph.

    Attributes:
        number: In the order in which the graph lists its nodes.
        kind: ``"kernel"``, ``"memcpy"``, ``"memset"``, ``"child graph"``, ...; ``"operator"`` on
            the tape.
        name: Of the kernel or operator.
        addresses: What its parameters hold.
        opaque: What of it cannot be read, and why.
        inside: Number of the node that encloses it, or ``None``.
    """

    number: int
    kind: str
    name: str
    addresses: tuple[Address, ...] = ()
    opaque: tuple[str, ...] = ()
    inside: int | None = None

    def __str__(self) -> str:
        return f"{self.number}: {self.name}"


@dataclass(frozen=True, slots=True, repr=False)
class Provenance:
    """Which memory one captured graph reads and writes, as its nodes say.

    A graph does not tell reading from writing, and not what kernels find behind pointers that lie
    in device memory.

    Attributes:
        pool: The pool's name.
        key: The captured key, as text.
        backend: ``"cuda"`` or ``"tape"``.
        device: Where it runs.
        nodes: Every node, enclosed ones included.
        places: Everything that has a name, used or not.
        notes: What was found out on the way, e.g. about tensor maps.
        facts: Versions of what it was read with.
    """

    pool: str
    key: str
    backend: str
    device: str
    nodes: tuple[NodeReport, ...]
    places: tuple[Place, ...] = ()
    notes: tuple[str, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict[str, str])

    def of(self, *uses: Use | str) -> tuple[Address, ...]:
        """Return the addresses of some uses, in the order of the nodes."""
        wanted = {Use(use) for use in uses}
        return tuple(each for node in self.nodes for each in node.addresses if each.use in wanted)

    @property
    def dangling(self) -> tuple[Address, ...]:
        """The addresses that lie in no live allocation."""
        return self.of(Use.DANGLING)

    @property
    def unnamed(self) -> tuple[Address, ...]:
        """The addresses in live memory of PyTorch that has no name here.

        Memory that was freed and allocated anew shows up among these, so a graph all of whose
        tensors are named should have none.
        """
        return self.of(Use.TORCH)

    @property
    def opaque(self) -> tuple[str, ...]:
        """What could not be read, each with its node."""
        return tuple(f"{node}: {why}" for node in self.nodes for why in node.opaque)

    @property
    def names(self) -> frozenset[str]:
        """The names of all leaves and buffers that some node holds an address of."""
        places = Places(self.places)
        addresses = {each.address for node in self.nodes for each in node.addresses}
        return frozenset(
            name
            for address in addresses
            for place in places.at(address)
            for name in (place.name, *place.also)
        )

    def nodes_with(self, name: str) -> tuple[NodeReport, ...]:
        """Return the nodes that hold an address of the leaf or buffer ``name``."""
        places = [each for each in self.places if name == each.name or name in each.also]
        return tuple(
            node
            for node in self.nodes
            if any(_within(each, place) for each in node.addresses for place in places)
        )

    def counts(self) -> dict[str, int]:
        """Return how many addresses there are of each use, in the order of :class:`Use`."""
        found = Counter(each.use for node in self.nodes for each in node.addresses)
        return {use.value: found[use] for use in Use if found[use]}

    def __str__(self) -> str:
        counted = ", ".join(f"{number} {use}" for use, number in self.counts().items())
        opaque = f", {len(self.opaque)} opaque" if self.opaque else ""
        return (
            f"{self.pool}[{self.key}]: {len(self.nodes)} nodes, addresses: "
            f"{counted or 'none'}{opaque}"
        )

    def __repr__(self) -> str:  # all nodes of a graph are thousands of lines
        return f"<Provenance of {self}>"

    # Saved and read.

    def to_json(self) -> str:
        """Return it as JSON, for :meth:`from_json`."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Provenance:
        """Read what :meth:`to_json` made.

        Raises:
            ValueError: It is something else.
        """
        try:
            content = parsed(text)
            found = content.pop("format", None)
            if type(found) is not int or found != _FORMAT:
                raise ValueError(f"format: expected {_FORMAT}, got {shown(found)}")
            return read(cls, content)
        except ValueError as error:
            raise ValueError(
                f"provenance: expected a report of format {_FORMAT}, got something else ({error}). "
                "Save one with Provenance.save."
            ) from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, which ``graphshare inspect`` shows; as a whole or not at all.

        Raises:
            OSError: It cannot be written.
        """
        write_whole(path, (self.to_json() + "\n").encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Provenance:
        """Read a file that :meth:`save` wrote.

        Raises:
            OSError: There is no such file.
            ValueError: It is something else.
        """
        return cls.from_json(Path(path).read_bytes())


def _within(address: Address, place: Place) -> bool:
    return place.holds(address.address)
