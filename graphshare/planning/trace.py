"""Traces of batches as histograms: memory does not grow with the length of a trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from graphshare.arguments import listed, whole_number, wrong_type

__all__ = ["Batch", "Bin", "Histogram", "Trace", "count_batches", "problem_of"]


MOST_TOKENS = (1 << 31) - 1
"""Rows are numbered by int32 in every kernel."""

_MOST_STEPS = 1 << 53
"""Up to as many, numbers of steps are the same as floats; sums and products stay finite."""


class Batch(NamedTuple):
    """Steps of one shape.

    Attributes:
        num_tokens: Tokens, without padding.
        num_reqs: Requests.
        query_len: Query length of all requests, or ``None`` where they differ.
        num_active_loras: LoRA adapters in use.
        steps: How many of them.
    """

    num_tokens: int
    num_reqs: int
    query_len: int | None = None
    num_active_loras: int = 0
    steps: int = 1


class Bin(NamedTuple):
    """What tells two batches apart for the planner, once it is known that they have few requests.

    The number of requests does not: a mixed key of ``s`` tokens is captured for as many requests
    as ``s`` tokens or the engine allow, and a uniform batch has as many as its length says.

    Attributes:
        num_tokens: Tokens, without padding.
        query_len: Query length of all requests, or ``None`` where they differ.
        num_active_loras: LoRA adapters in use.
    """

    num_tokens: int
    query_len: int | None
    num_active_loras: int


@dataclass(frozen=True, slots=True)
class Trace:
    """A histogram of the batches that may run on a graph, and a count of those that may not.

    Attributes:
        bins: Steps by shape, of at most ``max_tokens`` tokens and ``max_num_reqs`` requests.
        max_tokens: The most tokens that a graph may be captured for.
        max_num_reqs: The most requests of a graph: as given, or the most in ``bins``.
        eager: Steps that no graph may serve, by the field that is too large.
        eager_tokens: Their tokens.
    """

    bins: Mapping[Bin, int]
    max_tokens: int
    max_num_reqs: int
    eager: Mapping[str, int]
    eager_tokens: int

    @property
    def batches(self) -> int:
        """All steps of the trace."""
        return sum(self.bins.values()) + sum(self.eager.values())

    @property
    def tokens(self) -> int:
        """Tokens of the steps that may run on a graph, without padding."""
        return sum(one.num_tokens * count for one, count in self.bins.items())

    @property
    def query_lens(self) -> tuple[int, ...]:
        """The uniform query lengths in it, ascending."""
        return tuple(sorted({one.query_len for one in self.bins if one.query_len is not None}))

    @property
    def num_active_loras(self) -> tuple[int, ...]:
        """The numbers of active LoRA adapters in it, ascending."""
        return tuple(sorted({one.num_active_loras for one in self.bins}))


class Histogram:
    """Counts batches by shape; the arguments are those of :func:`count_batches`."""

    def __init__(self, max_tokens: int, max_num_reqs: int | None) -> None:
        self.max_tokens = whole_number("max_tokens", max_tokens, 1)
        self.max_num_reqs = (
            None if max_num_reqs is None else whole_number("max_num_reqs", max_num_reqs, 1)
        )
        self.bins: dict[Bin, int] = {}
        self.eager = {"num_tokens": 0, "num_reqs": 0}
        self.eager_tokens = 0
        self.most_reqs = 0

    def add(self, batch: Batch) -> None:
        """Count a batch, whose numbers have been looked at."""
        tokens, reqs, query_len, loras, count = batch
        if tokens > self.max_tokens:
            self.eager["num_tokens"] += count
            self.eager_tokens += tokens * count
        elif self.max_num_reqs is not None and reqs > self.max_num_reqs:
            self.eager["num_reqs"] += count
            self.eager_tokens += tokens * count
        else:
            if reqs > self.most_reqs:
                self.most_reqs = reqs
            place = Bin(tokens, query_len, loras)
            self.bins[place] = self.bins.get(place, 0) + count

    def trace(self) -> Trace:
        """What has been counted."""
        return Trace(
            MappingProxyType(self.bins),
            self.max_tokens,
            self.max_num_reqs or max(self.most_reqs, 1),
            MappingProxyType({why: count for why, count in self.eager.items() if count}),
            self.eager_tokens,
        )


def count_batches(
    batches: Iterable[Batch], *, max_tokens: int = 512, max_num_reqs: int | None = None
) -> Trace:
    """Make a trace of batches that are in memory, or come one by one.

    Args:
        batches: The batches.
        max_tokens: The most tokens that a graph may be captured for; larger batches run eagerly.
        max_num_reqs: Likewise for requests; by default the most that a batch has.

    Raises:
        TypeError: What is no batch, or not an integer where there should be one.
        ValueError: No batch has this shape.
    """
    histogram = Histogram(max_tokens, max_num_reqs)
    # One by one: there may be more than memory holds.
    if not hasattr(type(batches), "__next__"):
        batches = listed("batches", batches, "batches", "Put a single one into a list.")
    for batch in batches:
        histogram.add(_checked(batch))
    return histogram.trace()


def _checked(batch: Any) -> Batch:
    if not isinstance(batch, Batch):
        raise wrong_type("batches", "each a Batch", batch)
    tokens, reqs, query_len, loras, steps = batch
    found = Batch(
        whole_number("num_tokens", tokens, 1),
        whole_number("num_reqs", reqs, 1),
        None if query_len is None else whole_number("query_len", query_len, 1),
        whole_number("num_active_loras", loras, 0),
        whole_number("steps", steps, 1),
    )
    problem = problem_of(*found)
    if problem is not None:
        raise ValueError(f"{batch}: {problem}")
    return found


def problem_of(tokens: int, reqs: int, query_len: int | None, loras: int, count: int) -> str | None:
    """What is wrong with the numbers of a batch, if anything."""
    if tokens < 1 or reqs < 1 or count < 1:
        field, value = min(("tokens", tokens), ("requests", reqs), ("count", count), key=_second)
        return f"{field}: expected at least 1, got {value}"
    if tokens > MOST_TOKENS:
        return f"tokens: expected at most {MOST_TOKENS}, got more"
    if count > _MOST_STEPS:
        return f"count: expected at most {_MOST_STEPS}, got more"
    if reqs > tokens:
        return f"requests: expected at most tokens={tokens}, got {reqs}"
    if not 0 <= loras <= reqs:
        return f"loras: expected 0 to requests={reqs}, got {loras}"
    if query_len is not None and query_len * reqs != tokens:
        return (
            f"query_len: expected tokens / requests = {tokens} / {reqs}, got {query_len}"
            " (leave it out where query lengths differ)"
        )
    return None


def _second(pair: tuple[str, int]) -> int:
    return pair[1]
