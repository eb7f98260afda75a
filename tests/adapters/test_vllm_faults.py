"""Faults in a small vLLM that runs with graphshare: each is refused by name."""

from __future__ import annotations

import copy
import random
from dataclasses import fields, replace

import pytest
import torch

from graphshare import (
    AddressChangedError,
    BakedValueChangedError,
    ReleasedStateError,
    StaleStateError,
    StateDifferenceError,
)
from graphshare.adapters.vllm import activate, deactivate, sessions, statistics
from graphshare.adapters.vllm.backends import BACKENDS
from graphshare.adapters.vllm.signatures import find
from tests.vllm_standin import parts
from tests.vllm_standin.engine import requests, serve


def executed(runner):
    """A step of the target on a full graph."""
    return runner.execute_model([(0, [5, 6, 7, 8], 0)])


def test_another_key_of_the_draft_is_refused(vllm) -> None:
    activate()
    runner = vllm.start()
    executed(runner)
    manager = runner.speculator.prefill_cudagraph_manager
    other = next(desc for desc in manager.graphs if desc != runner.ran[-1])
    with pytest.raises(StaleStateError) as refused:
        manager.run_fullgraph(other)
    assert refused.value.key == other
    assert statistics().refusals == {"StaleStateError": 1}


def test_a_builder_made_anew_after_the_capture_is_refused(vllm) -> None:
    activate()
    runner = vllm.start()
    executed(runner)
    group = runner.attn_groups[0][0]
    group.metadata_builders = [parts.FlashAttentionBuilder(4)]
    with pytest.raises(AddressChangedError, match="scheduler_metadata"):
        executed(runner)


def test_a_replay_without_the_targets_refresh_is_refused(vllm) -> None:
    activate()
    runner = vllm.start()
    with pytest.raises(StaleStateError):
        runner.cudagraph_manager.run_fullgraph(next(iter(runner.cudagraph_manager.graphs)))
    executed(runner)
    with pytest.raises(StaleStateError) as refused:
        runner.cudagraph_manager.run_fullgraph(runner.ran[-1])
    assert refused.value.rule == "used up"


