"""``graphshare doctor`` reports what is there, whatever state it is in."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from graphshare.adapters.vllm.versions import SUPPORTED
from graphshare.commands import doctor
from graphshare.commands.doctor import LIBRARIES, Finding, Library
from graphshare.commands.installed import version_of
from graphshare.commands.vllm_plug_in import look_at_plug_in
from tests.package import ROOT

DOCTOR = [sys.executable, "-m", "graphshare", "doctor"]


def _examine(*path: Path, arguments: tuple[str, ...] = ("--json",)) -> tuple[int, str]:
    """Run it with folders in front of the module search path."""
    where = os.pathsep.join(map(str, (*path, ROOT)))
    done = subprocess.run(
        [*DOCTOR, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": where},
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout


def _named(output: str) -> dict[str, dict[str, Any]]:
    return {finding["name"]: finding for finding in json.loads(output)["findings"]}


def _package(folder: Path, name: str, source: str) -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(source)
    return folder


def test_here_it_says_that_graphshare_can_be_used() -> None:
    code, output = _examine()
    assert code == 0
    assert json.loads(output)["usable"] is True
    torch = _named(output)["torch"]
    assert (torch["status"], torch["needed"]) == ("ok", True)
    assert torch["found"]


@pytest.mark.parametrize(
    "source",
    [
        "raise ImportError('libtorch_cuda.so: cannot open shared object file')",
        "raise OSError('undefined symbol: cudaGetDriverEntryPointByVersion')",
        "raise SystemExit(0)",
        "import no_such_module_of_torch",
        "import os; os.abort()",
        "import os; os._exit(0)",
        "print('no end of line', end=''); 1 / 0",
    ],
)
def test_a_broken_torch_is_reported(source: str, tmp_path: Path) -> None:
    """Whatever way it fails, also if it takes the interpreter along."""
    code, output = _examine(_package(tmp_path, "torch", source))
    assert code == 1
    assert json.loads(output)["usable"] is False
    torch = _named(output)["torch"]
    assert torch["status"] == "broken"
    assert torch["remedy"]
    assert _named(output)["Python"]["status"] == "ok"


def test_a_broken_torch_is_reported_as_text(tmp_path: Path) -> None:
    _package(tmp_path, "torch", "raise OSError('undefined symbol: planted')")
    code, output = _examine(tmp_path, arguments=())
    assert code == 1
    assert "undefined symbol: planted" in output


def test_a_broken_library_of_an_extra_is_no_reason_not_to_use_the_rest(tmp_path: Path) -> None:
    _package(tmp_path, "flash_attn", "raise ImportError('undefined symbol: _ZN3c10')")
    code, output = _examine(tmp_path)
    assert code == 0
    assert _named(output)["flash-attn"]["status"] == "broken"


def test_a_library_without_metadata_is_found_by_its_own_version(tmp_path: Path) -> None:
    _package(tmp_path, "flashinfer", "__version__ = '0.6.1'; print('noise of an import')")
    code, output = _examine(tmp_path)
    assert code == 0
    found = _named(output)["flashinfer"]
    assert (found["status"], found["found"]) == ("ok", "0.6.1")


def _damage(folder: Path, name: str, metadata: bytes | None) -> None:
    info = folder / f"{name}-99.dist-info"
    info.mkdir(parents=True)
    if metadata is not None:
        (info / "METADATA").write_bytes(metadata)


NOT_UTF8 = b"\xff\xfe\x00Name: x\nVersion: \xff\n"


def test_damaged_metadata_are_no_reason_to_end(tmp_path: Path) -> None:
    """An installation was interrupted. What can be imported can be used all the same."""
    for name in ("typing_extensions", "flashinfer_python", "vllm"):
        _damage(tmp_path, name, NOT_UTF8)
    _package(tmp_path, "flashinfer", "")
    code, output = _examine(tmp_path)
    assert code == 0
    found = _named(output)
    assert [found[name]["status"] for name in ("typing-extensions", "flashinfer")] == ["ok"] * 2
    assert found["vLLM"]["status"] == "broken"
    assert "metadata" in found["vLLM"]["detail"]


@pytest.mark.parametrize("metadata", [None, b"Metadata-Version: 2.1\nName: x\n", NOT_UTF8])
def test_damaged_metadata_have_no_version(
    metadata: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _damage(tmp_path, "planted_for_the_doctor", metadata)
    monkeypatch.syspath_prepend(tmp_path)
    version, problem = version_of("planted-for-the-doctor")
    assert version is None
    assert "metadata" in problem
    assert version_of("no-such-distribution") == (None, "")
    assert version_of("no-such-distribution", "pytest") == (pytest.__version__, "")


def test_a_driver_that_answers_nonsense_is_no_reason_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '\\377\\376 x\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert doctor._driver()


def test_a_module_of_the_current_folder_is_not_taken_for_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _package(tmp_path, "flashinfer", "raise RuntimeError('not meant')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [part for part in sys.path if part])
    library = next(each for each in LIBRARIES if each.name == "flashinfer")
    assert doctor._look_at(library).status in ("missing", "ok")


def _library(**fields: Any) -> Library:
    values = {
        "name": "planted",
        "distribution": ("no-such-distribution",),
        "module": "planted_for_the_doctor",
        "least": "2.11",
        "extra": "some",
        "use": "a test",
    }
    return Library(**{**values, **fields})


def _look(library: Library, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Finding:
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    return doctor._look_at(library)


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("2.11.0+cu130", "ok"),
        ("2.11", "ok"),
        ("3", "ok"),
        ("2.14.0a0+git12", "ok"),
        ("2.10.9", "unsupported"),
        ("2.9", "unsupported"),
    ],
)
def test_versions_are_compared_by_number(
    version: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _package(tmp_path, "planted_for_the_doctor", f"__version__ = {version!r}")
    assert _look(_library(), tmp_path, monkeypatch).status == status


def test_a_library_that_says_no_version_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _package(tmp_path, "planted_for_the_doctor", "")
    finding = _look(_library(), tmp_path, monkeypatch)
    assert (finding.status, finding.found) == ("ok", "there")


def test_what_is_not_there_is_missing_with_the_extra_that_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = _look(_library(), tmp_path, monkeypatch)
    assert (finding.status, finding.found) == ("missing", None)
    assert "graphshare[some]" in finding.remedy


def test_an_import_that_does_not_end_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _package(tmp_path, "planted_for_the_doctor", "import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "_SECONDS", 1.0)
    finding = _look(_library(distribution=("pytest",)), tmp_path, monkeypatch)
    assert finding.status == "broken"


def test_gpus_and_driver_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_driver", lambda: "580.65")
    gpu = {"name": "NVIDIA H200", "capability": "9.0", "mib": 143_771}
    found = doctor._look_at_devices({"cuda": "13.0", "gpus": [gpu, gpu]})
    assert [(each.name, each.status) for each in found] == [
        ("driver", "ok"),
        ("GPU 0", "ok"),
        ("GPU 1", "ok"),
    ]
    without = doctor._look_at_devices({"cuda": None, "gpus": []})
    assert [(each.name, each.status) for each in without] == [("driver", "ok"), ("GPU", "missing")]
    assert without[1].remedy


PROJECT = (ROOT / "pyproject.toml").read_text("utf-8")


def _requirements(name: str) -> list[str]:
    """Of an extra, or ``dependencies``."""
    found = re.search(rf"^{name} = \[(.*?)\]", PROJECT, re.MULTILINE | re.DOTALL)
    return re.findall(r'"([^"]+)"', found.group(1)) if found else []


def test_versions_and_extras_are_those_of_the_project() -> None:
    """``pyproject.toml`` says what is installed; the doctor must ask for the same."""

    def as_required(library: Library) -> str:
        least = "" if library.least is None else f">={library.least}"
        return library.distribution[0] + least

    for library in LIBRARIES:
        if library.extra != "vllm":
            assert as_required(library) in _requirements(library.extra or "dependencies")
    for extra in ("dependencies", "cli", "flash-attn", "flashinfer", "inspect", "plot"):
        known = {as_required(each) for each in LIBRARIES if (each.extra or "dependencies") == extra}
        assert set(_requirements(extra)) == known
    (python,) = re.findall(r'^requires-python = ">=(.+)"$', PROJECT, re.MULTILINE)
    assert python == doctor._PYTHON


def test_the_extra_of_vllm_brings_a_release_that_is_supported() -> None:
    required = Requirement(*_requirements("vllm"))
    assert required.name == "vllm"
    around = ["0.20.1", "0.22.0", "0.22.1", "0.23.0", "0.24.0", "0.25.0", "0.27.0", "0.33.0"]
    allowed = {version for version in [*SUPPORTED, *around] if version in required.specifier}
    assert allowed == set(SUPPORTED)


def test_what_one_command_brings_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = [
        Finding("some", None, "missing", False, "for this", "pip install these"),
        Finding("other", None, "missing", False, "for that", "pip install those"),
        Finding("more", None, "missing", False, "for both", "pip install these"),
    ]
    monkeypatch.setattr(doctor, "diagnose", lambda: findings)
    doctor.run(argparse.Namespace(json=False), lambda message: pytest.fail(message))
    said = capsys.readouterr().out
    assert "To mend or add:\n  some, more: pip install these\n  other: pip install those\n" in said


def _distribution(folder: Path, name: str, version: str, entries: str = "") -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if entries:
        (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{entries}\n")


@pytest.mark.parametrize(
    ("version", "entries", "chosen", "status", "words"),
    [
        ("0.26.0", "graphshare = x:y", None, "ok", "GRAPHSHARE_VLLM"),
        ("0.26.0+cu130", "graphshare = x:y", "lora,graphshare", "ok", "GRAPHSHARE_VLLM"),
        ("0.26.0", "graphshare = x:y", "lora", "missing", "VLLM_PLUGINS=lora"),
        ("0.26.0", "graphshare = x:y", "", "missing", "VLLM_PLUGINS="),
        ("0.26.0", "other = x:y", None, "missing", "does not find"),
        ("0.33.0", "graphshare = x:y", None, "unsupported", "0.26.0"),
    ],
)
def test_whether_vllm_finds_the_plug_in(
    version: str,
    entries: str,
    chosen: str | None,
    status: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _distribution(tmp_path, "vllm", version)
    _distribution(tmp_path, "a_plugin", "1", entries)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # what is installed here does not count
    if chosen is None:
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("VLLM_PLUGINS", chosen)
    (finding,) = look_at_plug_in()
    assert (finding.status, finding.needed) == (status, False)
    assert words in finding.detail
    assert bool(finding.remedy) == (status == "missing")


def test_damaged_entry_points_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _distribution(tmp_path, "vllm", "0.26.0", "graphshare = x:y")
    (tmp_path / "vllm-0.26.0.dist-info" / "entry_points.txt").write_bytes(b"\xff\xfe[x")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (finding,) = look_at_plug_in()
    assert (finding.status, finding.needed, bool(finding.remedy)) == ("broken", False, True)


def test_without_vllm_there_is_no_line_for_the_plug_in() -> None:
    _, output = _examine()
    assert "vLLM plug-in" not in _named(output)
