"""What a pool's options put around the launch of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphshare.entry import Entry
from graphshare.refusals import Refusals

__all__ = ["strict_launch", "writing_launch"]


def writing_launch(entry: Entry[Any], name: str) -> Callable[[], None]:
    """Return the launch of a graph that writes its state: before it, others go stale (rule 5).

    Args:
        entry: With its lease.
        name: Of the pool.
    """
    record, lease, inner, by = entry.record, entry.lease, entry.launch, (name, entry.key)

    def launch() -> None:
        record.written_by_forward(by, lease)
        inner()

    return launch


def strict_launch(entry: Entry[Any], refuse: Refusals) -> Callable[[], None]:
    """Return the launch for ``checks="strict"``: with the state's layout, and in stream order.

    Args:
        entry: Its record has an order.
        refuse: Makes the pool's errors.
    """
    record, inner, key = entry.record, entry.launch, entry.key
    order = record.order

    def launch() -> None:
        checker = record.checker  # not a local of the closure: a rebind makes another one
        if checker is not None and not checker.matches(record.state):
            differences = checker.differences(record.state)
            if differences:
                raise refuse.layout(key, differences, keys=record.keys, doing="replay")
        order.before_replay()
        inner()
        order.after_replay()

    return launch
