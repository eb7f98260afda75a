"""Where the host time of a speculative step goes in a real vLLM."""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from benchmarks._measure import bootstrap
from benchmarks.vllm import _engine
from benchmarks.vllm._variants import SHARE, as_variant, names, share_of_skipping
from graphshare.adapters.vllm import sessions

_TARGET = "execute_model / metadata build"
_PREFILL = "propose / metadata build of the prefill"
_DECODES = "propose / metadata builds of the decodes"
_STEP = "step of the engine"
# Where graphshare has its hooks.
_HOOKED = (
    _TARGET,
    "execute_model / dispatch",
    "execute_model / graph launch",
    "propose / prefill dispatch",
    "propose / prefill launch",
)
# On vLLM 0.20.2 the rebuild goes away, which the decodes' builds found the caches warm from.
_REBUILT = (_PREFILL, _DECODES)

Step = dict[str, float]


def profile(llm: Any, options: Any) -> dict[str, Any]:
    """Parts of a step with a draft prefill on a full graph, in microseconds of the host.

    Where graphshare takes part, its hooks are on and off from one run of the same requests to the
    next, so that the same steps can be compared, each with its own.
    """
    session = next(iter(sessions()), None)
    variants = ["vllm alone"] if session is None else names(session)
    rng = random.Random(0)
    found: dict[str, Any] = {}
    for concurrency in options.concurrency:
        runs: dict[str, list[list[Step]]] = {name: [] for name in variants}
        for _ in range(options.profiled):
            for name in rng.sample(variants, len(variants)):
                with _variant(name, session):
                    runs[name].append(_steps(llm, concurrency))
        found[str(concurrency)] = {name: _medians(each) for name, each in runs.items()}
        if session is not None:
            found[str(concurrency)] |= _compared(runs)
    return found


def _variant(name: str, session: Any) -> AbstractContextManager[None]:
    if session is None:
        return nullcontext()
    return as_variant(name, session, _engine.runner().speculator)


def _steps(llm: Any, concurrency: int) -> list[Step]:
    steps: list[Step] = []
    with _timed(llm, steps):
        _engine.serve(llm, _engine.prompts(concurrency, seed=8), new=64, every=1, name="profile")
    return steps


def _whole(step: Step) -> bool:
    return step.get("propose / prefill launch", 0.0) > 0.0


def _medians(runs: list[list[Step]]) -> dict[str, Any]:
    whole = [step for run in runs for step in run if _whole(step)]
    labels = sorted({label for step in whole for label in step})
    return {
        "steps": len(whole),
        "median_us": {
            label: round(statistics.median(step.get(label, 0.0) for step in whole) * 1e6, 1)
            for label in labels
        },
    }


def _compared(runs: dict[str, list[list[Step]]]) -> dict[str, Any]:
    """By how many microseconds a step takes longer than without hooks, step by step."""
    labels = _HOOKED + _REBUILT if "skipped" in runs else _HOOKED

    def hooked(step: Step) -> float:
        return sum(step.get(label, 0.0) for label in labels)

    def added(to: str, of: Callable[[Step], float]) -> dict[str, float]:
        pairs = zip(runs[to], runs["off"], strict=True)
        both = [pair for run in pairs for pair in zip(*run, strict=True)]
        return bootstrap(
            [(of(one) - of(off)) * 1e6 for one, off in both if _whole(one) and _whole(off)]
        )._asdict()

    found: dict[str, Any] = {
        f"{name}_adds_us": {
            "where graphshare has hooks": added(name, hooked),
            "to the step of the engine": added(name, lambda step: step[_STEP]),
        }
        for name in runs
        if name != "off"
    }
    if "skipped" in runs:
        rows: list[tuple[float, float, float]] = []
        for run in zip(*(runs[name] for name in ("on", "off", "skipped")), strict=True):
            whole = [each for each in zip(*run, strict=True) if all(map(_whole, each))]
            rows += [(hooked(on), hooked(off), hooked(skipped)) for on, off, skipped in whole]
        found[SHARE] = share_of_skipping(rows)._asdict()
    return found


@contextmanager
def _timed(llm: Any, steps: list[Step]) -> Iterator[None]:
    """Note in ``steps`` what each step of the engine spent on which part, in seconds."""
    runner = _engine.runner()
    speculator = runner.speculator
    parts: list[tuple[Any, str, str]] = [
        (runner, "execute_model", "execute_model"),
        (runner, "prepare_inputs", "execute_model / prepare_inputs"),
        (runner, "prepare_attn", "execute_model / block tables and slots"),
        (runner.model_state, "prepare_attn", _TARGET),
        (runner.cudagraph_manager, "dispatch", "execute_model / dispatch"),
        (runner.cudagraph_manager, "run_fullgraph", "execute_model / graph launch"),
        (runner, "sample_tokens", "sample_tokens"),
        (runner, "sample", "sample_tokens / sample"),
        (speculator, "propose", "sample_tokens / propose"),
        (speculator, "_build_draft_attn_metadata", _DECODES),
        (speculator.prefill_cudagraph_manager, "dispatch", "propose / prefill dispatch"),
        (speculator.prefill_cudagraph_manager, "run_fullgraph", "propose / prefill launch"),
        (speculator.decode_cudagraph_manager, "run_fullgraph", "propose / decode launches"),
        (runner.block_tables, "compute_slot_mappings", "slot mappings, target and draft"),
    ]
    spent: dict[str, float] = defaultdict(float)
    undo: list[tuple[Any, str, Any]] = []

    def time_part(target: Any, name: str, label: str) -> None:
        inner = getattr(target, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                took = time.perf_counter() - start
                # 0.20.2 builds by the same method for both.
                several = kwargs.get("max_query_len", 1) > 1
                spent[_PREFILL if label == _DECODES and several else label] += took

        undo.append((target, name, vars(target).get(name)))
        setattr(target, name, run)

    for part in parts:
        time_part(*part)
    engine = llm.llm_engine
    inner_step = engine.step

    def step() -> Any:
        spent.clear()
        start = time.perf_counter()
        result = inner_step()
        spent[_STEP] = time.perf_counter() - start
        steps.append(dict(spent))
        return result

    engine.step = step
    try:
        yield
    finally:
        del engine.step
        for target, name, before in reversed(undo):
            if before is None:
                delattr(target, name)
            else:
                setattr(target, name, before)
