"""The device that an argument names, with its index."""

from __future__ import annotations

from typing import Any

import torch

from graphshare.arguments import shown

__all__ = ["device_of"]


def device_of(what: str, device: Any) -> torch.device:
    """Return a device as tensors name it.

    Args:
        what: Which argument, with the pool's or buffer's name.
        device: A ``torch.device``, its name, or an index.

    Raises:
        TypeError: It names no device by its type.
        ValueError: It names a device that torch does not know.
        RuntimeError: It is a CUDA device that is not there.
    """
    try:
        found = torch.device(device)
    except TypeError:
        raise TypeError(f"{what}: expected a device or its name, got {shown(device)}.") from None
    except RuntimeError:
        raise ValueError(
            f'{what}: expected a device such as "cuda", "cuda:1" or "cpu", got {shown(device)}.'
        ) from None
    if found.type != "cuda":
        return found
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"{what}: expected a device that is there, got {shown(str(found))}, and torch "
            f"{torch.__version__} finds no CUDA device. Nothing can run there. Install a torch "
            'that is built for CUDA and look at its driver (graphshare doctor), or use "cpu".'
        )
    # Tensors name the device by number; an unnumbered one would compare unequal to all.
    index = torch.cuda.current_device() if found.index is None else found.index
    if index >= torch.cuda.device_count():
        raise RuntimeError(
            f"{what}: expected one of {torch.cuda.device_count()} CUDA devices, numbered from 0, "
            f"got {shown(str(found))}."
        )
    return torch.device("cuda", index)
