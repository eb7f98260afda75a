from __future__ import annotations

from typing import Any

import pytest
import torch

from graphshare.memory import MAX_RUNS, MemoryRanges


def test_nothing_is_the_empty_set() -> None:
    empty = MemoryRanges.of([])
    some = MemoryRanges.of([torch.zeros(4)])
    assert not empty
    assert empty.nbytes == 0
    assert empty.device is None
    assert not empty.overlaps(some)
    assert not some.overlaps(empty)
    assert some.contains(empty)
    assert not empty.contains(some)
    assert empty.union(some) == some == some.union(empty)


def test_interleaved_columns_share_no_byte() -> None:
    table = torch.zeros(8, 6, dtype=torch.int32)
    left, right = MemoryRanges.of([table[:, :3]]), MemoryRanges.of([table[:, 3:]])
    assert len(left.starts) == 8
    assert not left.overlaps(right)
    assert left.union(right) == MemoryRanges.of([table])


def test_a_part_is_contained_and_what_sticks_out_is_not() -> None:
    base = torch.zeros(12)
    middle = MemoryRanges.of([base[4:8]])
    assert MemoryRanges.of([base]).contains(middle)
    assert middle.contains(MemoryRanges.of([base[5:6], base[7:8]]))
    for other in (base[3:8], base[4:9], base[:4], base[8:], base[4:12:4]):
        assert not middle.contains(MemoryRanges.of([other]))
    assert not middle.overlaps(MemoryRanges.of([base[:4], base[8:]]))
    assert middle.overlaps(MemoryRanges.of([base[:4], base[7:]]))


@pytest.mark.parametrize("as_it_is", [True, False])
def test_tensors_are_held_whole_and_where_they_are(as_it_is: bool) -> None:
    def given(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if as_it_is else torch.nn.Parameter(tensor)

    base = torch.zeros(12)
    middle = MemoryRanges.of([base[4:8]])
    assert middle.hold([])
    assert middle.hold(map(given, [base[4:8], base[5:6], base[4:8:2], base[:0]]))
    assert not MemoryRanges.of([]).hold([given(base)])
    for other in (base[3:8], base[4:9], base[:4], base[8:], base[4:12:4]):
        assert not middle.hold([given(base[4:8]), given(other)])
    gaps = MemoryRanges.of([base[0:2], base[4:6]])
    assert not gaps.hold([given(base[:6])])
    elsewhere = MemoryRanges(middle.starts, middle.ends, torch.device("meta"))
    assert not elsewhere.hold([given(base[4:8])])
    with pytest.raises(TypeError):
        middle.hold([torch.eye(2).to_sparse()])


def test_a_part_of_another_tensor_adds_nothing() -> None:
    base = torch.zeros(8)
    for tensors in ([base, base[:2]], [base, base[6:]], [base[:2], base, base[3:4]]):
        assert MemoryRanges.of(tensors) == MemoryRanges.of([base])


def test_a_transposed_or_expanded_view_has_the_bytes_of_its_base() -> None:
    base = torch.zeros(4, 5)
    assert MemoryRanges.of([base.t()]) == MemoryRanges.of([base])
    assert MemoryRanges.of([base[0].expand(7, 5)]) == MemoryRanges.of([base[0]])


def test_beyond_the_limit_a_view_counts_with_its_gaps() -> None:
    base = torch.zeros(2 * MAX_RUNS + 2, dtype=torch.uint8)
    exact, coarse = base[: 2 * MAX_RUNS : 2], base[::2]
    assert MemoryRanges.of([exact]).nbytes == MAX_RUNS
    assert MemoryRanges.of([coarse]).nbytes == 2 * MAX_RUNS + 1
    assert MemoryRanges.of([coarse]).contains(MemoryRanges.of([exact]))


def test_no_memory_no_bytes() -> None:
    freed = torch.zeros(8)
    freed.untyped_storage().resize_(0)
    tensors = [torch.zeros(0, 3), torch.zeros(4, device="meta"), freed]
    assert not MemoryRanges.of(tensors)


def test_sets_of_two_devices() -> None:
    cpu = MemoryRanges((16,), (32,), torch.device("cpu"))
    cuda = MemoryRanges((16,), (32,), torch.device("cuda", 0))
    assert not cpu.overlaps(cuda)
    assert not cpu.contains(cuda)
    assert cpu != cuda
    with pytest.raises(ValueError, match="device"):
        cpu.union(cuda)


@pytest.mark.parametrize("value", [3, None, "t", torch.zeros(3, 3).to_sparse()])
def test_what_has_no_address_is_a_type_error(value: object) -> None:
    with pytest.raises(TypeError):
        MemoryRanges.of([value])  # pyright: ignore[reportArgumentType]


def test_tensors_that_wrap_others_are_a_type_error() -> None:
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner: torch.Tensor) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape)

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    with pytest.raises(TypeError):
        MemoryRanges.of([Wrapper(torch.zeros(3))])


@pytest.mark.gpu
def test_tensors_on_two_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="device"):
        MemoryRanges.of([torch.zeros(3), torch.zeros(3, device="cuda")])
