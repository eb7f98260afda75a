"""FlashAttention 4: not supported."""

from __future__ import annotations

from typing import Any, NoReturn

from graphshare.adapters.flash_attn.library import UnsupportedBuildError

__all__ = ["FlashAttention4Owner"]


class FlashAttention4Owner:
    """Refused: FlashAttention 4 (``flash_attn.cute``) has not been run under this adapter.

    Raises:
        UnsupportedBuildError: Always.
    """

    def __new__(cls, *_: Any, **__: Any) -> NoReturn:
        """Refuse."""
        raise UnsupportedBuildError(
            "flash_attn4: owner",
            expected="FlashAttention 2 or 3",
            got="FlashAttention 4 (flash_attn.cute)",
            consequence="Its metadata depend on tiles, mask and head size in ways that were not "
            "confirmed on a GPU, and a state that is wrong gives wrong tokens silently",
            remedy="Use FlashAttention3Owner on compute capability 9.0, FlashAttention2Owner, or "
            "an owner of your own",
            backend="flash_attn4",
        )
