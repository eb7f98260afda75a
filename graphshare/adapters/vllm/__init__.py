"""vLLM: an EAGLE draft's prefill graphs borrow the target's attention state.

Installed beside a stock vLLM, asleep unless ``GRAPHSHARE_VLLM`` is set. Reading order: ``switch``
(the variable), ``plugin`` (what vLLM calls), ``arrival`` (waits for vLLM's worker), ``activation``
(the one patch of a class, and its undoing), ``support`` (what is left alone, and why), ``session``
(three pools for one model runner), ``owners`` (who builds which state), ``backends`` (what each
attention backend freezes), ``loops`` (in vLLM's capture loops), ``serving`` with ``choices``,
``launches`` and ``twins`` (in vLLM's steps), ``versions`` with ``signatures``, and one file a
version.
"""

from __future__ import annotations

import importlib
import typing

if typing.TYPE_CHECKING:
    from graphshare.adapters.vllm.activation import activate as activate
    from graphshare.adapters.vllm.activation import deactivate as deactivate
    from graphshare.adapters.vllm.activation import sessions as sessions
    from graphshare.adapters.vllm.activation import statistics as statistics
    from graphshare.adapters.vllm.session import VllmStatistics as VllmStatistics

__all__ = ["VllmStatistics", "activate", "deactivate", "sessions", "statistics"]

_HOMES = {
    "VllmStatistics": "session",
    "activate": "activation",
    "deactivate": "activation",
    "sessions": "activation",
    "statistics": "activation",
}


# On demand: vLLM loads the plug-in in every process, and most of them leave it asleep.
def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
