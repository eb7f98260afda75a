"""FlashInfer's states: a build by hand, a refresh, and what borrowing saves a step.

For each kernel and number of requests (uniform keys, of one row a request for decode and of four
for the others; bf16, a target of 32 query and 8 KV heads of 128, a draft layer of the same):

- *by hand*: the calls that an engine writes without graphshare: lists on the host, pinned copies,
  and the library's own plan (for decode its ``fast_decode_plan``);
- *build*: the owner's, alone; *refresh*: through the pool, with its check, and so by handle;
- *step, rebuilt*: refresh and replay the target, then refresh and replay the draft on a state of
  its own; *step, borrowed*: the draft replays on the target's. On the host, and with the GPU waited
  for at the end of the step.

    python -m benchmarks.gpu.flashinfer [--json PATH] [--rounds N] [--requests N ...] [--kind K ...]
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
from graphshare.adapters.flashinfer import AttentionShape, FlashInfer, FlashInferOwner
from graphshare.adapters.paged import PagedBatch, PagedCapacity, dummy_batch

PAGE_SIZE = 16
MAX_SEQ_LEN = 4096
NUM_PAGES = 1024
SHAPE = AttentionShape(num_q_heads=32, num_kv_heads=8, head_size=128)
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "decode": (1, {"kernel": "decode"}),
    "fa2": (4, {"kernel": "fa2"}),
    "fa3": (4, {"kernel": "fa3"}),
    "batch_attention": (4, {"kernel": "batch_attention"}),
}
"""Rows of a request, and the options of the owner."""


def _batches(requests: int, rows: int, count: int = 8) -> list[PagedBatch]:
    rng = random.Random(requests)
    found: list[PagedBatch] = []
    for _ in range(count):
        lens = [rng.randint(rows, MAX_SEQ_LEN) for _ in range(requests)]
        # Requests share pages: what is timed does not depend on which.
        tables = [[rng.randrange(1, NUM_PAGES) for _ in range(-(-n // PAGE_SIZE))] for n in lens]
        found.append(PagedBatch.of([rows] * requests, lens, tables, PAGE_SIZE))
    return found


class ByHand:
    """What an engine does without graphshare."""

    def __init__(self, kind: str, owner: FlashInferOwner, key: BatchDescriptor) -> None:
        import flashinfer

        self.kind, self.key, self.library = kind, key, flashinfer
        requests, pages = owner.capacity.max_num_reqs, owner.capacity.max_pages
        workspace, device = owner.float_workspace, owner.float_workspace.device

        def pair(size: int, dtype: torch.dtype = torch.int32) -> Any:
            host = torch.zeros(size, dtype=dtype, pin_memory=True)
            return host, torch.zeros(size, dtype=dtype, device=device)

        self.qo, self.kv = pair(requests + 1), pair(requests + 1)
        self.last, self.indices = pair(requests), pair(requests * pages)
        self.slots = pair(key.num_tokens, torch.int64)
        self.copied = torch.cuda.Event()
        self.planned = torch.cuda.Event()
        self.dtypes = {"q_data_type": SHAPE.dtype, "kv_data_type": SHAPE.dtype}
        self.heads = (SHAPE.num_q_heads, SHAPE.num_kv_heads, SHAPE.head_size)
        if kind == "batch_attention":
            self.wrapper = flashinfer.BatchAttention("NHD", str(device))
        elif kind == "decode":
            self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace,
                use_cuda_graph=True,
                paged_kv_indptr_buffer=self.kv[1],
                paged_kv_indices_buffer=self.indices[1],
                paged_kv_last_page_len_buffer=self.last[1],
            )
        else:
            self.wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                workspace,
                use_cuda_graph=True,
                qo_indptr_buf=self.qo[1],
                paged_kv_indptr_buf=self.kv[1],
                paged_kv_indices_buf=self.indices[1],
                paged_kv_last_page_len_buf=self.last[1],
                backend=kind,
            )
        self.first = True
        self.build(dummy_batch(key, owner.capacity))

    def build(self, batch: PagedBatch) -> None:
        self.copied.synchronize()
        held = (batch.seq_lens + (PAGE_SIZE - 1)) // PAGE_SIZE
        self.qo[0].copy_(batch.query_start_loc)
        torch.cumsum(held, 0, dtype=torch.int32, out=self.kv[0][1:])
        self.last[0].copy_(batch.seq_lens - (held - 1) * PAGE_SIZE)
        table = batch.block_table
        pages = table[torch.arange(table.shape[1]) < held[:, None]]
        count = len(pages)
        self.indices[0][:count] = pages
        assert batch.slot_mapping is not None
        self.slots[0].copy_(batch.slot_mapping)
        for host, device in (self.qo, self.kv, self.last, self.slots):
            device.copy_(host, non_blocking=True)
        self.indices[1][:count].copy_(self.indices[0][:count], non_blocking=True)
        self.copied.record()
        self.planned.synchronize()
        self.plan(batch, self.indices[1][:count])
        self.planned.record()

    def plan(self, batch: PagedBatch, indices: torch.Tensor) -> None:
        qo, kv, last = self.qo[0], self.kv[0], self.last[0]
        if self.kind == "batch_attention":
            self.wrapper.plan(
                qo, kv, self.indices[1], batch.seq_lens, *self.heads, SHAPE.head_size, PAGE_SIZE,
                causal=True, **self.dtypes,
            )  # fmt: skip
        elif self.kind != "decode":
            self.wrapper.plan(
                qo, kv, indices, last, *self.heads, PAGE_SIZE, causal=True, **self.dtypes
            )
        elif self.first:
            self.wrapper.plan(kv, indices, last, *self.heads, PAGE_SIZE, **self.dtypes)
        else:
            self.library.fast_decode_plan(
                self.wrapper, kv, indices, last, *self.heads, PAGE_SIZE,
                global_override_indptr_cpu=kv, **self.dtypes,
            )  # fmt: skip
        self.first = False


def measure(
    kind: str, requests: int, device: torch.device, rounds: int
) -> tuple[list[Figure], dict[str, Any]]:
    """One kernel, one number of requests."""
    rows, options = KINDS[kind]
    key = BatchDescriptor(rows * requests, requests, uniform_query_len=rows)
    capacity = PagedCapacity(
        max_num_tokens=rows * requests,
        max_num_reqs=requests,
        max_seq_len=MAX_SEQ_LEN,
        page_size=PAGE_SIZE,
    )
    owner = FlashInferOwner(capacity, SHAPE, device, **options)
    shared: dict[str, Any] = {**options, "float_workspace": owner.float_workspace}
    alone, own = (FlashInferOwner(capacity, SHAPE, device, **shared) for _ in range(2))
    heads = (SHAPE.num_q_heads, SHAPE.head_size)
    cache = (2, NUM_PAGES, PAGE_SIZE, SHAPE.num_kv_heads, SHAPE.head_size)
    subject = Subject(
        case=f"{kind}, {requests} requests",
        key=key,
        batches=_batches(requests, rows),
        owner=owner,
        alone=alone,
        own=own,
        kernel=FlashInfer(capacity, SHAPE),
        by_hand=ByHand(kind, owner, key).build,
        query=torch.randn(key.num_tokens, *heads, device=device).to(SHAPE.dtype),
        caches=torch.randn(cache, device=device).to(SHAPE.dtype),
    )
    figures, details = timed(subject, device, rounds)
    memory = owner.memory()
    details["bytes"] = {
        "key, device": memory.keys[key].device_bytes,
        "key, pinned": memory.keys[key].pinned_bytes,
        "shared, device": memory.shared.device_bytes,
        "shared, pinned": memory.shared.pinned_bytes,
        "lists": memory.lists_bytes,
        "float workspace": memory.float_workspace_bytes,
    }
    return figures, details


def main(argv: Sequence[str] | None = None) -> None:
    main_of(__doc__, "gpu/flashinfer", tuple(KINDS), measure, argv)


if __name__ == "__main__":
    main()
