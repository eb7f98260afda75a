"""What the attention kernels of the adapters have in common: a step over a paged KV cache.

An engine describes a step by a :class:`PagedBatch`; an owner of one kernel library writes it into
the buffers that its kernels read. Nothing here knows a kernel library.
"""

from graphshare.adapters.paged.batch import PagedBatch, PagedCapacity, dummy_batch
from graphshare.adapters.paged.buffers import PagedBuffers, PagedViews
from graphshare.adapters.paged.shape import AttentionShape

__all__ = [
    "AttentionShape",
    "PagedBatch",
    "PagedBuffers",
    "PagedCapacity",
    "PagedViews",
    "dummy_batch",
]
