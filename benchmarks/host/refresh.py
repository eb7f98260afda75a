"""What `refresh` adds over a bare `owner.build`, and how much of that is the check of the layout.

Two states: 16 tensors and 8 host values; and 64 layers that share two metadata objects. The pool
lends to a second one. The share of the check is `refresh` with checks against `refresh` without.
The owners slice their buffers anew and write nothing: that belongs to the build.

    python -m benchmarks.host.refresh [--json PATH] [--rounds N]
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from time import perf_counter_ns as now
from typing import Any

import torch

from benchmarks._states import FlatOwner, LayeredOwner, lend, waiting
from benchmarks._turns import Figure, Sampler, arguments, difference_us, in_turn, report
from graphshare import BatchDescriptor, GraphPool, Phase

CASES = (
    ("16 tensors, 8 host values", FlatOwner, 8.0),
    ("64 layers, 2 objects", LayeredOwner, 12.0),
)
KEYS = [BatchDescriptor(size, min(size, 256)) for size in (512, 256, 128, 64, 32, 16, 8, 4)]


def _build(owner: Any, keys: Sequence[BatchDescriptor]) -> Sampler:
    chosen = itertools.cycle(keys)

    def sample() -> int:
        key = next(chosen)
        start = now()
        owner.build(key, 4096, Phase.REPLAY)
        return now() - start

    return sample


def _refresh(pool: GraphPool[BatchDescriptor], keys: Sequence[BatchDescriptor]) -> Sampler:
    chosen = itertools.cycle(keys)

    def sample() -> int:
        key = next(chosen)
        start = now()
        pool.refresh(key, 4096)
        return now() - start

    return sample


def measure(name: str, device: torch.device, *, rounds: int, path: str | None) -> None:
    """Measure each state, refreshing one key again and again, and eight in turn.

    Args:
        name: Of the benchmark.
        device: Of the state's tensors.
        rounds: Of 16 calls of each variant.
        path: Of the JSON.
    """
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    for case, owner_type, target_us in CASES:
        # An owner each: two pools on one owner would make each other stale at every call.
        fast, off = owner_type(device), owner_type(device)
        checked = lend(fast, KEYS, device, graphs=False)
        unchecked = lend(off, KEYS, device, graphs=False, checks="off")
        for kind, keys in (("one key", KEYS[1:2]), ("8 keys in turn", KEYS)):
            timing = in_turn(
                {
                    "build": _build(fast, keys),
                    "refresh": _refresh(checked.target, keys),
                    "refresh, checks off": _refresh(unchecked.target, keys),
                },
                rounds=rounds,
                between=waiting(device),
            )
            figures += [
                Figure.of(
                    f"{case}, {kind}: check",
                    difference_us(timing, "refresh", "refresh, checks off"),
                    "us",
                    target_us,
                ),
                Figure.of(
                    f"{case}, {kind}: refresh",
                    difference_us(timing, "refresh", "build"),
                    "us over build",
                ),
            ]
            details[f"{case}, {kind}"] = timing.facts()
        checked.close()
        unchecked.close()
    report(path, name, figures, details)


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, rounds=1001).parse_args(argv)
    measure("host/refresh", torch.device("cpu"), rounds=options.rounds, path=options.json)


if __name__ == "__main__":
    main()
