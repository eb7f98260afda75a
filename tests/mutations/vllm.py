"""Wrong versions of vLLM's adapter."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_TESTS = "tests/adapters/test_vllm.py"
_FAULTS = "tests/adapters/test_vllm_faults.py"
_LEFT = "tests/adapters/test_vllm_left_alone.py"

MUTATIONS = (
    Mutation(
        "vllm-lengths-taken-for-bounded",
        "a long request is healthy though the bound on its length counts rejected drafts",
        "adapters/vllm/v0_20_2.py",
        "    lengths_bounded = False\n",
        "",
        (f"{_TESTS}::test_long_requests",),
    ),
    Mutation(
        "vllm-eager-steps-untold",
        "a step off the graphs makes the target's states stale",
        "adapters/vllm/serving.py",
        "            target.invalidate(latest)\n",
        "",
        (f"{_FAULTS}::test_a_step_off_the_graphs_in_between_is_refused",),
    ),
    Mutation(
        "vllm-shape-by-tokens-alone",
        "the state of the step before is not taken for another number of requests",
        "adapters/vllm/serving.py",
        " or this.num_reqs != reqs:\n",
        ":\n",
        (f"{_FAULTS}::test_a_build_for_a_shape_without_a_graph_is_a_step_off_the_graphs",),
    ),
    Mutation(
        "vllm-draft-unsteered",
        "a draft runs no full graph that the target did not run",
        "adapters/vllm/serving.py",
        "            return _as_target(manager, mode, desc, num_reqs, num_tokens)",
        "            return desc",
        (f"{_TESTS}::test_a_draft_is_kept_from_a_full_graph_that_the_target_did_not_run",),
    ),
    Mutation(
        "vllm-failed-builds-untold",
        "a build that fails has written, too",
        "adapters/vllm/serving.py",
        "                off_the_graphs(mode)  # it has written, too\n",
        "                pass\n",
        (f"{_FAULTS}::test_a_build_that_fails_has_written_too",),
    ),
    Mutation(
        "vllm-hooks-outlive-their-end",
        "hooks that others wrapped do nothing once taken off",
        "adapters/vllm/serving.py",
        "            current, full, step = False, None, None\n",
        "            pass\n",
        (f"{_LEFT}::test_hooks_that_others_wrapped_do_nothing_once_taken_off",),
    ),
    Mutation(
        "vllm-draft-picks-for-itself",
        "a draft runs the full graph that the target ran",
        "adapters/vllm/serving.py",
        " is not None and lease.left > 0:\n",
        " is not None and False:\n",
        (f"{_TESTS}::test_a_draft_follows_the_target_onto_its_full_graph",),
    ),
    Mutation(
        "vllm-rebuild-kept",
        "the rebuild before a draft prefill of 0.20.2 goes away",
        "adapters/vllm/v0_20_2.py",
        "            if max_query_len > 1 and active():\n",
        "            if False:\n",
        (f"{_TESTS}::test_no_draft_prefill_is_built_while_serving",),
    ),
    Mutation(
        "vllm-verify-compares-nothing",
        "in the mode verify each borrowed state is compared",
        "adapters/vllm/serving.py",
        "        if self.shared.live_key == desc and batch is not None and refresh is not None:",
        "        if False:",
        (
            f"{_FAULTS}::test_verify_finds_a_draft_that_builds_otherwise",
            f"{_TESTS}::test_tokens_and_drafts_are_those_of_vllm_alone",
        ),
    ),
    Mutation(
        "vllm-state-of-the-warmup-kept",
        "where vLLM asks a factory once, the capture has a state of its own",
        "adapters/vllm/family.py",
        "                current = again[0] if isinstance(again, tuple) else again\n",
        "                del again\n",
        (f"{_TESTS}::test_each_warmup_and_capture_has_its_own_state_with_its_own_contents",),
    ),
    Mutation(
        "vllm-captured-states-handed-over",
        "the draft's loop looks into states that are built then",
        "adapters/vllm/loops.py",
        '        state = self._loops.state(desc) if desc.cg_mode.name == "FULL" else None\n',
        "        state = None\n",
        (
            f"{_TESTS}::test_each_warmup_and_capture_has_its_own_state_with_its_own_contents",
            f"{_TESTS}::test_tokens_and_drafts_are_those_of_vllm_alone",
        ),
    ),
    Mutation(
        "vllm-decode-forward-writes-nothing",
        "a draft decode advances its own lengths",
        "adapters/vllm/session.py",
        "                    True,  # its forward advances the sequence lengths\n",
        "                    False,\n",
        (f"{_FAULTS}::test_only_draft_decodes_are_captured_as_writing_their_state",),
    ),
    Mutation(
        "vllm-lora-counts-apart",
        "graphs for several numbers of adapters share a state",
        "adapters/vllm/session.py",
        "            state_key=_without_loras,\n",
        "",
        (f"{_TESTS}::test_graphs_for_several_numbers_of_adapters_share_a_state",),
    ),
    Mutation(
        "vllm-graphs-without-a-mask-served",
        "graphs that lost their causal mask are left alone",
        "adapters/vllm/backends.py",
        "    return not 64 < head_size <= 128\n",
        "    return False\n",
        (f"{_LEFT}::test_what_is_not_supported_is_left_alone_and_named",),
    ),
    Mutation(
        "vllm-padding-of-plans-compared",
        "what no kernel reads of a plan is not compared",
        "adapters/vllm/backends.py",
        "        mine[unused] = theirs[unused]\n",
        "        del unused\n",
        (f"{_TESTS}::test_tokens_and_drafts_are_those_of_vllm_alone",),
    ),
    Mutation(
        "vllm-signatures-unlooked-at",
        "a vLLM that is not as released is left alone",
        "adapters/vllm/support.py",
        "    if difference is not None:\n",
        "    if False:\n",
        (f"{_LEFT}::test_a_vllm_that_is_not_as_released_is_left_alone",),
    ),
    Mutation(
        "vllm-hash-for-others",
        "what is made of a descriptor hashes as vLLM's own",
        "adapters/vllm/launches.py",
        '            "__new__": _made_by(kind),\n',
        "",
        (f"{_FAULTS}::test_what_is_made_of_a_descriptor_is_one_of_vllms_own",),
    ),
    Mutation(
        "vllm-launched-by-another-descriptor",
        "a manager picks the very keys of its graphs",
        "adapters/vllm/launches.py",
        "                changed[id(descs)] = [twins.get(desc, desc) for desc in descs]\n",
        "                changed[id(descs)] = list(descs)\n",
        (f"{_FAULTS}::test_what_a_manager_dispatches_to_is_the_key_of_its_graph",),
    ),
)
