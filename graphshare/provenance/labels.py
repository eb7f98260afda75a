"""The names that a caller gives to tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from graphshare.arguments import wrong_type
from graphshare.capture.moves import Moves
from graphshare.provenance.places import Place, Use, named_tensors, place_of
from graphshare.state.nest import children
from graphshare.state.nodes import is_on

__all__ = ["Named", "labels", "moved_labels", "named_places"]

Named = dict[tuple[Use, str], torch.Tensor]
"""By use and name, the tensors; they are kept alive."""


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
        TypeError: A bare tensor, without a name, or a value that holds none.
    """
    given = ((Use.INPUT, inputs), (Use.OUTPUT, outputs), (Use.WEIGHT, weights))
    for use, named in (*given, (Use.BUFFER, buffers)):
        leaf = named is not None and children(named) is None
        if leaf and not isinstance(named, (torch.Tensor, torch.nn.Module)):
            raise wrong_type(
                f"{use.value}s", "{name: tensor}, a nest of tensors or a module", named
            )
    return {
        (use, name): tensor
        for use, named in (*given, (Use.BUFFER, buffers))
        for name, tensor in named_tensors(f"{use.value}s", named)
    }


def named_places(
    named: Mapping[tuple[Use, str], torch.Tensor], device: torch.device
) -> list[Place]:
    """Return where the tensors on a device lie now."""
    found = (
        place_of(use, name, tensor)
        for (use, name), tensor in named.items()
        if is_on(tensor.device, device)
    )
    return [each for each in found if each is not None]


def moved_labels(named: Mapping[tuple[Use, str], torch.Tensor], moves: Moves) -> Named:
    """Return the names with the tensors that replace those that move.

    Raises:
        SplitError: One moves only in part.
    """
    return {label: _after(tensor, moves) for label, tensor in named.items()}


def _after(tensor: torch.Tensor, moves: Moves) -> torch.Tensor:
    other = moves.tensor(tensor)
    return tensor if other is None else other
