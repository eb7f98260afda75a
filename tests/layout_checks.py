"""The ways in which a layout is checked, for tests that each of them has to pass.

A test module takes part by importing a fixture: ``from tests.layout_checks import each_way``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from graphshare import refreshing
from graphshare.state import LayoutChecker, checker


# For a module, since Hypothesis refuses fixtures that are made anew for each test function.
@pytest.fixture(scope="module", autouse=True, params=["learned", "learning", "plain"])
def each_way(request: pytest.FixtureRequest) -> Iterator[str]:
    """``learned``: each checker has seen the state of its capture, so that it has guards.

    ``learning``: it sees its first state in the test. ``plain``: torch has no guards.
    """
    original = LayoutChecker.__init__

    def learned(self: LayoutChecker, state: Any, *args: Any, **options: Any) -> None:
        original(self, state, *args, **options)
        self.matches(state)

    with pytest.MonkeyPatch.context() as patch:
        if request.param == "plain":
            patch.setattr(checker, "guard_maker", lambda: None)
        elif request.param == "learned":
            patch.setattr(LayoutChecker, "__init__", learned)
        yield request.param


@pytest.fixture(scope="module", autouse=True, params=["in line", "called", "without guards"])
def each_refresh(request: pytest.FixtureRequest) -> Iterator[str]:
    """``in line``: refreshes look at states themselves, where they can.

    ``called``: objects that are returned again and again are looked at by a function. ``without
    guards``: so are all states, and torch has no guards.
    """
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "called":
            patch.setattr(refreshing, "_IN_LINE", 0)
        elif request.param == "without guards":
            patch.setattr(checker, "guard_maker", lambda: None)
        yield request.param
