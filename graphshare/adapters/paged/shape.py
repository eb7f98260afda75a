"""What the attention layers of one model ask of a kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphshare.arguments import check_flag, number, whole_number, wrong_type

__all__ = ["AttentionShape"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Heads and mask of one model's attention layers, on one rank.

    Args:
        num_q_heads: Query heads.
        num_kv_heads: Key and value heads; divides ``num_q_heads``.
        head_size: Elements of one head, the same for keys and values.
        causal: Whether a row sees only its own position and earlier ones.
        window: Tokens that a row sees before its own; -1 for all.
        dtype: Of queries, keys and values.
        softmax_scale: By default ``head_size ** -0.5``.
        softcap: Scores become ``softcap * tanh(score / softcap)``; 0 for no cap.

    Raises:
        TypeError: An argument is of another type.
        ValueError: For sizes below 1, query heads that the KV heads do not divide, a window below
            -1, a scale that is not above 0, a cap below 0, one of these infinite, or a dtype that
            holds integers.
    """

    num_q_heads: int
    num_kv_heads: int
    head_size: int
    causal: bool = True
    window: int = -1
    dtype: torch.dtype = torch.bfloat16
    softmax_scale: float | None = None
    softcap: float = 0.0

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name in ("num_q_heads", "num_kv_heads", "head_size"):
            put(self, name, whole_number(name, getattr(self, name), 1))
        put(self, "window", whole_number("window", self.window, -1))
        check_flag("causal", self.causal)
        if not isinstance(self.dtype, torch.dtype):
            raise wrong_type("dtype", "a torch.dtype", self.dtype)
        if not self.dtype.is_floating_point:
            raise ValueError(f"dtype: expected one of floating point numbers, got {self.dtype}")
        if self.softmax_scale is not None and not number("softmax_scale", self.softmax_scale) > 0:
            raise ValueError(f"softmax_scale: expected more than 0, got {self.softmax_scale}")
        if number("softcap", self.softcap) < 0:
            raise ValueError(f"softcap: expected 0 or more, got {self.softcap}")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads: expected a multiple of num_kv_heads={self.num_kv_heads}, "
                f"got {self.num_q_heads}"
            )

    @property
    def window_size(self) -> tuple[int, int]:
        """Tokens before and after a row, -1 for all, as the libraries take a window."""
        if self.window < 0:
            return (-1, -1)
        return (self.window, 0 if self.causal else -1)
