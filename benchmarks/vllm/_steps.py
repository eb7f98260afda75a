"""Steps of a real vLLM as several variants, by turns within one run of requests.

A machine drifts by more than the hooks cost from one run to the next, so that whole runs cannot be
compared: on one, steps of 2.5 ms went to 3.7 ms and back within seconds, and two steps that follow
each other had four fifths of their variance in common. So the variants take turns step by step, in
an order drawn anew for each turn, and only the steps of one turn are compared, where all are of one
kind: the same graph, the same number of requests. What changes the variant runs between the steps,
outside of their times.

vLLM prepares a step while the GPU runs the one before. Where the host waits for the GPU, a step
waits for what the variant before it launched, and shows neither what the hooks cost the host nor
what they save it; the parts do.

In a process that serves, the hooks run in each step, here in two of four or one of three, so that
other things may be in the processor's caches. ``BLOCK`` steps of one variant in a row show what
that does: the first after a change is compared with the others.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.vllm import _engine
from benchmarks.vllm._variants import FEWEST, Switch

__all__ = ["BLOCK", "WHOLE", "Step", "Turn", "in_turns"]

WHOLE = "step of the engine"
BLOCK = 4
_LONGEST = 200  # runs of requests

Parts = dict[str, float]
"""Seconds by label."""


@dataclass
class Step:
    """One step of the engine.

    Attributes:
        kind: What the target ran, for how many requests.
        parts: Seconds by label; the whole step is ``WHOLE``.
    """

    kind: Any
    parts: Parts


Turn = dict[str, list[Step]]
"""By variant, the steps that follow each other in one turn: one, or a block."""


def in_turns(
    llm: Any,
    switch: Switch,
    variants: Sequence[str],
    *,
    concurrency: int,
    turns: int,
    seconds: float,
    parts: Parts | None = None,
    block: int = 1,
    new: int = 512,
    seed: int = 0,
) -> list[Turn]:
    """Serve requests until there are enough turns with all requests decoding on one full graph.

    Args:
        llm: vLLM's.
        switch: Between the variants.
        variants: Their names.
        concurrency: Requests at a time.
        turns: How many are wanted.
        seconds: After which a few turns are enough.
        parts: Where somebody notes what the step at hand spends on what; emptied before each.
        block: Steps of a variant in a turn.
        new: Tokens of each request.
        seed: Of the order of variants and of the prompts.
    """
    rng = random.Random(seed)
    deadline = time.perf_counter() + seconds
    spent: Parts = {} if parts is None else parts
    found: list[Turn] = []
    try:
        with _kinds(switch) as kind:
            for number in range(_LONGEST):
                prompts = _engine.prompts(concurrency, seed=seed + number, longest=128)
                # A block is to follow another variant, that its first step be one after a change.
                orders = (
                    iter(lambda: rng.sample(variants, len(variants)), None)
                    if block == 1
                    else itertools.repeat(list(variants))
                )
                run = _one_run(llm, switch, orders, block, prompts, new, spent, kind)
                with contextlib.closing(run):
                    for turn in run:
                        if _comparable(turn, len(variants), block, concurrency):
                            found.append(turn)
                        late = time.perf_counter() > deadline
                        if len(found) >= (min(turns, FEWEST) if late else turns):
                            return found
    finally:
        switch.to("on")
    raise RuntimeError(f"{len(found)} turns in {_LONGEST} runs of requests")


def _comparable(turn: Turn, variants: int, block: int, concurrency: int) -> bool:
    kinds = [step.kind for steps in turn.values() for step in steps]
    first = kinds[0]
    return (
        len(kinds) == variants * block
        and all(kind == first for kind in kinds)
        and first is not None
        and first[0].cg_mode.name == "FULL"
        and first[1] == concurrency
    )


@contextlib.contextmanager
def _kinds(switch: Switch) -> Iterator[list[Any]]:
    """Keep in a list of one what the target's last dispatch answered, and for how many requests."""
    kind: list[Any] = [None]

    def watching(inner: Callable[..., Any]) -> Callable[..., Any]:
        def dispatch(num_reqs: int, *args: Any, **kwargs: Any) -> Any:
            desc = inner(num_reqs, *args, **kwargs)
            kind[0] = desc, num_reqs
            return desc

        return dispatch

    place = "target", "dispatch"
    switch.watch(place, watching)
    try:
        yield kind
    finally:
        switch.watch(place, None)


def _one_run(
    llm: Any,
    switch: Switch,
    orders: Iterator[list[str]],
    block: int,
    prompts: list[list[int]],
    new: int,
    spent: Parts,
    kind: list[Any],
) -> Generator[Turn, None, None]:
    """Yield the turns of one run of requests; what is left of it then is ended."""
    engine = llm.llm_engine
    begun = _engine.begin(llm, prompts, new)
    running = True
    try:
        while running:
            turn: Turn = {}
            for variant in next(orders):
                steps: list[Step] = []
                switch.to(variant)
                for _ in range(block):
                    spent.clear()
                    kind[0] = None
                    start = time.perf_counter()
                    outputs = engine.step()
                    took = time.perf_counter() - start
                    steps.append(Step(kind[0], {**spent, WHOLE: took}))
                    # With the first that is done there are fewer than was asked for.
                    running = running and not any(output.finished for output in outputs)
                turn[variant] = steps
                if not running:
                    break
            yield turn
    finally:
        engine.abort_request(begun)
        while engine.has_unfinished_requests():
            engine.step()
