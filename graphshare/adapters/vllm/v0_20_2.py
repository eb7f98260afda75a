"""vLLM 0.20.2: the draft rebuilds the metadata before each of its prefills; here it borrows.

Its loop builds through the draft's own groups, and its step calls ``_build_draft_attn_metadata``
once more before the graph, with a query length of more than one. Borrowing, the loop gets the
target's state, and that call does nothing. All draft decodes of a step are one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from graphshare.adapters.vllm.family import Builds, Family, asked_once
from graphshare.adapters.vllm.loops import CaptureLoops
from graphshare.capturing import Capturing

__all__ = ["FAMILY"]


class _Family(Family):
    version = "0.20.2"
    draft_managers_module = "vllm.v1.worker.gpu.spec_decode.eagle.cudagraph"
    lengths_bounded = False

    def wrap(self, loops: CaptureLoops, capturing: Capturing[Any], factory: Any) -> Any:
        return asked_once(loops, capturing, factory)

    @staticmethod
    def rebuilds_prefill(kwargs: Mapping[str, Any]) -> bool:
        return kwargs["max_query_len"] > 1

    @staticmethod
    def without_rebuild(build: Builds, active: Callable[[], bool]) -> Builds:
        def built(
            num_reqs: int, num_reqs_padded: int, num_tokens_padded: int, max_query_len: int
        ) -> Any:
            if max_query_len > 1 and active():
                return None  # vLLM drops it anyway: the call was for its effect on the buffers
            return build(num_reqs, num_reqs_padded, num_tokens_padded, max_query_len)

        return built


FAMILY = _Family()
