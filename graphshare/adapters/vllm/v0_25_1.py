"""vLLM 0.25.1: the draft's prefill captures on states that the target's loop returned.

Upstream hands over a pair of states, one for the warmup and one for the capture. Both are views of
buffers that each later build overwrites (vLLM PR 48261), so here a state is built again each time
the draft's loop looks it up, which it does once for each phase.
"""

from __future__ import annotations

import importlib
from typing import Any

from graphshare.adapters.vllm.family import LendingFamily
from graphshare.state import AttentionState

__all__ = ["FAMILY"]


class _Family(LendingFamily):
    version = "0.25.1"

    def shape(self, state: AttentionState) -> Any:
        managers = importlib.import_module(self.managers_module)
        return managers.AttentionStatePair(warmup=state, captured=state)


FAMILY = _Family()
