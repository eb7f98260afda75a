"""What vLLM calls in each of its processes, by the entry point ``vllm.general_plugins``."""

from __future__ import annotations

import os

from graphshare.adapters.vllm.switch import Mode, mode_from

__all__ = ["register"]


def register() -> None:
    """Take part as ``GRAPHSHARE_VLLM`` says; without it, return at once.

    May be called any number of times.

    Raises:
        ValueError: The switch has no good value: vLLM does not start on a misspelt one.
    """
    mode = mode_from(os.environ)
    if mode is Mode.OFF:
        return
    # Not earlier: asleep, the plug-in costs a process no import.
    from graphshare.adapters.vllm.activation import activate

    activate(mode)
