"""Facts that stand in several files say the same in each."""

from __future__ import annotations

import re

from tests.package import ROOT, import_or_skip


def _pyproject() -> str:
    return (ROOT / "pyproject.toml").read_text("utf-8")


def _test_command() -> str:
    """The one line of the README that sets everything up and runs nox."""
    readme = (ROOT / "README.md").read_text("utf-8")
    (line,) = re.findall(r"^ *(python3 -m venv .*nox)$", readme, re.MULTILINE)
    return line


def test_the_version_is_the_same_everywhere() -> None:
    (declared,) = re.findall(r'^version = "(.+)"$', _pyproject(), re.MULTILINE)
    assert import_or_skip("graphshare").__version__ == declared


def test_ci_runs_the_test_command_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text("utf-8")
    assert [line.strip() for line in script.splitlines()].count(_test_command()) == 1
    assert _test_command() in (ROOT / "CONTRIBUTING.md").read_text("utf-8")


def test_torch_is_pinned_before_anything_else() -> None:
    """A range, or a later line, could resolve to another build of several GB."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert re.fullmatch(r"torch==[\d.]+", pins[0])
