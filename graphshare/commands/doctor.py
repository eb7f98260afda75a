"""``graphshare doctor``: what is installed here, whether graphshare supports it, what is missing.

It imports nothing that may be broken: each library is imported in an interpreter of its own, so
that one which fails, or ends the process, is a line of the report.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from graphshare import __version__
from graphshare.commands.finding import Finding
from graphshare.commands.installed import version_of
from graphshare.commands.text import table
from graphshare.commands.vllm_plug_in import look_at_plug_in

__all__ = ["LIBRARIES", "Finding", "Library", "add_arguments", "diagnose", "run"]

Refuse = Callable[[str], NoReturn]

_PYTHON = "3.10"
_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Library:
    """A library that graphshare uses, or has an adapter for.

    Attributes:
        name: What users call it.
        distribution: What it is installed as; the first that is there counts.
        module: What is imported to see whether it works; ``None`` for one that would do too much.
        least: The oldest version that is supported, ``None`` for any.
        extra: The extra of graphshare that installs it, ``None`` for what is always needed.
        use: What it is for.
    """

    name: str
    distribution: tuple[str, ...]
    module: str | None
    least: str | None
    extra: str | None
    use: str


LIBRARIES = (
    Library("torch", ("torch",), "torch", "2.11", None, "everything"),
    Library(
        "typing-extensions", ("typing-extensions",), "typing_extensions", "4.12", None, "everything"
    ),
    Library(
        "cuda-bindings",
        ("cuda-bindings",),
        "cuda.bindings.driver",
        "13",
        "inspect",
        "which addresses a graph bakes in",
    ),
    Library(
        "flash-attn",
        ("flash-attn", "flash-attn-3"),
        "flash_attn",
        None,
        "flash-attn",
        "its adapter",
    ),
    Library("flashinfer", ("flashinfer-python",), "flashinfer", None, "flashinfer", "its adapter"),
    # Importing vLLM starts threads and reads configurations.
    Library("vLLM", ("vllm",), None, None, "vllm", "its adapter"),
    Library("NumPy", ("numpy",), "numpy", "1.26", "cli", "the toy engine"),
    Library("rich", ("rich",), "rich", "13", "cli", "graphshare demo"),
    Library("safetensors", ("safetensors",), "safetensors", "0.5", "cli", "the toy engine"),
    Library("matplotlib", ("matplotlib",), "matplotlib", "3.9", "plot", "graphshare plan --plot"),
)
"""Oldest versions and extras as in ``pyproject.toml``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = (
        "Say what is installed here, whether graphshare supports it, and what is missing. The exit "
        "code is 0 if graphshare can be used, on the CPU at least, and 1 if not."
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(options: argparse.Namespace, refuse: Refuse) -> int:
    """Print the report.

    Args:
        options: The parsed options.
        refuse: Not called: there is nothing to get wrong.

    Returns:
        The exit code: 1 if something that is needed is not in order.
    """
    del refuse
    findings = diagnose()
    usable = _usable(findings)
    if options.json:
        facts = {
            "graphshare": __version__,
            "usable": usable,
            "findings": [asdict(finding) for finding in findings],
        }
        print(json.dumps(facts, indent=2))
        return 0 if usable else 1
    rows = [[f.name, f.found or "-", f.status, f.detail] for f in findings]
    print(table(["", "found", "", ""], rows, left=4))
    remedies: dict[str, list[str]] = {}
    for finding in findings:
        if finding.remedy:
            remedies.setdefault(finding.remedy, []).append(finding.name)
    if remedies:
        lines = [f"  {', '.join(names)}: {remedy}" for remedy, names in remedies.items()]
        print("\nTo mend or add:\n" + "\n".join(lines))
    print(
        f"\ngraphshare {__version__} " + ("can be used here" if usable else "cannot be used here")
    )
    return 0 if usable else 1


def diagnose() -> list[Finding]:
    """Look at the interpreter, the libraries, the driver and the GPUs."""
    with ThreadPoolExecutor() as threads:
        probed = threads.submit(_probe, _TORCH_PROBE)
        findings = list(threads.map(_look_at, LIBRARIES))
        facts, _ = probed.result()
    return [_look_at_python(), *findings, *look_at_plug_in(), *_look_at_devices(facts)]


def _usable(findings: list[Finding]) -> bool:
    return all(finding.status == "ok" for finding in findings if finding.needed)


def _look_at_python() -> Finding:
    version = platform.python_version()
    if _older(version, _PYTHON):
        return Finding(
            "Python", version, "unsupported", True, f"older than {_PYTHON}", "use a newer Python"
        )
    return Finding("Python", version, "ok", True, platform.python_implementation())


def _look_at(library: Library) -> Finding:
    needed = library.extra is None
    install = "graphshare" if needed else f"graphshare[{library.extra}]"
    version, unreadable = version_of(*library.distribution)
    facts: Mapping[str, Any] = {}
    problem = ""
    if library.module is not None:
        facts, problem = _probe(_IMPORT_PROBE, library.module)
    if version is None:
        # Not installed by pip, but it may lie on the path: a checkout, a build of one's own.
        version = facts.get("version")
    # What is imported is there, whatever its metadata and its version say.
    absent = not unreadable if library.module is None else bool(facts.get("absent"))
    if version is None and absent:
        return Finding(
            library.name,
            None,
            "missing",
            needed,
            f"for {library.use}",
            f'pip install "{install}"',
        )
    if unreadable and library.module is None:
        problem = unreadable
    elif problem:
        problem = f"import fails: {problem}"
    if problem:
        return Finding(
            library.name,
            version,
            "broken",
            needed,
            problem,
            f"install {library.name} again, in a build for this Python"
            + ("" if library.name == "torch" else " and this torch"),
        )
    if version is not None and library.least is not None and _older(version, library.least):
        return Finding(
            library.name,
            version,
            "unsupported",
            needed,
            f"older than {library.least}",
            f'pip install -U "{install}"',
        )
    detail = f"for {library.use}" + (f"; {unreadable}" if unreadable else "")
    return Finding(library.name, version or "there", "ok", needed, detail)


def _look_at_devices(facts: Mapping[str, Any]) -> list[Finding]:
    """The driver and the GPUs, which are not needed: the tape runs on the CPU."""
    driver = _driver()
    found = [
        Finding(
            "driver",
            driver,
            "ok" if driver else "missing",
            False,
            f"torch was built for CUDA {facts['cuda']}"
            if facts.get("cuda")
            else "torch was built without CUDA"
            if facts
            else "torch does not say for which CUDA it was built",
        )
    ]
    gpus = facts.get("gpus") or []
    for number, gpu in enumerate(gpus):
        detail = f"compute capability {gpu['capability']}, {gpu['mib']:,} MiB"
        found.append(Finding(f"GPU {number}", gpu["name"], "ok", False, detail))
    if not gpus:
        detail = "graphs are recorded on the tape, on the CPU"
        remedy = ""
        if driver and facts:
            remedy = "install a torch that was built for CUDA, of the driver's version or older"
        found.append(Finding("GPU", None, "missing", False, detail, remedy))
    return found


def _driver() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.split()
    return lines[0] if lines else None


def _older(version: str, least: str) -> bool:
    return _release(version) < _release(least)


def _release(version: str) -> list[int]:
    """The numbers of a version, without what marks a build or a pre-release."""
    found = re.match(r"\s*v?\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in re.findall(r"\d+", found.group())] if found else [0]
    while len(numbers) > 1 and not numbers[-1]:
        numbers.pop()
    return numbers


# What a probe prints in a line of its own, apart from whatever an import prints.
_MARK = "graphshare-doctor:"

_IMPORT_PROBE = """
try:
    module = importlib.import_module(name)
except ModuleNotFoundError as error:
    facts["absent"] = error.name is not None and (name + ".").startswith(error.name + ".")
    raise
package = sys.modules.get(name.partition(".")[0])
version = getattr(module, "__version__", None) or getattr(package, "__version__", None)
facts["version"] = None if version is None else str(version)
"""

_TORCH_PROBE = """
import torch
facts["cuda"] = torch.version.cuda
facts["gpus"] = [
    {
        "name": each.name,
        "capability": f"{each.major}.{each.minor}",
        "mib": each.total_memory >> 20,
    }
    for each in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
]
"""

_AROUND = """
import importlib, json, sys
sys.path[:] = json.loads(sys.argv[1])
name = sys.argv[2]
facts = {}
problem = ""
try:
    exec(sys.argv[3])
except BaseException as error:
    problem = " ".join(f"{type(error).__name__}: {error}".split())
print("\\n" + sys.argv[4] + json.dumps([facts, problem]))
"""


def _probe(code: str, name: str = "") -> tuple[dict[str, Any], str]:
    """Run code in an interpreter of its own.

    Returns:
        The facts that it found, and what went wrong, if anything.
    """
    command = [sys.executable, "-W", "ignore", "-c", _AROUND]
    try:
        done = subprocess.run(
            # The same modules as here: -c would look into the current folder first.
            [*command, json.dumps(sys.path), name, code, _MARK],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {}, f"no end after {_SECONDS:.0f} seconds"
    except OSError as error:
        return {}, f"no interpreter could be started: {error}"
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(_MARK):
            facts, problem = json.loads(line.removeprefix(_MARK))
            return facts, _shortened(problem)
    last = (done.stderr.strip().splitlines() or [""])[-1]
    code_said = f"signal {-done.returncode}" if done.returncode < 0 else f"code {done.returncode}"
    return {}, _shortened(f"the interpreter ended with {code_said}. {last}".strip())


def _shortened(text: str) -> str:
    return text if len(text) <= 300 else text[:297] + "..."
