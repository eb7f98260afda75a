"""The names that a caller gives to tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from graphshare.arguments import wrong_type
from graphshare.capture.moves import Moves, SplitError
from graphshare.entry import Entry
from graphshare.errors import GraphShareError
from graphshare.memory import address_of, plain_tensors
from graphshare.provenance.family import Member
from graphshare.provenance.places import Place, Use, named_tensors, place_of
from graphshare.state.nest import children
from graphshare.state.nodes import is_on

__all__ = ["Named", "labels", "moved_labels", "named_places"]

Named = dict[tuple[Use, str], tuple[torch.Tensor, ...]]
"""By use and name, the tensors; they are kept alive. More than one where some keys moved to
another one, or a tensor is made of several."""


def labels(
    *, inputs: Any = None, outputs: Any = None, weights: Any = None, buffers: Any = None
) -> Named:
    """Name tensors.

    Args:
        inputs: ``{name: tensor}``, a nest of tensors, or a module.
        outputs: The same.
        weights: The same.
        buffers: The same.

    Raises:
        TypeError: A bare tensor, without a name, a value that holds none, or a tensor of which it
            is not known where it lies.
    """
    given = ((Use.INPUT, inputs), (Use.OUTPUT, outputs), (Use.WEIGHT, weights))
    for use, named in (*given, (Use.BUFFER, buffers)):
        leaf = named is not None and children(named) is None
        if leaf and not isinstance(named, (torch.Tensor, torch.nn.Module)):
            raise wrong_type(
                f"{use.value}s", "{name: tensor}, a nest of tensors or a module", named
            )
    return {
        (use, name): tuple(_parts(f"{use.value}s: {name}", tensor))
        for use, named in (*given, (Use.BUFFER, buffers))
        for name, tensor in named_tensors(f"{use.value}s", named)
    }


_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def _parts(what: str, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that one is made of: itself, if it has an address."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:  # a wrapper, such as quantized weights
        names, _ = flatten()
        for name in names:
            yield from _parts(f"{what}.{name}", getattr(tensor, name))
        return
    layout = tensor.layout
    if layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif layout in _COMPRESSED:
        yield from (getattr(tensor, name)() for name in _COMPRESSED[layout])
        yield tensor.values()
    else:
        try:
            with plain_tensors():
                address_of(tensor)
        except TypeError as error:
            raise TypeError(f"{what}: {error}") from error
        yield tensor


def named_places(named: Named, device: torch.device) -> list[Place]:
    """Return where the tensors on a device lie now."""
    found = (
        place_of(use, name, tensor)
        for (use, name), tensors in named.items()
        for tensor in tensors
        if is_on(tensor.device, device)
    )
    return [each for each in found if each is not None]


def moved_labels(member: Member, staying: Iterable[Entry[Any]], moves: Moves) -> Named:
    """Return the names of a pool with the tensors that replace those that move.

    Args:
        member: The pool.
        staying: Its keys that do not move; what they read keeps its name beside what replaces it.
        moves: What goes where.

    Raises:
        SplitError: A tensor moves only in part.
    """
    still: set[int] = set()
    if member.holdings.named:
        for entry in staying:
            still |= _pairs(entry, moves)
    return {
        label: tuple(_after(tensors, moves, still))
        for label, tensors in member.holdings.named.items()
    }


def _pairs(entry: Entry[Any], moves: Moves) -> AbstractSet[int]:
    """Return whose old memory a graph reads: of what number; of all, if it does not tell."""
    graph: Any = entry.graph
    try:
        return graph.patch(moves).pairs
    except (AttributeError, GraphShareError, SplitError):
        return set(range(len(moves.pairs)))


def _after(
    tensors: Iterable[torch.Tensor], moves: Moves, still: AbstractSet[int]
) -> Iterator[torch.Tensor]:
    seen: set[int] = set()
    for tensor in tensors:
        other = moves.tensor(tensor)
        kept = [tensor] if other is None else [other]
        if other is not None and moves.pair_at(tensor.data_ptr()) in still:
            kept.append(tensor)
        for each in kept:
            if each.data_ptr() not in seen:
                seen.add(each.data_ptr())
                yield each
