"""A report as tables on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Set as AbstractSet

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from graphshare.commands.inspect_drawing import COLOURS, MEANINGS, OPAQUE, box_of, short_name
from graphshare.printing import printable
from graphshare.provenance.places import Use
from graphshare.provenance.report import NodeReport, Provenance

__all__ = ["show"]

_PLAIN_WIDTH = 160  # where nobody says how wide it is: in a pipe, a file


class _PipeConsole(Console):
    """A console that leaves a broken pipe to whoever called."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        raise  # rich calls this while it handles the BrokenPipeError


def show(report: Provenance, uses: AbstractSet[Use]) -> None:
    """Print a report.

    Args:
        report: The report.
        uses: Only nodes with an address of one of these; all if empty.
    """
    console = _PipeConsole(highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    facts = ", ".join(f"{name} {value}" for name, value in report.facts.items())
    console.print(_text(f"{report.pool}[{report.key}]", "bold"))
    console.print(_text(f"{len(report.nodes)} nodes on {report.device}, {report.backend}; {facts}"))
    console.print(_summary(report))
    console.print(_nodes(report, uses))
    for note in report.notes:
        console.print(_text(note))
    for each in report.opaque:
        console.print(_text(f"opaque: {each}", OPAQUE))
    for node in report.nodes:
        for each in node.addresses:
            if each.use is Use.DANGLING:
                console.print(
                    _text(
                        f"dangling: node {node.number}: {short_name(node.name)} has "
                        f"{each.address:#x} in {each.where}",
                        COLOURS[Use.DANGLING],
                    )
                )


def _text(text: str, style: str = "") -> Text:
    """Text of the report: neither markup, nor what would steer the terminal."""
    return Text(printable(text), style=style)


def _summary(report: Provenance) -> Table:
    table = Table(box=SIMPLE, pad_edge=False)
    for name, justify in (("use", "left"), ("addresses", "right"), ("nodes", "right")):
        table.add_column(name, justify=justify, no_wrap=True)  # pyright: ignore[reportArgumentType]
    table.add_column("names")
    for use in Use:
        found = report.of(use)
        if not found:
            continue
        nodes = sum(any(each.use is use for each in node.addresses) for node in report.nodes)
        named = {box_of(each).label for each in found} if use is not Use.GRAPH else set[str]()
        table.add_row(
            Text(MEANINGS[use], style=COLOURS[use]),
            str(len(found)),
            str(nodes),
            _text(", ".join(sorted(named))),
        )
    return table


def _nodes(report: Provenance, uses: AbstractSet[Use]) -> Table:
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("node", justify="right", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    table.add_column("name", no_wrap=True, max_width=48)
    table.add_column("addresses")
    for node in report.nodes:
        if uses and not any(each.use in uses for each in node.addresses):
            continue
        number = str(node.number) if node.inside is None else f"{node.inside} > {node.number}"
        table.add_row(number, _text(node.kind), _text(short_name(node.name)), _addresses(node))
    return table


def _addresses(node: NodeReport) -> Text:
    counts: dict[tuple[Use, str], int] = {}
    for each in node.addresses:
        label = "graph" if each.use is Use.GRAPH else box_of(each).label
        counts[each.use, label] = counts.get((each.use, label), 0) + 1
    text = Text()
    order = list(Use)
    for use, label in sorted(counts, key=lambda named: order.index(named[0])):
        number = counts[use, label]
        if text:
            text.append(", ")
        text.append(printable(label) + (f" x{number}" if number > 1 else ""), style=COLOURS[use])
    if node.opaque:
        text.append((", " if text else "") + "opaque", style=OPAQUE)
    return text
