"""A CUDA graph on other addresses."""

from __future__ import annotations

from typing import Any

import torch

from graphshare.capture._cuda_concern import Concerns, failed, refused
from graphshare.capture._cuda_nodes import Group
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
        self._before = index.groups
        values, pairs = moves.moving(index.ascending)
        self.pairs = set(pairs)
        groups = [self._before[value] for value in values]
        steps = moves.steps
        # Before and after, of each group.
        self._values = [
            (value, value + steps[pair]) for value, pair in zip(values, pairs, strict=True)
        ]
        self._concern = concern = concerns.of(groups, pairs)
        # As they are and as they are to be, rather than a difference: whatever was interrupted,
        # the words are right after they were written once more.
        self._old = index.word_tensor[concern.places]
        self._new = self._old + moves.shifts[concern.pairs]
        for kind in concern.by_kind.keys() - index.driver.setters.keys():
            node = concern.by_kind[kind][0].node
            raise refused(node, "one whose addresses can be changed", f"a node {kind!r}")
        self._settable = concern.nodes
        self._done = False
        self._in_executable = self._in_graph = 0  # how many of the nodes are set
        self.nodes = len(self._settable)
        self.words = len(concern.places)

    def apply(self) -> None:
        """Set the new addresses."""
        if self._done or not self._values:
            return
        with torch.cuda.device(self._device):
            try:
                self._write(new=True)
                self._set_executable()
                if self._behind is None:
                    self._set_graph()
            except BaseException as error:
                self._write(new=False)
                worse = self._set_back()
                if worse is not None:
                    raise worse from error
                raise
        self._index.regroup(self._moved())
        self._done = True
        if self._behind is not None:
            self._behind.add(self._concern)

    def revert(self) -> None:
        """Set the old ones."""
        if not self._done:
            return
        self._done = False
        self._index.regroup(self._before)
        if self._behind is not None:  # somebody may have asked in between
            self._behind.add(self._concern)
        with torch.cuda.device(self._device):
            self._write(new=False)
            worse = self._set_back()
        if worse is not None:
            raise worse

    def _set_executable(self) -> None:
        """Set nodes of the executable graph to their words, one after the other."""
        setters, executable, done = self._index.driver.setters, self._executable, 0
        try:
            for kind, nodes in self._concern.by_kind.items():
                call = setters[kind].executable
                for _, handle, params, node, _ in nodes:
                    (code,) = call(executable, handle, params)
                    if code:
                        raise failed(node, call, code)
                    done += 1
        finally:
            self._in_executable = done

    def _set_graph(self) -> None:
        """As :meth:`_set_executable`, for the graph that the executable was made of."""
        setters, done = self._index.driver.setters, 0
        try:
            for kind, nodes in self._concern.by_kind.items():
                call = setters[kind].graph
                for _, handle, params, node, _ in nodes:
                    (code,) = call(handle, params)
                    if code:
                        raise failed(node, call, code)
                    done += 1
        finally:
            self._in_graph = done

    def _write(self, *, new: bool) -> None:
        index, concern = self._index, self._concern
        index.word_tensor.index_copy_(0, concern.places, self._new if new else self._old)
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
        for number, (kind, handle, params, node, _) in enumerate(self._settable):
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

    def _moved(self) -> dict[int, Group]:
        """Return the groups as they are after the change."""
        groups = self._before.copy()
        moved = [(after, groups.pop(before)) for before, after in self._values]
        for value, group in moved:
            other = groups.get(value)
            if other is None:
                groups[value] = group
            else:  # what stays has the value already
                groups[value] = [*group[0], *other[0]], sorted({*group[1], *other[1]})
        return groups
