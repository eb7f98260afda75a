"""The page on errors knows every error and every reason for staleness, with a remedy."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from graphshare import GraphShareError, Staleness, errors

PAGE = (Path(__file__).parents[2] / "docs/reference/errors.md").read_text("utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| `")]
KINDS = [name for name in errors.__all__ if name != GraphShareError.__name__]
TREE = re.compile(r"^ *Exception\n(?: +[└├│].*\n?)+", re.MULTILINE)


def test_the_tree_is_that_of_the_docstring() -> None:
    (shown,) = TREE.findall(PAGE)
    (documented,) = TREE.findall(inspect.cleandoc(errors.__doc__ or ""))
    assert [line.strip() for line in shown.splitlines()] == [
        line.strip() for line in documented.splitlines()
    ]


@pytest.mark.parametrize("name", KINDS)
def test_each_error_has_a_row(name: str) -> None:
    (row,) = [row for row in ROWS if row.startswith(f"| `{name}` |")]
    assert all(cell.strip() for cell in row.strip("|").split("|"))


# A state that was released raises an error of its own.
@pytest.mark.parametrize("why", [each for each in Staleness if each is not Staleness.RELEASED])
def test_each_reason_has_a_row(why: Staleness) -> None:
    named = [row for row in ROWS if f'`"{why.value}"`' in row.split(" | ")[0]]
    assert len(named) == 1
