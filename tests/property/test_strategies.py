"""The public strategies give what they say."""

from __future__ import annotations

import pytest
from hypothesis import find, given
from hypothesis import strategies as st

from graphshare import BatchDescriptor, capture_descriptors
from graphshare.state import compare, layout_of
from graphshare.testing.strategies import (
    arrival_traces,
    batches,
    descriptors,
    key_sets,
    leaf_paths,
    make,
    nests,
    shapes,
)
from tests.property.descriptors import Rich, kinds


@given(st.data())
def test_a_key_covers_its_shapes_and_batches(data):
    kind = data.draw(kinds)
    keys = data.draw(key_sets(kind))
    assert len(set(keys)) == len(keys)
    for key in keys:
        shape = data.draw(shapes(key))
        assert type(shape) is kind
        assert key.covers(shape)
        batch = data.draw(batches(key))
        assert len(batch.query_lens) == len(batch.seq_lens) > 0
        assert all(q <= s for q, s in zip(batch.query_lens, batch.seq_lens, strict=True))
        fields = dict.fromkeys(("uniform_query_len", "max_query_len", "num_reqs"))
        for name in fields:
            if getattr(key, name) is not None:
                fields[name] = getattr(batch, name)
        others = {
            name: getattr(key, name)
            for name in kind.matching()
            if name not in fields and name != "num_tokens"
        }
        assert key.covers(kind(batch.num_tokens, **fields, **others))


@given(descriptors(max_tokens=5))
def test_descriptors_are_as_small_as_asked(key):
    assert key.num_tokens <= 5


def test_bounds_of_a_subclass_are_drawn_without_being_named():
    assert find(descriptors(Rich), lambda key: key.cap == 2).cap == 2
    assert find(descriptors(Rich), lambda key: True).beam == 1


@given(st.sampled_from(capture_descriptors([1, 4, 8], 4, [2])), st.data())
def test_batches_keep_within_the_length(key, data):
    assert max(data.draw(batches(key, max_seq_len=5)).seq_lens) <= 5


def test_a_length_below_the_only_query_length_is_refused():
    with pytest.raises(ValueError, match="max_seq_len"):
        find(batches(BatchDescriptor(8, 2, 4), max_seq_len=3), lambda batch: True)


@given(nests(), st.booleans(), st.booleans())
def test_a_nest_is_made_twice_the_same(plan, first, second):
    mine, theirs = (layout_of(make(plan, share=s), "cpu") for s in (first, second))
    assert compare(mine, theirs) == []
    assert sorted(leaf.path for leaf in mine.leaves) == leaf_paths(plan)


@given(st.integers(2, 40), st.data())
def test_traces_come_in_order_and_fit(max_model_len, data):
    trace = data.draw(arrival_traces(max_model_len=max_model_len))
    assert trace
    assert [each.step for each in trace] == sorted(each.step for each in trace)
    for each in trace:
        assert each.prompt_len >= 1
        assert each.max_new_tokens >= 1
        assert each.prompt_len + each.max_new_tokens <= max_model_len


def test_traces_have_bursts_and_gaps():
    assert find(arrival_traces(), lambda trace: len(trace) == 3 and trace[2].step == 0)
    assert find(arrival_traces(max_gap=2), lambda trace: trace[-1].step >= 6)
    with pytest.raises(ValueError, match="max_model_len"):
        find(arrival_traces(max_model_len=1), lambda trace: True)


@pytest.mark.parametrize(
    ("strategy", "about"),
    [
        (lambda: batches(4), "key"),
        (lambda: batches(BatchDescriptor), "key"),
        (lambda: batches(BatchDescriptor(4), max_seq_len="9"), "max_seq_len"),
        (lambda: batches(BatchDescriptor(4), max_seq_len=0), "max_seq_len"),
        (lambda: shapes((4, 4)), "key"),
        (lambda: descriptors(BatchDescriptor(4)), "kind"),
        (lambda: descriptors(int), "kind"),
        (lambda: descriptors(max_tokens=0), "max_tokens"),
        (lambda: key_sets(max_size=0), "max_size"),
        (lambda: key_sets(max_tokens=1.5), "max_tokens"),
    ],
    ids=range(10),
)
def test_what_nothing_can_be_drawn_from_is_named(strategy, about):
    with pytest.raises((TypeError, ValueError), match=rf"^{about}: expected"):
        find(strategy(), lambda drawn: True)
