"""``graphshare plan``: which sizes to capture for a trace of batches."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from graphshare.commands.outputs import check_outputs
from graphshare.commands.plan_report import Ladder, as_json, print_tables
from graphshare.plan_file import write_whole
from graphshare.planning import (
    Limit,
    Plan,
    TooTightError,
    Trace,
    Work,
    evaluate,
    frontier,
    graphs_to_match,
    ladders,
    plan_captures,
    read_trace,
    write_plan,
)
from graphshare.printing import printable

__all__ = ["add_arguments", "run"]

Refuse = Callable[[str], NoReturn]

_POINTS_OF_CURVE = 24
_MOST_TOKENS = 1 << 20
"""Of a graph: the ladders have a size for each 16."""


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _size(text: str) -> int:
    number = _count(text)
    if number > _MOST_TOKENS:
        raise ValueError
    return number


def _amount(text: str) -> float:
    number = float(text)
    if not 0 <= number < math.inf:
        raise ValueError
    return number


def _lengths(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


# What argparse calls them in "invalid count value: 'x'".
_count.__name__, _size.__name__ = "count", f"count (1 to {_MOST_TOKENS})"
_amount.__name__, _lengths.__name__ = "amount", "list of lengths"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = (
        "Find the descriptors to capture for a trace: those on which its steps cost least, within "
        "a limit. The trace is JSON lines or CSV, compressed by gzip or not; each line a batch: "
        "tokens, requests, and where they have them query_len (of all requests alike), count, "
        "loras."
    )
    parser.add_argument("trace", metavar="TRACE", type=Path, help="the file")
    limit = parser.add_argument_group("limit (one of the first three)")
    one = limit.add_mutually_exclusive_group(required=True)
    one.add_argument("--graphs", type=_count, metavar="N", help="at most N graphs")
    one.add_argument(
        "--memory-mib", type=_amount, metavar="M", help="graphs that take at most M MiB"
    )
    one.add_argument(
        "--capture-seconds", type=_amount, metavar="S", help="captures that take at most S seconds"
    )
    limit.add_argument(
        "--per-graph",
        type=_amount,
        metavar="X",
        help="what each graph takes of the memory or time",
    )
    limit.add_argument(
        "--per-token",
        type=_amount,
        metavar="X",
        default=0.0,
        help="what each token of a graph takes beside that (0)",
    )
    limit.add_argument(
        "--once",
        type=_amount,
        metavar="X",
        default=0.0,
        help="what all graphs take together, such as their shared working memory (0)",
    )
    what = parser.add_argument_group("what may be captured")
    what.add_argument(
        "--max-tokens",
        type=_size,
        default=512,
        metavar="N",
        help="larger batches run eagerly (512)",
    )
    what.add_argument(
        "--max-num-reqs",
        type=_count,
        metavar="N",
        help="batches of more requests run eagerly (the most in the trace)",
    )
    what.add_argument(
        "--uniform-query-lens",
        type=_lengths,
        default=[],
        metavar="Q,...",
        help="query lengths that may have graphs of their own (none)",
    )
    what.add_argument(
        "--only-uniform",
        action="store_true",
        help="no graphs for differing query lengths; such batches run eagerly",
    )
    cost = parser.add_argument_group("what a step costs, in tokens of a replay")
    cost.add_argument(
        "--step-tokens",
        type=_amount,
        default=0,
        metavar="X",
        help="each step, beside its padded tokens (0)",
    )
    cost.add_argument(
        "--mixed-step-tokens",
        type=_amount,
        default=0,
        metavar="X",
        help="each step on a graph for any query lengths, beyond one for its own length (0)",
    )
    out = parser.add_argument_group("output")
    out.add_argument(
        "--output", type=Path, metavar="FILE", help="write the plan, for capture_descriptors(plan=)"
    )
    out.add_argument("--plot", type=Path, metavar="FILE", help="draw it: a .png or .svg file")
    out.add_argument("--json", action="store_true", help="print JSON instead of tables")
    reading = parser.add_argument_group("reading")
    reading.add_argument(
        "--format", choices=("jsonl", "csv"), help="of the trace, if its name does not say"
    )
    reading.add_argument(
        "--ignore-other-fields",
        action="store_true",
        help="pass over fields that are not known, instead of refusing them",
    )


def run(options: argparse.Namespace, refuse: Refuse) -> int:
    """Make a plan, print it, and write what is asked for.

    Args:
        options: The parsed options.
        refuse: Called with a line for what the user got wrong; does not return.

    Returns:
        The exit code, 0.
    """
    draw = _drawing(options.plot, refuse)
    check_outputs(options.trace, {"--output": options.output, "--plot": options.plot}, refuse)
    try:
        limit = _limit(options, refuse)
        work = Work(per_step=options.step_tokens, mixed_per_step=options.mixed_step_tokens)
    except ValueError as error:
        refuse(_reason(error))
    try:
        trace = read_trace(
            options.trace,
            max_tokens=options.max_tokens,
            max_num_reqs=options.max_num_reqs,
            kind=options.format,
            ignore_other_fields=options.ignore_other_fields,
        )
        choices: dict[str, Any] = {
            "work": work,
            "uniform_query_lens": options.uniform_query_lens,
            "mixed": not options.only_uniform,
        }
        plan = plan_captures(trace, limit, **choices)
        _look_at(options.trace, trace, refuse)
    except TooTightError as error:
        refuse(f"all batches need {error.least:g} {limit.unit}, and the limit is {limit.total:g}")
    except (OSError, ValueError) as error:
        refuse(_reason(error))
    beside = _ladders(trace, limit, choices)
    picture = None
    if draw is not None:
        curve = frontier(trace, limit, points=_POINTS_OF_CURVE, **choices)
        picture = draw(options.plot.suffix, trace, plan, beside, curve)
    try:
        if options.output is not None:
            write_plan(plan, options.output)
        if picture is not None:
            write_whole(options.plot, picture)
    except OSError as error:
        refuse(_reason(error))
    if options.json:
        print(json.dumps(as_json(trace, plan, beside), indent=2))
    else:
        print_tables(trace, plan, beside)
        for path in (options.output, options.plot):
            if path is not None:
                print(f"written: {printable(str(path))}")
    return 0


def _look_at(path: Path, trace: Trace, refuse: Refuse) -> None:
    """Refuse a trace for which there is nothing to plan: a plan without keys would be of no use."""
    if trace.bins:
        return
    if not trace.eager:
        refuse(f"{path}: expected a batch at least, got none")
    beyond = {
        "num_tokens": f"{trace.max_tokens} tokens",
        "num_reqs": f"{trace.max_num_reqs} requests",
    }
    why = " or ".join(beyond[field] for field in trace.eager)
    refuse(f"{path}: no batch may run on a graph: all have more than {why}")


def _drawing(path: Path | None, refuse: Refuse) -> Callable[..., bytes] | None:
    if path is None:
        return None
    if path.suffix not in (".png", ".svg"):
        refuse(f"{path}: a plot is a .png or .svg file")
    try:
        from graphshare.commands.plan_chart import draw
    except ModuleNotFoundError as error:
        refuse(f'--plot needs {error.name}: pip install "graphshare[plot]"')
    return draw


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror.lower()}"
    return str(error)


def _limit(options: argparse.Namespace, refuse: Refuse) -> Limit:
    if options.graphs is not None:
        if options.per_graph is not None or options.per_token or options.once:
            refuse("--per-graph, --per-token and --once go with --memory-mib or --capture-seconds")
        return Limit.graphs(options.graphs)
    in_memory = options.memory_mib is not None
    if not options.per_graph and not options.per_token:
        refuse("--per-graph or --per-token: say what a graph takes")
    return Limit(
        total=options.memory_mib if in_memory else options.capture_seconds,
        per_graph=options.per_graph or 0.0,
        per_token=options.per_token,
        once=options.once,
        unit="MiB" if in_memory else "s",
    )


def _ladders(trace: Trace, limit: Limit, choices: Mapping[str, Any]) -> dict[str, Ladder]:
    known: dict[float, Plan | None] = {}
    found: dict[str, Ladder] = {}
    usual = ladders(
        trace.max_tokens,
        trace.max_num_reqs,
        choices["uniform_query_lens"],
        trace.num_active_loras or (0,),
    )
    for name, keys in usual.items():
        if not choices["mixed"]:
            keys = [key for key in keys if key.uniform_query_len is not None]
        taken = limit.taken(tuple(keys))
        if taken not in known:
            as_much = Limit(
                total=taken,
                per_graph=limit.per_graph,
                per_token=limit.per_token,
                once=limit.once,
                unit=limit.unit,
            )
            try:
                known[taken] = plan_captures(trace, as_much, **choices)
            except TooTightError:
                known[taken] = None
        outcome, matched_by = evaluate(keys, trace, choices["work"]), None
        if _matching(limit, choices):
            matched_by = graphs_to_match(
                trace, outcome.all_work, most=outcome.graphs, work=choices["work"]
            )
        found[name] = Ladder(outcome, taken, known[taken], matched_by)
    return found


def _matching(limit: Limit, choices: Mapping[str, Any]) -> bool:
    """Whether the smallest plan as good as a ladder is looked for: where plans take no time."""
    return limit.unit == "graphs" and not choices["uniform_query_lens"]
