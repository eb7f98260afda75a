"""The README's table of savings says what the committed results say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = {
    "FlashAttention 2": ("flash_attn", "flash_attn2"),
    "FlashAttention 3": ("flash_attn", "flash_attn3"),
    "FlashInfer, decode": ("flashinfer", "decode"),
    "FlashInfer, FA2": ("flashinfer", "fa2"),
    "FlashInfer, FA3": ("flashinfer", "fa3"),
    "FlashInfer, BatchAttention": ("flashinfer", "batch_attention"),
}
COLUMNS = ("by hand", "build", "borrowing saves, host", "borrowing saves, GPU waited for")


def _figures(name: str) -> dict[str, float]:
    path = ROOT / "benchmarks" / "results" / "gpu" / f"{name}.json"
    figures = json.loads(path.read_text("utf-8"))["results"]["figures"]
    return {each["name"]: each["value"] for each in figures}


def _readme() -> str:
    return (ROOT / "README.md").read_text("utf-8")


def _rows() -> list[tuple[str, str, list[str]]]:
    section = _readme().split("## What it saves, and what it costs")[1].split("\n## ")[0]
    rows, kernel = [], ""
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[1].isdigit():
            kernel = cells[0] or kernel
            rows.append((kernel, cells[1], cells[2:]))
    return rows


def test_every_kernel_is_there() -> None:
    assert {kernel for kernel, _, _ in _rows()} == set(KERNELS)


@pytest.mark.parametrize("row", _rows(), ids=lambda row: f"{row[0]}, {row[1]}")
def test_savings(row: tuple[str, str, list[str]]) -> None:
    kernel, requests, cells = row
    benchmark, name = KERNELS[kernel]
    figures = _figures(benchmark)
    assert cells == [f"{figures[f'{name}, {requests} requests: {c}']:,.0f}" for c in COLUMNS]


def test_costs() -> None:
    replay, refresh, rebind = map(_figures, ("replay", "refresh", "rebind"))
    said = " ".join(_readme().split())
    assert f"{replay['fast: replay by key']:.2f} µs beside" in said
    assert f"the {replay['fast: a bare launch']:.1f} µs of a bare launch" in said
    equal = replay["fast: replay by an equal key"]
    assert f"by one that is only equal to it {equal:.2f} µs" in said
    assert f"by a handle of `pool.bind` {replay['fast: replay by bind']:.2f} µs" in said
    check = refresh["16 tensors, 8 host values, one key: check"]
    assert f"refresh {check:.1f} µs for 16 tensors" in said
    added = [value for name, value in refresh.items() if name.endswith(": refresh")]
    added += [v for n, v in _figures("flash_attn").items() if n.endswith("refresh over build")]
    lowest, highest = map(int, re.findall(r"build (\d+) to (\d+) µs", said)[0])
    assert lowest <= min(added)
    assert round(max(added)) <= highest
    once = [rebind[f"32 layers, {keys} keys: rebind (again) / recapture"] for keys in (1, 24)]
    assert [round(1 / share) for share in once] == [66, 65]
    assert "a 66th of capturing it anew" in said
    assert "for 24 keys, a 65th" in said


def test_the_page_on_moves() -> None:
    page = (ROOT / "docs" / "how-to" / "move-buffers.md").read_text("utf-8")
    path = ROOT / "benchmarks" / "results" / "gpu" / "rebind.json"
    for each in json.loads(path.read_text("utf-8"))["results"]["details"]:
        counts = [each[name] for name in ("layers", "keys", "nodes", "nodes_changed")]
        again, anew, first = (
            each["variants"][name]["median_us"] / 1e3 for name in ("again", "recapture", "first")
        )
        cells = [*(f"{count:,}" for count in counts), f"{anew:.1f}", f"{first:.1f}", f"{again:.2f}"]
        assert f"| {' | '.join(cells)} |" in page
