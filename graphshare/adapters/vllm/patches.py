"""Attributes set in place of others, and put back."""

from __future__ import annotations

import logging
from typing import Any

from typing_extensions import Self

__all__ = ["Patches"]

_logger = logging.getLogger("vllm.graphshare")
_MISSING: Any = object()


class Patches:
    """A list of attributes that were replaced; :meth:`undo` puts all of them back.

    On an instance the class's own method shows again. What somebody else has put on top since is
    left there, with a warning: their wrapper would be lost.
    """

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Any]] = []

    def __len__(self) -> int:
        return len(self._done)

    def set(self, target: Any, name: str, value: Any) -> None:
        """Replace an attribute of a class, a module or an instance, on the object itself."""
        before = vars(target).get(name, _MISSING)
        setattr(target, name, value)
        self._done.append((target, name, before, value))

    def undo(self) -> None:
        """Put everything back, last first; may be called again."""
        while self._done:
            target, name, before, value = self._done.pop()
            if vars(target).get(name, _MISSING) is not value:
                _logger.warning(
                    "graphshare: %r.%s was replaced by others too, and stays as it is",
                    target,
                    name,
                )
            elif before is _MISSING:
                delattr(target, name)
            else:
                setattr(target, name, before)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()
