"""Writes the source of a quicker check, for a state that shares what it shared at capture.

The tensors are not looked at one by one but handed together to a guard, which compares all of them
in one call; see :mod:`graphshare.state._guards`. What was one object at capture has to be one
object again, so everything is looked at once, in one function::

    def make(c0, c1, ...):
        def take(v0, guard):
            v1, v2, v3 = v0
            if type(v1) is not c1:
                return False
            ...
            if v2 is not v1:
                return False
            if v5.data_ptr() != c7 or v5.is_nested or ...:
                return False
            return guard(v5, v6, v9) or (v5, v6, v9)

        return take

Addresses come first, since a tensor that has none raises there. A nested tensor may lie at the
right address, and a guard must not be asked about it.
"""

from __future__ import annotations

from typing import Any

import torch

from graphshare.state.code import Function, Writer
from graphshare.state.layout import Layout
from graphshare.state.nodes import BranchNode, Node, TensorNode
from graphshare.state.plan import Check, plan

__all__ = ["guarded", "write_taking"]


def guarded(node: Node) -> TensorNode | None:
    """``node`` if it is a tensor that a guard can speak for."""
    if not isinstance(node, TensorNode) or node.role == "host":
        return None
    # Address 0 does not tell devices apart, and other types may answer in Python.
    known = node.cls in (torch.Tensor, torch.nn.Parameter)
    return node if known and node.address != 0 else None


class _Taking(Function):
    """The body of a function that looks once at each object, in the order of the walk."""

    def __init__(self, writer: Writer) -> None:
        super().__init__(writer)
        self.taken: list[tuple[str, TensorNode]] = []
        self.objects: dict[int, str] = {}  # the first variable for each node

    def check(self, check: Check, node: Node, name: str) -> None:
        tensor = guarded(node)
        if tensor is None and not isinstance(node, BranchNode):
            super().check(check, node, name)
            return
        # By node, not by check: views that are alike are several objects if they were at capture,
        # and a container that two rules apply to, and a cycle leads back to, is one.
        first = self.objects.setdefault(id(node), name)
        if first != name:
            self.refuse(f"{name} is not {first}")
        if tensor is not None:
            if first == name:
                self.taken.append((name, tensor))
        elif id(check) not in self.seen:
            self.seen[id(check)] = name
            self.take_apart(check, name)


def write_taking(layout: Layout) -> tuple[str, tuple[Any, ...], list[TensorNode]] | None:
    """Source of a function ``make``, its arguments, and what is handed out.

    ``make`` returns ``take(state, guard)``, which returns ``True`` if the guard lets the tensors
    through; else the tensors, a tuple in the order of the nodes, of which only the addresses are
    known to be right. Anything else in ``state`` is as it was at capture; if not, or if it may not
    be, it returns ``False`` or raises.

    Returns:
        ``None`` if there is no tensor to hand out.

    Raises:
        ValueError: Rules apply to more than a million leaves.
    """
    writer = Writer()
    function = _Taking(writer)
    body = function.body(plan(layout.root, layout.rules))
    names = [name for name, _ in function.taken]
    nodes = [node for _, node in function.taken]
    if not nodes:
        return None
    # Asked in line a tensor tells its address in two thirds of the time that `map` takes.
    placed = [
        f"{name}.data_ptr() != {writer.constant(node.address)} or {name}.is_nested"
        for name, node in function.taken
    ]
    tensors = ", ".join(names)
    lines = [
        f"def make({', '.join(f'c{i}' for i in range(len(writer.constants)))}):",
        "    def take(v0, guard):",
        *(f"        {line}" for line in body),
        *(f"        if {condition}: return False" for condition in placed),
        f"        return guard({tensors}) or ({tensors},)",
        "    return take",
    ]
    return "\n".join(lines) + "\n", tuple(writer.constants), nodes
