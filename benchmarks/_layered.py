"""A decode step of many layers over a paged cache, whose every buffer can move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from graphshare import AttentionState, BatchDescriptor, Phase

PAGE_SIZE = 16
PAGES_PER_REQ = 4
MAX_SEQ_LEN = PAGE_SIZE * PAGES_PER_REQ
Q_HEADS, KV_HEADS = 8, 2


@dataclass
class Metadata:
    """query_start_loc ``[reqs + 1]``, seq_lens ``[reqs]``, block_table ``[reqs, PAGES_PER_REQ]``;
    int32."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Metadata], torch.Tensor]
"""``attend(q, keys, values, metadata)``: ``[reqs, Q_HEADS, size]`` over a paged cache."""


def key_of(requests: int) -> BatchDescriptor:
    return BatchDescriptor(requests, requests)


class LayeredOwner:
    """Builds one metadata object, which all layers share, in buffers that can move."""

    names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")

    def __init__(self, layers: int, requests: int, device: torch.device) -> None:
        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.layers = layers
        self.query_start_loc, self.seq_lens = ints(requests + 1), ints(requests)
        self.block_table = ints(requests, PAGES_PER_REQ)
        self.slot_mapping = torch.zeros(requests, dtype=torch.int64, device=device)

    def build(self, key: Any, batch: Any, phase: Phase) -> AttentionState:
        del phase
        rows = key.num_tokens
        device = self.seq_lens.device
        number = torch.arange(rows + 1, device=device)
        length = MAX_SEQ_LEN if batch is None else batch
        self.query_start_loc[: rows + 1] = number
        self.seq_lens[:rows] = (number[:rows] % 7 + length).clamp(max=MAX_SEQ_LEN)
        pages = torch.arange(PAGES_PER_REQ, device=device)
        self.block_table[:rows] = number[:rows, None] * PAGES_PER_REQ + pages
        self.slot_mapping[:rows] = number[:rows] * MAX_SEQ_LEN + self.seq_lens[:rows] - 1
        metadata = Metadata(
            self.query_start_loc[: rows + 1], self.seq_lens[:rows], self.block_table[:rows]
        )
        layers = {f"layers.{i}": metadata for i in range(self.layers)}
        return AttentionState(layers, self.slot_mapping[:rows])


class LayeredModel:
    """Llama's layers: norms, rotary positions, grouped queries, a gated product.

    Args:
        layers: How many.
        requests: Most requests of a step.
        width: Of the hidden states; a head has an eighth of it.
        device: Where it lies.
        attend: The attention.
    """

    def __init__(
        self, layers: int, requests: int, width: int, device: torch.device, attend: Attend
    ) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        random = torch.Generator(device).manual_seed(0)
        size = width // Q_HEADS

        def made(*shape: int) -> torch.Tensor:
            values = torch.randn(shape, generator=random, device=device)
            return (values * shape[0] ** -0.5).to(dtype)

        self.x = made(requests, width)
        self.layers = [
            {
                "norm": torch.ones(width, dtype=dtype, device=device),
                "qkv": made(width, (Q_HEADS + 2 * KV_HEADS) * size),
                "out": made(width, width),
                "second_norm": torch.ones(width, dtype=dtype, device=device),
                "up": made(width, 4 * width),
                "down": made(2 * width, width),
            }
            for _ in range(layers)
        ]
        shape = (requests * PAGES_PER_REQ, PAGE_SIZE, KV_HEADS, size)
        self.caches = [(made(*shape), made(*shape)) for _ in range(layers)]
        angles = torch.arange(MAX_SEQ_LEN, device=device)[:, None] / 10_000 ** (
            torch.arange(size // 2, device=device) / (size // 2)
        )
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        self._attend = attend

    @torch.no_grad()
    def forward(self, key: Any, state: AttentionState) -> torch.Tensor:
        """Return ``[reqs, width]``."""
        rows = key.num_tokens
        x = self.x[:rows]
        width = x.shape[1]
        size = width // Q_HEADS
        positions = state.attn_metadata["layers.0"].seq_lens.long() - 1
        turn = self.cos[positions][:, None], self.sin[positions][:, None]
        for number, (weights, cache) in enumerate(zip(self.layers, self.caches, strict=True)):
            metadata = state.attn_metadata[f"layers.{number}"]
            h = torch.nn.functional.rms_norm(x, (width,), weights["norm"])
            heads = (h @ weights["qkv"]).view(rows, -1, size)
            q, k, v = heads.split((Q_HEADS, KV_HEADS, KV_HEADS), dim=1)
            q, k = _rotated(q, *turn), _rotated(k, *turn)
            for stored, new in zip(cache, (k, v), strict=True):
                stored.view(-1, KV_HEADS, size).index_copy_(0, state.slot_mappings, new)
            a = self._attend(q, *cache, metadata)
            x = x + a.reshape(rows, width) @ weights["out"]
            h = torch.nn.functional.rms_norm(x, (width,), weights["second_norm"])
            gate, up = (h @ weights["up"]).chunk(2, -1)
            x = x + (torch.nn.functional.silu(gate) * up) @ weights["down"]
        return x


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    one, other = heads.chunk(2, dim=-1)
    return torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1)


def gathered(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, metadata: Metadata
) -> torch.Tensor:
    """Attention of PyTorch's operators alone."""
    rows = q.shape[0]
    table = metadata.block_table.long()
    k, v = (
        each[table].flatten(1, 2).transpose(1, 2).repeat_interleave(Q_HEADS // KV_HEADS, dim=1)
        for each in (keys, values)
    )
    positions = torch.arange(MAX_SEQ_LEN, device=q.device)
    seen = (positions < metadata.seq_lens[:, None])[:, None, None]
    a = torch.nn.functional.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=seen)
    return a.view(rows, -1)


def flash_attention_3() -> Attend:
    """FlashAttention 3, as vLLM builds it.

    Raises:
        ModuleNotFoundError: It is not installed.
    """
    from vfa3.flash_attn_interface import flash_attn_varlen_func

    def attend(
        q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, metadata: Metadata
    ) -> torch.Tensor:
        return flash_attn_varlen_func(
            q,
            keys,
            values,
            max_seqlen_q=1,
            cu_seqlens_q=metadata.query_start_loc,
            max_seqlen_k=MAX_SEQ_LEN,
            seqused_k=metadata.seq_lens,
            block_table=metadata.block_table,
            causal=True,
            fa_version=3,
        )

    return attend


def buffers_of(owner: LayeredOwner, model: LayeredModel) -> Iterator[torch.Tensor]:
    """Every buffer of the cache and of the metadata."""
    for name in owner.names:
        yield getattr(owner, name)
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
    for name in owner.names:
        setattr(owner, name, moves[getattr(owner, name)])
    model.caches = [(moves[keys], moves[values]) for keys, values in model.caches]
