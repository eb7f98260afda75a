"""The error for a forward that raised, the same from every backend."""

from __future__ import annotations

from graphshare.errors import CaptureError

__all__ = ["forward_raised"]


def forward_raised(during: str, error: Exception) -> CaptureError:
    """Make the error for a forward that raised ``error`` during a warmup or a capture."""
    return CaptureError(
        f"{during}: the forward raised {type(error).__name__}: {error}",
        consequence="Nothing was captured, and what was captured before is as it was",
    )
