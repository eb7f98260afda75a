"""What layouts and differences are made of, as seen from outside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["HostLeaf", "LayoutDifference", "TensorLeaf"]


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """A tensor whose place a capture freezes.

    Attributes:
        path: Where in the state.
        address: ``data_ptr()``, in bytes; 0 for a tensor of size zero.
        shape: Its sizes.
        stride: Its strides, in elements.
        dtype: Its dtype.
        device: Its device; the CPU for a pinned tensor in the state of an accelerator's pool.
        rule: The rule for its path, never ``"any"``.
    """

    path: str
    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    rule: str = "equal"


@dataclass(frozen=True, slots=True)
class HostLeaf:
    """A value on the host that a capture freezes.

    Attributes:
        path: Where in the state.
        value: The value; for host data, ``torch.Tensor`` or the array's type.
        rule: The rule for its path, never ``"any"``.
    """

    path: str
    value: Any
    rule: str = "equal"


@dataclass(frozen=True, slots=True)
class LayoutDifference:
    """One thing in which a state differs from what was captured.

    Attributes:
        path: The leaf's path, or the container's whose type differs.
        field: ``"address"``, ``"shape"``, ``"stride"``, ``"dtype"`` or ``"device"`` of a tensor;
            ``"presence"`` of a leaf that came or went, a tensor for another value too;
            ``"type"`` or ``"value"`` of a host value, ``"type"`` of a container.
        expected: What was captured. For ``presence``, the leaf, the type
            of a container, or ``None``.
        got: What was found, likewise.
        rule: The rule that it breaks.
    """

    path: str
    field: str
    expected: Any
    got: Any
    rule: str = "equal"
