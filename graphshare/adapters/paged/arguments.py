"""What owners and borrowers are made of, looked at before a library is imported or memory taken."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NoReturn

import torch

from graphshare.adapters.paged.batch import PagedBatch, PagedCapacity
from graphshare.adapters.paged.shape import AttentionShape
from graphshare.arguments import wrong_type

__all__ = ["check_capacity", "check_devices", "check_module", "check_shape"]


def check_capacity(what: str, capacity: Any) -> None:
    """Refuse what is no capacity.

    Args:
        what: Who was given it.
        capacity: The argument.

    Raises:
        TypeError: It is of another type.
    """
    if not isinstance(capacity, PagedCapacity):
        raise wrong_type(
            f"{what}: capacity", "a PagedCapacity", capacity, "It comes before the others."
        )


def check_shape(what: str, shape: Any) -> None:
    """Refuse what is no shape of a model's layers.

    Args:
        what: Who was given it, and as what.
        shape: The argument.

    Raises:
        TypeError: It is of another type.
    """
    if not isinstance(shape, AttentionShape):
        raise wrong_type(what, "an AttentionShape", shape)


def check_devices(batch: PagedBatch, device: torch.device) -> None:
    """Refuse a batch whose page table or slots are neither on the CPU nor where they are to go.

    Args:
        batch: The batch.
        device: Of the buffers.

    Raises:
        ValueError: One of them is elsewhere.
    """
    table, slots = batch.block_table, batch.slot_mapping
    if not table.is_cpu and table.device != device:
        _refuse("block_table", table, device)
    if slots is not None and not slots.is_cpu and slots.device != device:
        _refuse("slot_mapping", slots, device)


def _refuse(name: str, tensor: torch.Tensor, device: torch.device) -> NoReturn:
    wanted = "the CPU" if device.type == "cpu" else f"the CPU or {device}"
    raise ValueError(
        f"{name}: expected a tensor on {wanted}, got {tensor.device}. The buffers are on {device}"
    )


def check_module(what: str, module: Any) -> None:
    """Refuse what names no module.

    Args:
        what: Who was given it.
        module: The argument.

    Raises:
        TypeError: It is neither a module, nor the name of one, nor ``None``.
    """
    if module is not None and not isinstance(module, (str, ModuleType)):
        raise wrong_type(f"{what}: module", "a module or its name", module)
