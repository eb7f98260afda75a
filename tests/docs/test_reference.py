"""The reference has every public name once; its pages are in the table of contents by a glob."""

from __future__ import annotations

import importlib
import inspect
import re
from collections import Counter
from pathlib import Path
from typing import Any

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


def _object(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _methods() -> list[tuple[str, Any]]:
    """Class and method, of the classes that the reference has and the methods named for them."""
    pages = "".join(page.read_text("utf-8") for page in sorted(REFERENCE.glob("*.md")))
    named = re.findall(r"^\.\. automethod:: ([\w.]+)\.(\w+)$", pages, re.MULTILINE)
    methods = [(owner, getattr(_object(owner), method)) for owner, method in named]
    for name in _documented():
        found = _object(name)
        if inspect.isclass(found):
            methods += [
                (name, method)
                for member, method in vars(found).items()
                if inspect.isfunction(method) and not member.startswith("_")
            ]
    return methods


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


def test_methods_go_by_the_class_that_users_know() -> None:
    """Python says the name where a call has wrong arguments."""
    methods = _methods()
    assert len(methods) > 50
    for owner, method in methods:
        assert method.__qualname__ == f"{owner.rpartition('.')[2]}.{method.__name__}"
