"""The one room that knows how FlashInfer's objects are made inside.

Planning goes to the compiled module of a wrapper, as ``flashinfer.fast_decode_plan`` does, because
a wrapper's own ``plan`` copies the lists to the device again, waits for the device in
``BatchAttention``, and cannot be told which pinned area to fill; and the numbers of a plan have no
public accessor. What is used beyond the public interface is listed in :data:`PRIVATE`, and looked
for when a wrapper is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from graphshare.adapters.paged.shape import AttentionShape
from graphshare.errors import GraphShareError

if TYPE_CHECKING:
    from graphshare.adapters.flashinfer.lists import HostLists, PageViews
    from graphshare.adapters.flashinfer.plans import Kernel

__all__ = [
    "PRIVATE",
    "UnsupportedFlashInferError",
    "compiled_arguments",
    "find_flashinfer",
    "make_wrapper",
    "plan_in_the_ordinary_way",
    "unsupported",
]

_PREFILL = (
    "_cached_module",
    "_causal",
    "_kv_lens_buffer",
    "_plan_info",
    "_qo_indptr_last",
    "_sm_scale",
)

PRIVATE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "decode": ("_cached_module", "_plan_info", "_sm_scale"),
        "fa2": _PREFILL,
        "fa3": _PREFILL,
        "batch_attention": ("_plan_info", "_sm_scale"),
    }
)
"""By kernel: attributes of a planned wrapper that this adapter reads or sets."""

_WRAPPERS: Mapping[str, str] = MappingProxyType(
    {
        "decode": "BatchDecodeWithPagedKVCacheWrapper",
        "fa2": "BatchPrefillWithPagedKVCacheWrapper",
        "fa3": "BatchPrefillWithPagedKVCacheWrapper",
        "batch_attention": "BatchAttention",
    }
)


class UnsupportedFlashInferError(GraphShareError):
    """The installed FlashInfer is not one that this adapter knows how to plan for.

    Attributes:
        version: The installed version.
    """

    version: str = ""


def find_flashinfer(module: str | ModuleType | None = None) -> ModuleType:
    """Import FlashInfer.

    Args:
        module: Take this one instead, or the one of this name.

    Raises:
        ModuleNotFoundError: It is not installed.
    """
    if isinstance(module, ModuleType):
        return module
    name = "flashinfer" if module is None else module
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        # Of the package itself; one that is missing inside it is another fault.
        missing = error.name or ""
        if name != missing and not name.startswith(f"{missing}."):
            raise
        raise ModuleNotFoundError(
            f"FlashInfer: expected {name} to be installed, got none. There is no kernel to plan "
            "for. Install it, or the extra: pip install 'graphshare[flashinfer]'",
            name=missing,
        ) from error


def make_wrapper(
    library: ModuleType, kernel: Kernel, views: PageViews, workspace: torch.Tensor
) -> Any:
    """Make the library's object for one key.

    Raises:
        UnsupportedFlashInferError: The library has none of that name.
    """
    cls = getattr(library, _WRAPPERS[kernel], None)
    if cls is None:
        raise unsupported(library, kernel, f"no {_WRAPPERS[kernel]}")
    if kernel == "batch_attention":
        wrapper = cls("NHD", str(workspace.device))
        wrapper.float_workspace_buffer = workspace
        return wrapper
    if kernel == "decode":
        return cls(
            workspace,
            "NHD",
            use_cuda_graph=True,
            paged_kv_indptr_buffer=views.kv_indptr,
            paged_kv_indices_buffer=views.kv_indices,
            paged_kv_last_page_len_buffer=views.last_page_len,
        )
    return cls(
        workspace,
        "NHD",
        use_cuda_graph=True,
        qo_indptr_buf=views.qo_indptr,
        paged_kv_indptr_buf=views.kv_indptr,
        paged_kv_indices_buf=views.kv_indices,
        paged_kv_last_page_len_buf=views.last_page_len,
        backend=kernel,
    )


def plan_in_the_ordinary_way(
    wrapper: Any,
    kernel: Kernel,
    shape: AttentionShape,
    page_size: int,
    lists: HostLists,
    views: PageViews,
) -> None:
    """Plan by the wrapper's own method, which makes all that a launch needs besides.

    The lists are in the buffers already: of an empty page list nothing is copied.
    """
    heads = (shape.num_q_heads, shape.num_kv_heads, shape.head_size)
    common: dict[str, Any] = {
        "sm_scale": shape.softmax_scale,
        "logits_soft_cap": shape.softcap,
        "q_data_type": shape.dtype,
        "kv_data_type": shape.dtype,
    }
    if kernel == "batch_attention":
        wrapper.plan(
            lists.qo_indptr,
            lists.kv_indptr,
            views.kv_indices,
            lists.kv_lens,
            *heads,
            shape.head_size,
            page_size,
            causal=shape.causal,
            **common,
        )
        return
    rows = () if kernel == "decode" else (lists.qo_indptr,)
    causal = {} if kernel == "decode" else {"causal": shape.causal}
    wrapper.plan(
        *rows,
        lists.kv_indptr,
        views.kv_indices[:0],
        lists.last_page_len,
        *heads,
        page_size,
        window_left=shape.window,
        **causal,
        **common,
    )


def compiled_arguments(
    kernel: Kernel, shape: AttentionShape, page_size: int, num_rows: int, lists: HostLists
) -> tuple[Any, ...]:
    """What the compiled plan takes after the workspaces: decode.py, prefill.py, _core.py.

    Args:
        kernel: Which kernel.
        shape: Of the layers that the plan is for.
        page_size: Tokens of one page.
        num_rows: The most rows of a batch.
        lists: The batch.
    """
    heads = (shape.num_q_heads, shape.num_kv_heads)
    sizes = (shape.head_size, shape.head_size)
    num_reqs = lists.kv_lens.shape[0]
    if kernel == "decode":
        empty = torch.empty(0, dtype=shape.dtype)  # by which the dtypes are passed
        return (
            lists.kv_indptr,
            num_reqs,
            *heads,
            page_size,
            True,
            shape.window,
            shape.softcap,
            *sizes,
            empty,
            empty,
        )
    if kernel == "batch_attention":
        return (
            lists.qo_indptr,
            lists.kv_indptr,
            lists.kv_lens,
            num_reqs,
            *heads,
            shape.head_size,
            shape.causal,
        )
    # FA2 alone takes a fixed split size, whether not to split, and blocks beside its own.
    # Without splitting, blocks past the batch have no mask and run on unwritten indices.
    split = (-1, False, 0) if kernel == "fa2" else ()
    return (
        lists.qo_indptr,
        lists.kv_indptr,
        lists.kv_lens,
        num_rows,
        num_reqs,
        *heads,
        page_size,
        True,
        *sizes,
        shape.causal,
        shape.window,
        *split,
    )


def unsupported(library: ModuleType, kernel: Kernel, got: str) -> UnsupportedFlashInferError:
    """Return the error for a library that is not as this adapter knows it."""
    version = str(getattr(library, "__version__", "unknown"))
    return UnsupportedFlashInferError(
        f"FlashInfer {version}: {kernel}",
        expected="a wrapper and plans as of FlashInfer 0.6",
        got=got,
        consequence="Plans would be misread",
        remedy="Use a release that this adapter was tested with",
        version=version,
    )
