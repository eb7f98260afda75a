"""vLLM's adapter on a small vLLM: the same tokens, no build for a draft prefill, faults refused."""

from __future__ import annotations

import itertools
import logging
import random
import sys
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from graphshare import (
    AddressChangedError,
    BakedValueChangedError,
    StaleStateError,
    StateDifferenceError,
)
from graphshare.adapters.vllm import activate as activate_seen
from graphshare.adapters.vllm import deactivate, sessions, statistics
from graphshare.adapters.vllm.signatures import expected, first_difference
from graphshare.adapters.vllm.versions import KNOWN, SUPPORTED
from tests.vllm_standin import parts
from tests.vllm_standin.engine import Request, serve

activate = partial(activate_seen, unseen=True)

MODES = ["FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]
BACKENDS = [parts.FlashAttentionBackend, parts.TritonAttentionBackend]


def requests(seed, count=6, longest=20):
    rng = random.Random(seed)
    return [
        Request(
            prompt=[rng.randrange(97) for _ in range(rng.randint(1, longest))],
            new=rng.randint(1, 12),
            arrival=rng.randint(0, 10),
        )
        for _ in range(count)
    ]


def full_steps(runner):
    return sum(desc.cg_mode.name == "FULL" for desc in runner.ran)


def module(name):
    return sys.modules[f"vllm.v1.worker.{name}"]


# The same tokens.


@pytest.mark.parametrize(
    ("mode", "cudagraph_mode", "backend"),
    [
        ("on", "FULL", parts.FlashAttentionBackend),
        ("strict", "FULL_AND_PIECEWISE", parts.FlashAttentionBackend),
        *itertools.product(["verify"], MODES, BACKENDS),
    ],
)
def test_tokens_and_drafts_are_those_of_vllm_alone(vllm, mode, cudagraph_mode, backend) -> None:
    options = {"cudagraph_mode": cudagraph_mode, "backend": backend}
    alone = serve(vllm.start(**options), requests(1))
    activate(mode)
    runner = vllm.start(**options)
    assert serve(runner, requests(1)) == alone
    seen = statistics()
    assert seen.active
    assert seen.refusals == {}
    assert seen.builds_avoided == full_steps(runner) > 0
    assert seen.verified == (full_steps(runner) if mode == "verify" else 0)
    own = full_steps(runner) if mode == "verify" else 0
    assert seen.pools["draft_prefill"].builds["replay"] == own


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 4])
def test_any_number_of_drafts(vllm, num_draft_tokens) -> None:
    options = {"num_draft_tokens": num_draft_tokens, "cudagraph_mode": "FULL_AND_PIECEWISE"}
    alone = serve(vllm.start(**options), requests(2))
    activate("verify")
    assert serve(vllm.start(**options), requests(2)) == alone
    assert statistics().refusals == {}


def test_drafts_are_sometimes_right_and_steps_of_every_kind_occur(vllm) -> None:
    """What the other tests rest on."""
    ran: Counter[str] = Counter()
    for mode in MODES:
        runner = vllm.start(cudagraph_mode=mode)
        texts, _ = serve(runner, requests(1))
        ran.update(desc.cg_mode.name for desc in runner.ran)
        assert len({token for text in texts for token in text}) > 10
    assert set(ran) == {"FULL", "PIECEWISE", "NONE"}


def test_a_fault_in_the_metadata_changes_the_tokens(vllm, monkeypatch) -> None:
    """The small vLLM is sensitive: with a stale plan the drafts come out otherwise."""
    healthy = serve(vllm.start(), requests(1))
    runner = vllm.start()
    for group in runner.attn_groups[0]:
        builder = group.get_metadata_builder(0)
        build = builder.build

        def stale(common, for_capture, build=build, builder=builder):
            before = builder.scheduler_metadata.clone()
            metadata = build(common, for_capture)
            builder.scheduler_metadata.copy_(before)
            return metadata

        builder.build = stale
    assert serve(runner, requests(1)) != healthy


# Builds.


@pytest.mark.parametrize("mode", ["on", "strict"])
def test_no_draft_prefill_is_built_while_serving(vllm, mode) -> None:
    def own_builds(runner):
        builder = runner.speculator.attn_groups[0][0].get_metadata_builder(0)
        before = builder.builds
        serve(runner, requests(3))
        return builder.builds - before

    alone = vllm.start()
    rebuilt = own_builds(alone)
    activate(mode)
    borrowing = vllm.start()
    built = own_builds(borrowing)
    saved = full_steps(borrowing) if vllm.version == "0.20.2" else 0
    assert rebuilt - built == saved
    assert statistics().builds["draft_prefill"] == 0
    assert statistics().builds["draft_decode"] == (built if mode == "strict" else 0)


