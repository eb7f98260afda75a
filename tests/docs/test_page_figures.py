"""Figures in the text of the pages are those of the committed results."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PLANNED = ("README.md", "docs/tutorials/choose-capture-sizes.md")


def _results(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))["results"]


def _values(name: str, ending: str, beginning: str = "") -> list[float]:
    return [
        figure["value"]
        for figure in _results(name)["figures"]
        if figure["name"].startswith(beginning) and figure["name"].endswith(ending)
    ]


def _said(page: str) -> str:
    return " ".join((ROOT / page).read_text("utf-8").split())


def _range(values: Iterable[float], digits: int = 0) -> str:
    each = list(values)
    least, most = f"{min(each):.{digits}f}", f"{max(each):.{digits}f}"
    return least if least == most else f"{least} to {most}"


def _percent(ratios: Iterable[float]) -> str:
    return _range(100 * (ratio - 1) for ratio in ratios)


def test_what_a_second_build_costs() -> None:
    saved = _range(_values("gpu/flash_attn", "borrowing saves, host"))
    assert f"costs the host {saved} µs a step" in _said("docs/tutorials/borrow-a-state.md")


def test_what_a_refresh_adds_to_a_flash_attention_build() -> None:
    page = _said("docs/how-to/run-on-flashattention.md")
    added = _range(_values("gpu/flash_attn", ": refresh over build"))
    by_handle = _percent(_values("gpu/flash_attn", "refresh by handle / build"))
    words = f"A refresh adds {added} µs to its build, {by_handle}% of it through a handle"
    assert words in page
    third, second = (
        _percent(_values("gpu/flash_attn", "refresh / build", kind))
        for kind in ("flash_attn3", "flash_attn2")
    )
    assert f"{third}% of a FlashAttention 3 build, {second}% of a FlashAttention 2 one" in _said(
        "README.md"
    )


def test_what_strict_costs_a_replay() -> None:
    (strict,) = _values("gpu/replay", "strict: replay by key")
    assert f"a replay costs {strict:.0f} µs more" in _said("docs/explanation/freshness.md")


def test_what_a_later_move_takes_for_each_node_that_changes() -> None:
    one: list[float] = []
    several: list[float] = []
    for case in _results("gpu/rebind")["details"]:
        again = case["variants"]["again"]["median_us"]
        (one if case["keys"] == 1 else several).append(again / case["nodes_changed"])
    words = f"takes {_range(one)} µs for each node that changes where one key moves, and"
    page = _said("docs/how-to/move-buffers.md")
    assert f"{words} {_range(several)} where several do" in page


@pytest.mark.parametrize("page", PLANNED)
def test_the_table_of_ladders(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    section = text.split("| workload | ladder |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in section.splitlines()]
    workloads = _results("host/planner")["details"]["workloads"]
    expected = [
        [
            "" if position else workload,
            ladder,
            str(found["graphs"]),
            f"{found['padding']:.1%}",
            f"{found['ratio']:.3f}",
            str(found["graphs to match"]),
        ]
        for workload, facts in workloads.items()
        for position, (ladder, found) in enumerate(facts["ladders"].items())
    ]
    assert rows[2:] == expected


def test_what_the_tutorial_says_of_plans() -> None:
    page = _said("docs/tutorials/choose-capture-sizes.md")
    chat, long = (
        _results("host/planner")["details"]["workloads"][name] for name in ("chat", "long-context")
    )
    vllm = long["ladders"]["vLLM"]
    assert f"the {vllm['graphs to match']} best sizes pad no more than they do" in page
    best = vllm["best padded"] / long["tokens"] - 1
    assert (
        f"as many as {vllm['graphs']} would bring padding from {vllm['padding']:.1%} to {best:.1%}"
        in page
    )
    plan = chat["plans"]["16"]
    assert f"{plan['padding']:.1%}" == f"{plan['padding of another trace']:.1%}"
    assert f"pad {plan['padding']:.1%} of the chat workload's, as planned" in page
    plan = long["plans"]["16"]
    assert (
        f"{plan['padding of another trace']:.1%} of the long-context workload's instead of "
        f"{plan['padding']:.1%}" in page
    )
