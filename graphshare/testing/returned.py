"""What a state must not hold: no pool would capture it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from graphshare.buffers import PersistentBuffer
from graphshare.state.nest import labelled, unroll
from graphshare.state.nodes import is_on
from graphshare.state.rules import RuleSet

__all__ = ["Misreturned", "misreturned"]


class Misreturned(NamedTuple):
    """Something that is in a state by mistake.

    Attributes:
        path: Where.
        expected: What would have been right there.
        got: What it is.
        remedy: What to do.
    """

    path: str
    expected: str
    got: str
    remedy: str


def misreturned(
    state: Any, device: torch.device, rules: Mapping[str, str] | None
) -> Misreturned | None:
    """Find a whole :class:`PersistentBuffer`, or a tensor where no graph on the device reads it.

    Args:
        state: What a build returned.
        device: Where the states lie.
        rules: The owner's ``host_values``; what is under the rule ``any`` may lie anywhere.

    Raises:
        ValueError: The state has more than a million leaves.
    """
    found = _buffer(state)
    if found is not None:
        path, buffer = found
        return Misreturned(
            path,
            "a view of the key's rows",
            f"the buffer {buffer.name!r} itself",
            "Return what its write() or fill() returned",
        )
    elsewhere: list[tuple[str, torch.device]] = []
    placed = False
    for path, value, rule in unroll(state, labelled, RuleSet(rules)):
        if isinstance(value, torch.Tensor):
            here = is_on(value.device, device)
            placed = placed or here
            if not here and value.device.type != "cpu" and rule != "any":
                elsewhere.append((path, value.device))
    for path, place in elsewhere:
        # With nothing on the device at all it is the device that is wrong.
        if placed or place.type == "meta":
            return Misreturned(
                path,
                f"a tensor on {device}, or host data on the CPU",
                f"a tensor on {place}",
                f"Keep it on {device}, or leave it out if no kernel reads it",
            )
    return None


def _buffer(state: Any) -> tuple[str, PersistentBuffer] | None:
    seen: set[int] = set()
    stack: list[tuple[str, Any]] = [("", state)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, PersistentBuffer):
            return path, value
        below = labelled(value)
        if below is None or id(value) in seen:
            continue
        seen.add(id(value))
        stack.extend((f"{path}.{name}" if path else name, item) for name, item in below)
    return None
