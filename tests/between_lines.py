"""What happens between the lines of a function, as another thread might have it happen."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def before_each_line(function: Any, happens: Callable[[int], object]) -> Iterator[None]:
    """Call ``happens`` before each line of a function, with the number of lines so far."""
    seen = 0

    def traced(frame: FrameType, event: str, _: object) -> Any:
        nonlocal seen
        if frame.f_code is not function.__code__:
            return None
        if event == "line":
            happens(seen)
            seen += 1
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        yield
    finally:
        sys.settrace(before)
