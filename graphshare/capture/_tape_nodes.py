"""The steps of a tape as nodes: which tensors each names, and the same step with others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from graphshare.capture._operators import Overload
from graphshare.capture._recording import Recompute
from graphshare.capture._tensors import flat, storage_key
from graphshare.capture.moves import Moves
from graphshare.capture.reading import Allocation, Certainty, GraphNode, Holder, Word

__all__ = ["TapeMemory", "moved_step", "node_of", "tensors_of"]

Step = Callable[[], Any]


def tensors_of(op: Overload, step: Step) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that a step reads or writes, each under its argument's name."""
    call = step.call if isinstance(step, Recompute) else step
    if isinstance(call, functools.partial):
        names = [argument.name for argument in op._schema.arguments]
        for place, value in enumerate(call.args):
            yield from _named(names[place] if place < len(names) else str(place), value)
        for name, value in call.keywords.items():
            yield from _named(name, value)
    if isinstance(step, Recompute):
        for place, target in step.targets:
            yield f"result {place}", target


def _named(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for place, each in enumerate(flat(value)):
            yield f"{name}[{place}]", each


def node_of(number: int, op: Overload, step: Step) -> GraphNode:
    """Return a step as a node; tensors without elements have no address in it."""
    words = tuple(
        Word(tensor.data_ptr(), name, Certainty.READ, _extent(tensor))
        for name, tensor in tensors_of(op, step)
        if tensor.numel() and tensor.device.type == "cpu"
    )
    return GraphNode(number, "operator", str(op), words)


def _extent(tensor: torch.Tensor) -> int:
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def moved_step(step: Step, moves: Moves) -> Step | None:
    """Return the step on the tensors' new places, or ``None`` if it names none that moves.

    Raises:
        SplitError: One of its tensors moves only in part.
    """
    if isinstance(step, Recompute):
        call = _moved(step.call, moves)
        targets = _moved(step.targets, moves)
        if call is step.call and targets is step.targets:
            return None
        return Recompute(step.op, call, targets)
    moved = _moved(step, moves)
    return None if moved is step else moved


def _moved(value: Any, moves: Moves) -> Any:
    """Return ``value`` itself if nothing in it moves."""
    if isinstance(value, torch.Tensor):
        other = moves.tensor(value)
        return value if other is None else other
    if isinstance(value, functools.partial):
        args = _moved(value.args, moves)
        keywords = _moved(value.keywords, moves)
        if args is value.args and keywords is value.keywords:
            return value
        return functools.partial(value.func, *args, **keywords)
    if isinstance(value, Mapping):
        items = {name: _moved(item, moves) for name, item in value.items()}
        same = all(items[name] is item for name, item in value.items())
        return value if same else items
    if isinstance(value, (list, tuple)):
        parts = [_moved(item, moves) for item in value]
        if all(map(lambda one, other: one is other, parts, value)):
            return value
        return tuple(parts) if isinstance(value, tuple) else parts
    return value


class TapeMemory:
    """Whose memory the tensors of a tape lie in.

    Args:
        tensors: Of all steps.
        created: Keys of the storages that the forward allocated.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], created: AbstractSet[int]) -> None:
        found: dict[int, Allocation] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage_key(storage)
            if key not in found and storage.nbytes():
                holder = Holder.GRAPH if key in created else Holder.TORCH
                found[key] = Allocation(holder, storage.data_ptr(), storage.nbytes())
        self.allocations = sorted(found.values(), key=lambda each: each.start)

    def find(self, address: int) -> Allocation | None:
        """Return the allocation of an address; a freed storage has none, and address 0."""
        for each in self.allocations:
            if each.start <= address < each.start + each.nbytes:
                return each
        return Allocation(Holder.NONE)
