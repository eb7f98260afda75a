"""Elements that must be valid for the kernels: lengths of at least 1, pages that exist."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from graphshare.owner import Phase
from graphshare.testing.memory import Leaf
from graphshare.testing.subject import Subject

__all__ = ["run"]


def run(subject: Subject) -> None:
    """Look at all elements in builds with no batch, and at the live rows of batches.

    What lies past the live rows is no fault: padding may hold what the kernels pass over, such as
    a length of 0. That it does is a fact.
    """
    if not subject.bounds:
        subject.findings.incomplete("bounds", "no bounds were given")
        return
    looks = _Looks(subject)
    for key in subject.captured:
        for phase in (Phase.WARMUP, Phase.CAPTURE):
            looks.without_batch(key, phase)
        for index in subject.replays(key):
            looks.replay(key, index)
    looks.report()


class _Looks:
    """What was seen of all builds."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._padding: dict[str, float] = {}
        self._unknown: dict[str, None] = {}
        self._partly: dict[str, None] = {}

    def without_batch(self, key: Hashable, phase: Phase) -> None:
        state = self._subject.build(key, None, phase)
        for leaf in () if state is None else self._subject.leaves(state):
            self._look(key, phase, None, leaf, leaf.tensor)

    def replay(self, key: Hashable, index: int) -> None:
        state = self._subject.build(key, index, Phase.REPLAY)
        for leaf in () if state is None else self._subject.leaves(state):
            if self._subject.bound_of(leaf.path) is None:
                continue
            rows = self._subject.certain_rows(key, index, leaf)
            if rows is None:
                self._unknown[leaf.path] = None
                continue
            if rows.least < rows.most:
                self._partly[leaf.path] = None
            live = leaf.tensor[: rows.least] if leaf.tensor.ndim else leaf.tensor
            self._look(key, Phase.REPLAY, index, leaf, live)
            if leaf.tensor.ndim:
                wrong = self._outside(leaf, leaf.tensor[rows.most :])
                if wrong is not None:
                    self._padding.setdefault(leaf.path, wrong)

    def _look(
        self, key: Hashable, phase: Phase, index: int | None, leaf: Leaf, part: torch.Tensor
    ) -> None:
        wrong = self._outside(leaf, part)
        if wrong is not None:
            least, most = self._subject.bounds[self._subject.bound_of(leaf.path) or ""]
            self._subject.findings.reject(
                "bounds",
                f"elements of {leaf.path or 'the state'}",
                f"from {least} to {most}",
                f"{wrong} after a build for {phase.name}",
                key=key,
                path=leaf.path,
                batch=index,
            )

    def _outside(self, leaf: Leaf, part: torch.Tensor) -> float | None:
        """An element that is out of bounds, if one is."""
        pattern = self._subject.bound_of(leaf.path)
        if pattern is None or not part.numel():
            return None
        least, most = self._subject.bounds[pattern]
        low, high = part.min().item(), part.max().item()
        if least <= low and high <= most:
            return None
        return low if not least <= low else high

    def report(self) -> None:
        findings = self._subject.findings
        if self._padding:
            shown = ", ".join(f"{path or 'the state'} {n}" for path, n in self._padding.items())
            findings.fact(
                "padding-out-of-bounds",
                f"rows past the batch hold values out of bounds ({shown}): right for kernels that "
                "pass over such rows, such as those of length 0, and for no others",
                self._padding,
            )
        why = "the owner's live_rows does not say which rows are live, and {} from its size"
        if self._unknown:
            findings.incomplete(
                "bounds",
                f"replays of {_shown(self._unknown)}: {why.format('nothing follows')} and the "
                "num_reqs and num_tokens of key and batch",
            )
        if self._partly:
            findings.incomplete(
                "bounds",
                f"some rows of {_shown(self._partly)} in replays: {why.format('two counts fit')}",
            )


def _shown(paths: dict[str, None]) -> str:
    return ", ".join(path or "the state" for path in paths)
