"""What FlashInfer states cost: for each key, and shared by all of an owner's."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

import torch
from typing_extensions import Self

from graphshare.adapters.flashinfer.planner import Planner
from graphshare.adapters.flashinfer.plans import (
    Kernel,
    batch_attention_float_bytes,
    decode_float_bytes,
    fa2_float_bytes,
)
from graphshare.adapters.paged import PagedCapacity
from graphshare.adapters.paged.shape import AttentionShape

__all__ = ["FlashInferMemory", "KeyMemory", "float_bytes"]

_LEAST = 16  # FA3 uses none, but the library wants a tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyMemory:
    """What one key holds for itself.

    Args:
        device_bytes: Int workspaces.
        pinned_bytes: Page-locked host memory, from which plans are copied.
    """

    device_bytes: int
    pinned_bytes: int

    @classmethod
    def of(cls, planners: Iterable[Planner]) -> Self:
        """Sum up the planners of a key."""
        each = tuple(planners)
        return cls(
            device_bytes=sum(planner.int_workspace.numel() for planner in each),
            pinned_bytes=sum(planner.pinned_bytes for planner in each),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashInferMemory:
    """What an owner's states hold, graphs apart.

    The library by itself allocates, for each wrapper, 8 MiB on the device and 8 MiB pinned, and
    384 MiB more for each ``BatchAttention``; while a wrapper is made these exist here too.

    Args:
        keys: What each key holds for itself.
        shared: What the keys of ``batch_attention`` share.
        lists_bytes: Page lists and slots, on the device.
        lists_pinned_bytes: Page-locked host memory from which they are copied.
        float_workspace_bytes: Scratch of the kernels.
    """

    keys: Mapping[Hashable, KeyMemory]
    shared: KeyMemory
    lists_bytes: int
    lists_pinned_bytes: int
    float_workspace_bytes: int

    @property
    def device_bytes(self) -> int:
        """All of it on the device."""
        own = sum(each.device_bytes for each in self.keys.values())
        return own + self.shared.device_bytes + self.lists_bytes + self.float_workspace_bytes

    @property
    def pinned_bytes(self) -> int:
        """All of it on the host."""
        own = sum(each.pinned_bytes for each in self.keys.values())
        return own + self.shared.pinned_bytes + self.lists_pinned_bytes


def float_bytes(
    kernel: Kernel, capacity: PagedCapacity, shape: AttentionShape, device: torch.device
) -> int:
    """Bytes of the float workspace that any key of a capacity may need.

    Args:
        kernel: Which kernel.
        capacity: The capacity.
        shape: Of the layers.
        device: A GPU, whose multiprocessors count; on the CPU there are none.
    """
    num_sms = 0
    if device.type == "cuda":
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    heads = (shape.num_q_heads, shape.num_kv_heads, shape.head_size)
    if kernel == "decode":
        return max(decode_float_bytes(*heads, num_sms), _LEAST)
    if kernel == "batch_attention":
        return max(batch_attention_float_bytes(*heads[1:], num_sms), _LEAST)
    if kernel == "fa3":
        return _LEAST
    rows, reqs = capacity.max_num_tokens, capacity.max_num_reqs
    # Tiles depend on the key, and none takes more than the largest.
    return max(fa2_float_bytes(rows, min(reqs, rows), *heads, num_sms, largest_tile=True), _LEAST)
