"""What graphshare costs and saves in vLLM is what the committed results say."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.vllm._engine import SIZES
from graphshare.adapters.vllm.versions import SUPPORTED
from tests.vllm_results import (
    BUILD,
    COMMIT,
    LATER,
    ROOT,
    WHERE,
    figure_of,
    quoted,
    results_of,
    the_page,
    the_readme,
    times_of,
    with_hooks,
)


def _tables() -> list[list[str]]:
    page = (ROOT / "docs" / "how-to" / "vllm.md").read_text("utf-8")
    section = page.split("## What it costs, and saves")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:3] == "| 0"]
    return [[cell.strip() for cell in row] for row in rows]


@pytest.mark.parametrize("row", _tables(), ids=lambda row: ", ".join(row[:3]))
def test_the_page_quotes_the_results(row: list[str]) -> None:
    version, what, variant, *cells = row
    name = {"with graphshare": "on", "without the rebuild": "skipped"}[variant]
    if what in ("small", "8B"):
        at = f"{what} at {COMMIT}, concurrency"
        wanted = [
            figure_of(version, f"{at} {n}, steps by turns: {name} / vLLM alone") for n in (1, 8, 32)
        ]
        form = ".3f"
    else:
        where = f"small at {COMMIT}, concurrency {what}:"
        wanted = [figure_of(version, f"{where} {name} adds {part}") for part in WHERE]
        form = "+.0f"
        alone = figure_of(version, f"{where} a step of vLLM alone, host")
        assert cells.pop() == f"{alone['value']:.0f}"
    assert cells == [quoted(figure, form) for figure in wanted]


def test_all_versions_are_in_the_tables() -> None:
    rows = [row for row in _tables() if row[1] in ("small", "8B")]
    assert {(row[0], row[1]) for row in rows} == {
        (v, p) for v in SUPPORTED for p in ("small", "8B")
    }


def _missed(requests: int, what: str, pair: str = "small") -> dict[str, Any]:
    name = f"{pair} at {COMMIT}, concurrency {requests}, {what}"
    return figure_of("0.20.2", f"{name}: not saved of what skipping saves")


def _kept_of(missed: dict[str, Any]) -> str:
    value, low, high = (1 - missed[name] for name in ("value", "high", "low"))
    return f"{value:.2f} ({low:.2f} to {high:.2f})"


def _kept(requests: int) -> list[str]:
    """Where graphshare has hooks, and of the whole step."""
    return [_kept_of(_missed(requests, what)) for what in WHERE]


def test_the_page_says_what_is_kept_of_what_skipping_saves() -> None:
    said = the_page()
    hooks, step = _kept(1)
    assert f"borrowing keeps {hooks} of what skipping saves at one request" in said
    assert f"{step} of the whole step; nine tenths was the aim" in said
    assert f"At 8 requests it is {' and '.join(_kept(8))}, at 32 {' and '.join(_kept(32))}." in said


def test_medians_and_intervals_of_what_is_kept() -> None:
    hooks, steps = ([_missed(requests, what) for requests in (1, 8, 32)] for what in WHERE)
    assert all(each["high"] < 0.1 for each in hooks + steps)
    assert "All intervals are above the aim." in the_page()


def test_vllm_0_20_2_with_the_8b_pair() -> None:
    at = f"8B at {COMMIT}, concurrency"
    for requests in (1, 8, 32):
        skipped = f"{at} {requests}: skipped adds to the step of the engine"
        assert figure_of("0.20.2", skipped)["high"] > 0
        kept = f"{at} {requests}, to the step of the engine: not saved of what skipping saves"
        assert kept not in {each["name"] for each in results_of("0.20.2")["figures"]}
    with_graphshare = {
        each["name"].removeprefix(at).removesuffix(": on / vLLM alone"): each
        for each in results_of("0.20.2")["figures"]
        if each["name"].startswith(at) and each["name"].endswith(": on / vLLM alone")
    }
    beyond = {
        name: quoted(each, ".4f")
        for name, each in with_graphshare.items()
        if not each["low"] <= 1 <= each["high"]
    }
    assert (len(with_graphshare), len(beyond)) == (9, 2)
    hooks, step = (figure_of("0.20.2", f"{at} 1: on adds {where}") for where in WHERE)
    skipped = figure_of("0.20.2", f"{at} 1, 1 tokens: skipped / vLLM alone")
    first = with_graphshare[" 1, 1 tokens"]
    page = the_page()
    assert (
        f"At one request the hooks save {-hooks['value']:.0f} µs of the host, and the step is "
        f"{-step['value']:.0f} µs shorter ({-step['low']:.0f} to {-step['high']:.0f});" in page
    )
    assert (
        "By their single intervals, at one request steps are a little shorter, "
        f"{beyond[' 1, steps by turns']}, and 64 tokens come a little sooner, "
        f"{beyond[' 1, 64 tokens']}. The first token is {quoted(first, '.4f')}, without the "
        f"rebuild and without the checks {quoted(skipped, '.4f')}. In the other seven of its nine "
        "comparisons the interval holds 1." in page
    )


def test_what_is_kept_with_the_8b_pair_where_the_hooks_are() -> None:
    missed = [_missed(requests, WHERE[0], "8B") for requests in (1, 8, 32)]
    assert [each["value"] < each["target"] for each in missed] == [True, False, False]
    profile = times_of(results_of("0.20.2"), "profile_of_a_step", "8B")
    turns = [str(profile[n]["turns"]["apart"]) for n in ("1", "8", "32")]
    one, eight, many = map(_kept_of, missed)
    assert (
        f"Where the hooks are, borrowing keeps {one}, {eight} and {many} of what skipping saves, "
        f"of {', '.join(turns[:2])} and {turns[2]} turns: at 8 and 32 requests the medians are "
        "below nine tenths, which was the aim of the small pair." in the_page()
    )


def test_the_first_token_of_vllm_0_20_2() -> None:
    first, *others = (
        figure_of("0.20.2", f"small at {COMMIT}, concurrency {n}, 1 tokens: on / vLLM alone")
        for n in (1, 8, 32)
    )
    assert first["high"] < 1
    sooner = f"{100 * (1 - first['value']):.1f}% sooner at one request"
    eight, many = (
        f"{each['value']:.3f}, {each['low']:.3f} to {each['high']:.3f}" for each in others
    )
    assert all(each["low"] <= 1 <= each["high"] for each in others)
    assert (
        f"The first token of the small pair came {sooner}; at 8 and 32, whose prompts run on no "
        f"full graph, no difference shows (ratios of {eight}, and {many})." in the_page()
    )


def _steps(version: str, pair: str, requests: int) -> dict[str, Any]:
    name = f"{pair} at {COMMIT}, concurrency {requests}, steps by turns: on / vLLM alone"
    return figure_of(version, name)


def test_what_a_step_of_the_small_pair_gains() -> None:
    gains = [_steps("0.20.2", "small", requests)["value"] for requests in (1, 8, 32)]
    said = f"gains {100 * (1 - max(gains)):.1f} to {100 * (1 - min(gains)):.1f}% a step of decoding"
    assert f"{said}, an 8B pair nothing to speak of" in the_page()
    for requests in (1, 8, 32):
        assert _steps("0.20.2", "8B", requests)["value"] > 0.998


def _where_hooks_are(pair: str) -> list[dict[str, Any]]:
    """What they add to a step, where nothing is rebuilt."""
    return [
        figure_of(version, f"{pair} at {COMMIT}, concurrency {n}: on adds {WHERE[0]}")
        for version in LATER
        for n in (1, 8, 32)
    ]


def test_what_the_hooks_take() -> None:
    page = the_page()
    small, large = ([each["value"] for each in _where_hooks_are(pair)] for pair in ("small", "8B"))
    assert f"takes from {-min(small):.1f} to {-max(small):.1f} µs less where the hooks are" in page
    holds_none = sum(each["low"] <= 0 <= each["high"] for each in _where_hooks_are("small"))
    assert holds_none == 1
    assert "in one of nine the interval holds 0" in page
    for version in LATER:
        for n in (1, 8, 32):
            where = f"small at {COMMIT}, concurrency {n}:"
            alone = figure_of(version, f"{where} a step of vLLM alone, host")["value"]
            target = figure_of(version, f"{where} on adds {WHERE[0]}")["target"]
            assert target == pytest.approx(alone / 100)
    assert "1% of a step more was allowed." in page
    chance = {
        pair: max(
            abs(
                figure_of(v, f"{pair} at {COMMIT}, concurrency {n}: again adds {WHERE[0]}")["value"]
            )
            for v in LATER
            for n in (1, 8, 32)
        )
        for pair in ("small", "8B")
    }
    assert (
        "Between turns of one kind, which differ by chance alone, it is up to "
        f"{chance['small']:.0f} µs with the small pair, and {chance['8B']:.0f} µs with the 8B one."
        in page
    )
    said = f"from {-min(large):.1f} to {-max(large):.1f} µs less."
    assert f"Where the hooks are, a step of the 8B pair takes {said}" in page


def test_what_checks_add_and_launches_save() -> None:
    page = the_page()
    for versions, said in (
        (
            ["0.20.2"],
            "they add {} µs to the target's build, and launches and dispatches take {} µs",
        ),
        (LATER, "checks add {} µs to the target's build, and launches and dispatches take {} µs"),
    ):
        added: list[float] = []
        saved: list[float] = []
        for version in versions:
            for n in ("1", "8", "32"):
                more = with_hooks(times_of(results_of(version), "profile_of_a_step", "small")[n])
                added.append(more[BUILD])
                launches = [name for name in more if "launch" in name or "dispatch" in name]
                assert len(launches) == 6
                saved.append(-sum(more[name] for name in launches))
        assert said.format(_range(added), _range(saved)) + " less" in page


def _range(found: list[float]) -> str:
    low, high = (f"{each:.0f}" for each in (min(found), max(found)))
    return low if low == high else f"{low} to {high}"


def _since_a_change(version: str, pair: str) -> dict[str, Any]:
    profile = times_of(results_of(version), "profile_of_a_step", pair)["1"]
    return profile["steps_since_a_change"]


def _more_at_first(version: str, pair: str) -> float:
    since = _since_a_change(version, pair)
    return since["the first adds_us"]["median"] - since["the others add_us"]["median"]


def test_the_first_step_after_a_change() -> None:
    more = {version: _more_at_first(version, "small") for version in SUPPORTED}
    later = [more[version] for version in LATER]
    then = [-_since_a_change(version, "small")["the others add_us"]["median"] for version in LATER]
    said = the_readme()
    assert (
        f"in the first step after a change is {-more['0.20.2']:.1f} µs less than in the next ones "
        f"on 0.20.2, and from {-min(later):.1f} less to {max(later):.1f} µs more on 0.21.0 to "
        f"0.26.0. In the next ones the hooks take {min(then):.1f} to {max(then):.1f} µs less there "
        "than vLLM alone, in the median." in said
    )
    large = [_more_at_first(version, "8B") for version in SUPPORTED]
    blocks = [_since_a_change(version, "8B")["blocks"] for version in SUPPORTED]
    assert (
        f"With the 8B pair, of {min(blocks)} to {max(blocks)} blocks, it is from "
        f"{-min(large):.0f} µs less to {max(large):.0f} more." in said
    )


def test_with_which_options_times_were_taken() -> None:
    said = the_readme()
    for version in SUPPORTED:
        for pair in ("small", "8B"):
            profile = times_of(results_of(version), "profile_of_a_step", pair)
            turns = " ".join(str(profile[n]["turns"]["whole"]) for n in ("1", "8", "32"))
            assert f"`--turns {turns} --seconds" in said
    assert f"and graphs {min(SIZES)} to {max(SIZES)}." in said
