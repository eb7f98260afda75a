"""What graphshare costs and saves in vLLM is what the committed results say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.vllm._engine import SIZES
from graphshare.adapters.vllm.versions import SUPPORTED
from tests.vllm_results import (
    BUILD,
    COMMIT,
    LATER,
    MEASURED,
    WHERE,
    calls_of,
    figure_of,
    profiles_of,
    quoted,
    results_of,
    the_how_to,
    the_page,
    the_readme,
    with_hooks,
)

VARIANTS = {"with graphshare": "on", "without the rebuild": "skipped"}


def _tables(title: str = "What it costs, and saves") -> list[list[str]]:
    page = MEASURED.read_text("utf-8")
    section = page.split(f"## {title}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:3] == "| 0"]
    return [[cell.strip() for cell in row] for row in rows]


def _compared() -> list[list[str]]:
    return [row for row in _tables() if row[2] in VARIANTS]


@pytest.mark.parametrize("row", _compared(), ids=lambda row: ", ".join(row[:3]))
def test_the_page_quotes_the_results(row: list[str]) -> None:
    version, what, variant, *cells = row
    name = VARIANTS[variant]
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
    rows = [row for row in _compared() if row[1] in ("small", "8B")]
    assert {(row[0], row[1]) for row in rows} == {
        (v, p) for v in SUPPORTED for p in ("small", "8B")
    }


def _missed(requests: int, what: str, pair: str = "small") -> dict[str, Any]:
    name = f"{pair} at {COMMIT}, concurrency {requests}, {what}"
    return figure_of("0.20.2", f"{name}: not saved of what skipping saves")


def _kept_of(missed: dict[str, Any], form: str = ".2f") -> str:
    kept = {"value": 1 - missed["value"], "low": 1 - missed["high"], "high": 1 - missed["low"]}
    return quoted(kept, form)


def _kept(requests: int) -> list[str]:
    """Where graphshare has hooks, and of the whole step."""
    return [_kept_of(_missed(requests, what)) for what in WHERE]


def test_the_page_says_what_is_kept_of_what_skipping_saves() -> None:
    said = the_page()
    hooks, step = _kept(1)
    assert f"With the small pair borrowing keeps {hooks} of what skipping saves at one" in said
    assert f"{step} of the whole step. At 8" in said
    assert "borrowing is to keep nine tenths of what skipping the rebuild saves" in said
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
        name for name, each in with_graphshare.items() if not each["low"] <= 1 <= each["high"]
    }
    assert beyond == {" 1, steps by turns", " 1, 64 tokens"}
    assert (len(with_graphshare), len(with_graphshare) - len(beyond)) == (9, 7)
    steps, calls, first = (
        quoted(with_graphshare[f" 1, {case}"], ".4f")
        for case in ("steps by turns", "64 tokens", "1 tokens")
    )
    plain_steps, plain_first = (
        quoted(figure_of("0.20.2", f"{at} 1, {case}: skipped / vLLM alone"), ".4f")
        for case in ("steps by turns", "1 tokens")
    )
    hooks, step = (figure_of("0.20.2", f"{at} 1: on adds {where}") for where in WHERE)
    page = the_page()
    assert (
        f"At one request the hooks save {-hooks['value']:.0f} µs of the host, and the step is "
        f"{-step['value']:.1f} µs shorter ({-step['high']:.1f} to {-step['low']:.1f}):" in page
    )
    assert (
        f"Of nine comparisons two leave out 1. At one request steps are a little shorter, {steps}, "
        f"though without the rebuild they are not, {plain_steps}; and 64 tokens come a little "
        f"sooner, {calls}. In the other seven the interval holds 1: among them is the first token "
        f"at one request, {first}, which without the rebuild and without the checks is "
        f"{plain_first}." in page
    )


def test_what_is_kept_with_the_8b_pair_where_the_hooks_are() -> None:
    missed = [_missed(requests, WHERE[0], "8B") for requests in (1, 8, 32)]
    assert [each["value"] < each["target"] for each in missed] == [True, False, False]
    assert all(each["low"] < each["target"] for each in missed)
    profile = profiles_of("0.20.2", "8B")
    turns = [str(profile[n]["turns"]["apart"]) for n in ("1", "8", "32")]
    one, eight, many = (_kept_of(each, ".3f") for each in missed)
    assert (
        f"With the 8B pair borrowing keeps, where the hooks are, {one}, {eight} and {many} of what "
        f"skipping saves, of {', '.join(turns[:2])} and {turns[2]} turns. At 8 and 32 requests the "
        "medians miss nine tenths, which was set as an aim for the small pair alone, and the "
        "intervals reach above it." in the_page()
    )
    added, saved = zip(*(_checks_and_launches("0.20.2", "8B", n) for n in ("8", "32")), strict=True)
    assert (
        f"There the checks add {added[0]:.0f} and {added[1]:.0f} µs to the target's build, and "
        f"launches and dispatches take {saved[0]:.0f} and {saved[1]:.0f} µs less." in the_page()
    )
    assert "| `vllm/0.20.2` | 8B pair, 8 and 32 requests, where the hooks are:" in the_readme()


def _calls(new: int, variant: str = "on") -> list[dict[str, Any]]:
    """Calls of ``generate`` on 0.20.2 with the small pair."""
    return [
        figure_of(
            "0.20.2",
            f"small at {COMMIT}, concurrency {n}, {new} tokens: {variant} / vLLM alone",
        )
        for n in (1, 8, 32)
    ]


def test_64_tokens_of_vllm_0_20_2() -> None:
    on, skipped = _calls(64), _calls(64, "skipped")
    one, eight, many = (quoted(each, ".3f") for each in on)
    plain = [f"{each['value']:.3f}" for each in skipped]
    times = calls_of("0.20.2", "small")
    rounds = [times[f"concurrency {n}, 64 tokens"]["rounds"] for n in (1, 8, 32)]
    assert (
        f"64 tokens took {one}, {eight} and {many} of the time of vLLM alone, in "
        f"{min(rounds)} to {max(rounds)} rounds, and without the rebuild {plain[0]}, {plain[1]} "
        f"and {plain[2]}." in the_page()
    )


def test_the_first_token_of_vllm_0_20_2() -> None:
    first, *others = _calls(1)
    assert first["high"] < 1
    sooner = f"{100 * (1 - first['value']):.1f}% sooner at one request"
    eight, many = (
        f"{each['value']:.3f}, {each['low']:.3f} to {each['high']:.3f}" for each in others
    )
    assert all(each["low"] <= 1 <= each["high"] for each in others)
    assert (
        f"the first token of the small pair came {sooner}; at 8 and 32, whose prompts run on no "
        f"full graph, no difference shows (ratios of {eight}, and {many};" in the_page()
    )


def _steps(version: str, pair: str, requests: int) -> dict[str, Any]:
    name = f"{pair} at {COMMIT}, concurrency {requests}, steps by turns: on / vLLM alone"
    return figure_of(version, name)


def test_what_a_step_of_the_small_pair_gains() -> None:
    gains = [_steps("0.20.2", "small", requests)["value"] for requests in (1, 8, 32)]
    said = f"gains {100 * (1 - max(gains)):.1f} to {100 * (1 - min(gains)):.1f}% a step of decoding"
    calls = _calls(64)
    assert all(each["high"] < 1 for each in calls)
    sooner = sorted(100 * (1 - each["value"]) for each in calls)
    assert (
        f"{said}, and 64 tokens come {sooner[0]:.0f} to {sooner[-1]:.0f}% sooner. An 8B pair, "
        "which waits for the GPU, gains nothing to speak of." in the_how_to()
    )
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
    holds_none = [
        sum(each["low"] <= 0 <= each["high"] for each in _where_hooks_are(pair))
        for pair in ("small", "8B")
    ]
    assert holds_none == [1, 6]
    assert (
        f"A step of the small pair takes {-max(small):.1f} to {-min(small):.1f} µs less where the "
        "hooks are, in the median; in one of nine the interval holds 0." in page
    )
    assert (
        f"With the 8B pair it is {-max(large):.1f} to {-min(large):.1f} µs less; in six of nine "
        "the interval holds 0." in page
    )
    assert (
        f"less of the host than what they replace, by {-max(small + large):.0f} to "
        f"{-min(small + large):.0f} µs a step; in {sum(holds_none)} of 18 comparisons not by more "
        "than chance." in the_how_to()
    )
    for version in LATER:
        for n in (1, 8, 32):
            where = f"small at {COMMIT}, concurrency {n}:"
            alone = figure_of(version, f"{where} a step of vLLM alone, host")["value"]
            target = figure_of(version, f"{where} on adds {WHERE[0]}")["target"]
            assert target == pytest.approx(alone / 100)
    assert "The aim allows 1% of a step more." in page
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
        "between turns of one kind, which differ by chance alone, it is up to "
        f"{chance['small']:.0f} µs with the small pair, and {chance['8B']:.0f} µs with the 8B one."
        in page
    )


def _checks_and_parts(version: str, pair: str, requests: str) -> tuple[float, float, float]:
    """What is added to the target's build, and to launches and dispatches of target and draft."""
    more = with_hooks(profiles_of(version, pair)[requests])
    launches = [name for name in more if "launch" in name or "dispatch" in name]
    assert len(launches) == 6
    target = sum(more[name] for name in launches if name.startswith("execute_model"))
    return more[BUILD], target, sum(more[name] for name in launches) - target


