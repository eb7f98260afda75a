"""Page tables and lengths where kernels read them: padded on the host, sent in one transfer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from graphshare.adapters.paged.arguments import check_capacity, check_devices
from graphshare.adapters.paged.batch import PagedBatch, PagedCapacity
from graphshare.adapters.paged.staging import HostStage
from graphshare.device import device_of

if TYPE_CHECKING:
    from graphshare.descriptor import BatchDescriptor

__all__ = ["PagedBuffers", "PagedViews"]

# The host fills one area while the device still reads the other.
_STAGES = 2
# Tables up to this size are padded on the host; of larger ones only what is used is sent.
_SENT_WHOLE_BYTES = 1 << 18
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True, eq=False)
class PagedViews:
    """What the kernels of one key read: views of persistent memory, the same at each write.

    Args:
        query_start_loc: ``[num_reqs + 1]`` int32; requests past the batch have no rows.
        kv_start_loc: ``[num_reqs + 1]`` int32: running sum of ``seq_lens``.
        seq_lens: ``[num_reqs]`` int32; 0 past the batch.
        block_table: ``[num_reqs, max_pages]`` int32; the scratch page past what the batch uses.
        slot_mapping: ``[key.num_tokens]`` int64; past the batch, slots of the scratch page.
    """

    query_start_loc: torch.Tensor
    kv_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


class _Region(NamedTuple):
    """Where one key's buffers lie; the block table comes last.

    Args:
        views: On the device.
        staged: The same in each stage; on a CPU, the views themselves.
        head: Bytes before the block table.
        whole: Bytes with it.
    """

    views: PagedViews
    staged: tuple[PagedViews, ...]
    head: int
    whole: int


class PagedBuffers:
    """Persistent memory for page tables and lengths, with a padding that touches no live page.

    All keys lie in the same memory, each with its buffers one after the other, so that a write is
    one transfer.

    Args:
        capacity: What it is sized for.
        device: Where it lies.

    Raises:
        TypeError: The capacity is none, or the device is no device.
        ValueError: torch does not know the device.
        RuntimeError: The device is not there.
    """

    def __init__(self, capacity: PagedCapacity, device: torch.device | str) -> None:
        check_capacity("PagedBuffers", capacity)
        device = device_of("PagedBuffers: device", device)
        self.capacity = capacity
        _, most = _offsets(capacity, capacity.max_num_reqs, capacity.max_num_tokens)
        self._memory = torch.zeros(most, dtype=torch.uint8, device=device)
        cuda = self._memory.is_cuda
        self._stages = [HostStage(most, cuda=True) for _ in range(_STAGES)] if cuda else []
        self._turn = 0
        self._regions: dict[BatchDescriptor, _Region] = {}

    def check(self, key: BatchDescriptor, batch: PagedBatch) -> None:
        """As :meth:`PagedCapacity.check`, before anything is written."""
        self.capacity.check(key, batch)

    def views(self, key: BatchDescriptor) -> PagedViews:
        """Return what :meth:`write` writes and returns for ``key``, without writing."""
        return self._region(key).views

    def written(self, key: BatchDescriptor) -> torch.Tensor:
        """Return the memory that a write for ``key`` may write: bytes, uint8."""
        return self._memory[: self._region(key).whole]

    def write(self, key: BatchDescriptor, batch: PagedBatch, *, starts: bool = True) -> PagedViews:
        """Write a batch, padded to ``key``.

        Args:
            key: The key.
            batch: The batch.
            starts: Whether the two running sums are written; without them they are undefined.

        Raises:
            TypeError: As ``check`` raises; nothing is written then.
            ValueError: As ``check`` raises, or the batch has a tensor on another device; nothing is
                written then.
        """
        region = self._region(key)
        self.capacity.check(key, batch)
        check_devices(batch, self._memory.device)
        if not self._stages:
            self._fill(region.staged[0], batch, starts)
            self._fill_table(region.staged[0].block_table, batch.block_table)
            return region.views
        self._turn = (self._turn + 1) % _STAGES
        stage = self._stages[self._turn]
        stage.wait()
        staged = region.staged[self._turn]
        self._fill(staged, batch, starts)
        table, slots = batch.block_table, batch.slot_mapping
        sent = region.head
        whole = not table.is_cuda and region.whole - sent <= _SENT_WHOLE_BYTES
        if whole:
            self._fill_table(staged.block_table, table)
            sent = region.whole
        self._memory[:sent].copy_(stage.memory[:sent], non_blocking=True)
        if not whole:
            table = table[:, : self.capacity.max_pages]
            if not table.is_cuda:
                packed = staged.block_table.view(-1)[: table.numel()].view(table.shape)
                table = packed.copy_(table)
            self._fill_table(region.views.block_table, table)
        if slots is not None and slots.is_cuda:
            region.views.slot_mapping[: slots.shape[0]].copy_(slots, non_blocking=True)
        if stage.copied is not None:
            stage.copied.record(torch.cuda.current_stream(self._memory.device))
        return region.views

    def _fill(self, views: PagedViews, batch: PagedBatch, starts: bool) -> None:
        live = batch.num_reqs
        views.seq_lens[:live].copy_(batch.seq_lens)
        if live < views.seq_lens.shape[0]:
            views.seq_lens[live:].zero_()
        if starts:
            self._fill_starts(views, batch)
        slots = batch.slot_mapping
        used = 0
        if slots is not None and slots.device == views.slot_mapping.device:
            used = slots.shape[0]
            views.slot_mapping[:used].copy_(slots)
        if used < views.slot_mapping.shape[0]:
            views.slot_mapping[used:].fill_(self.capacity.scratch_page * self.capacity.page_size)

    def _fill_starts(self, views: PagedViews, batch: PagedBatch) -> None:
        live, sums = batch.num_reqs, views.kv_start_loc
        views.query_start_loc[: live + 1].copy_(batch.query_start_loc)
        sums[0] = 0
        torch.cumsum(batch.seq_lens, 0, dtype=torch.int32, out=sums[1 : live + 1])
        if live < views.seq_lens.shape[0]:
            views.query_start_loc[live + 1 :].fill_(batch.num_tokens)
            sums[live + 1 :].copy_(sums[live])

    def _fill_table(self, view: torch.Tensor, table: torch.Tensor) -> None:
        rows, width = table.shape[0], min(table.shape[1], view.shape[1])
        if width < view.shape[1]:
            view[:rows, width:].fill_(self.capacity.scratch_page)
        view[:rows, :width].copy_(table[:, :width], non_blocking=True)
        if rows < view.shape[0]:
            view[rows:].fill_(self.capacity.scratch_page)

    def _region(self, key: BatchDescriptor) -> _Region:
        region = self._regions.get(key)
        if region is None:
            capacity = self.capacity
            capacity.check_key(key)
            num_reqs = capacity.num_reqs(key)
            offsets, whole = _offsets(capacity, num_reqs, key.num_tokens)

            def lay_out(memory: torch.Tensor) -> PagedViews:
                def part(name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
                    count = dtype.itemsize
                    for size in shape:
                        count *= size
                    start = offsets[name]
                    return memory[start : start + count].view(dtype).view(shape)

                return PagedViews(
                    query_start_loc=part("query_start_loc", torch.int32, num_reqs + 1),
                    kv_start_loc=part("kv_start_loc", torch.int32, num_reqs + 1),
                    seq_lens=part("seq_lens", torch.int32, num_reqs),
                    block_table=part("block_table", torch.int32, num_reqs, capacity.max_pages),
                    slot_mapping=part("slot_mapping", torch.int64, key.num_tokens),
                )

            views = lay_out(self._memory)
            staged = tuple(lay_out(stage.memory) for stage in self._stages) or (views,)
            region = _Region(views, staged, offsets["block_table"], whole)
            self._regions[key] = region
        return region


def _offsets(capacity: PagedCapacity, num_reqs: int, num_tokens: int) -> tuple[dict[str, int], int]:
    """Return where each buffer begins, and the bytes of all of them."""
    offsets: dict[str, int] = {}
    end = 0
    for name, nbytes in (
        ("query_start_loc", 4 * (num_reqs + 1)),
        ("kv_start_loc", 4 * (num_reqs + 1)),
        ("seq_lens", 4 * num_reqs),
        ("slot_mapping", 8 * num_tokens),
        ("block_table", 4 * num_reqs * capacity.max_pages),
    ):
        offsets[name] = end
        end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, end
