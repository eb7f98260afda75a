"""Plans, the files they are kept in, the usual ladders, and ``capture_descriptors(plan=)``."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from graphshare import BatchDescriptor, capture_descriptors
from graphshare.planning import (
    Batch,
    Limit,
    TooTightError,
    Work,
    count_batches,
    evaluate,
    ladders,
    plan_captures,
    write_plan,
)
from graphshare.planning.ladders import powers_of_two, sglang, sglang_decode, vllm

CHAT = [
    Batch(4 * reqs, reqs, 4, steps=steps) for reqs, steps in ((1, 90), (3, 40), (8, 20), (9, 1))
] + [Batch(30, 5, None, steps=7), Batch(200, 5, None)]


def test_a_uniform_batch_runs_on_a_mixed_key_that_is_smaller() -> None:
    """So the two kinds cannot be planned one after the other."""
    trace = count_batches([Batch(3, 3, 1, steps=100), Batch(4, 2, None, steps=100)], max_tokens=8)
    keys = [BatchDescriptor(4, 3), BatchDescriptor(6, 6, 1)]
    assert evaluate(keys, trace).hits == {keys[0]: 200, keys[1]: 0}


def test_where_mixed_keys_cost_no_more_there_are_only_those() -> None:
    plan = plan_captures(count_batches(CHAT), 4, uniform_query_lens=[4])
    assert {key.uniform_query_len for key in plan.keys} == {None}


def test_where_mixed_keys_cost_more_uniform_ones_are_worth_a_graph() -> None:
    plan = plan_captures(
        count_batches(CHAT), 4, work=Work(mixed_per_step=10), uniform_query_lens=[4]
    )
    assert {key.uniform_query_len for key in plan.keys} == {None, 4}
    assert plan.outcome.eager == {}


def test_without_mixed_keys_batches_of_differing_lengths_run_eagerly() -> None:
    plan = plan_captures(count_batches(CHAT), 9, uniform_query_lens=[4], mixed=False)
    assert {key.uniform_query_len for key in plan.keys} == {4}
    assert plan.outcome.eager == {"not_covered": 8}
    assert plan.outcome.padding == 0
    with pytest.raises(ValueError, match="uniform_query_lens"):
        plan_captures(count_batches(CHAT), 9, mixed=False)


def test_batches_beyond_the_limits_run_eagerly_and_are_counted() -> None:
    trace = count_batches(CHAT, max_tokens=64, max_num_reqs=8)
    assert trace.eager == {"num_tokens": 1, "num_reqs": 1}
    assert trace.eager_tokens == 200 + 36
    assert trace.batches == 159
    plan = plan_captures(trace, 3)
    assert plan.outcome.eager == trace.eager
    assert plan.outcome.coverage == 157 / 159
    assert all(key.num_reqs is not None and key.num_reqs <= 8 for key in plan.keys)


def test_each_number_of_loras_has_its_own_keys() -> None:
    trace = count_batches([Batch(8, 8, 1, 0, 50), Batch(2, 2, 1, 2, 50)], max_tokens=8)
    plan = plan_captures(trace, 2)
    assert plan.keys == (
        BatchDescriptor(8, 8),
        BatchDescriptor(2, 2, num_active_loras=2),
    )
    with pytest.raises(TooTightError) as caught:
        plan_captures(trace, 1)
    assert caught.value.least == 2


def test_memory_and_time_limit_as_well_as_numbers_do() -> None:
    trace = count_batches([Batch(size, size, 1) for size in range(1, 65)], max_tokens=64)
    limit = Limit(total=100, per_graph=10, per_token=0.25, once=12, unit="MiB")
    plan = plan_captures(trace, limit)
    assert plan.taken == 12 + sum(10 + key.num_tokens / 4 for key in plan.keys)
    assert plan.taken <= 100
    with pytest.raises(TooTightError) as caught:
        plan_captures(trace, Limit(total=30, per_graph=10, per_token=0.25, once=12))
    assert caught.value.least == pytest.approx(12 + 10 + 16)


def test_an_empty_trace_needs_no_keys() -> None:
    plan = plan_captures(count_batches([]), 4)
    assert plan.keys == ()
    assert (plan.outcome.coverage, plan.outcome.padding, plan.taken) == (1, 0, 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"total": -1},
        {"total": math.nan},
        {"total": 1, "per_graph": 0},
        {"total": 1, "per_token": -1},
        {"total": 1, "once": math.inf},
    ],
)
def test_impossible_limits_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Limit(**fields)


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(ValueError):
        Work(per_step=-1)
    with pytest.raises(ValueError):
        Work(mixed_per_step=math.inf)
    with pytest.raises(ValueError):
        plan_captures(count_batches(CHAT), 4, uniform_query_lens=[0])
    with pytest.raises(ValueError):
        count_batches([Batch(3, 4)])
    with pytest.raises(ValueError):
        count_batches([], max_tokens=0)


def test_counts_that_are_no_integers_are_refused() -> None:
    with pytest.raises(TypeError):
        count_batches([], max_tokens=True)


# The usual sizes.


def test_ladders_are_those_of_the_engines() -> None:
    assert powers_of_two(48) == [1, 2, 4, 8, 16, 32, 48]
    assert vllm(512)[:5] == [1, 2, 4, 8, 16]
    assert vllm(512)[-3:] == [480, 496, 512]
    assert len(vllm(512)) == 51
    assert vllm(20) == [1, 2, 4, 8, 16]
    assert sglang(512)[:3] == [4, 8, 12]
    assert len(sglang(512)) == 30
    assert sglang(6000)[-3:] == [4608, 5120, 5632]
    assert sglang_decode(256, speculative=False)[:7] == [1, 2, 4, 8, 12, 16, 24]
    assert sglang_decode(9, speculative=True) == [*range(1, 10)]


def test_ladders_cover_each_number_of_loras() -> None:
    for keys in ladders(16, 16, [4], [0, 2]).values():
        assert {key.num_active_loras for key in keys} == {0, 2}
        assert len(set(keys)) == len(keys)
        assert keys == sorted(keys, key=BatchDescriptor.cost, reverse=True)


# The file.


def test_a_written_plan_is_what_capture_descriptors_reads(tmp_path: Path) -> None:
    trace = count_batches([*CHAT, Batch(8, 4, None, 2, 5)])
    plan = plan_captures(trace, 6, work=Work(mixed_per_step=10), uniform_query_lens=[4])
    file = tmp_path / "plan.json"
    write_plan(plan, file)
    assert capture_descriptors(plan=file) == list(plan.keys)
    assert capture_descriptors(plan=str(file)) == list(plan.keys)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    content = json.loads(file.read_text())
    assert (content["format"], content["version"]) == ("graphshare-plan", 1)


def test_a_plan_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    plan = plan_captures(count_batches(CHAT), 2)
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError):
        write_plan(plan, tmp_path / "taken")
    with pytest.raises(OSError):
        write_plan(plan, tmp_path / "nowhere" / "plan.json")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize(
    "change",
    [
        {"format": "another"},
        {"version": 2},
        {"version": None},
        {"keys": None},
        {"keys": [1]},
        {"keys": [{"num_reqs": 1}]},
        {"keys": [{"num_tokens": 1, "beam": 2}]},
        {"keys": [{"num_tokens": "1"}]},
        {"keys": [{"num_tokens": 1, "num_reqs": 2}]},
    ],
)
def test_what_is_no_plan_is_refused_with_the_name_of_the_file(
    change: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    good: dict[str, Any] = {
        "format": "graphshare-plan",
        "version": 1,
        "keys": [{"num_tokens": 1, "num_reqs": None}],
    }
    file.write_text(json.dumps(good))
    assert capture_descriptors(plan=file) == [BatchDescriptor(1)]
    file.write_text(json.dumps({**good, **change}))
    with pytest.raises(ValueError, match=r"plan\.json"):
        capture_descriptors(plan=file)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 10_000])
def test_what_is_no_json_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"plan\.json"):
        capture_descriptors(plan=file)


def test_a_plan_goes_alone(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    write_plan(plan_captures(count_batches(CHAT), 2), file)
    call: Any = capture_descriptors
    for others in ({"num_tokens": [1]}, {"max_num_reqs": 1}, {"uniform_query_lens": [1]}):
        with pytest.raises(TypeError):
            call(plan=file, **others)
    with pytest.raises(TypeError):
        call(plan=file, num_ubatches=[2])
    with pytest.raises(TypeError):
        call([1])
    with pytest.raises(FileNotFoundError):
        call(plan=tmp_path / "none.json")