def test_keys_that_do_not_borrow_are_built_by_the_draft(vllm) -> None:
    alone = serve(vllm.start(), requests(1))
    asked = []

    def when(desc):
        asked.append(desc)
        return desc.num_tokens > 4

    activate(when=when)
    runner = vllm.start()
    assert len(asked) == len(set(asked)) == 3
    assert serve(runner, requests(1)) == alone
    seen = statistics()
    small = sum(desc.num_tokens == 4 for desc in runner.ran if desc.cg_mode.name == "FULL")
    assert small > 0
    assert seen.builds["draft_prefill"] == small
    assert seen.builds_avoided == full_steps(runner) - small > 0
    assert seen.borrowed == 2
    assert seen.refusals == {}


def test_each_warmup_and_capture_has_its_own_state_with_its_own_contents(vllm) -> None:
    """The fault that vLLM 0.21.0 to 0.25.1 had, and how it is mended.

    Alone, they capture the draft on buffers that hold the last descriptor's contents; all versions
    do right with graphshare, and each phase has objects of its own.
    """

    def look(runner):
        warmed_up, states = {}, []
        speculator = runner.speculator
        inner = speculator._prefill

        def prefill(num_reqs, num_tokens, metadata, slots, *rest):
            (layer,) = speculator.draft_attn_layer_names
            if num_tokens not in warmed_up:  # within a capture, nothing can be read
                warmed_up[num_tokens] = int(metadata[layer].query_start_loc[-1])
            states.append(metadata)
            return inner(num_reqs, num_tokens, metadata, slots, *rest)

        speculator._prefill = prefill
        vllm.warm_up(runner)
        return warmed_up, states

    right = {4: 4, 8: 8, 16: 16}
    alone, _ = look(vllm.make())
    assert alone == (dict.fromkeys(right, 4) if vllm.version in ("0.21.0", "0.25.1") else right)
    activate()
    mended, states = look(vllm.make())
    assert mended == right
    assert len(states) == 2 * len(right)
    assert len({id(each) for each in states}) == len(states)
    assert all(set(each) == {"draft.layers.0.attn"} for each in states)


def test_graphs_for_several_numbers_of_adapters_share_a_state(vllm) -> None:
    if vllm.version in ("0.20.2", "0.21.0"):
        pytest.skip("its descriptors have no number of adapters")
    activate()
    runner = vllm.start(lora_cases=(0, 2))
    (session,) = sessions()
    plain = [desc for desc in session.target.states if desc.num_active_loras == 0]
    assert len(session.target) == 2 * len(plain)
    with_adapters = replace(plain[-1], num_active_loras=2)
    executed = runner.execute_model([(0, [5, 6, 7, 8], 0)], num_active_loras=2)
    assert runner.ran[-1] == with_adapters
    assert session.shared.live_key == plain[-1]
    assert executed is not None


# The draft follows the target.


def test_a_draft_is_kept_from_a_full_graph_that_the_target_did_not_run(vllm) -> None:
    """vLLM 0.20.2 asks on padded tokens: a padded batch can look uniform to the draft alone."""
    options = {"cudagraph_mode": "FULL_AND_PIECEWISE"}
    mixed = [Request(prompt=[1, 2, 3, 4], new=1), Request(prompt=[5, 6, 7], new=1)]
    alone = vllm.start(**options)
    texts = serve(alone, [replace(each) for each in mixed])[0]
    eager_alone = alone.speculator.eager_prefills
    activate("verify")
    runner = vllm.start(**options)
    assert serve(runner, [replace(each) for each in mixed])[0] == texts
    assert runner.ran[0].cg_mode.name == "PIECEWISE"
    seen = statistics()
    assert seen.refusals == {}
    assert seen.steered == (1 if vllm.version == "0.20.2" else 0)
    assert runner.speculator.eager_prefills == eager_alone + seen.steered


# Faults.


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


# Leaving vLLM as it is, or as it was.


