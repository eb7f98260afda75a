"""Memory before and after 100,000 refreshes and replays: what stays, in the process and in Python.

A step dispatches a batch of a random size, refreshes the target, replays its graph and the
borrower's; every hundredth step also meets the refusal of a replay on a state that is used up.
The resident size is read around 100,000 steps; a quarter as many run under `tracemalloc` then,
which would distort it.

    python -m benchmarks.host.memory [--json PATH] [--rounds N]
"""

from __future__ import annotations

import gc
import os
import random
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks._states import FlatOwner, Lent, lend
from benchmarks._turns import Figure, arguments, report
from graphshare import StaleStateError, capture_descriptors

FLAT_RSS_BYTES = 1 << 20
FLAT_PYTHON_BYTES = 1 << 14


def rss_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def run(lent: Lent, steps: int, rng: random.Random, device: torch.device) -> None:
    target, draft = lent.target, lent.draft
    for step in range(steps):
        num_tokens = rng.randint(1, 512)
        key = target.dispatch(num_tokens=num_tokens, num_reqs=rng.randint(1, min(num_tokens, 256)))
        if key is None:
            raise RuntimeError(f"no key covers {num_tokens} tokens")
        target.refresh(key, rng.randint(1, 8192))
        target.replay(key)
        draft.replay(key)
        if step % 100 == 0:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            try:
                draft.replay(key)
            except StaleStateError:
                continue
            raise RuntimeError("a state that is used up was replayed")


def measure(name: str, device: torch.device, *, steps: int, path: str | None) -> None:
    """Measure.

    Args:
        name: Of the benchmark.
        device: CUDA graphs and device memory too on a GPU, the tape on a CPU.
        steps: Refreshes, each with two replays.
        path: Of the JSON.
    """
    on_gpu = device.type == "cuda"
    rng = random.Random(0)
    keys = capture_descriptors([1, 2, 4, 8, 16, 32, 64, 128, 256, 512], 256, [4])
    lent = lend(FlatOwner(device), keys, device, graphs=True)
    traced_steps = max(steps // 4, 1)

    run(lent, max(steps // 10, 1), rng, device)  # whatever is remembered, is remembered by now
    gc.collect()
    rss, on_device = rss_bytes(), torch.cuda.memory_allocated(device) if on_gpu else 0
    run(lent, steps, rng, device)
    gc.collect()
    rss = rss_bytes() - rss
    on_device = (torch.cuda.memory_allocated(device) if on_gpu else 0) - on_device

    tracemalloc.start()
    run(lent, max(steps // 10, 1), rng, device)
    gc.collect()
    traced = tracemalloc.get_traced_memory()[0]
    run(lent, traced_steps, rng, device)
    gc.collect()
    traced = tracemalloc.get_traced_memory()[0] - traced
    tracemalloc.stop()

    done = lent.target.statistics().replays + lent.draft.statistics().replays
    lent.close()
    figures = [
        Figure(f"resident, over {steps:,} steps", rss / 1024, "KiB", target=FLAT_RSS_BYTES / 1024),
        Figure(
            f"Python objects, over {traced_steps:,} steps",
            traced / 1024,
            "KiB",
            target=FLAT_PYTHON_BYTES / 1024,
        ),
    ]
    if on_gpu:
        figures.append(
            Figure(f"on the device, over {steps:,} steps", on_device / 1024, "KiB", target=0)
        )
    details: dict[str, Any] = {"steps": steps, "keys": len(keys), "replays": done}
    report(path, name, figures, details)


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, rounds=100_000).parse_args(argv)
    measure("host/memory", torch.device("cpu"), steps=options.rounds, path=options.json)


if __name__ == "__main__":
    main()
