"""Garbage collection, held off where it would do harm or cost much."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Generator

__all__ = ["no_collection"]


@contextlib.contextmanager
def no_collection() -> Generator[None, None, None]:
    """Hold off the collector; it is as before afterwards."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
