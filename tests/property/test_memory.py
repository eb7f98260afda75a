"""MemoryRanges agrees with the set of all bytes that the elements of the tensors cover."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from graphshare.memory import MemoryRanges

BUFFER = torch.zeros(256, dtype=torch.uint8)
DTYPES = (torch.uint8, torch.int16, torch.float32, torch.int64)


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    typed = BUFFER.view(draw(st.sampled_from(DTYPES)))
    offset = draw(st.integers(0, typed.numel() - 1))
    left = typed.numel() - 1 - offset
    shape: list[int] = []
    stride: list[int] = []
    for _ in range(draw(st.integers(0, 3))):
        step = draw(st.integers(0, 12))
        size = draw(st.integers(0, 4))
        if size > 1 and step * (size - 1) > left:
            step = left // (size - 1)
        left -= step * max(size - 1, 0)
        shape.append(size)
        stride.append(step)
    return typed.as_strided(shape, stride, offset)


def bytes_of(tensors: list[torch.Tensor]) -> set[int]:
    found: set[int] = set()
    for tensor in tensors:
        size = tensor.element_size()
        start = BUFFER.data_ptr() + tensor.storage_offset() * size
        for index in itertools.product(*map(range, tensor.shape)):
            at = start + sum(i * s for i, s in zip(index, tensor.stride(), strict=True)) * size
            found.update(range(at, at + size))
    return found


def bytes_in(ranges: MemoryRanges) -> set[int]:
    runs = zip(ranges.starts, ranges.ends, strict=True)
    return {byte for start, end in runs for byte in range(start, end)}


sets = st.lists(views(), max_size=4)


@given(sets, sets)
def test_agrees_with_the_set_of_bytes(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    mine, theirs = MemoryRanges.of(a), MemoryRanges.of(b)
    wanted, others = bytes_of(a), bytes_of(b)
    assert bytes_in(mine) == wanted
    assert mine.nbytes == len(wanted)
    assert bool(mine) is bool(wanted)
    assert mine.hold(b) is mine.contains(theirs)
    assert mine.hold(a)
    assert mine.overlaps(theirs) is bool(wanted & others)
    assert mine.contains(theirs) is (others <= wanted)
    union = mine.union(theirs)
    assert bytes_in(union) == wanted | others
    assert union == MemoryRanges.of(a + b)


@given(sets)
def test_runs_are_sorted_and_do_not_touch(tensors: list[torch.Tensor]) -> None:
    ranges = MemoryRanges.of(tensors)
    edges = [edge for run in zip(ranges.starts, ranges.ends, strict=True) for edge in run]
    assert edges == sorted(set(edges))
    assert ranges.overlaps(ranges) is bool(ranges)
    assert ranges.contains(ranges)
    assert ranges.union(ranges) == ranges


@given(st.lists(st.tuples(sets, sets), min_size=1, max_size=3))
def test_overlap_is_symmetric(pairs: list[tuple[list[torch.Tensor], list[torch.Tensor]]]) -> None:
    for a, b in pairs:
        mine, theirs = MemoryRanges.of(a), MemoryRanges.of(b)
        assert mine.overlaps(theirs) is theirs.overlaps(mine)
