"""vLLM 0.26.0: the draft's prefill captures on states built through the target's buffers.

What upstream does by convention since then (vLLM PR 48261) is what graphshare checks: the loops ask
for a state for each phase, and the target's owner builds it.
"""

from __future__ import annotations

from graphshare.adapters.vllm.family import Family

__all__ = ["FAMILY"]


class _Family(Family):
    version = "0.26.0"


FAMILY = _Family()
