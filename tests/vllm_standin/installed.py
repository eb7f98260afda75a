"""A small vLLM as if it were installed."""

from __future__ import annotations

import importlib.metadata
import inspect
import sys

from graphshare.adapters.vllm import signatures
from tests.vllm_standin import offloader
from tests.vllm_standin.modules import make_modules
from tests.vllm_standin.runner import Config


def module(name):
    """A module of vLLM's worker."""
    return sys.modules[f"vllm.v1.worker.{name}"]


class Installed:
    """A version in ``sys.modules``, until the test is over."""

    def __init__(self, version, monkeypatch):
        self.version = version
        self._monkeypatch = monkeypatch
        for name in [each for each in sys.modules if each.partition(".")[0] == "vllm"]:
            monkeypatch.delitem(sys.modules, name)
        for name, made in make_modules(version).items():
            monkeypatch.setitem(sys.modules, name, made)
        monkeypatch.setattr(offloader, "_instance", offloader.NoopOffloader())
        self._take_sources_for_released()
        self._real = importlib.metadata.version
        self.pretend(version)

    def _take_sources_for_released(self):
        """Only vLLM's own functions are what was released; here, these are."""
        known = signatures.expected()
        own = {
            name: signatures.digest_of(inspect.getsource(signatures.find(name)))
            for name in known[self.version]["sources"]
        }
        of_version = {**known[self.version], "sources": own}
        self._monkeypatch.setattr(
            signatures, "expected", lambda: {**known, self.version: of_version}
        )

    def pretend(self, version):
        """Let the package say that it is this version."""
        self._monkeypatch.setattr(
            importlib.metadata,
            "version",
            lambda name: version if name == "vllm" else self._real(name),
        )

    def make(self, **options):
        """A runner that has captured nothing yet."""
        return module("gpu.model_runner").GPUModelRunner(Config(**options))

    @staticmethod
    def warm_up(runner):
        """What vLLM's worker does with a runner at start."""
        module("gpu_worker").Worker(runner).compile_or_warm_up_model()

    def start(self, **options):
        """A runner that is ready to serve."""
        runner = self.make(**options)
        self.warm_up(runner)
        return runner


def managers_of(runner):
    """Return the graph managers of a runner, by what they are for."""
    speculator = runner.speculator
    return {
        "target": runner.cudagraph_manager,
        "prefill": speculator.prefill_cudagraph_manager,
        "decode": speculator.decode_cudagraph_manager,
    }


def counting(inner, calls):
    """Return what others may have put around a method: it notes what it is called with."""

    def noting(*args, **kwargs):
        calls.append(args)
        return inner(*args, **kwargs)

    return noting
