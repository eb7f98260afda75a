"""The page on FlashInfer says of memory what the adapter computes, for the GPU that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphshare.adapters.flashinfer import (
    batch_attention_float_bytes,
    decode_float_bytes,
    fa2_float_bytes,
)

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "run-on-flashinfer.md"
HEADS = (32, 8, 128)
NUM_SMS = 132
"""Multiprocessors of an H200."""
BATCH_ATTENTION_BYTES = 6_459_412
"""Of a plan that was seen there; `tests/adapters/test_flashinfer_plans.py` holds the plan to it."""


def _section() -> str:
    text = PAGE.read_text("utf-8").split("## What a key costs")[1].split("\n## ")[0]
    return " ".join(text.split())


@pytest.mark.parametrize(
    "said",
    [
        f"{decode_float_bytes(*HEADS, NUM_SMS) / 1e6:.0f} MB for decode",
        f"{batch_attention_float_bytes(*HEADS[1:], NUM_SMS) / 1e6:.0f} MB for `BatchAttention`",
        f"{fa2_float_bytes(64, 8, *HEADS, NUM_SMS) / 1e6:.0f} MB for 64 rows of 8 requests",
        f"{fa2_float_bytes(8192, 256, *HEADS, NUM_SMS) / 1e9:.1f} GB for 8192 rows of 256",
        f"{BATCH_ATTENTION_BYTES / (1 << 20):.1f} MiB, which are copied",
    ],
)
def test_a_size(said: str) -> None:
    assert said in _section()


def test_no_other_size_is_said() -> None:
    """But for what the library allocates by itself: 8 MiB on the device, and 8 MiB pinned."""
    words = _section().split()
    units = [word for word in words if word.strip(".,:") in ("KB", "MB", "GB", "KiB", "MiB")]
    assert len(units) == 5 + 2
