"""The toy engine on kernel libraries: their owners, fed with the toy's batches, and its heads.

The models stay in float32; what is cached, and the attention, is in bfloat16. Heads smaller than
those a library has kernels for are filled up with zeros, which changes no score and no output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch.nn import functional

from graphshare.adapters.flash_attn import (
    FlashAttention2,
    FlashAttention2Owner,
    FlashAttention3,
    FlashAttention3Owner,
)
from graphshare.adapters.flashinfer import FlashInfer, FlashInferOwner
from graphshare.adapters.paged import AttentionShape, PagedBatch, PagedCapacity
from graphshare.adapters.toy.batch import AttentionBatch
from graphshare.adapters.toy.cache import SCRATCH_PAGE
from graphshare.adapters.toy.config import EngineConfig, ToyConfig
from graphshare.adapters.toy.rows import join_blocks, split_blocks
from graphshare.owner import AttentionSpec, Phase, StateOwner

if TYPE_CHECKING:
    from graphshare.descriptor import BatchDescriptor
    from graphshare.state import AttentionState

__all__ = ["LIBRARY_KERNELS", "LibraryKernel", "LibraryOwner", "PagedStore"]

_DTYPE = torch.bfloat16


class PagedStore:
    """Keys and values of one layer, as the libraries read them.

    Args:
        config: Heads and head size.
        engine: Pages and page size.
        head_size: Of a stored head, at least the model's.
        device: Where it lies.

    Attributes:
        keys: ``[num_pages, page_size, num_kv_heads, head_size]`` bfloat16; address fixed.
        values: The same shape.
    """

    def __init__(
        self, config: ToyConfig, engine: EngineConfig, head_size: int, device: torch.device | str
    ) -> None:
        shape = (engine.num_pages, engine.page_size, config.num_kv_heads, head_size)
        self.keys = torch.zeros(shape, dtype=_DTYPE, device=device)
        self.values = torch.zeros(shape, dtype=_DTYPE, device=device)

    def write(self, keys: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store one row for each token; see :class:`graphshare.adapters.toy.kernel.LayerStore`."""
        for cache, rows in ((self.keys, keys), (self.values, values)):
            slots = cache.flatten(0, 1)
            slots.index_copy_(0, slot_mapping, _widened(rows, cache.shape[-1]))


class LibraryOwner:
    """An owner of a kernel library, for the toy engine's batches.

    Args:
        owner: Of ``PagedBatch`` es; what it says of its states is passed on.

    Attributes:
        num_builds: Calls of :meth:`build` for a batch.
    """

    def __init__(self, owner: StateOwner) -> None:
        self._owner = owner
        self.num_builds = 0

    def __getattr__(self, name: str) -> Any:
        # `host_values`, `writes`: looked up by name, and an owner may do without them.
        return getattr(self._owner, name)

    def build(
        self, key: BatchDescriptor, batch: AttentionBatch | None, phase: Phase
    ) -> AttentionState:
        """Write the state for one step.

        Raises:
            ValueError: For a batch that the key does not hold.
        """
        state = self._owner.build(key, None if batch is None else _paged(batch), phase)
        if phase is Phase.REPLAY:
            self.num_builds += 1
        return state

    def live_rows(self, key: BatchDescriptor, batch: AttentionBatch) -> Mapping[str, int]:
        """Say how many leading rows of each tensor the batch uses."""
        return self._owner.live_rows(key, _paged(batch))  # pyright: ignore[reportAttributeAccessIssue]


def _paged(batch: AttentionBatch) -> PagedBatch:
    width = max(map(len, batch.block_table))
    table = [(*pages, *[SCRATCH_PAGE] * (width - len(pages))) for pages in batch.block_table]
    return PagedBatch(
        torch.tensor(batch.query_start_loc, dtype=torch.int32),
        torch.tensor(batch.seq_lens, dtype=torch.int32),
        torch.tensor(table, dtype=torch.int32),
        torch.tensor(batch.slot_mapping, dtype=torch.int64),
    )


class _Runs(Protocol):
    """What the owners and borrowers of the adapters have in common."""

    @property
    def spec(self) -> AttentionSpec: ...

    def run(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: Any,
    ) -> torch.Tensor: ...


class _Views(NamedTuple):
    """What all layers of one forward read.

    Args:
        metadata: Of the library's owner.
        live: ``[num_tokens, 1, 1]`` bool: the rows that belong to a request.
    """

    metadata: Any
    live: torch.Tensor


