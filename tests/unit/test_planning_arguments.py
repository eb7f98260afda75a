"""What plans are made of is looked at before anything is searched; numbers fit in floats."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from graphshare import BatchDescriptor
from graphshare.planning import (
    Batch,
    Limit,
    Work,
    count_batches,
    evaluate,
    frontier,
    graphs_to_match,
    ladders,
    plan_captures,
    read_trace,
    write_plan,
)

TRACE = count_batches([Batch(3, 3, steps=90), Batch(5, 5, steps=9), Batch(8, 8), Batch(4, 2, 2)])
KEY = BatchDescriptor(8, 8)
PLAN = plan_captures(TRACE, 2)

WRONG: tuple[tuple[Callable[[], Any], str], ...] = (
    (lambda: count_batches(5), "batches"),
    (lambda: count_batches(None), "batches"),
    (lambda: count_batches(Batch(4, 2)), "batches"),
    (lambda: count_batches([(4, 2, None, 0, 1)]), "batches"),
    (lambda: count_batches(iter([4])), "batches"),
    (lambda: count_batches([Batch("4", 1)]), "num_tokens"),
    (lambda: count_batches([Batch(4.5, 1)]), "num_tokens"),
    (lambda: count_batches([Batch(4, True)]), "num_reqs"),
    (lambda: count_batches([Batch(4, 2, 2.0)]), "query_len"),
    (lambda: count_batches([Batch(4, 2, None, 0.0)]), "num_active_loras"),
    (lambda: count_batches([Batch(4, 2, None, 0, 1.5)]), "steps"),
    (lambda: count_batches([Batch(1 << 31, 1)]), "tokens"),
    (lambda: count_batches([Batch(4, 1, None, 0, (1 << 53) + 1)]), "count"),
    (lambda: count_batches([], max_tokens="8"), "max_tokens"),
    (lambda: count_batches([], max_num_reqs=0), "max_num_reqs"),
    (lambda: plan_captures([Batch(3, 3)], 3), "trace"),
    (lambda: plan_captures("trace.jsonl", 3), "trace"),
    (lambda: plan_captures(TRACE, 1.5), "limit"),
    (lambda: plan_captures(TRACE, "2"), "limit"),
    (lambda: plan_captures(TRACE, True), "limit"),
    (lambda: plan_captures(TRACE, None), "limit"),
    (lambda: plan_captures(TRACE, -1), "graphs"),
    (lambda: plan_captures(TRACE, 3, work=3), "work"),
    (lambda: plan_captures(TRACE, 3, mixed="no"), "mixed"),
    (lambda: plan_captures(TRACE, 3, uniform_query_lens=4), "uniform_query_lens"),
    (lambda: plan_captures(TRACE, 3, uniform_query_lens="4"), "uniform_query_lens"),
    (lambda: plan_captures(TRACE, 3, uniform_query_lens=[4.0]), "uniform_query_lens"),
    (lambda: plan_captures(TRACE, 3, uniform_query_lens=[True]), "uniform_query_lens"),
    (lambda: frontier([Batch(3, 3)]), "trace"),
    (lambda: frontier(TRACE, "2"), "limit"),
    (lambda: frontier(TRACE, points=1), "points"),
    (lambda: frontier(TRACE, points="9"), "points"),
    (lambda: graphs_to_match(TRACE, 100, most=0), "most"),
    (lambda: graphs_to_match(TRACE, "100", most=2), "all_work"),
    (lambda: graphs_to_match(TRACE, math.nan, most=2), "all_work"),
    (lambda: evaluate(None, TRACE), "keys"),
    (lambda: evaluate(KEY, TRACE), "keys"),
    (lambda: evaluate([4, 8], TRACE), "keys"),
    (lambda: evaluate([KEY, KEY], TRACE), "keys"),
    (lambda: evaluate([KEY], [Batch(3, 3)]), "trace"),
    (lambda: evaluate([KEY], TRACE, 3), "work"),
    (lambda: ladders(8.5, 1), "max_tokens"),
    (lambda: ladders(0, 1), "max_tokens"),
    (lambda: ladders(8, "1"), "max_num_reqs"),
    (lambda: ladders(8, 1, "4"), "uniform_query_lens"),
    (lambda: ladders(8, 1, [4], [-1]), "num_active_loras"),
    (lambda: write_plan("plan", "plan.json"), "plan"),
    (lambda: write_plan(PLAN, None), "path"),
    (lambda: read_trace(None), "path"),
    (lambda: read_trace(b"trace.csv"), "path"),
    (lambda: read_trace("trace.csv", kind="xml"), "kind"),
    (lambda: Limit(total="3"), "total"),
    (lambda: Limit(total=True), "total"),
    (lambda: Limit(total=3, per_graph="1"), "per_graph"),
    (lambda: Limit(total=3, unit=5), "unit"),
    (lambda: Limit.graphs(2.5), "graphs"),
    (lambda: Work(per_step="3"), "per_step"),
)


@pytest.mark.parametrize(
    ("call", "about"), WRONG, ids=[f"{n} {about}" for n, (_, about) in enumerate(WRONG)]
)
def test_what_is_wrong_is_told_by_name(call: Callable[[], Any], about: str) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"\b{about}\b.*: expected"):
        call()


def test_keys_that_come_one_by_one_are_all_looked_at() -> None:
    assert evaluate(iter([KEY]), TRACE) == evaluate([KEY], TRACE)


def test_batches_that_come_one_by_one_are_not_gathered_first() -> None:
    seen: list[int] = []

    def batches() -> Iterator[Batch]:
        for number in range(3):
            seen.append(number)
            yield Batch(4, 2)
        yield Batch(0, 0)

    with pytest.raises(ValueError, match="num_tokens"):
        count_batches(batches())
    assert seen == [0, 1, 2]


def test_integers_of_numpy_become_plain_ones(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    two = numpy.int64(2)
    trace = count_batches([Batch(two * 2, two, two, numpy.int8(0), two)], max_tokens=two * 8)
    assert trace == count_batches([Batch(4, 2, 2, 0, 2)], max_tokens=16)
    assert all(type(each) is int for each in next(iter(trace.bins)))
    write_plan(plan_captures(trace, two, uniform_query_lens=[two]), tmp_path / "plan.json")


# Numbers that floats would lose.


@pytest.mark.parametrize("size", [1e-16, 1e-300, 1e16, 1e300, math.inf, math.nan, -1e-3])
def test_limits_in_units_out_of_reach_are_refused(size: float) -> None:
    """The search divides by them: two keys of 1e-300 were once not found within 2.5e-300."""
    for name in ("per_graph", "per_token", "once"):
        with pytest.raises(ValueError, match=name):
            Limit(**{"total": 1, "per_graph": 1, name: size})


@pytest.mark.parametrize("unit", [1e-15, 1e-9, 0.1, 3, 1e9, 1e15])
def test_the_unit_of_a_limit_does_not_matter(unit: float) -> None:
    for graphs in (1, 2, 3, 4):
        plan = plan_captures(TRACE, Limit(total=graphs * unit, per_graph=unit))
        assert plan.keys == plan_captures(TRACE, graphs).keys


@pytest.mark.parametrize("name", ["per_step", "mixed_per_step"])
@pytest.mark.parametrize("cost", [1.1e9, 1e308, math.inf, math.nan, -1])
def test_costs_beside_which_padding_is_nothing_are_refused(name: str, cost: float) -> None:
    with pytest.raises(ValueError, match=name):
        Work(**{name: cost})


@pytest.mark.parametrize("per_step", [0, 0.1, 7, 1e6, 1e9])
def test_what_every_step_costs_changes_no_plan(per_step: float) -> None:
    """With 1e12 tokens a step, one token of padding was once lost in the rounding."""
    for graphs, mixed in itertools.product((2, 3, 4), (0, 3)):
        plain, work = Work(mixed_per_step=mixed), Work(per_step=per_step, mixed_per_step=mixed)
        expected = plan_captures(TRACE, graphs, work=plain, uniform_query_lens=[2])
        plan = plan_captures(TRACE, graphs, work=work, uniform_query_lens=[2])
        assert plan.keys == expected.keys
        steps = sum(TRACE.bins.values())
        assert plan.outcome.work == pytest.approx(expected.outcome.work + per_step * steps)


def test_the_most_steps_and_the_highest_costs_are_planned_for() -> None:
    most = 1 << 53
    trace = count_batches([Batch(size, 1, size, steps=most) for size in (3, 4, 9)])
    work = Work(per_step=1e9, mixed_per_step=1e9)
    for graphs in (1, 2, 3):
        plan = plan_captures(trace, graphs, work=work, uniform_query_lens=[3])
        assert math.isfinite(plan.outcome.work)
        assert len(plan.keys) == graphs
