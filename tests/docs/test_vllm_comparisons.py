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
FIRST_TOKEN: Comparison = ("0.21.0", "8B", 1, "1 tokens")
"""Where the aim was missed."""


def _with_alone(variant: str) -> dict[Comparison, dict[str, Any]]:
    """Return the comparisons of a variant where nothing is rebuilt."""
    found: dict[Comparison, dict[str, Any]] = {}
    for version in LATER:
        for task, ratios in (("end_to_end", "to_off"), ("profile_of_a_step", "steps_to_off")):
            for pair in ("small", "8B"):
                for case, of in times_of(results_of(version), task, pair).items():
                    if case != "commit":
                        # «concurrency 8, 64 tokens», or «8» alone for steps
                        requests, _, what = case.removeprefix("concurrency ").partition(", ")
                        which = version, pair, int(requests), what or "steps"
                        found[which] = of[ratios][variant]
    assert len(found) == COMPARISONS
    return found


def _single(each: dict[str, Any]) -> str:
    return f"{each['median']:.4f} ({each['low']:.4f} to {each['high']:.4f})"


def _beyond(found: dict[Comparison, dict[str, Any]]) -> dict[Comparison, dict[str, Any]]:
    """Those whose 95% interval leaves out 1."""
    return {which: each for which, each in found.items() if not each["low"] <= 1 <= each["high"]}


def _beyond_all(found: dict[Comparison, dict[str, Any]]) -> set[Comparison]:
    """Those whose wide interval leaves out 1."""
    return {which for which, each in found.items() if not each[OF_ALL][0] <= 1 <= each[OF_ALL][1]}


def test_the_aim_of_all_comparisons_together_was_missed_by_one() -> None:
    page = the_page()
    found = _with_alone("on")
    assert _beyond_all(found) == {FIRST_TOKEN}
    assert f"there are {COMPARISONS} comparisons with vLLM alone" in page
    assert f"{COMPARISONS} intervals that are all right at once" in page
    held = f"It was missed: {COMPARISONS - 1} of the wide intervals hold 1, and one does not."
    missed = found[FIRST_TOKEN]
    low, high = missed[OF_ALL]
    version, pair, _, _ = FIRST_TOKEN
    times = times_of(results_of(version), "end_to_end", pair)
    alone = times["concurrency 1, 1 tokens"]["median_ms"]
    assert (
        f"{held} It is the first token of the {pair} pair at one request on {version}: the ratio "
        f"is {missed['median']:.4f}, the wide interval {low:.6f} to {high:.4f}, the single 95% "
        f"interval {missed['low']:.4f} to {missed['high']:.4f}. By the median these are "
        f"{1000 * alone['off'] * (missed['median'] - 1):.0f} µs of {alone['off']:.0f} ms." in page
    )
    said = f"results of commit {COMMIT} it is not: {COMPARISONS - 1} do, and [Borrow"
    assert said in the_readme()


def test_wide_intervals_of_what_differs_by_chance() -> None:
    assert not _beyond_all(_with_alone(AGAIN))
    assert f"and all {COMPARISONS} wide intervals hold it." in the_page()


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
        f"whose calls vary more, {small}." in the_page()
    )


def test_the_page_names_each_single_interval_that_leaves_out_one() -> None:
    page = the_page()
    beyond = _beyond(_with_alone("on"))
    many, step = ("0.21.0", "8B", 32, "64 tokens"), ("0.26.0", "8B", 8, "steps")
    assert set(beyond) == {FIRST_TOKEN, many, step}
    assert all(each["low"] > 1 for each in beyond.values())
    assert len(_beyond(_with_alone(AGAIN))) == 4
    by_chance = {round(0.05 * COMPARISONS): "three"}[3]
    assert f"leave out 1 by chance in about {by_chance} of {COMPARISONS}," in page
    assert (
        "Of `again` four do, of `on` three, all of the 8B pair. Three of those of `again` say that "
        "it takes longer, and all of `on`: the first token above; on 0.21.0 at 32 requests 64 "
        f"tokens, {_single(beyond[many])}; and on 0.26.0 at 8 requests a step of decoding, "
        f"{_single(beyond[step])}." in page
    )
    by_chance_alone = _beyond(_with_alone(AGAIN))
    assert {pair for _, pair, *_ in by_chance_alone} == {"8B"}
    assert sum(each["low"] > 1 for each in by_chance_alone.values()) == 3
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
    assert (
        f"The medians of all four versions are above 1, by {min(later):.0f} to {max(later):.0f} µs "
        f"(the median ratio times the median time) of {min(alone):.0f} to {max(alone):.0f} ms."
        in page
    )
    beyond = [version for version, each in ratios.items() if each["low"] > 1]
    assert f"On {' and '.join(beyond)} the single interval leaves out 1." in page
    highest = max(ratios, key=lambda version: ratios[version]["median"])
    chance = _with_alone(AGAIN)[highest, "8B", 1, "1 tokens"]
    assert chance["median"] > ratios[highest]["median"]
    assert f"On {highest}, where the median is highest, `again` differs by more: " in page
    assert f"differs by more: {_single(chance)}." in page
    shares = [100 * (each["median"] - 1) for each in ratios.values()]
    assert (
        "With the 8B pair, the first token of a lone prompt that runs on a full graph came "
        f"{min(shares):.1f} to {max(shares):.1f}% later in the median, on 0.21.0 alone by more "
        f"than what chance does in {COMPARISONS} comparisons, and barely." in page
    )
    for version in (version for version in SUPPORTED if version != FIRST_TOKEN[0]):
        assert ratios[version][OF_ALL][0] <= 1


