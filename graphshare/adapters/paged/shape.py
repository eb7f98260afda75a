"""What the attention layers of one model ask of a kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
        ValueError: For sizes below 1, query heads that the KV heads do not divide, a window below
            -1, a cap below 0.
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
        for name in ("num_q_heads", "num_kv_heads", "head_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads: expected a multiple of num_kv_heads={self.num_kv_heads}, "
                f"got {self.num_q_heads}"
            )
        if self.window < -1:
            raise ValueError(f"window: expected -1 or more, got {self.window}")
        if not self.softcap >= 0:
            raise ValueError(f"softcap: expected 0 or more, got {self.softcap}")

    @property
    def window_size(self) -> tuple[int, int]:
        """Tokens before and after a row, -1 for all, as the libraries take a window."""
        if self.window < 0:
            return (-1, -1)
        return (self.window, 0 if self.causal else -1)
