"""The plug-in: asleep without its switch, loud on a misspelt one, patient until vLLM's worker."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from graphshare.adapters.vllm.arrival import when_imported
from graphshare.adapters.vllm.patches import Patches
from graphshare.adapters.vllm.switch import Mode, mode_from

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text("utf-8")
_PROBE = """
import json, sys
sys.path.insert(0, sys.argv[1])
before = set(sys.modules)
from graphshare.adapters.vllm.plugin import register
register()
print(json.dumps([sorted(set(sys.modules) - before), [repr(f) for f in sys.meta_path]]))
"""


def run_plugin(**environ):
    return subprocess.run(
        [sys.executable, "-c", _PROBE, str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
        env={k: v for k, v in os.environ.items() if k != "GRAPHSHARE_VLLM"} | environ,
    )


def test_the_entry_point_is_the_plug_in() -> None:
    section = PROJECT.partition('[project.entry-points."vllm.general_plugins"]')[2]
    value = re.findall(r'"(.*?)"', section)[0]
    module, _, name = value.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("environ", [{}, {"GRAPHSHARE_VLLM": "off"}, {"GRAPHSHARE_VLLM": ""}])
def test_asleep_it_imports_next_to_nothing(environ) -> None:
    done = run_plugin(**environ)
    assert done.returncode == 0, done.stderr
    loaded, _ = json.loads(done.stdout)
    mine = {name for name in loaded if name.startswith("graphshare.")}
    assert mine == {
        "graphshare.adapters",
        "graphshare.adapters.vllm",
        "graphshare.adapters.vllm.plugin",
        "graphshare.adapters.vllm.switch",
    }
    assert "torch" not in loaded


def test_awake_it_waits_and_imports_nothing_of_vllm() -> None:
    done = run_plugin(GRAPHSHARE_VLLM="on")
    assert done.returncode == 0, done.stderr
    loaded, finders = json.loads(done.stdout)
    assert [name for name in loaded if name.partition(".")[0] == "vllm"] == []
    assert any("arrival" in each for each in finders)


def test_a_misspelt_switch_stops_vllm_and_names_the_good_ones() -> None:
    done = run_plugin(GRAPHSHARE_VLLM="yes")
    assert done.returncode != 0
    for good in ("on", "off", "strict", "verify", "'yes'"):
        assert good in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("mode", Mode)
def test_every_mode_can_be_said(mode) -> None:
    assert mode_from({"GRAPHSHARE_VLLM": mode.value}) is mode


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "waited").mkdir()
    (tmp_path / "waited" / "__init__.py").write_text("")
    (tmp_path / "waited" / "worker.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "waited.worker"
    for name in ("waited.worker", "waited"):
        sys.modules.pop(name, None)


def test_acts_once_when_the_module_is_there(package) -> None:
    seen = []
    finders = list(sys.meta_path)
    stop = when_imported(package, lambda module: seen.append(module.value))
    assert seen == []
    module = importlib.import_module(package)
    assert seen == [1]
    assert sys.meta_path == finders
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__.loader is module.__loader__
    importlib.reload(module)
    assert seen == [1]
    stop()
    when_imported(package, lambda module: seen.append(2))
    assert seen == [1, 2]


def test_a_wait_can_be_ended(package) -> None:
    seen = []
    when_imported(package, seen.append)()
    importlib.import_module(package)
    assert seen == []


def test_a_module_that_is_not_there_is_not_there(package) -> None:
    stop = when_imported("waited.nothing", print)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("waited.nothing")
    stop()


class Thing:
    def act(self):
        return "own"


def test_patches_are_undone_last_first() -> None:
    thing = Thing()
    patches = Patches()
    patches.set(thing, "act", lambda: "one")
    patches.set(thing, "act", lambda: "two")
    patches.set(Thing, "act", lambda self: "class")
    assert thing.act() == "two"
    assert len(patches) == 3
    patches.undo()
    assert thing.act() == "own"
    assert vars(thing) == {}
    patches.undo()


def test_what_others_put_on_top_stays(caplog) -> None:
    thing = Thing()
    patches = Patches()
    patches.set(thing, "act", lambda: "ours")
    thing.act = lambda: "theirs"
    patches.undo()
    assert thing.act() == "theirs"
    assert "act" in caplog.text
