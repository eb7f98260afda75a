"""FlashInfer's states: a build by hand, a refresh, and what borrowing saves a step.

For each kernel and number of requests (uniform keys, of one row a request for decode and of four
for the others; bf16, a target of 32 query and 8 KV heads of 128, a draft layer of the same):

- *by hand*: the calls that an engine writes without graphshare: lists on the host, pinned copies,
  and the library's own plan (for decode its ``fast_decode_plan``);
- *build*: the owner's, alone; *refresh*: through the pool, with its check;
- *step, rebuilt*: refresh and replay the target, then refresh and replay the draft on a state of
  its own; *step, borrowed*: the draft replays on the target's. On the host, and with the GPU waited
  for at the end of the step.

    python -m benchmarks.gpu.flashinfer [--json PATH] [--rounds N] [--requests N ...] [--kind K ...]
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from time import perf_counter_ns as now
from typing import Any

import torch

from benchmarks._states import device_of, waiting
from benchmarks._turns import (
    Figure,
    Sampler,
    arguments,
    difference_us,
    in_turn,
    report,
)
from graphshare import BatchDescriptor, GraphPool, Phase, share_states
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
LAYERS = 4
REQUESTS = (1, 8, 64, 256)


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


def _cycled(function: Callable[[PagedBatch], object], batches: Sequence[PagedBatch]) -> Sampler:
    turn = 0

    def sample() -> int:
        nonlocal turn
        turn = (turn + 1) % len(batches)
        batch = batches[turn]
        start = now()
        function(batch)
        return now() - start

    return sample


def _forward(kernel: FlashInfer, rows: int, device: torch.device, layers: int) -> Any:
    size = (2, NUM_PAGES, PAGE_SIZE, SHAPE.num_kv_heads, SHAPE.head_size)
    caches = torch.randn(size, device=device).to(SHAPE.dtype)
    query = torch.randn(rows, SHAPE.num_q_heads, SHAPE.head_size, device=device).to(SHAPE.dtype)

    def forward(key: Any, state: Any) -> torch.Tensor:
        del key
        out = query
        for _ in range(layers):
            out = kernel.run(out, *caches, state.attn_metadata)
        return out

    return forward


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
    batches = _batches(requests, rows)
    owner = FlashInferOwner(capacity, SHAPE, device, **options)
    options = {**options, "float_workspace": owner.float_workspace}
    alone, own = (FlashInferOwner(capacity, SHAPE, device, **options) for _ in range(2))
    kernel = FlashInfer(capacity, SHAPE)
    target = GraphPool("target", owner=owner, spec=owner.spec, device=device)
    prefill = GraphPool("draft.prefill", spec=kernel.spec, device=device)
    rebuilt = GraphPool("draft.rebuilt", owner=own, device=device)
    share_states(target, prefill)
    target.capture([key], _forward(owner, key.num_tokens, device, LAYERS))
    prefill.capture([key], _forward(kernel, key.num_tokens, device, 1))
    rebuilt.capture([key], _forward(own, key.num_tokens, device, 1))
    alone.build(key, None, Phase.WARMUP)
    hand = ByHand(kind, owner, key)
    wait = waiting(device)

    def step(borrows: bool, waits: bool) -> Callable[[PagedBatch], object]:
        def run(batch: PagedBatch) -> None:
            target.refresh(key, batch)
            target.replay(key)
            if borrows:
                prefill.replay(key)
            else:
                rebuilt.refresh(key, batch)
                rebuilt.replay(key)
            if waits and wait is not None:
                wait()

        return run

    def timed(functions: dict[str, Callable[[PagedBatch], object]], turns: int = 4) -> Any:
        return in_turn(
            {name: _cycled(function, batches) for name, function in functions.items()},
            turns=turns,
            rounds=rounds,
            warmup=5,
            between=wait,
        )

    builds = timed(
        {
            "by hand": hand.build,
            "build": lambda batch: alone.build(key, batch, Phase.REPLAY),
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
    case = f"{kind}, {requests} requests"
    figures = [
        Figure(f"{case}: by hand", builds.median_us("by hand"), "us"),
        Figure(f"{case}: build", builds.median_us("build"), "us"),
        Figure.of(f"{case}: refresh / build", builds.ratio("refresh", "build"), "", 1.05),
        Figure.of(f"{case}: refresh over build", difference_us(builds, "refresh", "build"), "us"),
        Figure.of(f"{case}: build / by hand", builds.ratio("build", "by hand"), ""),
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
    memory = owner.memory()
    details = {
        case: {
            "builds": builds.facts("build"),
            "steps": steps.facts("step, rebuilt"),
            "waited": waited.facts("step and wait, rebuilt"),
            "bytes": {
                "key, device": memory.keys[key].device_bytes,
                "key, pinned": memory.keys[key].pinned_bytes,
                "shared, device": memory.shared.device_bytes,
                "shared, pinned": memory.shared.pinned_bytes,
                "lists": memory.lists_bytes,
                "float workspace": memory.float_workspace_bytes,
            },
        }
    }
    for pool in (prefill, rebuilt, target):
        pool.close()
    return figures, details


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, rounds=301)
    parser.add_argument("--requests", nargs="+", type=int, default=REQUESTS, metavar="N")
    parser.add_argument("--kind", nargs="+", choices=tuple(KINDS), default=tuple(KINDS))
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.exit("flashinfer: this benchmark needs a CUDA device; torch finds none")
    device = device_of("cuda")
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    try:
        for kind in options.kind:
            for requests in options.requests:
                more, facts = measure(kind, requests, device, options.rounds)
                figures += more
                details |= facts
    except ModuleNotFoundError as error:
        sys.exit(f"flashinfer: {error}")
    report(options.json, "gpu/flashinfer", figures, details)


if __name__ == "__main__":
    main()
