"""One way of running the engine over a workload, and what it gave."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from graphshare.adapters.toy.batch import Request
from graphshare.adapters.toy.checkpoint import load_models
from graphshare.adapters.toy.config import EngineConfig
from graphshare.adapters.toy.demo.metering import MeteredOwner, MeteredRunner, Stopwatch
from graphshare.adapters.toy.demo.workload import Workload
from graphshare.adapters.toy.forwards import Forwards
from graphshare.adapters.toy.graphs import GraphRunner, decode_keys, target_keys
from graphshare.adapters.toy.kernel import AttentionKernel
from graphshare.adapters.toy.model import TORCH
from graphshare.adapters.toy.reference import greedy_tokens
from graphshare.adapters.toy.speculation import EagerRunner, Runner, SpeculativeEngine
from graphshare.progress import Progress

__all__ = ["NOBODY", "Bench", "Feed", "Mode", "RunReport", "Watcher", "serve"]

Mode = Literal["sharing", "graphs", "eager"]
Watcher = Callable[[Sequence[Request]], object]
"""Told of all requests after each step."""


class Feed(NamedTuple):
    """What a run tells of how far it is.

    Args:
        progress: Of the captures.
        watcher: Of the texts.
    """

    progress: bool | Progress = False
    watcher: Watcher | None = None


NOBODY = Feed()
"""Tells nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What one run gave.

    Args:
        outputs: New tokens of each request.
        steps: Steps of the target.
        tokens_per_step: Mean tokens that a request gets from a step in which it gets any.
        builds: States built while serving, by who read them.
        builds_avoided: Builds that borrowing saved.
        replays: Graphs launched.
        graphs: Graphs captured.
        capture_seconds: To capture them.
        build_seconds: In builds while serving.
        forward_seconds: In forwards while serving.
        seconds: Of serving, all together.
    """

    outputs: tuple[tuple[int, ...], ...]
    steps: int
    tokens_per_step: float
    builds: Mapping[str, int] = field(default_factory=dict[str, int])
    builds_avoided: int = 0
    replays: int = 0
    graphs: int = 0
    capture_seconds: float = 0.0
    build_seconds: float = 0.0
    forward_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens produced."""
        return sum(map(len, self.outputs))


def serve(
    forwards: Forwards, runner: Runner, workload: Workload, watcher: Watcher | None = None
) -> tuple[SpeculativeEngine, list[Request], float]:
    """Decode a workload to its end.

    Args:
        forwards: The models and their inputs.
        runner: Runs them.
        workload: What to decode.
        watcher: Told of each step; its time is not counted.

    Returns:
        The engine, the requests, and the seconds that its steps took.
    """
    engine = SpeculativeEngine(forwards, runner)
    requests = workload.requests()
    for request in requests:
        engine.add(request)
    seconds = 0.0
    while engine.has_work:
        begin = time.perf_counter()
        engine.step()
        seconds += time.perf_counter() - begin
        if watcher is not None:
            watcher(requests)
    return engine, requests, seconds


class Bench:
    """The models on one device, and the ways of running them.

    Args:
        engine: Sizes.
        device: Where to run.
        kernel: Attends.

    Attributes:
        forwards: What all runs share: weights, cache, inputs.
    """

    def __init__(
        self, engine: EngineConfig, device: torch.device, kernel: AttentionKernel = TORCH
    ) -> None:
        self.engine = engine
        self.device = device
        target, draft = load_models(device=device)
        self.forwards = Forwards(target, draft, engine, device, kernel)

    def run(
        self,
        mode: Mode,
        workload: Workload,
        feed: Feed = NOBODY,
    ) -> RunReport:
        """Decode ``workload`` speculatively.

        Args:
            mode: ``"sharing"``: on graphs, draft prefills on the target's states. ``"graphs"``: on
                graphs, each on a state of its own. ``"eager"``: without graphs.
            workload: What to decode.
            feed: Told of the progress.
        """
        watch = Stopwatch(self.device)
        owners = [MeteredOwner(self.forwards.make_owner(), watch) for _ in range(3)]
        if mode == "eager":
            target, prefill, decode = owners
            # A kernel that rounds by the shape of a batch must be given the graphs' shapes.
            padded = (target_keys(self.engine), decode_keys(self.engine))
            keys = None if self.forwards.kernel.row_invariant else padded
            runner = EagerRunner(self.forwards, target, decode, prefill, keys)
            return self._served(runner, watch, owners, workload, feed.watcher)
        with GraphRunner(
            self.forwards,
            sharing=mode == "sharing",
            device=self.device,
            target_owner=owners[0],
            prefill_owner=owners[1],
            decode_owner=owners[2],
        ) as runner:
            begin = watch.now()
            runner.capture(feed.progress)
            capture_seconds = watch.now() - begin
            return self._served(runner, watch, owners, workload, feed.watcher, capture_seconds)

    def _served(
        self,
        runner: EagerRunner | GraphRunner,
        watch: Stopwatch,
        owners: Sequence[MeteredOwner],
        workload: Workload,
        watcher: Watcher | None,
        capture_seconds: float = 0.0,
    ) -> RunReport:
        metered = MeteredRunner(runner, watch)
        engine, requests, seconds = serve(self.forwards, metered, workload, watcher)
        pools = []
        if isinstance(runner, GraphRunner):
            pools = [p.statistics() for p in (runner.target, runner.prefill, runner.decode)]
        names = ("target", "draft.prefill", "draft.decode")
        return RunReport(
            outputs=tuple(tuple(request.output) for request in requests),
            steps=engine.counts.steps,
            tokens_per_step=engine.counts.tokens_per_step,
            # The owners' own count: what was really called, whatever the pools say.
            builds={name: owner.num_builds for name, owner in zip(names, owners, strict=True)},
            builds_avoided=sum(pool.builds_avoided for pool in pools),
            replays=sum(pool.replays for pool in pools),
            graphs=sum(pool.captures for pool in pools),
            capture_seconds=capture_seconds,
            build_seconds=watch.build_seconds,
            forward_seconds=watch.forward_seconds,
            seconds=seconds,
        )

    def run_plain(self, workload: Workload) -> RunReport:
        """Decode ``workload`` without a draft and without graphs, one request after the other."""
        begin = time.perf_counter()
        outputs = [
            tuple(
                greedy_tokens(
                    self.forwards.target_model,
                    self.engine,
                    prompt,
                    workload.max_new_tokens,
                    device=self.device,
                    kernel=self.forwards.kernel,
                )
            )
            for prompt in workload.prompt_tokens
        ]
        seconds = time.perf_counter() - begin
        chunk = self.engine.max_num_tokens
        steps = sum(
            -(-len(prompt) // chunk) + len(output) - 1
            for prompt, output in zip(workload.prompt_tokens, outputs, strict=True)
        )
        return RunReport(
            outputs=tuple(outputs),
            steps=steps,
            tokens_per_step=1.0,
            builds={"target": steps},
            seconds=seconds,
        )
