"""Planning for one key: the wrapper, the memory of its plans, and the order of copies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from graphshare.adapters.flashinfer.library import (
    PRIVATE,
    compiled_arguments,
    make_wrapper,
    plan_in_the_ordinary_way,
    unsupported,
)
from graphshare.adapters.flashinfer.plans import Kernel, Plan, int_workspace_bytes, named_plan
from graphshare.adapters.paged.shape import AttentionShape
from graphshare.errors import CaptureError

if TYPE_CHECKING:
    from graphshare.adapters.flashinfer.lists import HostLists, PageViews

__all__ = ["Planner", "refuse_under_capture"]

# One pinned area is filled while the device still reads the other.
_AREAS = 2


class _Area:
    """One host area that a plan fills, and the event after its copy to the device."""

    def __init__(self, nbytes: int, *, cuda: bool) -> None:
        self.host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=cuda)
        self.copied = torch.cuda.Event() if cuda else None


class Planner:
    """One wrapper of one key, and the memory of its plans.

    The wrapper is made, planned once in the ordinary way on workspaces of the library's own size,
    and then moved to an int workspace of the size that the plan takes. Each further plan goes to
    the compiled module with one of two pinned areas, after the event of that area's last copy: the
    copy is asynchronous and the library has no such fence, so two plans in a row would otherwise
    send the second one's indices twice.

    Args:
        library: The module ``flashinfer``.
        kernel: Which kernel.
        shape: Of the layers that the plans are for.
        page_size: Tokens of one page.
        num_rows: The most rows of a batch.
        views: What the kernels of the key read.
        lists: A batch that has ``num_rows`` rows, on the host.
        float_workspace: ``[bytes]`` uint8, scratch of the kernels.

    Attributes:
        kernel: Which kernel.
        shape: Of the layers that the plans are for.
        plan: The numbers of the first plan.
        int_workspace: ``[bytes]`` uint8, on the device: the indices of the last plan.
        wrapper: The library's object.

    Raises:
        UnsupportedFlashInferError: The wrapper or its plan is not as this adapter knows it.
        ValueError: The float workspace is too small, or the library refuses the shape.
    """

    def __init__(
        self,
        library: ModuleType,
        kernel: Kernel,
        shape: AttentionShape,
        page_size: int,
        num_rows: int,
        views: PageViews,
        lists: HostLists,
        float_workspace: torch.Tensor,
    ) -> None:
        self.kernel: Kernel = kernel
        self.shape = shape
        self._page_size = page_size
        self._num_rows = num_rows
        self._float = float_workspace
        self._device = float_workspace.device
        cuda = float_workspace.is_cuda
        self.wrapper: Any = make_wrapper(library, kernel, views, float_workspace)
        try:
            plan_in_the_ordinary_way(self.wrapper, kernel, shape, page_size, lists, views)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # the scheduler's allocator, or a kernel that does not exist
            raise ValueError(
                f"{kernel}: expected a shape and workspaces that FlashInfer can plan for, got "
                f"{shape} with a float workspace of {float_workspace.numel()} bytes. {error}"
            ) from error
        absent = [name for name in PRIVATE[kernel] if not hasattr(self.wrapper, name)]
        if absent:
            raise unsupported(library, kernel, f"a wrapper without {', '.join(absent)}")
        try:
            self.plan: Plan = named_plan(kernel, self.wrapper._plan_info)
        except ValueError as error:
            raise unsupported(library, kernel, str(error)) from error
        self._info: Any = self.wrapper._plan_info
        self._equal = _comparison(self._info)
        if cuda:
            # The first plan's copy comes from an area that goes back to the host allocator here.
            torch.cuda.current_stream(self._device).synchronize()
        nbytes = int_workspace_bytes(self.plan)
        self.int_workspace = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        self._areas = [_Area(nbytes, cuda=cuda) for _ in range(_AREAS)]
        self._turn = 0
        self._compiled: Any = (
            self.wrapper.module if kernel == "batch_attention" else self.wrapper._cached_module
        )
        if kernel == "batch_attention":
            self.wrapper.int_workspace_buffer = self.int_workspace
            self.wrapper.page_locked_int_workspace_buffer = self._areas[0].host
        else:
            self.wrapper.reset_workspace_buffer(float_workspace, self.int_workspace)
            if kernel != "decode":
                self.wrapper._kv_lens_buffer = None  # 128 KiB, which other backends read

    def __eq__(self, other: object) -> bool:
        # By what it launches. The addresses and numbers with which it does are in the state.
        return isinstance(other, Planner) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __repr__(self) -> str:
        return f"Planner({self.kernel}, {self.shape})"

    @property
    def _identity(self) -> tuple[object, ...]:
        shape = dataclasses.replace(self.shape, softmax_scale=None)  # no plan depends on it
        return self.kernel, shape, self._page_size

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host memory that this holds: the areas, and one that the wrapper makes."""
        held = sum(area.host.numel() for area in self._areas)
        return held + (0 if self.kernel == "batch_attention" else self.int_workspace.numel())

    def replan(self, lists: HostLists) -> Plan:
        """Plan for a batch, on the current stream, and return the numbers.

        Raises:
            CaptureError: The stream is capturing: the copy of the indices would be recorded.
            RuntimeError: The library refuses the batch.
        """
        refuse_under_capture(self._device)
        self._turn = (self._turn + 1) % _AREAS
        area = self._areas[self._turn]
        if area.copied is not None:
            area.copied.synchronize()
        workspaces = (self._float, self.int_workspace, area.host)
        arguments = compiled_arguments(
            self.kernel, self.shape, self._page_size, self._num_rows, lists
        )
        info = self._compiled.plan(*workspaces, *arguments)
        if area.copied is not None:
            area.copied.record(torch.cuda.current_stream(self._device))
        self.wrapper._plan_info = info
        if self._equal(info, self._info):
            return self.plan
        return named_plan(self.kernel, info)

    def __call__(
        self,
        shape: AttentionShape,
        query: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """Launch on the last plan, with the softmax scale and mask of ``shape``.

        Args:
            shape: Of the layers that run, not always of those that the plan was made for.
            query: ``[rows, num_q_heads, head_size]``.
            cache: Keys and values, each ``[num_pages, page_size, num_kv_heads, head_size]``.
            out: Shaped as ``query``.
        """
        wrapper = self.wrapper
        # Only run() reads these once the first plan is made.
        wrapper._sm_scale = shape.softmax_scale
        if self.kernel == "decode":
            wrapper.run(query, cache, out=out)
        elif self.kernel == "batch_attention":
            wrapper.run(query, cache, out=out, logits_soft_cap=shape.softcap)
        else:
            wrapper._causal = shape.causal
            # run() compares the rows with the last batch's. A graph launches all rows of its key;
            # how many of them count is in the plan.
            wrapper._qo_indptr_last = query.shape[0]
            wrapper.run(query, cache, out=out)


def refuse_under_capture(device: torch.device) -> None:
    """Refuse to write lists and plans while the current stream is capturing.

    Raises:
        CaptureError: It is.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            "FlashInfer: a plan during a capture",
            expected="plans before the capture begins",
            got="one on a stream that is capturing",
            consequence="Its copies would be recorded, and each replay would run on this plan",
            remedy="Build the state before the capture, as GraphPool.capture does",
        )


def _comparison(plan_info: Any) -> Callable[[Any, Any], bool]:
    """How to tell whether two plans have the same numbers.

    The library returns an array of its own, of which each element costs a call: as many as 28 for
    each refresh. Its package has one call that compares them all.
    """
    if type(plan_info).__module__.startswith("tvm_ffi"):
        equal = getattr(import_module("tvm_ffi"), "structural_equal", None)
        if equal is not None:
            return equal
    return lambda one, other: tuple(one) == tuple(other)
