"""Every check of this project. `nox` runs all but `mutations`, which takes minutes; `nox -s lint`
runs one; `nox -l` lists them.

All but `wheel` run in the environment that nox itself is installed in, since a second copy of
torch costs more than the checks do: `pip install -c constraints.txt -e ".[dev]"`.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
SCRIPTS = Path(sys.executable).parent  # not resolved: .venv/bin, whatever python it links to

nox.needs_version = ">=2025.5.1"
nox.options.error_on_missing_interpreters = True
# The tests are last, so that their summary is what a reader sees.
nox.options.sessions = ["lint", "types", "contracts", "wheel", "docs", "tests"]


def _tool(session: nox.Session, name: str, *args: str, env: dict[str, str] | None = None) -> None:
    session.run(str(SCRIPTS / name), *args, env=env, external=True)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Ruff: rules, then format."""
    _tool(session, "ruff", "check", ".")
    _tool(session, "ruff", "format", "--check", ".")


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """basedpyright, strict, on the library."""
    _tool(session, "basedpyright", "--pythonpath", sys.executable, "--warnings")


@nox.session(venv_backend="none")
def contracts(session: nox.Session) -> None:
    """Which module may import which."""
    _tool(session, "lint-imports", "--no-logo", "--no-cache")


@nox.session(venv_backend="venv")
def wheel(session: nox.Session) -> None:
    """Build, install and import the wheel where nothing else is installed."""
    dist = Path(session.create_tmp()).resolve() / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    # Without --wheel this builds the wheel from the source distribution: both are checked.
    _tool(session, "python", "-m", "build", "--outdir", str(dist), ".")
    (built,) = dist.glob("*.whl")
    pip = ("--quiet", "--constraint", "constraints.txt")
    session.install(*pip, str(built))
    check = ROOT / "scripts" / "check_wheel.py"
    session.chdir(dist)  # the checkout must not be importable
    session.run("python", "-I", str(check), str(built), str(ROOT / "graphshare"))
    if (ROOT / "graphshare" / "cli.py").exists():
        session.chdir(ROOT)
        session.install(*pip, f"{built}[cli]")
        session.chdir(dist)
        session.run("graphshare", "--help", silent=True)
        session.run("python", "-I", "-m", "graphshare", "--help", silent=True)


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """The documentation site, into docs/_build: every link and every name must resolve."""
    # -E: what an earlier build left behind must not hide a warning.
    options = ("-n", "-W", "--keep-going", "-E", "-q", "-j", "auto", "-b", "html")
    _tool(session, "sphinx-build", *options, "docs", "docs/_build/html")


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Pytest, docs examples included, on the CPU (and on a GPU, where there is one)."""
    workers = min(8, os.cpu_count() or 1)
    env = {"HYPOTHESIS_PROFILE": os.environ.get("HYPOTHESIS_PROFILE", "ci")}
    args = session.posargs or ["-q", "-n", str(workers), "--dist", "worksteal", "--timeout", "600"]
    _tool(session, "pytest", *args, env=env)


@nox.session(venv_backend="none")
def mutations(session: nox.Session) -> None:
    """Wrong versions of the library, each caught by the tests that are named for it."""
    _tool(session, "python", "-m", "tests.mutations", *session.posargs)
