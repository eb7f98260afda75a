"""FlashAttention's states: a build by hand, a refresh, and what borrowing saves a step.

For each kernel and number of requests (uniform keys of one row each, bf16, a target of 32 query
and 8 KV heads of 128, a draft layer of the same):

- *by hand*: the calls that an engine writes without graphshare, into buffers of its own;
- *build*: the owner's, alone; *refresh*: through the pool, with its check, and so by handle;
- *step, rebuilt*: refresh and replay the target, then refresh and replay the draft on a state of
  its own; *step, borrowed*: the draft replays on the target's. On the host, and with the GPU waited
  for at the end of the step.

    python -m benchmarks.gpu.flash_attn [--json PATH] [--rounds N] [--requests N ...]
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks._kernel_steps import Subject, main_of
from benchmarks._kernel_steps import measure as timed
from benchmarks._turns import Figure
from graphshare import BatchDescriptor
from graphshare.adapters.flash_attn import (
    AttentionShape,
    FlashAttention2,
    FlashAttention2Owner,
    FlashAttention3,
    FlashAttention3Owner,
)
from graphshare.adapters.paged import PagedBatch, PagedCapacity

PAGE_SIZE = 256
MAX_SEQ_LEN = 4096
SHAPE = AttentionShape(num_q_heads=32, num_kv_heads=8, head_size=128)
KINDS = ("flash_attn2", "flash_attn3")


def _capacity(requests: int) -> PagedCapacity:
    return PagedCapacity(
        max_num_tokens=requests,
        max_num_reqs=requests,
        max_seq_len=MAX_SEQ_LEN,
        page_size=PAGE_SIZE,
    )


def _owner(kind: str, capacity: PagedCapacity, device: torch.device) -> Any:
    if kind == "flash_attn2":
        return FlashAttention2Owner(capacity, SHAPE, device)
    return FlashAttention3Owner(capacity, SHAPE, device)


def _kernel(kind: str, capacity: PagedCapacity, device: torch.device) -> Any:
    if kind == "flash_attn2":
        return FlashAttention2(capacity, SHAPE)
    return FlashAttention3(capacity, SHAPE, device=device)


def _batches(requests: int, count: int = 8) -> list[PagedBatch]:
    rng = random.Random(requests)
    found: list[PagedBatch] = []
    for _ in range(count):
        lens = [rng.randint(1, MAX_SEQ_LEN) for _ in range(requests)]
        # All requests share a few pages: what is timed does not depend on which.
        tables = [[1 + rng.randrange(63) for _ in range(-(-n // PAGE_SIZE))] for n in lens]
        found.append(PagedBatch.of([1] * requests, lens, tables, PAGE_SIZE))
    return found


class ByHand:
    """What an engine does without graphshare: pinned copies, and the library's plan."""

    def __init__(
        self, kind: str, owner: Any, capacity: PagedCapacity, device: torch.device
    ) -> None:
        requests, pages = capacity.max_num_reqs, capacity.max_pages
        self.requests, self.planned = requests, kind == "flash_attn3"
        self.library = owner._library

        def pair(*shape: int, dtype: torch.dtype = torch.int32) -> Any:
            host = torch.zeros(shape, dtype=dtype, pin_memory=True)
            return host, torch.zeros(shape, dtype=dtype, device=device)

        self.starts = pair(requests + 1)
        self.lens, self.table = pair(requests), pair(requests, pages)
        self.slots = pair(requests, dtype=torch.int64)
        self.schedule = torch.zeros(4 * requests + 20, dtype=torch.int32, device=device)
        self.copied = torch.cuda.Event()

    def build(self, batch: PagedBatch) -> None:
        self.copied.synchronize()
        live = batch.num_reqs
        copies = [(self.lens, batch.seq_lens), (self.slots, batch.slot_mapping)]
        if self.planned:  # the other launches, of uniform keys, do not read where requests begin
            copies.append((self.starts, batch.query_start_loc))
        for (host, device), values in copies:
            count = values.shape[0]
            host[:count] = values
            host[count:] = values[-1] if host is self.starts[0] else 0
            device.copy_(host, non_blocking=True)
        host, device = self.table
        width = batch.block_table.shape[1]
        host[:live, :width] = batch.block_table
        host[live:] = 0
        device.copy_(host, non_blocking=True)
        self.copied.record()
        if self.planned:
            plan = self.library.get_scheduler_metadata(
                batch_size=self.requests,
                max_seqlen_q=1,
                max_seqlen_k=MAX_SEQ_LEN,
                num_heads_q=SHAPE.num_q_heads,
                num_heads_kv=SHAPE.num_kv_heads,
                headdim=SHAPE.head_size,
                cache_seqlens=self.lens[1],
                cu_seqlens_q=self.starts[1],
                page_size=PAGE_SIZE,
                causal=True,
                num_splits=16,
            )
            self.schedule[: plan.shape[0]].copy_(plan)
            self.schedule[plan.shape[0] :].zero_()


def measure(
    kind: str, requests: int, device: torch.device, rounds: int
) -> tuple[list[Figure], dict[str, Any]]:
    """One kernel, one number of requests."""
    capacity = _capacity(requests)
    alone, owner, own = (_owner(kind, capacity, device) for _ in range(3))
    heads = (SHAPE.num_q_heads, SHAPE.head_size)
    cache = (2, 64, PAGE_SIZE, SHAPE.num_kv_heads, SHAPE.head_size)
    subject = Subject(
        case=f"{kind}, {requests} requests",
        key=BatchDescriptor(requests, requests, uniform_query_len=1),
        batches=_batches(requests),
        owner=owner,
        alone=alone,
        own=own,
        kernel=_kernel(kind, capacity, device),
        by_hand=ByHand(kind, owner, capacity, device).build,
        query=torch.randn(requests, *heads, device=device).to(SHAPE.dtype),
        caches=torch.randn(cache, device=device).to(SHAPE.dtype),
    )
    return timed(subject, device, rounds)


def main(argv: Sequence[str] | None = None) -> None:
    main_of(__doc__, "gpu/flash_attn", KINDS, measure, argv)


if __name__ == "__main__":
    main()
