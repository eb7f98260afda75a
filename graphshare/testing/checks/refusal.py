"""Batches that a key cannot hold: refused, and before anything is written."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from graphshare.memory import MemoryRanges
from graphshare.owner import Phase
from graphshare.testing.memory import Watched
from graphshare.testing.report import shown_keys
from graphshare.testing.subject import Subject
from graphshare.verification import _field as number_of

__all__ = ["run"]

_SIZES = ("num_tokens", "num_reqs", "max_query_len")
_MOST = 3


def run(subject: Subject, watched: Watched) -> None:
    """Offer each key what it must refuse: what was given, and batches of larger keys."""
    without: list[Hashable] = []
    for key in subject.captured:
        given = [(batch, "given as impossible") for batch in subject.impossible.get(key, ())]
        offers = [*given, *_too_large(subject, key)]
        for batch, why in offers:
            _offer(subject, watched, key, batch, why)
        if not offers:
            without.append(key)
    if not without:
        return
    why = f"nothing was offered to {shown_keys(without)} that it must refuse; pass impossible="
    if len(without) == len(subject.captured):
        why += (
            "; batches of larger keys are offered where keys and batches have "
            f"{', '.join(_SIZES[:-1])} or {_SIZES[-1]}"
        )
    for check in ("impossible", "late-refusal"):
        subject.findings.incomplete(check, why)


def _too_large(subject: Subject, key: Hashable) -> Iterator[tuple[Any, str]]:
    """Batches of other keys with more of something than this key has room for."""
    found = 0
    room = {name: number_of(key, name) for name in _SIZES}
    for other in subject.keys:
        for batch in subject.batches.get(other, ()):
            for name, most in room.items():
                size = number_of(batch, name)
                if most is not None and size is not None and size > most:
                    yield batch, f"{name} {size}, of at most {most}"
                    found += 1
                    break
            if found == _MOST:
                return


def _offer(subject: Subject, watched: Watched, key: Hashable, batch: Any, why: str) -> None:
    before = watched.contents()
    poisoned = watched.poison(0, watched.mask)
    refused = False
    try:
        subject.call(key, batch, Phase.REPLAY)
    except Exception:  # noqa: BLE001 - any exception is a refusal
        refused = True
    written = watched.ranges_of(watched.changed(poisoned))
    watched.put(before)
    if not refused:
        subject.findings.reject(
            "impossible",
            "build for an impossible batch",
            "an exception",
            f"a state ({why})",
            key=key,
        )
    elif written:
        paths = _hit(subject, key, written)
        subject.findings.reject(
            "late-refusal",
            "build for an impossible batch",
            "an exception before anything is written",
            f"one after {', '.join(paths) or 'another state'} was written ({why})",
            key=key,
        )


def _hit(subject: Subject, key: Hashable, written: MemoryRanges) -> list[str]:
    leaves = subject.captured[key].leaves
    return [leaf.path for leaf in leaves if written.overlaps(MemoryRanges.of([leaf.tensor]))]
