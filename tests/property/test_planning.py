"""A plan is the best there is: no set of keys within the limit does less work."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from graphshare import BatchDescriptor, capture_descriptors
from graphshare.planning import (
    Batch,
    Limit,
    Plan,
    TooTightError,
    Trace,
    Work,
    count_batches,
    evaluate,
    frontier,
    graphs_to_match,
    ladders,
    plan_captures,
)


@st.composite
def batches(draw: st.DrawFn, max_tokens: int, max_loras: int = 0) -> Batch:
    """Of up to twice as many tokens as a graph may have."""
    steps = draw(st.integers(1, 20))
    query_len = draw(st.sampled_from([None, 1, 2, 3]))
    if query_len is None:
        tokens = draw(st.integers(1, 2 * max_tokens))
        reqs = draw(st.integers(1, tokens))
    else:
        reqs = draw(st.integers(1, max(1, 2 * max_tokens // query_len)))
        tokens = reqs * query_len
    return Batch(tokens, reqs, query_len, draw(st.integers(0, min(max_loras, reqs))), steps)


@st.composite
def traces(draw: st.DrawFn, max_tokens: int, max_loras: int = 0, most: int = 12) -> Trace:
    return count_batches(
        draw(st.lists(batches(max_tokens, max_loras), min_size=1, max_size=most)),
        max_tokens=max_tokens,
        max_num_reqs=draw(st.none() | st.integers(1, max_tokens)),
    )


works = st.builds(
    Work, per_step=st.sampled_from([0, 1, 7]), mixed_per_step=st.sampled_from([0, 0, 1, 2, 5])
)
limits = st.builds(Limit.graphs, st.integers(0, 6)) | st.builds(
    Limit,
    total=st.sampled_from([3, 7.5, 12, 20, 31.25]),
    per_graph=st.sampled_from([0, 0.5, 1, 3]),
    per_token=st.sampled_from([0.25, 1]),
    once=st.sampled_from([0, 2]),
    unit=st.just("MiB"),
)


def candidates(trace: Trace, lengths: Sequence[int], *, mixed: bool) -> list[BatchDescriptor]:
    """All keys of the two kinds, of whatever size, whether a batch has that size or not."""
    keys: list[BatchDescriptor] = []
    for loras in trace.num_active_loras:
        keys += [
            BatchDescriptor(size, min(size, trace.max_num_reqs), num_active_loras=loras)
            for size in range(1, trace.max_tokens + 1)
            if mixed
        ]
        keys += [
            BatchDescriptor(reqs * length, reqs, length, num_active_loras=loras)
            for length in lengths
            for reqs in range(1, min(trace.max_num_reqs, trace.max_tokens // length) + 1)
        ]
    return keys


def least_work(
    trace: Trace, limit: Limit, work: Work, lengths: Sequence[int], *, mixed: bool
) -> float | None:
    """By looking at every set of candidates; the pool's dispatch says where batches run."""
    must = sum(count for one, count in trace.bins.items() if mixed or one.query_len in set(lengths))
    keys = candidates(trace, lengths, mixed=mixed)
    found: list[float] = []
    for some in itertools.product((False, True), repeat=len(keys)):
        chosen = tuple(itertools.compress(keys, some))
        if limit.taken(chosen) <= limit.total:
            outcome = evaluate(chosen, trace, work)
            if outcome.steps == must:
                found.append(outcome.work)
    return min(found, default=None)


@given(
    st.one_of(
        st.tuples(traces(5), st.sampled_from([(), (2,), (3,)])),
        st.tuples(traces(4), st.sampled_from([(1,), (1, 2), (2, 3)])),
        st.tuples(traces(3, max_loras=1), st.sampled_from([(), (2,)])),
    ),
    limits,
    works,
    st.booleans(),
)
def test_no_set_of_keys_does_less_work(
    case: tuple[Trace, tuple[int, ...]], limit: Limit, work: Work, only_uniform: bool
) -> None:
    trace, lengths = case
    mixed = not (only_uniform and lengths)
    least = least_work(trace, limit, work, lengths, mixed=mixed)

    def search() -> Plan:
        return plan_captures(trace, limit, work=work, uniform_query_lens=lengths, mixed=mixed)

    if least is None:
        with pytest.raises(TooTightError) as caught:
            search()
        assert caught.value.least > limit.total
        return
    plan = search()
    assert plan.outcome.work == least
    assert plan.taken <= limit.total
    assert set(plan.keys) <= set(candidates(trace, lengths, mixed=mixed))


