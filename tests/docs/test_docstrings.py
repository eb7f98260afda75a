"""Every ``>>>`` example in a docstring of the package gives what it says."""

from __future__ import annotations

import doctest

import pytest

from tests.package import import_or_skip, module_names


@pytest.mark.parametrize("name", module_names())
def test_docstring_examples(name: str) -> None:
    module = import_or_skip(name)
    found = doctest.DocTestFinder(exclude_empty=True).find(module, name)
    report: list[str] = []
    for test in found:
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append)
    assert not report, "".join(report)
