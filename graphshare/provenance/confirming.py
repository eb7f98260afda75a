"""Settles which words are addresses, by a second capture on a state that lies elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from graphshare.capture import CaptureBackend, InspectableGraph
from graphshare.capture.moves import Moves
from graphshare.capture.reading import Certainty, GraphNode, GraphReading, Holder, Word
from graphshare.entry import Entry, apply_views
from graphshare.state import device_tensors, with_tensors

__all__ = ["confirmed"]

_DOUBTFUL = (Certainty.INFERRED, Certainty.TENSOR_MAP)


def confirmed(
    entry: Entry[Any],
    reading: GraphReading,
    backend: CaptureBackend,
    forward: Callable[[Any, Any], Any],
) -> GraphReading:
    """Capture a forward again on a copy of its state, and see which words moved with it.

    The copy lies in other memory, and so does what the capture allocates. What the forward reads
    besides its state stays where it is, and is not settled.

    Args:
        entry: The captured key.
        reading: Its graph as it was read.
        backend: The pool's.
        forward: What the key was captured with; its Python runs once more, its kernels do not.

    Raises:
        CaptureError: The forward failed.
    """
    if not any(word.certainty in _DOUBTFUL for node in reading.nodes for word in node.words):
        return reading
    state = apply_views(entry.views, entry.record.captured)
    moves = _elsewhere(device_tensors(state, backend.device))
    apart: Any = getattr(backend, "apart", None)
    second = (backend if apart is None else apart()).capture(
        partial(forward, entry.key, with_tensors(state, moves.tensor))
    )
    try:
        if not isinstance(second, InspectableGraph):
            return reading
        other = second.read()
        if [(n.kind, n.name) for n in other.nodes] != [(n.kind, n.name) for n in reading.nodes]:
            note = "A second capture ran other kernels: it settles nothing."
            return replace(reading, notes=(*reading.notes, note))
        nodes = tuple(
            _settled(node, {word.place: word for word in twin.words}, moves, reading, other)
            for node, twin in zip(reading.nodes, other.nodes, strict=True)
        )
    finally:
        second.release()
    return replace(reading, nodes=nodes)


def _elsewhere(tensors: list[torch.Tensor]) -> Moves:
    """Copy the memory that the tensors of a state lie in, storage by storage."""
    spans: dict[int, tuple[torch.Tensor, int, int]] = {}
    for tensor in tensors:
        if not tensor.numel():
            continue
        key = tensor.untyped_storage().data_ptr()
        start = int(tensor.storage_offset()) * tensor.element_size()
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        reach = 1 + sum((int(size) - 1) * int(step) for size, step in steps)
        end = start + reach * tensor.element_size()
        known = spans.get(key)
        spans[key] = (
            (tensor, start, end)
            if known is None
            else (tensor, min(start, known[1]), max(end, known[2]))
        )
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for tensor, start, end in spans.values():
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        whole.set_(tensor.untyped_storage())
        # From the storage's start: what is within keeps its alignment.
        copy = torch.empty_like(whole[:end])
        copy[start:].copy_(whole[start:end])
        pairs.append((whole[:end], copy))
    return Moves(pairs)


def _settled(
    node: GraphNode,
    twins: dict[tuple[int, int], Word],
    moves: Moves,
    reading: GraphReading,
    other: GraphReading,
) -> GraphNode:
    return replace(
        node,
        words=tuple(
            _settle(word, twins.get(word.place), moves, reading, other) for word in node.words
        ),
    )


def _settle(
    word: Word, twin: Word | None, moves: Moves, reading: GraphReading, other: GraphReading
) -> Word:
    if word.certainty not in _DOUBTFUL or twin is None:
        return word
    expected = moves.address(word.address)
    if expected != word.address:
        if twin.address == expected:
            return replace(word, certainty=Certainty.CONFIRMED)
        if twin.address == word.address:
            return replace(word, certainty=Certainty.UNMOVED)
        return word
    here, there = reading.find(word.address), other.find(twin.address)
    both_own = (
        here is not None
        and there is not None
        and here.holder is Holder.GRAPH
        and there.holder is Holder.GRAPH
        and twin.address != word.address
    )
    return replace(word, certainty=Certainty.CONFIRMED) if both_own else word
