"""One line of what ``graphshare doctor`` reports."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Finding"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        name: What was looked at.
        found: The version, or what there is; ``None`` where there is nothing.
        status: ``"ok"``; ``"missing"``; ``"unsupported"`` for a version that is too old;
            ``"broken"`` for what is installed and cannot be imported.
        needed: Whether graphshare cannot be used without it.
        detail: What it is for, or what is wrong.
        remedy: What to do, ``""`` if nothing.
    """

    name: str
    found: str | None
    status: str
    needed: bool
    detail: str
    remedy: str = ""
