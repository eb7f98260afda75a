"""vLLM's adapter on a small vLLM: the same tokens, and no build for a draft prefill."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch

from graphshare import AddressChangedError
from graphshare.adapters.vllm import activate, sessions, statistics
from tests.vllm_standin import parts
from tests.vllm_standin.engine import Request, full_steps, requests, serve

MODES = ["FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]
BACKENDS = [parts.FlashAttentionBackend, parts.TritonAttentionBackend]


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


@pytest.mark.parametrize("mode", ["on", "strict", "verify"])
@pytest.mark.parametrize("layers_alone", [1, 2])
def test_layers_in_several_attention_groups(vllm, mode, layers_alone) -> None:
    alone = serve(vllm.start(layers_alone=layers_alone), requests(1))
    activate(mode)
    runner = vllm.start(layers_alone=layers_alone)
    assert len(runner.attn_groups[0]) == layers_alone + 1
    assert serve(runner, requests(1)) == alone
    seen = statistics()
    assert seen.refusals == {}
    assert seen.builds_avoided == full_steps(runner) > 0
    for group in runner.attn_groups[0]:
        before = group.metadata_builders
        group.metadata_builders = [type(before[0])(4)]
        with pytest.raises(AddressChangedError, match="scheduler_metadata"):
            runner.execute_model([(0, [5, 6, 7, 8], 0)])
        group.metadata_builders = before


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


@pytest.mark.parametrize("backend", BACKENDS)
def test_long_requests(vllm, backend) -> None:
    """Until 0.21 vLLM's bound on lengths counts rejected drafts: it passes the model's maximum."""
    activate("verify")
    runner = vllm.start(backend=backend)
    length = runner.config.max_model_len
    each = Request(prompt=[1, 2, 3], new=length - 11)
    ((tokens,), _) = serve(runner, [each])
    assert len(tokens) == length - 11
    passed = max(runner.computed) > length
    assert passed == (vllm.version in ("0.20.2", "0.21.0"))
    assert statistics().refusals == {}


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


@pytest.mark.parametrize("mode", ["on", "strict", "verify"])
@pytest.mark.parametrize("after_a_full_step", [False, True])
def test_a_draft_that_does_not_borrow_is_kept_from_it_too(vllm, mode, after_a_full_step) -> None:
    """It would build its state from the batch of a step before, or from vLLM's dummy requests."""

    def drafts():
        runner = vllm.start(cudagraph_mode="FULL_AND_PIECEWISE")
        for row in range(2):
            pages = [1 + row + 4 * page for page in range(12)]
            runner.block_tables.rows[row] = torch.tensor(pages, dtype=torch.int32)
        found = []
        for first in (4, 3) if after_a_full_step else (3,):
            executed = runner.execute_model([(0, [1, 2, 3, 4][:first], 0), (1, [5, 6, 7, 8], 0)])
            assert runner.ran[-1].cg_mode.name == {4: "FULL", 3: "PIECEWISE"}[first]
            ones = torch.ones(2, dtype=torch.int64)
            found.append(runner.propose(executed, ones, 0 * ones, 5 * ones).tolist())
        return found

    alone = drafts()
    activate(mode, when=lambda _: False)
    assert drafts() == alone
    seen = statistics()
    assert seen.borrowed == 0
    assert seen.refusals == {}
    assert seen.steered == (1 if vllm.version == "0.20.2" else 0)


def test_a_draft_follows_the_target_onto_its_full_graph(vllm) -> None:
    """vLLM 0.20.2 judges the padded batch: three requests of four tokens look like no decodes."""

    def three_decodes(runner):
        executed = runner.execute_model([(row, [5, 6, 7, 8], 0) for row in range(3)])
        assert (runner.ran[-1].cg_mode.name, runner.ran[-1].num_tokens) == ("FULL", 16)
        before = runner.speculator.eager_prefills
        runner.propose(executed, *(torch.tensor([1, 1, 1]) for _ in range(3)))
        return runner.speculator.eager_prefills - before

    alone = three_decodes(vllm.start(cudagraph_mode="FULL_AND_PIECEWISE"))
    assert alone == (1 if vllm.version == "0.20.2" else 0)
    activate()
    assert three_decodes(vllm.start(cudagraph_mode="FULL_AND_PIECEWISE")) == 0
    assert statistics().builds_avoided == 1
    assert statistics().steered == 0
