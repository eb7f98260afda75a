"""One node of a CUDA graph on other addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphshare.capture._cuda_nodes import GraphIndex, NodeIndex, Site
from graphshare.capture._graph_driver import DriverError, GraphDriver
from graphshare.errors import RebindError

__all__ = ["NodeChange"]


class NodeChange:
    """Gives a node other addresses, in the executable graph and in the graph it was made of.

    Args:
        driver: The driver.
        executable: Handle of the executable graph.
        index: Of the graph.
        node: The node.
        sites: Its words that change, each with the new value.

    Raises:
        RebindError: It is no node whose addresses can be changed.
    """

    __slots__ = ("_driver", "_executable", "_node", "_params", "_sites", "words")

    def __init__(
        self,
        driver: GraphDriver,
        executable: Any,
        index: GraphIndex,
        node: NodeIndex,
        sites: Sequence[tuple[Site, int]],
    ) -> None:
        self.words = len(sites)
        self._driver = driver
        self._executable = executable
        self._node = node
        self._sites = [(site, site.value, new) for site, new in sites]
        self._params: Any
        if node.kind == "kernel":
            self._params = index.own_params(node)
        elif node.kind == "memcpy":
            self._params = driver.memcpy(node.handle)
        elif node.kind == "memset":
            self._params = driver.memset(node.handle)
        else:
            raise _refused(node, "one whose addresses can be changed", f"a node {node.kind!r}")

    def apply(self) -> None:
        """Set the new addresses."""
        self._write(new=True)
        try:
            self._set()
        except BaseException:
            self._write(new=False)
            raise
        try:
            self._set_in_graph()
        except BaseException:
            self._write(new=False)
            self._set()
            raise
        for site, _, new in self._sites:
            site.value = new

    def revert(self) -> None:
        """Set the old ones."""
        self._write(new=False)
        for site, old, _ in self._sites:
            site.value = old
        self._set()
        self._set_in_graph()

    def _write(self, *, new: bool) -> None:
        kind, params = self._node.kind, self._params
        for site, before, after in self._sites:
            value = after if new else before
            if kind == "kernel":
                params.words[site.word] = value
            elif kind == "memset":
                params.dst = value
            else:
                end = ("src", "dst")[site.word]
                on_host = int(getattr(params, f"{end}MemoryType")) == 1  # CU_MEMORYTYPE_HOST
                setattr(params, f"{end}Host" if on_host else f"{end}Device", value)

    def _set(self) -> None:
        driver, node, params = self._driver, self._node, self._params
        try:
            if node.kind == "kernel":
                driver.set_kernel(self._executable, node.handle, params.params)
            elif node.kind == "memcpy":
                driver.set_memcpy(self._executable, node.handle, params)
            else:
                driver.set_memset(self._executable, node.handle, params)
        except DriverError as error:
            raise _refused(node, "a node that the driver changes", str(error)) from error

    def _set_in_graph(self) -> None:
        driver, node, params = self._driver, self._node, self._params
        try:
            if node.kind == "kernel":
                driver.set_kernel_in_graph(node.handle, params.params)
            elif node.kind == "memcpy":
                driver.set_memcpy_in_graph(node.handle, params)
            else:
                driver.set_memset_in_graph(node.handle, params)
        except DriverError as error:
            raise _refused(node, "a node that the driver changes", str(error)) from error


def _refused(node: NodeIndex, expected: str, got: str) -> RebindError:
    named = f"{node.number}: {node.name}"
    return RebindError(
        f"rebind of node {named}",
        expected=expected,
        got=got,
        consequence="The graph would go on reading the old memory",
        remedy="Capture the keys anew",
        node=named,
    )
