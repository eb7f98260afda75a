"""FlashAttention 2, as in flash-attn's own package: its state, and one call of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from graphshare.adapters.flash_attn.library import find_flash_attention_2
from graphshare.adapters.flash_attn.specs import FlashAttention2Spec
from graphshare.adapters.paged import (
    PagedBatch,
    PagedBuffers,
    PagedCapacity,
    dummy_batch,
)
from graphshare.adapters.paged.arguments import check_capacity, check_module, check_shape
from graphshare.adapters.paged.batch import check_lengths
from graphshare.adapters.paged.shape import AttentionShape
from graphshare.arguments import whole_number
from graphshare.device import device_of
from graphshare.owner import Phase
from graphshare.state import AttentionState

if TYPE_CHECKING:
    from graphshare.descriptor import BatchDescriptor

__all__ = ["FlashAttention2", "FlashAttention2Metadata", "FlashAttention2Owner"]


@dataclass(frozen=True, slots=True, eq=False)
class FlashAttention2Metadata:
    """What the launches of one key read; addresses and host values are baked in.

    Args:
        query_start_loc: ``[num_reqs + 1]`` int32: first row of each request, and the rows. ``None``
            for uniform keys with no other rows, whose launches do not read it.
        kv_start_loc: ``[num_reqs + 1]`` int32: running sum of ``seq_lens``; ``None`` likewise.
        seq_lens: ``[num_reqs]`` int32: tokens of each request in the cache, 0 for padding.
        block_table: ``[num_reqs, max_pages]`` int32.
        uniform_query_len: Rows of every request, ``None`` for mixed keys.
        max_query_len: Rows that a request may have. Sets the grid: longer ones would be cut.
        max_seq_len: Tokens that a request may have. Over a paged cache longer ones would be cut
            (``csrc/flash_attn/src/flash_fwd_kernel.h`` splits this length), so it is the capacity.
    """

    query_start_loc: torch.Tensor | None
    kv_start_loc: torch.Tensor | None
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    uniform_query_len: int | None
    max_query_len: int
    max_seq_len: int


class FlashAttention2:
    """The attention of one model by FlashAttention 2: all that a borrower needs.

    Args:
        capacity: The lender's.
        shape: Heads and mask of the model's layers.
        num_splits: Parts into which the keys of a uniform key's requests are split; 0 lets the
            library choose, from sizes that the capture fixes.
        module: Where flash-attn is, if not in its usual place.

    Raises:
        ModuleNotFoundError: flash-attn is not installed.
        UnsupportedBuildError: It lacks a function.
        TypeError: An argument is of another type.
        ValueError: For pages that are not a multiple of 256 tokens
            (``csrc/flash_attn/flash_api.cpp``), or ``num_splits`` below 0.
    """

    def __init__(
        self,
        capacity: PagedCapacity,
        shape: AttentionShape,
        *,
        num_splits: int = 0,
        module: str | ModuleType | None = None,
    ) -> None:
        check_capacity("FlashAttention 2", capacity)
        check_shape("FlashAttention 2: shape", shape)
        check_module("FlashAttention 2", module)
        if capacity.page_size % 256:
            raise ValueError(
                f"page_size: expected a multiple of 256, got {capacity.page_size}. flash-attn's "
                "kernels load whole tiles of a page. Use larger pages, or FlashAttention 3"
            )
        self._num_splits = whole_number("num_splits", num_splits, 0)
        self.capacity = capacity
        self.shape = shape
        self._library = find_flash_attention_2(module)

    @property
    def spec(self) -> FlashAttention2Spec:
        """What a lender's and a borrower's pool are given to be compared by."""
        shape = self.shape
        return FlashAttention2Spec(
            num_q_heads=shape.num_q_heads,
            num_kv_heads=shape.num_kv_heads,
            head_size=shape.head_size,
            page_size=self.capacity.page_size,
            causal=shape.causal,
            window=shape.window,
            q_dtype=shape.dtype,
            kv_dtype=shape.dtype,
            backend=self._library.backend,
        )

    def run(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: FlashAttention2Metadata,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend; to be called in the captured forward, once a layer.

        Args:
            query: ``[key.num_tokens, num_q_heads, head_size]``, on the GPU.
            key_cache: ``[num_pages, page_size, num_kv_heads, head_size]``, this step's keys
                included.
            value_cache: As the keys.
            metadata: The state's ``attn_metadata``, one's own or a lender's.
            out: Where to write, shaped as ``query``; the library allocates, and this copies.

        Returns:
            Shaped as ``query``. Rows past the batch are zero or, in a mixed key, not written.

        Raises:
            ValueError: For a query of other rows than the metadata was written for.
        """
        shape = self.shape
        options = {
            "softmax_scale": shape.softmax_scale,
            "causal": shape.causal,
            "window_size": shape.window_size,
            "softcap": shape.softcap,
            "block_table": metadata.block_table,
        }
        query_len = metadata.uniform_query_len
        num_reqs = metadata.seq_lens.shape[0]
        if query_len is not None and num_reqs * query_len == query.shape[0]:
            result = self._library.with_kvcache(
                query.view(num_reqs, query_len, *query.shape[1:]),
                key_cache,
                value_cache,
                cache_seqlens=metadata.seq_lens,
                num_splits=self._num_splits,
                **options,
            ).view(query.shape)
        elif metadata.query_start_loc is None or metadata.kv_start_loc is None:
            raise ValueError(
                f"query: expected {query_len} rows of each of {num_reqs} requests, got "
                f"{query.shape[0]} in all. Rows would be taken for another request's. Give it "
                "the rows of the key"
            )
        else:
            # For one row a request the library takes the rows for the requests, and refuses where
            # there are more. A grid for two costs nothing.
            result = self._library.varlen(
                query,
                key_cache,
                value_cache,
                metadata.query_start_loc,
                metadata.kv_start_loc,
                max(metadata.max_query_len, 2),
                metadata.max_seq_len,
                **options,
            )
        return result if out is None else out.copy_(result)