def _checks_and_launches(version: str, pair: str, requests: str) -> tuple[float, float]:
    """What checks add to the target's build, and launches and dispatches take less."""
    checks, target, draft = _checks_and_parts(version, pair, requests)
    return checks, -(target + draft)


def test_what_checks_add_and_launches_save() -> None:
    page = the_page()
    small = "checks add {} µs to the target's build, and launches and dispatches take {} µs less;"
    large = "the 8B pair the checks add {} µs, and launches and dispatches take {} µs less."
    for versions, pair, said in (
        (["0.20.2"], "small", f"they{small.removeprefix('checks')}".replace("less;", "less.")),
        (LATER, "small", f"With the small pair the {small}"),
        (LATER, "8B", large),
    ):
        found = [_checks_and_launches(v, pair, n) for v in versions for n in ("1", "8", "32")]
        added, saved = zip(*found, strict=True)
        assert said.format(_range(added), _range(saved)) in page


def test_the_parts_of_a_step() -> None:
    rows = {tuple(row[:2]): row[2:] for row in _tables() if row[2] not in VARIANTS}
    assert set(rows) == {(v, p) for v in LATER for p in ("small", "8B")}
    for (version, pair), cells in rows.items():
        where = figure_of(version, f"{pair} at {COMMIT}, concurrency 1: on adds {WHERE[0]}")
        wanted = (*_checks_and_parts(version, pair, "1"), where["value"])
        assert cells == [f"{each:+.1f}" for each in wanted]


