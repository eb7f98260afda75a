"""Where tensors lie, over builds, batches, phases and orders of keys; what a rebuild allocates."""

from __future__ import annotations

import gc
from collections.abc import Hashable
from itertools import pairwise
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from graphshare.owner import Phase
from graphshare.state.nodes import is_on
from graphshare.testing.subject import Deviation, Subject

__all__ = ["deviations", "growth", "orders"]

_FIELDS = ("address", "shape", "stride", "dtype", "device", "presence")
_ROUNDS = 6
_SETTLED = 2  # builds that may still fill caches and rings


def orders(subject: Subject) -> None:
    """Build every batch of every key, smallest key first, then for captures, largest first."""
    for key in reversed(subject.captured):
        for index in subject.replays(key):
            subject.build(key, index, Phase.REPLAY)
    for key in subject.captured:
        subject.build(key, None, Phase.CAPTURE)
        for index in subject.replays(key)[:1]:
            subject.build(key, index, Phase.REPLAY)


def deviations(subject: Subject) -> None:
    """Report every tensor that was not where, or not what, it was at the captures."""
    for deviation in sorted(subject.deviations, key=lambda each: not each.late):
        difference = deviation.difference
        if difference.path in subject.captured[deviation.key].host:
            continue
        if difference.field in _FIELDS or difference.field == "type":
            _reject(subject, deviation)


def _reject(subject: Subject, deviation: Deviation) -> None:
    key, phase, batch, difference, late = deviation
    where = difference.path or "the state"
    if late:
        subject.findings.reject(
            "allocation",
            f"memory of {where}",
            "what the builds before the captures had returned",
            f"what none of them had, from a build for {phase.name}",
            key=key,
            path=difference.path,
            batch=batch,
        )
    elif not subject.findings.has("allocation", difference.path):
        subject.findings.reject(
            "layout",
            f"{difference.field} of {where}",
            _place(difference.field, difference.expected),
            f"{_place(difference.field, difference.got)} from a build for {phase.name}",
            key=key,
            path=difference.path,
            batch=batch,
        )


def _place(field: str, value: Any) -> str:
    if field == "address":
        return hex(value)
    return value.__qualname__ if isinstance(value, type) else str(value)


class _Allocations(TorchDispatchMode):
    """Notes each storage that operators make on a device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.made: dict[int, StorageWeakRef] = {}

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_pointer(value) for value in _flat((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        for value in _flat(result):
            pointer = _pointer(value)
            if pointer not in given and is_on(value.device, self._device):
                self.made[pointer] = StorageWeakRef(value.untyped_storage())
        return result


def _pointer(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _flat(item)]
    return []


def growth(subject: Subject) -> None:
    """Build one batch over and over: what each build leaves behind adds up."""
    temporaries: dict[Hashable, int] = {}
    for key in subject.captured:
        if not any(d.late and d.key == key for d in subject.deviations):
            temporaries[key] = _grow(subject, key)
    most = max(temporaries.values(), default=0)
    if most and subject.device.type != "cpu":
        subject.findings.fact(
            "temporaries",
            f"a build makes up to {most} temporary tensors on the device",
            temporaries,
        )


def _grow(subject: Subject, key: Hashable) -> int:
    index = 0 if subject.replays(key) else None
    phase = Phase.CAPTURE if index is None else Phase.REPLAY
    rounds: list[list[StorageWeakRef]] = []
    held: list[int] = []
    for _ in range(_ROUNDS):
        with _Allocations(subject.device) as watch:
            built = subject.build(key, index, phase, keep=False)
        if built is None:
            return 0
        del built
        rounds.append(list(watch.made.values()))
        held.append(_held_bytes(subject.device))
    settled = rounds[_SETTLED:-_SETTLED]
    if min(_left_behind(settled)) > 0:
        gc.collect()  # a cycle is not kept, only not collected yet
    left = _left_behind(settled)
    grown = [after - before for before, after in pairwise(held[1:])]
    if min(left) > 0:
        got = f"{min(left)} more tensors on the device after each"
    elif min(grown) > 0:
        got = f"{min(grown)} more bytes on the device after each"
    else:
        return len(rounds[-1])
    subject.findings.reject(
        "allocation",
        f"{_ROUNDS} builds for {phase.name} of one batch",
        "as much memory after each as before",
        got,
        key=key,
        batch=index,
        remedy="Write into tensors that the owner keeps, and keep nothing else from a build",
    )
    return len(rounds[-1])


def _left_behind(rounds: list[list[StorageWeakRef]]) -> list[int]:
    """How many storages of each round are alive that no earlier round had."""
    seen: set[int] = set()
    counts: list[int] = []
    for made in rounds:
        new = {ref.cdata for ref in made if not ref.expired()} - seen
        seen |= new
        counts.append(len(new))
    return counts


def _held_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
