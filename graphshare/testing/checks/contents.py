"""What a build writes: everything, and the same for the same batch.

The memory of all states is poisoned before each build, with one poison in a first pass over the
batches and with another in a second pass that goes backwards. What a build left alone is the
poison; what it took from elsewhere (a staging buffer on the host, the batch before) differs
between the passes, for other batches, of another key too, came before.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple

import torch

from graphshare.owner import Phase
from graphshare.testing.memory import Bytes, Leaf, Watched
from graphshare.testing.subject import Subject

__all__ = ["run"]


class _Pair(NamedTuple):
    """Contents after a build on each of the two poisons."""

    first: Bytes
    second: Bytes


class _Parts(NamedTuple):
    """Which elements of one leaf, ``[*shape]`` bool each, are as they must not be."""

    unwritten: torch.Tensor
    padding: torch.Tensor
    unlike: torch.Tensor
    unlike_padding: torch.Tensor


def run(subject: Subject, watched: Watched) -> None:
    """Build everything on poisoned memory, and look at it."""
    _say_what_batches_lack(subject)
    for key in subject.captured:
        declared = subject.declared_writes(key)
        own = None if declared is None else watched.mask_of(declared)
        where = watched.mask if own is None else _both(watched.mask, own)
        written = [torch.zeros_like(mask) for mask in watched.mask]
        before = watched.contents()
        try:
            _Passes(subject, watched, key, where, own, written).run()
        finally:
            # What no build writes, an owner may have written once and for all.
            watched.put(
                [
                    torch.where(mask, now, then)
                    for mask, now, then in zip(written, watched.contents(), before, strict=True)
                ]
            )
        subject.overwritten[key] = watched.ranges_of(written)


def _say_what_batches_lack(subject: Subject) -> None:
    """What only shows with a batch, or with one that leaves padding."""
    count = len(subject.captured)
    none = [key for key in subject.captured if not subject.replays(key)]
    for check in ("unwritten", "padding", "repeatable") if none else ():
        subject.findings.incomplete(check, f"{len(none)} of {count} keys have no batch")
    full: list[Hashable] = []
    for key in subject.captured:
        # Every batch: what live_rows says of it is looked at here, whether it is used later or not.
        leave = [_leaves_padding(subject, key, index) for index in subject.replays(key)]
        if leave and not any(leave):
            full.append(key)
    if full:
        subject.findings.incomplete(
            "padding",
            f"for {len(full)} of {count} keys no batch is known to leave any: give smaller "
            "batches, or live_rows",
        )


def _leaves_padding(subject: Subject, key: Hashable, index: int) -> bool:
    found = False
    for leaf in subject.captured[key].leaves:
        rows = subject.certain_rows(key, index, leaf)
        found |= leaf.tensor.ndim > 0 and rows is not None and rows.most < leaf.tensor.shape[0]
    return found


def _both(mine: Bytes, theirs: Bytes) -> Bytes:
    return [a & b for a, b in zip(mine, theirs, strict=True)]


class _Passes:
    """Both passes for one key."""

    def __init__(
        self,
        subject: Subject,
        watched: Watched,
        key: Hashable,
        where: Bytes,
        own: Bytes | None,
        written: Bytes,
    ) -> None:
        self._subject = subject
        self._watched = watched
        self._key = key
        self._where = where  # what is poisoned
        self._own = own  # what the owner says that it writes
        self._written = written
        self._leaves = subject.steady(key)

    def run(self) -> None:
        for phase in (Phase.CAPTURE, Phase.WARMUP):
            first, second = (self._build(None, phase, which) for which in (0, 1))
            if first is not None and second is not None:
                self._look_at_capture(phase, _Pair(first, second))
        indices = self._subject.replays(self._key)
        forward = [self._build(index, Phase.REPLAY, 0) for index in indices]
        for other in self._others():
            for index in self._subject.replays(other):
                self._subject.build(other, index, Phase.REPLAY, keep=False)
        for index in reversed(indices):
            first, second = forward[index], self._build(index, Phase.REPLAY, 1)
            if first is not None and second is not None:
                self._look_at_replay(index, _Pair(first, second))
            forward[index] = None
            if index == 0 and second is not None:
                # Twice in a row: an owner may skip what it takes for written.
                third = self._build(index, Phase.REPLAY, 0)
                if third is not None:
                    self._look_at_replay(index, _Pair(third, second))

    def _others(self) -> list[Hashable]:
        """The largest key but this, so that leftovers reach as many rows as can be."""
        return [key for key in self._subject.captured if key != self._key][:1]

    def _build(self, index: int | None, phase: Phase, which: int) -> Bytes | None:
        poisoned = self._watched.poison(which, self._where)
        state = self._subject.build(self._key, index, phase, keep=False)
        changed = self._watched.changed(poisoned)
        for mask, more in zip(self._written, changed, strict=True):
            mask |= more
        if state is None:
            return None
        captured = self._subject.captured[self._key]
        if phase is Phase.WARMUP and not captured.checker.matches(state):
            return None  # a warmup may have places of its own
        return self._watched.contents()

    def _look_at_capture(self, phase: Phase, pair: _Pair) -> None:
        for leaf in self._leaves:
            first = self._watched.kept(leaf, pair.first, 0)
            kept = first & self._watched.kept(leaf, pair.second, 1) & self._declared(leaf)
            if bool(kept.any()):
                self._subject.findings.reject(
                    "stale-capture",
                    f"{leaf.path or 'the state'} after a build with no batch",
                    "every element written",
                    f"{_counted(kept, 'left as it was', 'left as they were')}, for {phase.name}",
                    key=self._key,
                    path=leaf.path,
                )

    def _declared(self, leaf: Leaf) -> torch.Tensor:
        if self._own is None:
            return torch.ones((), dtype=torch.bool, device=leaf.tensor.device)
        return self._watched.elements(leaf, self._own).all(-1)

    def _look_at_replay(self, index: int, pair: _Pair) -> None:
        for leaf in self._leaves:
            first = self._watched.elements(leaf, pair.first)
            second = self._watched.elements(leaf, pair.second)
            if torch.equal(first, second):
                continue
            parts = self._parts(leaf, index, pair, (first != second).any(-1))
            self._report(leaf, index, parts)

    def _parts(self, leaf: Leaf, index: int, pair: _Pair, differ: torch.Tensor) -> _Parts:
        differ = differ & self._declared(leaf)
        kept = self._watched.kept(leaf, pair.first, 0) | self._watched.kept(leaf, pair.second, 1)
        kept &= differ
        unlike = differ & ~kept
        rows, declared = self._subject.live_rows(self._key, index, leaf)
        end = rows
        if end is None or not declared:
            # By size several counts may fit; what ends a leaf unwritten is padding, then.
            written = _written_rows(kept)
            end = written if end is None else min(written, end)
        past = _rows_past(leaf, end)
        # In a live row, what comes after the last element that was written is padding too.
        tail = _tails(kept) if kept.ndim > 1 else torch.zeros_like(kept)
        unwritten = kept & ~past & ~tail
        # With live elements forgotten, it is not the padding that was.
        padding = torch.zeros_like(kept) if bool(unwritten.any()) else kept & (past | tail)
        known = torch.zeros_like(kept) if rows is None else _rows_past(leaf, rows)
        return _Parts(unwritten, padding, unlike & ~known, unlike & known)

    def _report(self, leaf: Leaf, index: int, parts: _Parts) -> None:
        where = leaf.path or "the state"
        for check, what, expected, found, got in (
            ("unwritten", f"live elements of {where}", "every one written", parts.unwritten, None),
            ("padding", f"padding of {where}", "every element written", parts.padding, None),
            (
                "padding",
                f"padding of {where}",
                "every element written from this batch",
                parts.unlike_padding,
                "that depends on the builds before",
            ),
            (
                "repeatable",
                f"{where} in two builds of one batch",
                "the same elements",
                parts.unlike,
                "that differs",
            ),
        ):
            if bool(found.any()):
                texts = (got, got) if got else ("left as it was", "left as they were")
                self._subject.findings.reject(
                    check,
                    what,
                    expected,
                    _counted(found, *texts),
                    key=self._key,
                    path=leaf.path,
                    batch=index,
                )


def _rows_past(leaf: Leaf, rows: int) -> torch.Tensor:
    shape = leaf.tensor.shape
    if not shape:
        return torch.zeros((), dtype=torch.bool, device=leaf.tensor.device)
    past = torch.arange(shape[0], device=leaf.tensor.device) >= rows
    return past.view(-1, *[1] * (len(shape) - 1)).expand(shape)


def _written_rows(kept: torch.Tensor) -> int:
    """Rows up to the last one of which something was written, if that is any: the live ones."""
    if not kept.ndim:
        return 1
    rows = (~kept).flatten(1).any(1) if kept.ndim > 1 else ~kept
    found = rows.nonzero()
    # With no row written at all none is padding: the whole leaf was forgotten.
    return int(found[-1]) + 1 if len(found) else kept.shape[0]


def _tails(kept: torch.Tensor) -> torch.Tensor:
    """Elements with nothing written after them in their row, but something before."""
    after = kept.flip(-1).to(torch.uint8).cumprod(-1).flip(-1).bool()
    return after & ~kept.all(-1, keepdim=True)


def _counted(found: torch.Tensor, one: str, many: str) -> str:
    places: Iterable[list[int]] = found.nonzero()[:1].tolist()
    count = int(found.sum())
    first = next(iter(places), [])
    where = f", at {first}" if first else ""
    if count == 1:
        return f"1 of {found.numel()} {one}{where}"
    return f"{count} of {found.numel()} {many}{', the first' + where[1:] if first else ''}"
