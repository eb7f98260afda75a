"""The one place that reaches into torch: a check in C++ of what many tensors are like.

``torch.compile`` guards its inputs with ``TensorGuards``, which compares all of a tensor but its
address at a third of the cost of asking for its attributes from Python. It is no public API, so it
is tried before it is trusted, and the callers do without it where it does not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphshare.memory import plain_tensors

__all__ = ["Guard", "guard_maker"]

Guard = Callable[..., bool]
"""``guard(*tensors)``: whether they are like those that it was made from."""

_tried: list[Callable[[Sequence[torch.Tensor]], Guard]] = []


def guard_maker() -> Callable[[Sequence[torch.Tensor]], Guard] | None:
    """What makes guards, or ``None`` if this torch has none that can be trusted.

    A guard made from tensors takes as many, no two of them one object, and is true only if each
    has the very type, sizes, strides, dtype, device and ``requires_grad`` of its counterpart. It
    also compares dispatch keys as the thread's modes leave them, so outside of an
    ``inference_mode`` in which it was made it is false: it may refuse what is right. It keeps no
    tensor. It knows no addresses.

    Never call it with a nested tensor: the C++ exception would end the process.
    """
    if not _tried:
        try:
            with plain_tensors():
                if _holds(_make):
                    _tried.append(_make)
        except Exception:  # noqa: BLE001 - whatever is not there or behaves otherwise: do without
            return None
    return _tried[0] if _tried else None


def _make(tensors: Sequence[torch.Tensor]) -> Guard:
    private: Any = torch._C  # torch._dynamo itself would take seconds to import
    guards = private._dynamo.guards
    return guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def _holds(make: Callable[[Sequence[torch.Tensor]], Guard]) -> bool:
    """Whether guards tell tensors apart in all that a layout has, and only then."""
    first = torch.empty((2, 3), dtype=torch.float32, device="cpu")
    second = torch.empty((4,), dtype=torch.int64, device="cpu")
    guard = make((first, second))
    others = [
        torch.nn.Parameter(first, requires_grad=False),
        first.view(torch.int32),
        first.t(),
        first.as_strided((2, 3), (1, 2)),
        first[:, :2],
        first[:1],
        first.view(-1),
        first[None],
        torch.empty((2, 3), dtype=torch.float32, device="meta"),
        None,
    ]
    return (
        guard(first, second) is True
        and guard(first[:], second[:]) is True
        and not any(guard(other, second) is not False for other in others)
        and guard(first, second[1:]) is False
        and guard(first, second.view(torch.float64)) is False
    )
