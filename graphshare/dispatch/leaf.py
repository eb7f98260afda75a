"""What a dispatch ends in."""

from __future__ import annotations

from typing import Any

__all__ = ["Leaf"]


class Leaf:
    """What a dispatch ends in: a key, or the field that no key satisfies.

    Attributes:
        key: The captured key, or ``None``.
        reason: The field's name, ``""`` for a hit.
        order: The field's place in the order of declaration, past all fields for a hit.
        count: Dispatches that ended here.
    """

    __slots__ = ("count", "key", "order", "reason")

    def __init__(self, key: Any, reason: str, order: int) -> None:
        self.key = key
        self.reason = reason
        self.order = order
        self.count = 0
