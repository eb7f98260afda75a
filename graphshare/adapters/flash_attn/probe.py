"""Asking an installed build of FlashAttention 3 how it lays out its plans."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from graphshare.adapters.flash_attn.library import FlashAttention3Library, UnsupportedBuildError
from graphshare.adapters.flash_attn.schedule import metadata_size, resolve

__all__ = ["check_sizes", "packs_always"]

_NUM_REQS = 5  # no multiple of four, so that the padding of vectors shows
_MAX_SEQ_LEN = 4096


def packs_always(library: FlashAttention3Library, device: torch.device) -> bool:
    """Whether the build packs where its heuristics would not.

    Built with ``FLASHATTENTION_PACKGQA_ONLY`` it has no kernels that do not; vLLM 0.25.1's is.
    Only vLLM's layout says: its first vector counts rows, times the query heads of a KV head if
    they are packed.
    """
    if library.layout != "vllm":
        return False
    heads, query_len = 2, 1024  # whole tiles either way, so there is nothing to gain by packing
    plan = _plan(library, device, query_len, heads, 128, 256, causal=True, num_splits=1)
    return int(plan[0]) == heads * query_len


def check_sizes(library: FlashAttention3Library, device: torch.device, packs: bool) -> None:
    """Plan a few launches, and compare the sizes with the layout.

    Layouts that are known to exist differ in at least one of them.

    Raises:
        UnsupportedBuildError: A size differs, or the function takes other arguments.
    """
    for query_len, causal, num_splits in product((1, 4), (False, True), (1, 8)):
        resolved = resolve(
            library.layout,
            num_reqs=_NUM_REQS,
            max_query_len=query_len,
            max_seq_len=_MAX_SEQ_LEN,
            gqa_ratio=4,
            head_size=64,
            page_size=256,
            causal=causal,
            window=-1,
            num_splits=num_splits,
            packs_always=packs,
        )
        expected = metadata_size(_NUM_REQS, len(resolved.vectors))
        plan = _plan(library, device, query_len, 4, 64, 256, causal=causal, num_splits=num_splits)
        if plan.shape != (expected,):
            raise library.refuse(
                expected,
                plan.numel(),
                of=f"a plan ({_NUM_REQS} requests, {query_len} rows, {causal=}, {num_splits=})",
            )


def _plan(
    library: FlashAttention3Library,
    device: torch.device,
    query_len: int,
    heads: int,
    head_size: int,
    page_size: int,
    **options: Any,
) -> torch.Tensor:
    starts = torch.arange(_NUM_REQS + 1, dtype=torch.int32, device=device) * query_len
    try:
        return library.get_scheduler_metadata(
            batch_size=_NUM_REQS,
            max_seqlen_q=query_len,
            max_seqlen_k=_MAX_SEQ_LEN,
            num_heads_q=heads,
            num_heads_kv=1,
            headdim=head_size,
            cache_seqlens=torch.full_like(starts[1:], _MAX_SEQ_LEN),
            qkv_dtype=torch.bfloat16,
            cu_seqlens_q=starts,
            page_size=page_size,
            **options,
        )
    except TypeError as error:
        raise UnsupportedBuildError(
            f"{library.backend}: get_scheduler_metadata",
            expected="the arguments that this adapter knows",
            got=str(error),
            consequence="States for it cannot be built",
            remedy="Use a release of the library that this adapter was tested with",
            backend=library.backend,
        ) from error
