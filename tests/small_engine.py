"""A paged-attention engine in miniature, for tests that plant faults in it.

One decode step for each request: the key and value of its newest token are written where
``slot_mappings`` says, then the token attends to its ``seq_lens`` positions, gathered through
``block_table``. Page 0 is the null page: padding reads it and writes to it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from graphshare import AttentionState, BatchDescriptor, PersistentBuffer, Phase
from graphshare.capture import CapturedGraph, make_backend

PAGE_SIZE = 2
MAX_PAGES = 4
MAX_LEN = PAGE_SIZE * MAX_PAGES
MAX_REQS = 8
HEAD_SIZE = 3


class Place(NamedTuple):
    """A capture backend and its device."""

    backend: str
    device: str


class Batch(NamedTuple):
    """Requests that decode one token each; request ``i`` owns the pages of place ``i + shift``."""

    seq_lens: tuple[int, ...]
    shift: int = 0

    @property
    def num_reqs(self) -> int:
        return len(self.seq_lens)

    def pages(self) -> list[list[int]]:
        first = [1 + MAX_PAGES * ((i + self.shift) % MAX_REQS) for i in range(self.num_reqs)]
        return [list(range(page, page + MAX_PAGES)) for page in first]

    def slots(self) -> list[int]:
        newest = (length - 1 for length in self.seq_lens)
        return [
            PAGE_SIZE * pages[position // PAGE_SIZE] + position % PAGE_SIZE
            for pages, position in zip(self.pages(), newest, strict=True)
        ]

    def advanced(self, steps: int = 1) -> Batch:
        return self._replace(seq_lens=tuple(length + steps for length in self.seq_lens))


@dataclass
class Metadata:
    """Attention metadata: seq_lens ``[reqs]`` int32, block_table ``[reqs, MAX_PAGES]`` int64."""

    seq_lens: torch.Tensor
    block_table: torch.Tensor


def key_of(num_reqs: int, **fields: Any) -> BatchDescriptor:
    """The key of a decode batch padded to ``num_reqs``."""
    return BatchDescriptor(num_reqs, num_reqs, **fields)


class Owner:
    """Writes states in place, with a defined padding, and keeps a diary of its builds."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.seq_lens = PersistentBuffer(MAX_REQS, torch.int32, device, padding=1, name="seq_lens")
        self.block_table = PersistentBuffer(
            (MAX_REQS, MAX_PAGES), torch.int64, device, padding=0, name="block_table"
        )
        self.slot_mapping = PersistentBuffer(
            MAX_REQS, torch.int64, device, padding=0, name="slot_mapping"
        )
        self.builds: list[tuple[Any, Phase]] = []

    def build(self, key: Any, batch: Batch | None, phase: Phase) -> AttentionState:
        self.builds.append((key, phase))
        return self.write(batch, key.num_reqs)

    def write(self, batch: Batch | None, rows: int) -> AttentionState:
        if batch is None:  # lengths of one, on the null page
            metadata = Metadata(self.seq_lens.fill(1, rows), self.block_table.fill(0, rows))
            return AttentionState(metadata, self.slot_mapping.fill(0, rows))
        metadata = Metadata(
            self.seq_lens.write(batch.seq_lens, rows),
            self.block_table.write(torch.tensor(batch.pages()), rows),
        )
        return AttentionState(metadata, self.slot_mapping.write(batch.slots(), rows))

    def count(self, phase: Phase) -> int:
        return sum(each is phase for _, each in self.builds)


class Model:
    """One attention layer with its cache ``[pages, PAGE_SIZE, HEAD_SIZE]`` float32 and inputs."""

    def __init__(self, device: str, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        pages = 1 + MAX_PAGES * MAX_REQS
        self.cache = torch.randn(pages, PAGE_SIZE, HEAD_SIZE, generator=random).to(device)
        self.cache[0] = 0
        self.x = torch.randn(MAX_REQS, HEAD_SIZE, generator=random).to(device)

    def forward(self, key: Any, state: AttentionState) -> torch.Tensor:
        """Return ``[reqs, HEAD_SIZE]`` float32."""
        self.store(state.slot_mappings)
        return attention(self.cache, state.attn_metadata)

    def store(self, slot_mapping: torch.Tensor) -> None:
        new = self.x[: slot_mapping.shape[0]]
        self.cache.view(-1, HEAD_SIZE).index_copy_(0, slot_mapping, new)

    def expected(self, batch: Batch) -> torch.Tensor:
        """What the live rows must be: computed eagerly, on tensors of its own."""
        copy = Model.__new__(Model)
        copy.cache, copy.x = self.cache.clone(), self.x.clone()
        device = self.cache.device
        metadata = Metadata(
            torch.tensor(batch.seq_lens, dtype=torch.int32, device=device),
            torch.tensor(batch.pages(), device=device),
        )
        slots = torch.tensor(batch.slots(), device=device)
        return copy.forward(None, AttentionState(metadata, slots))


def attention(cache: torch.Tensor, metadata: Metadata, max_seq_len: int = MAX_LEN) -> torch.Tensor:
    """Softmax-weighted mean of the cached rows that each request sees."""
    rows = cache[metadata.block_table].flatten(1, 2)[:, :max_seq_len]
    positions = torch.arange(max_seq_len, device=cache.device)
    unseen = positions >= metadata.seq_lens[:, None]
    weights = rows.sum(-1).masked_fill(unseen, -torch.inf).softmax(-1)
    return (weights[..., None] * rows).sum(1)


def by_hand(place: Place, forward: Callable[..., Any], *args: Any) -> CapturedGraph:
    """Warm up and capture as engines do by convention: no state is built, nothing is checked."""
    backend = make_backend(place.backend, place.device)  # pyright: ignore[reportArgumentType]
    run = functools.partial(forward, *args)
    with backend.session():
        backend.warmup(run)
        return backend.capture(run)


def is_close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether the live rows, as many as expected, are right."""
    return torch.allclose(got[: expected.shape[0]], expected, rtol=1e-4, atol=1e-5)
