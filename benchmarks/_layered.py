"""A decode step of many layers over a paged cache, whose every buffer can move."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from graphshare import AttentionState, BatchDescriptor, Phase

PAGE_SIZE = 16
PAGES_PER_REQ = 4
HEADS = 4


@dataclass
class Metadata:
    """seq_lens ``[reqs]`` int32, block_table ``[reqs, PAGES_PER_REQ]`` int64."""

    seq_lens: torch.Tensor
    block_table: torch.Tensor


def key_of(requests: int) -> BatchDescriptor:
    return BatchDescriptor(requests, requests)


class LayeredOwner:
    """Builds one metadata object, which all layers share, in buffers that can move."""

    def __init__(self, layers: int, requests: int, device: torch.device) -> None:
        self.layers, self.requests = layers, requests
        self.seq_lens = torch.ones(requests, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(requests, PAGES_PER_REQ, dtype=torch.int64, device=device)
        self.slot_mapping = torch.zeros(requests, dtype=torch.int64, device=device)

    def build(self, key: Any, batch: Any, phase: Phase) -> AttentionState:
        del phase
        rows = key.num_tokens
        device = self.seq_lens.device
        number = torch.arange(rows, device=device)
        length = PAGE_SIZE * PAGES_PER_REQ if batch is None else batch
        self.seq_lens[:rows] = (number % 7 + length).clamp(max=PAGE_SIZE * PAGES_PER_REQ).int()
        pages = torch.arange(PAGES_PER_REQ, device=device)
        self.block_table[:rows] = number[:, None] * PAGES_PER_REQ + pages
        self.slot_mapping[:rows] = number * PAGES_PER_REQ * PAGE_SIZE
        metadata = Metadata(self.seq_lens[:rows], self.block_table[:rows])
        layers = {f"layers.{i}": metadata for i in range(self.layers)}
        return AttentionState(layers, self.slot_mapping[:rows])


class LayeredModel:
    """Pre-norm layers: projections, an attention over the gathered pages, a gated product.

    Args:
        layers: How many.
        requests: Most requests of a step.
        width: Of the hidden states.
        device: Where it lies.
    """

    def __init__(self, layers: int, requests: int, width: int, device: torch.device) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        random = torch.Generator(device).manual_seed(0)

        def made(*shape: int) -> torch.Tensor:
            scale = shape[0] ** -0.5
            values = torch.randn(shape, generator=random, device=device) * scale
            return values.to(dtype)

        self.x = made(requests, width)
        self.layers = [
            {
                "qkv": made(width, 3 * width),
                "out": made(width, width),
                "up": made(width, 2 * width),
                "down": made(width, width),
            }
            for _ in range(layers)
        ]
        slots = requests * PAGES_PER_REQ * PAGE_SIZE
        self.caches = [(made(slots, width), made(slots, width)) for _ in range(layers)]
        self.positions = torch.arange(PAGES_PER_REQ * PAGE_SIZE, device=device)

    @torch.no_grad()
    def forward(self, key: Any, state: AttentionState) -> torch.Tensor:
        """Return ``[reqs, width]``."""
        rows = key.num_tokens
        x = self.x[:rows]
        width = x.shape[1]
        for number, (weights, cache) in enumerate(zip(self.layers, self.caches, strict=True)):
            metadata = state.attn_metadata[f"layers.{number}"]
            h = torch.nn.functional.rms_norm(x, (width,))
            q, k, v = (h @ weights["qkv"]).split(width, dim=-1)
            for stored, new in zip(cache, (k, v), strict=True):
                stored.index_copy_(0, state.slot_mappings, new)
            pages = [
                each.view(-1, PAGE_SIZE, width)[metadata.block_table]
                .view(rows, -1, HEADS, width // HEADS)
                .transpose(1, 2)
                for each in cache
            ]
            seen = (self.positions < metadata.seq_lens[:, None])[:, None, None]
            q = q.view(rows, 1, HEADS, -1).transpose(1, 2)
            a = torch.nn.functional.scaled_dot_product_attention(q, *pages, attn_mask=seen)
            x = x + a.reshape(rows, width) @ weights["out"]
            gate, up = (torch.nn.functional.rms_norm(x, (width,)) @ weights["up"]).chunk(2, -1)
            x = x + (torch.nn.functional.silu(gate) * up) @ weights["down"]
        return x


def buffers_of(owner: LayeredOwner, model: LayeredModel) -> Iterator[torch.Tensor]:
    """Every buffer of the cache and of the metadata."""
    yield from (owner.seq_lens, owner.block_table, owner.slot_mapping)
    for keys, values in model.caches:
        yield keys
        yield values


def move(owner: LayeredOwner, model: LayeredModel) -> dict[torch.Tensor, torch.Tensor]:
    """Put the cache and the metadata elsewhere, with what they hold; return what went where."""
    moves = {old: old.clone() for old in buffers_of(owner, model)}
    put(owner, model, moves)
    return moves


def put(owner: LayeredOwner, model: LayeredModel, moves: dict[torch.Tensor, torch.Tensor]) -> None:
    """Have owner and model use the new buffers."""
    owner.seq_lens, owner.block_table = moves[owner.seq_lens], moves[owner.block_table]
    owner.slot_mapping = moves[owner.slot_mapping]
    model.caches = [(moves[keys], moves[values]) for keys, values in model.caches]
