"""The page tells how vLLM compared with vLLM alone end to end, as the committed results say."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.vllm._variants import AGAIN, COMPARISONS, OF_ALL
from graphshare.adapters.vllm.versions import SUPPORTED
from tests.vllm_results import (
    BUILD,
    COMMIT,
    LATER,
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

BEFORE_THE_GPU = ("execute_model / dispatch", "execute_model / graph launch")
"""The target's, after its build."""
Comparison = tuple[str, str, int, str]
"""Version, pair, requests, and what took the time."""
FIRST_TOKEN = "8B", 1, "1 tokens"
"""Of a lone prompt."""
MISSED: Comparison = ("0.21.0", *FIRST_TOKEN)
"""Where the aim was missed, in the run before."""


def _with_alone(variant: str) -> dict[Comparison, dict[str, Any]]:
    """The comparisons of a variant where nothing is rebuilt."""
    found: dict[Comparison, dict[str, Any]] = {}
    for version in LATER:
        for timed, ratios in ((calls_of, "to_off"), (profiles_of, "steps_to_off")):
            for pair in ("small", "8B"):
                for case, of in timed(version, pair).items():
                    if case != "commit":
                        found[_of_case(version, pair, case)] = of[ratios][variant]
    assert len(found) == COMPARISONS
    return found


def _of_case(version: str, pair: str, case: str) -> Comparison:
    # «concurrency 8, 64 tokens», or «8» alone for steps
    requests, _, what = case.removeprefix("concurrency ").partition(", ")
    return version, pair, int(requests), what or "steps"


def _run(name: str) -> dict[Comparison, dict[str, Any]]:
    """What is kept of a run before that of the committed results."""
    return {
        _of_case(each["vllm"], each["pair"], each["case"]): each
        for each in results_of("earlier")["comparisons"]
        if each["run"] == name
    }


def _earlier(run: str) -> dict[Comparison, dict[str, Any]]:
    """As :func:`_with_alone`, of ``on`` in such a run."""
    return {which: each["on"] for which, each in _run(run).items()}


def _single(each: dict[str, Any]) -> str:
    return f"{each['median']:.4f} ({each['low']:.4f} to {each['high']:.4f})"


def _excluded(high: float) -> str:
    """From how many per cent more on an interval with this upper end leaves a ratio out."""
    return f"{math.ceil(1000 * (high - 1)) / 10:.1f}%"


def _beyond(found: dict[Comparison, dict[str, Any]]) -> dict[Comparison, dict[str, Any]]:
    """Those whose 95% interval leaves out 1."""
    return {which: each for which, each in found.items() if not each["low"] <= 1 <= each["high"]}


def _beyond_all(found: dict[Comparison, dict[str, Any]]) -> set[Comparison]:
    """Those whose wide interval leaves out 1."""
    return {which for which, each in found.items() if not each[OF_ALL][0] <= 1 <= each[OF_ALL][1]}


def test_the_aim_of_all_comparisons_together_is_met() -> None:
    page = the_page()
    assert not _beyond_all(_with_alone("on"))
    assert f"There are {COMPARISONS} comparisons with vLLM alone:" in page
    assert f"is that each of the {COMPARISONS} wide intervals holds 1." in page
    assert f"All {COMPARISONS} hold 1, so it was met." in page
    assert f"In the results of commit {COMMIT} they do." in the_readme()


def test_the_aim_was_missed_by_one_in_the_run_before() -> None:
    found = _earlier("2b1a24e")
    assert len(found) == COMPARISONS
    assert _beyond_all(found) == {MISSED}
    before = found[MISSED]
    low, high = before[OF_ALL]
    page, readme = the_page(), the_readme()
    assert (
        f"of commit 2b1a24e, {COMPARISONS - 1} of the {COMPARISONS} wide intervals held 1, and one "
        "did not: the first token of the 8B pair at one request on 0.21.0, "
        f"{before['median']:.4f} ({low:.6f} to {high:.4f})." in page
    )
    version, pair, *_ = MISSED
    case = calls_of(version, pair)["concurrency 1, 1 tokens"]
    now = case["to_off"]["on"]
    then = _run("2b1a24e")[MISSED]
    now_low, now_high = now[OF_ALL]
    assert now_low <= low <= high <= now_high
    assert round((now_high - now_low) / (high - low)) == 2
    assert (
        f"there are {case['rounds']} rounds now ({then['rounds']} then), a ratio of "
        f"{now['median']:.4f} and a wide interval of {now_low:.4f} to {now_high:.4f}, which is "
        "twice as wide as the earlier one and holds all of it." in page
    )
    many, steps = ("0.21.0", "8B", 32, "64 tokens"), ("0.26.0", "8B", 8, "steps")
    assert set(_beyond(found)) == {MISSED, many, steps}
    assert (
        "Two more single intervals left out 1, both upwards and with the 8B pair: 64 tokens at 32 "
        f"requests on 0.21.0, {_single(found[many])}, and a step at 8 requests on 0.26.0, "
        f"{_single(found[steps])}." in page
    )
    assert f"In the run before, of commit 2b1a24e, {COMPARISONS - 1} did." in readme
    assert f"was missed in one of {COMPARISONS} comparisons in the run before" in readme


