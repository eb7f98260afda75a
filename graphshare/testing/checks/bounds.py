"""Elements that must be valid for the kernels: lengths of at least 1, pages that exist."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from graphshare.owner import Phase
from graphshare.testing.memory import Leaf
from graphshare.testing.subject import Subject, matches

__all__ = ["run"]


def run(subject: Subject) -> None:
    """Look at all elements in builds with no batch, and at the declared live rows of batches."""
    if not subject.bounds:
        subject.findings.not_checked["bounds"] = "no bounds were given"
        return
    for key in subject.captured:
        for phase in (Phase.WARMUP, Phase.CAPTURE):
            state = subject.build(key, None, phase)
            for leaf in () if state is None else subject.leaves(state):
                _look(subject, key, phase, None, leaf, leaf.tensor)
        for index in subject.replays(key):
            state = subject.build(key, index, Phase.REPLAY)
            for leaf in () if state is None else subject.leaves(state):
                rows, declared = subject.live_rows(key, index, leaf)
                if declared:  # padding may hold anything that kernels pass over
                    _look(subject, key, Phase.REPLAY, index, leaf, leaf.tensor[:rows])


def _look(
    subject: Subject,
    key: Hashable,
    phase: Phase,
    index: int | None,
    leaf: Leaf,
    part: torch.Tensor,
) -> None:
    for pattern, (least, most) in subject.bounds.items():
        if not part.numel() or not matches(leaf.path, [pattern]):
            continue
        low, high = part.min().item(), part.max().item()
        if not (least <= low and high <= most):
            subject.findings.reject(
                "bounds",
                f"elements of {leaf.path or 'the state'}",
                f"from {least} to {most}",
                f"{low if low < least else high} after a build for {phase.name}",
                key=key,
                path=leaf.path,
                batch=index,
            )
        return
