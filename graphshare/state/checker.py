"""A check of one state's layout, prepared once and made many times.

For the structure that was captured a function is written, compiled, and called at each refresh:
straight-line code without walk, path or list, that leaves at the first thing it does not expect.
What it lets through has no difference. What it does not know may still be right (a tensor of
another subclass, a value equal but of an unusual type): then the exact comparison decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch

from graphshare.state.code import NAMES, write_check
from graphshare.state.difference import differences_of
from graphshare.state.layout import Layout, layout_of
from graphshare.state.leaves import LayoutDifference
from graphshare.state.nodes import read

__all__ = ["LayoutChecker"]


class LayoutChecker:
    """Compares states with the one that was captured.

    Neither the state nor its tensors are kept; host values are.

    Args:
        state: The state at capture.
        device: The pool's device.
        rules: Path pattern to rule, as ``StateOwner.host_values``.

    Attributes:
        layout: The layout that was captured.
        matches: ``matches(state) -> bool``: ``True`` if ``state`` has no difference. ``False``
            means that it may have one; ``differences`` says. It never raises an ``Exception``.

    Raises:
        TypeError: A tensor of the device has no address (sparse, or a wrapper), unless its rule
            is ``any``.
        ValueError: A rule is unknown, or the state has more than a million leaves.
    """

    __slots__ = ("layout", "matches")

    layout: Layout
    matches: Callable[[Any], bool]

    def __init__(
        self,
        state: Any,
        device: torch.device | str,
        rules: Mapping[str, str] | None = None,
    ) -> None:
        self.layout = layout_of(state, device, rules)
        written = write_check(self.layout)
        if written is None:
            self.matches = self._matches_slowly
        else:
            source, constants = written
            self.matches = _compiled(source)(*constants)

    def _matches_slowly(self, state: Any) -> bool:
        try:
            return not self.differences(state)
        except Exception:  # noqa: BLE001 - the caller asks `differences`, which raises it again
            return False

    def differences(self, state: Any) -> list[LayoutDifference]:
        """In what ``state`` differs from what was captured, under the rules; exact, and slower.

        Raises:
            TypeError: ``state`` has a tensor without an address.
        """
        layout = self.layout
        found = read(state, layout.device, layout.rules)
        return differences_of(layout.root, found, layout.rules)


# States of one kind differ in constants alone, so hundreds of keys share few sources. The
# constants are cells, not globals: the interpreter's caches on the code stay good for all keys.
@lru_cache(maxsize=64)
def _compiled(source: str) -> Callable[..., Callable[[Any], bool]]:
    namespace: dict[str, Any] = {"__name__": __name__, **NAMES}
    exec(compile(source, "<graphshare layout check>", "exec"), namespace)
    return namespace["make"]
