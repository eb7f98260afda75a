"""A step over a paged cache: what it refuses, and what the buffers hold past it."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphshare import BatchDescriptor
from graphshare.adapters.paged import PagedBatch, PagedBuffers, PagedCapacity, dummy_batch
from graphshare.memory import MemoryRanges

CAPACITY = PagedCapacity(
    max_num_tokens=32, max_num_reqs=8, max_seq_len=60, page_size=8, scratch_page=3
)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], list[int], list[list[int]]]:
    num_reqs = draw(st.integers(1, CAPACITY.max_num_reqs))
    query_lens = draw(st.lists(st.integers(0, 4), min_size=num_reqs, max_size=num_reqs))
    seq_lens = [draw(st.integers(max(n, 1), CAPACITY.max_seq_len)) for n in query_lens]
    pages = iter(range(10, 10_000))
    tables = [[next(pages) for _ in range(-(-n // CAPACITY.page_size))] for n in seq_lens]
    return query_lens, seq_lens, tables


@given(steps())
def test_what_a_key_reads_is_the_batch_and_then_padding(
    step: tuple[list[int], list[int], list[list[int]]],
) -> None:
    query_lens, seq_lens, tables = step
    batch = PagedBatch.of(query_lens, seq_lens, tables, CAPACITY.page_size)
    key = BatchDescriptor(num_tokens=32, num_reqs=8)
    buffers = PagedBuffers(CAPACITY, "cpu")
    buffers.write(key, dummy_batch(key, CAPACITY))
    views = buffers.write(key, batch)
    assert views.query_start_loc.diff().tolist() == [*query_lens, *[0] * (8 - len(query_lens))]
    assert views.seq_lens.tolist() == [*seq_lens, *[0] * (8 - len(seq_lens))]
    for row, pages in zip(views.block_table.tolist(), tables, strict=False):
        assert row[: len(pages)] == pages
    assert (views.block_table[len(tables) :] == CAPACITY.scratch_page).all()
    slots = views.slot_mapping.tolist()
    assert all(slot // 8 == CAPACITY.scratch_page for slot in slots[batch.num_tokens :])
    live = iter(slots)
    for rows, length, pages in zip(query_lens, seq_lens, tables, strict=True):
        for position in range(length - rows, length):
            assert next(live) == pages[position // 8] * 8 + position % 8


@given(
    st.sampled_from(
        [
            BatchDescriptor(num_tokens=16, num_reqs=4),
            BatchDescriptor(num_tokens=16),
            BatchDescriptor(num_tokens=3, num_reqs=2),
            BatchDescriptor(num_tokens=16, num_reqs=4, uniform_query_len=4),
            BatchDescriptor(num_tokens=16, num_reqs=8, max_query_len=2),
        ]
    )
)
def test_a_dummy_fits_its_key(key: BatchDescriptor) -> None:
    batch = dummy_batch(key, CAPACITY)
    PagedBuffers(CAPACITY, "cpu").check(key, batch)
    assert batch.num_tokens == key.num_tokens
    assert (batch.block_table[:, 0] == CAPACITY.scratch_page).all()


@pytest.mark.parametrize(
    ("key", "rows"),
    [
        (BatchDescriptor(num_tokens=128, num_reqs=4), 128),  # no request can have 125 of 60 tokens
        (BatchDescriptor(num_tokens=300, num_reqs=4), 240),
        (BatchDescriptor(num_tokens=32, num_reqs=4, max_query_len=2), 8),
    ],
)
def test_a_dummy_has_all_the_rows_that_a_batch_can_have(key: BatchDescriptor, rows: int) -> None:
    """A plan made for fewer rows than a later batch has would be refused by it, or drop them."""
    capacity = dataclasses.replace(CAPACITY, max_num_tokens=300)
    assert capacity.max_num_rows(key) == rows
    batch = dummy_batch(key, capacity)
    capacity.check(key, batch)
    assert batch.num_tokens == rows


KEY = BatchDescriptor(num_tokens=4, num_reqs=2, max_query_len=3)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "said"),
    [
        ([3, 2], [3, 2], "4 rows"),
        ([1, 1, 1], [1, 1, 1], "2 requests"),
        ([4], [4], "3 rows of one request"),
        ([1], [61], "60 tokens of one request"),
    ],
)
def test_a_batch_too_large_is_refused_and_nothing_written(
    query_lens: list[int], seq_lens: list[int], said: str
) -> None:
    buffers = PagedBuffers(CAPACITY, "cpu")
    before = buffers.write(KEY, dummy_batch(KEY, CAPACITY))
    kept = before.seq_lens.clone()
    tables = [list(range(8))] * len(seq_lens)
    with pytest.raises(ValueError, match=f"expected at most {said}"):
        buffers.write(KEY, PagedBatch.of(query_lens, seq_lens, tables, 8))
    assert torch.equal(before.seq_lens, kept)


def test_a_block_table_too_narrow_is_refused() -> None:
    batch = PagedBatch(
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([20], dtype=torch.int32),
        torch.tensor([[1, 2]], dtype=torch.int32),
    )
    with pytest.raises(ValueError, match="pages of block_table"):
        PagedBuffers(CAPACITY, "cpu").write(KEY, batch)


def _ints(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize(
    ("starts", "lens", "table", "slots", "said"),
    [
        (_ints([0, 1]), _ints([1], torch.int64), _ints([1]).view(1, 1), None, "seq_lens"),
        (_ints([0, 1]), _ints([]), _ints([1]).view(1, 1), None, "seq_lens"),
        (_ints([0, 1, 2]), _ints([1]), _ints([1]).view(1, 1), None, "query_start_loc"),
        (_ints([1, 2]), _ints([1]), _ints([1]).view(1, 1), None, "query_start_loc"),
        (_ints([0, 2, 1]), _ints([2, 1]), _ints([1, 1]).view(2, 1), None, "query_start_loc"),
        (_ints([0, 1]), _ints([1]), _ints([1]), None, "block_table"),
        (_ints([0, 2]), _ints([1]), _ints([1]).view(1, 1), None, r"seq_lens\[0\]"),
        (_ints([0, 0]), _ints([0]), _ints([1]).view(1, 1), None, r"seq_lens\[0\]"),
        (_ints([0, 1]), _ints([1]), _ints([1]).view(1, 1), _ints([8]), "slot_mapping"),
    ],
)
def test_an_impossible_batch_is_refused_by_name(
    starts: torch.Tensor,
    lens: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor | None,
    said: str,
) -> None:
    with pytest.raises(ValueError, match=said):
        PagedBatch(starts, lens, table, slots)


def test_pages_that_do_not_hold_the_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"block_table\[0\]"):
        PagedBatch.of([1], [9], [[1]], 8)


def test_the_views_of_a_key_are_what_a_write_returns() -> None:
    buffers = PagedBuffers(CAPACITY, "cpu")
    written = buffers.write(KEY, dummy_batch(KEY, CAPACITY))
    for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
        assert getattr(buffers.views(KEY), name).is_set_to(getattr(written, name))


@given(steps())
def test_running_lengths_rise_to_the_last_and_stay(
    step: tuple[list[int], list[int], list[list[int]]],
) -> None:
    batch = PagedBatch.of(*step, CAPACITY.page_size)
    key = BatchDescriptor(num_tokens=32, num_reqs=8)
    views = PagedBuffers(CAPACITY, "cpu").write(key, batch)
    assert views.kv_start_loc[0] == 0
    assert torch.equal(views.kv_start_loc.diff(), views.seq_lens)
    assert batch.num_tokens == sum(step[0])
    assert batch.max_query_len == max(step[0])
    assert batch.max_seq_len == max(step[1])


@given(steps())
def test_without_starts_all_else_is_written(
    step: tuple[list[int], list[int], list[list[int]]],
) -> None:
    batch = PagedBatch.of(*step, CAPACITY.page_size)
    key = BatchDescriptor(num_tokens=32, num_reqs=8)
    full, lean = PagedBuffers(CAPACITY, "cpu"), PagedBuffers(CAPACITY, "cpu")
    expected, views = full.write(key, batch), lean.write(key, batch, starts=False)
    for name in ("seq_lens", "block_table", "slot_mapping"):
        assert torch.equal(getattr(views, name), getattr(expected, name)), name
    assert not views.query_start_loc.any()
    assert not views.kv_start_loc.any()


@pytest.mark.parametrize("key", [BatchDescriptor(33, 8), BatchDescriptor(32, 9)])
def test_a_key_beyond_the_capacity_is_refused(key: BatchDescriptor) -> None:
    buffers = PagedBuffers(CAPACITY, "cpu")
    with pytest.raises(ValueError, match="8 requests and 32 rows"):
        buffers.views(key)


def test_all_that_a_key_reads_lies_in_what_it_writes() -> None:
    buffers = PagedBuffers(CAPACITY, "cpu")
    for key in (KEY, BatchDescriptor(32, 8), BatchDescriptor(1, 1)):
        views = buffers.views(key)
        written = MemoryRanges.of([buffers.written(key)])
        leaves = [getattr(views, field.name) for field in dataclasses.fields(views)]
        assert written.contains(MemoryRanges.of(leaves))
        assert all(leaf.data_ptr() % 16 == 0 and leaf.is_contiguous() for leaf in leaves)
        for one, two in itertools.combinations(leaves, 2):
            assert not MemoryRanges.of([one]).overlaps(MemoryRanges.of([two]))
