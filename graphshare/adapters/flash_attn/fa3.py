"""FlashAttention 3, vLLM's build or the original's: its planned state, and one call of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import torch

from graphshare.adapters.flash_attn.library import (
    find_flash_attention_3,
    places_of_flash_attention_3,
)
from graphshare.adapters.flash_attn.probe import check_sizes, packs_always
from graphshare.adapters.flash_attn.schedule import Resolved, metadata_size, padded, resolve
from graphshare.adapters.flash_attn.specs import FlashAttention3Spec
from graphshare.adapters.paged import (
    PagedBatch,
    PagedBuffers,
    PagedCapacity,
    dummy_batch,
)
from graphshare.adapters.paged.arguments import check_capacity, check_shape
from graphshare.adapters.paged.shape import AttentionShape
from graphshare.arguments import whole_number
from graphshare.device import device_of
from graphshare.owner import Phase
from graphshare.state import AttentionState

if TYPE_CHECKING:
    from graphshare.descriptor import BatchDescriptor

__all__ = ["FlashAttention3", "FlashAttention3Metadata", "FlashAttention3Owner"]

_MAX_SPLITS = 256  # hopper/flash_api.cpp, mha_fwd


@dataclass(frozen=True, slots=True, eq=False)
class FlashAttention3Metadata:
    """What the launches of one key read; addresses and host values are baked in.

    Args:
        query_start_loc: ``[num_reqs + 1]`` int32: first row of each request, and the rows.
        seq_lens: ``[num_reqs]`` int32: tokens of each request in the cache, 0 for padding.
        block_table: ``[num_reqs, max_pages]`` int32.
        scheduler_metadata: int32, of the one size that a launch for this key takes. Each launch
            counts tiles in its last element and sets it back to 0, so two launches that read it
            must never run at the same time: keep them on one stream.
        max_query_len: Rows that a request may have.
        max_seq_len: Tokens that a request may have.
        num_splits: Parts into which the keys of a request are split at most; the same number in
            the plan and in every launch.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    scheduler_metadata: torch.Tensor
    max_query_len: int
    max_seq_len: int
    num_splits: int