def left_alone(vllm, caplog, **options):
    """The reason that is logged for a runner that graphshare leaves alone, after some checks."""
    with caplog.at_level(logging.INFO, "vllm.graphshare"):
        runner = vllm.start(**options)
    (record,) = [each for each in caplog.records if each.name == "vllm.graphshare"]
    assert record.levelno == logging.WARNING
    caplog.clear()
    managed = [runner.cudagraph_manager]
    if runner.speculator is not None:
        managed.append(runner.speculator.prefill_cudagraph_manager)
    for manager in managed:
        assert "dispatch" not in vars(manager)
        assert all(type(graph).__name__ == "TapeGraph" for graph in manager.graphs.values())
    assert not {"capture_model", "_graphshare_session"} & set(vars(runner))
    seen = statistics()
    assert not seen.active
    assert seen.reason in record.getMessage()
    assert sessions() == ()
    return seen.reason


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"speculative": False}, "no speculative decoding"),
        ({"method": "mtp"}, "mtp"),
        ({"parallel": {"data_parallel_size": 2}}, "data_parallel_size"),
        ({"parallel": {"prefill_context_parallel_size": 2}}, "prefill_context_parallel_size"),
        ({"capture_sizes": ()}, "cudagraph_mode"),
        ({"head_size": 64}, "causal mask at head size 64"),
        ({"backend": type("Other", (), {"get_name": staticmethod(lambda: "FLEX")})}, "FLEX"),
    ],
)
def test_what_is_not_supported_is_left_alone_and_named(vllm, caplog, options, reason) -> None:
    activate()
    assert reason in left_alone(vllm, caplog, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"head_size": 64, "cudagraph_mode": "FULL_AND_PIECEWISE"},
        {"head_size": 64, "cudagraph_mode": "FULL_DECODE_ONLY"},
        {"head_size": 64, "backend": parts.TritonAttentionBackend},
    ],
)
def test_graphs_that_keep_their_mask_are_served(vllm, options) -> None:
    activate()
    vllm.start(**options)
    assert statistics().active


def test_another_flash_attention_is_left_alone(vllm, caplog, monkeypatch) -> None:
    def get_flash_attn_version(
        requires_alibi=False, head_size=None, head_size_v=None, has_sinks=False
    ):
        return 2

    fa_utils = sys.modules["vllm.v1.attention.backends.fa_utils"]
    monkeypatch.setattr(fa_utils, "get_flash_attn_version", get_flash_attn_version)
    activate()
    assert "FlashAttention 2" in left_alone(vllm, caplog)


def test_the_other_model_runner_is_left_alone(vllm, caplog, monkeypatch) -> None:
    monkeypatch.setattr(
        module("gpu.model_runner").GPUModelRunner, "__module__", "vllm.v1.worker.gpu_model_runner"
    )
    activate()
    assert "VLLM_USE_V2_MODEL_RUNNER" in left_alone(vllm, caplog)


def test_another_version_is_left_alone(vllm, caplog) -> None:
    """Nothing of it is asked for: the next version may have no such method."""
    worker = module("gpu_worker").Worker
    before = dict(vars(worker))
    vllm.pretend("0.33.0")
    with caplog.at_level(logging.INFO, "vllm.graphshare"):
        activate()
        vllm.start()
    (record,) = [each for each in caplog.records if each.name == "vllm.graphshare"]
    assert "0.33.0" in record.getMessage()
    assert statistics().reason in record.getMessage()
    assert dict(vars(worker)) == before
    assert sessions() == ()


def test_a_version_that_was_not_seen_to_run_is_left_alone_unless_asked_for(vllm, caplog) -> None:
    with caplog.at_level(logging.INFO, "vllm.graphshare"):
        activate_seen()
        vllm.start()
    assert statistics().active == (vllm.version in SUPPORTED)
    if vllm.version not in SUPPORTED:
        (record,) = [each for each in caplog.records if each.name == "vllm.graphshare"]
        assert "unseen=True" in record.getMessage()
        deactivate()
        activate()
        vllm.start()
        assert statistics().active
    assert set(SUPPORTED) <= set(KNOWN)


def test_a_vllm_that_is_not_as_released_is_left_alone(vllm, caplog, monkeypatch) -> None:
    def dispatch(self, num_reqs, num_tokens, uniform_token_count, num_active_loras=0, extra=1):
        return self._dispatch(num_reqs, num_tokens, uniform_token_count, num_active_loras)

    assert first_difference(vllm.version) is None
    monkeypatch.setattr(module("gpu.cudagraph_utils").CudaGraphManager, "dispatch", dispatch)
    activate()
    reason = left_alone(vllm, caplog)
    assert "CudaGraphManager.dispatch" in reason
    assert "extra" in reason


def test_a_local_build_of_a_version_is_that_version(vllm) -> None:
    vllm.pretend(vllm.version + "+cu130")
    activate()
    vllm.start()
    assert statistics().version == vllm.version


