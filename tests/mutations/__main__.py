"""Make each wrong version of the library in a copy of the tree, and run the tests that catch it.

Exit code 0 if every wrong version is caught, by each test that is named for it, and all these
tests pass on the right version.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from tests.mutations import MUTATIONS
from tests.mutations.mutation import ROOT, Mutation

_PASSED, _FAILED = 0, 1  # exit codes of pytest; others say that it could not run the tests


class Run(NamedTuple):
    """What pytest said: its exit code, ``None`` past the time limit; who failed; its last words."""

    code: int | None
    failed: tuple[str, ...]
    output: str


class Verdict(NamedTuple):
    mutation: Mutation
    verdict: str
    output: str
    seconds: float

    @property
    def is_good(self) -> bool:
        return self.verdict == "caught"


class Trees:
    """Copies of what git tracks or would track, one for each thread."""

    def __init__(self, parent: Path) -> None:
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        self._files = [name for name in set(names.split("\0")) if name and (ROOT / name).is_file()]
        self._parent = parent
        self._local = threading.local()

    def mine(self) -> Path:
        tree: Path | None = getattr(self._local, "tree", None)
        if tree is None:
            tree = self._local.tree = Path(tempfile.mkdtemp(dir=self._parent))
            for name in self._files:
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, tree / name)
        return tree


def run_tests(tree: Path, tests: Iterable[str], limit_s: float) -> Run:
    # An installed graphshare must not come first, and no bytecode of another version be found: two
    # versions of one file may have the same size and second.
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_PROFILE": "ci",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-rfE", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *tests],
            cwd=tree,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return Run(None, (), f"more than {limit_s:.0f} s")
    lines = done.stdout.splitlines()
    failed = [line.split(" ", 2)[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return Run(done.returncode, tuple(failed), "\n".join(lines[-12:]))


def judge(mutation: Mutation, trees: Trees, limit_s: float) -> Verdict:
    began = time.monotonic()
    tree = trees.mine()
    file = mutation.path(tree)
    right = file.read_text()
    if right.count(mutation.old) != 1:
        found = f"{right.count(mutation.old)} times in {mutation.file}: {mutation.old!r}"
        return Verdict(mutation, "does not apply", found, 0.0)
    try:
        file.write_text(mutation.applied(tree))
        run = run_tests(tree, mutation.tests, limit_s)
    finally:
        file.write_text(right)
    verdict, output = "caught", ""
    if run.code not in (_PASSED, _FAILED):
        verdict, output = "could not run", run.output
    elif passed := [test for test in mutation.tests if not _is_in(test, run.failed)]:
        verdict, output = "SURVIVED", "\n".join(passed)
    return Verdict(mutation, verdict, output, time.monotonic() - began)


def _is_in(test: str, failed: Sequence[str]) -> bool:
    """Whether the test failed, with any of its parameters."""
    return any(name == test or name.startswith(f"{test}[") for name in failed)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--only", metavar="NAME", nargs="+", help="these wrong versions")
    parser.add_argument("-n", dest="jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for the tests of one")
    parser.add_argument("--list", action="store_true", help="list them, and run nothing")
    options = parser.parse_args()
    known = {mutation.name: mutation for mutation in MUTATIONS}
    names: list[str] = options.only or list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no such mutation: {', '.join(unknown)}")
    if options.jobs < 1:
        parser.error("-n: expected at least 1")
    chosen = [known[name] for name in names]
    width = max(map(len, names))
    if options.list:
        for mutation in chosen:
            print(f"{mutation.name:{width}}  {mutation.breaks}")
            print(*(f"{'':{width}}    {test}" for test in mutation.tests), sep="\n")
        return 0

    with tempfile.TemporaryDirectory(prefix="mutations-") as parent:
        trees = Trees(Path(parent))
        tests = dict.fromkeys(test for mutation in chosen for test in mutation.tests)
        run = run_tests(trees.mine(), tests, options.limit * 5)
        if run.code != _PASSED:
            print(run.output)
            print("These tests must pass before they can catch anything.")
            return 1
        print(f"{len(tests)} tests pass on the right version.", flush=True)
        verdicts: list[Verdict] = []
        with ThreadPoolExecutor(options.jobs) as threads:
            going = [threads.submit(judge, each, trees, options.limit) for each in chosen]
            for each in as_completed(going):
                verdict = each.result()
                verdicts.append(verdict)
                name = verdict.mutation.name
                print(f"{verdict.verdict:14}  {name:{width}}  {verdict.seconds:5.1f} s", flush=True)
                if verdict.output:
                    print("\n".join(f"    {line}" for line in verdict.output.splitlines()))
    bad = [verdict for verdict in verdicts if not verdict.is_good]
    print(f"{len(verdicts) - len(bad)} of {len(verdicts)} wrong versions are caught.")
    for verdict in bad:
        print(f"{verdict.verdict}: {verdict.mutation.name} ({verdict.mutation.breaks})")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
