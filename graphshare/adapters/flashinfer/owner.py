"""The owner of a model's FlashInfer states."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from graphshare.adapters.flashinfer.attention import (
    FlashInfer,
    FlashInferMetadata,
    PlannedFor,
    spec_of,
)
from graphshare.adapters.flashinfer.lists import PageLists, PageViews
from graphshare.adapters.flashinfer.memory import FlashInferMemory, KeyMemory, float_bytes
from graphshare.adapters.flashinfer.planner import Planner, refuse_under_capture
from graphshare.adapters.flashinfer.plans import Kernel, Plan, check_kernel
from graphshare.adapters.flashinfer.spec import FlashInferSpec
from graphshare.adapters.paged import PagedBatch, PagedCapacity, dummy_batch
from graphshare.adapters.paged.arguments import check_shape
from graphshare.adapters.paged.batch import check_lengths
from graphshare.adapters.paged.shape import AttentionShape
from graphshare.arguments import listed, wrong_type
from graphshare.device import device_of
from graphshare.owner import Phase
from graphshare.state import AttentionState

if TYPE_CHECKING:
    from graphshare.descriptor import BatchDescriptor

__all__ = ["FlashInferOwner"]


@dataclass(slots=True, eq=False)
class _Prepared:
    """What one key's builds use: views, planners, and the state that they return."""

    views: PageViews
    planners: tuple[Planner, ...]
    state: AttentionState


