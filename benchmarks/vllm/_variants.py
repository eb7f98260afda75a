"""vLLM with graphshare's hooks on and off, within one process and on the same graphs."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks._measure import Ratio

__all__ = ["SHARE", "as_variant", "names", "share_of_skipping"]

SHARE = "share_of_what_skipping_saves"


def names(session: Any) -> list[str]:
    """What can be compared: ``on``, ``off``, and where vLLM rebuilds, ``skipped``.

    ``skipped`` leaves out vLLM 0.20.2's rebuild before each draft prefill and checks nothing: what
    there is to win.
    """
    rebuilds = session.family.rebuilds_prefill is not None
    return ["on", "off", "skipped"] if rebuilds else ["on", "off"]


@contextmanager
def as_variant(name: str, session: Any, speculator: Any) -> Iterator[None]:
    """Run vLLM like this."""
    (session.resume if name == "on" else session.pause)()
    if name != "skipped":
        yield
        return
    rebuilds = session.family.rebuilds_prefill
    build = speculator._build_draft_attn_metadata

    def skipping(*args: Any, **kwargs: Any) -> Any:
        return None if rebuilds(kwargs) else build(*args, **kwargs)

    speculator._build_draft_attn_metadata = skipping
    try:
        yield
    finally:
        del speculator._build_draft_attn_metadata


def share_of_skipping(rounds: Sequence[tuple[float, float, float]]) -> Ratio:
    """How much of what skipping the rebuild saves is saved by borrowing, with a 95% interval.

    Args:
        rounds: Times with the hooks on, with them off, and with the rebuild skipped.
    """
    rng = random.Random(0)

    def share(sample: Sequence[tuple[float, float, float]]) -> float:
        won = statistics.median(off - on for on, off, _ in sample)
        there = statistics.median(off - skipped for _, off, skipped in sample)
        return won / there if there else math.nan

    resampled = sorted(share(rng.choices(rounds, k=len(rounds))) for _ in range(1000))
    return Ratio(share(rounds), resampled[25], resampled[975])
