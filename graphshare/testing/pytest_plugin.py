"""A pytest fixture; needs pytest.

In a ``conftest.py``::

    pytest_plugins = ["graphshare.testing.pytest_plugin"]

and in a test::

    def test_my_owner(owner_conforms):
        owner_conforms(MyOwner(), keys, batches)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import pytest

from graphshare.testing.conformance import OwnerDoesNotConform, check_owner
from graphshare.testing.report import Report

__all__ = ["ConformanceChecker", "owner_conforms"]


class ConformanceChecker(Protocol):
    """What the fixture is."""

    def __call__(self, owner: Any, keys: Iterable[Any], batches: Any, **options: Any) -> Report:
        """Check an owner as :func:`graphshare.testing.assert_owner_conforms` does."""
        ...


@pytest.fixture
def owner_conforms(request: pytest.FixtureRequest) -> ConformanceChecker:
    """:func:`graphshare.testing.assert_owner_conforms` that leaves its reports with the test.

    If the test fails later, pytest shows what was found of the owners that conformed, their facts
    and what was not checked, in a section of its own; ``pytest -rP`` always does.
    """
    node: Any = request.node

    def check(owner: Any, keys: Iterable[Any], batches: Any, **options: Any) -> Report:
        report = check_owner(owner, keys, batches, **options)
        if not report.ok:
            raise OwnerDoesNotConform(report)
        node.add_report_section("call", "owner conformance", str(report))
        return report

    return check
