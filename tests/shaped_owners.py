"""Owners of the shape of FlashInfer's and FlashAttention 3's metadata, without the kernels."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import torch

from graphshare import BatchDescriptor, PersistentBuffer, Phase

PAGE_SIZE = 4
MAX_LEN = 32
MAX_PAGES = MAX_LEN // PAGE_SIZE
MAX_REQS = 8
NUM_PAGES = 1 + MAX_REQS * MAX_PAGES

DECODE_KEYS = [BatchDescriptor(n, n, 1) for n in (8, 4, 2)]


class Decodes(NamedTuple):
    """Requests that decode one token each; request ``i`` owns the pages of place ``i + shift``."""

    seq_lens: tuple[int, ...]
    shift: int = 0

    @property
    def num_reqs(self) -> int:
        return len(self.seq_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.seq_lens)

    def pages(self, i: int) -> list[int]:
        first = 1 + MAX_PAGES * ((i + self.shift) % MAX_REQS)
        return list(range(first, first + -(-self.seq_lens[i] // PAGE_SIZE)))


def decodes(key: BatchDescriptor) -> list[Decodes]:
    most = key.num_reqs or 1
    return [
        Decodes(tuple(1 + (5 * i + most) % MAX_LEN for i in range(most)), most),
        Decodes(tuple(MAX_LEN - i for i in range(most)), most // 2),
        Decodes((17,) * (most // 2), 1),
        Decodes((MAX_LEN,)),
    ]


def refuse(key: BatchDescriptor, batch: Decodes) -> None:
    if batch.num_reqs > (key.num_reqs or 0):
        raise ValueError(f"{batch.num_reqs} requests for {key}")
    if not 1 <= min(batch.seq_lens) <= max(batch.seq_lens) <= MAX_LEN:
        raise ValueError("a length is out of range")


@dataclasses.dataclass
class FlashInferWrapper:
    """What ``run()`` reads: buffers by address, the workspace, and ``plan_info`` by value.

    ``paged_kv_indptr`` ``[reqs + 1]``, ``paged_kv_indices`` ``[pages]`` and ``last_page_len``
    ``[reqs]``, int32; ``int_workspace`` ``[bytes]`` uint8.
    """

    paged_kv_indptr: torch.Tensor
    paged_kv_indices: torch.Tensor
    last_page_len: torch.Tensor
    int_workspace: torch.Tensor
    float_workspace: torch.Tensor
    plan_info: list[int]


class FlashInferOwner:
    """One wrapper a key on shared buffers; ``plan`` fills as much of a workspace as it needs."""

    workspace_bytes: ClassVar[int] = 1024

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.indptr = PersistentBuffer(MAX_REQS + 1, torch.int32, device, padding="last")
        self.indices = PersistentBuffer(MAX_REQS * MAX_PAGES, torch.int32, device, padding=0)
        self.last_page_len = PersistentBuffer(MAX_REQS, torch.int32, device, padding=1)
        self.float_workspace = torch.zeros(256, device=device)
        self.int_workspaces: dict[Any, torch.Tensor] = {}

    def build(self, key: BatchDescriptor, batch: Decodes | None, phase: Phase) -> FlashInferWrapper:
        rows = key.num_reqs or 1
        if batch is None:
            batch = Decodes((1,) * rows)
        refuse(key, batch)
        pages = [batch.pages(i) for i in range(batch.num_reqs)]
        indptr = [0]
        for each in pages:
            indptr.append(indptr[-1] + len(each))
        # A request of padding has no pages, and a last page of one token.
        workspace = self.int_workspaces.get(key)
        if workspace is None:
            workspace = torch.zeros(self.workspace_bytes, dtype=torch.uint8, device=self.device)
            self.int_workspaces[key] = workspace
        return FlashInferWrapper(
            self.indptr.write(indptr, rows + 1),
            self.indices.write([page for each in pages for page in each], rows * MAX_PAGES),
            self.last_page_len.write([1 + (n - 1) % PAGE_SIZE for n in batch.seq_lens], rows),
            workspace,
            self.float_workspace,
            self.plan(rows, indptr, workspace),
        )

    def plan(self, rows: int, indptr: list[int], workspace: torch.Tensor) -> list[int]:
        """Request and tile of each block, chunk size, valid mask: laid out by padded sizes."""
        blocks = rows * MAX_PAGES
        tiles = [(request, tile) for request in range(len(indptr) - 1) for tile in range(
            indptr[request + 1] - indptr[request]
        )]  # fmt: skip
        ints = workspace[: 8 * blocks].view(torch.int32)
        filled = torch.tensor(tiles, dtype=torch.int32).flatten()
        ints[: len(filled)].copy_(filled, non_blocking=True)
        mask = workspace[8 * blocks : 9 * blocks]
        mask[: len(tiles)] = 1
        mask[len(tiles) :] = 0
        return [blocks, 0, 4 * blocks, 8 * blocks, rows, 1]

    def writes(self, key: BatchDescriptor) -> list[torch.Tensor]:
        rows = key.num_reqs or 1
        return [
            self.indptr.tensor[: rows + 1],
            self.indices.tensor[: rows * MAX_PAGES],
            self.last_page_len.tensor[:rows],
            self.int_workspaces[key],
        ]

    def live_rows(self, key: BatchDescriptor, batch: Decodes) -> dict[str, int]:
        pages = sum(len(batch.pages(i)) for i in range(batch.num_reqs))
        return {
            "paged_kv_indptr": batch.num_reqs + 1,
            "paged_kv_indices": pages,
            "last_page_len": batch.num_reqs,
        }


@dataclasses.dataclass
class FlashAttentionMetadata:
    """As vLLM's for FlashAttention 3.

    ``scheduler_metadata`` ``[4 * round_up(reqs, 4) + 1]`` int32.
    """

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    max_seq_len: int
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    scheduler_metadata: torch.Tensor
    max_num_splits: int
    causal: bool = True


class FlashAttentionOwner:
    """Shared buffers; the scheduler's is sliced to the exact size, and its tail is zeroed."""

    host_values: ClassVar[dict[str, str]] = {
        "*.num_actual_tokens": "any",
        "*.max_seq_len": "at_most",
    }
    max_num_splits: ClassVar[int] = 8

    def __init__(self, device: str = "cpu") -> None:
        self.query_start_loc = PersistentBuffer(MAX_REQS + 1, torch.int32, device, padding="last")
        self.seq_lens = PersistentBuffer(MAX_REQS, torch.int32, device, padding=0)
        self.block_table = PersistentBuffer((MAX_REQS, MAX_PAGES), torch.int32, device, padding=0)
        self.slot_mapping = PersistentBuffer(MAX_REQS, torch.int64, device, padding=-1)
        self.scheduler = torch.zeros(4 * MAX_REQS + 1, dtype=torch.int32, device=device)

    def build(
        self, key: BatchDescriptor, batch: Decodes | None, phase: Phase
    ) -> dict[str, FlashAttentionMetadata]:
        rows = key.num_reqs or 1
        capturing = batch is None
        if batch is None:
            batch = Decodes((1,) * rows)
        refuse(key, batch)
        table = torch.zeros(batch.num_reqs, MAX_PAGES, dtype=torch.int32)
        for i in range(batch.num_reqs):
            table[i, : len(batch.pages(i))] = torch.tensor(batch.pages(i))
        newest = [
            PAGE_SIZE * batch.pages(i)[-1] + (length - 1) % PAGE_SIZE
            for i, length in enumerate(batch.seq_lens)
        ]
        metadata = FlashAttentionMetadata(
            batch.num_tokens,
            1,
            self.query_start_loc.write(list(range(batch.num_reqs + 1)), rows + 1),
            MAX_LEN if capturing else max(batch.seq_lens),
            self.seq_lens.write(batch.seq_lens, rows),
            self.block_table.write(table, rows),
            self.slot_mapping.write(newest, key.num_tokens),
            self.schedule(batch, rows),
            self.max_num_splits,
        )
        return {f"model.layers.{i}.self_attn": metadata for i in range(4)}

    def schedule(self, batch: Decodes, rows: int) -> torch.Tensor:
        """Query length, splits and heads of each request, and the tile semaphore."""
        size = 4 * (-(-rows // 4) * 4) + 1
        splits = [min(self.max_num_splits, 1 + length // PAGE_SIZE) for length in batch.seq_lens]
        padded = [*splits, *[0] * (-(-rows // 4) * 4 - batch.num_reqs)]
        plan = torch.tensor([*[1] * len(padded), *padded, *padded, *padded, 0], dtype=torch.int32)
        self.scheduler[:size].copy_(plan, non_blocking=True)
        self.scheduler[size:] = 0
        return self.scheduler[:size]

    def writes(self, key: BatchDescriptor) -> list[torch.Tensor]:
        rows = key.num_reqs or 1
        return [
            self.query_start_loc.tensor[: rows + 1],
            self.seq_lens.tensor[:rows],
            self.block_table.tensor[:rows],
            self.slot_mapping.tensor[: key.num_tokens],
            self.scheduler,  # the tail too
        ]
