"""The layout of FlashAttention 3's scheduler metadata, as plain arithmetic.

The metadata are int32: vectors with an entry for each request, each padded to a multiple of four,
and a counter of tiles at the end. Which vectors there are depends on the build and on how the
launch resolves its mask; neither the tensor nor its size says which. A kernel that is handed the
vectors of another launch misreads them, in silence where the sizes agree.

Sources: ``flash_api.cpp`` (``mha_fwd_get_scheduler_metadata``, ``mha_fwd``), ``tile_size.h``,
``heuristics.h`` and ``flash_prepare_scheduler.cu`` in ``hopper/`` of vllm-project/flash-attention
617264c and of Dao-AILab/flash-attention 0251105a, for compute capability 9.0. vLLM's layout was
compared with the metadata of vLLM 0.25.1's build on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Layout", "Mask", "Resolved", "Vector", "metadata_size", "padded", "resolve"]

Layout = Literal["vllm", "upstream"]
"""The layout of vLLM's build, or of the original (``flash_attn_interface``, ``flash_attn_3``)."""

Mask = Literal["full", "causal", "local"]
"""What a launch makes of ``causal`` and the window."""

Vector = Literal["query_len", "num_splits", "num_m_blocks", "request", "num_heads_in_l2"]
"""A vector of the metadata.

``query_len``: rows of a request, times the query heads of a KV head if those are packed.
``num_m_blocks``: the same, in tiles. ``num_splits``: parts into which the keys of a request are
split. ``request``: the requests, in the order in which they are run. ``num_heads_in_l2``: heads
whose keys are in the cache at a time.
"""

# Up to as many requests one thread block plans; beyond, nothing is split.
_MAX_PLANNED_TOGETHER = 992


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a launch makes of its arguments, and its metadata depend on.

    Args:
        mask: Of the launch; ``causal`` is dropped where it masks nothing.
        packed: Whether the query heads of a KV head are rows of one tile.
        rows: Query rows of a tile.
        vectors: The metadata's, in order.
    """

    mask: Mask
    packed: bool
    rows: int
    vectors: tuple[Vector, ...]


def resolve(
    layout: Layout,
    *,
    num_reqs: int,
    max_query_len: int,
    max_seq_len: int,
    gqa_ratio: int,
    head_size: int,
    page_size: int,
    causal: bool,
    window: int,
    num_splits: int,
    packs_always: bool,
) -> Resolved:
    """Return what a launch over a paged cache makes of its arguments.

    Args:
        layout: Whose build.
        num_reqs: Requests, padding included.
        max_query_len: Most rows of a request, as the launch is told.
        max_seq_len: Most tokens of a request, as the launch is told.
        gqa_ratio: Query heads of a KV head.
        head_size: Elements of a head.
        page_size: Tokens of a page.
        causal: As the launch is told.
        window: Tokens before a row's own, -1 for all.
        num_splits: As the launch is told; at least 1.
        packs_always: Whether the build has no kernels that do not pack
            (``FLASHATTENTION_PACKGQA_ONLY``).
    """
    mask = _mask(max_query_len, max_seq_len, head_size, causal=causal, window=window)
    rows = 192 if head_size <= 96 else 128
    packed = (
        packs_always
        or num_splits > 1
        or _packs(mask, rows, max_query_len, gqa_ratio, head_size, page_size)
    )
    vectors: list[Vector]
    if layout == "vllm":
        vectors = ["query_len"]
        if num_splits > 1 and num_reqs <= _MAX_PLANNED_TOGETHER:
            vectors.append("num_splits")
    else:
        vectors = ["num_splits", "num_m_blocks"]
        if mask != "local":
            vectors.append("request")
    if mask != "full":
        vectors.append("num_heads_in_l2")
    return Resolved(mask, packed, rows, tuple(vectors))


def metadata_size(num_reqs: int, num_vectors: int) -> int:
    """Return the int32 elements of the metadata; a launch takes no other size."""
    return padded(num_reqs) * num_vectors + 1


def padded(num_reqs: int) -> int:
    """Return the stride of the vectors: they begin at multiples of 16 bytes."""
    return -(-num_reqs // 4) * 4


def _mask(
    max_query_len: int, max_seq_len: int, head_size: int, *, causal: bool, window: int
) -> Mask:
    left, right = (-1, -1) if window < 0 else (window, 0 if causal else -1)
    if left >= max_seq_len - 1:
        left = -1
    if right >= max_query_len - 1:
        right = -1
    if max_query_len == 1 and left == -1 and right == -1 and not 64 < head_size <= 128:
        # One row sees every key either way. With a paged cache these head sizes stay causal, for
        # the sake of their tiles.
        causal = False
    if causal:
        right = 0
    if left < 0 and right == 0:
        return "causal"
    return "full" if left < 0 and right < 0 else "local"


def _packs(
    mask: Mask, rows: int, max_query_len: int, gqa_ratio: int, head_size: int, page_size: int
) -> bool:
    """Whether a launch that does not split packs by its own choice."""
    loads_pages_whole = (
        mask != "local"
        and page_size % _keys_of_a_tile(mask, head_size) == 0
        and max_query_len * gqa_ratio > rows
    )
    if not loads_pages_whole:
        return True
    if gqa_ratio == 1:
        return False
    if max_query_len <= rows:
        return True
    return _filled(max_query_len, rows) < 0.9 * _filled(max_query_len * gqa_ratio, rows)


def _filled(query_rows: int, rows: int) -> float:
    return query_rows / (-(-query_rows // rows) * rows)


def _keys_of_a_tile(mask: Mask, head_size: int) -> int:
    """Key rows of a tile, for two-byte elements and keys that are loaded by whole pages."""
    if head_size <= 64:
        return 128 if mask == "causal" else 192
    if head_size <= 96:
        return 144
    if head_size <= 128:
        return 128 if mask == "causal" else 176
    return 112 if head_size <= 192 else 80
