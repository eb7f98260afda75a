"""Small things that a recording does with tensors, storages and generators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

__all__ = [
    "bytes_of",
    "each_once",
    "flat",
    "frozen",
    "generator_key",
    "poison_byte",
    "storage_key",
]


def each_once(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view with every element of an expanded tensor once."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def flat(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of nested lists and tuples, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from flat(item)


def frozen(value: Any) -> Any:
    """Copy arguments so that nothing the caller does to its own objects later shows.

    A tensor becomes another tensor object on the same memory: ``x.data = y`` after the capture
    moves ``x``, and not what was captured.
    """
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, tuple):
        return tuple(frozen(item) for item in value)
    if isinstance(value, list):
        return [frozen(item) for item in value]
    if isinstance(value, dict):
        return {name: frozen(item) for name, item in value.items()}
    return value


def storage_key(storage: torch.UntypedStorage) -> int:
    """Identify a storage for as long as it lives."""
    # data_ptr() is no identity: it is 0 for every empty storage.
    return storage._cdata


def generator_key(generator: Any) -> int:
    """Identify a generator for as long as it lives."""
    # Dispatch hands over another Python object for the same generator.
    return generator._cdata


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """View a storage as [nbytes] uint8."""
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def poison_byte(dtype: torch.dtype) -> int:
    """Return the byte that makes loud nonsense when a tensor is filled with it."""
    if dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        return 0x80
    if dtype.is_floating_point or dtype.is_complex:
        return 0xFF
    return 0x01 if dtype is torch.bool else 0xA5
