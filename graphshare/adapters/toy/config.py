"""Sizes of the toy models and of the engine around them."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["BOS", "EOS", "EngineConfig", "ToyConfig"]

BOS = 256
"""Token before each text; tokens below it are bytes."""
EOS = 257
"""Token after each text: a request that produces it is complete."""


def _require_positive(config: object) -> None:
    for field in fields(config):  # pyright: ignore[reportArgumentType]
        value = getattr(config, field.name)
        if value <= 0:
            raise ValueError(f"{field.name}: expected a positive number, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyConfig:
    """Sizes of the target; the draft is one layer of the same sizes.

    Args:
        vocab_size: 256 bytes and the special tokens.
        hidden_size: Width of the residual stream.
        num_layers: Decoder layers of the target.
        num_q_heads: Query heads, a multiple of ``num_kv_heads``.
        num_kv_heads: Key and value heads.
        head_size: Elements of one head, even (RoPE turns pairs).
        intermediate_size: Width of the SwiGLU layer.
        max_model_len: Positions that RoPE is tabulated for.
        rope_theta: Base of the RoPE frequencies.
        norm_eps: Added to the mean square in RMSNorm.

    Raises:
        ValueError: For sizes that do not go together.
    """

    vocab_size: int = 258
    hidden_size: int = 192
    num_layers: int = 4
    num_q_heads: int = 6
    num_kv_heads: int = 2
    head_size: int = 32
    intermediate_size: int = 448
    max_model_len: int = 512
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        _require_positive(self)
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads: expected a multiple of num_kv_heads ({self.num_kv_heads}), "
                f"got {self.num_q_heads}"
            )
        if self.head_size % 2:
            raise ValueError(f"head_size: expected an even number, got {self.head_size}")
        if self.vocab_size <= EOS:
            raise ValueError(f"vocab_size: expected at least {EOS + 1}, got {self.vocab_size}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the engine sizes its buffers for.

    Args:
        max_num_reqs: Requests in flight.
        max_num_tokens: Token rows of one step: the budget that prefill chunks share with decodes.
        num_draft_tokens: Draft tokens a step for each request (K).
        page_size: Tokens of one page of the KV cache.
        num_pages: Pages of the cache, the scratch page included.
        max_model_len: Most tokens of one request, a multiple of ``page_size``. The width of every
            block table, so part of the shape of every attention: the same for all that should give
            the same bits.

    Raises:
        ValueError: For sizes that do not go together.
    """

    max_num_reqs: int = 8
    max_num_tokens: int = 64
    num_draft_tokens: int = 3
    page_size: int = 16
    num_pages: int = 257
    max_model_len: int = 512

    def __post_init__(self) -> None:
        _require_positive(self)
        if self.max_model_len % self.page_size:
            raise ValueError(
                f"max_model_len: expected a multiple of page_size ({self.page_size}), "
                f"got {self.max_model_len}"
            )
        if self.num_pages <= self.max_pages:
            raise ValueError(
                f"num_pages: expected more than {self.max_pages}, so that one request of "
                f"{self.max_model_len} tokens fits beside the scratch page, got {self.num_pages}"
            )
        if self.max_num_tokens < self.max_num_reqs * (self.num_draft_tokens + 1):
            raise ValueError(
                f"max_num_tokens: expected at least {self.max_num_reqs} requests times "
                f"{self.num_draft_tokens + 1} rows, got {self.max_num_tokens}"
            )

    @property
    def max_pages(self) -> int:
        """Width of a block table."""
        return self.max_model_len // self.page_size
