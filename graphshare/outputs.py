"""Copies of what a forward returned."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch

__all__ = ["clone_outputs"]


def clone_outputs(outputs: Any) -> Any:
    """Return ``outputs`` with every tensor cloned.

    Args:
        outputs: A tensor, or any nest of tuples, named tuples, lists, dicts and dataclasses;
            other values are returned as they are.
    """
    if isinstance(outputs, torch.Tensor):
        return outputs.clone()
    if isinstance(outputs, dict):
        items = cast("dict[Any, Any]", outputs)
        return type(items)((key, clone_outputs(value)) for key, value in items.items())
    if isinstance(outputs, (tuple, list)):
        parts = [clone_outputs(each) for each in cast("tuple[Any, ...]", outputs)]
        if hasattr(outputs, "_fields"):
            return cast("Any", type(outputs))(*parts)
        return cast("Any", type(outputs))(parts)
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        changed = {
            field.name: clone_outputs(getattr(outputs, field.name))
            for field in dataclasses.fields(outputs)
            if field.init
        }
        return dataclasses.replace(outputs, **changed)
    return outputs
