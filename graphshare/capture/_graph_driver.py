"""Every call to the CUDA driver that reads or changes a captured graph.

Through ``cuda-bindings``, the extra ``inspect``, which is imported when the first graph is read.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from graphshare.errors import ProvenanceError

__all__ = ["DriverError", "GraphDriver", "Setters", "demangled", "graph_driver"]

_Handle = Any


class DriverError(RuntimeError):
    """The driver refused a call.

    Args:
        call: Its name.
        code: Name of the ``CUresult``.

    Attributes:
        call: As given.
        code: As given.
    """

    def __init__(self, call: str, code: str) -> None:
        super().__init__(f"{call} returned {code}")
        self.call = call
        self.code = code


@functools.cache
def graph_driver() -> GraphDriver:
    """Return the driver.

    Raises:
        ProvenanceError: ``cuda-bindings`` is not installed, or does not work.
    """
    try:
        bindings = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise ProvenanceError(
            "reading a CUDA graph",
            expected="the package cuda-bindings",
            got=f"{type(error).__name__}: {error}",
            remedy="Install it: pip install 'graphshare[inspect]'",
        ) from error
    return GraphDriver(bindings)


class Setters(NamedTuple):
    """Gives a node other parameters, as ``cuda-bindings`` does: returns ``(code,)``, 0 if done.

    Not by way of an exception, nor of a function of our own: a move of a large model's graphs
    calls them ten thousand times.

    Attributes:
        executable: ``executable(executable_graph, node, params)``.
        graph: ``graph(node, params)``: in the graph that the executable was made of. Whoever reads
            that, or makes an executable of it again, is to find what really runs.
    """

    executable: Callable[[Any, Any, Any], tuple[Any]]
    graph: Callable[[Any, Any], tuple[Any]]


class GraphDriver:
    """The driver's calls, with its error codes as :class:`DriverError`.

    Args:
        bindings: The module ``cuda.bindings.driver``.

    Attributes:
        setters: By kind of node, what changes it.
    """

    def __init__(self, bindings: Any) -> None:
        self._cu = bindings
        self._ok = bindings.CUresult.CUDA_SUCCESS
        self._node_kind = bindings.cuGraphNodeGetType
        self._get_kernel = bindings.cuGraphKernelNodeGetParams
        self.setters = {
            "kernel": Setters(
                bindings.cuGraphExecKernelNodeSetParams, bindings.cuGraphKernelNodeSetParams
            ),
            "memcpy": Setters(self._set_memcpy, bindings.cuGraphMemcpyNodeSetParams),
            "memset": Setters(self._set_memset, bindings.cuGraphMemsetNodeSetParams),
        }
        self._attribute = bindings.cuPointerGetAttribute
        self._memory_type = bindings.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        self._kinds: dict[Any, str] = {}
        kinds: Any = bindings.CUgraphNodeType
        for kind in kinds:
            name: str = kind.name.removeprefix("CU_GRAPH_NODE_TYPE_")
            self._kinds[kind] = _KINDS.get(name, name.lower().replace("_", " "))

    # What is called for thousands of nodes at once goes without it.
    def _call(self, name: str, *args: Any) -> Any:
        code, *results = getattr(self._cu, name)(*args)
        if code != self._ok:
            raise DriverError(name, code.name)
        return results[0] if len(results) == 1 else results

    @property
    def version(self) -> int:
        """The CUDA version of the driver: 13000 for 13.0."""
        return self._call("cuDriverGetVersion")

    # Reading graphs.

    def graph(self, address: int) -> _Handle:
        """Return the handle of what ``CUDAGraph.raw_cuda_graph`` returned."""
        return self._cu.CUgraph(address)

    def executable(self, address: int) -> _Handle:
        """Return the handle of what ``CUDAGraph.raw_cuda_graph_exec`` returned."""
        return self._cu.CUgraphExec(address)

    def nodes(self, graph: _Handle) -> Sequence[_Handle]:
        """Return the nodes of a graph, without those of graphs within."""
        _, number = self._call("cuGraphGetNodes", graph)
        return self._call("cuGraphGetNodes", graph, number)[0] if number else ()

    def kind(self, node: _Handle) -> str:
        """Return what kind of node it is, in words."""
        code, kind = self._node_kind(node)
        if code:
            raise DriverError("cuGraphNodeGetType", code.name)
        return self._kinds[kind]

    def child(self, node: _Handle) -> _Handle:
        """Return the graph in a child graph node; nodes in it may be changed like any."""
        return self._call("cuGraphChildGraphNodeGetGraph", node)

    def bodies(self, node: _Handle) -> Sequence[_Handle] | None:
        """Return the graphs in a conditional node; ``None`` where the driver does not tell."""
        try:
            conditional = self._call("cuGraphNodeGetParams", node).conditional
        except (AttributeError, RuntimeError):  # a driver before 13.2 has no such call
            return None
        return list(conditional.phGraph_out or ()) or None

    def kernel(self, node: _Handle) -> Any:
        """Return a kernel node's ``CUDA_KERNEL_NODE_PARAMS``."""
        code, params = self._get_kernel(node)
        if code:
            raise DriverError("cuGraphKernelNodeGetParams", code.name)
        return params

    def function(self, params: Any) -> int:
        """Return a number for the function, or kernel, of a kernel node's parameters."""
        return int(params.func) or -int(params.kern)

    def name(self, params: Any) -> str:
        """Return the (mangled) name of a kernel node's function."""
        if int(params.func):
            return self._call("cuFuncGetName", params.func).decode()
        return self._call("cuKernelGetName", params.kern).decode()

    def layout(self, params: Any) -> list[tuple[int, int]]:
        """Return offset and size, in bytes, of each parameter of a kernel node's function."""
        ask, of = "cuFuncGetParamInfo", params.func
        if not int(of):
            ask, of = "cuKernelGetParamInfo", params.kern
        found: list[tuple[int, int]] = []
        while True:
            code, *result = getattr(self._cu, ask)(of, len(found))
            if code == self._cu.CUresult.CUDA_ERROR_INVALID_VALUE:  # there are no more
                return found
            if code != self._ok:
                raise DriverError(ask, code.name)
            found.append((int(result[0]), int(result[1])))

    def memcpy(self, node: _Handle) -> Any:
        """Return a copy node's ``CUDA_MEMCPY3D``."""
        return self._call("cuGraphMemcpyNodeGetParams", node)

    def memset(self, node: _Handle) -> Any:
        """Return a fill node's ``CUDA_MEMSET_NODE_PARAMS``."""
        return self._call("cuGraphMemsetNodeGetParams", node)

    def allocation(self, node: _Handle) -> tuple[int, int]:
        """Return address and size of what an allocation node allocates."""
        params = self._call("cuGraphMemAllocNodeGetParams", node)
        return int(params.dptr), int(params.bytesize)

    def freed(self, node: _Handle) -> int:
        """Return the address that a free node frees."""
        return int(self._call("cuGraphMemFreeNodeGetParams", node))

    # Changing graphs.

    def _set_memcpy(self, executable: _Handle, node: _Handle, params: Any) -> tuple[Any]:
        context = self._call("cuCtxGetCurrent")
        return self._cu.cuGraphExecMemcpyNodeSetParams(executable, node, params, context)

    def _set_memset(self, executable: _Handle, node: _Handle, params: Any) -> tuple[Any]:
        context = self._call("cuCtxGetCurrent")
        return self._cu.cuGraphExecMemsetNodeSetParams(executable, node, params, context)

    # Memory, and tensor maps.

    def is_memory(self, address: int) -> bool:
        """Say whether an address lies in memory that the driver knows."""
        return not self._attribute(self._memory_type, address)[0]

    def allocated(self, address: int) -> tuple[str, int, int] | None:
        """Say what an address lies in: ``"device"`` or ``"host"``, its start and its size.

        Returns:
            ``None`` if it lies in no memory that the driver knows.
        """
        cu = self._cu
        names = cu.CUpointer_attribute
        code, kind = cu.cuPointerGetAttribute(names.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
        if code != self._ok:
            return None
        found = [
            cu.cuPointerGetAttribute(each, address)
            for each in (
                names.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
                names.CU_POINTER_ATTRIBUTE_RANGE_SIZE,
            )
        ]
        start, size = (int(value) if code == self._ok else 0 for code, value in found)
        on_host = int(kind) == int(cu.CUmemorytype.CU_MEMORYTYPE_HOST)
        return ("host" if on_host else "device"), start, size

    def tensor_map(
        self, address: int, dtype: str, itemsize: int, sizes: Sequence[int], box: Sequence[int],
        swizzle: str, promotion: str,
    ) -> list[int]:  # fmt: skip
        """Encode a tensor map, and return its sixteen words.

        Args:
            address: Of the tensor.
            dtype: ``"BFLOAT16"``, ...
            itemsize: Of an element, in bytes.
            sizes: Of the tensor, the innermost first.
            box: What is loaded at once.
            swizzle: ``"NONE"``, ``"32B"``, ``"64B"`` or ``"128B"``.
            promotion: ``"NONE"``, ``"L2_64B"``, ``"L2_128B"`` or ``"L2_256B"``.
        """
        cu = self._cu
        strides = [itemsize]
        for size in sizes:
            strides.append(strides[-1] * size)
        done = self._call(
            "cuTensorMapEncodeTiled",
            getattr(cu.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{dtype}"),
            len(sizes),
            address,
            [cu.cuuint64_t(size) for size in sizes],
            [cu.cuuint64_t(stride) for stride in strides[1:-1]],
            [cu.cuuint32_t(size) for size in box],
            [cu.cuuint32_t(1) for _ in sizes],
            cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(cu.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
            getattr(cu.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{promotion}"),
            cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        return [int(word) for word in done.opaque]


_KINDS = {
    "GRAPH": "child graph",
    "WAIT_EVENT": "event wait",
    "BATCH_MEM_OP": "memory operations",
    "EXT_SEMAS_SIGNAL": "semaphore signal",
    "EXT_SEMAS_WAIT": "semaphore wait",
    "MEM_ALLOC": "allocation",
    "MEM_FREE": "free",
}


@functools.lru_cache(maxsize=4096)
def demangled(name: str) -> str:
    """Return a C++ name as it is written, or ``name`` where nothing can tell."""
    if not name.startswith("_Z"):
        return name
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        demangle = library.__cxa_demangle
    except (OSError, AttributeError):
        return name
    demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    text = demangle(name.encode(), None, None, ctypes.byref(status))
    if not text:
        return name
    try:
        return (ctypes.string_at(text)).decode(errors="replace")
    finally:
        release = ctypes.CDLL(None).free
        release.argtypes, release.restype = [ctypes.c_void_p], None
        release(text)
