"""Plain integers as the int32 tensors that kernels read."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch

from graphshare.arguments import wrong_type

__all__ = ["LARGEST", "integers", "rows_of", "tensor_of"]

LARGEST = (1 << 31) - 1
"""Lengths, pages and starts are int32 to the kernels."""


def integers(name: str, values: Any) -> array[int]:
    """Return a sequence of integers of 32 bits.

    Args:
        name: Of the argument.
        values: The argument.

    Raises:
        TypeError: It is no sequence, or something in it is no integer.
        ValueError: One of them is larger.
    """
    if not isinstance(values, (bytes, bytearray)):  # which an array takes for its own memory
        try:
            return array("i", values)
        except OverflowError:
            raise ValueError(f"{name}: expected integers of 32 bits, got larger ones") from None
        except TypeError:
            for each in values if isinstance(values, (list, tuple)) else ():
                if not hasattr(type(each), "__index__"):
                    raise wrong_type(name, "integers", each) from None
    raise wrong_type(name, "a sequence of integers", values)


def rows_of(name: str, values: Any) -> list[array[int]]:
    """Return rows of integers, which may differ in length.

    Raises:
        TypeError: As :func:`integers`, for any of them.
        ValueError: As :func:`integers`, for any of them.
    """
    try:
        rows = list(values)
    except TypeError:
        raise wrong_type(name, "a sequence for each request", values) from None
    return [integers(f"{name}[{index}]", row) for index, row in enumerate(rows)]


def tensor_of(rows: Sequence[array[int]]) -> torch.Tensor:
    """Return ``[rows, longest]`` int32, CPU, with zeros where a row is shorter."""
    width = max(map(len, rows), default=0)
    table = array("i", [0]) * (len(rows) * width)
    for index, row in enumerate(rows):
        table[index * width : index * width + len(row)] = row
    if not table:
        return torch.empty(len(rows), width, dtype=torch.int32)
    return torch.frombuffer(table, dtype=torch.int32).view(len(rows), width)
