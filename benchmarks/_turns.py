"""Differences between variants that take turns call by call, and the figures that come of them.

Where what is measured costs less than what it is measured beside (tenths of a microsecond beside
a launch of five), batches of one variant after batches of another are too far apart: variants
switch at every call here, and a round's number is the mean of a few calls of each.

A variant is a *sampler*: it reads the clock right before and right after the one call that
counts, and returns the nanoseconds between. What the clock costs is in every sampler alike, so
differences are free of it.
"""

from __future__ import annotations

import argparse
import gc
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter_ns as now
from typing import Any

from benchmarks._measure import Ratio, Timing, bootstrap, print_table, save_results

Sampler = Callable[[], int]


def in_turn(
    samplers: Mapping[str, Sampler],
    *,
    turns: int = 16,
    rounds: int = 501,
    warmup: int = 20,
    between: Callable[[], object] | None = None,
    seed: int = 0,
) -> Timing:
    """Time variants that switch at every call.

    Args:
        samplers: By name, what does one call and returns the nanoseconds that it took.
        turns: Calls of each variant in a round; a round counts as their mean.
        rounds: Rounds that count.
        warmup: Rounds that do not.
        between: Called before each round, outside of its time: on a GPU, a synchronisation, so
            that the queue of launches never fills and no launch waits for the device.
        seed: Of the order in which variants take turns, drawn anew for each round.
    """
    rng = random.Random(seed)
    seconds: dict[str, list[float]] = {name: [] for name in samplers}
    order = list(samplers)
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for number in range(warmup + rounds):
            rng.shuffle(order)
            turn = [samplers[name] for name in order]
            total = [0] * len(turn)
            if between is not None:
                between()
            for _ in range(turns):
                for place, sample in enumerate(turn):
                    total[place] += sample()
            if number >= warmup:
                for name, ns in zip(order, total, strict=True):
                    seconds[name].append(ns * 1e-9 / turns)
    finally:
        if was_enabled:
            gc.enable()
    return Timing(turns, seconds)


def clock() -> int:
    """The sampler of nothing: what reading the clock costs."""
    start = now()
    return now() - start


def difference_us(timing: Timing, variant: str, to: str) -> Ratio:
    """By how many microseconds ``variant`` takes longer than ``to``: the median over rounds of
    the paired differences, and its bootstrapped 95% interval."""
    pairs = zip(timing.seconds[variant], timing.seconds[to], strict=True)
    return bootstrap([(one - other) * 1e6 for one, other in pairs])


@dataclass(frozen=True)
class Figure:
    """One number that a benchmark is about.

    Attributes:
        name: What it is.
        value: The median.
        unit: Of the value.
        low, high: Its 95% interval, where there are repetitions.
        target: What it may be at most, where something was promised.
    """

    name: str
    value: float
    unit: str
    low: float | None = None
    high: float | None = None
    target: float | None = None

    @classmethod
    def of(cls, name: str, interval: Ratio, unit: str, target: float | None = None) -> Figure:
        return cls(name, interval.median, unit, interval.low, interval.high, target)

    def facts(self) -> dict[str, Any]:
        facts = asdict(self)
        if self.target is not None:
            facts["met"] = self.value <= self.target
        return facts


def number(value: float | None) -> str:
    """With the digits that matter, at most three decimals."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}".rstrip("0").rstrip(".")


def print_figures(figures: Sequence[Mapping[str, Any]]) -> None:
    """Print figures, as :meth:`Figure.facts` gives them, as a table."""
    rows: list[list[str]] = []
    for figure in figures:
        low, high, target = figure["low"], figure["high"], figure["target"]
        rows.append(
            [
                figure["name"],
                number(figure["value"]),
                figure["unit"],
                "" if low is None else f"{number(low)}..{number(high)}",
                "" if target is None else f"<= {number(target)}",
                "" if target is None else ("yes" if figure["met"] else "NO"),
            ]
        )
    print_table(["", "median", "unit", "95%", "target", "met"], rows)


def arguments(doc: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--json", metavar="PATH", help="write the results to this file")
    parser.add_argument("--rounds", type=int, default=rounds, help="%(default)s by default")
    return parser


def report(path: str | None, name: str, figures: Sequence[Figure], details: Any) -> None:
    """Print the figures, and write them with the details where a path is given."""
    facts = [figure.facts() for figure in figures]
    print_figures(facts)
    if path:
        save_results(path, name, {"figures": facts, "details": details})
