"""Writes the source of a check: what a :class:`LayoutChecker` compiles.

A state of a dict with one metadata object, whose ``seq_lens`` is a tensor, becomes::

    def make(c0, c1, c2, c3, c4, c5, c6):
        def matches(v0):
            try:
                if type(v0) is not dict or len(v0) != 1:
                    return False
                v1 = v0[c0]
                if type(v1) is not c1:
                    return False
                v2 = v1.__dict__
                if len(v2) != 1:
                    return False
                v3 = v2[c2]
                if type(v3) is not Tensor or v3.data_ptr() != c3 or ...:
                    return False
            except Exception:
                return False
            return True

        return matches

What is shared gets a function of its own, called once for each distinct object that is met. Several
items of a dict come from one ``itemgetter``, in half the time of as many subscripts. The
comparisons are the cheapest that still see a tensor changed in place (``set_``, ``resize_``,
``t_``, ``.data``): on CPython 3.11 ``data_ptr()`` takes 45 ns, ``shape`` and ``stride()`` 80 each,
``is_contiguous()`` 40, ``dtype`` and ``get_device()`` 35, while ``is_set_to`` takes 145, sees no
dtype, and would keep memory alive.
"""

from __future__ import annotations

import enum
import keyword
import types
from collections.abc import Callable, Iterator
from functools import lru_cache
from operator import itemgetter
from typing import Any

import torch

from graphshare.memory import plain_tensors
from graphshare.state.layout import Layout
from graphshare.state.nest import MISSING, Step, attributes_of, iterate_of, slot_of
from graphshare.state.nodes import ArrayNode, BranchNode, Node, TensorNode, ValueNode
from graphshare.state.plan import Check, plan
from graphshare.state.shapes import Kind, is_read_plainly, shape_of
from graphshare.state.values import is_number, same_value

__all__ = ["NAMES", "Function", "Writer", "compiled", "same_place", "write_check"]

_BY_IDENTITY = (bool, type(None), type(...), enum.Enum, torch.dtype, torch.layout)
_BY_EQUALITY = (int, str, float, bytes, torch.device, torch.Size)
_MANY = 16  # from so many plain values on, a sequence is compared in a loop


def _same_items(expected: list[Any], got: Iterator[Any]) -> bool:
    found = tuple(got)
    return len(found) == len(expected) and all(map(same_value, expected, found))


def same_place(expected: TensorNode, got: Any) -> bool:
    """As the written comparison, for a type whose attributes may run Python."""
    if type(got) is not expected.cls:
        return False
    with plain_tensors():
        return (
            got.data_ptr() == expected.address
            and got.shape == expected.shape
            and got.stride() == expected.stride
            and got.dtype is expected.dtype
            and got.device == expected.device
        )


NAMES: dict[str, Any] = {
    "MISSING": MISSING,
    "Parameter": torch.nn.Parameter,
    "Tensor": torch.Tensor,
    "attributes_of": attributes_of,
    "dict_get": dict.get,
    "dict_len": dict.__len__,
    "same_items": _same_items,
    "same_place": same_place,
    "same_value": same_value,
    "slot_of": slot_of,
}
"""What written source refers to by name."""


# States of one kind differ in constants alone, so hundreds of keys share few sources. The
# constants are arguments, not globals: the interpreter's caches on the code stay good for all keys.
@lru_cache(maxsize=128)
def compiled(source: str, name: str = "layout check") -> Callable[..., Any]:
    """Return the function ``make`` of written source; the same one for the same source.

    Args:
        source: With no names but those of :data:`NAMES` and builtins.
        name: For tracebacks.
    """
    namespace: dict[str, Any] = {"__name__": __name__, **NAMES}
    exec(compile(source, f"<graphshare {name}>", "exec"), namespace)
    return namespace["make"]


class _EndlessError(Exception):
    """A cycle leads out of the function that is written."""


