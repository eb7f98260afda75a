"""What the demo shows at its end, for readers and, as plain values, for machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from graphshare.adapters.toy.demo.faults import FaultFacts
from graphshare.adapters.toy.demo.runs import RunReport
from graphshare.adapters.toy.demo.trials import Harm, Refusal
from graphshare.adapters.toy.demo.workload import Workload, decoded
from graphshare.errors import GraphShareError
from graphshare.printing import printable

__all__ = [
    "comparison",
    "error_facts",
    "first_difference",
    "harm_facts",
    "harm_shown",
    "not_as_expected_shown",
    "planted_shown",
    "refusal_shown",
    "run_facts",
    "same_tokens_shown",
]

_HEADINGS = {
    "sharing": "graphs,\nsharing",
    "graphs": "graphs,\nalone",
    "eager": "no\ngraphs",
    "plain": "no\ndraft",
}
_GAIN = "tokens a request\nand step"
_CONTEXT = 24


def comparison(runs: Mapping[str, RunReport], max_num_reqs: int) -> RenderableType:
    """Return the table of all runs, one a column, and what it does not compare."""
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1))
    table.add_column("", no_wrap=True)
    for name in runs:
        table.add_column(_HEADINGS[name], justify="right", no_wrap=True)

    def row(title: str, values: Sequence[str]) -> None:
        table.add_row(title, *values)

    reports = list(runs.values())
    row("steps", [str(run.steps) for run in reports])
    row(_GAIN, [f"{run.tokens_per_step:.2f}" for run in reports])
    for name in ("target", "draft.prefill", "draft.decode"):
        row(f"builds: {name}", [str(run.builds.get(name, "-")) for run in reports])
    row("builds avoided", [str(run.builds_avoided or "-") for run in reports])
    row("graph replays", [str(run.replays or "-") for run in reports])
    row("ms in builds", [_ms(run.build_seconds) for run in reports])
    row("ms in forwards", [_ms(run.forward_seconds) for run in reports])
    row("ms in all", [_ms(run.seconds) for run in reports])
    note = (
        "The run without a draft serves one request after the other, the others up to "
        f"{max_num_reqs} at once: its steps and times do not compare."
    )
    return Group(table, Text(note), Text(""))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}" if seconds else "-"


def run_facts(run: RunReport) -> dict[str, Any]:
    """Return a run as JSON takes it, without its outputs."""
    return {
        "steps": run.steps,
        "tokens": run.tokens,
        "tokens_per_step": round(run.tokens_per_step, 4),
        "builds": dict(run.builds),
        "builds_avoided": run.builds_avoided,
        "graphs": run.graphs,
        "replays": run.replays,
        "capture_seconds": round(run.capture_seconds, 6),
        "build_seconds": round(run.build_seconds, 6),
        "forward_seconds": round(run.forward_seconds, 6),
        "seconds": round(run.seconds, 6),
    }


def first_difference(
    right: Sequence[Sequence[int]], wrong: Sequence[Sequence[int]]
) -> tuple[int, int] | None:
    """Return the first request that differs, and the first token in it that does."""
    for number, (one, other) in enumerate(zip(right, wrong, strict=True)):
        for place in range(max(len(one), len(other))):
            if one[place : place + 1] != other[place : place + 1]:
                return number, place
    return None


def error_facts(error: GraphShareError) -> dict[str, Any]:
    """Return an error as JSON takes it: its class, its message, its parts and its own facts."""
    facts = {name: _plain(value) for name, value in vars(error).items()}
    return {"error": type(error).__name__, "message": str(error), **facts}


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return str(getattr(value, "value", value))


def same_tokens_shown(runs: Mapping[str, RunReport]) -> RenderableType:
    """Return a line about whether all runs gave the same tokens."""
    reports = list(runs.values())
    for name, report in runs.items():
        found = first_difference(reports[0].outputs, report.outputs)
        if found is not None:
            heading = _HEADINGS[name].replace("\n", " ")
            return Text(
                f"NOT the same tokens: the run {heading!r} differs first in text {found[0] + 1}, "
                f"token {found[1] + 1}.",
                "bold red",
            )
    return Text(f"All {len(reports)} runs gave the same {reports[0].tokens} tokens.", "bold green")


def planted_shown(name: str, facts: FaultFacts, *, unsafe: bool) -> RenderableType:
    """Return what is said before a fault runs."""
    said = Text.assemble((f"Fault {name!r}: ", "bold"), facts.planted)
    if unsafe:
        said.append(f" It is let through: {facts.let_through}.")
    return said


def _shown(part: Any, error: GraphShareError) -> str:
    address = getattr(error, "field", "") == "address" and isinstance(part, int)
    return hex(part) if address else str(part)


def refusal_shown(refusal: Refusal, facts: FaultFacts) -> RenderableType:
    """Return an error with its parts, and the rule that it stands for."""
    error = refusal.error
    when = {
        "setup": "before anything was captured",
        "capture": "while the graphs were captured",
        "decoding": f"in step {refusal.steps + 1}, after {refusal.tokens} tokens",
    }[refusal.during]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    parts = {
        "expected": error.expected,
        "got": error.got,
        "key": error.key,
        "otherwise": error.consequence,
        "remedy": error.remedy,
        "rule": facts.rule,
    }
    for title, part in parts.items():
        if part is not None and part != "":
            grid.add_row(title, Text(_shown(part, error)))
    return Group(
        Text.assemble("Refused ", when, ":"),
        Text(""),
        Text.assemble((type(error).__name__, "bold red"), "  ", error.what),
        Text(""),
        grid,
    )


def harm_facts(healthy: RunReport, harm: Harm) -> dict[str, Any]:
    """Return what a fault did as JSON takes it."""
    found = first_difference(healthy.outputs, harm.outputs) if harm.outputs else None
    return {
        "outcome": harm.outcome,
        "steps": harm.steps,
        "tokens_per_step": round(harm.tokens_per_step, 4),
        "changed": list(harm.changed),
        "first_difference": found and {"request": found[0], "token": found[1]},
        "crash": harm.crash or None,
    }


def not_as_expected_shown(refused: bool) -> RenderableType:
    """Return a line for a fault that was let through, or refused, against what was asked for."""
    return Text(
        "REFUSED, though it was to be let through." if refused else "NOT REFUSED.", "bold red"
    )


def harm_shown(healthy: RunReport, harm: Harm, workload: Workload) -> RenderableType:
    """Return the run with the fault beside the one without, and what became of the text."""
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1))
    table.add_column("", no_wrap=True)
    for heading in ("without", "with the fault"):
        table.add_column(heading, justify="right", no_wrap=True)
    if harm.outcome == "crashed":
        return Text.assemble(("The run crashed: ", "bold red"), harm.crash)
    rows = (
        ("steps", f"{healthy.steps}", f"{harm.steps}"),
        (_GAIN, f"{healthy.tokens_per_step:.2f}", f"{harm.tokens_per_step:.2f}"),
        ("texts that changed", "-", f"{len(harm.changed)} of {len(harm.outputs)}"),
    )
    for each in rows:
        table.add_row(*each)
    return Group(
        table, *_difference_shown(healthy.outputs, harm.outputs, workload), _verdict(healthy, harm)
    )


def _verdict(healthy: RunReport, harm: Harm) -> Text:
    if harm.outcome == "tokens changed":
        said = "Wrong tokens, and no error."
    elif harm.outcome == "acceptance fell":
        lost = 1 - harm.tokens_per_step / healthy.tokens_per_step
        said = (
            "The tokens are right, since the target verifies every draft; but a step gives "
            f"a request {lost:.0%} fewer, and no error says so."
        )
    else:
        said = (
            "Nothing to see in this run: same tokens, as many a step. The graphs read memory "
            "that happened to hold what they needed."
        )
    return Text(said, "bold")


def _difference_shown(
    right: Sequence[Sequence[int]], wrong: Sequence[Sequence[int]], workload: Workload
) -> list[RenderableType]:
    found = first_difference(right, wrong)
    if found is None:
        return []
    number, place = found
    before = decoded([*workload.prompt_tokens[number], *right[number][:place]])
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for title, outputs, style in (("without", right, "green"), ("with", wrong, "red")):
        rest = printable(decoded(outputs[number][place:])) or "(the end)"
        common = printable(before[-_CONTEXT:])
        grid.add_row(title, Text.assemble(("..." + common, "dim"), ("|" + rest, style)))
    return [Text(f"Text {number + 1}, from its byte {place + 1} on:"), grid, Text("")]