def test_the_calls_before_those_that_count_meet_the_aim_as_well() -> None:
    found: dict[Comparison, dict[str, Any]] = {}
    for version in LATER:
        for pair in ("small", "8B"):
            for case, of in calls_of(version, pair).items():
                if case.endswith(", 1 tokens"):
                    found[_of_case(version, pair, case)] = of["to_off_of_the_calls_before"]["on"]
    assert not _beyond_all(found)
    ((version, pair, requests, _), beyond), *more = _beyond(found).items()
    assert not more
    assert (
        f"all {len(found)} of their wide intervals hold 1, and all of the single ones but one "
        f"({version}, {pair} pair, {requests} requests, "
        f"{_single(beyond).replace(' (', ', ')}. Of the first token that had missed they say "
        f"{_single(found[MISSED])}." in the_page()
    )
    below = {which: each for which, each in found.items() if which[1:] == FIRST_TOKEN}
    ((version, *_), least), *more = (
        (which, each["median"]) for which, each in below.items() if each["median"] < 1
    )
    assert (len(below), more) == (3, [])
    assert (
        f"Of the calls before, in this run, one of three is below 1 ({least:.4f} on {version})."
        in the_page()
    )


def test_the_aim_was_met_in_the_run_before_that() -> None:
    found, more = (_earlier(run) for run in ("86f4d5f", "86f4d5f, once more"))
    assert len(found) == COMPARISONS
    assert {pair for _, pair, *_ in more} == {"8B"}
    assert not _beyond_all(found)
    assert not _beyond_all(more)
    assert (
        f"All {COMPARISONS} held 1, and so did {len(more)} of the 8B pair's `generate` that ran "
        "once more." in the_page()
    )
    ones = [len(_beyond(each)) for each in (found, more)]
    assert (
        f"Of single intervals, {ones[0]} of the {COMPARISONS} and {ones[1]} of the {len(more)} "
        "left out 1." in the_page()
    )
    assert f"In a run of commit 86f4d5f all {COMPARISONS} did;" in the_readme()


def test_wide_intervals_of_what_differs_by_chance() -> None:
    assert not _beyond_all(_with_alone(AGAIN))
    assert f"and all {COMPARISONS} wide intervals hold it." in the_page()


def test_how_much_the_wide_intervals_say() -> None:
    highest: dict[tuple[str, str], float] = {}
    for (_, pair, _, what), each in _with_alone("on").items():
        key = "both" if what == "steps" else pair, what
        highest[key] = max(highest.get(key, 0.0), each[OF_ALL][1])
    said = {key: _excluded(each) for key, each in highest.items()}
    assert (
        f"The wide intervals exclude steps that are more than {said['both', 'steps']} longer; with "
        f"the 8B pair, first tokens that come {said['8B', '1 tokens']} later, and 64 tokens that "
        f"take {said['8B', '64 tokens']} longer; with the small pair, whose calls vary more, "
        f"{said['small', '1 tokens']} and {said['small', '64 tokens']}." in the_page()
    )


def test_the_page_names_each_single_interval_that_leaves_out_one() -> None:
    page = the_page()
    beyond = _beyond(_with_alone("on"))
    few, many = ("0.21.0", "8B", 8, "64 tokens"), ("0.26.0", "8B", 32, "64 tokens")
    first = ("0.21.0", "8B", 8, "1 tokens")
    assert set(beyond) == {few, many, first}
    assert len(_beyond(_with_alone(AGAIN))) == 4
    assert round(0.05 * COMPARISONS) == 3
    assert f"leave out 1 by chance in about three of {COMPARISONS}," in page
    assert all(beyond[which]["low"] > 1 for which in (few, many))
    assert beyond[first]["high"] < 1
    narrow = beyond[few]
    assert (
        "Of `again` four do, of `on` three. Two of these say that it takes longer with the hooks, "
        f"both with the 8B pair: 64 tokens at 8 requests on 0.21.0, {narrow['median']:.4f} "
        f"({narrow['low']:.5f} to {narrow['high']:.4f}), and at 32 requests on 0.26.0, "
        f"{_single(beyond[many])}. One says that it takes less: the first token of that pair at 8 "
        f"requests on 0.21.0, {_single(beyond[first])}." in page
    )
    above, chance = (
        sum(each["median"] > 1 for each in _with_alone(variant).values())
        for variant in ("on", AGAIN)
    )
    assert f"{above} of the {COMPARISONS} medians of `on` are above 1, and {chance} of" in page


