"""What a pool counts."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

__all__ = ["PoolStatistics", "Tally"]


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """A snapshot of one pool; it does not change afterwards.

    Attributes:
        name: The pool's name.
        keys: Number of captured keys.
        captures: Graphs captured so far, replaced ones included.
        builds: Calls of this pool's own owner by phase: ``"warmup"``, ``"capture"``, ``"replay"``;
            those made for a borrower's capture are counted here, at the owner, and with the last
            those that the engine made itself and had accepted. A refresh whose build raises is not.
        refreshes: Refreshes that made a key fresh.
        replays: Graph launches.
        builds_avoided: Refreshes of a lender on which this pool replayed without a build.
        refusals: Errors raised, by class name.
        dispatched: Dispatches by the captured key they chose.
        missed: Dispatches that no captured key covers, by the first field that none satisfies.
        bytes: Memory that each key's capture added.
        fresh: The keys that may be replayed now.
    """

    name: str
    keys: int
    captures: int
    builds: Mapping[str, int]
    refreshes: int
    replays: int
    builds_avoided: int
    refusals: Mapping[str, int]
    dispatched: Mapping[Hashable, int]
    missed: Mapping[str, int]
    bytes: Mapping[Hashable, int]
    fresh: tuple[Hashable, ...]


class Tally:
    """The counters of one pool, apart from it so that states may count without holding it."""

    __slots__ = ("builds", "captures", "gone_avoided", "gone_refreshes", "gone_replays", "refused")

    def __init__(self) -> None:
        self.captures = 0
        self.refused = 0  # builds of a refresh that returned what no graph can read
        self.builds = {"warmup": 0, "capture": 0, "replay": 0}  # those of a refresh are not in it
        self.gone_refreshes = 0  # of leases that ended
        self.gone_replays = 0
        self.gone_avoided = 0

    def all_builds(self, refreshes: int) -> dict[str, int]:
        """Return the builds by phase, those of so many refreshes included."""
        replay = self.builds["replay"] + refreshes + self.refused
        return {**self.builds, "replay": replay}
