"""A version of vLLM is supported where the committed results show it, and the page quotes them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from graphshare.adapters.vllm.versions import SUPPORTED
from tests.vllm_results import COMMIT, ROOT, results_of, the_page, times_of

PLANTED = {
    "the draft picks another key": "StaleStateError",
    "a builder re-created after capture": "AddressChangedError",
    "a replay without the target's refresh": "StaleStateError",
    "an eager step in between": "StaleStateError",
    "a second replay of the target on one refresh": "StaleStateError",
}
COMBINATIONS = {
    "FULL, FlashAttention 3, small, head size 128, EAGLE",
    "FULL, FlashAttention 3, small, head size 128, EAGLE-3",
    "FULL, FlashAttention 3, 8B, head size 128, EAGLE",
    "FULL, Triton, small, head size 64, EAGLE",
    "FULL_AND_PIECEWISE, FlashAttention 3, small, head size 64, EAGLE",
    "FULL_DECODE_ONLY, FlashAttention 3, small, head size 64, EAGLE",
}
REFUSED = ({"StaleStateError": 4, "AddressChangedError": 1}, {"StaleStateError": 2})
"""In a process in which faults are planted: those of `faults`, or of `die`."""


@pytest.fixture(params=list(SUPPORTED))
def results(request: pytest.FixtureRequest) -> dict[str, Any]:
    return results_of(request.param)


def test_tokens_and_drafts_were_those_of_vllm_alone(results: dict[str, Any]) -> None:
    seen = results["tokens"]
    for label, found in seen.items():
        switches = {name: each for name, each in found.items() if name.startswith("GRAPHSHARE")}
        assert switches, label
        for each in switches.values():
            assert each["tokens_and_drafts_equal"], label
            statistics = each["statistics_of_the_process"]
            assert statistics["active"]
            assert statistics["borrowed"] == statistics["graphs"]["draft_prefill"] > 0
            planted = each["faults_planted_in_the_process"]
            assert statistics["refusals"] in (REFUSED if planted else ({},)), label
        verified = switches["GRAPHSHARE_VLLM=verify"]["statistics_of_the_process"]
        assert verified["verified"] == verified["builds_avoided"] > 0
        assert all(each["fewest_distinct_of_64"] > 10 for each in found["vllm alone"].values())
        assert {"GRAPHSHARE_VLLM=on", "GRAPHSHARE_VLLM=verify"} <= set(switches), label
    assert "GRAPHSHARE_VLLM=strict" in seen["FULL, FlashAttention 3, small, head size 128, EAGLE"]
    assert set(seen) == COMBINATIONS
    assert "with `on` and with `verify`, in six combinations:" in the_page()


def test_what_was_compared_and_what_all_versions_gave() -> None:
    tokens = [results_of(version)["tokens"] for version in SUPPORTED]
    compared = [
        found["GRAPHSHARE_VLLM=verify"]["statistics_of_the_process"]["verified"]
        for seen in tokens
        for found in seen.values()
    ]
    assert f"`verify` compared {min(compared)} to {max(compared)} states in each" in the_page()
    first, *others = (
        {
            (label, requests): each["digest"]
            for label, found in seen.items()
            for requests, each in found["vllm alone"].items()
        }
        for seen in tokens
    )
    assert all(each == first for each in others)


def test_a_draft_that_follows_the_target_runs_on_full_graphs_more_often() -> None:
    found = results_of("0.20.2")["tokens"][
        "FULL_AND_PIECEWISE, FlashAttention 3, small, head size 64, EAGLE"
    ]
    alone, with_graphshare = (
        found[name]["32"]["draft_ran"] if name == "vllm alone" else found[name]["draft_ran"]["32"]
        for name in ("vllm alone", "GRAPHSHARE_VLLM=on")
    )
    assert (
        f"in {with_graphshare['FULL']} steps of {sum(with_graphshare.values())}, where alone it "
        f"did in {alone['FULL']}, with the same drafts" in the_page()
    )


def test_planted_faults_were_refused(results: dict[str, Any]) -> None:
    found = results["planted_faults"]
    assert any(label.endswith("=on") for label in found)
    for each in found.values():
        assert {name: answer["error"] for name, answer in each["answers"].items()} == PLANTED
        assert each["tokens_as_healthy"]
    for each in results["a_step_that_goes_on_with_another_key"].values():
        assert each["error"] == "StaleStateError"


def test_no_draft_prefill_was_built_while_serving(results: dict[str, Any]) -> None:
    for label, each in results["builds_while_serving"].items():
        if label.endswith("=on"):
            draft = {name for name in each["builds"] if name.startswith("draft")}
            assert draft == {"draft, query length 1"}, label


def test_drafts_captured_on_their_own_contents(results: dict[str, Any]) -> None:
    for label, each in results["what_the_draft_captured_on"].items():
        if "GRAPHSHARE" in label:
            assert each["on_their_own_contents"] == each["warmups_looked_at"] > 0, label


@pytest.mark.parametrize("version", ["0.21.0", "0.25.1"])
def test_upstream_captured_on_those_of_another_descriptor(version: str) -> None:
    alone = {
        label: each
        for label, each in results_of(version)["what_the_draft_captured_on"].items()
        if label.endswith("vllm alone")
    }
    assert alone
    for each in alone.values():
        assert (each["on_their_own_contents"], each["warmups_looked_at"]) == (1, 7)
        example = each["for_example"]
        held = example["tokens_in_buffers"]
        said = f"for {example['num_reqs']} requests of 4 tokens, the buffers held {held} tokens"
        assert f"descriptor: {said}" in the_page()
    assert (
        "0.21.0 and 0.25.1 alone captured six of seven draft prefills on the contents of another"
        in the_page()
    )


def test_vllm_alone_lost_its_mask() -> None:
    path = ROOT / "benchmarks" / "results" / "vllm" / "mask.json"
    found = json.loads(path.read_text("utf-8"))
    (machine,) = found["machines"]
    full, none, decode = (
        found["results"][name]["digest"] for name in ("FULL", "NONE (eager)", "FULL_DECODE_ONLY")
    )
    assert full != none == decode
    said = f"with one request (`mask.json`, of commit {machine['commit'][:7]})"
    assert f"the tokens of vLLM {found['vllm']} alone were not those that it gives" in the_page()
    assert said in the_page()


def test_how_many_requests_ran_at_a_time() -> None:
    for version in SUPPORTED:
        for found in results_of(version)["tokens"].values():
            at_once = {int(n): each["most_at_once"] for n, each in found["vllm alone"].items()}
            assert at_once == {1: 1, 8: 8, 32: 32}
    assert "in each run there was a step with all 8, or all 32, of them" in the_page()


@pytest.mark.parametrize("pair", ["small", "8B"])
def test_answers_of_generate_are_those_of_vllm_alone(results: dict[str, Any], pair: str) -> None:
    times = times_of(results, "end_to_end", pair)
    cases = [case for case in times if case != "commit"]
    assert sorted(cases) == sorted(
        f"concurrency {n}, {tokens} tokens" for n in (1, 8, 32) for tokens in (1, 64)
    )
    for case in cases:
        same = times[case]["answers_are_those_of_vllm_alone"]
        assert set(same) == set(times[case]["median_ms"]), case
        assert all(same.values()), case
    assert "gave the same tokens with them as without" in the_page()


def test_upstream_rebuilt_before_each_draft_prefill() -> None:
    builds = results_of("0.20.2")["builds_while_serving"]
    (alone,) = (each for label, each in builds.items() if label.endswith("128, EAGLE, vllm alone"))
    assert alone["builds"]["draft, query length 4"] == alone["draft_prefills"]["FULL"]


@pytest.mark.parametrize("version", SUPPORTED)
def test_all_results_are_of_the_commit_that_the_page_names(version: str) -> None:
    machine = _machine(version)
    said = (
        f"The files of the four versions are all of commit {machine['commit'][:7]}, of one day "
        f"and one kind of GPU, with torch {machine['torch'].partition('+')[0]} and driver "
        f"{machine['driver']}."
    )
    assert said in the_page()
    assert machine["commit"].startswith(COMMIT)
    assert machine["when"] == _machine("0.20.2")["when"]
    assert f"On an {machine['gpu'].removeprefix('NVIDIA ')}, with each of the four" in the_page()


def _machine(version: str) -> dict[str, Any]:
    path = ROOT / "benchmarks" / "results" / "vllm" / f"{version}.json"
    (machine,) = json.loads(path.read_text("utf-8"))["machines"]
    return machine


@pytest.mark.parametrize("version", SUPPORTED)
def test_a_draft_was_kept_from_full_graphs_that_the_target_did_not_run(version: str) -> None:
    found = results_of(version)["short_prompts_among_decodes"]
    assert any("GRAPHSHARE" in label for label in found)
    assert "it alone ran a full graph in three steps in which the target had run none" in the_page()
    for label, each in found.items():
        ran = each["target_and_draft_ran"]
        if "GRAPHSHARE" in label:
            assert each["tokens_and_drafts_equal"], label
            assert each["steered"] == (3 if version == "0.20.2" else 0)
            assert "PIECEWISE and FULL" not in ran
        else:
            assert ran.get("PIECEWISE and FULL", 0) == (3 if version == "0.20.2" else 0)