def test_what_comes_before_the_launch_of_the_target() -> None:
    longer: list[float] = []
    by_chance: list[float] = []
    explained = list(SUPPORTED)
    for version in SUPPORTED:
        results = results_of(version)
        profile = times_of(results, "profile_of_a_step", "8B")["1"]
        more = with_hooks(profile)
        won = -sum(more[part] for part in BEFORE_THE_GPU)
        assert more[BUILD] / 2 < won < more[BUILD]
        longer.append(more[BUILD] - won)
        first = times_of(results, "end_to_end", "8B")["concurrency 1, 1 tokens"]
        later = 1000 * first["median_ms"]["off"] * (first["to_off"]["on"]["median"] - 1)
        if longer[-1] < later:
            explained.remove(version)
        if AGAIN in profile:
            turns = more_of(profile, (ON_AGAIN, AGAIN), ("on", "off"))
            by_chance.append(abs(sum(turns[part] for part in (BUILD, *BEFORE_THE_GPU))))
    page = the_page()
    assert "choice and launch win back more than half of what the checks take, and not all" in page
    assert (
        f"and not all: the target's build, choice and launch take {min(longer):.0f} to "
        f"{max(longer):.0f} µs longer with the hooks (medians, without intervals; between turns of "
        f"one kind it is up to {max(by_chance):.0f} µs). On all but {' and '.join(explained)} that "
        "is less than the medians of the delay." in page
    )


def test_steps_of_the_8b_pair() -> None:
    page = the_page()
    at = f"8B at {COMMIT}, concurrency"
    wholes = [figure_of(version, f"{at} 1: on adds {WHERE[1]}") for version in LATER]
    assert all(each["low"] <= 0 <= each["high"] for each in wholes)
    hooks = {version: figure_of(version, f"{at} 1: on adds {WHERE[0]}") for version in LATER}
    assert all(each["value"] < 0 for each in hooks.values())
    (by_chance,) = (version for version, each in hooks.items() if each["high"] >= 0)
    said = quoted(hooks[by_chance], "+.0f").replace(" (", ", ").removesuffix(")")
    assert (
        "All hooks together take less in the median than what vLLM does in their place, on "
        f"{by_chance} not by more than chance ({said} µs)".replace("+-", "-")
        in page
    )
    there, whole = (figure_of("0.26.0", f"{at} 8: on adds {where}") for where in WHERE)
    low, high = _with_alone("on")["0.26.0", "8B", 8, "steps"][OF_ALL]
    assert low <= 1 <= high
    assert (
        f"The step at 8 requests on 0.26.0 came out {whole['value']:.0f} µs ({whole['low']:.0f} to "
        f"{whole['high']:.0f}) longer. Its wide interval holds 1, and where the hooks are it is "
        f"{-there['value']:.0f} µs less ({-there['low']:.0f} less to {there['high']:.0f} more)"
        in page
    )


def test_no_cost_shows_beyond_chance_while_requests_decode() -> None:
    steps = {which: each for which, each in _with_alone("on").items() if which[3] == "steps"}
    assert len(steps) == 18
    assert not _beyond_all(steps)
    assert "There steps of decoding take no longer beyond chance." in the_page()
