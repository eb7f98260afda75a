"""vLLM's adapter on a small vLLM: the same tokens, no build for a draft prefill, faults refused."""

from __future__ import annotations

import importlib.metadata
import logging
import random
import sys

import pytest
import torch

from graphshare.adapters.vllm.activation import activate, deactivate, sessions, statistics
from graphshare.adapters.vllm.signatures import expected, first_difference
from graphshare.adapters.vllm.switch import Mode, mode_from
from graphshare.adapters.vllm.versions import SUPPORTED
from tests.vllm_standin.engine import Request, serve
from tests.vllm_standin.modules import make_modules
from tests.vllm_standin.parts import TritonAttentionBackend
from tests.vllm_standin.runner import Config

VERSIONS = sorted(SUPPORTED)


@pytest.fixture(params=VERSIONS)
def vllm(request, monkeypatch):
    return install(request.param, monkeypatch)


def install(version, monkeypatch):
    for name in [each for each in sys.modules if each.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in make_modules(version).items():
        monkeypatch.setitem(sys.modules, name, module)
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: version if name == "vllm" else real(name)
    )
    return version


@pytest.fixture(autouse=True)
def undone():
    yield
    deactivate()


def start(**changes):
    """A runner after its worker has warmed it up."""
    runner = sys.modules["vllm.v1.worker.gpu.model_runner"].GPUModelRunner(Config(**changes))
    sys.modules["vllm.v1.worker.gpu_worker"].Worker(runner).compile_or_warm_up_model()
    return runner


def requests(seed, count=6, longest=20):
    rng = random.Random(seed)
    return [
        Request(
            prompt=[rng.randrange(97) for _ in range(rng.randint(1, longest))],
            new=rng.randint(1, 12),
            arrival=rng.randint(0, 10),
        )
        for _ in range(count)
    ]


MODES = ["FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]


@pytest.mark.parametrize("cudagraph_mode", MODES)
def test_tokens_and_drafts_are_those_of_vllm_alone(vllm, cudagraph_mode) -> None:
    alone = serve(start(cudagraph_mode=cudagraph_mode), requests(1))
    activate()
    runner = start(cudagraph_mode=cudagraph_mode)
    assert serve(runner, requests(1)) == alone
    seen = statistics()
    assert seen.active and seen.refusals == {}
    assert seen.builds["draft_prefill"] == 0
    assert seen.builds_avoided == sum(desc.cg_mode.name == "FULL" for desc in runner.ran) > 0