@given(traces(60, most=60), st.integers(1, 12))
def test_mixed_keys_agree_with_the_textbook_program(trace: Trace, graphs: int) -> None:
    """Sizes in order; the best of so many keys up to a size, the last of them at that size."""
    assume(trace.bins)
    counts: dict[int, int] = {}
    for one, count in trace.bins.items():
        counts[one.num_tokens] = counts.get(one.num_tokens, 0) + count
    sizes = sorted(counts)
    best = [0.0] + [float("inf")] * len(sizes)
    for _ in range(graphs):
        best = [
            min(
                best[upto],
                min(
                    (
                        best[start] + sizes[upto - 1] * sum(counts[s] for s in sizes[start:upto])
                        for start in range(upto)
                    ),
                    default=float("inf"),
                ),
            )
            for upto in range(len(sizes) + 1)
        ]
    if trace.num_active_loras == (0,):
        assert plan_captures(trace, graphs).outcome.work == best[-1]


@settings(max_examples=settings.default.max_examples // 2)
@given(traces(40, max_loras=1, most=40), st.sampled_from([(), (1,), (2,), (1, 3)]), works)
def test_a_plan_is_at_least_as_good_as_any_ladder(
    trace: Trace, lengths: tuple[int, ...], work: Work
) -> None:
    assume(trace.bins)
    for keys in ladders(40, trace.max_num_reqs, lengths, trace.num_active_loras).values():
        outcome = evaluate(keys, trace, work)
        if "not_covered" in outcome.eager:
            continue
        plan = plan_captures(trace, len(keys), work=work, uniform_query_lens={*lengths, 1})
        assert plan.outcome.work <= outcome.work
        assert len(plan.keys) <= len(keys)


@settings(max_examples=settings.default.max_examples // 2)
@given(traces(30, max_loras=1, most=40), st.sampled_from([(), (1,), (2, 3)]), works)
def test_every_plan_of_the_frontier_is_the_best_for_what_it_takes(
    trace: Trace, lengths: tuple[int, ...], work: Work
) -> None:
    assume(trace.bins)
    plans = frontier(trace, work=work, uniform_query_lens=lengths, points=6)
    assert [plan.taken for plan in plans] == sorted({plan.taken for plan in plans})
    for plan in plans:
        best = plan_captures(trace, int(plan.taken), work=work, uniform_query_lens=lengths)
        assert plan.outcome.work == best.outcome.work
    without_padding = evaluate(plans[-1].keys, trace)
    if not work.mixed_per_step:
        assert without_padding.padding == 0


@given(traces(30, most=30), st.integers(1, 12))
def test_the_fewest_graphs_that_match_are_the_fewest(trace: Trace, graphs: int) -> None:
    assume(trace.bins)
    work = plan_captures(trace, graphs).outcome.all_work
    fewest = graphs_to_match(trace, work, most=graphs)
    assert fewest is not None
    assert plan_captures(trace, fewest).outcome.all_work == work
    assert graphs_to_match(trace, work, most=fewest - 1) is None if fewest > 1 else True
    assert graphs_to_match(trace, 0, most=50) is None


@given(traces(20, max_loras=2))
def test_the_outcome_counts_every_step_once(trace: Trace) -> None:
    keys = capture_descriptors([3, 7, 20], trace.max_num_reqs, [2])
    outcome = evaluate(keys, trace)
    assert outcome.steps + sum(outcome.eager.values()) == trace.batches
    assert outcome.steps == sum(outcome.hits.values())
    assert outcome.tokens + outcome.eager_tokens == trace.tokens + trace.eager_tokens
    assert outcome.padded_tokens >= outcome.tokens
    assert outcome.work == outcome.padded_tokens
    assert 0 <= outcome.coverage <= 1


@given(traces(8))
def test_a_limit_of_nothing_is_too_tight(trace: Trace) -> None:
    if trace.bins:
        with pytest.raises(TooTightError) as caught:
            plan_captures(trace, 0)
        assert caught.value.least >= 1
    else:
        assert plan_captures(trace, 0).keys == ()