def test_the_first_token_of_the_8b_pair_at_one_request() -> None:
    page = the_page()
    ratios: dict[str, dict[str, Any]] = {}
    later: list[float] = []
    alone: list[float] = []
    for version in SUPPORTED:
        case = calls_of(version, "8B")["concurrency 1, 1 tokens"]
        ratios[version] = case["to_off"]["on"]
        alone.append(case["median_ms"]["off"])
        later.append(1000 * alone[-1] * (ratios[version]["median"] - 1))
    assert all(each["median"] > 1 for each in ratios.values())
    for each in ratios.values():
        assert each["low"] <= 1 <= each["high"]
        assert each[OF_ALL][0] <= 1 <= each[OF_ALL][1]
    runs = dict.fromkeys(each["run"] for each in results_of("earlier")["comparisons"])
    before = [_earlier(run)[(v, *FIRST_TOKEN)]["median"] for run in runs for v in LATER]
    assert (len(before), min(before) > 1) == (9, True)
    beyond = [run for run in runs for v in LATER if _earlier(run)[(v, *FIRST_TOKEN)]["low"] > 1]
    assert (len(beyond), sum(run.startswith("86f4d5f") for run in beyond)) == (5, 4)
    chance, small = (
        [found[(v, *which)]["median"] for v in LATER]
        for found, which in (
            (_with_alone(AGAIN), FIRST_TOKEN),
            (_with_alone("on"), ("small", *FIRST_TOKEN[1:])),
        )
    )
    assert (
        "In this run no interval leaves out 1, and by chance alone the medians differ as much "
        f"(`again` is {min(chance):.3f} to {max(chance):.3f}). But the medians of all four "
        f"versions are above 1, by {min(later):.0f} to {max(later):.0f} µs (the median ratio times "
        f"the median time) of {min(alone):.0f} to {max(alone):.0f} ms. So are all nine of 0.21.0 "
        f"to 0.26.0 in these two earlier runs, by {100 * (min(before) - 1):.1f} to "
        f"{100 * (max(before) - 1):.1f}%. In five of the nine the single interval leaves out 1, "
        "four of them of 86f4d5f." in page
    )
    assert (
        f"With the small pair, on 0.21.0 to 0.26.0, the medians are {min(small):.4f} to "
        f"{max(small):.4f};" in page
    )
    shares = [100 * (each - 1) for each in (*before, *(ratios[v]["median"] for v in LATER))]
    assert len(shares) == 12
    highest = max(ratios[v][OF_ALL][1] for v in LATER)
    assert (
        f"twelve medians of three runs are {min(shares):.1f} to {max(shares):.1f}%, and up to "
        f"{_excluded(highest)} is not excluded." in the_how_to()
    )


def test_what_comes_before_the_launch_of_the_target() -> None:
    longer: list[float] = []
    shares: list[float] = []
    delays: list[float] = []
    for version in SUPPORTED:
        profile = profiles_of(version, "8B")["1"]
        more = with_hooks(profile)
        won = -sum(more[part] for part in BEFORE_THE_GPU)
        longer.append(more[BUILD] - won)
        shares.append(100 * won / more[BUILD])
        first = calls_of(version, "8B")["concurrency 1, 1 tokens"]
        delays.append(first["median_ms"]["off"] * (first["to_off"]["on"]["median"] - 1))
    assert (
        f"the target's choice and launch win back {min(shares):.0f} to {max(shares):.0f}% of what "
        f"the checks take, on 0.20.2 too: its build, choice and launch take {min(longer):.0f} to "
        f"{max(longer):.0f} µs longer with the hooks." in the_page()
    )
    # The longest of the one is where the other is shortest.
    assert longer.index(max(longer)) == delays.index(min(delays))


def test_steps_of_the_8b_pair() -> None:
    at = f"8B at {COMMIT}, concurrency"
    wholes = [figure_of(version, f"{at} 1: on adds {WHERE[1]}") for version in LATER]
    assert all(each["low"] <= 0 <= each["high"] for each in wholes)
    hooks = {version: figure_of(version, f"{at} 1: on adds {WHERE[0]}") for version in LATER}
    assert all(each["value"] < 0 for each in hooks.values())
    by_chance = {
        version: quoted(each, "+.1f").replace(" (", ", ").removesuffix(")")
        for version, each in hooks.items()
        if each["high"] >= 0
    }
    assert (
        "all hooks together take less than what vLLM does in their place, on "
        f"{' and '.join(by_chance)} not by more than chance ({', and '.join(by_chance.values())} "
        "µs)." in the_page()
    )


def test_no_cost_shows_beyond_chance_while_requests_decode() -> None:
    steps = {which: each for which, each in _with_alone("on").items() if which[3] == "steps"}
    assert len(steps) == 18
    assert not _beyond_all(steps)
    assert not _beyond(steps)
    assert "The steps of decoding show no delay, since there" in the_page()
    wide = max(each[OF_ALL][1] for each in steps.values())
    assert (
        f"In none of {len(steps)} was a step of decoding longer beyond chance, and none of them by "
        f"more than {_excluded(wide)}." in the_how_to()
    )
