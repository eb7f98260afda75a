"""Models of attention layers alone, on a GPU, whose kernels are FlashAttention's."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import torch

from graphshare import AttentionState, BatchDescriptor
from graphshare.adapters.flash_attn import (
    AttentionShape,
    FlashAttention2,
    FlashAttention2Owner,
    FlashAttention3,
    FlashAttention3Owner,
)
from graphshare.adapters.paged import PagedBatch, PagedCapacity
from tests.paged_kernels import Shapes, attention, make_cache, random_batch, relative_error
from tests.required_kernels import required

DEVICE = "cuda"
CAPACITY = PagedCapacity(max_num_tokens=512, max_num_reqs=16, max_seq_len=2048, page_size=256)
TARGET = Shapes(num_q_heads=32, num_kv_heads=8)
TOLERANCE = 1e-2
"""Relative error of a bf16 kernel against float32; 2e-3 is usual."""


def num_pages(capacity: PagedCapacity) -> int:
    """As many as all requests at their longest hold, and the scratch page."""
    return 1 + capacity.max_num_reqs * capacity.max_pages


def shape_of(shapes: Shapes) -> AttentionShape:
    return AttentionShape(
        num_q_heads=shapes.num_q_heads,
        num_kv_heads=shapes.num_kv_heads,
        head_size=shapes.head_size,
        causal=shapes.causal,
        window=shapes.window,
        dtype=shapes.dtype,
    )


def changed(shapes: Shapes, changes: dict[str, Any]) -> Shapes:
    """The shapes of a pair's borrower."""
    named = {k: getattr(torch, v) if k == "dtype" else v for k, v in changes.items()}
    return dataclasses.replace(shapes, **named)


def make_owner(
    kind: str, shapes: Shapes = TARGET, capacity: PagedCapacity = CAPACITY, **options: Any
) -> Any:
    shape = shape_of(shapes)
    if kind == "fa2":
        return required(lambda: FlashAttention2Owner(capacity, shape, DEVICE, **options))
    return required(lambda: FlashAttention3Owner(capacity, shape, DEVICE, **options))


def make_borrower(kind: str, shapes: Shapes = TARGET, capacity: PagedCapacity = CAPACITY) -> Any:
    shape = shape_of(shapes)
    if kind == "fa2":
        return required(lambda: FlashAttention2(capacity, shape))
    return required(lambda: FlashAttention3(capacity, shape))


class Model:
    """Layers that each write this step's keys and values into their cache, and attend to it.

    Args:
        kernel: With ``run``.
        shapes: Of its heads.
        capacity: Of its batches.
        layers: How many; each has a cache of its own.
        seed: Of its caches and inputs.

    Attributes:
        outputs: By key, what the last forward returned.
    """

    def __init__(
        self,
        kernel: Any,
        shapes: Shapes,
        capacity: PagedCapacity = CAPACITY,
        *,
        layers: int = 1,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self.kernel, self.shapes, self.capacity = kernel, shapes, capacity
        pages = num_pages(capacity)
        self.clean = [make_cache(shapes, capacity, pages, DEVICE) for _ in range(layers)]
        self.caches = [tuple(part.clone() for part in cache) for cache in self.clean]
        rows = capacity.max_num_tokens
        self.query = torch.randn(rows, shapes.num_q_heads, shapes.head_size, device=DEVICE)
        self.query = self.query.to(shapes.dtype)
        new = torch.randn(2, rows, shapes.num_kv_heads, shapes.head_size, device=DEVICE)
        self.new = new.to(shapes.dtype)
        self.outputs: dict[BatchDescriptor, list[torch.Tensor]] = {}

    def forward(self, key: BatchDescriptor, state: AttentionState) -> list[torch.Tensor]:
        rows = key.num_tokens
        slots = state.slot_mappings
        outs: list[torch.Tensor] = []
        for cache in self.caches:
            for part, new in zip(cache, self.new, strict=True):
                part.flatten(0, 1).index_copy_(0, slots, new[:rows])
            outs.append(self.kernel.run(self.query[:rows], *cache, state.attn_metadata))
        self.outputs[key] = outs  # after a capture, the graph's
        return outs

    def prepare(self, batch: PagedBatch, outs: Sequence[torch.Tensor] = ()) -> None:
        """Put the cache back, with NaN in every page that no request holds; mark the outputs."""
        held = torch.zeros(num_pages(self.capacity), dtype=torch.bool)
        pages = (batch.seq_lens + self.capacity.page_size - 1) // self.capacity.page_size
        for row, count in zip(batch.block_table, pages.tolist(), strict=True):
            held[row[:count].long()] = True
        spare = (~held).nonzero().flatten().to(DEVICE)
        for cache, clean in zip(self.caches, self.clean, strict=True):
            for part, source in zip(cache, clean, strict=True):
                part.copy_(source)
                part.index_fill_(0, spare, float("nan"))
        for out in outs:
            out.fill_(7.0)

    def errors(self, outs: Sequence[torch.Tensor], batch: PagedBatch) -> float:
        """The largest relative error of a layer's live rows against float32; NaN counts as such."""
        rows = batch.num_tokens
        found = [
            relative_error(
                out[:rows],
                attention(
                    self.query, tuple(part.nan_to_num() for part in cache), batch, self.shapes
                ),
            )
            for out, cache in zip(outs, self.caches, strict=True)
        ]
        return max(found, key=lambda error: error if error == error else float("inf"))


def batches_of(
    key: BatchDescriptor, count: int, seed: int = 0, capacity: PagedCapacity = CAPACITY
) -> list[PagedBatch]:
    rng = random.Random(f"{seed} {key}")
    return [random_batch(rng, key, capacity, num_pages(capacity)) for _ in range(count)]
