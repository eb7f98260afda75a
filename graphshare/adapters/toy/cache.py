"""The paged KV cache: its tensors, and who holds which page."""

from __future__ import annotations

import torch

from graphshare.adapters.toy.config import EngineConfig, ToyConfig

__all__ = ["SCRATCH_PAGE", "LayerCache", "PageAllocator", "make_cache"]

SCRATCH_PAGE = 0
"""Never given to a request: padded rows write there, and masked reads land there."""


class LayerCache:
    """Keys and values of one layer.

    Args:
        config: Heads and head size.
        engine: Pages and page size.
        device: Where it lies.

    Attributes:
        keys: ``[num_kv_heads, num_pages * page_size, head_size]`` float32; address fixed. Heads
            come first so that gathered rows are ready for a batched product.
        values: The same shape.
    """

    def __init__(self, config: ToyConfig, engine: EngineConfig, device: torch.device | str) -> None:
        shape = (config.num_kv_heads, engine.num_pages * engine.page_size, config.head_size)
        # Zeros, not empty: a masked read lands in the scratch page, and 0 * NaN would be NaN.
        self.keys = torch.zeros(shape, device=device)
        self.values = torch.zeros(shape, device=device)

    def write(self, keys: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store one row for each token.

        Args:
            keys: ``[num_tokens, num_kv_heads, head_size]``.
            values: The same shape.
            slot_mapping: ``[num_tokens]`` int64; padded rows name a slot of the scratch page.
        """
        self.keys.index_copy_(1, slot_mapping, keys.transpose(0, 1))
        self.values.index_copy_(1, slot_mapping, values.transpose(0, 1))


def make_cache(
    config: ToyConfig, engine: EngineConfig, num_layers: int, device: torch.device | str
) -> list[LayerCache]:
    """Make one cache a layer; all layers, the draft's too, are addressed by the same slots."""
    return [LayerCache(config, engine, device) for _ in range(num_layers)]


class PageAllocator:
    """Free pages, lowest first, so that a run can be repeated exactly.

    Args:
        num_pages: All pages, the scratch page included.
    """

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages - 1, SCRATCH_PAGE, -1))

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` pages, or none at all (``None``) when fewer are free."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def release(self, pages: list[int]) -> None:
        """Give pages back."""
        self._free.extend(pages)
        self._free.sort(reverse=True)