class LibraryKernel(ABC):
    """Attention by a kernel library, on a GPU; :class:`graphshare.adapters.toy.kernel`'s protocol.

    A kernel splits its work by the shape of the batch, so a row's last bits depend on the rows
    beside it: the same tokens are promised for the same padded shapes only.

    Args:
        options: Of the adapter's owners and borrowers, e.g. ``module``.
    """

    name: str
    row_invariant = False
    least_head_size = 64
    """Smallest head that every build of the library has kernels for."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._runner: _Runs | None = None

    @abstractmethod
    def _make_owner(
        self, capacity: PagedCapacity, shape: AttentionShape, device: torch.device | str
    ) -> StateOwner: ...

    @abstractmethod
    def _make_runner(
        self, capacity: PagedCapacity, shape: AttentionShape, device: torch.device | str
    ) -> _Runs: ...

    def make_cache(
        self, config: ToyConfig, engine: EngineConfig, num_layers: int, device: torch.device | str
    ) -> list[PagedStore]:
        """Make one cache a layer.

        Raises:
            ImportError: The library is not installed.
            ValueError: For pages that the library does not take.
        """
        self._runner = self._make_runner(_capacity(engine), self._shape(config), device)
        head_size = self._head_size(config)
        return [PagedStore(config, engine, head_size, device) for _ in range(num_layers)]

    def owner(
        self, config: ToyConfig, engine: EngineConfig, device: torch.device | str
    ) -> LibraryOwner:
        """Make an owner with buffers of its own."""
        return LibraryOwner(self._make_owner(_capacity(engine), self._shape(config), device))

    def spec(self, config: ToyConfig, engine: EngineConfig) -> AttentionSpec:
        """Return what the states are planned for."""
        del config, engine
        return self._ready().spec

    def views(
        self, state: AttentionState, num_tokens: int, uniform_query_len: int | None
    ) -> _Views:
        """Find the rows that belong to a request."""
        del uniform_query_len
        metadata: Any = state.attn_metadata
        return _Views(metadata, self._live(metadata, num_tokens)[:, None, None])

    def attend(
        self, queries: Sequence[torch.Tensor], cache: PagedStore, views: _Views
    ) -> list[torch.Tensor]:
        """Attend from all rows at once."""
        num_tokens, size = views.live.shape[0], queries[0].shape[-1]
        query = _widened(join_blocks(list(queries), num_tokens), cache.keys.shape[-1])
        found = self._ready().run(query, cache.keys, cache.values, views.metadata)
        # A library leaves rows without a request as they were: anything, which would go on into
        # the padding of everything that follows.
        found = torch.where(views.live, found[..., :size].float(), 0.0)
        return [block.flatten(1) for block in split_blocks(found)]

    def _live(self, metadata: Any, num_tokens: int) -> torch.Tensor:
        starts = self._first_rows(metadata)
        return torch.arange(num_tokens, device=starts.device) < starts[-1]

    @staticmethod
    def _first_rows(metadata: Any) -> torch.Tensor:
        return metadata.query_start_loc

    def _ready(self) -> _Runs:
        if self._runner is None:
            raise RuntimeError("make_cache comes first: it says what the kernel is to run on")
        return self._runner

    def _head_size(self, config: ToyConfig) -> int:
        return max(config.head_size, self.least_head_size)

    def _shape(self, config: ToyConfig) -> AttentionShape:
        return AttentionShape(
            num_q_heads=config.num_q_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=self._head_size(config),
            dtype=_DTYPE,
            softmax_scale=config.head_size**-0.5,  # of the model's head, not of the filled-up one
        )


class FlashAttention2Kernel(LibraryKernel):
    """FlashAttention 2; pages of a multiple of 256 tokens."""

    name = "flash_attn2"

    def _make_owner(
        self, capacity: PagedCapacity, shape: AttentionShape, device: torch.device | str
    ) -> StateOwner:
        return FlashAttention2Owner(capacity, shape, device, **self._options)

    def _make_runner(
        self, capacity: PagedCapacity, shape: AttentionShape, device: torch.device | str
    ) -> _Runs:
        del device
        return FlashAttention2(capacity, shape, **self._options)

    def _live(self, metadata: Any, num_tokens: int) -> torch.Tensor:
        if metadata.query_start_loc is not None:
            return super()._live(metadata, num_tokens)
        # A uniform key: all rows of a request follow each other, and padding has no tokens.
        live = metadata.seq_lens > 0
        return live[:, None].expand(-1, metadata.uniform_query_len).flatten()


class FlashAttention3Kernel(LibraryKernel):
    """FlashAttention 3, on GPUs of compute capability 9.0."""

    name = "flash_attn3"

    def _make_owner(
        self, capacity: PagedCapacity, shape: AttentionShape, device: torch.device | str
    ) -> StateOwner:
        return FlashAttention3Owner(capacity, shape, device, **self._options)

    def _make_runner(
        self, capacity: PagedCapacity, shape: AttentionShape, device: torch.device | str
    ) -> _Runs:
        return FlashAttention3(capacity, shape, device=device, **self._options)


class FlashInferKernel(LibraryKernel):
    """FlashInfer: its decode kernel for one row a request, FlashAttention's scheme for the rest."""

    name = "flashinfer"
    least_head_size = 128

    def _make_owner(
        self, capacity: PagedCapacity, shape: AttentionShape, device: torch.device | str
    ) -> StateOwner:
        return FlashInferOwner(capacity, shape, device, **self._options)

    def _make_runner(
        self, capacity: PagedCapacity, shape: AttentionShape, device: torch.device | str
    ) -> _Runs:
        del device
        return FlashInfer(capacity, shape, module=self._options.get("module"))

    @staticmethod
    def _first_rows(metadata: Any) -> torch.Tensor:
        return metadata.qo_indptr


LIBRARY_KERNELS: Mapping[str, Callable[..., LibraryKernel]] = {
    kernel.name: kernel
    for kernel in (FlashAttention2Kernel, FlashAttention3Kernel, FlashInferKernel)
}
"""By name, as the toy engine's ``attention`` says it."""


def _capacity(engine: EngineConfig) -> PagedCapacity:
    return PagedCapacity(
        max_num_tokens=engine.max_num_tokens,
        max_num_reqs=engine.max_num_reqs,
        max_seq_len=engine.max_model_len,
        page_size=engine.page_size,
        scratch_page=SCRATCH_PAGE,
    )


def _widened(rows: torch.Tensor, head_size: int) -> torch.Tensor:
    """Fill heads up with zeros to ``head_size``, and round them."""
    return functional.pad(rows, (0, head_size - rows.shape[-1])).to(_DTYPE)
