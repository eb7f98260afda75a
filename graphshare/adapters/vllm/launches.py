"""What stands for a captured graph where vLLM launches it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Graphs", "Replay"]


class Graphs(dict[Any, Any]):
    """What vLLM looks into for a graph.

    It looks twice at each launch, and a descriptor is hashed in Python: those that were captured
    are found by what they are instead.
    """

    __slots__ = ("_by_id",)

    def __init__(self, graphs: dict[Any, Any]) -> None:
        super().__init__(graphs)
        self._by_id = {id(desc): graph for desc, graph in graphs.items()}

    def __contains__(self, desc: object) -> bool:
        return id(desc) in self._by_id or super().__contains__(desc)

    def __getitem__(self, desc: Any) -> Any:
        found = self._by_id.get(id(desc))
        return super().__getitem__(desc) if found is None else found


class Replay:
    """A graph to vLLM: something with ``replay``."""

    __slots__ = ("replay",)

    def __init__(self, replay: Callable[[], object]) -> None:
        self.replay = replay
