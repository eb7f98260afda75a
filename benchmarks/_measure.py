"""Timing of variants beside each other in one process, and results that say where they ran.

Machines drift and share their cores, so no absolute number is compared with one from another
time. Variants take turns, batch by batch, in an order that is drawn anew each round; a ratio is
the median over rounds of the paired ratios, with a bootstrapped 95% interval.

A variant is a callable that does its work ``calls`` times itself, so that the timer and the call
of the variant do not count; :func:`repeated` makes one of a callable without arguments.
"""

from __future__ import annotations

import gc
import json
import math
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Ratio(NamedTuple):
    """Median of paired ratios, and its bootstrapped 95% interval."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Timing:
    """What :func:`interleave` measured.

    Attributes:
        calls: Calls in a batch.
        seconds: By variant, seconds for each call, one number a round; rounds are paired.
    """

    calls: int
    seconds: Mapping[str, Sequence[float]]

    def median_us(self, variant: str) -> float:
        return statistics.median(self.seconds[variant]) * 1e6

    def quartiles_us(self, variant: str) -> tuple[float, float]:
        low, _, high = statistics.quantiles(self.seconds[variant], n=4)
        return low * 1e6, high * 1e6

    def ratio(self, variant: str, to: str) -> Ratio:
        """How much longer ``variant`` takes than ``to``."""
        pairs = zip(self.seconds[variant], self.seconds[to], strict=True)
        return bootstrap([one / other for one, other in pairs])

    def facts(self, to: str | None = None) -> dict[str, Any]:
        """As JSON, with ratios to the variant ``to``."""
        result: dict[str, Any] = {}
        for variant, seconds in self.seconds.items():
            low, high = self.quartiles_us(variant)
            result[variant] = {
                "median_us": self.median_us(variant),
                "quartiles_us": [low, high],
                "rounds": len(seconds),
                "calls": self.calls,
            }
            if to is not None and variant != to:
                result[variant]["ratio"] = {"to": to, **self.ratio(variant, to)._asdict()}
        return result


def bootstrap(values: Sequence[float]) -> Ratio:
    """The median of values, with the 95% interval of the medians of resamples."""
    return resampled([values], lambda sample: medians(sample)[0])


def resampled(
    columns: Sequence[Sequence[float]], of: Callable[[torch.Tensor], torch.Tensor]
) -> Ratio:
    """What ``of`` makes of columns, with its 95% interval over resamples of their rows.

    Args:
        columns: Of equal lengths.
        of: Takes ``[columns, ..., rows]``, float64, and returns ``[...]``.
    """
    data = torch.tensor(columns, dtype=torch.float64)
    count = data.shape[1]
    rows = torch.randint(count, (1000, count), generator=torch.Generator().manual_seed(0))
    found = of(data[:, rows]).sort().values
    return Ratio(*(float(each) for each in (of(data), found[25], found[975])))


def among(values: Sequence[float], comparisons: int) -> Ratio:
    """The median of values, with an interval that is right together with those of others.

    All of them hold what they are intervals of with a probability of 95%, whatever the values are
    distributed like: each reaches from one value to another (order statistics), and its 5% are
    divided by their number (Bonferroni).

    Args:
        values: Drawn independently, as the ratios of different rounds.
        comparisons: How many intervals there are, this one included.

    Returns:
        An interval without ends where there are too few values.
    """
    ascending, count = sorted(values), len(values)
    outside = 0.05 / comparisons / 2
    beyond, ends = 0.0, (-math.inf, math.inf)
    for place in range(count // 2):
        beyond += math.comb(count, place) / 2**count
        if beyond > outside:
            break
        ends = ascending[place], ascending[-1 - place]
    return Ratio(statistics.median(values), *ends)


def medians(sample: torch.Tensor) -> torch.Tensor:
    """Medians along the last dimension; of an even number the mean of the two in the middle."""
    ascending, count = sample.sort(dim=-1).values, sample.shape[-1]
    return (ascending[..., (count - 1) // 2] + ascending[..., count // 2]) / 2


def repeated(function: Callable[[], object], calls: int) -> Callable[[], None]:
    """A variant that calls a function ``calls`` times."""

    def batch() -> None:
        for _ in repeat(None, calls):
            function()

    return batch


def interleave(
    variants: Mapping[str, Callable[[], object]],
    *,
    calls: int,
    rounds: int = 101,
    warmup: int = 3,
    between: Callable[[], object] | None = None,
    clock: Callable[[], int] = time.perf_counter_ns,
    seed: int = 0,
) -> Timing:
    """Time variants in turn.

    Args:
        variants: By name, a callable that does ``calls`` calls of what is measured.
        calls: By which a batch's time is divided.
        rounds: Batches of each variant.
        warmup: Rounds that do not count.
        between: Called before each batch, outside of its time (``torch.cuda.synchronize``).
        clock: Nanoseconds; ``time.process_time_ns`` leaves out what other processes took.
        seed: Of the order of variants.
    """
    rng = random.Random(seed)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    order = list(variants.items())
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for turn in range(warmup + rounds):
            rng.shuffle(order)
            for name, run in order:
                if between is not None:
                    between()
                start = clock()
                run()
                took = clock() - start
                if turn >= warmup:
                    seconds[name].append(took * 1e-9 / calls)
    finally:
        if was_enabled:
            gc.enable()
    return Timing(calls, seconds)


def _output_of(*command: str) -> str | None:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
            cwd=Path(__file__).parent,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """Where and with what this ran; the commit ends in ``+`` if tracked files had changes."""
    commit = os.environ.get("GRAPHSHARE_COMMIT") or _output_of("git", "rev-parse", "HEAD")
    if commit and _output_of("git", "status", "--porcelain", "--untracked-files=no"):
        commit += "+"
    facts: dict[str, Any] = {
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],  # processes that want a core, at the end
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "commit": commit,
        "gpu": None,
        "driver": None,
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        driver = _output_of(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"
        )
        facts["driver"] = driver
    return facts


def save_results(path: str | os.PathLike[str], name: str, results: Any) -> None:
    """Write results as JSON, with the machine's facts.

    Args:
        path: The file; its folder is made.
        name: Of the benchmark.
        results: Anything that JSON holds.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [re.sub(r"(^|=).*/", r"\1", each) for each in sys.argv]  # no folders of the machine
    content = {"benchmark": name, "machine": machine(), "command": command, "results": results}
    target.write_text(json.dumps(content, indent=2) + "\n")


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print columns: the first to the left, the others to the right."""
    lines = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        first, *others = (
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join([first, *others]))
