"""A version of vLLM is supported where the committed results show it, and the page quotes them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.vllm._variants import AGAIN, COMPARISONS, OF_ALL
from graphshare.adapters.vllm.versions import SUPPORTED

ROOT = Path(__file__).parents[2]
PLANTED = {
    "the draft picks another key": "StaleStateError",
    "a builder re-created after capture": "AddressChangedError",
    "a replay without the target's refresh": "StaleStateError",
    "an eager step in between": "StaleStateError",
    "a second replay of the target on one refresh": "StaleStateError",
}
COMMIT = "86f4d5f"
BUILD = "execute_model / metadata build"
LATER = [version for version in SUPPORTED if version != "0.20.2"]
"""Those in which there is no rebuild to save."""
WHERE = ("where graphshare has hooks", "to the step of the engine")
MODES = ("FULL", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY")


def _results(version: str) -> dict[str, Any]:
    path = ROOT / "benchmarks" / "results" / "vllm" / f"{version}.json"
    return json.loads(path.read_text("utf-8"))["results"]


@pytest.fixture(params=list(SUPPORTED))
def results(request: pytest.FixtureRequest) -> dict[str, Any]:
    return _results(request.param)


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
            assert each["faults_planted_in_the_process"] or statistics["refusals"] == {}
        verified = switches["GRAPHSHARE_VLLM=verify"]["statistics_of_the_process"]
        assert verified["verified"] == verified["builds_avoided"] > 0
        assert all(each["fewest_distinct_of_64"] > 10 for each in found["vllm alone"].values())
    assert "GRAPHSHARE_VLLM=strict" in seen["FULL, FlashAttention 3, small, head size 128, EAGLE"]
    assert len(seen) == 6
    assert {label.split(",")[0] for label in seen} == set(MODES)
    assert {"Triton" in label for label in seen} == {"EAGLE-3" in label for label in seen}
    assert {"8B" in label for label in seen} == {True, False}


def test_what_was_compared_and_what_all_versions_gave() -> None:
    tokens = [_results(version)["tokens"] for version in SUPPORTED]
    compared = [
        found["GRAPHSHARE_VLLM=verify"]["statistics_of_the_process"]["verified"]
        for seen in tokens
        for found in seen.values()
    ]
    assert f"`verify` compared {min(compared)} to {max(compared)} states in each" in _page()
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
    found = _results("0.20.2")["tokens"][
        "FULL_AND_PIECEWISE, FlashAttention 3, small, head size 64, EAGLE"
    ]
    alone, with_graphshare = (
        found[name]["32"]["draft_ran"] if name == "vllm alone" else found[name]["draft_ran"]["32"]
        for name in ("vllm alone", "GRAPHSHARE_VLLM=on")
    )
    assert (
        f"in {with_graphshare['FULL']} steps of {sum(with_graphshare.values())}, where alone it "
        f"did in {alone['FULL']}, with the same drafts" in _page()
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
        for label, each in _results(version)["what_the_draft_captured_on"].items()
        if label.endswith("vllm alone")
    }
    assert alone
    for each in alone.values():
        assert (each["on_their_own_contents"], each["warmups_looked_at"]) == (1, 7)
        example = each["for_example"]
        assert (example["num_reqs"], example["tokens_in_buffers"]) == (64, 4)
    assert "alone captured six of seven draft prefills on the contents of another" in _page()


def test_vllm_alone_lost_its_mask() -> None:
    path = ROOT / "benchmarks" / "results" / "vllm" / "mask.json"
    found = json.loads(path.read_text("utf-8"))
    (machine,) = found["machines"]
    full, none, decode = (
        found["results"][name]["digest"] for name in ("FULL", "NONE (eager)", "FULL_DECODE_ONLY")
    )
    assert full != none == decode
    said = f"with one request (`mask.json`, of commit {machine['commit'][:7]})"
    assert f"vLLM {found['vllm']} alone gave other tokens" in _page()
    assert said in _page()


def test_how_many_requests_ran_at_a_time() -> None:
    """The last of 32 arrives at the 62nd step, one more every two; it is alone with its time."""
    took = [
        each["vllm alone"]["32"]["steps"] - 2 * 31
        for version in SUPPORTED
        for each in _results(version)["tokens"].values()
    ]
    said = f"of 32 about {min(took) // 2} to {max(took) // 2} ran at a time"
    assert said in _page()


def test_upstream_rebuilt_before_each_draft_prefill() -> None:
    builds = _results("0.20.2")["builds_while_serving"]
    (alone,) = (each for label, each in builds.items() if label.endswith("128, EAGLE, vllm alone"))
    assert alone["builds"]["draft, query length 4"] == alone["draft_prefills"]["FULL"]


def _page() -> str:
    """The text of the page, without its lines."""
    return " ".join((ROOT / "docs" / "how-to" / "vllm.md").read_text("utf-8").split())


def _tables() -> list[list[str]]:
    page = (ROOT / "docs" / "how-to" / "vllm.md").read_text("utf-8")
    section = page.split("## What it costs, and saves")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:3] == "| 0"]
    return [[cell.strip() for cell in row] for row in rows]


def _quoted(figure: dict[str, Any], form: str) -> str:
    value, low, high = (format(figure[name], form) for name in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


@pytest.mark.parametrize("row", _tables(), ids=lambda row: ", ".join(row[:3]))
def test_the_page_quotes_the_results(row: list[str]) -> None:
    version, what, variant, *cells = row
    name = {"with graphshare": "on", "without the rebuild": "skipped"}[variant]
    if what in ("small", "8B"):
        at = f"{what} at {COMMIT}, concurrency"
        wanted = [
            _figure(version, f"{at} {n}, steps by turns: {name} / vLLM alone") for n in (1, 8, 32)
        ]
        form = ".3f"
    else:
        where = f"small at {COMMIT}, concurrency {what}:"
        wanted = [_figure(version, f"{where} {name} adds {part}") for part in WHERE]
        form = "+.0f"
        alone = _figure(version, f"{where} a step of vLLM alone, host")
        assert cells.pop() == f"{alone['value']:.0f}"
    assert cells == [_quoted(figure, form) for figure in wanted]


def test_all_versions_are_in_the_tables() -> None:
    rows = [row for row in _tables() if row[1] in ("small", "8B")]
    assert {(row[0], row[1]) for row in rows} == {
        (v, p) for v in SUPPORTED for p in ("small", "8B")
    }


@pytest.mark.parametrize("version", SUPPORTED)
def test_all_results_are_of_the_commit_that_the_page_names(version: str) -> None:
    machine = _machine(version)
    said = (
        f"The files of the four versions are all of commit {machine['commit'][:7]}, of one day and "
        f"one GPU, with torch {machine['torch'].partition('+')[0]} and driver {machine['driver']}."
    )
    assert said in _page()
    assert machine["commit"].startswith(COMMIT)
    assert machine["when"] == _machine("0.20.2")["when"]
    assert f"On an {machine['gpu'].removeprefix('NVIDIA ')}, with each of the four" in _page()


def _machine(version: str) -> dict[str, Any]:
    path = ROOT / "benchmarks" / "results" / "vllm" / f"{version}.json"
    (machine,) = json.loads(path.read_text("utf-8"))["machines"]
    return machine


def _missed(requests: int, what: str) -> dict[str, Any]:
    name = f"small at {COMMIT}, concurrency {requests}, {what}"
    return _figure("0.20.2", f"{name}: not saved of what skipping saves")


def _kept(requests: int) -> list[str]:
    """Where graphshare has hooks, and of the whole step."""
    found = [_missed(requests, what) for what in WHERE]
    return [
        f"{1 - each['value']:.2f} ({1 - each['high']:.2f} to {1 - each['low']:.2f})"
        for each in found
    ]


def test_the_page_says_what_is_kept_of_what_skipping_saves() -> None:
    said = _page()
    hooks, step = _kept(1)
    assert f"borrowing keeps {hooks} of what skipping saves at one request" in said
    assert f"{step} of the whole step; nine tenths was the aim" in said
    assert f"At 8 requests it is {' and '.join(_kept(8))}, at 32 {' and '.join(_kept(32))}." in said


def test_medians_and_intervals_of_what_is_kept() -> None:
    hooks, steps = ([_missed(requests, what) for requests in (1, 8, 32)] for what in WHERE)
    assert all(each["value"] < 0.1 for each in hooks + steps)
    assert all(each["high"] < 0.1 for each in hooks)
    assert [each["high"] < 0.1 for each in steps] == [True, False, True]
    assert (
        "All medians are above the aim, and all intervals but that of the whole step at 8 requests."
        in _page()
    )


def _figure(version: str, name: str) -> dict[str, Any]:
    (found,) = (each for each in _results(version)["figures"] if each["name"] == name)
    return found


def test_vllm_0_20_2_with_the_8b_pair() -> None:
    """Nothing to win, and nothing that the hooks cost."""
    at = f"8B at {COMMIT}, concurrency"
    for requests in (1, 8, 32):
        skipped = f"{at} {requests}: skipped adds to the step of the engine"
        assert _figure("0.20.2", skipped)["high"] > 0
        kept = f"{at} {requests}, to the step of the engine: not saved of what skipping saves"
        assert kept not in {each["name"] for each in _results("0.20.2")["figures"]}
    with_graphshare = [
        each
        for each in _results("0.20.2")["figures"]
        if each["name"].startswith(at) and each["name"].endswith(": on / vLLM alone")
    ]
    assert len(with_graphshare) == 9
    assert all(each["low"] <= 1 <= each["high"] for each in with_graphshare)
    assert "The 8B pair has nothing to win, and no difference shows there." in _page()


def test_the_first_token_of_vllm_0_20_2() -> None:
    first, *others = (
        _figure("0.20.2", f"small at {COMMIT}, concurrency {n}, 1 tokens: on / vLLM alone")
        for n in (1, 8, 32)
    )
    sooner = f"{100 * (1 - first['value']):.1f}% sooner at one request"
    eight, many = (
        f"{each['value']:.3f}, {each['low']:.3f} to {each['high']:.3f}" for each in others
    )
    assert (
        f"The first token of the small pair came {sooner}; at 8 and 32, whose prompts run on no "
        f"full graph, it did not (ratios of {eight}, and {many})." in _page()
    )


def test_what_a_step_of_the_small_pair_gains_and_costs() -> None:
    page = _page()
    gains = [each["value"] for each in _steps("0.20.2", "small")]
    assert f"gains {100 * (1 - max(gains)):.1f} to {100 * (1 - min(gains)):.1f}% a step" in page
    hooks: list[float] = []
    holds_none: list[bool] = []
    for row in _tables():
        if row[1].isdigit() and row[0] in LATER:
            where = f"small at {COMMIT}, concurrency {row[1]}:"
            figure = _figure(row[0], f"{where} on adds where graphshare has hooks")
            hooks.append(figure["value"])
            holds_none.append(figure["low"] <= 0 <= figure["high"])
    assert len(hooks) == 9
    assert f"takes from {-min(hooks):.1f} to {-max(hooks):.1f} µs less where the hooks are" in page
    assert "in four of nine the interval holds 0" in page
    assert sum(holds_none) == 4


def test_what_the_look_takes() -> None:
    """Beside vLLM's build, where nothing is rebuilt."""
    added: list[float] = []
    for version in LATER:
        (profile,) = _times(version, "profile_of_a_step", "small")
        for requests in ("1", "8", "32"):
            on, off = (profile[requests][name]["median_us"] for name in ("on", "off"))
            added.append(on[BUILD] - off[BUILD])
    assert (
        f"The checks add {min(added):.0f} to {max(added):.0f} µs to the target's build" in _page()
    )


