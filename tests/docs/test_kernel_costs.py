"""The tables of what kernels' states cost and save say what the committed results say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {
    "flash_attn": {"FlashAttention 2": "flash_attn2", "FlashAttention 3": "flash_attn3"},
    "flashinfer": {
        "decode": "decode",
        "FA2": "fa2",
        "FA3": "fa3",
        "BatchAttention": "batch_attention",
    },
}
FILES = {"flash_attn": "run-on-flashattention.md", "flashinfer": "run-on-flashinfer.md"}
FIGURES = {"a build": "build", "a refresh, in builds": "refresh / build",
           "the same calls by hand": "by hand"}  # fmt: skip
REQUESTS = (1, 8, 64, 256)


def _rows(benchmark: str) -> list[tuple[str, str, list[str]]]:
    page = (ROOT / "docs" / "how-to" / FILES[benchmark]).read_text("utf-8")
    section = page.split("## What it costs, and saves")[1].split("\n## ")[0]
    rows, kernel = [], ""
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 2 + len(REQUESTS) and cells[0] != "requests" and "---" not in cells[0]:
            kernel = cells[0] or kernel
            rows.append((kernel, cells[1], cells[2:]))
    return rows


@pytest.mark.parametrize("benchmark", PAGES)
def test_the_table_of_a_library(benchmark: str) -> None:
    path = ROOT / "benchmarks" / "results" / "gpu" / f"{benchmark}.json"
    figures = {
        each["name"]: each["value"]
        for each in json.loads(path.read_text("utf-8"))["results"]["figures"]
    }
    rows = _rows(benchmark)
    assert {kernel for kernel, _, _ in rows} == set(PAGES[benchmark])
    assert len(rows) == 5 * len(PAGES[benchmark])
    for kernel, what, cells in rows:
        name = PAGES[benchmark][kernel]
        values = [figures[f"{name}, {n} requests: {FIGURES.get(what, what)}"] for n in REQUESTS]
        digits = 2 if what == "a refresh, in builds" else 0
        assert cells == [f"{value:,.{digits}f}" for value in values], (kernel, what)
