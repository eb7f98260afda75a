"""The benchmarks' README owns up to each target that a committed result misses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def _figures() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(RESULTS.glob("*/*.json")):
        content = json.loads(path.read_text("utf-8"))
        results = content.get("results") if isinstance(content, dict) else None
        for figure in results.get("figures", ()) if isinstance(results, dict) else ():
            yield f"{path.parent.name}/{path.stem}", figure


def _rows() -> dict[str, tuple[str, str, str]]:
    text = (ROOT / "benchmarks" / "README.md").read_text("utf-8")
    section = text.split("**Targets that the committed results miss:**")[1].split("\n\n")[1]
    rows = re.findall(r"^\| `(.+?)` \| (.+?) \| (.+?) \| (.+?) \|$", section, re.MULTILINE)
    return {name: (figure, worst, target) for name, figure, worst, target in rows}


def test_every_missed_target_is_owned_up_to_and_no_other() -> None:
    missed: dict[str, list[dict[str, Any]]] = {}
    for name, figure in _figures():
        if figure.get("met") is False:
            missed.setdefault(name, []).append(figure)
    rows = _rows()
    assert set(rows) == set(missed)
    for name, figures in missed.items():
        worst = max(figures, key=lambda each: each["value"] / each["target"])
        _, said, target = rows[name]
        assert float(said) == round(worst["value"], 3)
        assert float(target) == worst["target"]


def test_refreshes_against_the_calls_by_hand() -> None:
    page = (ROOT / "docs" / "how-to" / "run-on-flashattention.md").read_text("utf-8")
    said = " ".join(page.split())
    for kind, words in (
        ("flash_attn2", "{} to {} of the same calls by hand on FlashAttention 2"),
        ("flash_attn3", "{} to {} on FlashAttention 3"),
    ):
        found = [
            figure["value"]
            for name, figure in _figures()
            if name == "gpu/flash_attn"
            and figure["name"].startswith(kind)
            and figure["name"].endswith("refresh / by hand")
        ]
        assert words.format(f"{min(found):.2f}", f"{max(found):.2f}") in said
