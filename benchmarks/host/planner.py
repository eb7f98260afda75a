"""Padded work of planned sizes beside the usual ladders, and what planning a long trace takes.

Three workloads of published shape (``benchmarks/_workloads.py``). Each ladder is compared with the
best keys of the same number, by the tokens that its steps are padded to; and the fewest graphs are
sought on which the steps cost no more. These are counts: they are the same on any machine.

The long trace is written to a file and planned by the command line in processes of their own, with
lines that repeat and with lines that all differ. Their time and memory are the whole process's.

    python -m benchmarks.host.planner [--json PATH] [--rounds N] [--steps N] [--lines N]
    python -m benchmarks.host.planner --plots DIR     # draws the three plans of 16 graphs instead
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks._measure import Ratio, bootstrap, print_table
from benchmarks._turns import Figure, arguments, report
from benchmarks._workloads import WORKLOADS, Workload, batches
from graphshare.cli import main as main_of_command
from graphshare.planning import (
    Batch,
    Trace,
    Work,
    count_batches,
    evaluate,
    graphs_to_match,
    ladders,
    plan_captures,
)

ROOT = Path(__file__).parents[2]
MAX_TOKENS = 512
GRAPHS = (8, 16, 32)
MIXED_STEP_TOKENS = 16
TARGET_SECONDS = 10.0
TARGET_MB = 500.0


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--steps", type=int, default=200_000, help="of each workload")
    parser.add_argument("--lines", type=int, default=1_000_000, help="of the long trace")
    parser.add_argument("--plots", metavar="DIR", type=Path, help="draw, and measure nothing")
    options = parser.parse_args(argv)
    if options.plots is not None:
        draw(options.plots, options.steps)
        return
    figures: list[Figure] = []
    details: dict[str, Any] = {"workloads": {}}
    for workload in WORKLOADS:
        trace = count_batches(
            batches(workload, options.steps),
            max_tokens=MAX_TOKENS,
            max_num_reqs=workload.max_num_reqs,
        )
        # Of the same workload, but other steps: a plan must not be good at its own trace alone.
        another = count_batches(
            batches(workload, options.steps, seed=1),
            max_tokens=MAX_TOKENS,
            max_num_reqs=workload.max_num_reqs,
        )
        facts = compared(workload, trace, another)
        details["workloads"][workload.name] = facts
        show(workload.name, facts)
        figures += [
            Figure(f"{workload.name}: padded tokens of {name} / best as many", each["ratio"], "")
            for name, each in facts["ladders"].items()
        ]
    with tempfile.TemporaryDirectory() as folder:
        long = details["long trace"] = planned(Path(folder), options.lines, options.rounds)
    for case, runs in long.items():
        seconds, processor_seconds, megabytes = (
            spread([run[unit] for run in runs]) for unit in ("s", "processor s", "MB")
        )
        figures += [
            Figure.of(f"{options.lines:,} lines, {case}", seconds, "s", TARGET_SECONDS),
            Figure.of(f"{options.lines:,} lines, {case}: processor", processor_seconds, "s"),
            Figure.of(f"{options.lines:,} lines, {case}: memory", megabytes, "MB", TARGET_MB),
        ]
    report(options.json, "host/planner", figures, details)


def draw(folder: Path, steps: int) -> None:
    """Draw a plan of each workload, by the command line."""
    for workload in WORKLOADS:
        with tempfile.TemporaryDirectory() as place:
            trace = write_json(Path(place) / "trace.jsonl", batches(workload, steps), times=False)
            plot = folder / f"plan-{workload.name}.png"
            options = ["--graphs", "16", "--max-num-reqs", str(workload.max_num_reqs)]
            main_of_command(["plan", str(trace), *options, "--plot", str(plot)])


def spread(values: Sequence[float]) -> Ratio:
    return bootstrap(values) if len(values) > 1 else Ratio(values[0], values[0], values[0])


def compared(workload: Workload, trace: Trace, another: Trace) -> dict[str, Any]:
    """One workload: plans, and the ladders beside the best keys of the same number."""
    facts: dict[str, Any] = {
        "source": workload.source,
        "steps": trace.batches,
        "eager": dict(trace.eager),
        "tokens": trace.tokens,
        "plans": {},
        "ladders": {},
        "with uniform keys": {},
    }
    for graphs in GRAPHS:
        plan = plan_captures(trace, graphs)
        elsewhere = evaluate(plan.keys, another)
        facts["plans"][graphs] = {
            "padding": plan.outcome.padding,
            "padded": plan.outcome.padded_tokens,
            "padding of another trace": elsewhere.padding,
            "not covered in another trace": elsewhere.eager.get("not_covered", 0),
        }
    for name, keys in ladders(MAX_TOKENS, workload.max_num_reqs).items():
        outcome = evaluate(keys, trace)
        best = plan_captures(trace, len(keys)).outcome
        facts["ladders"][name] = {
            "graphs": len(keys),
            "padding": outcome.padding,
            "padded": outcome.padded_tokens,
            "best padded": best.padded_tokens,
            "ratio": outcome.all_work / best.all_work,
            "graphs to match": graphs_to_match(trace, outcome.all_work, most=len(keys)),
        }
    # Where a step on a mixed key costs more, both kinds of keys are worth having.
    work, lengths = Work(mixed_per_step=MIXED_STEP_TOKENS), (workload.query_len,)
    for name, keys in ladders(MAX_TOKENS, workload.max_num_reqs, lengths).items():
        outcome = evaluate(keys, trace, work)
        best = plan_captures(trace, len(keys), work=work, uniform_query_lens=lengths)
        facts["with uniform keys"][name] = {
            "graphs": len(keys),
            "uniform keys of best": sum(k.uniform_query_len is not None for k in best.keys),
            "work": outcome.all_work,
            "best work": best.outcome.all_work,
            "ratio": outcome.all_work / best.outcome.all_work,
        }
    return facts


def show(name: str, facts: dict[str, Any]) -> None:
    print(f"{name}: {facts['steps']:,} steps, {sum(facts['eager'].values()):,} run eagerly")
    rows: list[list[str]] = [
        [
            f"best {graphs}",
            str(graphs),
            f"{each['padding']:.2%}",
            f"{each['padding of another trace']:.2%}",
            *("", "", ""),
        ]
        for graphs, each in facts["plans"].items()
    ]
    for ladder, each in facts["ladders"].items():
        rows.append(
            [
                ladder,
                str(each["graphs"]),
                f"{each['padding']:.2%}",
                "",
                f"{each['ratio']:.3f}",
                str(each["graphs to match"]),
                f"{facts['with uniform keys'][ladder]['ratio']:.3f}",
            ]
        )
    print_table(
        ["", "graphs", "padding", "elsewhere", "/ best", "matched by", "/ best, both kinds"], rows
    )
    print()


def planned(folder: Path, lines: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Seconds and megabytes of planning a long trace, by kind of trace."""
    chat = list(batches(WORKLOADS[0], lines))
    cases = {
        "JSON lines": write_json(folder / "trace.jsonl", chat, times=False),
        "JSON lines that all differ": write_json(folder / "times.jsonl", chat, times=True),
        "CSV rows that all differ": write_csv(folder / "times.csv", chat),
    }
    del chat
    runs: dict[str, list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case, file in cases.items():
            runs[case].append(timed(file))
    return runs


def write_json(file: Path, chat: Iterable[Batch], *, times: bool) -> Path:
    with file.open("w") as out:
        for number, batch in enumerate(chat):
            line: dict[str, Any] = {"time": number * 0.0123} if times else {}
            line |= {"tokens": batch.num_tokens, "requests": batch.num_reqs}
            out.write(json.dumps({**line, "query_len": batch.query_len}) + "\n")
    return file


def write_csv(file: Path, chat: Iterable[Batch]) -> Path:
    with file.open("w") as out:
        out.write("time,tokens,requests,query_len\n")
        for number, batch in enumerate(chat):
            row = f"{number * 0.0123},{batch.num_tokens},{batch.num_reqs},{batch.query_len or ''}"
            out.write(row + "\n")
    return file


# The most memory that the process had. What the system reports of a child when it ends would count
# the memory of the process that started it.
WATCHED = """
import re, sys, time
from graphshare.cli import main
code = main(sys.argv[1:])
with open("/proc/self/status") as status:
    (kib,) = re.findall(r"VmHWM:\\s*(\\d+) kB", status.read())
print(kib, time.process_time(), file=sys.stderr)
sys.exit(code)
"""


def timed(trace: Path) -> dict[str, float]:
    """The command in a process of its own."""
    options = ["plan", str(trace), "--graphs", "16", "--json", "--ignore-other-fields"]
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=True,
        cwd=ROOT,
    )
    seconds = time.perf_counter() - start
    kib, processor_seconds = done.stderr.split()
    return {
        "s": seconds,
        "processor s": float(processor_seconds),
        "MB": int(kib) * 1024 / 1e6,
    }


if __name__ == "__main__":
    main()