def _times(version: str, task: str, pair: str) -> list[dict[str, Any]]:
    """What was timed with a pair; what was timed once more comes after it."""
    return [each for label, each in _results(version)[task].items() if f", {pair}, " in label]


def _steps(version: str, pair: str) -> list[dict[str, Any]]:
    return [
        _figure(version, f"{pair} at {COMMIT}, concurrency {n}, steps by turns: on / vLLM alone")
        for n in (1, 8, 32)
    ]


Comparison = tuple[str, str, int, str]
"""Version, pair, requests, and what took the time."""


def _with_alone(variant: str, *, again: bool = False) -> dict[Comparison, dict[str, Any]]:
    """Return the comparisons with vLLM alone where nothing is rebuilt.

    Args:
        variant: What is compared with it.
        again: Those that were made once more.
    """
    found: dict[Comparison, dict[str, Any]] = {}
    for version in LATER:
        results = _results(version)
        for task in ("end_to_end", "profile_of_a_step"):
            for label, times in results[task].items():
                if label.endswith("once more") is not again:
                    continue
                pair = "8B" if ", 8B, " in label else "small"
                for case, of in times.items():
                    if case == "commit":
                        continue
                    ratios = of["to_off" if task == "end_to_end" else "steps_to_off"]
                    # «concurrency 8, 64 tokens», or «8» alone for steps
                    requests, _, what = case.removeprefix("concurrency ").partition(", ")
                    found[version, pair, int(requests), what or "steps"] = ratios[variant]
    return found


