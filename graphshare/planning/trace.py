"""Traces of batches as histograms: memory does not grow with the length of a trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

__all__ = ["Batch", "Bin", "Histogram", "Trace", "count_batches", "problem_of"]


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
        _at_least_one("max_tokens", max_tokens)
        if max_num_reqs is not None:
            _at_least_one("max_num_reqs", max_num_reqs)
        self.max_tokens = max_tokens
        self.max_num_reqs = max_num_reqs
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
        TypeError: Not a number where there should be one.
        ValueError: No batch has this shape.
    """
    histogram = Histogram(max_tokens, max_num_reqs)
    for batch in batches:
        problem = problem_of(*batch)
        if problem is not None:
            raise ValueError(f"{batch}: {problem}")
        histogram.add(batch)
    return histogram.trace()


def problem_of(tokens: int, reqs: int, query_len: int | None, loras: int, count: int) -> str | None:
    """What is wrong with the numbers of a batch, if anything."""
    if tokens < 1 or reqs < 1 or count < 1:
        field, value = min(("tokens", tokens), ("requests", reqs), ("count", count), key=_second)
        return f"{field}: expected at least 1, got {value}"
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


def _at_least_one(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {value!r}")
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}")
