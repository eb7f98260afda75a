"""Writes the source of a quicker check, for a state that shares what it shared at capture.

The tensors are not looked at one by one but handed together to a guard, which compares all of them
in one call; see :mod:`graphshare.state._guards`. What was one object at capture has to be one
object again, so everything is looked at once, in lines that stand wherever a state is in ``v0``::

    v1, v2, v3 = v0
    if type(v1) is not c1:
        break
    ...
    if v2 is not v1:
        break
    if v5.data_ptr() != c7 or v5.is_nested:
        break

Addresses come last, since a tensor that has none raises there. A nested tensor may lie at the
right address, and a guard must not be asked about it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from graphshare.state.code import Function, Writer
from graphshare.state.layout import Layout
from graphshare.state.nodes import BranchNode, Node, TensorNode
from graphshare.state.plan import Check, plan

__all__ = ["Taking", "guarded", "write_taking"]


class Taking(NamedTuple):
    """Source that takes a state apart.

    Attributes:
        lines: For a state in ``v0``. They raise, or ``break`` out of a loop around them, where it
            is not as it was at capture, or may not be.
        tensors: What is left to look at: a tuple's source, of tensors of which the addresses alone
            are known to be right.
        nodes: Theirs.
        constants: What the lines call ``c0``, ``c1`` and so on.
    """

    lines: list[str]
    tensors: str
    nodes: list[TensorNode]
    constants: tuple[Any, ...]

    def names(self) -> str:
        """The constants by name, as arguments or a tuple have them."""
        return "".join(f"c{i}, " for i in range(len(self.constants)))

    def source(self) -> str:
        """Source of a function ``make`` of the constants, which returns ``take(state, guard)``.

        It returns ``True`` if the guard lets the tensors through; else the tensors, in the order of
        the nodes. Where they are not known to be the right ones, it returns ``False`` or raises.
        """
        lines = [
            f"def make({self.names()}):",
            "    def take(v0, guard):",
            "        while True:",
            *(f"            {line}" for line in self.lines),
            f"            tensors = {self.tensors}",
            "            return guard(*tensors) or tensors",
            "        return False",
            "    return take",
        ]
        return "\n".join(lines) + "\n"


def guarded(node: Node) -> TensorNode | None:
    """``node`` if it is a tensor that a guard can speak for."""
    if not isinstance(node, TensorNode) or node.role == "host":
        return None
    # Address 0 does not tell devices apart, and other types may answer in Python.
    known = node.cls in (torch.Tensor, torch.nn.Parameter)
    return node if known and node.address != 0 else None


class _Taking(Function):
    """The body of a function that looks once at each object, in the order of the walk."""

    def __init__(self, writer: Writer, leave: str) -> None:
        super().__init__(writer, leave)
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


def write_taking(layout: Layout) -> Taking | None:
    """Write how a state of this layout is taken apart.

    Returns:
        ``None`` if there is no tensor to hand out.

    Raises:
        ValueError: Rules apply to more than a million leaves.
    """
    writer = Writer()
    function = _Taking(writer, leave="break")
    lines = function.body(plan(layout.root, layout.rules))
    if not function.taken:
        return None
    # Asked in line a tensor tells its address in two thirds of the time that `map` takes.
    for name, node in function.taken:
        address = writer.constant(node.address)
        function.refuse(f"{name}.data_ptr() != {address} or {name}.is_nested")
    tensors = "".join(f"{name}, " for name, _ in function.taken)
    nodes = [node for _, node in function.taken]
    return Taking(lines, f"({tensors})", nodes, tuple(writer.constants))
