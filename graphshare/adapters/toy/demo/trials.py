"""A fault planted in the running engine: refused, or let through and measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from graphshare.adapters.toy.batch import Request
from graphshare.adapters.toy.demo.planting import PLANTED, Site
from graphshare.adapters.toy.demo.runs import NOBODY, Bench, Feed, RunReport, serve
from graphshare.adapters.toy.demo.workload import Workload
from graphshare.errors import GraphShareError

__all__ = ["Harm", "Outcome", "Refusal", "plant"]

Outcome = Literal["tokens changed", "acceptance fell", "crashed", "nothing visible"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A fault that graphshare refused.

    Args:
        error: How.
        during: ``"setup"``, ``"capture"`` or ``"decoding"``.
        steps: Steps that were complete by then.
        tokens: Tokens that were produced by then.
    """

    error: GraphShareError
    during: Literal["setup", "capture", "decoding"]
    steps: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Harm:
    """What a fault did that nothing refused.

    Args:
        steps: Of the target.
        tokens_per_step: As in :class:`RunReport`.
        outputs: New tokens of each request.
        changed: Requests whose tokens are not those of the run without the fault.
        outcome: In two words.
        crash: The error that ended the run, if one did.
    """

    steps: int
    tokens_per_step: float
    outputs: tuple[tuple[int, ...], ...]
    changed: tuple[int, ...]
    outcome: Outcome
    crash: str = ""


def plant(
    name: str,
    bench: Bench,
    workload: Workload,
    healthy: RunReport,
    *,
    unsafe: bool,
    feed: Feed = NOBODY,
) -> Refusal | Harm:
    """Run the engine with a fault.

    Args:
        name: Of the fault.
        bench: Models and sizes.
        workload: What to decode.
        healthy: The same without the fault.
        unsafe: Whether to let the fault through.
        feed: Told of the progress.

    Returns:
        :class:`Refusal`, where an error of graphshare ended the run; else what came of it.
    """
    # A third of the way: there is text before, which is right, and text after.
    step = max(1, healthy.steps // 3)
    longest = max(map(len, workload.prompt_tokens))
    steps = tokens = 0

    def watch(requests: Sequence[Request]) -> None:
        nonlocal steps, tokens
        steps += 1
        tokens = sum(len(request.output) for request in requests)
        if feed.watcher is not None:
            feed.watcher(requests)

    during: Literal["setup", "capture", "decoding"] = "setup"
    try:
        planted = PLANTED[name](Site(bench, unsafe, step, longest))
        with planted.runner as runner:
            during = "capture"
            runner.capture(feed.progress)
            during = "decoding"
            engine, requests, _ = serve(planted.forwards, runner, workload, watch)
    except GraphShareError as error:
        return Refusal(error, during, steps, tokens)
    except (RuntimeError, IndexError) as error:
        if not unsafe:
            raise
        return Harm(steps, 0.0, (), (), "crashed", f"{type(error).__name__}: {error}")
    outputs = tuple(tuple(request.output) for request in requests)
    return _harm(healthy, outputs, engine.counts.steps, engine.counts.tokens_per_step)


def _harm(
    healthy: RunReport,
    outputs: tuple[tuple[int, ...], ...],
    steps: int,
    tokens_per_step: float,
) -> Harm:
    changed = tuple(
        number
        for number, (right, wrong) in enumerate(zip(healthy.outputs, outputs, strict=True))
        if right != wrong
    )
    outcome: Outcome = "nothing visible"
    if changed:
        outcome = "tokens changed"
    elif tokens_per_step < healthy.tokens_per_step:
        outcome = "acceptance fell"
    return Harm(steps, tokens_per_step, outputs, changed, outcome)
