"""FlashAttention: owners that write its states, and what two models must share to borrow them.

A model that owns its states makes a :class:`FlashAttention2Owner` or a
:class:`FlashAttention3Owner`; one that borrows makes a :class:`FlashAttention2` or a
:class:`FlashAttention3`. Both have ``spec`` for their pool, and ``run`` for their forward. The
libraries are imported when one of them is made.
"""

from graphshare.adapters.flash_attn.fa2 import (
    FlashAttention2,
    FlashAttention2Metadata,
    FlashAttention2Owner,
)
from graphshare.adapters.flash_attn.fa3 import (
    FlashAttention3,
    FlashAttention3Metadata,
    FlashAttention3Owner,
)
from graphshare.adapters.flash_attn.fa4 import FlashAttention4Owner
from graphshare.adapters.flash_attn.library import UnsupportedBuildError
from graphshare.adapters.flash_attn.schedule import Resolved, metadata_size, resolve
from graphshare.adapters.flash_attn.specs import FlashAttention2Spec, FlashAttention3Spec
from graphshare.adapters.paged.shape import AttentionShape

__all__ = [
    "AttentionShape",
    "FlashAttention2",
    "FlashAttention2Metadata",
    "FlashAttention2Owner",
    "FlashAttention2Spec",
    "FlashAttention3",
    "FlashAttention3Metadata",
    "FlashAttention3Owner",
    "FlashAttention3Spec",
    "FlashAttention4Owner",
    "Resolved",
    "UnsupportedBuildError",
    "metadata_size",
    "resolve",
]
