"""Rows in blocks of one size, so that a row's bits do not depend on how many rows come with it.

A matrix product picks its kernel by shape: the same row times the same weight may differ in the
last bit between a batch of 1 and a batch of 16 rows, and a near tie between two tokens then flips.
Speculative decoding promises *the same tokens* as plain decoding, so everything that rounds runs
on blocks of ``ROW_BLOCK`` rows, whatever the batch: the same shapes, hence the same kernels, for
decoding one token and for a prefill of 64.
"""

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = ["ROW_BLOCK", "join_blocks", "split_blocks"]

ROW_BLOCK = 16
"""Rows of a block."""


def split_blocks(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cut rows into blocks, the last one filled up with zeros.

    Args:
        rows: ``[num_tokens, ...]``.

    Returns:
        ``ceil(num_tokens / ROW_BLOCK)`` tensors of ``[ROW_BLOCK, ...]``.
    """
    missing = -rows.shape[0] % ROW_BLOCK
    if missing:
        rows = functional.pad(rows, (0, 0) * (rows.ndim - 1) + (0, missing))
    return rows.split(ROW_BLOCK)


def join_blocks(blocks: list[torch.Tensor], num_tokens: int) -> torch.Tensor:
    """Undo :func:`split_blocks`.

    Returns:
        ``[num_tokens, ...]``.
    """
    return (blocks[0] if len(blocks) == 1 else torch.cat(blocks))[:num_tokens]
