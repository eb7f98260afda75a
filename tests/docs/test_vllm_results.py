"""A version of vLLM is supported where the committed results show it, and the page quotes them."""

from __future__ import annotations

import json
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
    assert {label.split(",")[0] for label in seen} == set(MODES)
    assert {"Triton" in label for label in seen} == {"EAGLE-3" in label for label in seen}
    assert {"8B" in label for label in seen} == {True, False}


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


def _quoted(figure: dict[str, Any] | None, form: str) -> str:
    if figure is None:
        return "\N{EN DASH}"
    value, low, high = (format(figure[name], form) for name in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


@pytest.mark.parametrize("row", _tables(), ids=lambda row: ", ".join((*row[:3], row[-1])))
def test_the_page_quotes_the_results(row: list[str]) -> None:
    version, what, variant, *cells, commit = row
    figures = {each["name"]: each for each in _results(version)["figures"]}
    name = {"with graphshare": "on", "without the rebuild": "skipped"}[variant]
    if what in ("small", "8B"):
        measured = {"small": "steps by turns", "8B": "64 tokens"}[what]
        wanted = [
            figures.get(f"{what} at {commit}, concurrency {n}, {measured}: {name} / vLLM alone")
            for n in (1, 8, 32)
        ]
        form = ".3f"
    else:
        where = f"small at {commit}, concurrency {what}:"
        wanted = [
            figures[f"{where} {name} adds where graphshare has hooks"],
            figures[f"{where} {name} adds to the step of the engine"],
        ]
        form = "+.0f"
        assert cells.pop() == f"{figures[f'{where} a step of vLLM alone, host']['value']:.0f}"
    assert any(wanted)
    assert cells == [_quoted(figure, form) for figure in wanted]


def test_all_versions_are_in_the_tables() -> None:
    rows = [row for row in _tables() if row[1] in ("small", "8B")]
    assert {(row[0], row[1]) for row in rows} == {
        (v, p) for v in SUPPORTED for p in ("small", "8B")
    }


def _kept(requests: int) -> list[str]:
    """Where graphshare has hooks, and of the whole step."""
    where = f"small at e1985e5, concurrency {requests}, "
    missed = {
        each["name"].removeprefix(where): each
        for each in _results("0.20.2")["figures"]
        if each["name"].startswith(where) and "not saved" in each["name"]
    }
    found = [
        missed[f"{what}: not saved of what skipping saves"]
        for what in ("where graphshare has hooks", "to the step of the engine")
    ]
    return [
        f"{1 - each['value']:.2f} ({1 - each['high']:.2f} to {1 - each['low']:.2f})"
        for each in found
    ]


def test_the_page_says_what_is_kept_of_what_skipping_saves() -> None:
    said = _page()
    hooks, step = _kept(1)
    assert f"borrowing keeps {hooks} of what skipping saves at one request" in said
    assert f"{step} of the whole step" in said
    assert f"At 8 requests it is {' and '.join(_kept(8))}, at 32 {' and '.join(_kept(32))}." in said


def test_the_page_names_each_median_of_the_8b_pair_beyond_its_interval() -> None:
    said = _page()
    ((version, figure),) = _beyond(_figures("8B at", "64 tokens: on /"))
    words = f"that of {version} at 8 requests lies above 1 by more than its interval, by {{}}%"
    assert "concurrency 8," in figure["name"]
    assert words.format(f"{100 * (figure['value'] - 1):.2f}") in said
    first = {
        (version, each["name"].split(":")[0]): f"{100 * (each['value'] - 1):.1f}%"
        for version, each in _beyond(_figures("8B at", ", 1 tokens: on /"))
    }
    assert list(first) == [
        ("0.20.2", "8B at 9f5f62a, concurrency 1, 1 tokens"),
        ("0.21.0", "8B at fa88a86, concurrency 1, 1 tokens"),
        ("0.26.0", "8B at fa88a86, concurrency 32, 1 tokens"),
    ]
    one, two, three = first.values()
    assert (
        f"three do: 0.20.2 at 9f5f62a at 1 request, by {one}, 0.21.0 at 1, by {two}, "
        f"and 0.26.0 at 32, by {three}." in said
    )


def test_the_hooks_take_less_than_one_per_cent_of_a_step() -> None:
    shares: list[float] = []
    for row in _tables():
        if row[1].isdigit() and row[0] != "0.20.2":
            hooks, alone = row[3].split()[0], row[5]
            shares.append(100 * float(hooks) / float(alone))
    said = _page()
    assert f"the hooks take at most {max(shares):.1f}% of a step in the median" in said
    assert max(shares) < 1
    steps = [each["value"] for _, each in _small_pair(", steps by turns: on /")]
    assert f"the whole step takes at most {100 * (max(steps) - 1):.1f}% longer" in said
    assert f"graphshare costs at most {100 * (max(steps) - 1):.1f}% of a step" in said


def test_the_page_counts_what_takes_longer_beyond_its_interval() -> None:
    page = _page()
    calls, steps = _small_pair(" tokens: on /"), _small_pair(", steps by turns: on /")
    assert f"Of {len(calls)} medians of `generate` on these versions" in page
    ((version, figure),) = _beyond(calls)
    assert "concurrency 32, 64 tokens" in figure["name"]
    said = f"{figure['value']:.3f}, {figure['low']:.3f} to {figure['high']:.3f}"
    assert f"that of {version} with 32 requests and 64 tokens ({said}, of 13 rounds)" in page
    assert f"{sum(each['value'] > 1 for _, each in calls)} lie above 1, which fits" in page
    assert len(steps) == 9
    (one, first), (other, second) = _beyond(steps)
    assert "concurrency 1," in first["name"]
    assert "concurrency 32," in second["name"]
    longer = [f"{100 * (each['value'] - 1):.1f}%" for each in (first, second)]
    assert f"{one} at one request, by {longer[0]}, and {other} at 32, by {longer[1]}" in page


def _figures(beginning: str, what: str) -> list[tuple[str, dict[str, Any]]]:
    return [
        (version, each)
        for version in SUPPORTED
        for each in _results(version)["figures"]
        if each["name"].startswith(beginning) and what in each["name"]
    ]


def _small_pair(what: str) -> list[tuple[str, dict[str, Any]]]:
    """Of the versions in which there is no rebuild to save."""
    return [(version, each) for version, each in _figures("small at", what) if version != "0.20.2"]


def _beyond(figures: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    return [(version, each) for version, each in figures if each["low"] > 1]


def test_a_first_token_of_vllm_0_20_2() -> None:
    page = _page()
    figures = {each["name"]: each for each in _results("0.20.2")["figures"]}
    one, eight = (
        figures[f"small at e1985e5, concurrency {n}, 1 tokens: on / vLLM alone"] for n in (1, 8)
    )
    sooner, later = 100 * (1 - one["value"]), 100 * (eight["value"] - 1)
    assert f"came {sooner:.1f}% sooner at one request and {later:.1f}% later at 8" in page
    gains = [each["value"] for n, each in figures.items() if ", steps by turns: on /" in n]
    assert f"gains {100 * (1 - max(gains)):.1f} to {100 * (1 - min(gains)):.1f}% a step" in page


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
