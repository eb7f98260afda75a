"""A CUDA graph on other addresses."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import torch

from graphshare.capture._cuda_concern import Concerns, failed, refused
from graphshare.capture._cuda_slots import Addresses, outcome_of
from graphshare.capture._current import on_device
from graphshare.capture._kept_graph import Behind
from graphshare.capture.moves import Moves
from graphshare.capture.patching import Patch
from graphshare.errors import RebindError

__all__ = ["GraphPatch"]


class GraphPatch(Patch):
    """Gives nodes other addresses, in the executable graph and in the graph it was made of.

    Args:
        concerns: Of the graph.
        executable: Handle of the executable graph.
        moves: What goes where.
        device: Where the graph runs.
        behind: What brings the graph up to date when it is asked for; ``None`` for at once.

    Raises:
        RebindError: It has a node whose addresses cannot be changed.
    """

    def __init__(
        self,
        concerns: Concerns,
        executable: Any,
        moves: Moves,
        device: torch.device,
        behind: Behind | None = None,
    ) -> None:
        self._behind = behind
        index = concerns.index
        self._index, self._executable, self._device = index, executable, device
        # Both, rather than a difference: whatever was interrupted, the words are right after they
        # were written once more.
        self._before = index.addresses
        slots, self.pairs, self._after = outcome_of(moves, self._before)
        self._concern = concern = concerns.of(slots)
        for kind, nodes, _, _ in concern.batches:
            if kind not in index.driver.setters:
                node = nodes[0].node
                raise refused(node, "one whose addresses can be changed", f"a node {kind!r}")
        self._done = False
        self._in_executable = self._in_graph = 0  # how many of the nodes may be set
        self.nodes = len(concern.nodes)
        self.words = len(concern.places)

    def apply(self) -> None:
        """Set the new addresses."""
        if self._done or not self.nodes:
            return
        with on_device(self._device):
            try:
                self._write(self._after)
                self._set_executable()
                if self._behind is None:
                    self._set_graph()
            except BaseException as error:
                self._write(self._before)
                worse = self._set_back()
                if worse is not None:
                    raise worse from error
                raise
        self._index.addresses = self._after
        self._done = True
        if self._behind is not None:
            self._behind.add(self._concern)

    def revert(self) -> None:
        """Set the old ones."""
        if not self._done:
            return
        self._done = False
        self._index.addresses = self._before
        if self._behind is not None:  # somebody may have asked in between
            self._behind.add(self._concern)
        with on_device(self._device):
            self._write(self._before)
            worse = self._set_back()
        if worse is not None:
            raise worse

    def _set_executable(self) -> None:
        """Set nodes of the executable graph to their words, one after the other."""
        setters, executable, done = self._index.driver.setters, self._executable, 0
        begun = 1  # one more than is counted may be set where it is interrupted
        try:
            for kind, _, handles, params in self._concern.batches:
                call = setters[kind].executable
                for (code,) in map(call, repeat(executable), handles, params):
                    if code:
                        begun = 0
                        raise failed(self._concern.nodes[done].node, call, code)
                    done += 1
        finally:
            self._in_executable = done + begun

    def _set_graph(self) -> None:
        """As :meth:`_set_executable`, for the graph that the executable was made of."""
        setters, done, begun = self._index.driver.setters, 0, 1
        try:
            for kind, _, handles, params in self._concern.batches:
                call = setters[kind].graph
                for (code,) in map(call, handles, params):
                    if code:
                        begun = 0
                        raise failed(self._concern.nodes[done].node, call, code)
                    done += 1
        finally:
            self._in_graph = done + begun

    def _write(self, addresses: Addresses) -> None:
        index, concern = self._index, self._concern
        words = addresses.tensor.index_select(0, concern.slots)
        index.word_tensor.index_copy_(0, concern.places, words)
        for params, name, place in concern.operands:
            setattr(params, name, index.words[place])

    def _set_back(self) -> RebindError | None:
        """Set to their words those nodes that were set; goes on where one cannot be.

        One that the driver refused to change is not asked for again: it is as it was.

        Returns:
            The error of the first that cannot be set back.
        """
        error: RebindError | None = None
        setters, executable = self._index.driver.setters, self._executable
        for number, (kind, handle, params, node) in enumerate(self._concern.nodes):
            calls = setters[kind]
            if number < self._in_executable:
                (code,) = calls.executable(executable, handle, params)
                if code:
                    error = error or failed(node, calls.executable, code)
            if number < self._in_graph:
                (code,) = calls.graph(handle, params)
                if code:
                    error = error or failed(node, calls.graph, code)
        self._in_executable = self._in_graph = 0
        return error
