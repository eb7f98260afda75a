"""vLLM 0.21.0: the draft's prefill captures on one state for each descriptor, for both phases.

Upstream asks for a forward once, so that warmup and capture run on one state, and hands over the
target's, whose buffers each later build overwrites (vLLM PR 40410, 42444, 48261). Here each phase
has its own, built just before.
"""

from __future__ import annotations

import importlib
from typing import Any

from graphshare.adapters.vllm.family import LendingFamily, asked_once
from graphshare.adapters.vllm.loops import CaptureLoops
from graphshare.capturing import Capturing
from graphshare.state import AttentionState

__all__ = ["FAMILY"]


class _Family(LendingFamily):
    version = "0.21.0"
    draft_managers_module = "vllm.v1.worker.gpu.spec_decode.eagle.cudagraph"
    lengths_bounded = False

    def wrap(self, loops: CaptureLoops, capturing: Capturing[Any], factory: Any) -> Any:
        return asked_once(loops, capturing, factory)

    def shape(self, state: AttentionState) -> Any:
        managers = importlib.import_module(self.managers_module)
        return managers.CapturedAttentionState(*state)


FAMILY = _Family()
