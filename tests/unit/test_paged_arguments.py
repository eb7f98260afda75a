"""What is wrong in a paged step is said where it is given, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphshare import BatchDescriptor
from graphshare.adapters.flashinfer import PageLists
from graphshare.adapters.paged import (
    AttentionShape,
    PagedBatch,
    PagedBuffers,
    PagedCapacity,
    dummy_batch,
)

np = pytest.importorskip("numpy")

SIZES = {"max_num_tokens": 8, "max_num_reqs": 4, "max_seq_len": 16, "page_size": 4}
CAPACITY = PagedCapacity(**SIZES, scratch_page=9)
KEY = BatchDescriptor(8, 4)
HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "head_size": 64}
INT32 = torch.int32
TENSORS = {
    "query_start_loc": torch.tensor([0, 1, 3], dtype=INT32),
    "seq_lens": torch.tensor([4, 5], dtype=INT32),
    "block_table": torch.tensor([[1, 2], [3, 4]], dtype=INT32),
    "slot_mapping": torch.tensor([7, 8, 9]),
}
BUFFERS: tuple[Callable[..., Any], ...] = (PagedBuffers, PageLists)


@pytest.mark.parametrize("name", [*SIZES, "scratch_page"])
@pytest.mark.parametrize("value", ["8", 8.0, True, None, -1, 1 << 31])
def test_a_size_is_an_integer_of_31_bits(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{name}: expected"):
        PagedCapacity(**{**SIZES, name: value})
    assert type(getattr(PagedCapacity(**{**SIZES, name: np.int64(4)}), name)) is int


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("num_q_heads", [0, 4.0, "4", True]),
        ("num_kv_heads", [0, 2.0, None]),
        ("head_size", [0, 64.0]),
        ("causal", ["no", None, 1]),
        ("window", [-2, 1.5, None]),
        ("dtype", ["bfloat16", torch.int32, torch.bool, None]),
        ("softmax_scale", [0, -1.0, float("nan"), float("inf"), "1", True]),
        ("softcap", [-1.0, float("nan"), float("inf"), "1", None]),
    ],
)
def test_a_shape_is_one_that_a_kernel_can_have(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises((TypeError, ValueError), match=f"^{name}: expected"):
            AttentionShape(**{**HEADS, name: value})


@pytest.mark.parametrize(
    ("given", "about"),
    [
        (([1], [1], [[1]], 0), "page_size"),
        (([1], [1], [[1]], 4.0), "page_size"),
        (([1], [1], [[1]], "4"), "page_size"),
        ((1, [1], [[1]], 4), "query_lens"),
        (([1.0], [1], [[1]], 4), "query_lens"),
        (([1], [1.5], [[1]], 4), "seq_lens"),
        (([1], ["1"], [[1]], 4), "seq_lens"),
        (([1], b"\1\0\0\0", [[1]], 4), "seq_lens"),
        (([1], [1], 5, 4), "block_table"),
        (([1], [1], [1], 4), r"block_table\[0\]"),
        (([1], [1], [[1.7]], 4), r"block_table\[0\]: expected integers, got 1\.7"),
        (([1], [1], [np.array([1.7])], 4), r"block_table\[0\]"),
        (([1], [1], [torch.tensor([1.7])], 4), r"block_table\[0\]"),
        (([1], [1], [[None]], 4), r"block_table\[0\]"),
        (([1], [1], "a", 4), r"block_table\[0\]"),
        (([1], [1], [[1 << 31]], 4), r"block_table\[0\]"),
        (([1], [5], [[1, -1]], 4), r"block_table\[0\]: expected pages of at least 0"),
        (([1, 1], [1], [[1]], 4), "as many"),
        (([], [], [], 4), "seq_lens"),
        (([0], [0], [[]], 4), "block_table"),
        (([2], [1], [[1]], 4), "seq_lens"),
        (([-1], [1], [[1]], 4), "query_start_loc"),
    ],
)
def test_a_step_is_laid_out_from_integers(given: tuple[Any, ...], about: str) -> None:
    """1.7 was once page 1 in the table, and slot 6 of page 0 in the slots."""
    with pytest.raises((TypeError, ValueError), match=about):
        PagedBatch.of(*given)


def test_starts_beyond_int32_are_refused() -> None:
    with pytest.raises(ValueError, match="query_lens"):
        PagedBatch.of([1 << 30] * 2, [1 << 30] * 2, [[0]] * 2, (1 << 31) - 1)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(0, 2)), min_size=1),
    st.integers(1, 9),
)
def test_integers_of_any_kind_lay_out_the_same(
    requests: list[tuple[int, int, int]], page_size: int
) -> None:
    rows = [min(some, tokens) for some, tokens, _ in requests]
    lens = [tokens for _, tokens, _ in requests]
    tables = [
        [7 * number + place for place in range(-(-tokens // page_size) + more)]
        for number, (_, tokens, more) in enumerate(requests)
    ]
    batch = PagedBatch.of(rows, lens, tables, page_size)
    assert batch.query_start_loc.diff().tolist() == rows
    assert batch.seq_lens.tolist() == lens
    width = max(map(len, tables))
    assert batch.block_table.tolist() == [[*pages, *[0] * (width - len(pages))] for pages in tables]
    other = PagedBatch.of(
        np.array(rows), torch.tensor(lens), [tuple(pages) for pages in tables], np.int64(page_size)
    )
    for name in TENSORS:
        assert torch.equal(getattr(batch, name), getattr(other, name))


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("value", [[1, 2], None, np.array([4, 5], dtype=np.int32), "x"])
def test_a_batch_has_tensors(name: str, value: Any) -> None:
    if name == "slot_mapping" and value is None:
        assert PagedBatch(**{**TENSORS, name: None}).slot_mapping is None
        return
    with pytest.raises(TypeError, match=f"^{name}: expected a tensor"):
        PagedBatch(**{**TENSORS, name: value})


@pytest.mark.parametrize("key", [8, None, (8, 4), "key", CAPACITY])
def test_a_key_is_a_descriptor(key: Any) -> None:
    with pytest.raises(TypeError, match=r"^key: expected a BatchDescriptor"):
        dummy_batch(key, CAPACITY)
    for cls in BUFFERS:
        for call in ("views", "written"):
            with pytest.raises(TypeError, match=r"^key: expected a BatchDescriptor"):
                getattr(cls(CAPACITY, "cpu"), call)(key)
        with pytest.raises(TypeError, match=r"^key: expected a BatchDescriptor"):
            cls(CAPACITY, "cpu").write(key, PagedBatch(**TENSORS))


def test_a_dummy_needs_a_capacity() -> None:
    with pytest.raises(TypeError, match="capacity: expected a PagedCapacity"):
        dummy_batch(KEY, 8)  # pyright: ignore[reportArgumentType]


def _written(cls: Callable[..., Any]) -> tuple[Any, torch.Tensor]:
    buffers = cls(CAPACITY, "cpu")
    buffers.write(KEY, PagedBatch.of([2, 3], [9, 8], [[1, 2, 3], [4, 5]], 4))
    return buffers, buffers.written(KEY)


@pytest.mark.parametrize("cls", BUFFERS)
@pytest.mark.parametrize("batch", [None, "x", ([1], [1], [[1]]), TENSORS])
def test_what_is_no_batch_is_not_written(cls: Callable[..., Any], batch: Any) -> None:
    buffers, memory = _written(cls)
    before = memory.clone()
    with pytest.raises(TypeError, match=r"^batch: expected a PagedBatch"):
        buffers.write(KEY, batch)
    assert torch.equal(memory, before)


@pytest.mark.parametrize("cls", BUFFERS)
@pytest.mark.parametrize("name", ["block_table", "slot_mapping"])
def test_a_tensor_on_another_device_is_refused_before_anything_is_written(
    cls: Callable[..., Any], name: str
) -> None:
    """Slots from elsewhere were once passed over, and their rows written to the scratch page."""
    buffers, memory = _written(cls)
    before = memory.clone()
    with pytest.raises(ValueError, match=f"^{name}: expected a tensor on the CPU, got meta"):
        buffers.write(KEY, PagedBatch(**{**TENSORS, name: TENSORS[name].to("meta")}))
    assert torch.equal(memory, before)


@pytest.mark.parametrize("cls", BUFFERS)
def test_views_of_larger_tensors_are_read_by_their_strides(cls: Callable[..., Any]) -> None:
    plain, strided = cls(CAPACITY, "cpu"), cls(CAPACITY, "cpu")
    plain.write(KEY, PagedBatch(**TENSORS))
    strided.write(
        KEY,
        PagedBatch(
            torch.tensor([0, 9, 1, 9, 3], dtype=INT32)[::2],
            torch.tensor([4, 9, 5], dtype=INT32)[::2],
            torch.tensor([[1, 3], [2, 4]], dtype=INT32).t(),
            torch.tensor([7, 0, 8, 0, 9])[::2],
        ),
    )
    assert torch.equal(plain.written(KEY), strided.written(KEY))
