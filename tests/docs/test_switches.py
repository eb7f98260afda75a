"""The page on switches names every variable that is read, and every switch of a pool."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from graphshare import GraphPool

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference/switches.md").read_text("utf-8")
VARIABLE = re.compile(r"\bGRAPHSHARE_[A-Z_]+\b")
# What is no switch but what the pool is about; and what only foreign keys need.
SUBJECTS = {"self", "name", "owner", "spec", "device", "covers", "cost", "state_key"}


def _named_in(folder: str) -> set[str]:
    files = [file for file in (ROOT / folder).rglob("*.py") if file != Path(__file__)]
    assert files
    return {name for file in files for name in VARIABLE.findall(file.read_text("utf-8"))}


def test_every_variable_is_named() -> None:
    read = _named_in("graphshare") | _named_in("tests") | _named_in("benchmarks")
    assert read == set(VARIABLE.findall(PAGE))


def test_every_switch_of_a_pool_is_named() -> None:
    options = set(inspect.signature(GraphPool.__init__).parameters) - SUBJECTS
    (section,) = re.findall(r"^## Of a pool$(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
    assert {name for name in options if f"`{name}`" not in section} == set()
