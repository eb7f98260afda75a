"""Capture a forward pass once, replay it many times: CUDA graphs, and a tape on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from graphshare.capture._cuda_graph import ForeignGraph
from graphshare.capture.cuda import CudaBackend as CudaBackend
from graphshare.capture.protocol import CaptureBackend as CaptureBackend
from graphshare.capture.protocol import CapturedGraph as CapturedGraph
from graphshare.capture.protocol import InspectableGraph as InspectableGraph
from graphshare.capture.tape import TapeBackend as TapeBackend

__all__ = [
    "CaptureBackend",
    "CapturedGraph",
    "CudaBackend",
    "InspectableGraph",
    "TapeBackend",
    "make_backend",
    "readable",
]

_KINDS = ("auto", "cuda", "tape")


def make_backend(
    kind: Literal["auto", "cuda", "tape"] = "auto",
    device: torch.device | str | int | None = None,
    *,
    memory_pool: Any = None,
    inspectable: bool = False,
    capture_error_mode: Literal["global", "thread_local", "relaxed"] = "thread_local",
    generators: Sequence[torch.Generator] = (),
) -> CaptureBackend:
    """Make the capture backend for a device.

    Args:
        kind: ``"cuda"``, ``"tape"``, or ``"auto"``: CUDA graphs on a CUDA device, the tape on a
            CPU.
        device: Where the captured tensors live. ``None`` is the current CUDA device for
            ``"cuda"``, the CPU for ``"tape"``, and for ``"auto"`` the one that is there.
        memory_pool: Memory to capture into, shared with others that were given the same one: a
            ``torch.cuda.MemPool``, or what ``torch.cuda.graph_pool_handle()`` returns. ``None``
            makes one of its own. The tape never reuses memory and ignores it.
        inspectable: Keep the graph itself beside its executable form, so that it can be read and
            patched through ``torch.cuda.CUDAGraph.raw_cuda_graph``. A tape that was captured
            without it refuses to be read, as a CUDA graph does.
        capture_error_mode: See :class:`~graphshare.capture.cuda.CudaBackend`. The tape ignores
            it.
        generators: The generators, besides the device's default one, that forwards draw from.

    Raises:
        ValueError: An unknown kind or mode, or a device that the kind has no graphs for.
        RuntimeError: A CUDA device was asked for, and there is none.
    """
    if kind not in _KINDS:
        raise ValueError(f"backend: expected one of {', '.join(_KINDS)}, got {kind!r}")
    if device is None:
        on_cuda = kind == "cuda" or (kind == "auto" and torch.cuda.is_available())
        resolved = torch.device("cuda" if on_cuda else "cpu")
    elif isinstance(device, int):
        resolved = torch.device("cuda", device)
    else:
        resolved = torch.device(device)
    if kind == "auto":
        if resolved.type not in ("cuda", "cpu"):
            raise ValueError(f"device: expected a CUDA device or the CPU, got {resolved}")
        kind = "cuda" if resolved.type == "cuda" else "tape"
    if kind == "tape":
        return TapeBackend(resolved, inspectable=inspectable, generators=generators)
    return CudaBackend(
        resolved,
        memory_pool=memory_pool,
        inspectable=inspectable,
        capture_error_mode=capture_error_mode,
        generators=generators,
    )


def readable(graph: Any, outputs: Any, device: torch.device) -> Any:
    """Return a graph that an engine captured by itself as one that can be read.

    Args:
        graph: A ``torch.cuda.CUDAGraph``; anything else is returned as it is.
        outputs: What its forward returned.
        device: Where it runs, with its index.
    """
    if isinstance(graph, torch.cuda.CUDAGraph):
        return ForeignGraph(graph, outputs, device)
    return graph
