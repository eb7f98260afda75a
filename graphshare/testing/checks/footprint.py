"""Whose states a build overwrites, and whether the owner says so."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from graphshare.memory import MemoryRanges
from graphshare.owner import Phase
from graphshare.testing.memory import Bytes, Watched
from graphshare.testing.subject import Subject

__all__ = ["run"]


def run(subject: Subject, watched: Watched) -> None:
    """Compare what the builds wrote with ``writes``, and with the states of other keys."""
    declared = {key: subject.declared_writes(key) for key in subject.captured}
    if any(ranges is None for ranges in declared.values()):
        subject.findings.incomplete(
            "footprint",
            "the owner has no writes(key): a build counts as writing every state that it owns",
        )
    else:
        _look_elsewhere(subject, watched, declared)
    for key, ranges in declared.items():
        if ranges is not None:
            _compare(subject, watched, key, ranges)
    over = {
        key: tuple(
            other
            for other, captured in subject.captured.items()
            if other != key and written.overlaps(captured.reads)
        )
        for key, written in subject.overwritten.items()
    }
    over = {key: others for key, others in over.items() if others}
    if over:
        pairs = sum(map(len, over.values()))
        key, others = next(iter(over.items()))
        subject.findings.fact(
            "overwrites",
            f"{pairs} of {len(subject.captured) * (len(subject.captured) - 1)} pairs of keys: a "
            f"build for the one overwrites the state of the other, which is stale then; {key} that "
            f"of {others[0]}",
            over,
        )
    elif len(subject.captured) > 1:
        subject.findings.fact(
            "overwrites", "no build for a key overwrites the state of another key"
        )


def _look_elsewhere(
    subject: Subject, watched: Watched, declared: dict[Hashable, MemoryRanges | None]
) -> None:
    """Poison what other keys' builds write and this key's should not."""
    masks = {key: watched.mask_of(ranges) for key, ranges in declared.items() if ranges is not None}
    for key, own in masks.items():
        where = [torch.zeros_like(mask) for mask in own]
        for other in masks.values():
            for mask, more, mine in zip(where, other, own, strict=True):
                mask |= more & ~mine
        where = [mask & leaf for mask, leaf in zip(where, watched.mask, strict=True)]
        if any(bool(mask.any()) for mask in where):
            _poisoned_build(subject, watched, key, where)


def _poisoned_build(subject: Subject, watched: Watched, key: Hashable, where: Bytes) -> None:
    before = watched.contents()
    poisoned = watched.poison(0, where)
    try:
        subject.call(key, None, Phase.CAPTURE)
        if subject.replays(key):
            subject.call(key, subject.batches[key][0], Phase.REPLAY)
    except Exception:  # noqa: BLE001 - it may read what it does not write, and choke on it
        pass
    written = watched.ranges_of(watched.changed(poisoned))
    watched.put(before)
    subject.overwritten[key] = subject.overwritten[key].union(written)


def _compare(subject: Subject, watched: Watched, key: Hashable, declared: MemoryRanges) -> None:
    written = subject.overwritten[key]
    own = watched.mask_of(declared)
    beyond = watched.ranges_of(
        [mask & ~mine for mask, mine in zip(watched.mask_of(written), own, strict=True)]
    )
    if not beyond:
        return
    for other in (key, *subject.captured):
        for leaf in subject.captured[other].leaves:
            if beyond.overlaps(MemoryRanges.of([leaf.tensor])):
                whose = "its own" if other == key else f"that of {other}"
                subject.findings.reject(
                    "footprint",
                    "a build",
                    "nothing written outside writes(key)",
                    f"{beyond.nbytes} bytes, in {leaf.path or 'the state'} ({whose})",
                    key=key,
                    path=leaf.path,
                )
                return