class Writer:
    """Constants and names of what is written."""

    def __init__(self) -> None:
        self.constants: list[Any] = []
        self.names: dict[Any, str] = {}
        self.functions: dict[int, str] = {}
        self.waiting: list[Check] = []

    def constant(self, value: Any) -> str:
        """The name of an argument of ``make`` that is ``value``."""
        cls = type(value)
        plain = cls in (int, tuple, torch.dtype, torch.device)
        key = (cls, value) if plain else id(value)
        name = self.names.get(key)
        if name is None:
            name = self.names[key] = f"c{len(self.constants)}"
            self.constants.append(value)
        return name

    def function(self, check: Check) -> str:
        """The name of the function that makes a check that is shared."""
        name = self.functions.get(id(check))
        if name is None:
            name = self.functions[id(check)] = f"shared{len(self.functions)}"
            self.waiting.append(check)
        return name


class Function:
    """The body of one function, from its argument ``v0`` down to what is shared.

    Args:
        writer: Of the constants.
        leave: What is done at the first thing that is not expected.
    """

    def __init__(self, writer: Writer, leave: str = "return False") -> None:
        self.writer = writer
        self.leave = leave
        self.constant = writer.constant
        self.lines: list[str] = []
        self.count = 1
        self.stack: list[tuple[Check | BranchNode, Node, str]] = []
        self.around: dict[int, str] = {}  # variables of containers, for steps back up
        self.seen: dict[int, str] = {}  # variables that a shared check has let through

    def body(self, check: Check) -> list[str]:
        """The lines that make ``check`` of ``v0``."""
        if check.rule != "any":
            self.take_apart(check, "v0")
        while self.stack:
            part, node, access = self.stack.pop()
            if isinstance(part, BranchNode):
                if id(part) not in self.around:
                    raise _EndlessError
                self.refuse(f"{access} is not {self.around[id(part)]}")
            elif part.rule == "any":
                if "(" in access:
                    self.refuse(f"{access} is MISSING")
                elif not access.isidentifier():
                    self.lines.append(access)  # raises if it is not there
            else:
                self.check(part, node, self.variable(access))
        return self.lines

    def variable(self, access: str) -> str:
        """A variable with what the expression ``access`` gives."""
        if access.isidentifier():
            return access
        (name,) = self.variables(1)
        self.lines.append(f"{name} = {access}")
        return name

    def variables(self, count: int) -> list[str]:
        """Names of variables that are new."""
        self.count += count
        return [f"v{i}" for i in range(self.count - count, self.count)]

    def refuse(self, condition: str) -> None:
        """Write that the state is not let through on ``condition``."""
        self.lines.append(f"if {condition}: {self.leave}")

    def type_name(self, cls: type) -> str:
        """What written source calls ``cls``."""
        if cls in (bool, int, str, float, bytes, tuple, list, dict):
            return cls.__name__
        if cls in (torch.Tensor, torch.nn.Parameter):
            return cls.__name__
        return self.constant(cls)

    def check(self, check: Check, node: Node, name: str) -> None:
        """Write the check of what ``name`` holds; ``node`` was there at capture."""
        del node  # `check` may stand for several that are alike
        if check.uses < 2:
            self.take_apart(check, name)
            return
        seen = self.seen.get(id(check))
        if isinstance(check.node, BranchNode):
            function = self.writer.function(check)
            if seen is None:
                self.seen[id(check)] = name
                self.refuse(f"not {function}({name})")
            else:
                self.refuse(f"{name} is not {seen} and not {function}({name})")
        elif isinstance(check.node, TensorNode) and seen is not None:
            self.refuse(f"{name} is not {seen} and ({self.tensor(check.node, name)})")
        else:
            self.seen[id(check)] = name
            self.take_apart(check, name)

    def take_apart(self, check: Check, name: str) -> None:
        """Write the check of what ``name`` holds, and put off what is below."""
        node = check.node
        if isinstance(node, TensorNode):
            self.refuse(self.tensor(node, name))
        elif isinstance(node, ValueNode):
            self.refuse(self.value(node.value, check.rule, name))
        elif isinstance(node, ArrayNode):
            self.refuse(f"type({name}) is not {self.constant(node.cls)}")
        else:
            self.branch(check, node, name)

    def tensor(self, node: TensorNode, name: str) -> str:
        """The condition under which it is another place."""
        constant = self.constant
        if node.role == "host":
            kind = self.type_name(node.cls)
            return f"type({name}) is not {kind} or {name}.device != {constant(node.device)}"
        if node.cls not in (torch.Tensor, torch.nn.Parameter):
            return f"not same_place({constant(node)}, {name})"
        parts = [
            f"type({name}) is not {self.type_name(node.cls)}",
            f"{name}.data_ptr() != {constant(node.address)}",
            f"{name}.shape != {constant(node.shape)}",
        ]
        if node.stride != _dense(node.shape) or min(node.shape, default=2) < 2:
            parts.append(f"{name}.stride() != {constant(node.stride)}")
        elif node.shape:  # without sizes of 0 and 1, dense strides are the only contiguous ones
            parts.append(f"not {name}.is_contiguous()")
        parts.append(f"{name}.dtype is not {constant(node.dtype)}")
        index = -1 if node.device.type == "cpu" else node.device.index
        if node.address == 0 or index is None:
            parts.append(f"{name}.device != {constant(node.device)}")
        else:  # with an address, the index settles it: address spaces are unified
            parts.append(f"{name}.get_device() != {index}")
        return " or ".join(parts)

    def value(self, value: Any, rule: str, name: str) -> str:
        """The condition under which it may be another value."""
        kind = self.type_name(type(value))
        if rule == "at_most" and is_number(value) and value == value:  # a NaN bounds nothing
            return f"type({name}) is not {kind} or not {name} <= {self.constant(value)}"
        if value is None or value is True or value is False:
            return f"{name} is not {value}"
        constant = self.constant(value)
        if isinstance(value, _BY_IDENTITY):
            return f"{name} is not {constant}"
        if type(value) in _BY_EQUALITY and value == value:  # a NaN is not
            other = f"type({name}) is not {kind} or {name} != {constant}"
            return f"{name} is not {constant} and ({other})"
        return f"{name} is not {constant} and not same_value({constant}, {name})"

    def branch(self, check: Check, node: BranchNode, name: str) -> None:
        """As :meth:`take_apart`, of a container."""
        self.around[id(node)] = name
        shape = shape_of(node.cls)
        steps: dict[str, list[Step]] = {"item": [], "key": [], "attr": [], "slot": []}
        for step in check.parts:
            steps[step.how].append(step)
        self.refuse(f"type({name}) is not {self.type_name(node.cls)}")
        below: list[tuple[Step, str]] = []
        if shape.kind is Kind.SEQUENCE:
            below += self.items(check, node, name, steps["item"])
        elif shape.kind is Kind.MAPPING:
            below += self.keys(node, name, steps["key"])
        if shape.declared is not None:
            below += self.fields(shape.declared, name, steps["attr"])
        elif shape.has_dict:
            below += self.attributes(node.cls, name, steps["attr"])
        held = {step.key for step in steps["slot"]}
        for slot, member in shape.slots:
            access = self.slot(node.cls, slot, member, name)
            if slot in held:
                below.append((Step("slot", slot), access))
            else:
                self.refuse(f"slot_of({self.constant(member)}, {name}) is not MISSING")
        self.stack.extend(
            (check.parts[step], node.below[step], access) for step, access in reversed(below)
        )

    def items(
        self, check: Check, node: BranchNode, name: str, steps: list[Step]
    ) -> list[tuple[Step, str]]:
        """What a sequence holds, each with an expression for it."""
        iterate = iterate_of(node.cls)
        source = f"{self.constant(iterate)}({name})"
        parts = [check.parts[step] for step in steps]
        values = [
            part.node.value
            for part in parts
            if isinstance(part, Check) and isinstance(part.node, ValueNode) and part.rule == "equal"
        ]
        if len(values) == len(parts) >= _MANY:
            # As a list: tuples that are equal are one constant, and 1 is equal to True.
            self.refuse(f"not same_items({self.constant(values)}, {source})")
            return []
        if getattr(node.cls, "__iter__", None) is iterate:
            source = name
        names = self.variables(len(steps))
        # Too few or too many raise.
        self.lines.append(f"({''.join(f'{item}, ' for item in names)}) = {source}")
        return list(zip(steps, names, strict=True))

    def keys(self, node: BranchNode, name: str, steps: list[Step]) -> list[tuple[Step, str]]:
        """What a mapping holds, likewise."""
        length, form = f"len({name})", f"{name}.get({{}}, MISSING)"
        if node.cls is not dict and issubclass(node.cls, dict):
            # A default dict would insert what is asked for and missing.
            length, form = f"dict_len({name})", f"dict_get({name}, {{}}, MISSING)"
        self.refuse(f"{length} != {len(steps)}")
        if node.cls is dict:
            return self.entries(name, steps)
        return [(step, form.format(self.constant(step.key))) for step in steps]

    def fields(
        self, declared: tuple[str, ...], name: str, steps: list[Step]
    ) -> list[tuple[Step, str]]:
        """What the fields of a dataclass hold that has nothing else; one that it lacks raises."""
        held = {step.key for step in steps}
        for field in declared:
            if field not in held:
                self.refuse(f"hasattr({name}, {field!r})")
        variables = self.variables(len(steps))
        self.lines += [
            f"{variable} = {name}.{step.key}"
            for variable, step in zip(variables, steps, strict=True)
        ]
        return list(zip(steps, variables, strict=True))

    def attributes(self, cls: type, name: str, steps: list[Step]) -> list[tuple[Step, str]]:
        """What an object's ``__dict__`` holds, likewise; an attribute that it has not raises."""
        plain = cls.__getattribute__ is object.__getattribute__
        below: list[tuple[Step, str]] = []
        # Before the dict is asked for, which CPython makes only then: an attribute's name, and the
        # dict, need not be fetched where the interpreter knows the place in the object.
        for step in steps:
            if _is_of_instances(cls, step.key):
                (variable,) = self.variables(1)
                self.lines.append(f"{variable} = {name}.{step.key}")
                below.append((step, variable))
        found = self.variable(f"{name}.__dict__" if plain else f"attributes_of({name})")
        self.refuse(f"len({found}) != {len(steps)}")
        direct = {step.key for step, _ in below}
        return below + self.entries(found, [step for step in steps if step.key not in direct])

    def entries(self, name: str, steps: list[Step]) -> list[tuple[Step, str]]:
        """What a plain dict holds, likewise; a key that it has not raises."""
        # The keys themselves, not literals: engines keep their layers' names, and a dict finds the
        # very same string sooner than an equal one.
        keys = [step.key for step in steps]
        if len(keys) < 2:
            return [(step, f"{name}[{self.constant(step.key)}]") for step in steps]
        names = self.variables(len(keys))
        self.lines.append(f"{', '.join(names)} = {self.constant(itemgetter(*keys))}({name})")
        return list(zip(steps, names, strict=True))

    def slot(self, cls: type, slot: str, member: types.MemberDescriptorType, name: str) -> str:
        """An expression for what a slot holds."""
        first = next((vars(base)[slot] for base in cls.__mro__ if slot in vars(base)), None)
        plain = cls.__getattribute__ is object.__getattribute__ and first is member
        if plain and slot.isidentifier() and not keyword.iskeyword(slot):
            return f"{name}.{slot}"
        return f"slot_of({self.constant(member)}, {name})"


