"""A state without its paths: one node for each object, however many paths lead to it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from graphshare.memory import address_of, plain_tensors
from graphshare.state.leaves import HostLeaf, TensorLeaf
from graphshare.state.nest import Step, children, label, labelled, unroll
from graphshare.state.rules import RuleSet
from graphshare.state.shapes import Kind, shape_of

__all__ = [
    "ArrayNode",
    "BranchNode",
    "Node",
    "TensorNode",
    "ValueNode",
    "is_on",
    "leaf_of",
    "moved",
    "read",
    "role_of",
    "steps_below",
    "value_of",
]


class TensorNode:
    """A tensor without its path. ``role``: on the ``"device"``, ``"pinned"``, or ``"host"``."""

    __slots__ = ("address", "cls", "device", "dtype", "role", "shape", "stride")

    def __init__(self, tensor: torch.Tensor, role: str) -> None:
        self.cls: type = type(tensor)
        self.role = role
        self.device = tensor.device
        self.dtype = tensor.dtype
        self.address = 0
        self.shape: tuple[int, ...] = ()
        self.stride: tuple[int, ...] = ()
        try:
            self.address = address_of(tensor)
        except TypeError:
            if role != "host":
                raise
            return  # host data may be sparse or nested
        self.shape = tuple(tensor.shape)
        self.stride = tuple(tensor.stride())


class ValueNode:
    """A host value without its path."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        # What can change in place is copied, or it would always equal itself.
        self.value: Any = type(value)(value) if type(value) in (set, bytearray) else value


class ArrayNode:
    """Host data of NumPy: nothing but its type is frozen."""

    __slots__ = ("cls",)

    def __init__(self, value: Any) -> None:
        self.cls = type(value)


class BranchNode:
    """A container; nodes that several paths lead to are one object, cycles lead back."""

    __slots__ = ("below", "cls")

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.below: dict[Step, Node] = {}


Node = TensorNode | ValueNode | ArrayNode | BranchNode


def is_on(place: torch.device, device: torch.device) -> bool:
    """Whether ``place`` is ``device``; a device without index is any of its type."""
    if place.type != device.type:
        return False
    return place.type == "cpu" or device.index is None or place.index == device.index


def role_of(tensor: torch.Tensor, device: torch.device) -> str:
    """``"device"`` for a tensor of the pool's device; else ``"pinned"`` or ``"host"``."""
    if is_on(tensor.device, device):
        return "device"
    strided = tensor.layout is torch.strided
    return "pinned" if tensor.device.type == "cpu" and strided and tensor.is_pinned() else "host"


def read(state: Any, device: torch.device, rules: RuleSet) -> Node:
    """The nodes of ``state``.

    Raises:
        TypeError: A tensor of the device has no address, unless its rule is ``any``.
    """
    # A subclass of Tensor, a parameter too, may answer for its attributes in Python; here the
    # tensor itself is asked.
    with plain_tensors():
        return _read(state, device, rules)


def _read(state: Any, device: torch.device, rules: RuleSet) -> Node:
    numpy = sys.modules.get("numpy")
    array: type | None = None if numpy is None else numpy.ndarray
    nodes: dict[int, Node] = {}
    alive: list[Any] = []  # an id is only good while its object lives
    stack: list[tuple[Any, BranchNode]] = []

    def node_of(value: Any) -> Node:
        cls = type(value)
        kind = shape_of(cls).kind
        if kind is Kind.VALUE:
            if array is not None and issubclass(cls, array):
                return ArrayNode(value)
            return ValueNode(value)
        found = nodes.get(id(value))
        if found is None:
            if kind is Kind.TENSOR:
                try:
                    found = TensorNode(value, role_of(value, device))
                except TypeError as error:
                    found = _without_address(state, value, rules, error)
            else:
                found = BranchNode(cls)
                stack.append((value, found))
            nodes[id(value)] = found
            alive.append(value)
        return found

    root = node_of(state)
    while stack:
        value, branch = stack.pop()
        below = branch.below
        for step, item in children(value) or ():
            below[step] = node_of(item)
    return root


def moved(root: Node, address: Callable[[int], int]) -> Node:
    """The same nodes, with tensors of the device elsewhere.

    Args:
        root: Where to start.
        address: Where an address of the device is then.
    """
    made: dict[int, Node] = {}  # by the identity of the node, which the root keeps alive
    stack: list[tuple[BranchNode, BranchNode]] = []

    def of(node: Node) -> Node:
        found = node
        if isinstance(node, BranchNode):
            found = BranchNode(node.cls)
            stack.append((node, found))
        elif isinstance(node, TensorNode) and node.role == "device" and node.address:
            there = address(node.address)
            if there != node.address:
                found = copy.copy(node)
                found.address = there
        made[id(node)] = found
        return found

    result, known = of(root), made.get
    while stack:
        before, after = stack.pop()
        after.below = {
            step: known(id(node)) or of(node)  # layers often share one
            for step, node in before.below.items()
        }
    return result


def _without_address(state: Any, tensor: Any, rules: RuleSet, error: TypeError) -> Node:
    for path, leaf, rule in unroll(state, labelled, rules):
        if leaf is tensor and rule != "any":
            raise TypeError(f"state, path {path!r}: {error}") from error
    return ValueNode(None)  # never looked at


def steps_below(node: Node) -> Iterable[tuple[str, Node]] | None:
    """Labels and nodes one step down; ``None`` for a leaf."""
    if not isinstance(node, BranchNode):
        return None
    return [(label(node.cls, step), item) for step, item in node.below.items()]


def leaf_of(node: Node, path: str, rule: str) -> TensorLeaf | HostLeaf:
    """The public form of a leaf."""
    if isinstance(node, TensorNode) and node.role != "host":
        return TensorLeaf(
            path, node.address, node.shape, node.stride, node.dtype, node.device, rule
        )
    return HostLeaf(path, value_of(node), rule)


def value_of(node: Node) -> Any:
    """The host value of a node; of host data and containers, their type."""
    if isinstance(node, ValueNode):
        return node.value
    return torch.Tensor if isinstance(node, TensorNode) else node.cls
