"""Path patterns, as ``bounds``, ``scratch`` and ``allow`` take them."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

__all__ = ["matches", "names"]


def names(path: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern names a path."""
    return any(fnmatchcase(path, each) or fnmatchcase("." + path, each) for each in patterns)


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern names a path, or a container around it."""
    parts = path.split(".")
    return any(names(".".join(parts[:n]), list(patterns)) for n in range(1, len(parts) + 1))
