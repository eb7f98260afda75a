"""The current CUDA device, changed only where it is another one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["on_device"]

_STAY: AbstractContextManager[Any] = nullcontext()


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the current one, as ``torch.cuda.device`` does; a tenth of it where it is.

    Args:
        device: With its index.
    """
    if torch.cuda.current_device() == device.index:
        return _STAY
    return torch.cuda.device(device)
