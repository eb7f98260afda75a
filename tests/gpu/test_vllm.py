"""A real vLLM with and without graphshare: the same tokens and drafts, and faults refused.

Each test starts vLLM twice, which takes minutes; it needs one of the supported versions installed,
with graphshare beside it as a package, so that vLLM finds the plug-in.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest

from graphshare.adapters.vllm.versions import SUPPORTED

pytestmark = pytest.mark.gpu


def _installed():
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return None
    return version.partition("+")[0]


if _installed() not in SUPPORTED:
    pytest.skip("needs one of the supported versions of vLLM", allow_module_level=True)


def run(tmp_path, switch, *arguments):
    """What a scenario found; see ``benchmarks/vllm/scenario.py``."""
    path = tmp_path / f"{switch}.json"
    environ = {k: v for k, v in os.environ.items() if k != "GRAPHSHARE_VLLM"}
    if switch != "stock":
        environ["GRAPHSHARE_VLLM"] = switch
    command = [sys.executable, "-m", "benchmarks.vllm.scenario", *arguments]
    command += ["--json", str(path)]
    subprocess.run(command, env=environ, check=True, timeout=600)
    found = json.loads(path.read_text())
    assert "failed" not in found["start"], found["start"]
    return found


@pytest.mark.parametrize(
    "options",
    [
        ("--pair=small128",),
        ("--pair=small128", "--method=eagle3"),
        ("--cudagraph-mode=FULL_DECODE_ONLY",),
        ("--cudagraph-mode=FULL_AND_PIECEWISE",),
        ("--backend=TRITON_ATTN",),
    ],
)
def test_tokens_and_drafts_are_those_of_vllm_alone(tmp_path, options) -> None:
    alone = run(tmp_path, "stock", "tokens", *options)["tokens"]
    found = run(tmp_path, "verify", "tokens", "faults", *options)
    for concurrency, mine in found["tokens"].items():
        assert mine["tokens"] == alone[concurrency]["tokens"]
        assert mine["drafts_digest"] == alone[concurrency]["drafts_digest"]
        assert min(mine["distinct"]) > 10
    faults = found["faults"]
    assert faults["tokens_as_healthy"]
    answers = {name: each["error"] for name, each in faults["answers"].items()}
    moved = answers.pop("a builder re-created after capture")
    assert moved == "AddressChangedError"
    assert len(answers) >= 3
    assert set(answers.values()) == {"StaleStateError"}
    seen = found["statistics"]
    assert seen["verified"] == seen["builds_avoided"] > 0
    planted = {"StaleStateError": len(answers), "AddressChangedError": 1}
    assert seen["refusals"] == planted


def test_the_draft_captures_on_its_own_descriptors_contents(tmp_path) -> None:
    seen = run(tmp_path, "on", "builds", "--pair=small128")
    assert seen["draft_saw"]
    assert all(each["query_lens_right"] and each["seq_lens_right"] for each in seen["draft_saw"])
    assert seen["statistics"]["builds"]["draft_prefill"] == 0
