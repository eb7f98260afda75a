"""One node of a CUDA graph on other addresses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
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

    __slots__ = (
        "_executable",
        "_node",
        "_params",
        "_put",
        "_set",
        "_set_in_graph",
        "_sites",
        "words",
    )

    def __init__(
        self,
        driver: GraphDriver,
        executable: Any,
        index: GraphIndex,
        node: NodeIndex,
        sites: Sequence[tuple[Site, int]],
    ) -> None:
        self.words = len(sites)
        self._executable = executable
        self._node = node
        self._sites = [(site, site.value, new) for site, new in sites]
        kind, handle = node.kind, node.handle
        if kind == "kernel":
            own = index.own_params(node)
            self._params, self._put = own.params, own.words.__setitem__
            self._set, self._set_in_graph = driver.set_kernel, driver.set_kernel_in_graph
        elif kind == "memcpy":
            self._params = driver.memcpy(handle)
            self._put = partial(_put_end, self._params)
            self._set, self._set_in_graph = driver.set_memcpy, driver.set_memcpy_in_graph
        elif kind == "memset":
            self._params = driver.memset(handle)
            self._put = partial(_put_target, self._params)
            self._set, self._set_in_graph = driver.set_memset, driver.set_memset_in_graph
        else:
            raise _refused(node, "one whose addresses can be changed", f"a node {kind!r}")

    def apply(self) -> None:
        """Set the new addresses."""
        put, handle, params = self._put, self._node.handle, self._params
        for site, _, new in self._sites:
            put(site.word, new)
            site.value = new
        try:
            self._set(self._executable, handle, params)
        except DriverError as error:
            self._put_back()
            raise self._named(error) from error
        try:
            self._set_in_graph(handle, params)
        except DriverError as error:
            self._put_back()
            self._set(self._executable, handle, params)
            raise self._named(error) from error

    def revert(self) -> None:
        """Set the old ones."""
        self._put_back()
        try:
            self._set(self._executable, self._node.handle, self._params)
            self._set_in_graph(self._node.handle, self._params)
        except DriverError as error:
            raise self._named(error) from error

    def _put_back(self) -> None:
        for site, old, _ in self._sites:
            self._put(site.word, old)
            site.value = old

    def _named(self, error: DriverError) -> RebindError:
        return _refused(self._node, "a node that the driver changes", str(error))


def _put_end(params: Any, end: int, address: int) -> None:
    name = ("src", "dst")[end]
    on_host = int(getattr(params, f"{name}MemoryType")) == 1  # CU_MEMORYTYPE_HOST
    setattr(params, f"{name}Host" if on_host else f"{name}Device", address)


def _put_target(params: Any, _: int, address: int) -> None:
    params.dst = address


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
