"""The attention of one model by FlashInfer: the state that it reads, and one call of it."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch

from graphshare.adapters.flashinfer.library import find_flashinfer
from graphshare.adapters.flashinfer.planner import Planner
from graphshare.adapters.flashinfer.plans import Kernel, Plan
from graphshare.adapters.flashinfer.spec import FlashInferSpec
from graphshare.adapters.paged import PagedCapacity
from graphshare.adapters.paged.arguments import check_capacity, check_module, check_shape
from graphshare.adapters.paged.shape import AttentionShape
from graphshare.errors import CaptureError

__all__ = ["FlashInfer", "FlashInferMetadata", "PlannedFor", "spec_of"]


@dataclass(frozen=True, slots=True, eq=False)
class PlannedFor:
    """The plan of one model's layers for one key.

    Args:
        plan: Its numbers: grids, template choices and offsets, all baked in by a launch.
        int_workspace: ``[bytes]`` uint8, CUDA: its indices; of the size that the plan takes.
        launch: The wrapper that launches on it.
    """

    plan: Plan
    int_workspace: torch.Tensor
    launch: Planner


@dataclass(frozen=True, slots=True, eq=False)
class FlashInferMetadata:
    """What the launches of one key read; addresses and host values are baked in.

    Args:
        kernel: What is launched for this key.
        qo_indptr: ``[num_reqs + 1]`` int32: first row of each request; none past the batch.
        kv_indptr: ``[num_reqs + 1]`` int32: first entry of each request in ``kv_indices``.
        last_page_len: ``[num_reqs]`` int32: tokens in each request's last page, 0 past the batch.
        kv_indices: ``[num_reqs * max_pages]`` int32: pages; the scratch page past the batch.
        float_workspace: ``[bytes]`` uint8: scratch. Launches write it and read it back, builds
            never do, so owners share it where their launches are on one stream.
        planned: The plans, the owner's own model first.
    """

    kernel: Kernel
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    last_page_len: torch.Tensor
    kv_indices: torch.Tensor
    float_workspace: torch.Tensor
    planned: tuple[PlannedFor, ...]


def spec_of(
    shape: AttentionShape,
    page_size: int,
    backend: str,
    kernels: frozenset[Kernel] = frozenset(),
    also: tuple[FlashInferSpec, ...] = (),
) -> FlashInferSpec:
    """The spec of a model's layers."""
    return FlashInferSpec(
        num_q_heads=shape.num_q_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        page_size=page_size,
        causal=shape.causal,
        window=shape.window,
        q_dtype=shape.dtype,
        kv_dtype=shape.dtype,
        backend=backend,
        softcap=shape.softcap,
        kernels=kernels,
        also=also,
    )


class FlashInfer:
    """The attention of one model by FlashInfer: all that a borrower needs.

    Args:
        capacity: The lender's.
        shape: Heads and mask of the model's layers.
        module: Where the library is, if not in its usual place.

    Raises:
        TypeError: An argument is of another type.
        ModuleNotFoundError: FlashInfer is not installed.
    """

    def __init__(
        self,
        capacity: PagedCapacity,
        shape: AttentionShape,
        *,
        module: str | ModuleType | None = None,
    ) -> None:
        check_capacity("FlashInfer", capacity)
        check_shape("FlashInfer: shape", shape)
        check_module("FlashInfer", module)
        self.capacity = capacity
        self.shape = shape
        self._library = find_flashinfer(module)
        self._ran = set[Kernel]()

    @property
    def spec(self) -> FlashInferSpec:
        """What a lender's and a borrower's pool are given to be compared by."""
        return spec_of(self.shape, self.capacity.page_size, self._backend)

    @property
    def _backend(self) -> str:
        return f"flashinfer/{getattr(self._library, '__version__', 'unknown')}"

    def run(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: FlashInferMetadata,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend; to be called in the captured forward, once a layer.

        Args:
            query: ``[key.num_tokens, num_q_heads, head_size]``, on the GPU.
            key_cache: ``[num_pages, page_size, num_kv_heads, head_size]``, this step's keys
                included.
            value_cache: As the keys, of the same strides.
            metadata: The state's ``attn_metadata``, one's own or a lender's.
            out: Where to write, shaped as ``query``; its rows past the batch are then not written
                but by decode.

        Returns:
            Shaped as ``query``. Rows past the batch are zero, unless ``out`` is given.

        Raises:
            CaptureError: It is being captured and has never run before: the library makes a table
                at its first launch, which would then lie in the graph's memory.
        """
        kernel = metadata.kernel
        if query.is_cuda and torch.cuda.is_current_stream_capturing():
            if kernel not in self._ran:
                raise CaptureError(
                    f"FlashInfer: the first launch of {kernel} for this model",
                    expected="one run before the capture",
                    got="none",
                    consequence="What the library makes at its first launch would lie in the "
                    "graph's memory, and hold nothing for the launches of other graphs",
                    remedy="Warm the forward up, as GraphPool.capture does",
                )
        else:
            self._ran.add(kernel)
        launch = self._planned(metadata).launch
        cache = (key_cache, value_cache)
        # A row for each request: rows past them, which no batch has, are not decode's to write.
        rows = metadata.last_page_len.shape[0] if kernel == "decode" else query.shape[0]
        if out is None:
            full = kernel == "decode" and rows == query.shape[0]
            out = torch.empty_like(query) if full else torch.zeros_like(query)
        launch(self.shape, query[:rows], cache, out[:rows])
        return out

    def _planned(self, metadata: FlashInferMetadata) -> PlannedFor:
        """The plan that was made for this model's layers, or the first that serves them."""
        planned = metadata.planned
        for each in planned:
            if each.launch.shape == self.shape:
                return each
        mine = self.spec
        for each in planned:
            lender = spec_of(each.launch.shape, self.capacity.page_size, self._backend)
            if not lender.forbids(metadata.kernel, mine):
                return each
        # Pools that state their specs do not come here.
        return planned[0]
