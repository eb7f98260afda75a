"""Text from elsewhere, on a terminal."""

from __future__ import annotations

import unicodedata

__all__ = ["printable"]


def printable(text: str) -> str:
    """Return ``text`` on one line, without what would steer a terminal."""
    line = " ".join(text.split())
    return "".join("\N{REPLACEMENT CHARACTER}" if _steers(each) else each for each in line)


def _steers(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cf", "Cs")
