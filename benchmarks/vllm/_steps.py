"""Steps of a real vLLM as several variants, by turns within one run of requests.

A machine drifts by more than the hooks cost from one run to the next, so that whole runs cannot be
compared. Here a variant lasts for a few steps, a block; the blocks of all variants that follow each
other, in an order drawn anew each time, are one turn; and only blocks of one turn are compared,
where all their steps are of one kind: the same graph, the same number of requests.

A block, not one step: right after a change the processor has what a variant touches in no cache,
which is so in no process that serves, and a step may end what the one before has begun on the GPU.
So the first step of each block does not count. What changes the variant runs between the steps,
outside of their times.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.vllm import _engine
from benchmarks.vllm._variants import Switch

__all__ = ["BLOCK", "WHOLE", "Block", "Turn", "in_turns"]

WHOLE = "step of the engine"
BLOCK = 4
_FEWEST = 8
_LONGEST = 200  # runs of requests

Parts = dict[str, float]
"""Seconds by label."""


@dataclass
class Block:
    """The steps of one variant that count in one turn.

    Attributes:
        kind: Of all steps; ``None`` where they differ.
        parts: Mean seconds a step, by label; the whole step is ``WHOLE``.
    """

    kind: Any
    parts: Parts


Turn = dict[str, Block]


@dataclass
class _Steps:
    """The steps of one block so far."""

    kinds: list[Any] = field(default_factory=list)
    parts: list[Parts] = field(default_factory=list)

    def block(self) -> Block:
        kept = self.parts[1:]
        labels = {label for parts in kept for label in parts}
        kinds = set(self.kinds)
        return Block(
            kinds.pop() if len(kinds) == 1 else None,
            {label: sum(each.get(label, 0.0) for each in kept) / len(kept) for label in labels},
        )


def in_turns(
    llm: Any,
    switch: Switch,
    variants: Sequence[str],
    *,
    concurrency: int,
    turns: int,
    seconds: float,
    parts: Parts | None = None,
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
        new: Tokens of each request.
        seed: Of the order of variants and of the prompts.
    """
    runner = _engine.runner()
    rng = random.Random(seed)
    deadline = time.perf_counter() + seconds
    spent: Parts = {} if parts is None else parts
    found: list[Turn] = []
    try:
        with _kinds(runner.cudagraph_manager) as kind:
            for number in range(_LONGEST):
                prompts = _engine.prompts(concurrency, seed=seed + number, longest=128)
                run = _one_run(llm, switch, variants, rng, prompts, new, spent, kind)
                with contextlib.closing(run):
                    for turn in run:
                        if _comparable(turn, variants, concurrency):
                            found.append(turn)
                        late = time.perf_counter() > deadline
                        if len(found) >= (min(turns, _FEWEST) if late else turns):
                            return found
    finally:
        switch.to("on")
    raise RuntimeError(f"{len(found)} turns in {_LONGEST} runs of requests")


def _comparable(turn: Turn, variants: Sequence[str], concurrency: int) -> bool:
    kinds = {block.kind for block in turn.values()}
    if len(turn) != len(variants) or len(kinds) != 1:
        return False
    kind = kinds.pop()
    return kind is not None and kind[0].cg_mode.name == "FULL" and kind[1] == concurrency


@contextlib.contextmanager
def _kinds(manager: Any) -> Iterator[list[Any]]:
    """Keep in a list of one what the target's last dispatch was asked for, and answered."""
    kind: list[Any] = [None]
    inner = manager.dispatch

    def dispatch(num_reqs: int, *args: Any, **kwargs: Any) -> Any:
        desc = inner(num_reqs, *args, **kwargs)
        kind[0] = desc, num_reqs
        return desc

    manager.dispatch = dispatch
    try:
        yield kind
    finally:
        del manager.dispatch


def _one_run(
    llm: Any,
    switch: Switch,
    variants: Sequence[str],
    rng: random.Random,
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
            for variant in rng.sample(variants, len(variants)):
                steps = _Steps()
                switch.to(variant)
                for _ in range(BLOCK):
                    spent.clear()
                    kind[0] = None
                    start = time.perf_counter()
                    outputs = engine.step()
                    took = time.perf_counter() - start
                    steps.kinds.append(kind[0])
                    steps.parts.append({**spent, WHOLE: took})
                    # With the first that is done there are fewer than was asked for.
                    running = running and not any(output.finished for output in outputs)
                turn[variant] = steps.block()
                if not running:
                    break
            yield turn
    finally:
        engine.abort_request(begun)
        while engine.has_unfinished_requests():
            engine.step()
