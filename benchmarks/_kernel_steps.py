"""What the benchmarks of the kernel libraries measure of one owner, and their command line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns as now
from typing import Any

import torch

from benchmarks._states import device_of, waiting
from benchmarks._turns import Figure, Sampler, arguments, difference_us, in_turn, report
from graphshare import BatchDescriptor, GraphPool, Phase, share_states
from graphshare.adapters.paged import PagedBatch

__all__ = ["REQUESTS", "Subject", "main_of", "measure"]

REQUESTS = (1, 8, 64, 256)
_LAYERS = 4

Build = Callable[[PagedBatch], object]


@dataclass(frozen=True, slots=True)
class Subject:
    """One kernel at one size.

    Args:
        case: Its name in the figures.
        key: The only one that is captured.
        batches: That it holds, used in turn.
        owner: Of the target's pool.
        alone: Another owner of the kind, built without a pool, to compare with the calls by hand.
        own: One more, of the draft that does not borrow.
        kernel: What a borrower runs.
        by_hand: The calls that an engine writes without graphshare.
        query: What the first layer is given.
        caches: Keys and values.
    """

    case: str
    key: BatchDescriptor
    batches: Sequence[PagedBatch]
    owner: Any
    alone: Any
    own: Any
    kernel: Any
    by_hand: Build
    query: torch.Tensor
    caches: torch.Tensor


def measure(
    subject: Subject, device: torch.device, rounds: int
) -> tuple[list[Figure], dict[str, Any]]:
    """Time builds, refreshes and steps of one kernel at one size.

    Refreshes, by key and through a handle, are compared with builds of the same owner: what a build
    finds in the caches of its buffers, it finds there whoever asked for the one before. The calls
    by hand have buffers of their own, and are compared with a build and a refresh of which each has
    its own as well.
    """
    key, owner, kernel = subject.key, subject.owner, subject.kernel
    target = GraphPool("target", owner=owner, spec=owner.spec, device=device)
    prefill = GraphPool("draft.prefill", spec=kernel.spec, device=device)
    rebuilt = GraphPool("draft.rebuilt", owner=subject.own, device=device)
    share_states(target, prefill)
    target.capture([key], _forward(owner, subject, _LAYERS))
    prefill.capture([key], _forward(kernel, subject, 1))
    rebuilt.capture([key], _forward(subject.own, subject, 1))
    subject.alone.build(key, None, Phase.WARMUP)
    wait = waiting(device)

    def step(*, borrows: bool, waits: bool) -> Build:
        def run(batch: PagedBatch) -> None:
            target.refresh(key, batch)
            target.replay(key)
            if not borrows:
                rebuilt.refresh(key, batch)
                rebuilt.replay(key)
            else:
                prefill.replay(key)
            if waits and wait is not None:
                wait()

        return run

    def timed(functions: dict[str, Build], turns: int = 4, times: int = 1) -> Any:
        return in_turn(
            {name: _cycled(each, subject.batches) for name, each in functions.items()},
            turns=turns,
            rounds=times * rounds,
            warmup=5,
            between=wait,
        )

    bound = target.bind(key)
    refreshes = timed(
        {
            "build": lambda batch: owner.build(key, batch, Phase.REPLAY),
            "refresh": lambda batch: target.refresh(key, batch),
            "refresh by handle": lambda batch: bound.refresh(batch),
        },
        times=2,
    )
    builds = timed(
        {
            "by hand": subject.by_hand,
            "build": lambda batch: subject.alone.build(key, batch, Phase.REPLAY),
            "refresh": lambda batch: target.refresh(key, batch),
        }
    )
    steps = timed(
        {
            "step, borrowed": step(borrows=True, waits=False),
            "step, rebuilt": step(borrows=False, waits=False),
        },
        turns=1,  # so that the queue of launches never fills
    )
    waited = timed(
        {
            "step and wait, borrowed": step(borrows=True, waits=True),
            "step and wait, rebuilt": step(borrows=False, waits=True),
        }
    )
    case = subject.case
    figures = [
        Figure(f"{case}: by hand", builds.median_us("by hand"), "us"),
        Figure(f"{case}: build", refreshes.median_us("build"), "us"),
        *(
            figure
            for name in ("refresh", "refresh by handle")
            for figure in (
                Figure.of(f"{case}: {name} / build", refreshes.ratio(name, "build"), "", 1.05),
                Figure.of(
                    f"{case}: {name} over build", difference_us(refreshes, name, "build"), "us"
                ),
            )
        ),
        Figure.of(f"{case}: build / by hand", builds.ratio("build", "by hand"), ""),
        Figure.of(f"{case}: refresh / by hand", builds.ratio("refresh", "by hand"), ""),
        Figure.of(
            f"{case}: borrowing saves, host",
            difference_us(steps, "step, rebuilt", "step, borrowed"),
            "us a step",
        ),
        Figure.of(
            f"{case}: borrowing saves, GPU waited for",
            difference_us(waited, "step and wait, rebuilt", "step and wait, borrowed"),
            "us a step",
        ),
    ]
    for pool in (prefill, rebuilt, target):
        pool.close()
    return figures, {
        "refreshes": refreshes.facts("build"),
        "builds": builds.facts("by hand"),
        "steps": steps.facts("step, rebuilt"),
        "waited": waited.facts("step and wait, rebuilt"),
    }


def main_of(
    doc: str | None,
    name: str,
    kinds: Sequence[str],
    measured: Callable[[str, int, torch.device, int], tuple[list[Figure], dict[str, Any]]],
    argv: Sequence[str] | None,
) -> None:
    """Run a benchmark's command line.

    Args:
        doc: Of the benchmark's module.
        name: Of the benchmark: ``"gpu/flashinfer"``.
        kinds: Kernels.
        measured: Measures one kernel at one number of requests, in some rounds; raises
            ``ModuleNotFoundError`` where the library is not installed.
        argv: As ``argparse`` takes it.
    """
    short = name.rpartition("/")[2]
    parser = arguments(doc, rounds=301)
    parser.add_argument("--requests", nargs="+", type=int, default=REQUESTS, metavar="N")
    parser.add_argument("--kind", nargs="+", choices=tuple(kinds), default=tuple(kinds))
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.exit(f"{short}: this benchmark needs a CUDA device; torch finds none")
    device = device_of("cuda")
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    for kind in options.kind:
        for requests in options.requests:
            try:
                more, facts = measured(kind, requests, device, options.rounds)
            except ModuleNotFoundError as error:
                print(f"{kind}: left out: {error}")
                break
            figures += more
            details[f"{kind}, {requests} requests"] = facts
    if not figures:
        sys.exit(f"{short}: the library is not installed; see the lines above")
    report(options.json, name, figures, details)


def _cycled(function: Build, batches: Sequence[PagedBatch]) -> Sampler:
    turn = 0

    def sample() -> int:
        nonlocal turn
        turn = (turn + 1) % len(batches)
        batch = batches[turn]
        start = now()
        function(batch)
        return now() - start

    return sample


def _forward(kernel: Any, subject: Subject, layers: int) -> Any:
    def forward(key: Any, state: Any) -> torch.Tensor:
        del key
        out = subject.query
        for _ in range(layers):
            out = kernel.run(out, *subject.caches, state.attn_metadata)
        return out

    return forward
