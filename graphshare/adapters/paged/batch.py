"""A step over a paged KV cache, as an engine describes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import Self

from graphshare.adapters.paged.integers import LARGEST, integers, rows_of, tensor_of
from graphshare.arguments import whole_number, wrong_type

if TYPE_CHECKING:
    from graphshare.descriptor import BatchDescriptor

__all__ = ["PagedBatch", "PagedCapacity", "check_lengths", "dummy_batch"]

_KEY = ("num_tokens", "num_reqs", "uniform_query_len", "max_query_len")


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedCapacity:
    """The most that a step may hold: what buffers are sized for and graphs are captured at.

    Args:
        max_num_tokens: Rows of a step.
        max_num_reqs: Requests of a step.
        max_seq_len: Tokens of one request in the cache.
        page_size: Tokens of one page.
        scratch_page: A page that belongs to no request: dummies of warmups and captures live in
            it, and padding rows write there.

    Raises:
        TypeError: For a number that is no integer.
        ValueError: For a size below 1, a scratch page below 0, or numbers beyond 31 bits.
    """

    max_num_tokens: int
    max_num_reqs: int
    max_seq_len: int
    page_size: int
    scratch_page: int = 0

    def __post_init__(self) -> None:
        for name in ("max_num_tokens", "max_num_reqs", "max_seq_len", "page_size", "scratch_page"):
            least = 0 if name == "scratch_page" else 1
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least, LARGEST))

    @property
    def max_pages(self) -> int:
        """The width of a block table, in pages of one request."""
        return -(-self.max_seq_len // self.page_size)

    def num_reqs(self, key: BatchDescriptor) -> int:
        """Requests that a graph captured for ``key`` reads, padding included.

        A key that does not bound them is bounded by its rows and by the capacity.
        """
        if key.num_reqs is not None:
            return key.num_reqs
        return min(key.num_tokens // (key.uniform_query_len or 1), self.max_num_reqs)

    def max_query_len(self, key: BatchDescriptor) -> int:
        """Rows that one request may have in a graph captured for ``key``."""
        longest = key.uniform_query_len or key.max_query_len or key.num_tokens
        return min(longest, self.max_seq_len)

    def max_num_rows(self, key: BatchDescriptor) -> int:
        """Rows that a batch may have in a graph captured for ``key``."""
        return min(key.num_tokens, self.num_reqs(key) * self.max_query_len(key))

    def check_key(self, key: BatchDescriptor) -> None:
        """Refuse a key that this capacity does not hold.

        Raises:
            TypeError: It is no descriptor.
            ValueError: It has more rows or requests.
        """
        _check_descriptor(key)
        if self.num_reqs(key) > self.max_num_reqs or key.num_tokens > self.max_num_tokens:
            raise ValueError(
                f"key: expected at most {self.max_num_reqs} requests and {self.max_num_tokens} "
                f"rows, got {key}. Its buffers would not fit. Size the capacity for the largest key"
            )

    def check(self, key: BatchDescriptor, batch: PagedBatch) -> None:
        """Refuse a batch that ``key`` or this capacity does not hold.

        Raises:
            TypeError: It is no batch.
            ValueError: For too many rows, requests, rows of one request, tokens of one request, or
                a block table too narrow for its tokens.
        """
        _check_batch(batch)
        limits = (
            ("rows", batch.num_tokens, key.num_tokens),
            ("requests", batch.num_reqs, self.num_reqs(key)),
            ("rows of one request", batch.max_query_len, self.max_query_len(key)),
            ("tokens of one request", batch.max_seq_len, self.max_seq_len),
            (
                "tokens of one request in the pages of block_table",
                batch.max_seq_len,
                batch.block_table.shape[1] * self.page_size,
            ),
        )
        for what, got, limit in limits:
            if got > limit:
                raise ValueError(
                    f"batch: expected at most {limit} {what}, got {got} (key {key}). Rows past "
                    "the key would be dropped. Dispatch the batch, or run it eagerly"
                )


@dataclass(frozen=True, slots=True, eq=False)
class PagedBatch:
    """One step over a paged KV cache, without padding.

    Lengths are on the host, where plans are made; page tables may be on either side. The tensors
    are looked at when the batch is made, and must not change until it has been written.

    Args:
        query_start_loc: ``[num_reqs + 1]`` int32, CPU: first row of each request, and the rows.
        seq_lens: ``[num_reqs]`` int32, CPU: tokens in the cache for each request, this step's
            included.
        block_table: ``[num_reqs, pages]`` int32, CPU or the pool's device: the pages of each
            request in order; entries past a request's last page are never read.
        slot_mapping: ``[num_tokens]`` int64, CPU or the pool's device: the slot of each row,
            ``page * page_size + offset``. ``None`` where the engine writes the cache by itself.

    Attributes:
        num_tokens: Rows.
        max_query_len: Rows of the request that has most.
        max_seq_len: Tokens of the longest request.

    Raises:
        TypeError: For what is no tensor.
        ValueError: For tensors of other shapes or dtypes, lengths on a device, rows that are not
            in order, a request with fewer tokens than rows.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor | None = None
    num_tokens: int = field(init=False, repr=False)
    max_query_len: int = field(init=False, repr=False)
    max_seq_len: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        slots = self.slot_mapping
        for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
            tensor = getattr(self, name)
            if not isinstance(tensor, torch.Tensor) and not (tensor is None and tensor is slots):
                raise wrong_type(name, "a tensor", tensor, "PagedBatch.of makes them of integers.")
        num_reqs = self.seq_lens.shape[0] if self.seq_lens.ndim == 1 else -1
        _expect("seq_lens", self.seq_lens, torch.int32, "[num_reqs] with at least 1", num_reqs > 0)
        starts = self.query_start_loc
        fits = starts.ndim == 1 and starts.shape[0] == num_reqs + 1
        _expect("query_start_loc", starts, torch.int32, f"[{num_reqs + 1}]", fits)
        table = self.block_table
        fits = table.ndim == 2 and table.shape[0] == num_reqs and table.shape[1] > 0
        _expect("block_table", table, torch.int32, f"[{num_reqs}, pages]", fits)
        for name in ("query_start_loc", "seq_lens"):
            if getattr(self, name).device.type != "cpu":
                raise ValueError(
                    f"{name}: expected a tensor on the CPU, got {getattr(self, name).device}. "
                    "Plans are made from lengths on the host"
                )
        firsts = starts.tolist()
        lens = self.seq_lens.tolist()
        rows = [after - first for first, after in pairwise(firsts)]
        if firsts[0] != 0 or min(rows) < 0:
            raise ValueError(
                f"query_start_loc: expected to rise from 0, got {firsts[:8]}"
                f"{'...' if len(firsts) > 8 else ''}"
            )
        for index, (num_rows, seq_len) in enumerate(zip(rows, lens, strict=True)):
            if seq_len < max(num_rows, 1):
                raise ValueError(
                    f"seq_lens[{index}]: expected at least {max(num_rows, 1)}, the request's rows "
                    f"in this step, got {seq_len}"
                )
        if self.slot_mapping is not None:
            fits = self.slot_mapping.shape == (firsts[-1],)
            _expect("slot_mapping", self.slot_mapping, torch.int64, f"[{firsts[-1]}]", fits)
        # Every refresh compares them with its key; a reduction over a tensor takes microseconds.
        object.__setattr__(self, "num_tokens", firsts[-1])
        object.__setattr__(self, "max_query_len", max(rows))
        object.__setattr__(self, "max_seq_len", max(lens))

    @classmethod
    def of(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_table: Sequence[Sequence[int]],
        page_size: int,
    ) -> Self:
        """Lay out a step from plain integers; the slots follow from the pages.

        Args:
            query_lens: Rows of each request in this step; sequences of ints, here and below.
            seq_lens: Tokens in the cache for each request, these rows included.
            block_table: Pages of each request; rows may differ in length.
            page_size: Tokens of one page.

        Raises:
            TypeError: For anything but integers.
            ValueError: For a request whose pages do not hold its tokens, a page below 0 among them,
                integers beyond 31 bits, and as the class does.
        """
        page_size = whole_number("page_size", page_size, 1, LARGEST)
        every_rows, lens = integers("query_lens", query_lens), integers("seq_lens", seq_lens)
        rows_of_pages = rows_of("block_table", block_table)
        if not len(every_rows) == len(lens) == len(rows_of_pages):
            raise ValueError(
                f"expected as many query_lens, seq_lens and rows of block_table, "
                f"got {len(every_rows)}, {len(lens)}, {len(rows_of_pages)}"
            )
        if sum(every_rows) > LARGEST:
            raise ValueError(f"query_lens: expected at most {LARGEST} in all, got more")
        starts, slots = [0], list[int]()
        for index, (rows, seq_len, pages) in enumerate(
            zip(every_rows, lens, rows_of_pages, strict=True)
        ):
            if len(pages) * page_size < seq_len:
                raise ValueError(
                    f"block_table[{index}]: expected pages for {seq_len} tokens, "
                    f"got {len(pages)} of {page_size}"
                )
            least = min(pages[: -(-seq_len // page_size)], default=0)
            if least < 0:
                raise ValueError(
                    f"block_table[{index}]: expected pages of at least 0 for its tokens, got "
                    f"{least}. The kernels would read memory before the cache"
                )
            starts.append(starts[-1] + rows)
            slots.extend(
                pages[position // page_size] * page_size + position % page_size
                for position in range(max(seq_len - rows, 0), seq_len)
            )
        return cls(
            torch.tensor(starts, dtype=torch.int32),
            tensor_of([lens])[0],
            tensor_of(rows_of_pages),
            torch.tensor(slots, dtype=torch.int64),
        )

    @property
    def num_reqs(self) -> int:
        """Requests."""
        return self.seq_lens.shape[0]


def _expect(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: str, fits: bool) -> None:
    if not fits or tensor.dtype != dtype:
        raise ValueError(
            f"{name}: expected {shape} {dtype}, got {list(tensor.shape)} {tensor.dtype}"
        )


def check_lengths(key: BatchDescriptor, batch: PagedBatch) -> None:
    """Refuse a batch of a uniform key in which a request has another number of rows.

    Raises:
        TypeError: It is no batch, or the key no descriptor.
        ValueError: It has such a request.
    """
    _check_batch(batch)
    try:
        length = key.uniform_query_len
    except AttributeError:
        _check_descriptor(key)
        raise
    if length is not None and (
        batch.max_query_len > length or batch.num_tokens != length * batch.num_reqs
    ):
        raise ValueError(
            f"batch: expected {length} rows of every request, got "
            f"{batch.query_start_loc.diff().tolist()[:8]} (key {key}). Rows would be taken for "
            "another request's. Dispatch the batch, or run it eagerly"
        )


def _check_batch(batch: Any) -> None:
    if not isinstance(batch, PagedBatch):
        raise wrong_type("batch", "a PagedBatch", batch, "PagedBatch.of makes one of integers.")


def _check_descriptor(key: Any) -> None:
    if not all(hasattr(key, name) for name in _KEY):
        raise wrong_type("key", "a BatchDescriptor", key)


def dummy_batch(key: BatchDescriptor, capacity: PagedCapacity) -> PagedBatch:
    """Lay out a step for a warmup or a capture: ``key`` full, its requests in the scratch page.

    The rows are shared out so that the longest request that the key allows comes first.

    Raises:
        TypeError: The key is no descriptor, or the capacity is none.
    """
    _check_descriptor(key)
    if not isinstance(capacity, PagedCapacity):
        raise wrong_type("capacity", "a PagedCapacity", capacity, "The key comes first.")
    longest = capacity.max_query_len(key)
    num_reqs = capacity.num_reqs(key)
    if key.uniform_query_len is not None:
        lens = [longest] * num_reqs
    else:
        lens = [1] * min(num_reqs, key.num_tokens)
        spare = min(key.num_tokens, len(lens) * longest) - len(lens)
        for index in range(len(lens)):
            more = min(spare, longest - 1)
            lens[index] += more
            spare -= more
    lens = [min(n, capacity.max_seq_len) for n in lens]
    pages = [[capacity.scratch_page] * -(-n // capacity.page_size) for n in lens]
    return PagedBatch.of(lens, lens, pages, capacity.page_size)
