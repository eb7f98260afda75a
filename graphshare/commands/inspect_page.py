"""A report as one HTML page that needs nothing else: a drawing, and a table of every address."""

from __future__ import annotations

from html import escape

from graphshare.commands.inspect_drawing import (
    COLOURS,
    MEANINGS,
    OPAQUE,
    Box,
    Line,
    boxes_of,
    lines_of,
    short_name,
)
from graphshare.provenance.places import Use
from graphshare.provenance.report import NodeReport, Provenance

__all__ = ["page"]

_ROW, _GAP = 26, 10
_BOX_X, _BOX_WIDTH = 10, 330
_NODE_X, _NODE_WIDTH = 620, 420
_TOP = 12

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #1f2328; background: #fff;
       margin: 2rem auto; max-width: 1080px; padding: 0 1rem; }
h1 { font-size: 1.25rem; margin-bottom: .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin-top: 2rem; }
p.facts { color: #57606a; margin-top: 0; }
ul.legend { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; }
ul.legend b { font-weight: 600; }
ul.legend i { display: inline-block; width: .8em; height: .8em; border-radius: 2px;
              margin-right: .4em; }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg .line { fill: none; stroke-width: 1.6; opacity: .55; }
svg g:hover .line { opacity: 1; stroke-width: 2.6; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .25rem .7rem .25rem 0;
         border-bottom: 1px solid #d8dee4; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
td.name { overflow-wrap: anywhere; max-width: 24rem; }
code { font: 12px ui-monospace, monospace; }
.opaque { color: #bc4c00; }
"""


def page(report: Provenance) -> str:
    """Return the page."""
    title = escape(f"{report.pool}[{report.key}]")
    facts = ", ".join(f"{name} {value}" for name, value in report.facts.items())
    notes = "".join(f"<p>{escape(note)}</p>" for note in report.notes)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body>\n"
        f"<h1>{title}</h1>\n"
        f'<p class="facts">{len(report.nodes)} nodes on {escape(report.device)}, '
        f"{escape(report.backend)}; {escape(facts)}</p>\n"
        f"{_legend(report)}\n{notes}\n{_drawing(report)}\n"
        f"<h2>Every node</h2>\n{_table(report)}\n</body></html>\n"
    )


def _legend(report: Provenance) -> str:
    items = [
        f'<li><i style="background:{COLOURS[use]}"></i><b>{len(found)}</b> {MEANINGS[use]}</li>'
        for use in Use
        if (found := report.of(use))
    ]
    if report.opaque:
        items.append(
            f'<li><i style="background:{OPAQUE}"></i><b>{len(report.opaque)}</b> opaque</li>'
        )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _drawing(report: Provenance) -> str:
    lines = lines_of(report.nodes)
    boxes = boxes_of(lines)
    shown = [node for node in report.nodes if node.opaque or _has_lines(node)]
    y_of_box: dict[Box, float] = {}
    y = float(_TOP)
    for place, box in enumerate(boxes):
        if place and boxes[place - 1].use is not box.use:
            y += _GAP
        y_of_box[box] = y
        y += _ROW
    # The shorter column in the middle of the longer one.
    node_height = _ROW * len(shown)
    height = max(y, float(_TOP + node_height)) + _TOP
    box_shift = max(0.0, (height - _TOP - y) / 2)
    node_shift = max(0.0, (height - 2 * _TOP - node_height) / 2)
    y_of_box = {box: each + box_shift for box, each in y_of_box.items()}
    y_of_node = {node.number: _TOP + node_shift + _ROW * i for i, node in enumerate(shown)}
    size = f"0 0 {_NODE_X + _NODE_WIDTH + 10} {height:.0f}"
    label = "Memory to the left, nodes to the right"
    parts = [f'<svg viewBox="{size}" role="img" aria-label="{label}">']
    parts += [_line(line, y_of_box[line.box], y_of_node[line.node]) for line in lines]
    parts += [_box(box, y_of_box[box]) for box in boxes]
    parts += [_node(node, y_of_node[node.number]) for node in shown]
    hidden = len(report.nodes) - len(shown)
    note = (
        f"<p>{hidden} nodes that use the graph's own memory alone are not drawn.</p>"
        if hidden
        else ""
    )
    return "".join([*parts, "</svg>", note])


def _has_lines(node: NodeReport) -> bool:
    return any(each.use is not Use.GRAPH for each in node.addresses)


def _line(line: Line, box_y: float, node_y: float) -> str:
    x1, y1 = _BOX_X + _BOX_WIDTH, box_y + _ROW / 2 - 2
    x2, y2 = _NODE_X, node_y + _ROW / 2 - 2
    middle = (x1 + x2) / 2
    tip = escape(f"{line.box.label} in node {line.node}: {', '.join(line.where)}")
    dashes = ' stroke-dasharray="5 3"' if line.box.use is Use.DANGLING else ""
    return (
        f'<g><title>{tip}</title><path class="line" stroke="{COLOURS[line.box.use]}"{dashes} '
        f'd="M{x1} {y1:.1f} C{middle:.0f} {y1:.1f} {middle:.0f} {y2:.1f} {x2} {y2:.1f}"/></g>'
    )


def _box(box: Box, y: float) -> str:
    return (
        f"<g><title>{escape(MEANINGS[box.use])}: {escape(box.label)}</title>"
        f'<rect x="{_BOX_X}" y="{y:.1f}" width="{_BOX_WIDTH}" height="{_ROW - 4}" rx="4" '
        f'fill="{COLOURS[box.use]}"/>'
        f'<text x="{_BOX_X + 8}" y="{y + 15:.1f}" fill="#fff">{escape(_cut(box.label, 50))}</text>'
        "</g>"
    )


def _node(node: NodeReport, y: float) -> str:
    stroke = f'stroke="{OPAQUE}" stroke-dasharray="4 2"' if node.opaque else 'stroke="#8c959f"'
    tip = escape("; ".join((node.name, *(f"opaque: {why}" for why in node.opaque))))
    text = f"{node.number}  {short_name(node.name)}" + (f" ({node.kind})" if node.opaque else "")
    return (
        f"<g><title>{tip}</title>"
        f'<rect x="{_NODE_X}" y="{y:.1f}" width="{_NODE_WIDTH}" height="{_ROW - 4}" rx="11" '
        f'fill="#f6f8fa" {stroke}/>'
        f'<text x="{_NODE_X + 12}" y="{y + 15:.1f}" fill="#1f2328">{escape(_cut(text, 62))}</text>'
        "</g>"
    )


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _table(report: Provenance) -> str:
    rows: list[str] = []
    for node in report.nodes:
        addresses = "<br>".join(
            f'<code>{each.address:#x}</code> <span style="color:{COLOURS[each.use]}">'
            f"{escape(MEANINGS[each.use])}{escape(' ' + each.name if each.name else '')}"
            f"{f' + {each.offset}' if each.offset and each.name else ''}</span>"
            f"{escape(f' of {each.pool}' if each.pool else '')}, {escape(each.where)}"
            f"{f' ({each.certainty.value})' if each.certainty.value != 'read' else ''}"
            for each in node.addresses
        )
        opaque = "".join(f'<div class="opaque">opaque: {escape(why)}</div>' for why in node.opaque)
        inside = "" if node.inside is None else f" (in {node.inside})"
        rows.append(
            f'<tr><td class="number">{node.number}{inside}</td><td>{escape(node.kind)}</td>'
            f'<td class="name">{escape(_cut(node.name, 400))}</td><td>{addresses}{opaque}</td></tr>'
        )
    head = "<tr><th>node</th><th>kind</th><th>name</th><th>addresses</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"