def _is_of_instances(cls: type, name: Any) -> bool:
    """Whether ``value.name`` can come from the ``__dict__`` of a ``cls`` alone."""
    return is_read_plainly(cls, name) and not any(name in vars(base) for base in cls.__mro__)


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= size
    return tuple(reversed(stride))


def write_check(layout: Layout) -> tuple[str, tuple[Any, ...]] | None:
    """Source of a function ``make`` and its arguments; it returns the check.

    ``None`` for a state with a cycle through what is shared: that is left to the exact comparison.

    Raises:
        ValueError: Rules apply to more than a million leaves.
    """
    writer = Writer()
    root = plan(layout.root, layout.rules)
    try:
        body = Function(writer).body(root)
        functions: list[str] = []
        while writer.waiting:
            check = writer.waiting.pop()
            functions.append(f"    def {writer.functions[id(check)]}(v0):")
            functions.extend(f"        {line}" for line in Function(writer).body(check))
            functions.append("        return True")
    except _EndlessError:
        return None
    lines = [
        f"def make({', '.join(f'c{i}' for i in range(len(writer.constants)))}):",
        *functions,
        "    def matches(v0):",
        "        try:",
        *(f"            {line}" for line in body),
        # A key that is gone, a comparison that raises: the exact comparison says what it is.
        "        except Exception:",
        "            return False",
        "        return True",
        "    return matches",
    ]
    if not body:  # all is `any`
        lines = ["def make():", "    return lambda state: True"]
    return "\n".join(lines) + "\n", tuple(writer.constants)
