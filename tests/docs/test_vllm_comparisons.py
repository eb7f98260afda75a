"""The page tells how vLLM compared with vLLM alone end to end, as the committed results say."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.vllm._variants import AGAIN, COMPARISONS, OF_ALL, ON_AGAIN
from graphshare.adapters.vllm.versions import SUPPORTED
from tests.vllm_results import (
    BUILD,
    COMMIT,
    LATER,
    WHERE,
    figure_of,
    more_of,
    quoted,
    results_of,
    the_page,
    the_readme,
    times_of,
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
    """Return the comparisons of a variant where nothing is rebuilt."""
    found: dict[Comparison, dict[str, Any]] = {}
    for version in LATER:
        for task, ratios in (("end_to_end", "to_off"), ("profile_of_a_step", "steps_to_off")):
            for pair in ("small", "8B"):
                for case, of in times_of(results_of(version), task, pair).items():
                    if case != "commit":
                        found[_of_case(version, pair, case)] = of[ratios][variant]
    assert len(found) == COMPARISONS
    return found


def _of_case(version: str, pair: str, case: str) -> Comparison:
    # «concurrency 8, 64 tokens», or «8» alone for steps
    requests, _, what = case.removeprefix("concurrency ").partition(", ")
    return version, pair, int(requests), what or "steps"


def _earlier(run: str, variant: str) -> dict[Comparison, dict[str, Any]]:
    """As :func:`_with_alone`, of a run before that of the committed results."""
    return {
        _of_case(each["vllm"], each["pair"], each["case"]): each[variant]
        for each in results_of("earlier")["comparisons"]
        if each["run"] == run
    }


def _single(each: dict[str, Any]) -> str:
    return f"{each['median']:.4f} ({each['low']:.4f} to {each['high']:.4f})"


def _beyond(found: dict[Comparison, dict[str, Any]]) -> dict[Comparison, dict[str, Any]]:
    """Those whose 95% interval leaves out 1."""
    return {which: each for which, each in found.items() if not each["low"] <= 1 <= each["high"]}


def _beyond_all(found: dict[Comparison, dict[str, Any]]) -> set[Comparison]:
    """Those whose wide interval leaves out 1."""
    return {which for which, each in found.items() if not each[OF_ALL][0] <= 1 <= each[OF_ALL][1]}


def test_the_aim_of_all_comparisons_together_is_met() -> None:
    page = the_page()
    assert not _beyond_all(_with_alone("on"))
    assert f"there are {COMPARISONS} comparisons with vLLM alone" in page
    assert f"{COMPARISONS} intervals that are all right at once" in page
    assert f"It was met: all {COMPARISONS} hold 1." in page
    assert f"In the results of commit {COMMIT} they do." in the_readme()
    assert (
        f"no difference from vLLM alone showed beyond chance in {COMPARISONS} comparisons." in page
    )


def test_the_aim_was_missed_by_one_in_the_run_before() -> None:
    found = _earlier("2b1a24e", "on")
    assert len(found) == COMPARISONS
    assert _beyond_all(found) == {MISSED}
    low, high = found[MISSED][OF_ALL]
    page, readme = the_page(), the_readme()
    assert (
        f"of commit 2b1a24e, {COMPARISONS - 1} of the {COMPARISONS} held 1, and one did not: the "
        f"first token of the 8B pair at one request on 0.21.0, {low:.6f} to {high:.4f}." in page
    )
    assert f"In the run before, of commit 2b1a24e, {COMPARISONS - 1} did." in readme
    assert f"was missed in one of {COMPARISONS} comparisons in the run before" in readme


def test_the_aim_was_met_in_the_run_before_that() -> None:
    found, more = (_earlier(run, "on") for run in ("86f4d5f", "86f4d5f, once more"))
    assert len(found) == COMPARISONS
    assert {pair for _, pair, *_ in more} == {"8B"}
    assert not _beyond_all(found)
    assert not _beyond_all(more)
    assert (
        f"all {COMPARISONS} held 1, and so did {len(more)} of the 8B pair's `generate` that ran "
        "once more." in the_page()
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
    said = {key: f"{math.ceil(1000 * (each - 1)) / 10:.1f}%" for key, each in highest.items()}
    assert (
        f"They exclude steps that are more than {said['both', 'steps']} longer; with the 8B pair, "
        f"first tokens that come {said['8B', '1 tokens']} later, and 64 tokens that take "
        f"{said['8B', '64 tokens']} longer; with the small pair, whose calls vary more, "
        f"{said['small', '1 tokens']} and {said['small', '64 tokens']}." in the_page()
    )


def test_the_page_names_each_single_interval_that_leaves_out_one() -> None:
    page = the_page()
    beyond = _beyond(_with_alone("on"))
    few, many = ("0.21.0", "8B", 8, "64 tokens"), ("0.26.0", "8B", 32, "64 tokens")
    first = ("0.21.0", "8B", 8, "1 tokens")
    assert set(beyond) == {few, many, first}
    assert len(_beyond(_with_alone(AGAIN))) == 4
    by_chance = {round(0.05 * COMPARISONS): "three"}[3]
    assert f"leave out 1 by chance in about {by_chance} of {COMPARISONS}," in page
    assert all(beyond[which]["low"] > 1 for which in (few, many))
    assert beyond[first]["high"] < 1
    narrow = beyond[few]
    assert (
        "Of `again` four do, of `on` three. Two of these say that it takes longer with the hooks, "
        f"on the 8B pair: on 0.21.0 at 8 requests 64 tokens, {narrow['median']:.4f} "
        f"({narrow['low']:.5f} to {narrow['high']:.4f}), and on 0.26.0 at 32 requests 64 tokens, "
        f"{_single(beyond[many])}. One says that it takes less: on 0.21.0 with the 8B pair at 8 "
        f"requests the first token, {_single(beyond[first])}." in page
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
        case = times_of(results_of(version), "end_to_end", "8B")["concurrency 1, 1 tokens"]
        ratios[version] = case["to_off"]["on"]
        alone.append(case["median_ms"]["off"])
        later.append(1000 * alone[-1] * (ratios[version]["median"] - 1))
    assert all(each["median"] > 1 for each in ratios.values())
    for each in ratios.values():
        assert each["low"] <= 1 <= each["high"]
        assert each[OF_ALL][0] <= 1 <= each[OF_ALL][1]
    runs = dict.fromkeys(each["run"] for each in results_of("earlier")["comparisons"])
    earlier = [
        _earlier(run, "on")[(version, *FIRST_TOKEN)]["median"] for run in runs for version in LATER
    ]
    assert (len(earlier), min(earlier) > 1) == (9, True)
    assert (
        "No interval leaves out 1; but the medians of all four versions are above it, by "
        f"{min(later):.0f} to {max(later):.0f} µs (the median ratio times the median time) of "
        f"{min(alone):.0f} to {max(alone):.0f} ms, and so are all nine of the earlier runs, by "
        f"{100 * (min(earlier) - 1):.1f} to {100 * (max(earlier) - 1):.1f}%." in page
    )
    shares = [100 * (each["median"] - 1) for each in ratios.values()]
    assert (
        "Only of the first token of a lone prompt that runs on a full graph, with the 8B pair, all "
        f"medians say that it comes later, by {min(shares):.1f} to {max(shares):.1f}%." in page
    )


def test_what_comes_before_the_launch_of_the_target() -> None:
    longer: list[float] = []
    shares: list[float] = []
    by_chance: list[float] = []
    for version in SUPPORTED:
        profile = times_of(results_of(version), "profile_of_a_step", "8B")["1"]
        more = with_hooks(profile)
        won = -sum(more[part] for part in BEFORE_THE_GPU)
        longer.append(more[BUILD] - won)
        shares.append(100 * won / more[BUILD])
        if AGAIN in profile:
            turns = more_of(profile, (ON_AGAIN, AGAIN), ("on", "off"))
            by_chance.append(abs(sum(turns[part] for part in (BUILD, *BEFORE_THE_GPU))))
    assert (
        f"choice and launch win back {min(shares):.0f} to {max(shares):.0f}% of what the checks "
        f"take: the target's build, choice and launch take {min(longer):.0f} to {max(longer):.0f} "
        "µs longer with the hooks (medians, without intervals; between turns of one kind it is up "
        f"to {max(by_chance):.0f} µs)." in the_page()
    )


def test_steps_of_the_8b_pair() -> None:
    at = f"8B at {COMMIT}, concurrency"
    wholes = [figure_of(version, f"{at} 1: on adds {WHERE[1]}") for version in LATER]
    assert all(each["low"] <= 0 <= each["high"] for each in wholes)
    hooks = {version: figure_of(version, f"{at} 1: on adds {WHERE[0]}") for version in LATER}
    assert all(each["value"] < 0 for each in hooks.values())
    by_chance = {
        version: quoted(each, "+.0f").replace(" (", ", ").removesuffix(")")
        for version, each in hooks.items()
        if each["high"] >= 0
    }
    assert (
        "All hooks together take less in the median than what vLLM does in their place, on "
        f"{' and '.join(by_chance)} not by more than chance ({', and '.join(by_chance.values())} "
        "µs)." in the_page()
    )


def test_no_cost_shows_beyond_chance_while_requests_decode() -> None:
    steps = {which: each for which, each in _with_alone("on").items() if which[3] == "steps"}
    assert len(steps) == 18
    assert not _beyond_all(steps)
    assert "In these steps themselves nothing of the kind shows on 0.21.0 to 0.26.0" in the_page()
