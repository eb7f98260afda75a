"""A progress bar for captures, where there is someone to see it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from graphshare.arguments import wrong_type

__all__ = ["Progress", "check_progress", "reporting"]

Progress = Callable[[int, int, str], object]
"""Called as ``progress(done, total, what)``."""


def check_progress(what: str, progress: object) -> None:
    """Refuse what is neither a switch nor a callable.

    Raises:
        TypeError: It is neither.
    """
    if progress is not None and not isinstance(progress, bool) and not callable(progress):
        raise wrong_type(what, "True, False, None or a callable", progress)


@contextmanager
def reporting(
    progress: bool | Progress | None, title: str, total: int
) -> Generator[Callable[[str], object]]:
    """Yield a function to call after each step, with a word for what was done.

    Args:
        progress: A callable gets ``(done, total, what)``. ``True`` draws a bar with tqdm if it is
            installed; ``None`` does so only on a terminal; ``False`` never.
        title: What is going on.
        total: Number of steps.
    """
    done = 0
    bar: Any = None
    if callable(progress):
        report: Progress | None = progress
    else:
        report = None
        bar = _bar(title, total) if progress or (progress is None and _terminal()) else None

    def step(what: str) -> None:
        nonlocal done
        done += 1
        if report is not None:
            report(done, total, what)
        elif bar is not None:
            bar.set_postfix_str(what, refresh=False)
            bar.update()

    try:
        yield step
    finally:
        if bar is not None:
            bar.close()


def _terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()  # pyright: ignore[reportUnnecessaryComparison]


def _bar(title: str, total: int) -> Any:
    try:
        tqdm: Any = importlib.import_module("tqdm")
    except ImportError:
        return None
    return tqdm.tqdm(total=total, desc=title, leave=False)
