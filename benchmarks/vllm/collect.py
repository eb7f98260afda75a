"""One file of what scenarios of one version found: ``python -m benchmarks.vllm.collect --help``.

Tokens and drafts of each switch are compared with those of vLLM alone in another process. Where two
scenarios did the same thing, the one that is named later counts; times that were taken once more
stay beside the first, as those of several commits do.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._measure import Ratio
from benchmarks._turns import Figure, print_figures
from benchmarks.vllm._models import PAIRS
from benchmarks.vllm._profile import HOOKED
from benchmarks.vllm._variants import SECONDS, SHARE

_KEPT_OF_TOKENS = ("digest", "drafts_digest", "steps", "most_at_once", "target_ran", "draft_ran")
_KEPT_OF_STATISTICS = (
    "active", "borrowed", "builds_avoided", "verified", "steered", "refusals", "graphs",
    "graph_bytes",
)  # fmt: skip
_TIMES = {"profile": "profile_of_a_step", "endtoend": "end_to_end"}

Found = Mapping[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("found", nargs="+", type=Path, help="what scenarios wrote")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument(
        "--earlier",
        type=Path,
        help="what was collected before: its times of the 8B pair are kept, which take long",
    )
    options = parser.parse_args(arguments)
    scenarios = {str(path): json.loads(path.read_text()) for path in options.found}
    versions = {each["start"]["vllm"] for each in scenarios.values()}
    if len(versions) != 1:
        raise SystemExit(f"expected one version of vLLM, got {sorted(versions)}")
    result = {
        "vllm": versions.pop(),
        "machines": _machines(scenarios.values()),
        "command": "python -m benchmarks.vllm.scenario TASKS..., a process each; then "
        "python -m benchmarks.vllm.collect",
        "results": {
            "figures": [figure.facts() for figure in _figures(scenarios)],
            "tokens": _tokens(scenarios),
            "short_prompts_among_decodes": dict(_short_prompts(scenarios)),
            "what_the_draft_captured_on": dict(_captured_on(scenarios)),
            "builds_while_serving": dict(_of(scenarios, "builds")),
            "planted_faults": dict(_of(scenarios, "faults")),
            "a_step_that_goes_on_with_another_key": dict(_of(scenarios, "die")),
            **{name: dict(_of(scenarios, task, by_commit=True)) for task, name in _TIMES.items()},
        },
    }
    if options.earlier is not None:
        _keep(result, json.loads(options.earlier.read_text()))
    print_figures(result["results"]["figures"])
    options.json.write_text(json.dumps(result, indent=1) + "\n")


def _keep(result: dict[str, Any], earlier: Found) -> None:
    kept = [each for each in earlier["results"]["figures"] if each["name"].startswith("8B at")]
    names = {each["name"] for each in result["results"]["figures"]}
    result["results"]["figures"] += [each for each in kept if each["name"] not in names]
    commits: set[str] = set()
    for name in _TIMES.values():
        for label, found in earlier["results"][name].items():
            if ", 8B," in label and "failed" not in found:
                result["results"][name].setdefault(label, found)
                commits.add(found["commit"])
    result["machines"] += [
        each
        for each in earlier["machines"]
        if each["commit"] in commits and each not in result["machines"]
    ]


def _machines(scenarios: Iterable[Found]) -> list[Found]:
    """The different ones, by day; how busy each was at its start is left out."""
    seen: list[Found] = []
    for scenario in scenarios:
        machine = dict(scenario["machine"])
        machine.pop("load", None)
        machine["when"] = machine["when"][:10]
        if machine not in seen:
            seen.append(machine)
    return seen


def _label(scenario: Found) -> str:
    options = scenario["options"]
    backend = "Triton" if options["backend"] == "TRITON_ATTN" else "FlashAttention 3"
    pair = PAIRS[options["pair"]]
    head_size = pair["hidden_size"] // pair["num_attention_heads"]
    method = {"eagle": "EAGLE", "eagle3": "EAGLE-3"}[options["method"]]
    size = "8B" if options["pair"] == "8b" else "small"
    return f"{options['cudagraph_mode']}, {backend}, {size}, head size {head_size}, {method}"


def _switch(scenario: Found) -> str:
    switch = scenario["switch"]
    return f"GRAPHSHARE_VLLM={switch}" if switch else "vllm alone"


def _whole(scenario: Found, task: str) -> Any:
    found = scenario.get(task)
    if isinstance(found, dict) and "failed" in found:
        return {"failed": found["failed"]}
    return found


def _tokens(scenarios: Mapping[str, Found]) -> dict[str, Any]:
    alone: dict[str, Found] = {}
    for each in scenarios.values():
        if not each["switch"] and "tokens" in each:
            if "failed" in each["tokens"]:
                raise SystemExit(f"vLLM alone failed: {_label(each)}: {each['tokens']['failed']}")
            before = alone.setdefault(_label(each), each["tokens"])
            if not _same(before, each["tokens"]):
                raise SystemExit(f"vLLM alone differs from vLLM alone: {_label(each)}")
    result: dict[str, Any] = {}
    for each in scenarios.values():
        tokens, label = _whole(each, "tokens"), _label(each)
        if tokens is None or label not in alone:
            continue
        entry = result.setdefault(label, {"vllm alone": _short(alone[label])})
        if each["switch"]:
            name = _switch(each)
            if set(tokens) < set(alone[label]):
                name += f", concurrency {', '.join(tokens)}"
            entry[name] = {
                "commit": each["machine"]["commit"],
                "tokens_and_drafts_equal": "failed" not in tokens and _same(tokens, alone[label]),
                **_changed(tokens, alone[label]),
                "statistics_of_the_process": {
                    name: each["statistics"][name] for name in _KEPT_OF_STATISTICS
                },
                "faults_planted_in_the_process": "faults" in each or "die" in each,
            }
        elif each["tokens"] is not alone[label]:
            entry["vllm alone, another process"] = {"tokens_and_drafts_equal": True}
    return result


def _same(one: Found, other: Found) -> bool:
    return set(one) <= set(other) and all(
        one[c][what] == other[c][what] for c in one for what in ("tokens", "drafts_digest")
    )


def _changed(one: Found, alone: Found) -> Found:
    """What the draft ran, where that is not what it ran alone."""
    if "failed" in one:
        return one
    ran = {c: one[c]["draft_ran"] for c in one if one[c]["draft_ran"] != alone[c]["draft_ran"]}
    return {"draft_ran": ran} if ran else {}


def _short(tokens: Found) -> Found:
    return {
        concurrency: {
            **{name: each[name] for name in _KEPT_OF_TOKENS if name in each},
            "fewest_distinct_of_64": min(each["distinct"]),
        }
        for concurrency, each in tokens.items()
    }


def _short_prompts(scenarios: Mapping[str, Found]) -> Iterator[tuple[str, Any]]:
    found = {path: each["short_prompts"] for path, each in scenarios.items() if _ran(each)}
    alone = {_label(scenarios[p]): each for p, each in found.items() if not scenarios[p]["switch"]}
    for path, each in found.items():
        scenario = scenarios[path]
        other = alone.get(_label(scenario))
        same = [each[what] == other[what] for what in ("tokens", "drafts_digest")] if other else []
        yield (
            f"{_label(scenario)}, {_switch(scenario)}",
            {
                "commit": scenario["machine"]["commit"],
                "target_and_draft_ran": each["target_and_draft_ran"],
                "steered": each["steered"],
                **({"tokens_and_drafts_equal": all(same)} if scenario["switch"] and other else {}),
            },
        )


def _ran(scenario: Found) -> bool:
    return "steered" in scenario.get("short_prompts", {})


def _captured_on(scenarios: Mapping[str, Found]) -> Iterator[tuple[str, Any]]:
    for each in scenarios.values():
        seen = each.get("draft_saw")
        if isinstance(seen, list) and seen:
            right = sum(one["query_lens_right"] and one["seq_lens_right"] for one in seen)
            wrong = [one for one in seen if not (one["query_lens_right"] and one["seq_lens_right"])]
            yield (
                f"{_label(each)}, {_switch(each)}",
                {
                    "warmups_looked_at": len(seen),
                    "on_their_own_contents": right,
                    **({"for_example": wrong[0]} if wrong else {}),
                },
            )


def _of(
    scenarios: Mapping[str, Found], task: str, *, by_commit: bool = False
) -> Iterator[tuple[str, Any]]:
    names: set[str] = set()
    for each in scenarios.values():
        found = _whole(each, task)
        if found is not None:
            commit = each["machine"]["commit"]
            name = f"{_label(each)}, {_switch(each)}"
            if by_commit:
                name = _another(f"{name}, at {commit[:7]}", names)
            yield name, {"commit": commit, **{key: _short_of(of) for key, of in found.items()}}


def _another(name: str, names: set[str]) -> str:
    """Return a name that is not among these, and count it among them."""
    while name in names:
        name += ", once more"
    names.add(name)
    return name


def _short_of(found: Any) -> Any:
    """Without the times of each call."""
    if isinstance(found, dict):
        return {name: each for name, each in found.items() if name != SECONDS}
    return found


def _figures(scenarios: Mapping[str, Found]) -> Iterator[Figure]:
    """Times that graphshare is held to; the hooks are compared with a step of vLLM alone.

    What is kept of what skipping saves is judged by steps in turns: calls of ``generate`` are too
    few, and too far apart.
    """
    names: dict[str, set[str]] = {task: set() for task in _TIMES}
    for each in scenarios.values():
        size = "8B" if each["options"]["pair"] == "8b" else "small"
        at = f"{size} at {each['machine']['commit'][:7]}"
        found = {task: _measured(each, task) for task in _TIMES}
        pairs = {task: _another(at, names[task]) for task, times in found.items() if times}
        for concurrency, profile in found["profile"].items():
            yield from _of_a_step(f"{pairs['profile']}, concurrency {concurrency}", profile)
        for case, times in found["endtoend"].items():
            pair = pairs["endtoend"]
            for variant, ratio in times["to_off"].items():
                yield _ratio(f"{pair}, {case}: {variant} / vLLM alone", ratio)


def _of_a_step(where: str, profile: Found) -> Iterator[Figure]:
    alone = Ratio(**profile["step_of_vllm_alone_us"])
    yield Figure.of(f"{where}: a step of vLLM alone, host", alone, "us")
    rebuilds = "skipped" in profile
    for name in profile["steps_to_off"]:
        for what, added in profile[f"{name}_adds_us"].items():
            hooks = name == "on" and what == HOOKED and not rebuilds
            limit = alone.median / 100 if hooks else None
            yield Figure.of(f"{where}: {name} adds {what}", Ratio(**added), "us", limit)
        ratio = profile["steps_to_off"][name]
        yield _ratio(f"{where}, steps by turns: {name} / vLLM alone", ratio)
    for what, share in profile.get(SHARE, {}).items():
        if profile["skipped_adds_us"][what]["high"] < 0:  # else there is nothing to save
            yield _missed(f"{where}, {what}", share)


def _ratio(name: str, found: Found) -> Figure:
    interval = Ratio(*(found[each] for each in Ratio._fields))
    return Figure.of(name, interval, "ratio")


def _missed(where: str, share: Found) -> Figure:
    missed = Ratio(1 - share["median"], 1 - share["high"], 1 - share["low"])
    return Figure.of(f"{where}: not saved of what skipping saves", missed, "share", 0.1)


def _measured(scenario: Found, task: str) -> Found:
    found = scenario.get(task) or {}
    return {} if "failed" in found else found


if __name__ == "__main__":
    main()