class FlashAttention3:
    """The attention of one model by FlashAttention 3: all that a borrower needs.

    Args:
        capacity: The lender's.
        shape: Heads and mask of the model's layers.
        device: A GPU of compute capability 9.0, on which the library is asked how it plans; by
            default the current one.
        build: Whose build: ``"vllm"``, ``"upstream"`` (the packages ``flash_attn_interface`` and
            ``flash_attn_3``), or ``"auto"`` for the first that is installed.
        module: Where that build is, if not in its usual place.

    Raises:
        ModuleNotFoundError: It is not installed.
        UnsupportedBuildError: Its plans are not of the sizes that this adapter computes.
        TypeError: An argument is of another type.
        ValueError: For another ``build``, a module without one, or a device that torch does not
            know.
        RuntimeError: The device is not there.
    """

    def __init__(
        self,
        capacity: PagedCapacity,
        shape: AttentionShape,
        *,
        device: torch.device | str | None = None,
        build: Literal["auto", "vllm", "upstream"] = "auto",
        module: str | ModuleType | None = None,
    ) -> None:
        check_capacity("FlashAttention 3", capacity)
        check_shape("FlashAttention 3: shape", shape)
        places = places_of_flash_attention_3(build, module)
        self.capacity = capacity
        self.shape = shape
        self.device = device_of("FlashAttention 3: device", "cuda" if device is None else device)
        # Both sides of a launch resolve the window by this length; the original's launch takes it
        # from the width of the block table.
        self._max_seq_len = capacity.max_pages * capacity.page_size
        self._library = find_flash_attention_3(places)
        self._packs_always = packs_always(self._library, self.device)
        check_sizes(self._library, self.device, self._packs_always)

    @property
    def spec(self) -> FlashAttention3Spec:
        """What a lender's and a borrower's pool are given to be compared by."""
        shape = self.shape
        return FlashAttention3Spec(
            num_q_heads=shape.num_q_heads,
            num_kv_heads=shape.num_kv_heads,
            head_size=shape.head_size,
            page_size=self.capacity.page_size,
            causal=shape.causal,
            window=shape.window,
            q_dtype=shape.dtype,
            kv_dtype=shape.dtype,
            backend=self._library.backend,
            layout=self._library.layout,
            packs_always=self._packs_always,
            max_seq_len=self._max_seq_len,
            max_query_len=self.capacity.max_num_tokens,
        )

    def run(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: FlashAttention3Metadata,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend; to be called in the captured forward, once a layer.

        Args:
            query: ``[key.num_tokens, num_q_heads, head_size]``, on the GPU.
            key_cache: ``[num_pages, page_size, num_kv_heads, head_size]``, this step's keys
                included.
            value_cache: As the keys.
            metadata: The state's ``attn_metadata``, one's own or a lender's.
            out: Where to write, shaped as ``query``; only vLLM's build writes there directly.

        Returns:
            Shaped as ``query``. Rows past the batch are not written.
        """
        shape = self.shape
        options: dict[str, Any] = {
            "cu_seqlens_q": metadata.query_start_loc,
            "max_seqlen_q": metadata.max_query_len,
            "softmax_scale": shape.softmax_scale,
            "causal": shape.causal,
            "window_size": shape.window_size,
            "softcap": shape.softcap,
            "scheduler_metadata": metadata.scheduler_metadata,
            "num_splits": metadata.num_splits,
        }
        launch = self._library.launch
        if self._library.layout == "vllm":
            return launch(
                query,
                key_cache,
                value_cache,
                max_seqlen_k=metadata.max_seq_len,
                seqused_k=metadata.seq_lens,
                block_table=metadata.block_table,
                out=out,
                fa_version=3,
                **options,
            )
        result = launch(
            query,
            key_cache,
            value_cache,
            cache_seqlens=metadata.seq_lens,
            page_table=metadata.block_table,
            **options,
        )
        return result if out is None else out.copy_(result)

    def _resolve(self, num_reqs: int, max_query_len: int, num_splits: int) -> Resolved:
        shape = self.shape
        return resolve(
            self._library.layout,
            num_reqs=num_reqs,
            max_query_len=max_query_len,
            max_seq_len=self._max_seq_len,
            gqa_ratio=shape.num_q_heads // shape.num_kv_heads,
            head_size=shape.head_size,
            page_size=self.capacity.page_size,
            causal=shape.causal,
            window=shape.window,
            num_splits=num_splits,
            packs_always=self._packs_always,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """What is the same in every build for one key.

    Args:
        arguments: Of ``get_scheduler_metadata``.
        size: Elements of the metadata.
        vectors: ``[vectors, num_reqs]``, the entries of the buffer that a launch reads.
        state: What a build returns: its addresses, and what it bakes in, never change.
    """

    arguments: Mapping[str, Any]
    size: int
    vectors: torch.Tensor
    state: AttentionState


class FlashAttention3Owner(FlashAttention3):
    """Writes the states of one model for FlashAttention 3.

    Plans and launches are told the capacity as the most tokens of a request, so no batch is
    longer than what was captured.

    Args:
        capacity: What its buffers are sized for.
        shape: Heads and mask of the model's layers.
        device: Of the states.
        build: As in :class:`FlashAttention3`.
        module: As in :class:`FlashAttention3`.
        num_splits: Parts into which the keys of a request are split at most; each batch's plan
            chooses within it. A launch allocates ``num_splits * num_tokens * num_q_heads *
            (head_size + 1)`` float32 elements, inside the graph's memory.
        max_split_tokens: Keys of more rows than this do not split: their rows fill the GPU, and
            what splits need grows with them.

    Raises:
        ValueError: For ``num_splits`` below 1 (a choice of the library's would differ from the
            captured one) or above 256, and as :class:`FlashAttention3`.
        TypeError, RuntimeError: As :class:`FlashAttention3`.
        ModuleNotFoundError, UnsupportedBuildError: As :class:`FlashAttention3`.
    """

    def __init__(
        self,
        capacity: PagedCapacity,
        shape: AttentionShape,
        device: torch.device | str,
        *,
        build: Literal["auto", "vllm", "upstream"] = "auto",
        module: str | ModuleType | None = None,
        num_splits: int = 16,
        max_split_tokens: int = 512,
    ) -> None:
        self._num_splits = whole_number("num_splits", num_splits, 1, _MAX_SPLITS)
        self._max_split_tokens = whole_number("max_split_tokens", max_split_tokens, 0)
        # None would stand for the current device: an owner is told where its states lie.
        device = device_of("FlashAttention 3: device", device)
        super().__init__(capacity, shape, device=device, build=build, module=module)
        self._buffers = PagedBuffers(capacity, self.device)
        most = padded(capacity.max_num_reqs) * 4 + 1  # no layout has more vectors
        self._schedule = torch.zeros(most, dtype=torch.int32, device=self.device)
        self._plans: dict[BatchDescriptor, _Plan] = {}

    def build(self, key: BatchDescriptor, batch: PagedBatch | None, phase: Phase) -> AttentionState:
        """Write and plan ``batch`` for ``key``; without one, requests that fill the key.

        Raises:
            TypeError: For what is no batch, or no descriptor; nothing is written then.
            ValueError: For a batch that the key or the capacity does not hold; nothing is written
                then.
            UnsupportedBuildError: The library's plan has not the size that a launch takes.
        """
        del phase
        self._buffers.write(key, dummy_batch(key, self.capacity) if batch is None else batch)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(key)
        new = self._library.get_scheduler_metadata(**plan.arguments)
        if new.shape[0] != plan.size:
            raise self._library.refuse(plan.size, new.shape[0], key=key)
        # Entries between the vectors are undefined in a new plan, and so would be the rest of the
        # buffer. A launch reads neither; but contents that no batch determines cannot be compared.
        self._schedule.zero_()
        plan.vectors.copy_(new[:-1].view(plan.vectors.shape[0], -1)[:, : plan.vectors.shape[1]])
        return plan.state

    def writes(self, key: BatchDescriptor) -> Iterable[torch.Tensor]:
        """Return what a build for ``key`` writes: its buffers, and all of the plans' memory."""
        yield self._buffers.written(key)
        yield self._schedule

    def live_rows(self, key: BatchDescriptor, batch: PagedBatch) -> Mapping[str, int]:
        """Return how many leading rows of each leaf a batch uses."""
        return {
            "*.query_start_loc": batch.num_reqs + 1,
            "*.seq_lens": batch.num_reqs,
            "*.block_table": batch.num_reqs,
            "*.scheduler_metadata": self._plans[key].size if key in self._plans else 0,
            "slot_mappings": batch.num_tokens,
        }

    def _plan(self, key: BatchDescriptor) -> _Plan:
        shape = self.shape
        num_reqs = self.capacity.num_reqs(key)
        num_splits = self._num_splits if key.num_tokens <= self._max_split_tokens else 1
        max_query_len = self.capacity.max_query_len(key)
        vectors = len(self._resolve(num_reqs, max_query_len, num_splits).vectors)
        entries = self._schedule[: padded(num_reqs) * vectors].view(vectors, -1)
        size = metadata_size(num_reqs, vectors)
        views = self._buffers.views(key)
        metadata = FlashAttention3Metadata(
            query_start_loc=views.query_start_loc,
            seq_lens=views.seq_lens,
            block_table=views.block_table,
            scheduler_metadata=self._schedule[:size],
            max_query_len=max_query_len,
            max_seq_len=self._max_seq_len,
            num_splits=num_splits,
        )
        return _Plan(
            {
                "batch_size": num_reqs,
                "max_seqlen_q": max_query_len,
                "max_seqlen_k": self._max_seq_len,
                "num_heads_q": shape.num_q_heads,
                "num_heads_kv": shape.num_kv_heads,
                "headdim": shape.head_size,
                "qkv_dtype": shape.dtype,
                "page_size": self.capacity.page_size,
                "causal": shape.causal,
                "window_size": shape.window_size,
                "has_softcap": shape.softcap > 0,
                "num_splits": num_splits,
                "cache_seqlens": views.seq_lens,
                "cu_seqlens_q": views.query_start_loc,
            },
            size,
            entries[:, :num_reqs],
            AttentionState(metadata, views.slot_mapping),
        )
