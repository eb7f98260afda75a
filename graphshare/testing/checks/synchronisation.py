"""Whether a rebuild makes the host wait for the device."""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from pathlib import Path

import torch

from graphshare.owner import Phase
from graphshare.testing.subject import Subject

__all__ = ["run"]


def run(subject: Subject) -> None:
    """Build once more for a batch of each key, with torch watching for synchronisation."""
    if subject.device.type != "cuda":
        subject.findings.incomplete("host-sync", "needs a CUDA device")
        return
    none = [key for key in subject.captured if not subject.replays(key)]
    if none:
        subject.findings.incomplete(
            "host-sync", f"{len(none)} of {len(subject.captured)} keys have no batch"
        )
    for key in subject.captured:
        for index in subject.replays(key)[:1]:
            subject.build(key, index, Phase.REPLAY, keep=False)
            _watch(subject, key, index)


def _watch(subject: Subject, key: Hashable, index: int) -> None:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            subject.build(key, index, Phase.REPLAY, keep=False)
        finally:
            torch.cuda.set_sync_debug_mode(before)
    # Turning the mode on warns too, that it does not see everything.
    seen = [each for each in caught if "called a synchronizing" in str(each.message)]
    if seen:
        where = f"{Path(seen[0].filename).name}:{seen[0].lineno}"
        subject.findings.reject(
            "host-sync",
            "build for REPLAY",
            "no wait for the device",
            f"{len(seen)}, the first at {where}",
            key=key,
            batch=index,
        )
