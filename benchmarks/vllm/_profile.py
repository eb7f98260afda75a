"""Where the host time of a speculative step goes in a real vLLM, and what the hooks add to it.

Variants take turns within one run of requests: see ``_steps``. Parts are timed in turns of their
own, since their timers are a load too: what is said of the whole step comes from turns without.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks._measure import bootstrap
from benchmarks.vllm import _engine
from benchmarks.vllm._steps import BLOCK, WHOLE, Parts, Step, Turn, in_turns
from benchmarks.vllm._variants import (
    DECODES,
    SECONDS,
    SHARE,
    TIMED,
    Switch,
    beside_off,
    names,
    share_of_skipping,
    to_off,
)
from graphshare.adapters.vllm import sessions

_PREFILL = "propose / metadata build of the prefill"
# Where graphshare has its hooks; the draft's decodes build as they do without.
_HOOKED = tuple(label for label in TIMED.values() if label != DECODES)
# On vLLM 0.20.2 the rebuild goes away, which the decodes' builds found the caches warm from.
_REBUILT = (_PREFILL, DECODES)

HOOKED = "where graphshare has hooks"
STEP = "to the step of the engine"


def profile(llm: Any, options: Any) -> dict[str, Any]:
    """Parts of a step with a draft prefill on a full graph, in microseconds of the host."""
    (session,) = sessions()
    variants = names(session)
    found: dict[str, Any] = {}
    seconds = options.profile_seconds / (1.5 * len(options.concurrency) + 0.5)
    with Switch(session, _engine.runner()) as switch:
        for concurrency, turns in zip(
            options.concurrency, _by_concurrency(options.turns), strict=False
        ):
            ask = {"concurrency": concurrency, "seconds": seconds}
            whole = in_turns(llm, switch, variants, turns=turns, **ask)
            ask = {"concurrency": concurrency, "seconds": seconds / 2, "turns": turns // 2}
            with timed_parts(switch) as parts:  # which vary less than a step
                apart = in_turns(llm, switch, variants, parts=parts, **ask)
            found[str(concurrency)] = {
                name: _medians([turn[name][0].parts for turn in apart]) for name in variants
            } | compared(whole, apart)
            options.so_far(found)
        with timed_parts(switch) as parts:
            ask = {"concurrency": options.concurrency[0], "turns": options.turns[0] // 8}
            blocks = in_turns(
                llm, switch, ["on", "off"], parts=parts, block=BLOCK, seconds=seconds / 2, **ask
            )
        found[str(options.concurrency[0])]["steps_since_a_change"] = _since_a_change(blocks)
    return found


def _by_concurrency(turns: Sequence[int]) -> Iterator[int]:
    yield from turns
    yield from itertools.repeat(turns[-1])


def _medians(steps: Sequence[Parts]) -> dict[str, Any]:
    labels = sorted({label for parts in steps for label in parts})
    return {
        "steps": len(steps),
        "median_us": {
            label: round(statistics.median(each.get(label, 0.0) for each in steps) * 1e6, 1)
            for label in labels
        },
    }


def _hooked(variants: Iterable[str]) -> Callable[[Parts], float]:
    labels = _HOOKED + _REBUILT if "skipped" in variants else _HOOKED
    return lambda parts: sum(parts.get(label, 0.0) for label in labels)


def _step(parts: Parts) -> float:
    return parts[WHOLE]


def compared(whole: Sequence[Turn], apart: Sequence[Turn]) -> dict[str, Any]:
    """By how many microseconds a step takes longer than without hooks, turn by turn.

    Args:
        whole: Turns in which only whole steps were timed.
        apart: Turns in which their parts were timed too.
    """
    variants = list(whole[0])
    measured = [(HOOKED, apart, _hooked(variants)), (STEP, whole, _step)]
    found: dict[str, Any] = {"turns": {"whole": len(whole), "apart": len(apart)}}

    for what, turns, of in measured:
        times = {name: [of(turn[name][0].parts) for turn in turns] for name in variants}
        for name, rows in beside_off(times).items():
            added = bootstrap([(one - off) * 1e6 for one, off in rows])
            found.setdefault(f"{name}_adds_us", {})[what] = added._asdict()
    # In the order in which they ran.
    found[SECONDS] = [{name: _step(steps[0].parts) for name, steps in t.items()} for t in whole]
    steps = {name: [turn[name] for turn in found[SECONDS]] for name in variants}
    found["steps_to_off"] = to_off(steps)
    found["step_of_vllm_alone_us"] = bootstrap([each * 1e6 for each in steps["off"]])._asdict()
    if "skipped" in variants:
        rows = ("on", "off", "skipped")
        found[SHARE] = {
            what: share_of_skipping(
                [tuple(of(turn[name][0].parts) for name in rows) for turn in turns]
            )._asdict()
            for what, turns, of in measured
        }
    return found


def _since_a_change(blocks: Sequence[Turn]) -> dict[str, Any]:
    """What the hooks add in the first step of a block, and in those after it."""
    # The rebuild, where there is one, is no matter of a change.
    of = _hooked(())

    def adds(places: Sequence[int]) -> dict[str, float]:
        def mean(steps: Sequence[Step]) -> float:
            return statistics.mean(of(steps[place].parts) for place in places)

        added = [(mean(turn["on"]) - mean(turn["off"])) * 1e6 for turn in blocks]
        return bootstrap(added)._asdict()

    return {
        "blocks": len(blocks),
        "the first adds_us": adds([0]),
        "the others add_us": adds(range(1, BLOCK)),
    }


@contextmanager
def timed_parts(switch: Switch) -> Iterator[Parts]:
    """Note what the step at hand spends on which part, in seconds, until the end."""
    runner = _engine.runner()
    speculator = runner.speculator
    alike: list[tuple[Any, str, str]] = [
        (runner, "execute_model", "execute_model"),
        (runner, "prepare_inputs", "execute_model / prepare_inputs"),
        (runner, "prepare_attn", "execute_model / block tables and slots"),
        (runner, "sample_tokens", "sample_tokens"),
        (runner, "sample", "sample_tokens / sample"),
        (speculator, "propose", "sample_tokens / propose"),
        (runner.block_tables, "compute_slot_mappings", "slot mappings, target and draft"),
    ]
    spent: Parts = defaultdict(float)
    undo: list[tuple[Any, str, Any]] = []

    def timing(inner: Callable[..., Any], label: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                took = time.perf_counter() - start
                # 0.20.2 builds by the same method for both.
                several = kwargs.get("max_query_len", 1) > 1
                spent[_PREFILL if label == DECODES and several else label] += took

        return run

    for target, name, label in alike:
        undo.append((target, name, vars(target).get(name)))
        setattr(target, name, timing(getattr(target, name), label))
    switch.wrap(
        {place: lambda inner, label=label: timing(inner, label) for place, label in TIMED.items()}
    )
    try:
        yield spent
    finally:
        switch.end()
        for target, name, before in reversed(undo):
            if before is None:
                delattr(target, name)
            else:
                setattr(target, name, before)
