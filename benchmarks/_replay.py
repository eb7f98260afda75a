"""What a borrowed replay costs over a bare launch of the very same graph; for host and GPU."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns as now
from typing import Any

import torch

from benchmarks._states import FlatOwner, Lent, lend, waiting
from benchmarks._turns import Figure, Sampler, clock, difference_us, in_turn, report
from graphshare import BatchDescriptor, GraphPool, Phase

KEY = BatchDescriptor(256, 256)
BY_KEY_US = 0.4
BY_BIND_US = 0.25
CHECKS = ("fast", "strict", "off")

# The samplers are made by functions, so that each call site sees one kind of object, as an
# engine's does, and the interpreter's caches stay good.


def _bare(graph: Any) -> Sampler:
    def sample() -> int:
        start = now()
        graph.replay()
        return now() - start

    return sample


def _by_key(pool: GraphPool[BatchDescriptor], key: BatchDescriptor) -> Sampler:
    def sample() -> int:
        start = now()
        pool.replay(key)
        return now() - start

    return sample


def _by_bind(pool: GraphPool[BatchDescriptor], key: BatchDescriptor) -> Sampler:
    bound = pool.bind(key)

    def sample() -> int:
        start = now()
        bound.replay()
        return now() - start

    return sample


def _before_round(graph: Any, device: torch.device) -> Callable[[], object] | None:
    wait = waiting(device)
    if wait is None:
        return None

    def before() -> None:
        wait()
        graph.replay()  # the first launch on an idle device is another thing

    return before


def _build_and_bare(owner: FlatOwner, key: BatchDescriptor, graph: Any) -> Sampler:
    def sample() -> int:
        start = now()
        owner.build(key, 4096, Phase.REPLAY)
        graph.replay()
        return now() - start

    return sample


def _refresh_and_replay(lent: Lent, key: BatchDescriptor) -> Sampler:
    target, draft = lent.target, lent.draft

    def sample() -> int:
        start = now()
        target.refresh(key, 4096)
        draft.replay(key)
        return now() - start

    return sample


def measure(
    name: str, device: torch.device, *, graphs: bool, rounds: int, path: str | None
) -> None:
    """Measure each kind of checks in turn.

    Args:
        name: Of the benchmark.
        device: Where the graph runs.
        graphs: Whether to launch graphs, or nothing.
        rounds: Of 16 calls of each variant.
        path: Of the JSON.
    """
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    for checks in CHECKS:
        owner = FlatOwner(device)
        lent = lend(owner, [KEY], device, graphs=graphs, checks=checks, replays_per_refresh=None)
        graph = lent.graphs[KEY]
        before = _before_round(graph, device)
        equal = BatchDescriptor(KEY.num_tokens, KEY.num_reqs)
        timing = in_turn(
            {
                "clock": clock,
                "bare": _bare(graph),
                "key": _by_key(lent.draft, KEY),
                "equal key": _by_key(lent.draft, equal),
                "bind": _by_bind(lent.draft, KEY),
            },
            rounds=rounds,
            between=before,
        )
        # Apart, since a build leaves the processor's caches as an engine's step would.
        steps = in_turn(
            {
                "build, bare": _build_and_bare(owner, KEY, graph),
                "refresh, key": _refresh_and_replay(lent, KEY),
            },
            rounds=rounds,
            between=before,
        )
        lent.close()
        promised = checks == "fast"
        figures += [
            Figure.of(
                f"{checks}: replay by key",
                difference_us(timing, "key", "bare"),
                "us over bare",
                BY_KEY_US if promised else None,
            ),
            Figure.of(
                f"{checks}: replay by an equal key",
                difference_us(timing, "equal key", "bare"),
                "us over bare",
            ),
            Figure.of(
                f"{checks}: replay by bind",
                difference_us(timing, "bind", "bare"),
                "us over bare",
                BY_BIND_US if promised else None,
            ),
            Figure.of(f"{checks}: a bare launch", difference_us(timing, "bare", "clock"), "us"),
            Figure.of(
                f"{checks}: refresh and replay",
                difference_us(steps, "refresh, key", "build, bare"),
                "us over build and bare",
            ),
        ]
        details[checks] = {"replay": timing.facts(), "step": steps.facts()}
    report(path, name, figures, {"launch": "graph" if graphs else "nothing", **details})
