"""Page lists as FlashInfer reads them: persistent, padded, one transfer for each batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from graphshare.adapters.paged import PagedBatch, PagedCapacity
from graphshare.adapters.paged.arguments import check_capacity, check_devices
from graphshare.adapters.paged.staging import HostStage
from graphshare.device import device_of

if TYPE_CHECKING:
    from graphshare.descriptor import BatchDescriptor

__all__ = ["HostLists", "PageLists", "PageViews"]

# One area is filled while the device still reads the other.
_STAGES = 2
_ALIGNMENT = 16


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


class _Area(NamedTuple):
    """One key's lists in one memory."""

    views: PageViews
    kv_lens: torch.Tensor


class _Region(NamedTuple):
    """Where one key's lists lie.

    Args:
        views: On the device.
        staged: The same in each stage.
        hosts: What plans are made from, of each stage.
        start: First byte, where the slots begin.
        entries: First byte of the page list.
    """

    views: PageViews
    staged: tuple[PageViews, ...]
    hosts: tuple[HostLists, ...]
    start: int
    entries: int


class PageLists:
    """The lists of one batch at a time, shared by every key of an owner.

    Requests past the batch have no rows and one page, the scratch page, of which they use no
    token. No page at all would be wrong: to CUDA-core decode such a request is one more block,
    but the search for a chunk length counts none for it (scheduler.cuh:75-103), so with many of
    them more blocks are planned than launched, and what the rest would have written is read.

    Args:
        capacity: What they are sized for.
        device: Where they lie.

    Raises:
        TypeError: The capacity is none, or the device is no device.
        ValueError: torch does not know the device.
        RuntimeError: The device is not there.

    Attributes:
        memory: All of them, bytes: slots, aligned to the end so that a key's are next to what
            follows, then the three lists of requests, then the pages.
    """

    def __init__(self, capacity: PagedCapacity, device: torch.device | str) -> None:
        check_capacity("PageLists", capacity)
        device = device_of("PageLists: device", device)
        self.capacity = capacity
        reqs = capacity.max_num_reqs
        slots = 8 * capacity.max_num_tokens
        sizes = (slots, 4 * (reqs + 1), 4 * (reqs + 1), 4 * reqs, 4 * reqs)
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        self._slots_end = slots
        _, self._qo, self._kv, self._last, self._lens, self._pages = offsets
        nbytes = self._pages + 4 * reqs * capacity.max_pages
        self.memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.device = self.memory.device
        self._stages = [HostStage(nbytes, cuda=self.memory.is_cuda) for _ in range(_STAGES)]
        self._turn = 0
        self._regions: dict[BatchDescriptor, _Region] = {}
        self._columns = torch.arange(capacity.max_pages, dtype=torch.int32)

    @property
    def device_bytes(self) -> int:
        """Bytes on the device."""
        return self.memory.nbytes

    @property
    def pinned_bytes(self) -> int:
        """Page-locked bytes on the host."""
        return sum(stage.memory.nbytes for stage in self._stages)

    def views(self, key: BatchDescriptor) -> PageViews:
        """What the kernels of ``key`` read; the same addresses for each call.

        Raises:
            ValueError: The key has more rows or requests than the capacity.
        """
        return self._region(key).views

    def written(self, key: BatchDescriptor) -> torch.Tensor:
        """Return the memory that a write for ``key`` may write: bytes, uint8."""
        region = self._region(key)
        return self.memory[region.start : region.entries + region.views.kv_indices.nbytes]

    def write(self, key: BatchDescriptor, batch: PagedBatch) -> HostLists:
        """Write a batch, padded to ``key``.

        Returns:
            The lists on the host, valid until the write after the next.

        Raises:
            TypeError: It is no batch, or the key no descriptor; nothing is written then.
            ValueError: The key or the capacity does not hold it, or it has a tensor on another
                device; nothing is written then.
        """
        region = self._region(key)
        self.capacity.check(key, batch)
        check_devices(batch, self.device)
        self._turn = (self._turn + 1) % _STAGES
        stage = self._stages[self._turn]
        stage.wait()
        staged, host = region.staged[self._turn], region.hosts[self._turn]
        slots, table = batch.slot_mapping, batch.block_table
        sent = slots if slots is not None and slots.device.type == "cpu" else None
        self._fill_slots(staged.slot_mapping, sent)
        held, num_pages = self._fill_requests(host, batch)
        num_entries = num_pages + host.kv_lens.shape[0] - batch.num_reqs
        self._fill_pages(staged.kv_indices, table, held, num_pages, num_entries)
        part = slice(region.start, region.entries + 4 * num_entries)
        self.memory[part].copy_(stage.memory[part], non_blocking=True)
        indices = region.views.kv_indices
        if table.device.type != "cpu":
            flat = table.as_strided((_reach(table),), (1,))
            indices[:num_pages] = torch.index_select(flat, 0, indices[:num_pages])
        if num_entries < indices.shape[0]:
            indices[num_entries:].fill_(self.capacity.scratch_page)
        if slots is not None and sent is None:
            region.views.slot_mapping[: slots.shape[0]].copy_(slots, non_blocking=True)
        if stage.copied is not None:
            stage.copied.record(torch.cuda.current_stream(self.device))
        return host

    def _fill_slots(self, view: torch.Tensor, slots: torch.Tensor | None) -> None:
        used = 0 if slots is None else slots.shape[0]
        if slots is not None:
            (view if used == view.shape[0] else view[:used]).copy_(slots)
        if used < view.shape[0]:
            view[used:].fill_(self.capacity.scratch_page * self.capacity.page_size)

    def _fill_requests(self, host: HostLists, batch: PagedBatch) -> tuple[torch.Tensor, int]:
        """Fill the lists of requests; return the pages of each, and of all."""
        live, reqs = batch.num_reqs, host.kv_lens.shape[0]
        qo, kv, last, lens = host.qo_indptr, host.kv_indptr, host.last_page_len, host.kv_lens
        if live < reqs:
            qo[live + 1 :].fill_(batch.num_tokens)
            last[live:].zero_()
            lens[live:].zero_()
            qo, last, lens = qo[: live + 1], last[:live], lens[:live]
        qo.copy_(batch.query_start_loc)
        lens.copy_(batch.seq_lens)
        size = self.capacity.page_size
        above = lens + (size - 1)
        held = torch.div(above, size, rounding_mode="floor")
        torch.cumsum(held, 0, dtype=torch.int32, out=kv[1 : live + 1])  # the first is always 0
        torch.sub(above, held, alpha=size, out=last).add_(1)
        num_pages = int(kv[live])
        if live < reqs:
            # One page that is not used, for each request past the batch: see the class.
            torch.arange(num_pages, num_pages + reqs - live + 1, out=kv[live:])
        return held, num_pages

    def _fill_pages(
        self,
        view: torch.Tensor,
        table: torch.Tensor,
        held: torch.Tensor,
        num_pages: int,
        num_entries: int,
    ) -> None:
        """Fill the page list; from a table on a device, with where in it each entry is."""
        width = min(table.shape[1], self._columns.shape[0])
        columns = self._columns[:width]
        live_entries = columns < held[:, None]
        if table.device.type == "cpu":
            entries = table if width == table.shape[1] else table[:, :width]
        else:
            rows = torch.arange(table.shape[0], dtype=torch.int32)[:, None]
            entries = rows * table.stride(0) + columns * table.stride(1)
        torch.masked_select(entries, live_entries, out=view[:num_pages])
        if num_pages < num_entries:
            view[num_pages:num_entries].fill_(self.capacity.scratch_page)

    def _region(self, key: BatchDescriptor) -> _Region:
        region = self._regions.get(key)
        if region is None:
            region = self._regions[key] = self._lay_out(key)
        return region

    def _lay_out(self, key: BatchDescriptor) -> _Region:
        capacity = self.capacity
        capacity.check_key(key)  # or its lists would lie over one another
        reqs = capacity.num_reqs(key)
        start = self._slots_end - 8 * key.num_tokens

        def area(memory: torch.Tensor) -> _Area:
            def part(offset: int, count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
                return memory[offset : offset + count * dtype.itemsize].view(dtype)

            views = PageViews(
                qo_indptr=part(self._qo, reqs + 1),
                kv_indptr=part(self._kv, reqs + 1),
                last_page_len=part(self._last, reqs),
                kv_indices=part(self._pages, reqs * capacity.max_pages),
                slot_mapping=part(start, key.num_tokens, torch.int64),
            )
            return _Area(views, part(self._lens, reqs))

        areas = [area(stage.memory) for stage in self._stages]
        return _Region(
            views=area(self.memory).views,
            staged=tuple(each.views for each in areas),
            hosts=tuple(
                HostLists(
                    each.views.qo_indptr,
                    each.views.kv_indptr,
                    each.kv_lens,
                    each.views.last_page_len,
                )
                for each in areas
            ),
            start=start,
            entries=self._pages,
        )


def _reach(table: torch.Tensor) -> int:
    """Elements from a table's first to its last, whatever lies between."""
    rows, columns = table.shape
    return (rows - 1) * table.stride(0) + (columns - 1) * table.stride(1) + 1