def _beyond(found: dict[Comparison, dict[str, Any]]) -> dict[Comparison, str]:
    """Those whose 95% interval leaves out 1, and by how much longer they are."""
    return {
        which: f"by {100 * (each['median'] - 1):.2f}%"
        for which, each in found.items()
        if not each["low"] <= 1 <= each["high"]
    }


@pytest.mark.parametrize("variant", ["on", AGAIN])
@pytest.mark.parametrize("again", [False, True])
def test_no_difference_from_vllm_alone_in_all_comparisons_together(variant, again) -> None:
    found = _with_alone(variant, again=again)
    assert len(found) == (18 if again else COMPARISONS)
    for which, each in found.items():
        low, high = each[OF_ALL]
        assert low <= 1 <= high, which
    page = _page()
    assert f"there are {COMPARISONS} comparisons with vLLM alone" in page
    assert f"{COMPARISONS} intervals that are all right at once" in page
    assert "All 18 wide intervals hold 1" in page


def test_how_much_the_wide_intervals_say() -> None:
    highest: dict[tuple[str, str], float] = {}
    for (_, pair, _, what), each in _with_alone("on").items():
        key = pair if what == "64 tokens" else "", what
        highest[key] = max(highest.get(key, 0.0), each[OF_ALL][1])
    steps, first, large, small = (
        f"{math.ceil(1000 * (highest[key] - 1)) / 10:.1f}%"
        for key in (("", "steps"), ("", "1 tokens"), ("8B", "64 tokens"), ("small", "64 tokens"))
    )
    assert (
        f"they exclude steps that are more than {steps} longer, first tokens that come {first} "
        f"later, 64 tokens that take {large} longer with the 8B pair, and with the small pair, "
        f"whose calls vary more, {small}." in _page()
    )


