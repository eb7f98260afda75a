"""What a step costs, and what a graph costs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from graphshare.arguments import number, whole_number, wrong_type
from graphshare.descriptor import BatchDescriptor

__all__ = ["Limit", "Work"]

_MOST_WORK = 1e9
"""Tokens. With more, one token of padding would be lost in the rounding of sums."""

_LEAST_TAKEN, _MOST_TAKEN = 1e-15, 1e15
"""Of a limit. Beyond, quotients of work and of what is taken would not be finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one step costs, in tokens: the unit is what one token of a replay costs.

    A step on a key costs ``key.num_tokens + per_step``, and ``mixed_per_step`` more on a key that
    takes any query lengths. One that no key covers costs its own tokens and ``per_step``.

    With ``mixed_per_step=0`` a mixed key does all that a uniform key of its size does, at the same
    cost, so the best plan has mixed keys only.

    Args:
        per_step: What every step costs, whatever its size. Changes no plan, only ratios.
        mixed_per_step: What a step on a mixed key costs beyond one on a uniform key of its size,
            for attention kernels that are faster where all query lengths are alike.

    Raises:
        TypeError: A cost that is no number.
        ValueError: A negative cost, or one above 1e9 tokens.
    """

    per_step: float = 0
    mixed_per_step: float = 0

    def __post_init__(self) -> None:
        _check("per_step", self.per_step, 0, _MOST_WORK)
        _check("mixed_per_step", self.mixed_per_step, 0, _MOST_WORK)

    def on(self, num_tokens: int, *, uniform: bool) -> float:
        """What a step costs on a key of that many tokens."""
        return num_tokens + self.per_step + (0 if uniform else self.mixed_per_step)

    def on_key(self, key: BatchDescriptor) -> float:
        """What a step costs on ``key``."""
        return self.on(key.num_tokens, uniform=key.uniform_query_len is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """How many graphs there may be, or how much memory or time they may take.

    Together the keys of a plan may take at most ``total``, where a key takes ``per_graph`` and
    ``per_token`` for each of its tokens, and all together ``once`` (the working memory that graphs
    of one memory pool share: see :func:`graphshare.planning.estimate`).

    Args:
        total: The limit; infinite for none.
        per_graph: What each graph takes. Not all of ``per_graph`` and ``per_token`` are 0.
        per_token: What each of its tokens takes.
        once: What the set takes as a whole.
        unit: Of all these, for messages.

    Raises:
        TypeError: What is no number, or a unit that is no string.
        ValueError: A negative number, one that is neither 0 nor between 1e-15 and 1e15, or graphs
            that take nothing. In units of that size choose others.

    Example:
        >>> Limit.graphs(16).total
        16
    """

    total: float
    per_graph: float = 1
    per_token: float = 0
    once: float = 0
    unit: str = "graphs"

    def __post_init__(self) -> None:
        if self.total != math.inf:
            _check("total", self.total, 0, math.inf)
        for name in ("per_graph", "per_token", "once"):
            _check(name, getattr(self, name), _LEAST_TAKEN, _MOST_TAKEN)
        if not isinstance(self.unit, str):
            raise wrong_type("unit", "a string", self.unit)
        if not self.per_graph and not self.per_token:
            raise ValueError("per_graph: expected more than 0 where per_token is 0, got 0")

    @classmethod
    def graphs(cls, total: int) -> Limit:
        """At most ``total`` graphs.

        Raises:
            TypeError: No integer.
            ValueError: Below 0.
        """
        return cls(total=whole_number("graphs", total, 0))

    def of(self, num_tokens: int) -> float:
        """What a graph of that many tokens takes."""
        return self.per_graph + self.per_token * num_tokens

    def taken(self, keys: tuple[BatchDescriptor, ...]) -> float:
        """What a set of keys takes."""
        return (self.once if keys else 0) + sum(self.of(key.num_tokens) for key in keys)


def _check(name: str, value: Any, least: float, most: float) -> None:
    """Refuse what is neither 0 nor within the limits.

    Raises:
        TypeError: It is no number.
        ValueError: It is another.
    """
    found = number(name, value)
    if found and not least <= found <= most:
        limits = f"0 to {most:g}" if least == 0 else f"0, or {least:g} to {most:g}"
        raise ValueError(f"{name}: expected {limits}, got {found:g}")
