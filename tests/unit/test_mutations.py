"""The list of wrong versions fits the library and the tests as they are now."""

from __future__ import annotations

import ast
import functools
from collections import Counter

import pytest

from tests.mutations import MUTATIONS
from tests.mutations.mutation import ROOT, Mutation

each = pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)


@functools.cache
def _tests_in(file: str) -> frozenset[str]:
    """Ids of the functions, methods and assigned classes (of a state machine) in a test file."""
    found: set[str] = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            found.update(f"{file}::{name}::runTest" for name in names)
        elif isinstance(node, ast.FunctionDef):
            found.add(f"{file}::{node.name}")
        elif isinstance(node, ast.ClassDef):
            methods = [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
            found.update(f"{file}::{node.name}::{name}" for name in methods)
    return frozenset(found)


@each
def test_it_changes_one_place(mutation: Mutation) -> None:
    assert mutation.places() == 1
    assert mutation.old != mutation.new
    assert ast.parse(mutation.applied()) is not None


@each
def test_its_tests_exist(mutation: Mutation) -> None:
    assert mutation.tests
    for test in mutation.tests:
        assert test in _tests_in(test.split("::")[0])


def test_names_are_unique() -> None:
    assert [name for name, n in Counter(each.name for each in MUTATIONS).items() if n > 1] == []


def test_no_wrong_version_is_listed_twice() -> None:
    made = Counter((each.file, each.applied()) for each in MUTATIONS)
    assert [n for n in made.values() if n > 1] == []
