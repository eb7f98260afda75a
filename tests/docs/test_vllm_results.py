"""A version of vLLM is supported where the committed results show it, and the page quotes them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from graphshare.adapters.vllm.versions import SUPPORTED

ROOT = Path(__file__).parents[2]
PLANTED = {
    "the draft picks another key": "StaleStateError",
    "a builder re-created after capture": "AddressChangedError",
    "a replay without the target's refresh": "StaleStateError",
    "an eager step in between": "StaleStateError",
    "a second replay of the target on one refresh": "StaleStateError",
}
COMMIT = "9470ed6"
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
    assert all(each["on_their_own_contents"] == 1 < 7 for each in alone.values())


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
        f"all of them are of commit {machine['commit'][:7]}, on one day, with torch "
        f"{machine['torch'].partition('+')[0]} and driver {machine['driver']}."
    )
    assert said in _page()
    assert machine["commit"].startswith(COMMIT)
    assert machine["when"] == _machine("0.20.2")["when"]


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
    assert all(1 - each["high"] > 0.9 for each in hooks)
    assert all(1 - each["high"] < 0.9 for each in steps)
    assert "all medians are above the aim, and where the hooks are so is each interval" in _page()


def _figure(version: str, name: str) -> dict[str, Any]:
    (found,) = (each for each in _results(version)["figures"] if each["name"] == name)
    return found


def test_vllm_0_20_2_with_the_8b_pair() -> None:
    """Nothing to win, and what the look takes."""
    page, at = _page(), f"8B at {COMMIT}, concurrency"
    for requests in (1, 8, 32):
        skipped = f"{at} {requests}: skipped adds to the step of the engine"
        assert _figure("0.20.2", skipped)["high"] > 0
        kept = f"{at} {requests}, to the step of the engine: not saved of what skipping saves"
        assert kept not in {each["name"] for each in _results("0.20.2")["figures"]}
        step = _figure("0.20.2", f"{at} {requests}, steps by turns: on / vLLM alone")
        assert (step["low"] > 1) == (requests == 1)
    added = _figure("0.20.2", f"{at} 1: on adds to the step of the engine")
    step = _figure("0.20.2", f"{at} 1, steps by turns: on / vLLM alone")
    said = f"at one request a step takes {added['value']:.0f} µs longer"
    assert f"{said}, {100 * (step['value'] - 1):.1f}%" in page


def test_first_tokens_of_vllm_0_20_2() -> None:
    page = _page()
    small, large = (
        _figure("0.20.2", f"{pair} at {COMMIT}, concurrency 1, 1 tokens: on / vLLM alone")
        for pair in ("small", "8B")
    )
    assert f"came {100 * (1 - small['value']):.1f}% sooner at one request" in page
    later = _first_token_later_us("0.20.2", 1)
    said = f"that of the 8B pair came {100 * (large['value'] - 1):.1f}% later, some {later:.0f} µs"
    assert said in page


def _first_token_later_us(version: str, requests: int) -> float:
    """Of the 8B pair, to one digit."""
    ((_, found),) = (
        each for each in _results(version)["end_to_end"].items() if ", 8B, " in each[0]
    )
    times = found[f"concurrency {requests}, 1 tokens"]
    later = 1000 * times["median_ms"]["off"] * (times["to_off"]["on"]["median"] - 1)
    return float(f"{later:.0e}")


def test_what_a_step_of_the_small_pair_gains_and_costs() -> None:
    page = _page()
    gains = [each["value"] for each in _steps("0.20.2", "small")]
    assert f"gains {100 * (1 - max(gains)):.1f} to {100 * (1 - min(gains)):.1f}% a step" in page
    shares: list[float] = []
    for row in _tables():
        if row[1].isdigit() and row[0] != "0.20.2":
            where = f"small at {COMMIT}, concurrency {row[1]}:"
            hooks = _figure(row[0], f"{where} on adds where graphshare has hooks")["value"]
            alone = _figure(row[0], f"{where} a step of vLLM alone, host")["value"]
            shares.append(100 * hooks / alone)
    said = f"the hooks take at most {_up(max(shares))}% of a step of the small pair in the median"
    assert said in page
    assert max(shares) < 1
    steps = [each["value"] for version in LATER for each in _steps(version, "small")]
    longer = f"{_up(100 * (max(steps) - 1))}%"
    assert f"the whole step takes at most {longer} longer" in page
    assert f"graphshare costs at most {longer} of a step" in page


def _up(value: float) -> str:
    """Of what is at most that much."""
    return f"{math.ceil(100 * value) / 100:.2f}"


def test_what_the_look_takes() -> None:
    """Beside vLLM's build, where nothing is rebuilt."""
    added: list[float] = []
    for version in LATER:
        ((_, profile),) = (
            each
            for each in _results(version)["profile_of_a_step"].items()
            if ", small, " in each[0]
        )
        for requests in ("1", "8", "32"):
            on, off = (profile[requests][name]["median_us"] for name in ("on", "off"))
            added.append(on[BUILD] - off[BUILD])
    assert f"What they look at, {min(added):.0f} to {max(added):.0f} µs after" in _page()


