"""What a refused FlashInfer loan would have done: each pair in a process, which it may kill.

    python -m tests.flashinfer_children PAIR

Prints the relative error of the borrower's numbers, or dies.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from graphshare import GraphPool, share_states
from graphshare.adapters.paged import PagedBatch
from tests.flash_attn_models import batches_of
from tests.flashinfer_models import (
    CAPACITY,
    DEVICE,
    Model,
    borrower_of,
    keys_of,
    long_batches,
    make_owner,
)
from tests.flashinfer_pairs import PAIRS
from tests.paged_kernels import Shapes

ROOT = Path(__file__).parents[1]


def start(case: str, **environment: str) -> subprocess.Popen[str]:
    """Begin a case."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.flashinfer_children", case],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def place(draft: Model, batch: PagedBatch) -> None:
    """Store this step's keys and values where the draft's own page size says."""
    own = PagedBatch.of(
        batch.query_start_loc.diff().tolist(),
        batch.seq_lens.tolist(),
        batch.block_table.tolist(),
        draft.capacity.page_size,
    )
    draft.prepare(batch)
    assert own.slot_mapping is not None
    slots = own.slot_mapping.to(DEVICE)
    for cache in draft.caches:
        for part, new in zip(cache, draft.new, strict=True):
            part.flatten(0, 1).index_copy_(0, slots, new[: len(slots)])


def main() -> None:
    pair = PAIRS[sys.argv[1]]
    keys = keys_of(pair.kernel, (16, 512))
    shapes = Shapes(*pair.lender)
    owner = make_owner(pair.kernel, shapes)
    _, draft = borrower_of(pair)
    target = GraphPool("target", owner=owner, device=DEVICE)
    prefill = GraphPool("draft.prefill", device=DEVICE)
    share_states(target, prefill)
    target.capture(keys, Model(owner, shapes, CAPACITY).forward)
    prefill.capture(keys, draft.forward)
    worst = 0.0
    for key in keys:
        for batch in [*batches_of(key, 5, capacity=CAPACITY), *long_batches(key)]:
            draft.prepare(batch)
            target.refresh(key, batch)
            outs = [out.clone() for out in prefill.replay(key)]
            if draft.capacity.page_size != CAPACITY.page_size:
                place(draft, batch)
            error = draft.errors(outs, batch)
            worst = max(worst, error if error == error else float("inf"))
    torch.cuda.synchronize()
    print(f"ERROR {worst}", flush=True)


if __name__ == "__main__":
    main()
