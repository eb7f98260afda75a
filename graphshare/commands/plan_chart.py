"""The picture of a plan: what graphs buy, and where the captured sizes lie."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from graphshare.commands.plan_report import Ladder
from graphshare.descriptor import BatchDescriptor
from graphshare.planning import Outcome, Plan, Trace, Work

__all__ = ["draw"]

_PLAN = "#0b6e4f"
_COLOURS = ("#c1121f", "#e09f3e", "#335c9e")
_GREY = "#8a8f98"
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _GREY,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "svg.hashsalt": "graphshare",  # the same picture for the same plan
    "svg.fonttype": "none",
}


def draw(
    suffix: str,
    trace: Trace,
    plan: Plan,
    ladders: Mapping[str, Ladder],
    curve: Sequence[Plan],
) -> bytes:
    """Draw a plan beside the usual sizes.

    Args:
        suffix: ``".png"`` or ``".svg"``.
        trace: What was planned for.
        plan: The plan.
        ladders: The usual sizes by name, and how they serve the trace.
        curve: Best plans from few graphs to many.

    Returns:
        What is in the file.
    """
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(9.6, 3.9), dpi=150, layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
        points = _draw_curve(left, plan, ladders, curve)
        grid = right.get_subplotspec()
        right.remove()
        inner = grid.subgridspec(2, 1, height_ratios=(3, 1.35))
        steps = figure.add_subplot(inner[0])
        sizes = figure.add_subplot(inner[1], sharex=steps)
        _draw_steps(steps, trace)
        _draw_sizes(sizes, plan, ladders)
        figure.draw_without_rendering()  # only now is it known where points lie
        _label(left, points)
        content = io.BytesIO()
        kind = suffix.removeprefix(".")
        metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {"Software": None}
        figure.savefig(content, format=kind, metadata=metadata)
    return content.getvalue()


def _excess(outcome: Outcome) -> float:
    """Work beyond that of the same tokens without padding, in percent."""
    tokens = outcome.tokens
    return 100 * (outcome.work / tokens - 1) if tokens else 0.0


def _draw_curve(
    axes: Any, plan: Plan, ladders: Mapping[str, Ladder], curve: Sequence[Plan]
) -> list[_Point]:
    points = sorted({(best.taken, _excess(best.outcome)) for best in (*curve, plan)})
    axes.plot(
        [taken for taken, _ in points],
        [excess for _, excess in points],
        color=_PLAN,
        linewidth=1.6,
        zorder=2,
    )
    axes.plot(plan.taken, _excess(plan.outcome), "o", color=_PLAN, markersize=8, zorder=4)
    shown = [_Point("plan", plan.taken, _excess(plan.outcome), _PLAN)]
    for (name, ladder), colour in zip(ladders.items(), _COLOURS, strict=False):
        excess = _excess(ladder.outcome)
        axes.plot(ladder.taken, excess, "D", color=colour, markersize=6, zorder=3)
        shown.append(_Point(name, ladder.taken, excess, colour))
    marked = [point.excess for point in shown]
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    least = min(point.taken for point in shown) / 2
    axes.set_xlim(left=max(points[0][0], least), right=2.6 * max(point.taken for point in shown))
    axes.set_ylim(0, max(0.1, 1.25 * max(marked)))
    unit = plan.limit.unit
    axes.set_xlabel(
        "graphs" if unit == "graphs" else {"MiB": "memory (MiB)", "s": "capture (s)"}[unit]
    )
    plain = plan.work == Work()
    axes.set_ylabel("padding (% of the tokens)" if plain else "work beyond the tokens (%)")
    axes.set_title(f"The best for {'each number of graphs' if unit == 'graphs' else 'each limit'}")
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    return shown


class _Point(NamedTuple):
    name: str
    taken: float
    excess: float
    colour: str


class _Box(NamedTuple):
    """A rectangle of the picture, in points."""

    left: float
    low: float
    right: float
    high: float

    def touches(self, other: _Box) -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.low < other.high
            and other.low < self.high
        )


def _label(axes: Any, points: Sequence[_Point]) -> None:
    """Name points where no name touches another, or another's mark."""
    spots = axes.transData.transform([(p.taken, p.excess) for p in points])
    spots = [(float(x), float(y)) for x, y in spots * 72 / axes.figure.dpi]
    taken = [_Box(x - 5, y - 5, x + 5, y + 5) for x, y in spots]
    for point, (x, y) in zip(points, spots, strict=True):
        text = f"{point.name} {point.excess:.1f}%"
        width = 5.0 * len(text)
        places = [(8.0, 2.0), (8.0, -11.0), (-8.0 - width, 2.0), (-8.0 - width, -11.0)]
        places += [(8.0, up) for up in range(4, 80, 2)]
        boxes = [_Box(x + dx, y + dy, x + dx + width, y + dy + 9) for dx, dy in places]
        free = (box for box in boxes if not any(box.touches(other) for other in taken))
        box = next(free, boxes[0])
        taken.append(box)
        axes.annotate(
            text,
            (point.taken, point.excess),
            xytext=(box.left - x, box.low - y),
            textcoords="offset points",
            color=point.colour,
            fontsize=8,
        )


def _draw_steps(axes: Any, trace: Trace) -> None:
    edges = _edges(trace.max_tokens)
    uniform = [0] * (len(edges) - 1)
    mixed = [0] * (len(edges) - 1)
    place = 0
    for one, count in sorted(trace.bins.items(), key=lambda item: item[0].num_tokens):
        while one.num_tokens >= edges[place + 1]:
            place += 1
        into = mixed if one.query_len is None else uniform
        into[place] += count
    total = max(1, trace.batches)
    widths = [b - a for a, b in itertools.pairwise(edges)]
    shares = [100 * count / total for count in uniform]
    axes.bar(edges[:-1], shares, widths, align="edge", color="#7fb7a3", label="query lengths alike")
    axes.bar(
        edges[:-1],
        [100 * count / total for count in mixed],
        widths,
        align="edge",
        bottom=shares,
        color="#c9cdd3",
        label="differing",
    )
    axes.set_xscale("log", base=2)
    axes.set_xlim(0.9, trace.max_tokens * 1.08)
    axes.tick_params(labelbottom=False, bottom=False)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylabel("steps (%)")
    axes.set_title("Where the steps are, and the captured sizes")
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def _edges(most: int) -> list[float]:
    """Edges of bars: one for each size, and from 8 on four between two powers of two."""
    edges: list[float] = [float(size) for size in range(1, 8)]
    size = 8.0
    while size <= most:
        edges += [size * (1 + quarter / 4) for quarter in range(4)]
        size *= 2
    kept = [edge for edge in edges if edge <= most]
    following = next((edge for edge in edges if edge > most), size)
    return [*kept, following]


def _draw_sizes(axes: Any, plan: Plan, ladders: Mapping[str, Ladder]) -> None:
    rows: list[tuple[str, Sequence[BatchDescriptor], str]] = [("plan", plan.keys, _PLAN)]
    for (name, ladder), colour in zip(ladders.items(), _COLOURS, strict=False):
        rows.append((name, list(ladder.outcome.hits), colour))
    for at, (_, keys, colour) in enumerate(rows):
        sizes = sorted({key.num_tokens for key in keys})
        axes.vlines(sizes, at - 0.36, at + 0.36, color=colour, linewidth=1.0)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.tick_params(axis="y", length=0)
    for label, (_, _, colour) in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(colour)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.set_xlabel("tokens of a step")
