"""What the tape must know of an operator: its writes, its ``out=`` form, and what it may not do.

Everything here is read off the operator's schema and tags, so custom operators are covered too;
the tables hold only what schemas do not say.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

__all__ = [
    "Overload",
    "generators_in",
    "has_python_kernel",
    "host_need",
    "out_overload",
    "resizes",
    "written_tensors",
]

# PyTorch has no public name for "one overload of an operator".
Overload = OpOverload

# Operators that write an argument without saying so in their schema: name -> argument names.
_UNANNOTATED_WRITES: Mapping[str, tuple[str, ...]] = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::_batch_norm_impl_index": ("running_mean", "running_var"),
    "aten::miopen_batch_norm": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
}

# Operators that read device values on the host and carry no tag for it.
_HOST_READERS = frozenset(
    {
        "aten::_linalg_check_errors",
        "aten::_unique",
        "aten::_unique2",
        "aten::is_nonzero",
        "aten::item",
        "aten::nonzero_numpy",
        "aten::unique_consecutive",
        "aten::unique_dim",
        "aten::unique_dim_consecutive",
    }
)

_RESIZERS = frozenset(
    {
        "aten::_resize_output_",
        "aten::resize_",
        "aten::resize_as_",
        "aten::resize_as_sparse_",
        "aten::set_",
    }
)

_MASKS = (torch.bool, torch.uint8)


class _Argument(NamedTuple):
    position: int | None  # None: keyword-only
    name: str


def _value(argument: _Argument, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if argument.position is not None and argument.position < len(args):
        return args[argument.position]
    return kwargs.get(argument.name)


def _arguments(schema: Any) -> Iterator[tuple[_Argument, Any]]:
    for position, argument in enumerate(schema.arguments):
        place = None if argument.kwarg_only else position
        yield _Argument(place, argument.name), argument


@functools.cache
def _written_arguments(op: OpOverload) -> tuple[_Argument, ...]:
    unannotated = _UNANNOTATED_WRITES.get(op._schema.name, ())
    return tuple(
        place
        for place, argument in _arguments(op._schema)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or argument.name in unannotated
    )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def written_tensors(
    op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """Return the tensors that this call writes in place, ``out=`` tensors among them."""
    return [
        tensor
        for argument in _written_arguments(op)
        for tensor in _tensors(_value(argument, args, kwargs))
    ]


def generators_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Generator]:
    """Return the generators that are passed to this call."""
    return [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]


def resizes(op: OpOverload) -> bool:
    """Say whether the operator gives its first argument other storage or another extent."""
    return op._schema.name in _RESIZERS


@functools.cache
def out_overload(op: OpOverload) -> tuple[OpOverload, tuple[str, ...]] | None:
    """Find the ``out=`` form of a functional operator.

    Returns:
        The overload and the names of its output arguments in the order of the results, or
        ``None`` if there is none that takes exactly the same other arguments.
    """
    schema = op._schema
    wanted = [(argument.name, str(argument.type)) for argument in schema.arguments]
    packet = op.overloadpacket
    for name in packet.overloads():
        candidate = getattr(packet, name)
        others = candidate._schema.arguments
        outs = [a for a in others if a.is_out]
        rest = [(a.name, str(a.type)) for a in others if not a.is_out]
        if (
            outs
            and rest == wanted
            and len(outs) == len(schema.returns)
            and all(str(a.type) == "Tensor" for a in outs)
            and all(str(r.type) == "Tensor" for r in schema.returns)
        ):
            return candidate, tuple(a.name for a in outs)
    return None


def host_need(
    op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, host_scalar: bool
) -> str | None:
    """Say why a call needs the host, or ``None`` if it does not.

    Args:
        op: The operator.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        host_scalar: Whether the value being stored is a Python number; ``x[mask] = 0.0`` then
            needs no index to be computed.
    """
    name = op._schema.name
    if name == "aten::index":
        return "a boolean mask as an index" if _has_mask(args[1]) else None
    if name in ("aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        return "a boolean mask as an index" if _has_mask(args[1]) and not host_scalar else None
    if name == "aten::lift_fresh":
        return None if host_scalar else "a tensor made of host data"
    if name == "aten::repeat_interleave":
        known = kwargs.get("output_size") is not None or (
            op._overloadname != "Tensor" and isinstance(args[1], int)
        )
        return None if known else "a shape that depends on the data"
    if torch.Tag.dynamic_output_shape in op.tags:
        return "a shape that depends on the data"
    if torch.Tag.data_dependent_output in op.tags or name in _HOST_READERS:
        return "a value on the host"
    return None


def _has_mask(indices: Any) -> bool:
    return any(tensor.dtype in _MASKS for tensor in _tensors(indices))


def has_python_kernel(op: OpOverload, device_type: str) -> bool:
    """Say whether the operator is a custom one whose kernel for this device is Python code.

    Such a kernel must not run again at a replay; what it calls is recorded instead.
    """
    if op.namespace in ("aten", "prim", "prims"):
        return False
    # There is no public way to ask; every registration from Python is entered in this set.
    registered: Any = getattr(torch.library, "_impls", ())
    opname = op._schema.name.split("::")[1]
    overload = op._schema.overload_name
    opname = f"{opname}.{overload}" if overload else opname
    keys = (device_type.upper(), "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    return any(f"{op.namespace}/{opname}/{key}" in registered for key in keys)
