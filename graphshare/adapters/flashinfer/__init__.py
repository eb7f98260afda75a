"""FlashInfer: an owner that writes its states, and what two models must share to borrow them.

A model that owns its states makes a :class:`FlashInferOwner`; one that borrows makes a
:class:`FlashInfer`. Both have ``spec`` for their pool, and ``run`` for their forward. The library
is imported when one of them is made.
"""

from graphshare.adapters.flashinfer.attention import FlashInfer, FlashInferMetadata, PlannedFor
from graphshare.adapters.flashinfer.library import UnsupportedFlashInferError
from graphshare.adapters.flashinfer.lists import PageLists
from graphshare.adapters.flashinfer.memory import FlashInferMemory, KeyMemory
from graphshare.adapters.flashinfer.owner import FlashInferOwner
from graphshare.adapters.flashinfer.planner import Planner
from graphshare.adapters.flashinfer.plans import (
    BatchAttentionPlan,
    DecodePlan,
    FA2Plan,
    FA3Plan,
    Kernel,
    batch_attention_float_bytes,
    decode_float_bytes,
    fa2_float_bytes,
)
from graphshare.adapters.flashinfer.spec import FlashInferSpec
from graphshare.adapters.paged.shape import AttentionShape

__all__ = [
    "AttentionShape",
    "BatchAttentionPlan",
    "DecodePlan",
    "FA2Plan",
    "FA3Plan",
    "FlashInfer",
    "FlashInferMemory",
    "FlashInferMetadata",
    "FlashInferOwner",
    "FlashInferSpec",
    "Kernel",
    "KeyMemory",
    "PageLists",
    "PlannedFor",
    "Planner",
    "UnsupportedFlashInferError",
    "batch_attention_float_bytes",
    "decode_float_bytes",
    "fa2_float_bytes",
]
