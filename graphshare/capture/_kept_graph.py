"""A CUDA graph that stays behind its executable, until somebody asks for it.

What runs is the executable. The graph that it was made of is for whoever reads it, or makes an
executable of it again: changing that too in each move would take a third of the move's time.
"""

from __future__ import annotations

from typing import Any

import torch

from graphshare.capture._cuda_concern import Concern, Concerns, failed
from graphshare.errors import RebindError

__all__ = ["Behind", "CatchesUp", "KeptGraph"]

_KEPT = 8


class Behind:
    """Which nodes of a graph are behind.

    It holds words, no tensors, and not the graph itself.

    Args:
        concerns: Of the graph.
        device: Where it runs.
    """

    def __init__(self, concerns: Concerns, device: torch.device) -> None:
        self._concerns, self._device = concerns, device
        # Not the nodes one by one: that is for when somebody asks, or there are many moves.
        self._changed: dict[int, Concern] = {}
        self._numbers: set[int] = set()

    def add(self, concern: Concern) -> None:
        """The executable alone has the words of these nodes now."""
        self._changed[id(concern)] = concern
        if len(self._changed) > _KEPT:
            self._numbers = self.nodes
            self._changed.clear()

    @property
    def nodes(self) -> set[int]:
        """Their numbers."""
        found = {each.node.number for concern in self._changed.values() for each in concern.nodes}
        return found | self._numbers

    def catch_up(self) -> None:
        """Give the nodes of the graph their words.

        Raises:
            RebindError: The driver refused one; the others are done, and the executable is right.
        """
        numbers = sorted(self.nodes)
        if not numbers:
            return
        setters = self._concerns.index.driver.setters
        error: RebindError | None = None
        self._numbers = set(numbers)  # until they are done
        self._changed.clear()
        with torch.cuda.device(self._device):
            for number in numbers:
                kind, handle, params, node = self._concerns.settable(number)
                (code,) = setters[kind].graph(handle, params)
                if code:
                    error = error or failed(node, setters[kind].graph, code)
                else:
                    self._numbers.discard(number)
        if error is not None:
            raise error


class CatchesUp:
    """What brings a ``torch.cuda.CUDAGraph`` up to date before it is read or made executable.

    A handle that ``raw_cuda_graph`` returned before a move is right once it is asked for again.

    Attributes:
        behind: What knows of its nodes.
    """

    behind: tuple[Behind, ...] = ()

    def catch_up(self) -> None:
        """Bring it up to date.

        Raises:
            RebindError: The driver refused to change a node; the executable is right.
        """
        for each in self.behind:
            each.catch_up()

    def raw_cuda_graph(self) -> int:
        """As torch does."""
        self.catch_up()
        base: Any = super()
        return base.raw_cuda_graph()

    def instantiate(self) -> None:
        """As torch does."""
        self.catch_up()
        base: Any = super()
        base.instantiate()

    def debug_dump(self, debug_path: str) -> Any:
        """As torch does."""
        self.catch_up()
        base: Any = super()
        return base.debug_dump(debug_path)

    def get_graph_data(self) -> Any:
        """As torch does, where it does."""
        self.catch_up()
        base: Any = super()
        return base.get_graph_data()

    def reset(self) -> None:
        """As torch does; there are no nodes any more."""
        self.behind = ()
        base: Any = super()
        base.reset()


class KeptGraph(CatchesUp, torch.cuda.CUDAGraph):
    """Kept beside its executable; made with ``keep_graph=True``."""