def test_one_case_of_the_second_run_says_nothing() -> None:
    first, again = (
        each["concurrency 1, 64 tokens"] for each in _times("0.26.0", "end_to_end", "8B")
    )
    assert again["median_ms"]["off"] > 2 * first["median_ms"]["off"]
    low, high = again["to_off"]["on"][OF_ALL]
    assert high - low > 0.4
    assert "on 0.26.0, 64 tokens at one request took twice as long as the first time" in _page()


def test_the_page_names_each_single_interval_that_leaves_out_one() -> None:
    page = _page()
    beyond = _beyond(_with_alone("on"))
    first = [("0.21.0", 1), ("0.25.1", 1), ("0.26.0", 1)]
    assert set(beyond) == {
        *((version, "8B", requests, "1 tokens") for version, requests in first),
        ("0.26.0", "8B", 32, "64 tokens"),
        ("0.26.0", "8B", 32, "1 tokens"),
    }
    one, two, three = (beyond[version, "8B", requests, "1 tokens"] for version, requests in first)
    many, last = (beyond["0.26.0", "8B", 32, what] for what in ("64 tokens", "1 tokens"))
    assert len(_beyond(_with_alone(AGAIN))) == 3
    assert (
        "Five do. All are of `generate` with the 8B pair: the first token at one request on "
        f"0.21.0, {one}, on 0.25.1, {two}, and on 0.26.0, {three}; and on 0.26.0 at 32 requests "
        f"64 tokens, {many}, and the first one, {last}." in page
    )
    assert "(`again` in the results): three of these 54 leave out 1" in page
    once_more = _beyond(_with_alone("on", again=True))
    ((which, longer),) = once_more.items()
    assert which == ("0.25.1", "8B", 1, "1 tokens")
    assert not _beyond(_with_alone(AGAIN, again=True))
    assert (
        "one single one does not, the first token at one request on 0.25.1, "
        f"{longer}. Of vLLM with itself all do." in page
    )


def test_the_first_token_of_the_8b_pair_at_one_request() -> None:
    later: list[float] = []
    for version in LATER:
        for times in _times(version, "end_to_end", "8B"):
            case = times["concurrency 1, 1 tokens"]
            share = case["to_off"]["on"]["median"] - 1
            later.append(1000 * case["median_ms"]["off"] * share)
    assert len(later) == 6
    said = f"later, by {min(later):.0f} to {max(later):.0f} µs (the median ratio times"
    assert f"the first token of the 8B pair at one request probably does come {said}" in _page()


@pytest.mark.parametrize("version", SUPPORTED)
def test_a_draft_was_kept_from_full_graphs_that_the_target_did_not_run(version: str) -> None:
    found = _results(version)["short_prompts_among_decodes"]
    assert any("GRAPHSHARE" in label for label in found)
    for label, each in found.items():
        ran = each["target_and_draft_ran"]
        if "GRAPHSHARE" in label:
            assert each["tokens_and_drafts_equal"], label
            assert each["steered"] == (3 if version == "0.20.2" else 0)
            assert "PIECEWISE and FULL" not in ran
        else:
            assert ran.get("PIECEWISE and FULL", 0) == (3 if version == "0.20.2" else 0)


def test_the_first_step_after_a_change() -> None:
    more: list[float] = []
    for version in SUPPORTED:
        for profile in _times(version, "profile_of_a_step", "small"):
            since = profile["1"]["steps_since_a_change"]
            first, others = since["the first adds_us"], since["the others add_us"]
            more.append(first["median"] - others["median"])
    said = " ".join((ROOT / "benchmarks" / "README.md").read_text("utf-8").split())
    assert max(more) <= 0
    less = f"{-max(more):.0f} to {-min(more):.0f} µs less than in the next ones"
    assert f"first step after a change is {less}" in said
