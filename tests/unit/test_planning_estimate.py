"""``estimate``: what graphs will take, from two captures of which nothing is left."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphshare import (
    BatchDescriptor,
    CaptureError,
    GraphPool,
    Staleness,
    StaleStateError,
    capture_descriptors,
    share_states,
)
from graphshare.capture import make_backend
from graphshare.planning import estimate
from graphshare.planning.estimation import _extrapolated, _Reading
from tests.one_buffer import BIG, SMALL, Owner, captured, double, make, served

MIB = 1 << 20
KEYS = capture_descriptors(range(1, 9), max_num_reqs=8)


def _taken(pool: GraphPool[Any]) -> int:
    return sum(pool.statistics().bytes.values())


def layers(key: Any, state: torch.Tensor) -> torch.Tensor:
    """Takes 100 float32 for each token and layer, and 1,000 beside them."""
    x = state[:, None].expand(-1, 100) + 1
    for _ in range(3):
        x = torch.tanh(x)
    return x.sum() + torch.zeros(1000)


def test_what_grows_with_the_tokens_is_estimated() -> None:
    pool = make(Owner())
    estimated = estimate(pool, KEYS, layers)
    assert estimated.keys == len(KEYS)
    assert estimated.driver_bytes == 0
    pool.capture(KEYS, layers)
    assert estimated.total_bytes == pytest.approx(_taken(pool), rel=0.01)


@pytest.mark.parametrize("number", [1, 2])
def test_one_key_or_two_are_measured(number: int) -> None:
    keys = KEYS[:number]
    pool = make(Owner())
    estimated = estimate(pool, keys, layers)
    pool.capture(keys, layers)
    assert estimated.total_bytes == _taken(pool)
    assert estimated.first_bytes == pool.statistics().bytes[keys[0]]


def test_the_pool_is_as_before_and_its_states_are_stale() -> None:
    owner = Owner()
    pool = captured(owner)
    pool.refresh(BIG, 3)
    before = pool.statistics()
    estimate(pool, [BatchDescriptor(8, 8), BatchDescriptor(1, 1)], layers)
    assert pool.keys() == (BIG, SMALL)
    assert pool.dispatch(num_tokens=5, num_reqs=5) is None
    after = pool.statistics()
    assert (after.captures, after.bytes) == (before.captures, before.bytes)
    assert after.fresh == ()
    for key in (BIG, SMALL):
        with pytest.raises(StaleStateError) as caught:
            pool.replay(key)
        assert caught.value.rule == Staleness.INVALIDATED
    assert served(pool, BIG, 5) == [10, 10, 10, 10]
    pool.capture([BatchDescriptor(8, 8)], double)
    assert served(pool, BatchDescriptor(8, 8), 1) == [2] * 8


def test_it_goes_through_the_owner_as_a_capture_does() -> None:
    owner = Owner()
    estimate(make(owner), KEYS, double)
    assert [(key.num_tokens, batch, phase.value) for key, batch, phase in owner.builds] == [
        (8, None, "warmup"),
        (7, None, "warmup"),
        (8, None, "capture"),
        (7, None, "capture"),
    ]


def test_a_borrower_estimates_on_its_lenders_states() -> None:
    owner = Owner()
    producer = captured(owner, keys=KEYS)
    consumer = GraphPool("consumer", device="cpu")
    share_states(producer, consumer)
    producer.refresh(KEYS[0], 4)
    estimated = estimate(consumer, KEYS, layers)
    with pytest.raises(StaleStateError):
        producer.replay(KEYS[0])
    consumer.capture(KEYS, layers)
    assert estimated.total_bytes == pytest.approx(_taken(consumer), rel=0.01)
    assert served(producer, KEYS[0], 2) == [4] * 8


@pytest.mark.parametrize("calls", [0, 1, 2, 3])
def test_a_forward_that_fails_leaves_nothing(calls: int) -> None:
    """In either warmup, in either capture."""
    left = calls

    def fails(key: Any, state: torch.Tensor) -> torch.Tensor:
        nonlocal left
        if not left:
            raise ZeroDivisionError
        left -= 1
        return state * 2

    pool = make(Owner())
    with pytest.raises(CaptureError):
        estimate(pool, KEYS, fails)
    assert pool.keys() == ()
    pool.capture(KEYS, double)
    assert served(pool, KEYS[0], 1) == [2] * 8


def test_a_forward_that_writes_its_state_is_one_if_that_is_said() -> None:
    def advances(key: Any, state: torch.Tensor) -> torch.Tensor:
        return state.add_(1)

    with pytest.raises(CaptureError):
        estimate(make(Owner()), KEYS, advances)
    assert estimate(make(Owner()), KEYS, advances, writes_state=True).keys == len(KEYS)


def test_what_cannot_be_estimated_is_refused() -> None:
    with pytest.raises(ValueError):
        estimate(make(Owner()), [], double)
    with pytest.raises(CaptureError):
        estimate(captured(), [BIG], double)

    class OfOnesOwn:
        def __init__(self) -> None:
            self._inner = make_backend("tape")

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    with pytest.raises(TypeError):
        estimate(make(Owner(), backend=OfOnesOwn()), KEYS, double)


def test_keys_without_tokens_are_taken_to_be_like_the_second() -> None:
    class Width(int):
        def cost(self) -> int:
            return int(self)

        def covers(self, shape: int) -> bool:
            return shape <= self

    class Wide(Owner):
        def rows(self, key: Any) -> int:
            return int(key)

    keys = [Width(width) for width in (8, 7, 7 - 1)]
    pool: GraphPool[Any] = make(Wide())
    estimated = estimate(pool, keys, double)
    assert estimated.pool_bytes == estimated.first_bytes + 2 * estimated.second_bytes


# How memory adds up in a pool that graphs share.


def test_working_memory_is_paid_once() -> None:
    """The first graph takes it; later ones that keep nothing add nothing."""
    first = _Reading(100 * MIB, 0, 0)
    sizes = [512, 504, *range(496, 0, -8)]
    assert _extrapolated([first, first], sizes) == (100 * MIB, 100 * MIB)


def test_what_graphs_keep_adds_up_even_where_the_second_one_fits() -> None:
    """Their outputs eat up the working memory's place; a constant per graph would miss that."""
    sizes = list(range(512, 0, -8))
    first = _Reading(64 * MIB, 16 * MIB, 0)
    second = _Reading(64 * MIB, 16 * MIB + 504 * MIB // 32, 0)
    kept = sum(sizes) / 32
    least = max(sum(sizes[: at + 1]) / 32 + 48 * size / 512 for at, size in enumerate(sizes))
    low, high = _extrapolated([first, second], sizes)
    assert low / MIB == pytest.approx(least)
    assert high / MIB == pytest.approx(kept + 48)


def test_one_key_or_two_need_no_extrapolation() -> None:
    first, second = _Reading(20 * MIB, 4 * MIB, 0), _Reading(24 * MIB, 8 * MIB, 0)
    assert _extrapolated([first, second], [8, 8]) == (24 * MIB, 24 * MIB)
    assert _extrapolated([first], [8]) == (20 * MIB, 20 * MIB)


@pytest.mark.parametrize(
    ("outputs", "reserved_bytes", "taken_bytes"),
    [(1, 54_525_952, 169_869_312), (1, 71_303_168, 192_937_984), (4, 54_525_952, 618_659_840)],
)
def test_pools_as_they_came_out_on_a_gpu(
    outputs: int, reserved_bytes: int, taken_bytes: int
) -> None:
    """What `tests/gpu/test_estimate.py` captures, as an H200 with torch 2.11 took it: 83 keys,
    outputs of 4 KiB a token each, for feed-forward networks of 2, 8 and 4 layers."""
    sizes = sorted([1, 2, 4, *range(8, 257, 8), *range(272, 1025, 16)], reverse=True)
    kept = [outputs * 4096 * size for size in sizes[:2]]
    readings = [_Reading(reserved_bytes, sum(kept[: at + 1]), 0) for at in range(2)]
    low, high = _extrapolated(readings, sizes)
    assert low <= taken_bytes
    assert (low + high) / 2 == pytest.approx(taken_bytes, rel=0.1)