def test_where_the_time_of_a_step_goes() -> None:
    rows = {tuple(row[:2]): row[2:] for row in _tables("Where a step's host time goes")}
    assert set(rows) == {(v, p) for v in SUPPORTED for p in ("small", "8B")}
    for (version, pair), cells in rows.items():
        times = profiles_of(version, pair)["1"]["off"]["median_us"]
        calls = [times["execute_model"], times["sample_tokens"]]
        of_prefill = times.get("propose / metadata build of the prefill", 0.0)
        assert (of_prefill > 0) == (version == "0.20.2")
        builds = [times[BUILD], of_prefill, times["propose / metadata builds of the decodes"]]
        share = 100 * sum(builds) / sum(calls)
        assert cells == [
            *(f"{each:.0f}" for each in (*calls, *builds)),
            f"{sum(builds):.0f} ({share:.0f}%)",
        ]


def test_how_often_a_step_builds_for_its_decodes() -> None:
    for version in SUPPORTED:
        for label, each in results_of(version)["builds_while_serving"].items():
            if "GRAPHSHARE_VLLM=verify" not in label:
                times = 1 if version == "0.20.2" else 2
                assert each["builds"]["draft, query length 1"] == times * each["steps"]
    assert "0.20.2 builds once for both decodes, the later versions once for each:" in the_page()


def _range(found: Sequence[float]) -> str:
    low, high = (f"{each:.0f}" for each in (min(found), max(found)))
    return low if low == high else f"{low} to {high}"


def _since_a_change(version: str, pair: str) -> dict[str, Any]:
    profile = profiles_of(version, pair)["1"]
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
        f"With the 8B pair, in {min(blocks)} to {max(blocks)} blocks, the first step differs from "
        f"the next ones by {-min(large):.0f} µs less to {max(large):.0f} more." in said
    )


def test_with_which_options_times_were_taken() -> None:
    said = the_readme()
    for version in SUPPORTED:
        for pair in ("small", "8B"):
            profile = profiles_of(version, pair)
            turns = " ".join(str(profile[n]["turns"]["whole"]) for n in ("1", "8", "32"))
            assert f"`--turns {turns} --seconds" in said
    assert f"and graphs {min(SIZES)} to {max(SIZES)}." in said
