"""An owner whose buffers can be moved, and a forward that reads them, on either backend."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from graphshare import AttentionState, BatchDescriptor, GraphPool, Phase

WIDTH = 6
ROWS = 8


class Metadata(NamedTuple):
    """lengths ``[reqs]`` int32, table ``[reqs, WIDTH]`` int64."""

    lengths: torch.Tensor
    table: torch.Tensor


def key_of(rows: int) -> BatchDescriptor:
    return BatchDescriptor(rows, rows)


class MovableOwner:
    """Fills persistent buffers, a slice of each for a key; ``move`` puts them elsewhere."""

    def __init__(self, device: Any) -> None:
        self.device = torch.device(device)
        self.lengths = torch.ones(ROWS, dtype=torch.int32, device=device)
        self.table = torch.zeros(ROWS, WIDTH, dtype=torch.int64, device=device)
        self.slots = torch.zeros(ROWS, dtype=torch.int64, device=device)

    def build(self, key: Any, batch: Any, phase: Phase) -> AttentionState:
        rows = key.num_tokens
        seed = 1 if batch is None else batch
        steps = torch.arange(rows, device=self.device)
        self.lengths[:rows] = (steps + seed) % WIDTH + 1
        self.table[:rows] = (
            steps[:, None] * WIDTH + torch.arange(WIDTH, device=self.device)
        ) % ROWS
        self.slots[:rows] = (steps + seed) % ROWS
        metadata = Metadata(self.lengths[:rows], self.table[:rows])
        return AttentionState({"a": metadata, "b": metadata}, self.slots[:rows])

    def buffers(self) -> dict[str, torch.Tensor]:
        return {"lengths": self.lengths, "table": self.table, "slots": self.slots}

    def move(self) -> dict[torch.Tensor, torch.Tensor]:
        """Put all buffers elsewhere; return where each went."""
        before = self.buffers()
        after = {name: torch.zeros_like(each) for name, each in before.items()}
        self.lengths, self.table, self.slots = after["lengths"], after["table"], after["slots"]
        return {before[name]: after[name] for name in before}


class Model:
    """One layer: stores a row in a cache, then gathers a weighted sum through the table."""

    def __init__(self, device: Any, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.x = torch.randn(ROWS, 4, generator=random).to(device)
        self.cache = torch.randn(ROWS, 4, generator=random).to(device)
        self.weight = torch.randn(4, 4, generator=random).to(device)
        self.out = torch.zeros(ROWS, 4, device=device)

    def forward(self, key: Any, state: AttentionState) -> Any:
        metadata = state.attn_metadata["b"]
        rows = key.num_tokens
        self.cache.index_copy_(0, state.slot_mappings, self.x[:rows])
        seen = torch.arange(WIDTH, device=self.x.device) < metadata.lengths[:, None]
        gathered = self.cache[metadata.table] * seen[..., None]
        hidden = gathered.sum(1) @ self.weight
        self.out[:rows].copy_(hidden)
        return {"hidden": hidden, "out": self.out[:rows]}

    def named(self) -> dict[str, Any]:
        return {
            "inputs": {"x": self.x},
            "weights": {"weight": self.weight},
            "buffers": {"cache": self.cache},
            "outputs": {"out": self.out},
        }

    def expected(self, key: Any, state: AttentionState) -> torch.Tensor:
        """What ``hidden`` is to be, computed eagerly on copies."""
        copy = Model.__new__(Model)
        copy.x, copy.weight = self.x.clone(), self.weight.clone()
        copy.cache, copy.out = self.cache.clone(), self.out.clone()
        return copy.forward(key, state)["hidden"]


def pool_of(kind: str, name: str = "target", **options: Any) -> GraphPool[BatchDescriptor]:
    device = "cuda" if kind == "cuda" else "cpu"
    return GraphPool(name, device=device, backend=kind, inspectable=True, **options)


def poisoned(tensors: Any) -> None:
    """Fill with what no result may hold."""
    for tensor in tensors:
        tensor.view(torch.uint8).fill_(0xA5)
