"""What a pool's checker is asked to look at."""

from __future__ import annotations

from typing import Any

from graphshare import GraphPool


def count_looks(pool: GraphPool[Any], key: Any) -> list[Any]:
    """Every state that goes to the checker of a key.

    From the next event on: until then refreshes have the function at hand.
    """
    checker = pool.holdings.entries[key].record.checker
    assert checker is not None
    seen: list[Any] = []
    matches = checker.matches

    def counting(state: Any) -> bool:
        seen.append(state)
        return matches(state)

    checker.matches = counting
    return seen
