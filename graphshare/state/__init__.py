"""The state of a captured graph: its layout, and the check that a rebuild kept it.

A state is any nest of tensors and host values. A capture bakes in where its tensors lie and what
its host values are; a later build must return the same, in containers that may be new.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from graphshare.memory import plain_tensors
from graphshare.state.checker import LayoutChecker
from graphshare.state.code import compiled
from graphshare.state.layout import Layout, compare, layout_of
from graphshare.state.leaves import HostLeaf, LayoutDifference, TensorLeaf
from graphshare.state.nest import each_once, labelled, unroll, walk, walk_rules
from graphshare.state.nodes import is_on
from graphshare.state.replacing import with_tensors
from graphshare.state.rules import Rule, RuleSet, check_rules
from graphshare.state.shapes import declared_only
from graphshare.state.taking import Taking
from graphshare.state.unmoved import Fixed

__all__ = [
    "AttentionState",
    "Fixed",
    "HostLeaf",
    "Layout",
    "LayoutChecker",
    "LayoutDifference",
    "Rule",
    "Taking",
    "TensorLeaf",
    "check_rules",
    "compare",
    "compiled",
    "declared_only",
    "device_tensors",
    "layout_of",
    "tensors_by_use",
    "walk",
    "walk_rules",
    "with_tensors",
]


class AttentionState(NamedTuple):
    """What a forward reads besides its inputs.

    Attributes:
        attn_metadata: The attention backend's metadata: one object, or one for each layer.
        slot_mappings: Where each token's key and value go in the cache: one tensor, or one for
            each layer or cache group.
    """

    attn_metadata: Any
    slot_mappings: Any = None


def device_tensors(
    state: Any, device: torch.device | str, rules: Mapping[str, str] | None = None
) -> list[torch.Tensor]:
    """Each distinct tensor of ``state`` on ``device``, in the order of the walk.

    Args:
        state: Any nest of tensors and host values.
        device: The pool's device.
        rules: As ``StateOwner.host_values``: a tensor that is ``any`` on each of its paths is
            left out.

    Raises:
        ValueError: A rule is unknown, or there are more than a million leaves.
    """
    return tensors_by_use(state, device, rules)[0]


def tensors_by_use(
    state: Any, device: torch.device | str, rules: Mapping[str, str] | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """As :func:`device_tensors`, and beside it those under the rule ``any``, from one walk.

    Args:
        state: Any nest of tensors and host values.
        device: The pool's device.
        rules: As ``StateOwner.host_values``.

    Returns:
        What graphs on this state read, and all that an owner returned on the device.

    Raises:
        ValueError: A rule is unknown, or there are more than a million leaves.
    """
    place, prepared = torch.device(device), RuleSet(rules)
    found: Iterable[tuple[Any, str]] | None = each_once(state, prepared)
    everything = found
    if found is None or everything is None:
        found = ((value, rule) for _, value, rule in unroll(state, labelled, prepared))
        everything = ((value, "") for _, value in walk(state))
    with plain_tensors():
        read = {id(each): each for each, rule in found if rule != "any" and _is_on(each, place)}
        every = {id(each): each for each, _ in everything if _is_on(each, place)}
    return list(read.values()), list(every.values())


def _is_on(value: Any, device: torch.device) -> bool:
    return isinstance(value, torch.Tensor) and is_on(value.device, device)
