"""The layout of a state: all of it that a capture freezes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphshare.state.difference import differences_of
from graphshare.state.leaves import HostLeaf, LayoutDifference, TensorLeaf
from graphshare.state.nest import unroll
from graphshare.state.nodes import Node, is_on, leaf_of, moved, read, steps_below
from graphshare.state.rules import RuleSet

__all__ = ["Layout", "compare", "layout_of"]


class Layout:
    """Of a state: each tensor's path, address, shape, stride, dtype and device, each host value.

    Layouts are equal exactly when these, the types of the containers, the device and the rules
    are; whether two paths lead to one object or to two equal ones does not count, nor does the
    order of a dict. A NaN equals a NaN, and a value never equals one of another type. Host data
    (tensors off the device, NumPy arrays) has no contents here, and an address only if pinned.

    Args:
        root: The state's structure.
        device: The pool's device.
        rules: The rules.
    """

    __slots__ = ("_leaves", "device", "root", "rules")

    def __init__(self, root: Node, device: torch.device, rules: RuleSet) -> None:
        self.root = root
        self.device = device
        self.rules = rules
        self._leaves: tuple[TensorLeaf | HostLeaf, ...] | None = None

    @property
    def leaves(self) -> tuple[TensorLeaf | HostLeaf, ...]:
        """Every leaf, once for each path, but those whose rule is ``any``.

        Raises:
            ValueError: There are more than a million.
        """
        if self._leaves is None:
            self._leaves = tuple(
                leaf_of(node, path, rule)
                for path, node, rule in unroll(self.root, steps_below, self.rules)
                if rule != "any"
            )
        return self._leaves

    @property
    def tensors(self) -> tuple[TensorLeaf, ...]:
        """The leaves that are tensors on the pool's device."""
        return tuple(
            leaf
            for leaf in self.leaves
            if isinstance(leaf, TensorLeaf) and is_on(leaf.device, self.device)
        )

    def moved(self, address: Callable[[int], int]) -> Layout:
        """This layout when its tensors lie elsewhere, and all else is as captured.

        Args:
            address: Where an address of the device is then.
        """
        return Layout(moved(self.root, address), self.device, self.rules)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return (
            self.device == other.device
            and self.rules.source == other.rules.source
            and not differences_of(self.root, other.root, self.rules, exact=True)
        )

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        return f"Layout({len(self.leaves)} leaves, {len(self.tensors)} tensors on {self.device})"


def layout_of(
    state: Any, device: torch.device | str, rules: Mapping[str, str] | None = None
) -> Layout:
    """The layout of ``state``.

    Args:
        state: Any nest of tensors and host values. No tensor is kept; host values are.
        device: The pool's device.
        rules: Path pattern to rule, as ``StateOwner.host_values``.

    Raises:
        TypeError: A tensor of the device has no address (sparse, or a wrapper), unless its rule
            is ``any``.
        ValueError: A rule is unknown.
    """
    place, prepared = torch.device(device), RuleSet(rules)
    return Layout(read(state, place, prepared), place, prepared)


def compare(expected: Layout, got: Layout) -> list[LayoutDifference]:
    """In what ``got`` differs from ``expected``, under the rules of ``expected``.

    Of a container that came, went or gave way to something else, all that was within is covered
    by one difference for each leaf, or one for the container.

    Raises:
        ValueError: There are more than a million places to report.
    """
    return differences_of(expected.root, got.root, expected.rules)
