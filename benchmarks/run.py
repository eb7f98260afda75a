"""Runs all benchmarks of a group, one process each, and writes one JSON each.

    python -m benchmarks.run host|gpu [--out benchmarks/results] [--only NAME ...] [--quick]

The files lie in a folder by the group's name. Ends with a table of the figures, and with exit
code 1 if a benchmark failed to run; a figure beyond its target is no failure.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._turns import number, print_figures

ROOT = Path(__file__).parents[1]
QUICK: dict[str, tuple[str, ...]] = {
    "host/capture": ("--rounds=2", "--sizes=1", "--layers=2"),
    "host/check": ("--rounds=5",),
    "host/dispatch": ("--rounds=3",),
    "host/import_time": ("--rounds=1",),
    "host/memory": ("--rounds=200",),
    "host/planner": ("--rounds=1", "--steps=2000", "--lines=2000"),
    "host/refresh": ("--rounds=5",),
    "host/replay": ("--rounds=5",),
    "gpu/capture": ("--rounds=2", "--sizes=1", "--layers=2"),
    "gpu/memory": ("--rounds=200",),
    "gpu/provenance": ("--rounds=2", "--nodes=20"),
    "gpu/rebind": ("--rounds=2", "--layers=1", "--keys=2", "--width=32"),
    "gpu/refresh": ("--rounds=5",),
    "gpu/replay": ("--rounds=5",),
}
"""Benchmarks that also run on a CPU, and the options of the smallest run that says whether they
work."""

NEED_KERNELS: dict[str, tuple[str, ...]] = {
    "gpu/flash_attn": ("--rounds=5", "--requests=8"),
    "gpu/flashinfer": ("--rounds=5", "--requests=8"),
}
"""Benchmarks that need a GPU and a kernel library; the same."""

FLOORS = ("empty loop", "floor")


def names_of(group: str) -> list[str]:
    return [name for name in (*QUICK, *NEED_KERNELS) if name.startswith(f"{group}/")]


def figures_of(results: Any) -> list[Mapping[str, Any]]:
    """The figures of a benchmark; of one without, what its variants took, where it matters."""
    if isinstance(results, Mapping) and "figures" in results:
        return list(results["figures"])
    if isinstance(results, list):
        cases = [(f"{each['keys']} keys: {each['case']}", each["variants"]) for each in results]
    else:
        cases = list(results.items())
    return [
        {
            "name": f"{case}: {variant}",
            "value": facts["median_us"],
            "unit": "us",
            "low": facts["quartiles_us"][0],
            "high": facts["quartiles_us"][1],
            "target": target_us,
            "met": target_us is not None and facts["median_us"] <= target_us,
        }
        for case, variants in cases
        for variant, facts in variants.items()
        if variant not in FLOORS
        for target_us in (_target_us(case, variant),)
    ]


def _target_us(case: str, variant: str) -> float | None:
    if variant == "matches":
        return 12.0 if case.startswith("layers") else 8.0
    return 0.4 if variant == "graphshare" else None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("group", choices=("host", "gpu"))
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "results"), metavar="DIR")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="e.g. replay")
    parser.add_argument("--quick", action="store_true", help="only to see that they run")
    options = parser.parse_args(argv)
    names = [
        name
        for name in names_of(options.group)
        if not options.only or name.partition("/")[2] in options.only
    ]
    if not names:
        parser.error(f"--only: expected some of {', '.join(names_of(options.group))}")
    out = Path(options.out).resolve()
    figures: list[Mapping[str, Any]] = []
    failed: list[str] = []
    for name in names:
        path = out / f"{name}.json"
        module = f"benchmarks.{name.replace('/', '.')}"
        command = [sys.executable, "-m", module, f"--json={path}"]
        if options.quick:
            command += (QUICK | NEED_KERNELS)[name]
        print(f"{name} ...", flush=True)
        start = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
        print(f"{name}: {number(time.perf_counter() - start)} s", flush=True)
        if done.returncode:
            failed.append(name)
            continue
        found = figures_of(json.loads(path.read_text())["results"])
        figures += [{**figure, "name": f"{name}: {figure['name']}"} for figure in found]
    print()
    print_figures(figures)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
