"""What plans are made of, looked at before the search."""

from __future__ import annotations

from typing import Any

from graphshare.arguments import listed, whole_number, wrong_type
from graphshare.planning.trace import Trace
from graphshare.planning.work import Limit, Work

__all__ = ["check_trace", "lengths_of", "limit_of", "work_of"]


def check_trace(trace: Any) -> None:
    """Refuse what is no trace.

    Raises:
        TypeError: It is of another type.
    """
    if not isinstance(trace, Trace):
        raise wrong_type("trace", "a Trace", trace, "read_trace and count_batches make one.")


def limit_of(limit: Any) -> Limit:
    """Return a limit; a number is one of graphs.

    Raises:
        TypeError: It is neither.
        ValueError: It is a number below 0.
    """
    if isinstance(limit, Limit):
        return limit
    if isinstance(limit, bool) or not hasattr(type(limit), "__index__"):
        raise wrong_type("limit", "a number of graphs or a Limit", limit)
    return Limit.graphs(limit)


def work_of(work: Any) -> Work:
    """Return what a step costs, by default its key's tokens.

    Raises:
        TypeError: It is no work.
    """
    if work is None:
        return Work()
    if not isinstance(work, Work):
        raise wrong_type("work", "a Work", work)
    return work


def lengths_of(lengths: Any) -> list[int]:
    """Return uniform query lengths, ascending, each once.

    Raises:
        TypeError: They are no integers, or not several.
        ValueError: One is below 1.
    """
    name = "uniform_query_lens"
    several = listed(name, lengths, "integers", "Put a single one into a list.")
    return sorted({whole_number(name, length, 1) for length in several})