class FlashInferOwner(FlashInfer):
    """Writes the states of one model for FlashInfer, and plans for further models if asked.

    Every key has a wrapper of its own, made in its first build, with an int workspace of the size
    that its plan takes (KiB; the library's own is 8 MiB, and 8 MiB pinned). Only
    ``batch_attention``, whose plan knows no key, has one of 6.2 MiB for all. Page lists, slots and
    float workspace are shared by all keys, so a build for one makes the states of the others
    stale; for two live keys use two owners.

    Args:
        capacity: What its buffers are sized for.
        shape: Heads and mask of the model's layers.
        device: Of the states, a GPU.
        kernel: For all keys but those of ``decode_kernel``; by default ``"fa3"`` on Hopper, else
            ``"fa2"``. Under graphs FA2 takes scratch that grows with rows, see
            :func:`graphshare.adapters.flashinfer.fa2_float_bytes`. ``"decode"`` for an owner that
            has no other keys.
        decode_kernel: For keys of one row a request (``uniform_query_len=1``).
        also: Of models that cannot run on plans for ``shape`` and borrow the states all the same:
            a build plans for each of them too, on the same page lists.
        float_workspace: ``[bytes]`` uint8 on ``device``, to share it with other owners whose
            launches are on the same stream; by default as large as the largest key may need.
        module: Where the library is, if not in its usual place.

    Attributes:
        kernel: For mixed keys and longer uniform ones.
        decode_kernel: For keys of one row a request.
        also: The further models.
        lists: The page lists.
        float_workspace: The scratch.

    Raises:
        TypeError: An argument is of another type.
        ValueError: For a kernel that there is not, or a float workspace that is not one flat
            tensor of bytes on the device.
        RuntimeError: The device is not there.
        ModuleNotFoundError: FlashInfer is not installed.
    """

    def __init__(
        self,
        capacity: PagedCapacity,
        shape: AttentionShape,
        device: torch.device | str,
        *,
        kernel: Kernel | None = None,
        decode_kernel: Kernel = "decode",
        also: Sequence[AttentionShape] = (),
        float_workspace: torch.Tensor | None = None,
        module: str | ModuleType | None = None,
    ) -> None:
        device = device_of("FlashInfer: device", device)
        if kernel is None:
            hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
            kernel = "fa3" if hopper else "fa2"
        self.kernel: Kernel = check_kernel("kernel", kernel)
        self.decode_kernel: Kernel = check_kernel("decode_kernel", decode_kernel)
        self.also = tuple(listed("FlashInfer: also", also, "AttentionShapes", "Make it a list."))
        for model in self.also:
            check_shape("FlashInfer: also", model)
        if float_workspace is not None:
            _check_workspace(float_workspace, device)
        super().__init__(capacity, shape, module=module)
        self.lists = PageLists(capacity, device)
        if float_workspace is None:
            nbytes = max(
                float_bytes(each, capacity, model, device)
                for each in (self.kernel, self.decode_kernel)
                for model in (shape, *self.also)
            )
            float_workspace = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.float_workspace = float_workspace
        self._prepared: dict[BatchDescriptor, _Prepared] = {}
        self._keyless: dict[AttentionShape, Planner] = {}

    @property
    def spec(self) -> FlashInferSpec:
        """What a lender's and a borrower's pool are given to be compared by."""
        size, backend = self.capacity.page_size, self._backend
        kernels = frozenset((self.kernel, self.decode_kernel))
        also = tuple(spec_of(model, size, backend, kernels) for model in self.also)
        return spec_of(self.shape, size, backend, kernels, also)

    def kernel_of(self, key: BatchDescriptor) -> Kernel:
        """Return what is launched for ``key``.

        Raises:
            ValueError: The owner has a kernel for one row a request only, and this key has others.
        """
        if key.uniform_query_len == 1:
            return self.decode_kernel
        if self.kernel == "decode":
            raise ValueError(
                f"kernel: expected one that takes any rows, got 'decode' (key {key}). It would "
                "take each row for a request. Choose another kernel, or leave out such keys"
            )
        return self.kernel

    def build(self, key: BatchDescriptor, batch: PagedBatch | None, phase: Phase) -> AttentionState:
        """Write and plan ``batch`` for ``key``; without one, requests that fill the key.

        Raises:
            CaptureError: The current stream is capturing; nothing is written then.
            TypeError: What is no batch, or no descriptor; nothing is written then.
            ValueError: For a batch that the key or the capacity does not hold, in a uniform key
                for requests of other lengths, or for a key that the capacity or the kernel does
                not take; nothing is written then.
            RuntimeError: FlashInfer cannot plan for it.
        """
        del phase
        refuse_under_capture(self.lists.device)
        if batch is not None:
            check_lengths(key, batch)
        prepared = self._prepared.get(key)
        if prepared is None:
            if batch is not None:
                self.capacity.check(key, batch)
            prepared = self._prepare(key)
            if batch is None:
                return prepared.state
        host = self.lists.write(key, dummy_batch(key, self.capacity) if batch is None else batch)
        state = prepared.state
        plans = [planner.replan(host) for planner in prepared.planners]
        if any(
            plan is not planned.plan
            for plan, planned in zip(plans, state.attn_metadata.planned, strict=True)
        ):
            # Not what was captured. The pool says so, by the name of the number.
            return self._state(key, prepared.views, prepared.planners, plans)
        return state

    def writes(self, key: BatchDescriptor) -> Iterable[torch.Tensor]:
        """Return what a build for ``key`` writes: its part of the lists, and its plans.

        The float workspace is not among it: only launches write there.
        """
        prepared = self._prepared.get(key)
        yield self.lists.written(key)
        for planner in () if prepared is None else prepared.planners:
            yield planner.int_workspace

    def live_rows(self, key: BatchDescriptor, batch: PagedBatch) -> Mapping[str, int]:
        """Return how many leading rows of each leaf a batch uses.

        Of a plan none counts: parts of it are undefined, and the rest follows from the lists and
        the numbers.
        """
        del key
        size = self.capacity.page_size
        return {
            "*_indptr": batch.num_reqs + 1,
            "*.last_page_len": batch.num_reqs,
            "*.kv_indices": int(((batch.seq_lens + size - 1) // size).sum()),
            "*_workspace": 0,
            "slot_mappings": batch.num_tokens,
        }

    def memory(self) -> FlashInferMemory:
        """Return what the keys that were built so far cost, and what they share."""
        shared = tuple(self._keyless.values())
        keys: dict[Hashable, KeyMemory] = {
            key: KeyMemory.of(each for each in prepared.planners if each not in shared)
            for key, prepared in self._prepared.items()
        }
        return FlashInferMemory(
            keys=keys,
            shared=KeyMemory.of(shared),
            lists_bytes=self.lists.device_bytes,
            lists_pinned_bytes=self.lists.pinned_bytes,
            float_workspace_bytes=self.float_workspace.numel(),
        )

    def _prepare(self, key: BatchDescriptor) -> _Prepared:
        """Make what a key needs, planned for as many rows as a batch may have."""
        self.capacity.check_key(key)
        kernel = self.kernel_of(key)
        views = self.lists.views(key)
        host = self.lists.write(key, dummy_batch(key, self.capacity))
        planners: list[Planner] = []
        for shape in (self.shape, *self.also):
            planner = self._keyless.get(shape) if kernel == "batch_attention" else None
            if planner is None:
                planner = Planner(
                    self._library,
                    kernel,
                    shape,
                    self.capacity.page_size,
                    self.capacity.max_num_rows(key),
                    views,
                    host,
                    self.float_workspace,
                )
                if kernel == "batch_attention":
                    self._keyless[shape] = planner
            planners.append(planner)
        plans = [planner.replan(host) for planner in planners]
        state = self._state(key, views, planners, plans)
        prepared = self._prepared[key] = _Prepared(views, tuple(planners), state)
        return prepared

    def _state(
        self,
        key: BatchDescriptor,
        views: PageViews,
        planners: Sequence[Planner],
        plans: Sequence[Plan],
    ) -> AttentionState:
        metadata = FlashInferMetadata(
            kernel=self.kernel_of(key),
            qo_indptr=views.qo_indptr,
            kv_indptr=views.kv_indptr,
            last_page_len=views.last_page_len,
            kv_indices=views.kv_indices,
            float_workspace=self.float_workspace,
            planned=tuple(
                PlannedFor(plan, planner.int_workspace, planner)
                for plan, planner in zip(plans, planners, strict=True)
            ),
        )
        return AttentionState(metadata, views.slot_mapping)


def _check_workspace(workspace: Any, device: torch.device) -> None:
    """Refuse a float workspace of another kind.

    Raises:
        TypeError: It is no tensor.
        ValueError: It is not one flat tensor of bytes on the device.
    """
    if not isinstance(workspace, torch.Tensor):
        raise wrong_type("FlashInfer: float_workspace", "a tensor", workspace)
    flat = workspace.ndim == 1 and workspace.is_contiguous()
    if not flat or workspace.dtype != torch.uint8 or workspace.device != device:
        raise ValueError(
            f"FlashInfer: float_workspace: expected [bytes] uint8 on {device}, got "
            f"{list(workspace.shape)} {workspace.dtype} on {workspace.device}"
        )
