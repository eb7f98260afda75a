"""A host area that copies to the device start from."""

from __future__ import annotations

import torch

__all__ = ["HostStage"]


class HostStage:
    """One host area; on CUDA pinned, with the event after its last copy to the device.

    Args:
        nbytes: Its size.
        cuda: Whether copies go to a CUDA device.

    Attributes:
        memory: ``[nbytes]`` uint8, CPU.
        copied: To be recorded after each copy; ``None`` without CUDA.
    """

    def __init__(self, nbytes: int, *, cuda: bool) -> None:
        self.memory = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=cuda)
        self.copied = torch.cuda.Event() if cuda else None

    def wait(self) -> None:
        """Wait until the last copy is done."""
        # Without this the host would overwrite what an earlier copy has not read yet.
        if self.copied is not None:
            self.copied.synchronize()
