"""Each numbered guarantee is held by tests that exist, and says which of them need a GPU."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/explanation/guarantees.md").read_text("utf-8")
NUMBER = re.compile(r"^\*\*(\d+)\.\*\* ", re.MULTILINE)
HOLDS = re.compile(r"^- `(tests/[\w/]+\.py)::(\w+)`( \(GPU\))?$", re.MULTILINE)


def _guarantees() -> dict[int, str]:
    _, *parts = NUMBER.split(PAGE)
    numbers = [int(number) for number in parts[::2]]
    assert numbers == list(range(1, len(numbers) + 1))
    return dict(zip(numbers, parts[1::2], strict=True))


_WHOLE_FILE = ("pytestmark = pytest.mark.gpu", "pytestmark = [pytest.mark.gpu]")


@lru_cache
def _tests(file: str) -> dict[str, bool]:
    """Names that pytest collects from a file, and whether they only run on a GPU."""
    found: dict[str, bool] = {}
    body = ast.parse((ROOT / file).read_text("utf-8")).body
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            marks = [ast.unparse(each) for each in node.decorator_list]
            found[node.name] = "pytest.mark.gpu" in marks
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            found[node.name] = False
        elif isinstance(node, ast.Assign):  # the test case of a state machine
            found |= {
                target.id: False
                for target in node.targets
                if isinstance(target, ast.Name) and target.id.startswith("Test")
            }
    if any(ast.unparse(node) in _WHOLE_FILE for node in body):
        return dict.fromkeys(found, True)
    return found


@pytest.mark.parametrize(("number", "text"), _guarantees().items(), ids=str)
def test_a_guarantee_is_held(number: int, text: str) -> None:
    held = HOLDS.findall(text)
    assert held, f"guarantee {number} names no test"
    assert len(held) == len(re.findall(r"^- ", text, re.MULTILINE)), f"{number}: a line is no test"
    for file, name, gpu in held:
        assert (ROOT / file).exists(), f"guarantee {number}: {file}"
        tests = _tests(file)
        assert name in tests, f"guarantee {number}: {file} has no {name}"
        assert tests[name] is bool(gpu), f"guarantee {number}: is {name} for a GPU alone?"


def test_every_named_test_is_in_its_form() -> None:
    """A name with a slip in its spelling would be passed over."""
    assert PAGE.count("::") == len(HOLDS.findall(PAGE))
