"""The target: a byte-level decoder-only transformer on flat token rows and a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from graphshare.adapters.toy.attention import TorchKernel
from graphshare.adapters.toy.config import ToyConfig
from graphshare.adapters.toy.kernel import AttentionKernel, LayerStore
from graphshare.adapters.toy.rows import join_blocks, split_blocks

if TYPE_CHECKING:
    from graphshare.state import AttentionState

__all__ = ["TORCH", "DecoderLayer", "Heads", "RMSNorm", "Rope", "TargetModel", "run_layer"]

TORCH = TorchKernel()
"""The kernel that is used where none is named."""


class RMSNorm(nn.Module):
    """Root mean square normalisation (Zhang and Sennrich, 2019).

    Args:
        size: Of the last dimension.
        eps: Added to the mean square.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of ``[..., size]``."""
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return (x * scale).to(x.dtype) * self.weight


class Rope(nn.Module):
    """Rotary position embedding (Su et al., 2021), tabulated.

    Args:
        config: Head size, positions and base.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        half = config.head_size // 2
        frequencies = config.rope_theta ** -(torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(config.max_model_len, dtype=torch.float64)[:, None] * frequencies
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, each ``[*positions.shape, head_size / 2]``."""
        shape = (*positions.shape, -1)
        flat = positions.flatten()
        cos, sin = (table.index_select(0, flat).view(shape) for table in (self.cos, self.sin))
        return cos, sin


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn ``[..., heads, head_size]`` by ``[..., head_size / 2]`` cosines and sines."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Heads(NamedTuple):
    """Projections of some tokens, turned by RoPE.

    Args:
        query: ``[..., num_q_heads, head_size]``.
        key: ``[..., num_kv_heads, head_size]``.
        value: ``[..., num_kv_heads, head_size]``.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class DecoderLayer(nn.Module):
    """Grouped-query attention and SwiGLU, each behind a norm; the attention itself is elsewhere.

    Args:
        config: Sizes.
    """

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.config = config
        heads = config.num_q_heads + 2 * config.num_kv_heads
        attention_size = config.num_q_heads * config.head_size
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.qkv = nn.Linear(config.hidden_size, heads * config.head_size, bias=False)
        self.out = nn.Linear(attention_size, config.hidden_size, bias=False)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def project(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Heads:
        """Project ``[..., hidden_size]`` to heads, and turn queries and keys."""
        config = self.config
        heads = self.qkv(self.attn_norm(x)).unflatten(-1, (-1, config.head_size))
        query, key, value = heads.split(
            (config.num_q_heads, config.num_kv_heads, config.num_kv_heads), dim=-2
        )
        return Heads(_turn(query, cos, sin), _turn(key, cos, sin), value)

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Add what attention found, then the MLP.

        Args:
            x: ``[..., hidden_size]``, what :meth:`project` was given.
            attended: ``[..., num_q_heads * head_size]``.
        """
        x = x + self.out(attended)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


def run_layer(
    layer: DecoderLayer,
    blocks: Sequence[torch.Tensor],
    turns: Sequence[tuple[torch.Tensor, torch.Tensor]],
    views: Any,
    cache: LayerStore,
    slot_mapping: torch.Tensor,
    kernel: AttentionKernel,
) -> list[torch.Tensor]:
    """Run one layer over all blocks of rows: first all writes to the cache, then all reads.

    Args:
        layer: The layer.
        blocks: Blocks of ``[ROW_BLOCK, hidden_size]``.
        turns: Cosines and sines for each block.
        views: What the kernel worked out for all layers.
        cache: Of this layer; written in place.
        slot_mapping: ``[num_tokens]`` int64.
        kernel: Attends.

    Returns:
        New blocks.
    """
    num_tokens = slot_mapping.shape[0]
    heads = [layer.project(x, *turn) for x, turn in zip(blocks, turns, strict=True)]
    cache.write(
        join_blocks([h.key for h in heads], num_tokens),
        join_blocks([h.value for h in heads], num_tokens),
        slot_mapping,
    )
    attended = kernel.attend([h.query for h in heads], cache, views)
    return [layer.finish(x, found) for x, found in zip(blocks, attended, strict=True)]


class TargetModel(nn.Module):
    """The model whose greedy tokens decoding gives, with or without a draft.

    Args:
        config: Sizes.
    """

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rope = Rope(config)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Score ``[..., hidden_size]`` against the embedding: ``[..., vocab_size]``."""
        return functional.linear(hidden, self.embedding.weight)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        state: AttentionState,
        caches: Sequence[LayerStore],
        *,
        uniform_query_len: int | None = None,
        kernel: AttentionKernel = TORCH,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one step on flat rows, padded rows included.

        Args:
            token_ids: ``[num_tokens]`` int64.
            positions: ``[num_tokens]`` int64.
            state: What an owner of the kernel built, and the slot mapping, ``[num_tokens]`` int64.
            caches: One a layer, of the kernel's making; written in place.
            uniform_query_len: Rows of every request, if all have the same.
            kernel: Attends.

        Returns:
            Hidden states after the last norm, ``[num_tokens, hidden_size]``, and the greedy next
            token of each row, ``[num_tokens]`` int64.
        """
        num_tokens = token_ids.shape[0]
        views = kernel.views(state, num_tokens, uniform_query_len)
        turns = [self.rope.at(block) for block in split_blocks(positions)]
        blocks = [self.embedding(block) for block in split_blocks(token_ids)]
        for layer, cache in zip(self.layers, caches, strict=True):
            blocks = run_layer(layer, blocks, turns, views, cache, state.slot_mappings, kernel)  # pyright: ignore[reportArgumentType]
        blocks = [self.norm(block) for block in blocks]
        tokens = [self.logits(block).argmax(-1) for block in blocks]
        return join_blocks(blocks, num_tokens), join_blocks(tokens, num_tokens)
