"""What a refused loan would have done: each case in a process of its own, which it may kill.

    python -m tests.flash_attn_children CASE

Prints the relative error of the borrower's numbers, or dies.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import torch

from graphshare import BatchDescriptor, GraphPool, capture_descriptors, share_states
from tests.flash_attn_models import (
    CAPACITY,
    DEVICE,
    TARGET,
    Model,
    batches_of,
    changed,
    make_borrower,
    make_owner,
)
from tests.flash_attn_pairs import PAIRS

ROOT = Path(__file__).parents[1]
KEYS = capture_descriptors([1, 64, 512], 16, uniform_query_lens=[1, 4])


def start(case: str, **environment: str) -> subprocess.Popen[str]:
    """Begin a case."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.flash_attn_children", case],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def unchecked(case: str) -> str:
    """Borrow in spite of the specs; a plan of 16 splits, and one of none."""
    shapes = changed(TARGET, PAIRS[case].changes)
    worst = 0.0
    said = ""
    for num_splits in (1, 16):
        owner = make_owner("fa3", num_splits=num_splits)
        draft = Model(make_borrower("fa3", shapes), shapes)
        target = GraphPool("target", owner=owner, device=DEVICE)
        prefill = GraphPool("draft.prefill", device=DEVICE)
        share_states(target, prefill)
        target.capture(KEYS, Model(owner, TARGET).forward)
        prefill.capture(KEYS, draft.forward)
        for key in KEYS:
            for batch in batches_of(key, 5):
                draft.prepare(batch)
                target.refresh(key, batch)
                error = draft.errors(prefill.replay(key), batch)
                worst = max(worst, error if error == error else float("inf"))
        said += f" {num_splits} splits: {worst:.1e}"
    return f"ERROR {worst}{said}"


def fewer_splits() -> str:
    """Launch with room for 2 splits on a plan for 32, eagerly: a capture's memory is the same."""
    capacity = dataclasses.replace(CAPACITY, max_num_tokens=16, max_seq_len=16384)
    owner = make_owner("fa3", capacity=capacity, num_splits=32)
    model = Model(owner, TARGET, capacity)
    key = BatchDescriptor(16, 1)
    batch = max(batches_of(key, 20, capacity=capacity), key=lambda each: each.max_seq_len)
    model.prepare(batch)
    state = owner.build(key, batch, None)
    told = dataclasses.replace(state.attn_metadata, num_splits=2)
    guards = [torch.zeros(1 << 20, device=DEVICE) for _ in range(64)]
    del guards[::2]  # what the launch allocates comes to lie between them
    errors = []
    for _ in range(20):
        out = owner.run(model.query[: key.num_tokens], *model.caches[0], told)
        errors.append(model.errors([out], batch))
    torch.cuda.synchronize()
    spoilt = sum(bool(guard.ne(0).any()) for guard in guards)
    return f"ERROR {max(errors)} guards spoilt: {spoilt}"


def main() -> None:
    case = sys.argv[1]
    print(fewer_splits() if case == "fewer splits" else unchecked(case), flush=True)


if __name__ == "__main__":
    main()
