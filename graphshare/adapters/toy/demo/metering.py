"""Counts and clocks around the parts of a run, the same for each way of running."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from graphshare.adapters.toy.batch import AttentionBatch
from graphshare.adapters.toy.forwards import DraftOutput
from graphshare.adapters.toy.kernel import ToyOwner
from graphshare.adapters.toy.speculation import Runner
from graphshare.owner import Phase

if TYPE_CHECKING:
    from graphshare.descriptor import BatchDescriptor
    from graphshare.state import AttentionState

__all__ = ["MeteredOwner", "MeteredRunner", "Stopwatch"]


class Stopwatch:
    """Seconds in builds and in forwards.

    On a GPU the device is waited for before the clock is read, so that it is the work that is
    timed, not its launch.

    Args:
        device: Where the work is done.

    Attributes:
        build_seconds: In builds for a batch.
        forward_seconds: In forwards, whether replayed or run by Python.
        forwards: How many.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.build_seconds = 0.0
        self.forward_seconds = 0.0
        self.forwards = 0

    def now(self) -> float:
        """Read the clock, once the device is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class MeteredOwner:
    """Builds as another owner does, and takes the time.

    Args:
        owner: The other; what it says of its states is passed on.
        watch: Where the time goes.
    """

    def __init__(self, owner: ToyOwner, watch: Stopwatch) -> None:
        self._owner = owner
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        # `host_values`, `writes`, `live_rows`: looked up by name, and an owner may do without them.
        return getattr(self._owner, name)

    @property
    def num_builds(self) -> int:
        """Builds for a batch."""
        return self._owner.num_builds

    def build(
        self, key: BatchDescriptor, batch: AttentionBatch | None, phase: Phase
    ) -> AttentionState:
        """Build; what precedes serving is not timed."""
        if phase is not Phase.REPLAY:
            return self._owner.build(key, batch, phase)
        begin = self._watch.now()
        state = self._owner.build(key, batch, phase)
        self._watch.build_seconds += self._watch.now() - begin
        return state


class MeteredRunner:
    """Runs as another runner does, and takes the time of the forwards.

    Args:
        runner: The other.
        watch: Where the time goes; also that of the runner's owners.
    """

    def __init__(self, runner: Runner, watch: Stopwatch) -> None:
        self._runner = runner
        self._watch = watch

    def prepare_target(self, batch: AttentionBatch) -> BatchDescriptor:
        """Pass on; the owner takes the time of the build."""
        return self._runner.prepare_target(batch)

    def run_target(self, key: BatchDescriptor) -> torch.Tensor:
        """Run the target."""
        begin = self._begin()
        output = self._runner.run_target(key)
        self._end(begin)
        return output

    def run_draft_prefill(self, key: BatchDescriptor, batch: AttentionBatch) -> DraftOutput:
        """Run the draft over the target's rows; a build that this needs is not counted here."""
        begin = self._begin()
        output = self._runner.run_draft_prefill(key, batch)
        self._end(begin)
        return output

    def prepare_draft_decode(self, batch: AttentionBatch) -> BatchDescriptor:
        """Pass on; the owner takes the time of the build."""
        return self._runner.prepare_draft_decode(batch)

    def run_draft_decode(self, key: BatchDescriptor) -> DraftOutput:
        """Run the draft on one row for each request."""
        begin = self._begin()
        output = self._runner.run_draft_decode(key)
        self._end(begin)
        return output

    def _begin(self) -> float:
        return self._watch.now() - self._watch.build_seconds

    def _end(self, begin: float) -> None:
        watch = self._watch
        watch.forward_seconds += watch.now() - watch.build_seconds - begin
        watch.forwards += 1
