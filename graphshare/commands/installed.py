"""What is installed, as its metadata say, which an interrupted installation may have damaged."""

from __future__ import annotations

import importlib.metadata

__all__ = ["UNREADABLE", "version_of"]

UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)
"""What ``importlib.metadata`` raises for files that are not as they should be."""


def version_of(*distributions: str) -> tuple[str | None, str]:
    """Return the version of the first that is installed, and what is wrong with its metadata.

    Args:
        distributions: Names under which it may be installed.

    Returns:
        The version, ``None`` where there is none or it cannot be read; and why it cannot.
    """
    for distribution in distributions:
        try:
            found: object = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        except UNREADABLE as error:
            return None, f"its metadata cannot be read ({type(error).__name__}: {error})"
        if isinstance(found, str):
            return found, ""
        return None, "its metadata say no version"
    return None, ""
