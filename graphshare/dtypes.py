"""Which values a dtype holds as they are."""

from __future__ import annotations

import array
from typing import Any

import torch

from graphshare.arguments import shown

__all__ = ["holds", "limits_of", "refusal_of", "tensor_of"]

_SIGNED = {array.array(code).itemsize: code for code in "bhiq"}
_UNSIGNED = {array.array(code).itemsize: code for code in "BHIQ"}


def limits_of(dtype: torch.dtype) -> tuple[int, int] | None:
    """Return the least and the largest integer of a dtype; ``None`` if it holds others too."""
    if dtype is torch.bool:
        return 0, 1
    if dtype.is_floating_point or dtype.is_complex:
        return None
    found = torch.iinfo(dtype)
    return found.min, found.max


def holds(dtype: torch.dtype, number: Any) -> bool:
    """Whether a number is the same once it is of ``dtype``."""
    limits = limits_of(dtype)
    if limits is not None:
        return number == number and number == int(number) and limits[0] <= number <= limits[1]
    held = torch.tensor(number, dtype=torch.float64).to(dtype).to(torch.float64).item()
    return held == number or (held != held and number != number)


def refusal_of(source: torch.Tensor, dtype: torch.dtype) -> str | None:
    """Say why a tensor's values would not be the same as ``dtype``; ``None`` if they would.

    Floats may be rounded to other floats. Integers on a device are not looked at: that would wait
    for the device.
    """
    theirs = source.dtype
    if theirs.is_complex and not dtype.is_complex:
        return f"{theirs} values"
    limits = limits_of(dtype)
    if limits is None:
        return None
    held = limits_of(theirs)
    if held is None:
        return f"{theirs} values"
    if limits[0] <= held[0] and held[1] <= limits[1]:
        return None
    if source.device.type != "cpu" or not source.numel():
        return None
    least, most = _extremes(source)
    if least < limits[0] or most > limits[1]:
        return f"{theirs} values from {least} to {most}"
    return None


def _extremes(source: torch.Tensor) -> tuple[int, int]:
    if source.dtype is torch.uint64:  # torch has no order for it: the negative half is the larger
        signed = source.contiguous().view(torch.int64)
        large = signed < 0
        if bool(large.any()):
            top = int(signed[large].max()) + (1 << 64)
            small = signed[~large]
            return int(small.min()) if small.numel() else 1 << 63, top
        source = signed
    elif source.dtype in (torch.uint16, torch.uint32):
        source = source.to(torch.int64)
    least, most = torch.aminmax(source)
    return int(least), int(most)


def tensor_of(values: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a sequence, or an array, as a tensor on the CPU.

    Args:
        values: A sequence of numbers, or an array of any shape.
        dtype: What it is for. An array keeps its own dtype, as a tensor would.

    Raises:
        TypeError: A value is no number of the kind that ``dtype`` holds.
        ValueError: A value is out of its range.
    """
    if isinstance(values, (str, bytes, bytearray)):
        raise TypeError(shown(values))
    if hasattr(values, "__array_interface__"):
        return torch.tensor(values)
    limits = limits_of(dtype)
    if limits is None:
        return torch.tensor(values, dtype=dtype)
    if dtype is torch.bool:
        found = _integers(values, torch.uint8, 1)
        if found.numel() and int(found.max()) > 1:
            raise ValueError(f"{int(found.max())} is out of range")
        return found
    return _integers(values, dtype, torch.iinfo(dtype).bits // 8)


def _integers(values: Any, dtype: torch.dtype, itemsize: int) -> torch.Tensor:
    code = (_SIGNED if dtype.is_signed else _UNSIGNED)[itemsize]
    try:
        # Takes integers alone, and checks their range, in less time than torch needs to read them.
        found = array.array(code, values)
    except OverflowError as error:
        raise ValueError(f"a value is out of range ({error})") from None
    if not found:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(found, dtype=dtype)
