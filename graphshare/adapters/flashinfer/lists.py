"""Page lists as FlashInfer reads them: persistent, padded, one transfer for each batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from graphshare.adapters.paged import PagedBatch, PagedCapacity
from graphshare.buffers import PersistentBuffer

if TYPE_CHECKING:
    from graphshare.descriptor import BatchDescriptor

__all__ = ["HostLists", "PageLists", "PageViews"]

# One area is filled while the device still reads the other.
_STAGES = 2


@dataclass(frozen=True, slots=True, eq=False)
class HostLists:
    """The lists of one batch on the host, where plans are made, padded to a key.

    Args:
        qo_indptr: ``[num_reqs + 1]`` int32: first row of each request; none past the batch.
        kv_indptr: ``[num_reqs + 1]`` int32: first entry of each request in the page list; one
            entry, the scratch page, for each request past the batch.
        kv_lens: ``[num_reqs]`` int32: tokens in the cache; 0 past the batch.
        last_page_len: ``[num_reqs]`` int32: tokens in the last page; 0 past the batch.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_lens: torch.Tensor
    last_page_len: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PageViews:
    """What the kernels of one key read: views of persistent buffers, on the device.

    Args:
        qo_indptr: As :class:`HostLists`.
        kv_indptr: As :class:`HostLists`.
        last_page_len: As :class:`HostLists`.
        kv_indices: ``[num_reqs * max_pages]`` int32: the pages of all requests, one after the
            other; the scratch page past them.
        slot_mapping: ``[key.num_tokens]`` int64; past the batch, slots of the scratch page.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    last_page_len: torch.Tensor
    kv_indices: torch.Tensor
    slot_mapping: torch.Tensor


class _Stage:
    """One host area; on CUDA pinned, with the event after its last copy to the device."""

    def __init__(self, length: int, *, cuda: bool) -> None:
        self.host = torch.zeros(length, dtype=torch.int32, pin_memory=cuda)
        self.copied = torch.cuda.Event() if cuda else None

    def wait(self) -> None:
        # Without this the host would overwrite lists that an earlier copy has not read yet.
        if self.copied is not None:
            self.copied.synchronize()


class PageLists:
    """The lists of one batch at a time, shared by every key of an owner, and by its followers.

    Requests past the batch have no rows and one page, the scratch page, of which they use no
    token. No page at all would be wrong: to CUDA-core decode such a request is one more block,
    but the search for a chunk length counts none for it (scheduler.cuh:75-103), so with many of
    them more blocks are planned than launched, and what the rest would have written is read.

    Args:
        capacity: What they are sized for.
        device: Where they lie.

    Attributes:
        key: The key that they were last written for, ``None`` before.
        host: What they were last written with, on the host: valid until the next write.
    """

    def __init__(self, capacity: PagedCapacity, device: torch.device | str) -> None:
        self.capacity = capacity
        self.device = torch.device(device)
        self.key: BatchDescriptor | None = None
        self.host: HostLists | None = None
        reqs = capacity.max_num_reqs
        starts = [0, reqs + 1, 2 * (reqs + 1), 3 * reqs + 2]
        self._qo, self._kv, self._last, self._pages = starts
        length = self._pages + reqs * capacity.max_pages
        self.packed = torch.full(
            (length,), capacity.scratch_page, dtype=torch.int32, device=self.device
        )
        self._stages = [_Stage(length, cuda=self.packed.is_cuda) for _ in range(_STAGES)]
        self._turn = 0
        self._slots = PersistentBuffer(
            capacity.max_num_tokens,
            torch.int64,
            self.device,
            padding=capacity.scratch_page * capacity.page_size,
            name="slot_mapping",
        )

    @property
    def device_bytes(self) -> int:
        """Bytes on the device."""
        return self.packed.nbytes + self._slots.tensor.nbytes

    @property
    def pinned_bytes(self) -> int:
        """Page-locked bytes on the host; those of slots not counted."""
        return sum(stage.host.nbytes for stage in self._stages)

    def views(self, key: BatchDescriptor) -> PageViews:
        """What the kernels of ``key`` read; the same addresses for each call.

        Raises:
            ValueError: The key has more rows or requests than the capacity.
        """
        reqs, capacity = self.capacity.num_reqs(key), self.capacity
        if reqs > capacity.max_num_reqs or key.num_tokens > capacity.max_num_tokens:
            raise ValueError(
                f"key: expected at most {capacity.max_num_reqs} requests and "
                f"{capacity.max_num_tokens} rows, got {key}. Its lists would lie over one another. "
                "Size the capacity for the largest key"
            )
        packed, pages = self.packed, self._pages
        return PageViews(
            qo_indptr=packed[self._qo : self._qo + reqs + 1],
            kv_indptr=packed[self._kv : self._kv + reqs + 1],
            last_page_len=packed[self._last : self._last + reqs],
            kv_indices=packed[pages : pages + reqs * self.capacity.max_pages],
            slot_mapping=self._slots.tensor[: key.num_tokens],
        )

    def tensors(self, views: PageViews) -> tuple[torch.Tensor, ...]:
        """All that a write for the key of ``views`` may write."""
        pages = self._pages
        return (
            self.packed[:pages],
            views.kv_indices,
            views.slot_mapping,
        )

    def write(self, key: BatchDescriptor, batch: PagedBatch) -> HostLists:
        """Write a batch, padded to ``key``.

        Raises:
            ValueError: The key or the capacity does not hold it; nothing is written then.
        """
        self.capacity.check(key, batch)
        reqs, live = self.capacity.num_reqs(key), batch.num_reqs
        self._turn = (self._turn + 1) % _STAGES
        stage = self._stages[self._turn]
        stage.wait()
        host, table = stage.host, batch.block_table
        on_host = table.device.type == "cpu"

        num_rows = batch.num_tokens
        qo = host[self._qo : self._qo + reqs + 1]
        qo[: live + 1] = batch.query_start_loc
        qo[live + 1 :] = num_rows

        lens = batch.seq_lens
        size = self.capacity.page_size
        held = (lens + (size - 1)).div_(size, rounding_mode="floor")
        kv = host[self._kv : self._kv + reqs + 1]
        torch.cumsum(held, 0, dtype=torch.int32, out=kv[1 : live + 1])
        num_pages = int(kv[live])
        # One page that is not used, for each request past the batch: see the class.
        torch.arange(num_pages, num_pages + reqs - live + 1, out=kv[live:])
        num_entries = num_pages + reqs - live

        last = host[self._last : self._last + reqs]
        torch.sub(lens, (held - 1).mul_(size), out=last[:live])
        last[live:] = 0

        columns = torch.arange(table.shape[1], dtype=torch.int32)
        live_entries = columns < held[:, None]
        pages = host[self._pages : self._pages + num_entries]
        if on_host:
            pages[:num_pages] = table[live_entries]
        else:  # where in the table each entry is, for the device to pick it
            first = torch.arange(live, dtype=torch.int32)[:, None] * table.stride(0)
            pages[:num_pages] = (first + columns * table.stride(1))[live_entries]
        pages[num_pages:] = self.capacity.scratch_page
        end = self._pages + num_entries
        self.packed[:end].copy_(host[:end], non_blocking=True)
        indices = self.packed[self._pages : self._pages + reqs * self.capacity.max_pages]
        if not on_host:
            flat = table.as_strided((_reach(table),), (1,))
            indices[:num_pages] = torch.index_select(flat, 0, indices[:num_pages])
        indices[num_entries:].fill_(self.capacity.scratch_page)
        if stage.copied is not None:
            stage.copied.record(torch.cuda.current_stream(self.device))

        slots = batch.slot_mapping
        self._slots.write(
            torch.empty(0, dtype=torch.int64) if slots is None else slots, key.num_tokens
        )
        kv_lens = torch.zeros(reqs, dtype=torch.int32)
        kv_lens[:live] = lens
        self.key = key
        self.host = HostLists(qo, kv, kv_lens, last)
        return self.host


def _reach(table: torch.Tensor) -> int:
    """Elements from a table's first to its last, whatever lies between."""
    rows, columns = table.shape
    return (rows - 1) * table.stride(0) + (columns - 1) * table.stride(1) + 1