def _steps(version: str, pair: str) -> list[dict[str, Any]]:
    return [
        _figure(version, f"{pair} at {COMMIT}, concurrency {n}, steps by turns: on / vLLM alone")
        for n in (1, 8, 32)
    ]


def _longer(figure: dict[str, Any]) -> str:
    return f"by {100 * (figure['value'] - 1):.2f}%"


def test_the_page_names_each_median_beyond_its_interval() -> None:
    page = _page()
    steps = {
        (version, pair, requests): each
        for version in LATER
        for pair in ("small", "8B")
        for requests, each in zip((1, 8, 32), _steps(version, pair), strict=True)
    }
    calls = {
        (version, pair, requests, new): _figure(
            version,
            f"{pair} at {COMMIT}, concurrency {requests}, {new} tokens: on / vLLM alone",
        )
        for version in LATER
        for pair in ("small", "8B")
        for requests in (1, 8, 32)
        for new in (64, 1)
    }
    assert len(calls) == 36
    assert f"of {len(steps)} medians of steps in turns one lies above 1" in page
    ((which, step),) = (each for each in steps.items() if each[1]["low"] > 1)
    assert which == ("0.21.0", "small", 1)
    assert f"interval: 0.21.0 with the small pair at one request, {_longer(step)}." in page
    beyond = {which: _longer(each) for which, each in calls.items() if each["low"] > 1}
    assert list(beyond) == [
        ("0.21.0", "small", 1, 1),
        ("0.21.0", "8B", 8, 64),
        ("0.26.0", "8B", 1, 64),
        ("0.26.0", "8B", 8, 1),
    ]
    one, two, three, four = beyond.values()
    assert (
        f"Of {len(calls)} medians of `generate`, 64 tokens and the first one, four do: the first "
        f"token of 0.21.0 with the small pair at one request, {one}, and with the 8B pair 0.21.0 "
        f"at 8 requests and 64 tokens, {two}, 0.26.0 at one request and 64 tokens, {three}, and "
        f"its first token at 8 requests, {four}." in page
    )
    added = [
        _figure(version, f"small at {COMMIT}, concurrency {n}: on adds to the step of the engine")
        for version in LATER
        for n in (1, 8, 32)
    ]
    most = max(each["value"] for each in added)
    assert f"A difference is there, then, of up to {most:.0f} µs a step" in page
    assert f"is more, some {_first_token_later_us('0.26.0', 8) / 1000} ms, for which" in page


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
        for label, profile in _results(version)["profile_of_a_step"].items():
            if ", small, " in label:
                since = profile["1"]["steps_since_a_change"]
                first, others = since["the first adds_us"], since["the others add_us"]
                more.append(first["median"] - others["median"])
    said = " ".join((ROOT / "benchmarks" / "README.md").read_text("utf-8").split())
    assert (
        f"first step after a change is from {-min(more):.0f} µs less to {max(more):.0f} µs more"
        in said
    )
