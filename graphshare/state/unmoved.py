"""A shorter check, for an owner whose build returns the very object that it returned before.

What such an object holds cannot have changed where nothing in it can be assigned to: tuples, named
tuples, frozen dataclasses with slots, and values that never change. It holds the same tensor
objects then, and all that is left to look at is what can be done to a tensor in place (``set_``,
``resize_``, ``t_``, ``.data``).

Python has ways around all of that, ``object.__setattr__`` on a frozen dataclass for one. This check
does not see them; the one for ``checks="strict"``, which takes every state apart, does.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from graphshare.state.code import Function, Writer
from graphshare.state.layout import Layout
from graphshare.state.nest import children
from graphshare.state.nodes import BranchNode, TensorNode, ValueNode
from graphshare.state.plan import Check, plan
from graphshare.state.shapes import Kind, shape_of
from graphshare.state.taking import guarded

__all__ = ["Fixed", "count_guarded", "fixed_tensors", "write_unmoved"]

_CONSTANT = (
    *(bool, int, float, complex, str, bytes, type(None), type(...), range),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)
_MOST = 64  # tensors that are worth a line of source each


class Fixed(NamedTuple):
    """The tensors of an object that nobody can put others into.

    Attributes:
        tensors: Each once.
        addresses: Theirs, as captured.
        alike: ``alike(*tensors)``: whether all else of them is as it was, too.
    """

    tensors: tuple[torch.Tensor, ...]
    addresses: tuple[int, ...]
    alike: Callable[..., bool]


def _cannot_be_assigned_to(cls: type) -> bool:
    shape = shape_of(cls)
    if shape.has_dict:  # even a frozen class may keep a `cached_property` there
        return False
    if shape.kind is Kind.SEQUENCE:
        return issubclass(cls, tuple)
    # Of the class itself: one that inherits from a frozen class may have slots of its own.
    parameters = vars(cls).get("__dataclass_params__")
    return shape.kind is Kind.OBJECT and parameters is not None and parameters.frozen


def fixed_tensors(layout: Layout, state: Any) -> list[tuple[torch.Tensor, TensorNode]] | None:
    """Each tensor object of a state that nobody can put another one into, with its node.

    Args:
        layout: As captured.
        state: One that has no difference from it.

    Returns:
        ``None`` if something in it can be assigned to, or changes in place and is no tensor, or
        if it has too many tensors. What is under the rule ``any`` may be and do what it likes.

    Raises:
        ValueError: Rules apply to more than a million leaves.
    """
    found: dict[int, tuple[torch.Tensor, TensorNode]] = {}
    seen: set[tuple[int, int]] = set()
    stack: list[tuple[Check | BranchNode, Any]] = [(plan(layout.root, layout.rules), state)]
    while stack:
        check, value = stack.pop()
        if isinstance(check, BranchNode):  # a cycle, and no tuple leads back to itself
            return None
        if check.rule == "any" or (id(check), id(value)) in seen:
            continue
        seen.add((id(check), id(value)))
        node = check.node
        if isinstance(node, BranchNode):
            if not _cannot_be_assigned_to(type(value)):
                return None
            stack.extend((check.parts[step], item) for step, item in children(value) or ())
        elif isinstance(node, TensorNode):
            found[id(value)] = value, node
            if len(found) > _MOST:
                return None
        elif isinstance(node, ValueNode):
            # The captured object itself passes whatever becomes of it, here as in a full look.
            constant = type(value) in _CONSTANT or isinstance(value, enum.Enum)
            if not constant and value is not node.value:
                return None
    return list(found.values())


def count_guarded(found: Sequence[tuple[torch.Tensor, TensorNode]] | None) -> int:
    """Return how many tensors :func:`fixed_tensors` found, if a guard can speak for each."""
    return len(found) if found and all(guarded(node) for _, node in found) else 0


def write_unmoved(
    found: Sequence[tuple[torch.Tensor, TensorNode]],
    make_guard: Callable[[Sequence[torch.Tensor]], Callable[..., bool]] | None,
) -> tuple[str, tuple[Any, ...]]:
    """Source of a function ``make`` and its arguments; it returns the check, of no argument.

    Args:
        found: As :func:`fixed_tensors` returns them; at least one.
        make_guard: Makes what compares many tensors in one call, if there is such a thing.
    """
    writer = Writer()
    function = Function(writer)
    together: list[torch.Tensor] = []
    conditions: list[str] = []
    for tensor, node in found:
        name = writer.constant(tensor)
        if make_guard is None or guarded(node) is None:
            conditions.append(function.tensor(node, name))
        else:
            together.append(tensor)
            conditions.append(f"{name}.data_ptr() != {writer.constant(node.address)}")
    if make_guard is not None and together:
        guard = writer.constant(make_guard(together))
        # Not asked whether they are nested, which no tensor that was strided can become but by
        # `torch.utils.swap_tensors`: that lookup would be a quarter of the check.
        conditions.append(f"not {guard}(*{writer.constant(tuple(together))})")
    lines = [
        f"def make({', '.join(f'c{i}' for i in range(len(writer.constants)))}):",
        "    def unmoved():",
        "        try:",
        *(f"            if {each}: return False" for each in conditions),
        "        except Exception:",
        "            return False",
        "        return True",
        "    return unmoved",
    ]
    return "\n".join(lines) + "\n", tuple(writer.constants)
