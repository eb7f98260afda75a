"""What an owner or a view returned, looked at before a capture freezes it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch

from graphshare.buffers import PersistentBuffer
from graphshare.errors import CaptureError, LazyStateError
from graphshare.memory import MemoryRanges, plain_tensors
from graphshare.refusals import Refusals
from graphshare.state import HostLeaf, Layout, device_tensors, walk_rules
from graphshare.state.nest import MAX_LEAVES, children
from graphshare.state.nodes import is_on

__all__ = ["check_returned", "check_view", "lazy"]


def check_returned(
    state: Any,
    device: torch.device,
    rules: Mapping[str, str] | None,
    *,
    refuse: Refusals,
    key: Hashable,
    by: str,
) -> None:
    """Refuse a state on which no later check could find anything, or that no graph can read.

    Args:
        state: What came back.
        device: The pool's.
        rules: The owner's ``host_values``.
        refuse: Makes the pool's errors.
        key: For which it was asked.
        by: Who returned it, for the message.

    Raises:
        CaptureError: It has no tensor on the device; or one on ``meta``, or on an accelerator that
            is not the pool's, and whose rule is not ``any``; or a whole :class:`PersistentBuffer`.
    """
    placed = False
    elsewhere: list[torch.Tensor] = []
    for part in _parts(state):
        if isinstance(part, torch.Tensor):
            with plain_tensors():
                place = part.device
            placed = placed or is_on(place, device)
            if place.type != "cpu" and not is_on(place, device):
                elsewhere.append(part)
        elif isinstance(part, PersistentBuffer):
            raise refuse.counted(
                CaptureError(
                    f"{refuse.name}: capture on what {by} returned",
                    expected="the views that PersistentBuffer.write returned",
                    got=f"the buffer {part.name} itself",
                    key=key,
                    consequence="The forward would read it as a whole, and its live_rows as a "
                    "constant",
                    remedy="Return what write() or fill() returned",
                )
            )
    if elsewhere:
        _refuse_elsewhere(state, device, rules, elsewhere, refuse=refuse, key=key, by=by)
    if not placed:
        raise refuse.counted(
            CaptureError(
                f"{refuse.name}: capture on what {by} returned",
                expected=f"a state with a tensor on {device}",
                got="None" if state is None else f"a {type(state).__qualname__} with none",
                key=key,
                consequence="A capture would freeze all of it, and no refresh could change what "
                "the graph reads",
                remedy=f"Return the tensors that {by} fills: did it forget to return?",
            )
        )


def _refuse_elsewhere(
    state: Any,
    device: torch.device,
    rules: Mapping[str, str] | None,
    elsewhere: list[torch.Tensor],
    *,
    refuse: Refusals,
    key: Hashable,
    by: str,
) -> None:
    wanted = {id(each) for each in elsewhere}
    for path, leaf, rule in walk_rules(state, rules):
        if id(leaf) in wanted and rule != "any":
            raise refuse.counted(
                CaptureError(
                    f"{refuse.name}: capture on what {by} returned: {path or '(the state itself)'}",
                    expected=f"a tensor on {device}, or host data on the CPU",
                    got=f"a tensor on {leaf.device}",
                    key=key,
                    consequence="It has no contents to read"
                    if leaf.is_meta
                    else "The graph would bake in an address there that no check looks at",
                    remedy=f"Keep it on {device}; if no kernel reads it, leave it out, or declare "
                    "'any' for it in host_values",
                )
            )


def _parts(state: Any) -> Iterator[Any]:
    """Every container and every leaf, once each; nothing of a state that is far too large."""
    found: dict[int, Any] = {}
    stack = [state]
    while stack:
        value = stack.pop()
        if id(value) in found:
            continue
        found[id(value)] = value
        if len(found) > MAX_LEAVES:  # the layout refuses it, with its path
            break
        stack.extend(item for _, item in children(value) or ())
    return iter(found.values())


def check_view(
    state: Any, seen: Any, device: torch.device, *, refuse: Refusals, key: Hashable
) -> None:
    """Refuse a view that returned other memory than the lender's state has.

    Args:
        state: The lender's state.
        seen: What the view made of it.
        device: The pool's.
        refuse: Makes the pool's errors.
        key: For which it was asked.

    Raises:
        OwnershipError: It did.
    """
    whole = MemoryRanges.of(device_tensors(state, device))
    part = MemoryRanges.of(device_tensors(seen, device))
    if not whole.contains(part):
        raise refuse.ownership(
            "view returned a tensor outside the lender's state",
            expected="the state's own tensors, or views of them",
            got="other memory",
            key=key,
            remedy="Select or slice in the view; never copy or compute",
        )


def lazy(
    refuse: Refusals, key: Hashable, path: str, before: Layout, after: Layout
) -> LazyStateError:
    """Make the error for a value that a warmup's forward had left behind, and that came back.

    Args:
        refuse: Makes the pool's errors.
        key: That is captured.
        path: Of the value.
        before: The state as the warmup's build returned it.
        after: The state as the warmup's forward left it.
    """
    return refuse.counted(
        LazyStateError(
            f"{refuse.name}: capture on a state that the warmup initialised at {path}",
            expected=f"what the warmup's build returned ({_shown(before, path)})",
            got=f"what its forward left behind ({_shown(after, path)})",
            key=key,
            consequence="The forward would skip its initialisation, so the graph would not "
            "contain it",
            remedy="Return a new object, or reset it, in each build for Phase.CAPTURE",
            path=path,
        )
    )


def _shown(layout: Layout, path: str) -> str:
    for leaf in layout.leaves:
        if leaf.path == path:
            return (
                repr(leaf.value) if isinstance(leaf, HostLeaf) else f"a tensor at {leaf.address:#x}"
            )
    return "nothing"