@pytest.mark.parametrize("cudagraph_mode", ["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_a_step_off_the_graphs_in_between_is_refused(vllm, cudagraph_mode) -> None:
    activate()
    runner = vllm.start(cudagraph_mode=cudagraph_mode)
    executed(runner)
    key = runner.ran[-1]
    assert key.cg_mode.name == "FULL"
    runner.execute_model([(1, [5, 6, 7], 0)])
    assert runner.ran[-1].cg_mode.name != "FULL"
    with pytest.raises(StaleStateError) as refused:
        runner.speculator.prefill_cudagraph_manager.run_fullgraph(key)
    assert refused.value.rule == "invalidated"


def _fresh(session):
    entries = session.target.holdings.entries
    return [key for key, entry in entries.items() if entry.record.fresh or entry.lease.left]


@pytest.mark.parametrize("seed", range(6))
def test_after_a_step_off_the_graphs_nothing_is_fresh_whatever_came_before(vllm, seed) -> None:
    """The first of several in a row, and one after a refresh that no step of vLLM asked for."""
    activate("verify")
    runner = vllm.start(cudagraph_mode="FULL_AND_PIECEWISE")
    (session,) = sessions()
    executed(runner)
    key, prefill = runner.ran[-1], runner.speculator.prefill_cudagraph_manager
    rng = random.Random(seed)
    events = rng.choices(("full", "off", "off", "refreshed", "failed", "resumed"), k=24)
    for event in (*events, "refreshed", "off", "off"):
        if event == "full":
            executed(runner)
        elif event == "refreshed":
            executed(runner)
            built = session.target.states[key]
            runner.execute_model([(1, [5, 6, 7], 0)])
            assert not _fresh(session)
            session.target.refresh(key, built)
            assert _fresh(session) == [key]
        elif event == "failed":
            with pytest.raises(BakedValueChangedError):
                session.target.refresh(key, "something else")
        elif event == "resumed":
            session.pause()
            session.resume()
        else:
            runner.execute_model([(1, [5, 6, 7], 0)])
            assert runner.ran[-1].cg_mode.name != "FULL"
            assert not _fresh(session)
            with pytest.raises(StaleStateError):
                prefill.run_fullgraph(key)


def test_a_second_step_off_the_graphs_in_a_row_has_nothing_to_tell(vllm) -> None:
    activate()
    runner = vllm.start(cudagraph_mode="FULL_AND_PIECEWISE")
    (session,) = sessions()
    for _ in range(2):
        executed(runner)
        told = []
        for _ in range(3):
            runner.execute_model([(1, [5, 6, 7], 0)])
            told.append(session.target.ledger.epoch)
        assert told[0] == told[1] == told[2]


@pytest.mark.parametrize("mode", ["on", "strict"])
def test_nothing_is_fresh_after_steps_without_the_hooks(vllm, mode) -> None:
    activate(mode)
    runner = vllm.start(cudagraph_mode="FULL_AND_PIECEWISE")
    (session,) = sessions()
    executed(runner)
    key, speculator = runner.ran[-1], runner.speculator
    session.resume()  # without effect: they are on
    assert _fresh(session) == [key]
    session.pause()
    runner.execute_model([(1, [5, 6, 7], 0)])
    session.resume()
    assert not _fresh(session)
    for manager in (runner.cudagraph_manager, speculator.prefill_cudagraph_manager):
        with pytest.raises(StaleStateError) as refused:
            manager.run_fullgraph(key)
        assert refused.value.rule == "invalidated"
    executed(runner)
    assert _fresh(session) == [key]


def test_a_build_that_fails_has_written_too(vllm) -> None:
    activate()
    runner = vllm.start()
    executed(runner)
    key = runner.ran[-1]
    builder = runner.attn_groups[0][0].get_metadata_builder(0)
    build = builder.build

    def fail(common, for_capture):
        build(common, for_capture)
        raise MemoryError

    builder.build = fail
    with pytest.raises(MemoryError):
        executed(runner)
    with pytest.raises(StaleStateError) as refused:
        runner.speculator.prefill_cudagraph_manager.run_fullgraph(key)
    assert refused.value.rule == "invalidated"


def test_a_build_for_a_shape_without_a_graph_is_a_step_off_the_graphs(vllm) -> None:
    """One of as many tokens for fewer requests, too: the shape of the step before is no answer."""
    activate()
    runner = vllm.start()
    batch, *_ = executed(runner)
    key = runner.ran[-1]
    batch.num_reqs_after_padding -= 1
    batch.seq_lens, batch.query_start_loc = batch.seq_lens[:-1], batch.query_start_loc[:-1]
    tables = runner.block_tables.gather_block_tables(
        batch.idx_mapping, batch.num_reqs_after_padding
    )
    slots = runner.block_tables.compute_slot_mappings(
        batch.idx_mapping, batch.query_start_loc, batch.positions, key.num_tokens
    )
    runner.model_state.prepare_attn(
        batch, key.cg_mode, tables, slots, runner.attn_groups, runner.kv_cache_config
    )
    with pytest.raises(StaleStateError) as refused:
        runner.speculator.prefill_cudagraph_manager.run_fullgraph(key)
    assert refused.value.rule == "invalidated"


@pytest.mark.parametrize("mode", ["strict", "verify"])
def test_draft_decodes_need_a_build_each(vllm, mode) -> None:
    activate(mode)
    runner = vllm.start()
    serve(runner, requests(4, count=1))
    manager = runner.speculator.decode_cudagraph_manager
    with pytest.raises(StaleStateError):
        manager.run_fullgraph(next(iter(manager.graphs)))


def test_only_draft_decodes_are_captured_as_writing_their_state(vllm) -> None:
    """Their forward advances positions and lengths; the others only read."""
    activate()
    runner = vllm.start()
    (session,) = sessions()
    writing = {
        pool.name: {entry.writes_state for entry in pool.holdings.entries.values()}
        for pool in (session.target, session.prefill, session.decode)
    }
    assert writing == {"target": {False}, "draft_prefill": {False}, "draft_decode": {True}}
    assert serve(runner, requests(5))


def test_a_flag_that_the_graph_baked_in_is_refused(vllm) -> None:
    activate()
    runner = vllm.start()
    builder = runner.attn_groups[0][0].get_metadata_builder(0)
    build = builder.build

    def other(common, for_capture):
        metadata = build(common, for_capture)
        metadata.causal = False
        return metadata

    builder.build = other
    with pytest.raises(BakedValueChangedError, match="causal"):
        executed(runner)


@pytest.mark.parametrize("backend", [parts.FlashAttentionBackend, parts.TritonAttentionBackend])
def test_metadata_is_looked_at_by_its_fields(vllm, backend) -> None:
    """One that was none at the capture is refused; what is no field of it no graph has read."""
    activate()
    runner = vllm.start(backend=backend)
    builder = runner.attn_groups[0][0].get_metadata_builder(0)
    build = builder.build
    came: dict[str, object] = {"no_field": 3}

    def builds(common, for_capture):
        metadata = build(common, for_capture)
        vars(metadata).update(came)
        return metadata

    builder.build = builds
    _, metadata, *_ = executed(runner)
    (one, *_) = metadata.values()
    assert one.no_field == 3
    names = [field.name for field in fields(find(BACKENDS[backend.get_name()].metadata))]
    assert [name for name in vars(one) if name != "no_field"] == names
    empty = next(name for name in names if getattr(one, name) is None)
    came[empty] = torch.zeros(3)
    with pytest.raises(AddressChangedError) as refused:
        executed(runner)
    assert (refused.value.path, refused.value.field) == (empty, "presence")


def test_verify_finds_a_draft_that_builds_otherwise(vllm) -> None:
    activate("verify")
    runner = vllm.start()
    builder = runner.speculator.attn_groups[0][0].get_metadata_builder(0)
    build = builder.build

    def otherwise(common, for_capture):
        metadata = build(common, for_capture)
        metadata.scheduler_metadata += 1
        return metadata

    builder.build = otherwise
    executed(runner)
    with pytest.raises(StateDifferenceError, match="scheduler_metadata"):
        runner.speculator.prefill_cudagraph_manager.run_fullgraph(runner.ran[-1])


# What stands for the graphs.


@pytest.mark.parametrize("mode", ["on", "strict"])
def test_graphs_that_somebody_kept_are_refused_once_it_is_over(vllm, mode) -> None:
    activate(mode)
    runner = vllm.start()
    executed(runner)  # leaves a replay of the draft
    desc = runner.ran[-1]
    kept = [runner.cudagraph_manager.graphs[desc]]
    kept.append(runner.speculator.prefill_cudagraph_manager.graphs[desc])
    deactivate()
    for graph in kept:
        with pytest.raises(ReleasedStateError):
            graph.replay()


def test_a_descriptor_that_is_equal_finds_its_graph_too(vllm) -> None:
    activate()
    runner = vllm.start()
    executed(runner)
    for manager in (runner.cudagraph_manager, runner.speculator.prefill_cudagraph_manager):
        assert len({type(desc) for desc in manager.graphs}) == 1
        for desc, graph in dict(manager.graphs).items():
            other = type(runner.ran[-1])(**vars(desc))
            assert other is not desc
            assert other == desc
            assert (other != desc) is False
            assert hash(other) == hash(desc)
            assert repr(other) == repr(desc)
            assert desc in manager.graphs
            assert other in manager.graphs
            assert manager.graphs[desc] is manager.graphs[other] is graph
        missing = replace(other, num_tokens=7)
        assert missing != desc
        assert desc != missing
        assert desc != "another thing"
        assert missing not in manager.graphs
        with pytest.raises(KeyError):
            manager.graphs[missing]


def test_what_a_manager_dispatches_to_is_the_key_of_its_graph(vllm) -> None:
    activate()
    runner = vllm.start()
    speculator = runner.speculator
    managers = (
        runner.cudagraph_manager,
        speculator.prefill_cudagraph_manager,
        speculator.decode_cudagraph_manager,
    )
    before = [manager._candidates for manager in managers]
    for manager in managers:
        keys = {id(desc) for desc in manager.graphs}
        assert keys
        candidates = manager._candidates
        lists = candidates.values() if isinstance(candidates, dict) else candidates
        for desc in (desc for descs in lists for desc in descs):
            assert id(desc) in keys or desc not in manager.graphs
    deactivate()
    for manager, table in zip(managers, before, strict=True):
        assert manager._candidates is not table
        assert list(manager._candidates) == list(table)
        assert {type(desc) for desc in manager.graphs} == {manager.descriptor}


@pytest.mark.parametrize("table", [None, "of another kind", [7], {3: 7}])
def test_a_table_of_another_kind_stays(vllm, table) -> None:
    activate()
    runner = vllm.start()
    (session,) = sessions()
    session.pause()
    manager = runner.speculator.decode_cudagraph_manager
    manager._candidates = table
    session.resume()
    assert manager._candidates is table
    session.pause()
    assert manager._candidates is table


def test_what_is_made_of_a_descriptor_is_one_of_vllms_own(vllm) -> None:
    activate()
    runner = vllm.start()
    manager = runner.cudagraph_manager
    for desc in manager.graphs:
        assert type(desc) is not manager.descriptor
        same = copy.copy(desc)
        larger = replace(desc, num_tokens=desc.num_tokens + 1)
        for made in (same, larger):
            assert type(made) is manager.descriptor
        assert same == desc
        assert larger != desc
        assert hash(larger) == hash(manager.descriptor(**vars(larger)))
