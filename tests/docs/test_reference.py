"""The reference has every public name once; its pages are in the table of contents by a glob."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from pathlib import Path

import pytest

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
DIRECTIVE = re.compile(
    r"^\.\. (?:auto(?:class|data|exception|function)|py:data|currentmodule):: ([\w.]+)$",
    re.MULTILINE,
)
FENCE = re.compile(r"^```\{eval-rst\}\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _documented() -> Counter[str]:
    found: Counter[str] = Counter()
    for page in sorted(REFERENCE.glob("*.md")):
        for block in FENCE.findall(page.read_text("utf-8")):
            module = ""
            for line in DIRECTIVE.finditer(block):
                name = line[1]
                if "currentmodule" in line[0]:
                    module = f"{name}."
                else:
                    found[name if name.startswith("graphshare.") else module + name] += 1
    return found


@pytest.mark.parametrize(
    "package",
    [
        "graphshare",
        "graphshare.capture",
        "graphshare.planning",
        "graphshare.provenance",
        "graphshare.testing",
    ],
)
def test_every_public_name_is_in_the_reference_once(package: str) -> None:
    public = importlib.import_module(package).__all__
    documented = _documented()
    counts = {name: documented[f"{package}.{name}"] for name in public}
    assert {name: count for name, count in counts.items() if count != 1} == {}


def test_nothing_is_documented_twice() -> None:
    assert [name for name, count in _documented().items() if count > 1] == []


def test_what_is_documented_exists() -> None:
    """Sphinx says so too, but a test needs no Sphinx."""
    for name in _documented():
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name
