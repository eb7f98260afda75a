"""What ``graphshare plan`` prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphshare.commands.text import table
from graphshare.descriptor import BatchDescriptor
from graphshare.planning import Outcome, Plan, Trace

__all__ = ["Ladder", "as_json", "print_tables"]

_REASONS = {
    "num_tokens": "of more than {max_tokens} tokens",
    "num_reqs": "of more than {max_num_reqs} requests",
    "not_covered": "that no key covers",
}


@dataclass(frozen=True, slots=True)
class Ladder:
    """The usual sizes beside the plan.

    Attributes:
        outcome: How they serve the trace.
        taken: What they take of the limit.
        best: The plan that takes as much, if one covers all batches.
        matched_by: Graphs of the smallest plan on which steps cost no more; ``None`` where it is
            not looked for, or more than the ladder has.
    """

    outcome: Outcome
    taken: float
    best: Plan | None
    matched_by: int | None


def print_tables(trace: Trace, plan: Plan, beside: Mapping[str, Ladder]) -> None:
    """Print a plan beside the usual sizes, and its keys."""
    steps = trace.batches
    print(f"{steps:,} steps, {sum(trace.bins.values()):,} of which may run on a graph")
    for reason, count in plan.outcome.eager.items():
        what = _REASONS[reason].format(max_tokens=trace.max_tokens, max_num_reqs=trace.max_num_reqs)
        print(f"{count:,} {what} run eagerly")
    print()
    unit = plan.limit.unit
    header = ["", "graphs", "padded tokens", "padding", "coverage", "eager", "work / best"]
    matching = any(ladder.matched_by for ladder in beside.values())
    if matching:
        header.append("matched by")
    if unit != "graphs":
        header.insert(2, unit)
    rows = [_row("plan", plan.outcome, plan.taken, unit, "1.000")]
    if matching:
        rows[0].append("")
    for name, ladder in beside.items():
        ratio = "-"
        if ladder.best is not None and ladder.best.outcome.all_work:
            ratio = f"{ladder.outcome.all_work / ladder.best.outcome.all_work:.3f}"
        rows.append(_row(name, ladder.outcome, ladder.taken, unit, ratio))
        if matching:
            rows[-1].append(f"{ladder.matched_by or '-'}")
    print(table(header, rows))
    as_many = "as many graphs" if unit == "graphs" else f"as many {unit}"
    print(f"\nwork / best: beside the best keys that take {as_many}")
    if matching:
        print("matched by: the fewest graphs on which the steps cost no more")
    print()
    print(f"{len(plan.keys)} key{'' if len(plan.keys) == 1 else 's'}:")
    for kind, sizes in _by_kind(plan.keys).items():
        print(f"  {kind}: {', '.join(map(str, sizes))}")


def _row(name: str, outcome: Outcome, taken: float, unit: str, ratio: str) -> list[str]:
    row = [
        name,
        f"{outcome.graphs:,}",
        f"{outcome.padded_tokens:,}",
        f"{outcome.padding:.2%}",
        f"{outcome.coverage:.2%}",
        f"{sum(outcome.eager.values()):,}",
        ratio,
    ]
    if unit != "graphs":
        row.insert(2, f"{taken:,.1f}")
    return row


def _by_kind(keys: tuple[BatchDescriptor, ...]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for key in reversed(keys):
        length = key.uniform_query_len
        kind = "any query lengths" if length is None else f"query length {length}"
        if key.num_active_loras:
            kind += f", {key.num_active_loras} LoRAs"
        found.setdefault(kind, []).append(key.num_tokens)
    return found


def as_json(trace: Trace, plan: Plan, beside: Mapping[str, Ladder]) -> dict[str, Any]:
    """The same for a program."""
    return {
        "trace": {
            "steps": trace.batches,
            "max_tokens": trace.max_tokens,
            "max_num_reqs": trace.max_num_reqs,
        },
        "limit": {"total": plan.limit.total, "unit": plan.limit.unit},
        "plan": {
            **_facts(plan.outcome, plan.taken),
            "keys": [
                {
                    "num_tokens": key.num_tokens,
                    "num_reqs": key.num_reqs,
                    "uniform_query_len": key.uniform_query_len,
                    "num_active_loras": key.num_active_loras,
                    "steps": plan.outcome.hits[key],
                }
                for key in plan.keys
            ],
        },
        "ladders": {
            name: {
                **_facts(ladder.outcome, ladder.taken),
                "best_work": None if ladder.best is None else ladder.best.outcome.all_work,
                "matched_by": ladder.matched_by,
            }
            for name, ladder in beside.items()
        },
    }


def _facts(outcome: Outcome, taken: float) -> dict[str, Any]:
    return {
        "graphs": outcome.graphs,
        "taken": taken,
        "work": outcome.all_work,
        "tokens": outcome.tokens,
        "padded_tokens": outcome.padded_tokens,
        "padding": outcome.padding,
        "coverage": outcome.coverage,
        "eager": dict(outcome.eager),
        "eager_tokens": outcome.eager_tokens,
    }
