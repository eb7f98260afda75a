"""What is drawn of a report: places to the left, nodes to the right, a line for each address."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from graphshare.provenance.places import Use
from graphshare.provenance.report import Address, NodeReport, Provenance

__all__ = [
    "COLOURS",
    "MEANINGS",
    "OPAQUE",
    "Box",
    "Line",
    "box_of",
    "boxes_of",
    "dot",
    "lines_of",
    "short_name",
]

COLOURS: Mapping[Use, str] = {
    Use.STATE: "#1a7f37",
    Use.BORROWED: "#0969da",
    Use.INPUT: "#8250df",
    Use.OUTPUT: "#bf3989",
    Use.WEIGHT: "#57606a",
    Use.BUFFER: "#0a7b83",
    Use.GRAPH: "#afb8c1",
    Use.TORCH: "#9a6700",
    Use.DEVICE: "#7d4e00",
    Use.HOST: "#7d4e00",
    Use.DANGLING: "#cf222e",
}

MEANINGS: Mapping[Use, str] = {
    Use.STATE: "own state",
    Use.BORROWED: "borrowed state",
    Use.INPUT: "input",
    Use.OUTPUT: "output",
    Use.WEIGHT: "weight",
    Use.BUFFER: "named buffer",
    Use.GRAPH: "memory of the graph",
    Use.TORCH: "live, without a name",
    Use.DEVICE: "not PyTorch's",
    Use.HOST: "pinned on the host",
    Use.DANGLING: "dangling",
}

OPAQUE = "#bc4c00"
"""The colour of what could not be read."""


@dataclass(frozen=True, slots=True)
class Box:
    """Memory that is drawn: one name, or one address that has none.

    Attributes:
        use: What it is.
        label: What is written in it.
    """

    use: Use
    label: str


@dataclass(frozen=True, slots=True)
class Line:
    """Some addresses of one node in one box.

    Attributes:
        box: The memory.
        node: Number of the node.
        where: Places in the node.
    """

    box: Box
    node: int
    where: tuple[str, ...]


def box_of(address: Address) -> Box:
    """Return the box of an address."""
    label = address.name or f"{address.address - address.offset:#x}"
    if address.use is Use.DANGLING:
        freed = f"{address.address:#x}" if address.address else "freed"  # the tape knows no more
        label = freed + (f" ({address.name})" if address.name else "")
    elif address.pool:
        label = f"{address.name or '(the state)'} of {address.pool}"
    return Box(address.use, label)


def lines_of(nodes: Iterable[NodeReport]) -> list[Line]:
    """Return the lines of nodes; a graph's own memory is not drawn, there is too much of it."""
    found: dict[tuple[Box, int], list[str]] = {}
    for node in nodes:
        for each in node.addresses:
            if each.use is not Use.GRAPH:
                found.setdefault((box_of(each), node.number), []).append(each.where)
    return [Line(box, node, tuple(where)) for (box, node), where in found.items()]


def boxes_of(lines: Iterable[Line]) -> list[Box]:
    """Return the boxes, those of one use together, in the order of the nodes."""
    order = list(Use)
    unique = dict.fromkeys(line.box for line in lines)
    return sorted(unique, key=lambda box: order.index(box.use))


def short_name(name: str, width: int = 48) -> str:
    """Return a kernel's name without namespaces, template arguments and parameters."""
    previous = None
    short = name.replace("(anonymous namespace)::", "")
    short = re.sub(r"\boperator\s*[<>(]+", "operator", short)
    while short != previous:
        previous = short
        short = re.sub(r"<[^<>]*>", "", short)
    short = short.partition("(")[0].strip().split(" ")[-1]
    short = short.rpartition("::")[2] or name
    return short if len(short) <= width else f"{short[: width - 1]}…"


def dot(report: Provenance) -> str:
    """Return the graph in the language of Graphviz."""
    lines = lines_of(report.nodes)
    numbers = {box: f"m{number}" for number, box in enumerate(boxes_of(lines))}
    out = [
        "digraph provenance {",
        "  rankdir=LR;",
        f"  label={_quoted(str(report))};",
        '  node [fontname="sans-serif", fontsize=10];',
    ]
    for box, name in numbers.items():
        out.append(
            f"  {name} [shape=box, style=filled, fontcolor=white, color={_quoted(COLOURS[box.use])}"
            f", label={_quoted(box.label)}, tooltip={_quoted(MEANINGS[box.use])}];"
        )
    for node in report.nodes:
        extra = f', color="{OPAQUE}", penwidth=2, style=dashed' if node.opaque else ""
        tip = "; ".join(node.opaque) or node.name
        out.append(
            f"  n{node.number} [shape=ellipse{extra}, "
            f"label={_quoted(f'{node.number}: {short_name(node.name)}')}, tooltip={_quoted(tip)}];"
        )
        if node.inside is not None:
            out.append(f"  n{node.inside} -> n{node.number} [style=dotted, arrowhead=none];")
    out.extend(
        f"  {numbers[line.box]} -> n{line.node} [color={_quoted(COLOURS[line.box.use])}, "
        f"tooltip={_quoted(', '.join(line.where))}, arrowhead=none];"
        for line in lines
    )
    return "\n".join([*out, "}", ""])


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
