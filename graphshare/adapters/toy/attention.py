"""Attention over a paged cache, in plain torch: every shape is fixed by the padded key.

Nothing here waits for the device or depends on values in a way that changes a shape, so a CUDA
graph or the tape can capture it. What a batch looks like is read from :class:`PagedMetadata`, on
the device, at each replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from graphshare.adapters.toy.cache import SCRATCH_PAGE, LayerCache, make_cache
from graphshare.adapters.toy.rows import split_blocks
from graphshare.owner import AttentionSpec

if TYPE_CHECKING:
    from graphshare.adapters.toy.config import EngineConfig, ToyConfig
    from graphshare.adapters.toy.owner import PagedOwner
    from graphshare.state import AttentionState

__all__ = ["KeyView", "PagedMetadata", "TorchKernel", "attend", "key_views"]

# Finite, so that a row that sees nothing (padding) gives numbers, not NaN; far enough from any
# score that a masked weight is exactly zero beside a visible one.
_MASKED = -1e30


@dataclass(frozen=True, slots=True)
class PagedMetadata:
    """What the attention of every layer reads.

    Args:
        query_start_loc: ``[num_reqs + 1]`` int32, address fixed. First row of each request;
            padded requests repeat the last value.
        seq_lens: ``[num_reqs]`` int32, address fixed. Tokens in the cache after this step; 0 for
            padded requests.
        block_table: ``[num_reqs, max_pages]`` int32, address fixed. Pages of each request, padded
            with the scratch page.
        page_size: Tokens of one page; baked into the graph.
        max_seq_len: Bound on ``seq_lens``; later positions are masked. Baked into the graph, so
            captured at capacity.
        num_actual_tokens: Rows that are not padding. No kernel reads it.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    page_size: int
    max_seq_len: int
    num_actual_tokens: int


class KeyView(NamedTuple):
    """Where the rows of one block find their keys: the same for every layer.

    Args:
        slots: ``[ROW_BLOCK * max_pages * page_size]`` int64: a slot for each row and position;
            positions that a row does not see name the first scratch slot.
        hidden: ``[ROW_BLOCK, 1, max_pages * page_size]`` bool: the positions not to see.
    """

    slots: torch.Tensor
    hidden: torch.Tensor


def _requests_of(
    rows: torch.Tensor, metadata: PagedMetadata, uniform_query_len: int | None
) -> torch.Tensor:
    """Return the request of each row, ``[num_rows]`` int64; any one for a padded row."""
    last = metadata.seq_lens.shape[0] - 1
    if uniform_query_len is not None:
        return (rows // uniform_query_len).clamp(max=last)
    starts = metadata.query_start_loc[1:]
    return torch.searchsorted(starts, rows.to(starts.dtype), right=True).clamp(max=last)


def key_views(
    metadata: PagedMetadata, num_tokens: int, uniform_query_len: int | None
) -> list[KeyView]:
    """Find, for every row, the slots of the positions that it sees.

    A row sees its request's cache up to its own position: causal, aligned to the end of the
    request (``seq_lens``), as paged attention kernels do.

    Args:
        metadata: Of the padded batch.
        num_tokens: Rows of the key.
        uniform_query_len: Rows of every request, if the key says so: the request of a row is then
            known at capture, and ``query_start_loc`` is not read.

    Returns:
        One view a block of rows.
    """
    device = metadata.seq_lens.device
    rows = torch.arange(num_tokens, device=device)
    request = _requests_of(rows, metadata, uniform_query_len)
    lengths = metadata.seq_lens.index_select(0, request).long()
    if uniform_query_len is not None:
        owned = rows < metadata.seq_lens.shape[0] * uniform_query_len
        after = torch.where(owned, uniform_query_len - rows % uniform_query_len, 0)
    else:
        after = metadata.query_start_loc.index_select(0, request + 1).long() - rows
    # A padded row has nothing after it, or its request has no length: it sees nothing.
    seen = torch.where(after > 0, lengths - after + 1, 0).clamp(max=metadata.max_seq_len)
    pages = metadata.block_table.index_select(0, request).long()
    positions = torch.arange(pages.shape[1] * metadata.page_size, device=device)
    visible = positions < seen[:, None]
    offsets = torch.arange(metadata.page_size, device=device)
    slots = (pages[:, :, None] * metadata.page_size + offsets).flatten(1)
    # Not only masked: what a row does not see is not read either, whoever's page it is.
    slots = torch.where(visible, slots, SCRATCH_PAGE * metadata.page_size)
    return [
        KeyView(block_slots.flatten(), ~block_visible[:, None])
        for block_slots, block_visible in zip(
            split_blocks(slots), split_blocks(visible), strict=True
        )
    ]


def attend(query: torch.Tensor, cache: LayerCache, view: KeyView) -> torch.Tensor:
    """Attend from one block of rows to the cache.

    Args:
        query: ``[ROW_BLOCK, num_q_heads, head_size]``.
        cache: Of this layer.
        view: Of this block.

    Returns:
        ``[ROW_BLOCK, num_q_heads * head_size]``.
    """
    num_rows, num_q_heads, head_size = query.shape
    num_kv_heads = cache.keys.shape[0]
    gathered = (num_kv_heads, num_rows, -1, head_size)
    keys = cache.keys.index_select(1, view.slots).view(gathered)
    values = cache.values.index_select(1, view.slots).view(gathered)
    grouped = query.view(num_rows, num_kv_heads, num_q_heads // num_kv_heads, head_size)
    grouped = grouped.transpose(0, 1) * head_size**-0.5
    scores = torch.matmul(grouped, keys.transpose(2, 3))
    weights = torch.softmax(scores.masked_fill(view.hidden, _MASKED), dim=-1)
    return torch.matmul(weights, values).transpose(0, 1).reshape(num_rows, -1)


class TorchKernel:
    """Attention in plain torch, float32, on any device.

    A row's bits do not depend on the rows beside it, so that speculation gives exactly the tokens
    of plain decoding.
    """

    name = "torch"
    row_invariant = True

    def make_cache(
        self, config: ToyConfig, engine: EngineConfig, num_layers: int, device: torch.device | str
    ) -> list[LayerCache]:
        """Make one cache a layer."""
        return make_cache(config, engine, num_layers, device)

    def owner(
        self, config: ToyConfig, engine: EngineConfig, device: torch.device | str
    ) -> PagedOwner:
        """Make an owner with buffers of its own."""
        from graphshare.adapters.toy.owner import PagedOwner  # which imports this file

        del config  # no plan depends on heads here
        return PagedOwner(engine, device)

    def spec(self, config: ToyConfig, engine: EngineConfig) -> AttentionSpec:
        """Return what the states are built for."""
        return AttentionSpec(
            num_q_heads=config.num_q_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            page_size=engine.page_size,
            causal=True,
            window=-1,
            q_dtype=torch.float32,
            kv_dtype=torch.float32,
            backend=self.name,
        )

    def views(
        self, state: AttentionState, num_tokens: int, uniform_query_len: int | None
    ) -> list[KeyView]:
        """Find the slots that each row sees: :func:`key_views`."""
        return key_views(state.attn_metadata, num_tokens, uniform_query_len)

    def attend(
        self, queries: Sequence[torch.Tensor], cache: LayerCache, views: Sequence[KeyView]
    ) -> list[torch.Tensor]:
        """Attend block by block: :func:`attend`."""
        return [attend(query, cache, view) for query, view in zip(queries, views, strict=True)]