@pytest.mark.parametrize("mode", ["on", "strict"])
def test_deactivate_leaves_vllm_as_it_was(vllm, mode) -> None:
    stock = vllm.start()
    before = {
        "capture": module("gpu.cudagraph_utils").CudaGraphManager.capture,
        "inputs": module("gpu.cudagraph_utils").prepare_inputs_to_capture,
        "worker": module("gpu_worker").Worker.compile_or_warm_up_model,
    }
    activate(mode)
    runner = vllm.start()
    # After the capture only the worker's method is not vLLM's own.
    assert module("gpu.cudagraph_utils").CudaGraphManager.capture is before["capture"]
    assert module("gpu.cudagraph_utils").prepare_inputs_to_capture is before["inputs"]
    alone = serve(stock, requests(1))
    assert serve(runner, requests(1)) == alone
    deactivate()
    assert module("gpu_worker").Worker.compile_or_warm_up_model is before["worker"]
    assert not statistics().active
    for mine, theirs in (
        (runner, stock),
        (runner.model_state, stock.model_state),
        (runner.cudagraph_manager, stock.cudagraph_manager),
        (runner.speculator, stock.speculator),
        (
            runner.speculator.prefill_cudagraph_manager,
            stock.speculator.prefill_cudagraph_manager,
        ),
        (runner.speculator.decode_cudagraph_manager, stock.speculator.decode_cudagraph_manager),
    ):
        assert set(vars(mine)) - {"_graphshare_session"} == set(vars(theirs))
    for graph in runner.cudagraph_manager.graphs.values():
        assert type(graph).__name__ == "TapeGraph"
    assert serve(runner, requests(1)) == alone


def test_hooks_are_taken_off_and_put_on_between_steps(vllm) -> None:
    alone = serve(vllm.start(), requests(1))
    activate()
    runner = vllm.start()
    (session,) = sessions()
    assert serve(runner, requests(1)) == alone
    avoided = statistics().builds_avoided
    session.pause()
    session.pause()
    assert serve(runner, requests(1)) == alone
    assert statistics().builds_avoided == avoided
    assert not statistics().active
    session.resume()
    session.resume()
    assert serve(runner, requests(1)) == alone
    assert statistics().builds_avoided == 2 * avoided


def test_a_failed_capture_takes_everything_back(vllm, monkeypatch) -> None:
    class BrokenError(RuntimeError):
        pass

    def fail(self, forward):
        raise BrokenError

    activate()
    runner = vllm.make()
    capture = module("gpu.cudagraph_utils").CudaGraphManager.capture
    monkeypatch.setattr(type(runner.speculator.decode_cudagraph_manager), "_loop", fail)
    with pytest.raises(BrokenError):
        vllm.warm_up(runner)
    assert module("gpu.cudagraph_utils").CudaGraphManager.capture is capture
    assert "capture_model" not in vars(runner)
    assert "dispatch" not in vars(runner.cudagraph_manager)
    assert sessions() == ()


def test_a_second_call_of_the_plug_in_does_nothing_and_another_mode_is_refused(vllm) -> None:
    activate("verify")
    activate("verify")
    with pytest.raises(RuntimeError, match="verify"):
        activate("on")
    with pytest.raises(ValueError, match="maybe"):
        activate("maybe")
    deactivate()
    activate("off")
    vllm.start()
    assert not statistics().active


def test_a_log_line_says_what_was_captured(vllm, caplog) -> None:
    activate()
    with caplog.at_level(logging.INFO, "vllm.graphshare"):
        vllm.start()
    (record,) = [each for each in caplog.records if each.name == "vllm.graphshare"]
    assert vllm.version in record.getMessage()
    seen = statistics()
    assert dict(seen.graphs) == {"target": 3, "draft_prefill": 3, "draft_decode": 1}
    assert seen.borrowed == 3


def test_a_second_runner_has_pools_of_its_own(vllm) -> None:
    alone = serve(vllm.start(), requests(1))
    activate()
    first, second = vllm.start(), vllm.start()
    assert len(sessions()) == 2
    assert serve(first, requests(1)) == alone
    assert serve(second, requests(1)) == alone
    del first
    assert len(sessions()) >= 1


# The stand-in is vLLM's, as far as the adapter can tell.


def test_the_small_vllm_has_the_signatures_of_the_wheel(vllm) -> None:
    assert first_difference(vllm.version) is None


def test_the_small_vllm_has_the_attributes_of_the_wheel(vllm) -> None:
    runner = vllm.start()
    instances = {
        "GPUModelRunner": runner,
        "CudaGraphManager": runner.cudagraph_manager,
        "BlockTables": runner.block_tables,
        "InputBuffers": runner.input_buffers,
        "FlashAttentionMetadataBuilder": runner.attn_groups[0][0].get_metadata_builder(0),
        "EagleSpeculator": runner.speculator,
        "AutoRegressiveSpeculator": runner.speculator,
        "DraftModelSpeculator": runner.speculator,
    }
    for name, attributes in expected()[vllm.version]["attributes"].items():
        instance = instances[name.partition(":")[2]]
        assert [each for each in attributes if not hasattr(instance, each)] == []
