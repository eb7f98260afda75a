"""Warmups and captures, as a pool makes them, and what a warmup switches over for good."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable, Iterator
from typing import Any

import torch

from graphshare.owner import Phase
from graphshare.state import HostLeaf, Layout, compare, layout_of
from graphshare.state.nest import labelled
from graphshare.testing.subject import Subject

__all__ = ["run"]

_BY_VALUE = (bool, int, float, str, bytes, enum.Enum, torch.dtype, torch.device, type(None))


@dataclasses.dataclass(slots=True)
class _Warmup:
    state: Any
    before: Layout
    after: Layout | None  # what a forward left, if one ran


def run(subject: Subject) -> None:
    """Warm up every key, capture every key, then build each once more for either phase."""
    warm = {key: _warm_up(subject, key) for key in subject.keys}
    shared: dict[str, list[Hashable]] = {}
    moved: dict[str, list[Hashable]] = {}
    for key in subject.keys:
        warmup, state = warm[key], subject.capture(key)
        if warmup is None or state is None:
            continue
        _switched_by_forward(subject, key, warmup)
        for path in _same_objects(warmup.state, state):
            shared.setdefault(path, []).append(key)
        here = subject.captured[key].checker.layout
        for difference in compare(warmup.before, here):
            if difference.field == "address":
                moved.setdefault(difference.path, []).append(key)
    for key in subject.captured:
        subject.build(key, None, Phase.CAPTURE)
    for key, captured in subject.captured.items():
        warmup = warm[key]
        again = None if warmup is None else subject.build(key, None, Phase.WARMUP)
        if warmup is not None and again is not None:
            layout = layout_of(again, subject.device, subject.rules)
            _switched_by_build(subject, key, warmup, captured.checker.layout, layout)
    if shared:
        subject.findings.fact(
            "same-objects",
            "a warmup and a capture get the same objects at "
            f"{_listed(shared)}; a kernel that initialises them lazily would do so in the warmup",
            shared,
        )
    elif subject.captured:
        subject.findings.fact("separate-objects", "a warmup and a capture get separate objects", {})
    if moved:
        subject.findings.fact(
            "moved-before-capture",
            f"tensors moved between the warmups and the captures: {_listed(moved)}",
            moved,
        )


def _warm_up(subject: Subject, key: Hashable) -> _Warmup | None:
    state = subject.build(key, None, Phase.WARMUP)
    if state is None:
        return None
    before, after = layout_of(state, subject.device, subject.rules), None
    if subject.forward is not None:
        try:
            subject.forward(key, state)
        except Exception as error:  # noqa: BLE001 - whatever a forward raises is a finding
            subject.findings.reject(
                "forward",
                "forward on a state for a warmup",
                "outputs",
                f"{type(error).__name__}: {error}",
                key=key,
            )
        after = layout_of(state, subject.device, subject.rules)
    return _Warmup(state, before, after)


def _switched_by_forward(subject: Subject, key: Hashable, warmup: _Warmup) -> None:
    if warmup.after is None:
        return
    left = {d.path: d for d in compare(warmup.before, warmup.after)}
    now = subject.captured[key].checker.layout
    still = {d.path for d in compare(warmup.after, now)}
    for path in sorted(left.keys() - still):
        subject.findings.reject(
            "lazy",
            f"{path or 'the state'} in a build for CAPTURE",
            f"{left[path].expected!r} as in the build for the warmup",
            f"{left[path].got!r}, which the warmup's forward had left",
            key=key,
            path=path,
        )


def _switched_by_build(
    subject: Subject, key: Hashable, warmup: _Warmup, captured: Layout, again: Layout
) -> None:
    """A value that the first warmup had and no build has any more."""
    if subject.findings.has("lazy"):
        return
    lasting = {leaf.path: leaf for leaf in again.leaves if isinstance(leaf, HostLeaf)}
    for difference in compare(warmup.before, captured):
        path = difference.path
        if difference.field not in ("value", "type") or path not in lasting:
            continue
        by_value = isinstance(difference.got, _BY_VALUE) and isinstance(
            difference.expected, _BY_VALUE
        )
        if by_value and lasting[path].value == difference.got:
            subject.findings.reject(
                "lazy",
                f"{path or 'the state'} in a build for CAPTURE",
                f"{difference.expected!r} as in the build for the first warmup",
                f"{difference.got!r} from then on",
                key=key,
                path=path,
            )


def _same_objects(warm: Any, captured: Any) -> list[str]:
    theirs = {id(value): value for _, value in _mutable(captured)}
    return [path for path, value in _mutable(warm) if id(value) in theirs]


def _mutable(state: Any) -> Iterator[tuple[str, Any]]:
    """The containers of a state that can be changed in place, each once."""
    seen: set[int] = set()
    stack: list[tuple[str, Any]] = [("", state)]
    while stack:
        path, value = stack.pop()
        below = labelled(value)
        if below is None or id(value) in seen:
            continue
        seen.add(id(value))
        frozen = getattr(type(value), "__dataclass_params__", None)
        if not isinstance(value, tuple) and not (frozen is not None and frozen.frozen):
            yield path or "the root", value
        stack.extend((f"{path}.{name}" if path else name, item) for name, item in below)


def _listed(paths: dict[str, list[Hashable]], most: int = 3) -> str:
    more = len(paths) - most
    return ", ".join(list(paths)[:most]) + (f" and {more} more" if more > 0 else "")
