"""Requests that arrive while an engine runs."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import strategies as st

__all__ = ["Arrival", "arrival_traces"]


class Arrival(NamedTuple):
    """One request.

    Attributes:
        step: The engine's step in which it arrives, from 0.
        prompt_len: Tokens of its prompt, at least 1.
        max_new_tokens: Tokens to produce, at least 1.
    """

    step: int
    prompt_len: int
    max_new_tokens: int


@st.composite
def arrival_traces(
    draw: st.DrawFn,
    *,
    max_requests: int = 8,
    max_gap: int = 4,
    max_prompt_len: int = 30,
    max_new_tokens: int = 16,
    max_model_len: int | None = None,
) -> list[Arrival]:
    """Traces of at least one request, by step; several may arrive in one step.

    Args:
        draw: Hypothesis's.
        max_requests: Most requests.
        max_gap: Most steps between an arrival and the next.
        max_prompt_len: Longest prompt.
        max_new_tokens: Most tokens to produce for a request.
        max_model_len: Most tokens of a request in all; ``None`` for no limit.

    Raises:
        ValueError: ``max_model_len`` leaves no room for a prompt and a new token.
    """
    if max_model_len is not None and max_model_len < 2:
        raise ValueError(f"max_model_len: expected at least 2, got {max_model_len}")
    longest = max_prompt_len if max_model_len is None else min(max_prompt_len, max_model_len - 1)
    trace: list[Arrival] = []
    step = 0
    for _ in range(draw(st.integers(1, max_requests))):
        step += draw(st.integers(0, max_gap))
        prompt_len = draw(st.integers(1, longest))
        most = max_new_tokens
        if max_model_len is not None:
            most = min(most, max_model_len - prompt_len)
        trace.append(Arrival(step, prompt_len, draw(st.integers(1, most))))
    return trace