class FlashAttention2Owner(FlashAttention2):
    """Writes the states of one model for FlashAttention 2.

    Args:
        capacity: What its buffers are sized for.
        shape: Heads and mask of the model's layers.
        device: Of the states, a GPU.
        num_splits: As in :class:`FlashAttention2`.
        module: As in :class:`FlashAttention2`.

    Raises:
        RuntimeError: The device is not there.
        TypeError, ValueError: For an argument that cannot be meant, as :class:`FlashAttention2`.
        ModuleNotFoundError, UnsupportedBuildError: As :class:`FlashAttention2`.
    """

    def __init__(
        self,
        capacity: PagedCapacity,
        shape: AttentionShape,
        device: torch.device | str,
        *,
        num_splits: int = 0,
        module: str | ModuleType | None = None,
    ) -> None:
        device = device_of("FlashAttention 2: device", device)
        super().__init__(capacity, shape, num_splits=num_splits, module=module)
        self._buffers = PagedBuffers(capacity, device)
        self._states: dict[BatchDescriptor, AttentionState] = {}

    def build(self, key: BatchDescriptor, batch: PagedBatch | None, phase: Phase) -> AttentionState:
        """Write ``batch`` for ``key``; without one, requests that fill the key.

        Raises:
            TypeError: For what is no batch, or no descriptor; nothing is written then.
            ValueError: For a batch that the key or the capacity does not hold, or, in a uniform
                key, requests of other lengths; nothing is written then.
        """
        del phase
        if batch is None:
            batch = dummy_batch(key, self.capacity)
        check_lengths(key, batch)
        query_len = key.uniform_query_len
        starts = query_len is None or key.num_tokens != query_len * self.capacity.num_reqs(key)
        views = self._buffers.write(key, batch, starts=starts)
        state = self._states.get(key)
        if state is None:
            metadata = FlashAttention2Metadata(
                query_start_loc=views.query_start_loc if starts else None,
                kv_start_loc=views.kv_start_loc if starts else None,
                seq_lens=views.seq_lens,
                block_table=views.block_table,
                uniform_query_len=query_len,
                max_query_len=self.capacity.max_query_len(key),
                max_seq_len=self.capacity.max_pages * self.capacity.page_size,
            )
            state = self._states[key] = AttentionState(metadata, views.slot_mapping)
        return state

    def writes(self, key: BatchDescriptor) -> Iterable[torch.Tensor]:
        """Return what a build for ``key`` writes."""
        yield self._buffers.written(key)

    def live_rows(self, key: BatchDescriptor, batch: PagedBatch) -> Mapping[str, int]:
        """Return how many leading rows of each leaf a batch uses."""
        del key
        return {
            "*_start_loc": batch.num_reqs + 1,
            "*.seq_lens": batch.num_reqs,
            "*.block_table": batch.num_reqs,
            "slot_mappings": batch.num_tokens,
        }
